"""Reproducible choices whose probabilities depend on their context.

A language model can only learn what is not uniform. Every context (a person, a place, a dish)
therefore has a fixed ranking of the options, and the rank decides how often an option is
chosen. The text has real entropy that a model can nevertheless learn.

Only `random.Random.random()` is used, the one method whose stream Python keeps between versions.
"""

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache


def ranked(options: Sequence[str], *context: object) -> tuple[str, ...]:
    """Return the options in the order that this context prefers; equal contexts, equal orders."""
    return _ordered(tuple(options), "/".join(map(str, context)))


@lru_cache(maxsize=1 << 16)
def _ordered(options: tuple[str, ...], context: str) -> tuple[str, ...]:
    # a lambda, because a nested function is wrapped anew at each call where types are checked
    return tuple(sorted(options, key=lambda x: hashlib.sha256(f"{context}|{x}".encode()).digest()))


@lru_cache(maxsize=1 << 10)
def _weights(count: int, slope: float) -> tuple[float, ...]:
    return tuple((rank + 1) ** -slope for rank in range(count))


class Dice:
    """A seeded source of choices; equal seeds give equal choices on every Python version."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def number(self, low: int, high: int) -> int:
        """Return an integer, low..high inclusive, uniform."""
        return low + int(self._random.random() * (high - low + 1))

    def choose(self, options: Sequence[str], *context: object, slope: float = 1.3) -> str:
        """Return one option; the one that the context ranks r-th has weight (r + 1) ** -slope."""
        order = ranked(options, *context)
        weights = _weights(len(order), slope)
        point = self._random.random() * sum(weights)
        for option, weight in zip(order, weights, strict=True):
            point -= weight
            if point < 0:
                return option
        return order[-1]

    def several(self, options: Sequence[str], count: int, *context: object) -> list[str]:
        """Return `count` different options, each chosen by `choose` among those still left."""
        left, chosen = list(options), []
        for _ in range(count):
            chosen.append(self.choose(left, *context))
            left.remove(chosen[-1])
        return chosen
