"""Predicted decoding times and speedups over shapes, batches and contexts."""
