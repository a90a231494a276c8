"""Which draft a plan asks for: by hand on invented times, by enumeration, and in its limits."""

import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from outrider.eval.machines import MACHINES, ModelSize
from outrider.eval.plan import (
    Grid,
    Row,
    make_plan,
    path_products,
    predicted,
    print_plan,
    recommended,
    surface,
    write_plan,
)
from outrider.eval.timing import (
    CHAIN,
    PLAIN,
    ROWS,
    TREE,
    Measured,
    Timing,
    draft_ms,
    measure,
    medians,
    target_ms,
)
from tests import tiny

TABLE = torch.tensor([[0.6, 0.2], [0.5, 0.1]])
LARGE = ModelSize(8e9, 16e9, 131_072, 4096, 32)
SMALL = ModelSize(0.4e9, 0.8e9, 4096, 4096, 1)


@dataclass(frozen=True)
class Invented:
    """A plain step takes 10 ms, each token more adds 1 per prompt, each draft step takes 2."""

    besides: float = 0.5
    name: str = "nowhere"
    assumptions: tuple[str, ...] = ("Nothing is real.",)

    def verify_ms(self, tokens: int, batch: int, context: int) -> float:
        return 10.0 + batch * (tokens - 1)

    def draft_ms(self, width: int, depth: int, batch: int, context: int) -> float:
        return 2.0 * depth

    def overhead_ms(self, width: int, batch: int) -> float:
        return self.besides if width else 0.0

    def fields(self) -> dict[str, Any]:
        return {"invented": True}


# ---- tau -----------------------------------------------------------------------------------------


def test_the_paths_of_the_worked_example() -> None:
    products = path_products(TABLE, depth=2, width=2)
    assert products == pytest.approx([0.6, 0.3, 0.2, 0.1, 0.06, 0.02])
    assert path_products(TABLE, depth=2, width=1) == pytest.approx([0.6, 0.3])


def _walk(table: Tensor, nodes: set[tuple[int, ...]]) -> float:
    """Tokens per round by going through every way the target can choose; rank K: none of them."""
    depth, ranks = table.shape
    mean = 0.0
    for way in product(range(ranks + 1), repeat=depth):
        chance, emitted = 1.0, 1
        for level, rank in enumerate(way):
            row = table[level].tolist()
            chance *= row[rank] if rank < ranks else 1 - sum(row)
        while emitted <= depth and way[:emitted] in nodes:
            emitted += 1
        mean += chance * emitted
    return mean


def _chosen(table: Tensor, count: int, key: Callable[[tuple[int, ...]], float]) -> float:
    """Tokens per round of the tree of `count` nodes that is best under `key`."""
    depth, ranks = table.shape
    every = [w for d in range(1, depth + 1) for w in product(range(ranks), repeat=d)]
    return _walk(table, set(sorted(every, key=key, reverse=True)[:count]))


