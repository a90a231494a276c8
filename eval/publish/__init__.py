"""`outrider publish`: export, verification, model card and upload of a drafter."""
