"""`outrider doctor`: checks of a run before its first step."""
