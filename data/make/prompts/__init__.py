"""Generator of `data/prompts/general.jsonl`."""
