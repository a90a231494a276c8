"""Recorded traces: what the target said about a text, written once, small, and trained from."""
