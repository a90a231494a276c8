"""What a drafter is worth: decoding, metrics, theory and the report."""
