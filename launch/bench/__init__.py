"""launch/bench."""
