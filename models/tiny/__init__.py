"""The embedded tiny target (`data/make/tiny_target.py`): weights, configuration, tokenizer."""
