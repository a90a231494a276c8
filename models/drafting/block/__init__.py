"""Drafters that guess a whole block of tokens in one pass."""
