"""Rounds of a few shapes, decoded by turns on the same prompts.

A machine is seldom the same from one minute to the next. So every shape has its turn beside plain
decoding, again and again, and what is compared comes out of the same minutes: the shapes that a
plan is brought in line with (`corners`), and those that it is then held against.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from outrider.eval.plan.replay import whole
from outrider.eval.plan.round_costs import Parts
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.rules import BEST
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree_shapes import Paths

TURNS = 5
PLAINLY: Paths = ()


class Turn(NamedTuple):
    """Milliseconds of a round of the batch, decoded, and tokens per prompt."""

    parts: Parts
    tau: float


@dataclass(frozen=True)
class Turns:
    """What was decoded: of every batch one dict per turn, plain decoding among its shapes."""

    seen: Mapping[int, Sequence[Mapping[Paths, Turn]]]

    def parts(self, batch: int, paths: Paths) -> Parts:
        """Medians, each turn at the pace of its plain rounds, so that drift cancels."""
        turns = self.seen[batch]
        plain = [turn[PLAINLY].parts.whole for turn in turns]
        pace = [median(plain) / whole for whole in plain]
        parts = [turn[paths].parts for turn in turns]
        return Parts(*(
            median(p * ms for p, ms in zip(pace, column, strict=True))
            for column in zip(*parts, strict=True)
        ))  # fmt: skip

    def tau(self, batch: int, paths: Paths) -> float:
        return median(turn[paths].tau for turn in self.seen[batch])

    def speedup(self, batch: int, paths: Paths) -> float:
        """Against plain decoding of the same turn, of a batch that stays full."""
        return median(
            turn[paths].tau * turn[PLAINLY].parts.whole / turn[paths].parts.whole
            for turn in self.seen[batch]
        )


def corners(drafts: Sequence[Paths]) -> list[Paths]:
    """Plain decoding, and shapes that others lie between or near, as far as there are some.

    The shortest chain and the longest; of trees the smallest, the smallest of the deepest, and the
    largest.
    """
    chains = [paths for paths in drafts if is_chain(paths)]
    trees = [paths for paths in drafts if not is_chain(paths)]
    found = [PLAINLY]
    if chains:
        found += [min(chains, key=len), max(chains, key=len)]
    if trees:
        depth = max(len(paths[-1]) for paths in trees)
        deepest = [paths for paths in trees if len(paths[-1]) == depth]
        found += [min(trees, key=_size), min(deepest, key=_size), max(trees, key=_size)]
    return list(dict.fromkeys(found))


def is_chain(paths: Paths) -> bool:
    return len(paths) == len(paths[-1])


def _size(paths: Paths) -> tuple[int, int]:
    return len(paths), len(paths[-1])


def policy_of(paths: Paths) -> Policy | None:
    """The drafter's favourites in this shape."""
    if not paths:
        return None
    return Chain(len(paths), BEST) if is_chain(paths) else StaticTree(paths)


def decode(
    shapes: Mapping[int, Sequence[Paths]],
    engine: Callable[[Policy | None], Engine],
    requests: Callable[[int], list[Request]],
    bar: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Turns:
    """All shapes of every batch, `TURNS` times.

    Args:
        shapes: of each batch, plain decoding first.
        requests: what a batch is asked.
        bar: goes through the steps, and shows how far they are.
    """
    seen: dict[int, list[dict[Paths, Turn]]] = {batch: [] for batch in shapes}
    batches = list(shapes)
    for step in bar(range(TURNS * len(batches))):
        batch = batches[step % len(batches)]
        spent: dict[Paths, list[Spent]] = {paths: [] for paths in shapes[batch]}
        for part in parts_of(requests(batch), batch):
            for paths, so_far in spent.items():
                so_far.append(_spent(engine(policy_of(paths)), part, batch))
        seen[batch].append({paths: _turn(every) for paths, every in spent.items()})
    return Turns(seen)


def parts_of(requests: list[Request], batch: int) -> list[list[Request]]:
    """What is decoded by all shapes before the next part: a prompt, or all where they fill a batch.

    The shorter, the nearer to each other are those that are compared.
    """
    return [[request] for request in requests] if batch == 1 else [requests]


class Spent(NamedTuple):
    """Seconds of the models and in all, rounds of the batch, guesses kept in those of a prompt."""

    draft: float
    target: float
    whole: float
    rounds: int
    kept: list[int]


def _spent(engine: Engine, requests: list[Request], batch: int) -> Spent:
    outputs = engine.generate_all(requests, batch)
    draft, target, seconds = (
        sum(getattr(out.clock, part) for out in outputs) for part in ("draft", "target", "rounds")
    )
    kept = [count for out in outputs for count in whole(out.accepted)]
    return Spent(draft, target, seconds, engine.rounds, kept)


def _turn(every: Sequence[Spent]) -> Turn:
    rounds = max(1, sum(one.rounds for one in every))
    draft, target, seconds = (
        1000 * sum(column) / rounds for column in zip(*(one[:3] for one in every), strict=True)
    )
    kept = [count for one in every for count in one.kept]
    tau = 1 + sum(kept) / max(1, len(kept))
    return Turn(Parts(draft, target, seconds - draft - target), tau)
