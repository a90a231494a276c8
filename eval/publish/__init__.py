"""`outrider publish`: a drafter in somebody else's format, proved, described, uploaded."""
