"""Tiny random models of every family that Outrider supports."""

from outrider.launch.bench.tiny_families import ATTENTION, RECURRENT, known_families, small_model

__all__ = ["FAMILIES", "HYBRIDS", "small_model"]

FAMILIES = ATTENTION
HYBRIDS = {name: pair for name, pair in known_families().items() if name in RECURRENT}
