"""One file per outside checkpoint format: each writes it and reads it back."""
