"""Generator of `data/tiny/*.jsonl`."""
