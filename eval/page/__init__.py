"""`outrider report`: what a run, a search or several runs have shown, on one page."""
