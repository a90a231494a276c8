"""Interleaved decoding of a few draft shapes on the same prompts.

The speed of a machine drifts from minute to minute. Every repetition therefore decodes all shapes
right after plain decoding, and ratios are taken within a repetition.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from outrider.data.reporter import Reporter
from outrider.eval.plan.replay import complete_rounds
from outrider.models.decode.costs.round_costs import RoundCost
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Output, Request
from outrider.models.decode.rules.rule_table import BEST
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree_shapes import Paths

REPEATS = 3
NO_DRAFT: Paths = ()
BatchRun = tuple[list[Output], int]  # answers, and rounds of the batch


class Repetition(NamedTuple):
    """Milliseconds of a round of the batch, and tokens per round and prompt."""

    parts: RoundCost
    tau: float


@dataclass(frozen=True)
class InterleavedRuns:
    """Results per batch and repetition, plain decoding (`NO_DRAFT`) among the shapes."""

    repetitions: Mapping[int, Sequence[Mapping[Paths, Repetition]]]

    def parts(self, batch: int, paths: Paths) -> RoundCost:
        """Return medians of repetitions scaled to the median plain round: drift cancels."""
        repetitions = self.repetitions[batch]
        plain = [shapes[NO_DRAFT].parts.total for shapes in repetitions]
        pace = [median(plain) / total for total in plain]
        parts = [shapes[paths].parts for shapes in repetitions]
        return RoundCost(*(
            median(p * ms for p, ms in zip(pace, column, strict=True))
            for column in zip(*parts, strict=True)
        ))  # fmt: skip

    def tau(self, batch: int, paths: Paths) -> float:
        return median(shapes[paths].tau for shapes in self.repetitions[batch])

    def speedup(self, batch: int, paths: Paths) -> float:
        """Return the speedup over plain decoding of the same repetition, for a full batch."""
        return median(
            shapes[paths].tau * shapes[NO_DRAFT].parts.total / shapes[paths].parts.total
            for shapes in self.repetitions[batch]
        )


def calibration_shapes(drafts: Sequence[Paths]) -> list[Paths]:
    """Return plain decoding and the shapes that the others are interpolated between.

    These are the shortest and longest chain, the smallest tree, the smallest of the deepest trees
    and the largest tree, as far as there are any.
    """
    chains = [paths for paths in drafts if is_chain(paths)]
    trees = [paths for paths in drafts if not is_chain(paths)]
    shapes = [NO_DRAFT]
    if chains:
        shapes += [min(chains, key=len), max(chains, key=len)]
    if trees:
        depth = max(len(paths[-1]) for paths in trees)
        deepest = [paths for paths in trees if len(paths[-1]) == depth]
        shapes += [min(trees, key=_size), min(deepest, key=_size), max(trees, key=_size)]
    return list(dict.fromkeys(shapes))


def is_chain(paths: Paths) -> bool:
    return len(paths) == len(paths[-1])


def _size(paths: Paths) -> tuple[int, int]:
    return len(paths), len(paths[-1])


def tree_policy(paths: Paths) -> Policy | None:
    """Return the policy that drafts this shape with the drafter's top-k tokens; None is plain."""
    if not paths:
        return None
    return Chain(len(paths), BEST) if is_chain(paths) else StaticTree(paths)


def decode(
    shapes: Mapping[int, Sequence[Paths]],
    engine: Callable[[Policy | None], Engine],
    requests: Callable[[int], list[Request]],
    reporter: Reporter,
) -> InterleavedRuns:
    """Decode all shapes of every batch, `REPEATS` times, and show the progress.

    Args:
        shapes: of every batch, plain decoding first.
    """
    repetitions: dict[int, list[dict[Paths, Repetition]]] = {batch: [] for batch in shapes}
    groups = {batch: request_groups(requests(batch), batch) for batch in shapes}
    total = REPEATS * sum(len(shapes[batch]) for batch in shapes)
    with reporter.progress("decoding", total, "draft shapes") as progress:
        for batch in list(shapes) * REPEATS:
            runs: dict[Paths, list[BatchRun]] = {paths: [] for paths in shapes[batch]}
            for group in groups[batch]:
                for paths, shape_runs in runs.items():
                    shape_runs.append(_decode_shape(engine(tree_policy(paths)), group, batch))
                    progress.advance(1 / len(groups[batch]))
            repetitions[batch].append({paths: _repetition(group) for paths, group in runs.items()})
    return InterleavedRuns(repetitions)


def request_groups(requests: list[Request], batch: int) -> list[list[Request]]:
    """Return the groups that all shapes decode before the next group.

    One prompt each for batch 1, so that compared runs are close in time; all requests otherwise.
    """
    return [[request] for request in requests] if batch == 1 else [requests]


def _decode_shape(engine: Engine, requests: list[Request], batch: int) -> BatchRun:
    return engine.generate_all(requests, batch), engine.rounds


def _repetition(runs: Sequence[BatchRun]) -> Repetition:
    outputs = [out for answers, _ in runs for out in answers]
    rounds = max(1, sum(count for _, count in runs))
    draft, target, seconds = (
        1000 * sum(getattr(out.times, part) for out in outputs) / rounds
        for part in ("draft", "target", "rounds")
    )
    accepted = [count for out in outputs for count in complete_rounds(out.accepted)]
    tau = 1 + sum(accepted) / max(1, len(accepted))
    return Repetition(RoundCost(draft, target, seconds - draft - target), tau)
