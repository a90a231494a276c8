"""Text on its way to training: conversations, answer masks, packed rows, batches."""
