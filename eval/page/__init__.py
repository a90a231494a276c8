"""`outrider report`: one page on a run, a search or several runs."""
