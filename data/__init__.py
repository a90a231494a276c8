"""Training data: conversations, answer masks, packed rows, batches and recorded traces."""
