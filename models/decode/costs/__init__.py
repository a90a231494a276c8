"""Measured times of rounds: the cost model that `outrider plan` and `decode=auto` share."""
