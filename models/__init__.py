"""The drafters, the target they draft for, and the formats their checkpoints travel in."""
