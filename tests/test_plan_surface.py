"""Plans: worked examples with fake times, limits of the roofline, output."""

import io
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.console import Console
from outrider.eval.plan.roofline import MACHINES, ModelSize, RooflineTimes
from outrider.eval.plan.show import Check, print_plan, write_plan
from outrider.eval.plan.surface import (
    Plan,
    PlanRow,
    draft_trees,
    make_plan,
    recommended,
    surface,
)
from outrider.models.decode.costs.forward_times import measure_forwards
from outrider.models.decode.costs.round_costs import (
    PLAIN,
    DraftShape,
    Grid,
    MeasuredTimes,
    RoundCost,
    TimeGrid,
)
from outrider.models.decode.tree_shapes import expected
from tests import tiny

TABLE = torch.tensor([[0.6, 0.2], [0.5, 0.1]])
TAU = partial(expected, table=TABLE)
LARGE = ModelSize(8e9, 16e9, 131_072, 4096, 32)
SMALL = ModelSize(0.4e9, 0.8e9, 4096, 4096, 1)
NO_TIMES = TimeGrid({}, {})


@dataclass(frozen=True)
class FakeTimes(MeasuredTimes):
    """A plain step takes 10 ms, each token more adds 1 per prompt, each draft step takes 2."""

    name: str = "fake"
    target: TimeGrid = NO_TIMES
    draft: TimeGrid = NO_TIMES
    factor: float = 1.0

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("Times are fake.",)

    def parts(
        self, shape: DraftShape, batch: int, context: int, extrapolate: bool = False
    ) -> RoundCost:
        times = 2.0 * shape.depth, 10.0 + batch * shape.nodes, 0.5 if shape.depth else 0.0
        return RoundCost(*(self.factor * time for time in times))

    def fields(self) -> dict[str, Any]:
        return {"fake": True}


# ---- shapes --------------------------------------------------------------------------------------


