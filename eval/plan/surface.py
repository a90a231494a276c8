"""Which draft to ask for: speedup over depths, widths, nodes, batches and contexts.

A plan joins two things that are measured apart: what a tree keeps of its guesses, and what
forwards take, measured here (`timing.Timing`) or foreseen for a machine that is not here
(`machines.Foreseen`). For every shape of a draft it says

    tau       tokens per round
    round     draft + verify + rest, ms
    speedup   tau * ms of a plain step / ms of a round; batches emit batch times as many in both

The trees are the best ones by a table of chances, of the k-th child at each depth to be accepted.
Worked example, table [[0.6, 0.2], [0.5, 0.1]] and 3 nodes: the paths are worth 0.6 and 0.2 at
depth 1, 0.3, 0.06, 0.1 and 0.02 at depth 2; the best tree has 0.6 + 0.3 + 0.2, so tau = 2.1, and
the chain of two has 0.6 + 0.3, so tau = 1.9.

Source: acceptance by rank and depth, Chen et al. 2024, "Sequoia", section 3, arXiv:2402.12374; the
choice over measured times, its hardware-aware section.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from outrider.eval.plan.roofline import Foreseen, Machine, ModelSize, no_room
from outrider.eval.plan.round_costs import PLAIN, Parts, Shape
from outrider.eval.theory import walltime_from_times
from outrider.models.decode import tree_shapes as shapes
from outrider.models.decode.tree_shapes import Paths

FORMAT = "outrider-plan-1"
ASSUMPTIONS = (
    "A tree is static: the likeliest `nodes` nodes of at most `width` children each, as the table "
    "of ranks has them (decode=static_tree).",
    "The drafter guesses as it does on the text that the target wrote to these prompts; penalties "
    "and bans, where there are any, are not applied to its guesses.",
    "Guesses are the drafter's favourites, verified by `match` above temperature 0 "
    "(decode.draft=best).",
)


@runtime_checkable
class Clock(Protocol):
    """Where times come from: `timing.Timing` or `machines.Foreseen`."""

    @property
    def name(self) -> str: ...

    @property
    def assumptions(self) -> tuple[str, ...]: ...

    def parts(self, shape: Shape, batch: int, context: int) -> Parts:
        """Milliseconds of a round of this shape, with so many cached tokens per prompt."""
        ...

    def fields(self) -> dict[str, Any]:
        """What the times come from, for json."""
        ...


Key = tuple[int, int, int]  # depth, width and nodes of a draft
Tau = Callable[[Paths], float]  # tokens per round of a static tree


class Grid(NamedTuple):
    """What is tried. A chain of every depth is, whatever the widths and nodes.

    Attributes:
        depths: levels drafted.
        widths: children per node at most; 1 is a chain.
        nodes: drafted nodes that the target verifies, of trees.
        batches: prompts at once.
        contexts: cached tokens of each.
    """

    depths: Sequence[int]
    widths: Sequence[int] = (1,)
    nodes: Sequence[int] = ()
    batches: Sequence[int] = (1,)
    contexts: Sequence[int] = (256,)


class Row(NamedTuple):
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
    def shape(self) -> str:
        """`plain`, `chain 4` or `tree 4x8, 16 nodes`."""
        if self.depth == 0:
            return "plain"
        if self.width == 1:
            return f"chain {self.depth}"
        return f"tree {self.depth}x{self.width}, {self.nodes} nodes"

    @property
    def key(self) -> Key:
        return self.depth, self.width, self.nodes

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return 1000 * self.batch * self.tau / self.round_ms


@dataclass(frozen=True)
class Plan:
    """All rows, and what they rest on.

    Attributes:
        warnings: what is foreseen although it cannot be.
    """

    rows: list[Row]
    table: list[list[float]]
    name: str
    assumptions: tuple[str, ...]
    times: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def recommended(self) -> list[Row]:
        return recommended(self.rows)

    def fields(self) -> dict[str, Any]:
        """For json."""
        return {
            "format": FORMAT,
            "machine": self.name,
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
            "table": self.table,
            "times": self.times,
            "recommended": [_fields(row) for row in self.recommended],
            "rows": [_fields(row) for row in self.rows],
        }


def make_plan(table: Float[Tensor, "D K"], tau: Tau, clock: Clock, grid: Grid) -> Plan:
    """The whole surface, with its assumptions.

    Args:
        table: table[d - 1, k] is the chance that the child of rank k at depth d is the accepted
            one, given that its parent was.

    Raises:
        ValueError: the table holds no such chances, or the grid goes beyond table or clock.
    """
    rows = surface(table, tau, clock, grid)
    said = (*ASSUMPTIONS, *clock.assumptions)
    return Plan(rows, table.double().tolist(), clock.name, said, clock.fields())


def predicted(
    table: Float[Tensor, "D K"],
    tau: Tau,
    machine: Machine,
    target: ModelSize,
    drafter: Sequence[ModelSize],
    grid: Grid,
    budget: int | None = None,
) -> Plan:
    """The same for a machine that is not here.

    Args:
        drafter: what its forwards read, as `machines.drafter_sizes` gives it.
        budget: cached tokens that the drafter reads at most; None: all.
    """
    plan = make_plan(table, tau, Foreseen(machine, target, tuple(drafter), budget), grid)
    warnings = []
    for context in sorted(set(grid.contexts)):
        wrong = (no_room(machine, target, drafter, n, context) for n in sorted(set(grid.batches)))
        warnings.append(next(filter(None, wrong), ""))  # larger batches fit even less
    return replace(plan, warnings=tuple(filter(None, warnings)))


def surface(table: Float[Tensor, "D K"], tau: Tau, clock: Clock, grid: Grid) -> list[Row]:
    """A row for every shape in every setting, plain decoding first."""
    tried = [
        (depth, width, Shape.of(paths), tau(paths))
        for (depth, width, _), paths in drafts(table, grid).items()
    ]
    rows = []
    for batch, context in product(sorted(set(grid.batches)), sorted(set(grid.contexts))):
        plain = clock.parts(PLAIN, batch, context).whole
        rows.append(Row(batch, context, 0, 0, 0, 1.0, 0.0, plain, plain, plain, 1.0))
        for depth, width, shape, tokens in tried:
            draft, verify, rest = clock.parts(shape, batch, context)
            speedup = walltime_from_times(tokens, draft, verify, rest, plain)
            whole = draft + verify + rest
            rows.append(
                Row(batch, context, depth, width, shape.nodes, tokens, draft, verify, whole, plain,
                    speedup)
            )  # fmt: skip
    return rows


def drafts(table: Float[Tensor, "D K"], grid: Grid) -> dict[Key, Paths]:
    """Every chain, and every tree that has the depth it is looked for at and is none of the others.

    Raises:
        ValueError: the table does not know a depth or a width.
    """
    depths, widths, counts = (sorted(set(axis)) for axis in (grid.depths, grid.widths, grid.nodes))
    found: dict[Key, Paths] = {}
    for depth in depths:
        found[depth, 1, depth] = shapes.best_first(table, depth, widest=1, deepest=depth)
    for depth, width, nodes in product(depths, widths, counts):
        paths = shapes.best_first(table, nodes, widest=width, deepest=depth)
        reaches = len(paths) == nodes > len(paths[-1]) == depth
        if reaches and paths not in found.values():
            found[depth, width, nodes] = paths
    return found


def recommended(rows: Sequence[Row]) -> list[Row]:
    """The fastest row of every batch and context; of equals the one with fewer nodes.

    That is plain decoding where no draft pays.
    """
    best: dict[tuple[int, int], Row] = {}
    for row in sorted(rows, key=lambda row: (row.batch, row.context, row.nodes, row.depth)):
        known = best.get((row.batch, row.context))
        if known is None or row.speedup > known.speedup:
            best[row.batch, row.context] = row
    return list(best.values())


def _fields(row: Row) -> dict[str, Any]:
    return {**row._asdict(), "shape": row.shape, "tokens_per_second": row.tokens_per_second}
