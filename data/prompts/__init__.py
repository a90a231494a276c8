"""Prompts for self-generation (`general.jsonl`) and the held-out suite (`eval.jsonl`)."""