@pytest.mark.parametrize("seed", range(5))
def test_tau_of_the_best_tree_is_the_mean_over_all_ways_of_the_target(seed: int) -> None:
    """Exact in float64; choosing nodes by rank alone, breadth first, is worse (control)."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(2, 4, generator=generator, dtype=torch.float64).softmax(-1)
    table = (3 * table).softmax(-1)[:, :3].sort(dim=1, descending=True).values
    table[1] *= 1.05  # no ties
    products = path_products(table, depth=2, width=3)

    def chance(path: tuple[int, ...]) -> float:
        return float(torch.stack([table[d, rank] for d, rank in enumerate(path)]).prod())

    for count in (1, 3, 5, 8, 12):
        assert abs(1 + sum(products[:count]) - _chosen(table, count, chance)) < 1e-12
    worst = _chosen(table, 5, lambda path: sum(path) - 10.0 * len(path))
    assert 1 + sum(products[:5]) - worst > 1e-3


def test_no_tree_of_as_many_nodes_is_better() -> None:
    """Every set of nodes that is closed under parents, of a tree with two ranks and levels."""
    best = [0.0] * 7
    names = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    for bits in range(2**6):
        nodes = {name for i, name in enumerate(names) if bits >> i & 1}
        if all(name[:-1] in nodes for name in nodes if len(name) > 1):
            best[len(nodes)] = max(best[len(nodes)], _walk(TABLE.double(), nodes))
    products = path_products(TABLE, 2, 2)
    for count in range(7):
        assert best[count] == pytest.approx(1 + sum(products[:count]), abs=1e-12)


def test_only_the_widest_paths_of_a_level_are_expanded() -> None:
    """Two ranks at three levels: two of the four nodes at depth 2 get children."""
    table = torch.full((3, 2), 0.4)
    assert len(path_products(table, 3, 2)) == 2 + 4 + 4
    assert len(path_products(table, 3, 1)) == 3


# ---- the surface ---------------------------------------------------------------------------------


def test_the_surface_holds_hand_numbers() -> None:
    rows = {row.shape: row for row in surface(TABLE, Invented(), [1, 2], [1, 2], [3], [1], [64])}
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


def test_each_setting_recommends_its_own_draft_and_plain_decoding_where_none_pays() -> None:
    """Chains of 1 and 2: 1.6/1.35, 1.9/1.65 for one prompt; 1.6/2.25, 1.9/3.45 for ten."""
    rows = surface(TABLE, Invented(), [1, 2], [], [], [1, 10], [64])
    assert [(row.batch, row.shape) for row in recommended(rows)] == [(1, "chain 1"), (10, "plain")]


def test_a_tree_uses_all_of_its_levels_and_no_more_than_was_drafted() -> None:
    rows = surface(TABLE, Invented(), [2], [2], [1, 2, 6, 7], [1], [64])
    assert [row.nodes for row in rows if row.width == 2] == [2, 6]


def test_of_equal_speedups_the_smaller_draft_is_recommended() -> None:
    row = Row(1, 64, 2, 1, 2, 1.5, 1.0, 1.0, 2.0, 2.0, 1.5)
    small = row._replace(depth=1, nodes=1)
    assert recommended([row, small]) == [small]


def test_wrong_tables_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="at depth 2"):
        surface(torch.tensor([[0.5, 0.5], [0.8, 0.3]]), Invented(), [1], [1], [], [1], [1])
    with pytest.raises(ValueError, match="at depth 1"):
        surface(torch.tensor([[0.5, -0.1]]), Invented(), [1], [1], [], [1], [1])
    with pytest.raises(ValueError, match=r"depth 3: the table knows depths 1\.\.2"):
        surface(TABLE, Invented(), [3], [1], [], [1], [1])
    with pytest.raises(ValueError, match=r"width 3: the table knows ranks 1\.\.2"):
        surface(TABLE, Invented(), [1], [3], [4], [1], [1])


# ---- another machine -----------------------------------------------------------------------------

RATES = torch.tensor([[0.8], [0.8], [0.8], [0.8]])


def _best(batch: int, context: int, drafter: ModelSize, budget: int | None) -> float:
    grid = Grid(depths=[4], batches=[batch], contexts=[context])
    rows = predicted(RATES, MACHINES["h100"], LARGE, (drafter,), grid, budget).rows
    return max(row.speedup for row in rows if row.depth)


def test_large_batches_are_bound_by_arithmetic_and_speculation_stops_to_pay() -> None:
    speedups = [_best(batch, 16, SMALL, None) for batch in (1, 64, 256, 1024)]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 2
    assert speedups[-1] < 1


def test_at_large_batches_a_drafter_of_constant_budget_gains_with_the_context() -> None:
    """MagicDec: the target drafts for itself over 512 rows."""
    contexts = (1024, 4096, 16_384, 65_536)
    speedups = [_best(128, context, LARGE, 512) for context in contexts]
    assert speedups == sorted(speedups)
    assert speedups[0] < 1 < 1.5 < speedups[-1]
    whole = [_best(128, context, LARGE, None) for context in contexts]
    assert max(whole) < 1  # control: without a budget it reads what the target reads


def test_what_is_foreseen_says_what_it_assumes() -> None:
    plan = predicted(RATES, MACHINES["a100"], LARGE, (SMALL,), Grid(depths=[1, 2]))
    assert plan.name == "A100 SXM 80GB, foreseen"
    assert any("312 TFLOP/s" in sentence for sentence in plan.assumptions)
    assert any("peak rates" in sentence for sentence in plan.assumptions)


# ---- showing and writing -------------------------------------------------------------------------


def test_the_printed_plan_names_the_best_draft_and_every_assumption() -> None:
    plan = make_plan(TABLE, Invented(), Grid([1, 2], [2], [3, 4], [1, 10], [64]))
    console = Console(file=io.StringIO(), width=400)
    print_plan(console, plan)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tree 2x2, 3 nodes" in text
    assert "1.20x" in text
    assert "plain" in text
    for sentence in plan.assumptions:
        assert sentence in text
    assert "Nothing is real." in plan.assumptions


def test_the_written_plan_is_json_and_a_picture(tmp_path: Path) -> None:
    plan = make_plan(TABLE, Invented(), Grid([1, 2], [2], [3], [1, 4], [64, 128]))
    write_plan(tmp_path, plan)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    said = json.loads((tmp_path / "plan.json").read_text())
    assert len(said["rows"]) == len(plan.rows) == 16
    assert said["times"] == {"invented": True}
    assert said["table"] == TABLE.tolist()
    assert [row["shape"] for row in said["recommended"]] == [r.shape for r in plan.recommended]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.png"]


# ---- timing --------------------------------------------------------------------------------------

POINTS: dict[tuple[int, ...], float] = {(1, 8): 10.0, (1, 16): 14.0, (5, 8): 12.0, (5, 16): 20.0}
MEASURED = Measured({"tokens": (1, 5), "context": (8, 16)}, POINTS)


def test_measured_points_are_exact_and_what_lies_between_is_linear() -> None:
    for (tokens, context), ms in POINTS.items():
        assert MEASURED.at(tokens=tokens, context=context) == ms
    assert MEASURED.at(tokens=2, context=8) == pytest.approx(10.5)
    assert MEASURED.at(tokens=1, context=12) == pytest.approx(12)
    assert MEASURED.at(tokens=3, context=12) == pytest.approx((10 + 14 + 12 + 20) / 4)


def test_nothing_is_said_beyond_the_measured_points() -> None:
    with pytest.raises(ValueError, match="tokens = 6: measured were 1 to 5"):
        MEASURED.at(tokens=6, context=8)
    with pytest.raises(ValueError, match="context = 4"):
        MEASURED.at(tokens=1, context=4)
    with pytest.raises(ValueError, match=r"no time was measured at \(5,\)"):
        Measured({"tokens": (1, 5)}, {(1,): 1.0})
    with pytest.raises(ValueError, match="points ascend"):
        Measured({"tokens": (5, 1)}, {(1,): 1.0, (5,): 1.0})


def test_a_round_costs_besides_the_models_what_its_kind_does() -> None:
    axes = {"kind": (PLAIN, CHAIN, TREE), "batch": (1, 4)}
    besides = Measured(axes, {(k, b): 0.1 * k + 0.01 * b for k in range(3) for b in (1, 4)})
    timing = Timing("here", MEASURED, MEASURED, besides)
    assert timing.overhead_ms(width=0, batch=1) == pytest.approx(0.01)
    assert timing.overhead_ms(width=1, batch=4) == pytest.approx(0.14)
    assert timing.overhead_ms(width=2, batch=2) == timing.overhead_ms(width=9, batch=2)
    assert timing.overhead_ms(width=2, batch=99) == timing.overhead_ms(width=2, batch=4)  # nearest
    assert Timing("here", MEASURED, MEASURED).overhead_ms(1, 64) == 0


def test_forwards_are_brought_to_what_they_take_in_decoding() -> None:
    alone = Measured(
        {"tokens": (1, 5), "batch": (1,), "context": (8,)}, {(1, 1, 8): 10.0, (5, 1, 8): 20.0}
    )
    slower = Measured({"size": (1, 3), "batch": (1,)}, {(1, 1): 1.0, (3, 1): 1.5})
    timing = Timing("here", alone, alone, target_factor=slower)
    assert timing.verify_ms(1, 1, 8) == 10
    assert timing.verify_ms(5, 1, 8) == pytest.approx(30)  # beyond 3 new tokens as at 3
    assert timing.verify_ms(2, 1, 8) == pytest.approx(1.25 * 12.5)


def test_runs_take_turns_behind_one_warm_up_and_the_median_counts() -> None:
    order: list[str] = []
    runs = [lambda: order.append("a"), lambda: order.append("b")]
    times = medians(runs, 3, torch.device("cpu"))
    assert order == ["a", "b"] * 4
    assert all(ms >= 0 for ms in times)
    order.clear()

    def pause() -> None:
        order.append("-")
        time.sleep(0.05)

    alone = medians(runs, 3, torch.device("cpu"), before=[pause, None])
    assert order == ["-", "a", "b"] * 4
    assert max(alone) < 50  # what ran before is not counted
    with pytest.raises(ValueError, match="repeats=0"):
        medians(runs, 0, torch.device("cpu"))


def test_the_target_is_timed_behind_the_rows_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts, 20 cached rows before every timed forward, warm-ups included."""
    target = tiny.target()
    real, seen = target.forward, list[tuple[int, int, int]]()

    def forward(ids: Tensor, positions: Tensor, visible: Tensor, cache: Any) -> Any:
        (held,) = set(cache.active)
        seen.append((len(ids), ids.shape[1], held))
        assert visible.shape[-1] == held + ids.shape[1]
        return real(ids, positions, visible, cache)

    monkeypatch.setattr(target, "forward", forward)
    drafter = tiny.drafter("eagle3", target).eval()
    times = target_ms(target, drafter, [1, 16], batch=2, context=20, repeats=5)
    assert seen == [(2, 20, 0), *[(2, 1, 20), (2, 1, 20), (2, 16, 20)] * 6]
    assert times[1] > 0
    assert times[16] > times[1] / 10


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "hass", "mtp", "medusa", "draft_lm"])
def test_every_drafter_is_timed_on_its_own_steps(name: str, batch: int) -> None:
    target = tiny.target()
    drafter = tiny.drafter(name, target).eval()
    times = draft_ms(drafter, target, [1, 4], [1, 3], batch, context=12, repeats=5)
    assert set(times) == {(1, 1), (1, 3), (4, 1), (4, 3)}
    assert all(ms > 0 for ms in times.values())
    assert times[4, 3] > times[1, 1] / 10


