"""Tries of the chains of several drafters: the policy of `decode=merged_tree`."""
