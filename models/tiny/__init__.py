"""The embedded tiny target: weights, configuration and tokenizer, made by `models/make_tiny.py`."""
