"""The lossless speculative decoder: draft, verify, commit."""
