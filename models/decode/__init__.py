"""The speculative decoder: draft, verify, commit."""
