"""`outrider doctor`: what is right, doubtful and wrong about a run, before its first step."""