def test_draft_shape_of_trees_and_chains() -> None:
    """Of the tree 0, 1, 00, 01, 10, 000: the root, then both of its children, then one."""
    tree = DraftShape.of(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    assert tree == DraftShape(depth=3, nodes=6, parents=(1, 2, 1))
    assert (tree.kind, tree.width) == ("tree", 1.5)
    chain = DraftShape.of(((0,), (0, 0)))
    assert (chain, chain.kind, chain.width) == (DraftShape(2, 2, (1, 1)), "chain", 1.0)
    assert (DraftShape.of(()), PLAIN.kind) == (PLAIN, "plain")
    assert DraftShape.of(((0,), (1,))).width == 1.0  # the only step expands the root


def test_draft_trees_are_distinct() -> None:
    """The best 2 nodes are 0 and 00, the chain; 3 nodes never include a third rank."""
    table = torch.tensor([[0.6, 0.2, 0.01], [0.5, 0.1, 0.01]])
    trees = draft_trees(table, Grid([1, 2], [1, 2, 3], [2, 3]))
    assert trees == {
        (1, 1, 1): ((0,),),
        (2, 1, 2): ((0,), (0, 0)),
        (1, 2, 2): ((0,), (1,)),
        (1, 3, 3): ((0,), (1,), (2,)),
        (2, 2, 3): ((0,), (1,), (0, 0)),
    }


# ---- the surface ---------------------------------------------------------------------------------


def test_surface_worked_example() -> None:
    rows = {
        row.label: row
        for row in surface(TABLE, TAU, FakeTimes(), Grid([1, 2], [1, 2], [3], [1], [64]))
    }
    assert set(rows) == {"plain", "chain 1", "chain 2", "tree 2x2, 3 nodes"}
    chain, tree = rows["chain 2"], rows["tree 2x2, 3 nodes"]
    assert (chain.tau, chain.draft_ms, chain.verify_ms, chain.round_ms) == pytest.approx(
        (1.9, 4, 12, 16.5)
    )
    assert chain.speedup == pytest.approx(1.9 * 10 / 16.5)
    assert (tree.tau, tree.round_ms) == pytest.approx((2.1, 17.5))
    assert tree.speedup == pytest.approx(2.1 * 10 / 17.5)
    assert tree.tokens_per_second == pytest.approx(1000 * 2.1 / 17.5)
    assert rows["plain"].speedup == 1


def test_recommended_draft_depends_on_the_batch() -> None:
    """Chains of 1 and 2: 1.6/1.35, 1.9/1.65 for one prompt; 1.6/2.25, 1.9/3.45 for ten."""
    rows = surface(TABLE, TAU, FakeTimes(), Grid([1, 2], [], [], [1, 10], [64]))
    assert [(row.batch, row.label) for row in recommended(rows)] == [(1, "chain 1"), (10, "plain")]


def test_trees_have_the_nodes_and_depth_of_their_label() -> None:
    """1 and 2 nodes are a chain, 7 do not exist; 3 nodes do not reach depth 4."""
    rows = surface(TABLE, TAU, FakeTimes(), Grid([2], [2], [1, 2, 6, 7], [1], [64]))
    assert [row.key for row in rows] == [(0, 0, 0), (2, 1, 2), (2, 2, 6)]
    flat = torch.tensor([[0.5, 0.4]] * 4)
    assert set(draft_trees(flat, Grid([4], [2], [3, 16]))) == {(4, 1, 4), (4, 2, 16)}


def test_smaller_draft_is_recommended_for_equal_speedups() -> None:
    row = PlanRow(1, 64, 2, 1, 2, 1.5, 1.0, 1.0, 2.0, 2.0, 1.5)
    small = row._replace(depth=1, nodes=1)
    assert recommended([row, small]) == [small]


@pytest.mark.parametrize(
    ("table", "depth", "width", "message"),
    [
        ([[0.5, 0.5], [0.8, 0.3]], 1, 1, "sum to 1.1"),
        ([[0.5, -0.1]], 1, 1, "probabilities from 0 to 1"),
        (TABLE.tolist(), 3, 1, "deepest = 3: use 1 to 2"),
        (TABLE.tolist(), 1, 3, "widest = 3: use 1 to 2"),
    ],
)
def test_invalid_tables_and_shapes_raise(
    table: list[list[float]], depth: int, width: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        surface(torch.tensor(table), TAU, FakeTimes(), Grid([depth], [width], [4]))


# ---- another machine -----------------------------------------------------------------------------

RATES = torch.tensor([[0.8], [0.8], [0.8], [0.8]])
CHAINS = RATES, partial(expected, table=RATES)


def _best(batch: int, context: int, drafter: ModelSize, budget: int | None) -> float:
    grid = Grid(depths=[4], batches=[batch], contexts=[context])
    times = RooflineTimes(MACHINES["h100"], LARGE, (drafter,), budget)
    rows = make_plan(RATES, partial(expected, table=RATES), times, grid).rows
    return max(row.speedup for row in rows if row.depth)


def test_speculation_is_slower_at_large_batches() -> None:
    speedups = [_best(batch, 16, SMALL, None) for batch in (1, 64, 256, 1024)]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 2
    assert speedups[-1] < 1


def test_constant_budget_gains_with_context_at_large_batches() -> None:
    """MagicDec: self-speculation with a budget of 512 rows."""
    contexts = (1024, 4096, 16_384, 65_536)
    speedups = [_best(128, context, LARGE, 512) for context in contexts]
    assert speedups == sorted(speedups)
    assert speedups[0] < 1 < 1.5 < speedups[-1]
    whole = [_best(128, context, LARGE, None) for context in contexts]
    assert max(whole) < 1  # control: without a budget


def test_predicted_plan_lists_its_assumptions() -> None:
    times = RooflineTimes(MACHINES["a100"], LARGE, (SMALL,))
    plan = make_plan(RATES, partial(expected, table=RATES), times, Grid(depths=[1, 2]))
    assert plan.name == "A100 SXM 80GB, predicted"
    assert any("312 TFLOP/s" in sentence for sentence in plan.assumptions)
    assert any("peak rates" in sentence for sentence in plan.assumptions)


# ---- showing and writing -------------------------------------------------------------------------


def printed(plan: Plan, width: int, *more: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_plan(console, plan, *more)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_printed_plan_has_the_best_draft_and_every_assumption() -> None:
    plan = make_plan(TABLE, TAU, FakeTimes(), Grid([1, 2], [2], [3, 4], [1, 10], [64]))
    text = printed(plan, 400, (), "run.dir=runs/x", True)
    assert text.startswith("Fastest at batch 1, context 64, on fake: tree 2x2, 3 nodes, 1.20x")
    command = "outrider eval run.dir=runs/x decode=static_tree decode.width=2 decode.nodes=3"
    assert f"{command} decode.depth=2" in text
    assert "plain" in text
    for sentence in plan.assumptions:
        assert sentence in text
    assert "Times are fake." in plan.assumptions


def test_printed_plan_fits_eighty_columns() -> None:
    """Nothing is truncated, even for long numbers."""
    grid = Grid([1, 2], [2], [3, 4], [1, 4, 16, 128, 1024], [64, 65536])
    plan = make_plan(TABLE, TAU, FakeTimes(factor=400.0), grid)
    text = printed(plan, 80, (), "", True)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for row in plan.rows:
        assert row.depth == 0 or f"{row.speedup:.2f}" in text
    surface = text.split("the best marked *")[1].split("tokens per round")[0]
    lines = [line for line in surface.splitlines() if line.startswith("tree 2x2, 4 nodes")]
    assert len(lines) == 2  # ten settings, in two parts
    rows = [row for row in plan.rows if row.label == "tree 2x2, 4 nodes"]
    words = [line.removeprefix("tree 2x2, 4 nodes").split() for line in lines]
    numbers = [*words[0][1:], *words[1]]  # the first part has tau, too
    assert [f"{row.speedup:.2f}" for row in rows] == [number.lstrip("*") for number in numbers]
    assert surface.count("*") == sum(row.depth > 0 for row in plan.recommended)


def test_errors_of_predictions_are_printed_without_their_table() -> None:
    plan = make_plan(TABLE, TAU, FakeTimes(), Grid([1], [], [], [1], [64]))
    (row,) = (row for row in plan.rows if row.depth)
    good, bad = (Check(row, 1.6, row.speedup / (1 + error)) for error in (0.05, -0.2))
    text = printed(plan, 80, [good, bad])
    assert "Checked by decoding 2 other settings: speedups off by -20.0 to +5.0 %." in text
    assert "More than 10% in 1 of them" in text
    assert "More than" not in printed(plan, 80, [good])
    assert "are noise" not in text
    rows = [row._replace(speedup=row.tau + 0.1) for row in plan.rows]
    assert "Speedups above tau are noise" in printed(replace(plan, rows=rows), 80)


def test_written_plan_is_json_and_png(tmp_path: Path) -> None:
    plan = make_plan(TABLE, TAU, FakeTimes(), Grid([1, 2], [2], [3], [1, 4], [64, 128]))
    write_plan(tmp_path, plan)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert len(content["rows"]) == len(plan.rows) == 16
    assert content["times"] == {"fake": True}
    assert content["table"] == TABLE.tolist()
    assert [row["shape"] for row in content["recommended"]] == [r.label for r in plan.recommended]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.png"]


# ---- this machine --------------------------------------------------------------------------------


def test_plan_from_measured_forwards() -> None:
    """Every shape between the points has a time; taps are restored."""
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()
    target.set_taps([2])
    grid = Grid([1, 2], [1, 2], [], [1, 2], [8, 16])
    timing = measure_forwards(target, drafter, "here", [8], grid, 1)
    assert target.taps == (2,)
    assert timing.target.axes == {"tokens": (1, 8), "batch": (1, 2), "context": (8, 16)}
    assert timing.draft.axes["width"] == (1, 2)
    plan = make_plan(TABLE, TAU, timing, Grid([1, 2], [2], [3, 6], [1, 2], [8, 12]))
    assert len(plan.rows) == 4 * (1 + 2 + 2)
    assert all(row.round_ms > row.verify_ms > 0 for row in plan.rows if row.depth)
    times = json.loads(json.dumps(plan.fields()))["times"]
    assert set(times) == {"target", "draft", "read", "decoded"}
