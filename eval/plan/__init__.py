"""eval/plan."""