def test_what_does_not_fit_is_refused() -> None:
    target = tiny.target()
    medusa = tiny.drafter("medusa", target).eval()
    with pytest.raises(ValueError, match="reaches 3"):
        draft_ms(medusa, target, [1], [4], 1, context=4)
    with pytest.raises(ValueError, match="reads 128 tokens; 132 would"):
        target_ms(target, medusa, [4], batch=1, context=128)
    with pytest.raises(ValueError, match=f"reads 128 tokens; {128 + ROWS}"):
        draft_ms(medusa, target, [1], [3], 1, context=125)


def test_a_measured_grid_serves_a_whole_plan() -> None:
    """Every shape between the points has a time; taps are put back as they were."""
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target).eval()
    target.set_taps([2])
    timing = measure(
        target, drafter, name="here", tokens=[8], widths=[1, 2], depths=[1, 2], batches=[1, 2],
        contexts=[8, 16], repeats=1,
    )  # fmt: skip
    assert target.taps == (2,)
    assert timing.target.axes == {"tokens": (1, 8), "batch": (1, 2), "context": (8, 16)}
    assert timing.draft.axes["width"] == (1, 2)
    plan = make_plan(TABLE, timing, Grid([1, 2], [2], [3, 6], [1, 2], [8, 12]))
    assert len(plan.rows) == 4 * (1 + 2 + 2)
    assert all(row.round_ms > row.verify_ms > 0 for row in plan.rows if row.depth)
    times = json.loads(json.dumps(plan.fields()))["times"]
    assert set(times) == {"target", "draft", "overhead", "target_factor", "draft_factor"}
