"""Text of the embedded tiny target: conversations to train on, and held-out prompts."""
