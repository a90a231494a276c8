"""Drafters, the target model, decoding, and checkpoint formats."""
