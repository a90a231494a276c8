"""Training: configuration checks, objective, optimizer, loop, checkpoints, metrics."""
