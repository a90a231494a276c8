"""The controller of `decode=auto`: what a round drafts, by measured cost and acceptance."""
