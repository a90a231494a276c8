"""Prompts for self-generation (`general.jsonl`), and suites (`eval.jsonl`, `copying.jsonl`)."""
