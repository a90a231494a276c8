"""Predicted speedup over depths, widths, nodes, batches and contexts.

A plan combines two separate measurements: the acceptance of a draft shape, and the time of its
forwards, measured here (`round_costs.MeasuredTimes`) or predicted for another machine
(`roofline.RooflineTimes`). For every shape it gives

    tau       tokens per round
    round     draft + verify + rest, ms
    speedup   tau * ms of a plain step / ms of a round; a batch emits batch times as many in both

The trees are the best ones by a table of the probability that the k-th child at each depth is
accepted. Worked example, table [[0.6, 0.2], [0.5, 0.1]] and 3 nodes: the paths have probabilities
0.6 and 0.2 at depth 1, 0.3, 0.06, 0.1 and 0.02 at depth 2; the best tree has 0.6 + 0.3 + 0.2, so
tau = 2.1, and the chain of two has 0.6 + 0.3, so tau = 1.9.

Source: acceptance by rank and depth, Chen et al. 2024, "Sequoia", section 3, arXiv:2402.12374; the
choice over measured times, its hardware-aware section.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from outrider.eval.plan.roofline import RooflineTimes
from outrider.eval.theory import speedup_from_times
from outrider.models.decode import tree_shapes
from outrider.models.decode.costs.round_costs import PLAIN, DraftShape, Grid, MeasuredTimes
from outrider.models.decode.tree_shapes import Paths

FORMAT = "outrider-plan-1"
ASSUMPTIONS = (
    "Trees are static: the `nodes` most probable nodes of at most `width` children each, by the "
    "table of ranks (decode=static_tree).",
    "The drafter's acceptance is that on the target's own answers to these prompts; penalties and "
    "banned tokens are not applied to its draft tokens.",
    "Draft tokens are the drafter's top-k, verified by `match` above temperature 0 "
    "(decode.draft=best).",
)


TimeModel = MeasuredTimes | RooflineTimes
DraftKey = tuple[int, int, int]  # depth, width and nodes of a draft
TauFn = Callable[[Paths], float]  # tokens per round of a static tree


class PlanRow(NamedTuple):
    """One shape in one setting; depth 0 is plain decoding."""

    batch: int
    context: int
    depth: int
    width: int
    nodes: int
    tau: float
    draft_ms: float
    verify_ms: float
    round_ms: float
    plain_ms: float
    speedup: float

    @property
    def label(self) -> str:
        """`plain`, `chain 4` or `tree 4x8, 16 nodes`."""
        if self.depth == 0:
            return "plain"
        if self.width == 1:
            return f"chain {self.depth}"
        return f"tree {self.depth}x{self.width}, {self.nodes} nodes"

    @property
    def key(self) -> DraftKey:
        return self.depth, self.width, self.nodes

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.batch * self.tau / self.round_ms

    def fields(self) -> dict[str, Any]:
        return {**self._asdict(), "shape": self.label, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Plan:
    """All rows, their inputs, and warnings of settings that exceed the machine's memory."""

    rows: list[PlanRow]
    table: list[list[float]]
    name: str
    assumptions: tuple[str, ...]
    times: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def recommended(self) -> list[PlanRow]:
        return recommended(self.rows)

    def fields(self) -> dict[str, Any]:
        """Return the content of `plan/<out>.json`."""
        return {
            "format": FORMAT,
            "machine": self.name,
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
            "table": self.table,
            "times": self.times,
            "recommended": [row.fields() for row in self.recommended],
            "rows": [row.fields() for row in self.rows],
        }


def make_plan(table: Float[Tensor, "D K"], tau: TauFn, times: TimeModel, grid: Grid) -> Plan:
    """Return the plan of a grid.

    Args:
        table: of `eval/rank_tables.py`.

    Raises:
        ValueError: the table is invalid, or the grid exceeds the table or the measured times.
    """
    rows, assumptions = surface(table, tau, times, grid), (*ASSUMPTIONS, *times.assumptions)
    warnings = times.memory_warnings(grid) if isinstance(times, RooflineTimes) else ()
    return Plan(rows, table.double().tolist(), times.name, assumptions, times.fields(), warnings)


def surface(table: Float[Tensor, "D K"], tau: TauFn, times: TimeModel, grid: Grid) -> list[PlanRow]:
    """Return a row for every shape in every setting, plain decoding first."""
    shapes = [
        (depth, width, DraftShape.of(paths), tau(paths))
        for (depth, width, _), paths in draft_trees(table, grid).items()
    ]
    rows = []
    for batch, context in product(sorted(set(grid.batches)), sorted(set(grid.contexts))):
        plain = times.parts(PLAIN, batch, context).total
        rows.append(PlanRow(batch, context, 0, 0, 0, 1.0, 0.0, plain, plain, plain, 1.0))
        for depth, width, shape, tokens in shapes:
            draft, verify, rest = times.parts(shape, batch, context)
            ms = draft, verify, draft + verify + rest, plain
            speedup = speedup_from_times(tokens, draft, verify, rest, plain)
            rows.append(PlanRow(batch, context, depth, width, shape.nodes, tokens, *ms, speedup))
    return rows


def draft_trees(table: Float[Tensor, "D K"], grid: Grid) -> dict[DraftKey, Paths]:
    """Return every chain, and every distinct tree that reaches its depth with all its nodes.

    Raises:
        ValueError: a depth or a width is outside the table.
    """
    depths, widths, counts = (sorted(set(axis)) for axis in (grid.depths, grid.widths, grid.nodes))
    trees: dict[DraftKey, Paths] = {}
    for depth in depths:
        trees[depth, 1, depth] = tree_shapes.best_first(table, depth, widest=1, deepest=depth)
    for depth, width, nodes in product(depths, widths, counts):
        paths = tree_shapes.best_first(table, nodes, widest=width, deepest=depth)
        complete = len(paths) == nodes > len(paths[-1]) == depth
        if complete and paths not in trees.values():
            trees[depth, width, nodes] = paths
    return trees


def recommended(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the fastest row of every batch and context; of equals the one with fewer nodes.

    It is plain decoding where no draft is faster.
    """
    best: dict[tuple[int, int], PlanRow] = {}
    for row in sorted(rows, key=lambda row: (row.batch, row.context, row.nodes, row.depth)):
        if row.speedup > best.setdefault((row.batch, row.context), row).speedup:
            best[row.batch, row.context] = row
    return list(best.values())
