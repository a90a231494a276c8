"""Recorded traces: the target's hidden states and top tokens, stored compactly for training."""
