"""Cost tables: what a file holds, whose times are used, and what the rounds correct."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.decode.auto import policy
from outrider.models.decode.auto.choice import BUDGETS
from outrider.models.decode.auto.controller import BURST
from outrider.models.decode.auto.plain_rounds import STALE, PlainRounds
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs import measurement
from outrider.models.decode.costs.cost_table import CostSetting, read_costs, write_costs
from outrider.models.decode.costs.factors import READ
from outrider.models.decode.costs.live_costs import (
    APART,
    FIRST_LEVEL,
    JUMP_SECONDS,
    LiveCosts,
)
from outrider.models.decode.costs.measurement import (
    MOST_TABLES,
    LargestDraft,
    keep_costs,
    read_or_measure,
)
from outrider.models.decode.costs.round_costs import (
    PLAIN,
    DecodedRound,
    DraftShape,
    MeasuredTimes,
    TimeGrid,
    chain_shape,
)
from outrider.models.decode.engine import Engine
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target
from tests import tiny

CHAIN = DraftShape(2, 2, (1, 1))
NO_TIME = DecodedRound(CHAIN, 0.0, 0.0, 0.0).fields()
TIMES = MeasuredTimes(
    "here",
    TimeGrid({"tokens": (1, 9), "batch": (1, 4), "context": (64, 256)},
             {(n, b, c): n + b + c / 64 for n in (1, 9) for b in (1, 4) for c in (64, 256)}),
    TimeGrid({"width": (1,), "depth": (1, 4), "batch": (1, 4), "context": (64, 256)},
             {(1, d, b, c): 0.5 * d for d in (1, 4) for b in (1, 4) for c in (64, 256)}),
    {1: [DecodedRound(CHAIN, 1.0, 2.0, 0.5)]},
    read=0.02,
)  # fmt: skip
SETTING = CostSetting("a processor", "2", "2.13", "float32", "t" * 16, "Eagle d")


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    other = replace(TIMES, read=0.5)
    write_costs(file, [TIMES, other], SETTING)
    expected = [replace(one, name=SETTING.name) for one in (TIMES, other)]
    assert read_costs(file, SETTING) == (expected, "")


@pytest.mark.parametrize("field", ["machine", "threads", "torch", "dtype", "target", "drafter"])
def test_times_of_another_setting_are_not_used(field: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    write_costs(file, [TIMES], CostSetting(**{**vars(SETTING), field: "other"}))
    tables, why = read_costs(file, SETTING)
    assert tables == []
    assert why == f"{file} differs in {field}"


Damage = Callable[[dict[str, Any]], Any]


def without(name: str) -> Damage:
    return lambda content: {key: value for key, value in content.items() if key != name}


def with_first(grid: str, **changes: object) -> Damage:
    """Return damage after which a grid has one point, with other values."""
    return lambda table: {**table, grid: [{**table[grid][0], **changes}]}


def second(damage: Damage) -> Damage:
    """Return damage of the second table of a file."""
    return lambda content: {
        **content,
        "tables": [content["tables"][0], damage(content["tables"][1])],
    }


@pytest.mark.parametrize(
    "damage",
    [
        without("setting"), without("tables"), lambda content: [content],
        lambda content: {**content, "format": "x"}, lambda content: {**content, "tables": "here"},
        *map(second, (
            without("target"), without("read"), with_first("target", ms=0.0),
            with_first("target", ms=-1.0), with_first("target", ms="fast"),
            lambda table: {**table, "target": []}, lambda table: [table],
            lambda table: {**table, "draft": table["draft"][1:]},
            lambda table: {**table, "decoded": {"many": []}}, with_first("target", batch=0),
            with_first("draft", depth=0), lambda table: {**table, "decoded": {"1": [NO_TIME]}},
        )),
    ],
)  # fmt: skip
def test_a_damaged_table_is_named_and_not_used(damage: Damage, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    write_costs(file, [TIMES, TIMES], SETTING)
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    tables, why = read_costs(file, SETTING)
    assert tables == []
    assert why.count(str(file)) == 1


def test_without_a_file_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert read_costs(tmp_path / "costs.json", SETTING) == ([], "")


def test_beyond_the_grid_the_last_segment_goes_on() -> None:
    """17 rows of one request at context 64: 17 + 1 + 1; context 512 adds 8."""
    at = TIMES.target.at
    assert at(extrapolate=True, tokens=17, batch=1, context=64) == pytest.approx(19)
    assert at(extrapolate=True, tokens=1, batch=1, context=512) == pytest.approx(10)
    assert at(extrapolate=True, tokens=-100, batch=1, context=64) == min(TIMES.target.ms.values())


def test_more_tokens_than_measured_cost_at_least_their_rows_in_a_batch() -> None:
    """One request reads nine tokens as fast as five; in a batch of 16, a row takes 0.2 ms."""
    ms: dict[tuple[int, ...], float] = {
        (n, b, 64): 7.0 if b == 1 else 7 + 0.2 * 16 * n for n in (1, 5, 9) for b in (1, 16)
    }
    grid = TimeGrid({"tokens": (1, 5, 9), "batch": (1, 16), "context": (64,)}, ms)
    times = replace(TIMES, target=grid, decoded={})
    tree = DraftShape(4, 32, (1, 4, 4, 4))
    assert times.forwards_only(tree, 1, 64, True).target == pytest.approx(7 + 0.2 * 24)
    assert times.forwards_only(tree, 16, 64, True).target == pytest.approx(7 + 0.2 * 16 * 33)
    assert times.forwards_only(CHAIN, 1, 64, True).target == 7


def test_rounds_correct_the_table() -> None:
    """Rounds that take twice the table's time double what is expected, of their kind alone."""
    costs = LiveCosts(TIMES)
    table = costs.table_seconds(CHAIN, 1, 64).total
    levels = table - costs.table_seconds(FIRST_LEVEL, 1, 64).total
    for _ in range(40):
        costs.observe("plain", 0.003, 0.003)
        costs.observe("chain", table, 2 * table, levels)
    assert costs.seconds(PLAIN, 1, 64).total == pytest.approx(0.003)
    assert costs.seconds(CHAIN, 1, 64).total == pytest.approx(2 * table, rel=0.02)


@pytest.mark.parametrize("kind", ["plain", "chain", "tree", READ])
def test_one_slow_round_at_first_changes_little(kind: str) -> None:
    """Such as one that allocates, or that the machine has interrupted."""
    costs = LiveCosts(TIMES)
    costs.observe("plain", 0.005, 0.005)
    costs.observe(kind, 0.005, 0.5)
    assert costs.factors.value(kind, 1) <= 4
    for _ in range(10):
        costs.observe(kind, 0.005, 0.005)
    assert costs.factors.value(kind, 1) < 1.4


def test_a_table_may_be_wrong_for_one_size_of_the_batch() -> None:
    """Rounds of 16 requests take half the table's time, those of one what it says."""
    costs = LiveCosts(TIMES)
    for _ in range(40):
        for batch, share in ((1, 1.0), (16, 0.5)):
            costs.observe("plain", 0.003, share * 0.003, batch=batch)
            costs.observe("chain", 0.005, share * 0.005, batch=batch)
    for kind in ("plain", "chain"):
        assert costs.factors.value(kind, 1) == pytest.approx(1, rel=0.02)
        assert costs.factors.value(kind, 9) == pytest.approx(0.5, rel=0.02), "of 9 to 16"
    costs.observe("plain", 0.003, 0.009, batch=2)
    assert costs.factors.value("plain", 2) == pytest.approx(2, rel=0.02), "bounded by four"
    ratio = costs.factors.value("plain", 2) / costs.factors.value("plain", 16)
    chain = ratio * costs.factors.value("chain", 16)  # that had one last
    assert costs.factors.value("chain", 2) == pytest.approx(chain)


def test_a_slower_machine_slows_down_what_is_expected_of_all_kinds() -> None:
    """Also of plain rounds, of which there is none after it; one slow round changes little."""
    costs = LiveCosts(TIMES)
    for kind in ("plain", "chain"):
        for _ in range(60):
            costs.observe(kind, 0.005, 0.005)
    costs.observe("chain", 0.005, 0.05)
    assert costs.factors.value("plain", 1) < 1.06
    for _ in range(30):
        costs.observe("chain", 0.005, 0.01)
    assert costs.factors.value("chain", 1) == pytest.approx(2, rel=0.02)
    assert costs.factors.value("plain", 1) == pytest.approx(2, rel=0.4)
    assert costs.factors.value("plain", 1) > 1.5


def test_a_kind_that_is_seldom_seen_follows_the_machine() -> None:
    """Plain rounds while drafts pay: one in 64, after which the machine is half as fast."""
    costs = LiveCosts(TIMES)
    for share in (1.0, 2.0):
        for i in range(6 * 64):
            kind = "plain" if i % 64 == 0 else "chain"
            costs.observe(kind, 0.005, share * 0.005)
    assert costs.factors.value("plain", 1) == pytest.approx(2, rel=0.15)
    before = costs.factors.value("plain", 1)
    costs.observe("plain", 0.005, 0.1)
    assert costs.factors.value("plain", 1) == pytest.approx(before, rel=0.15), "one slow round"


def test_long_rounds_drive_no_factor_away_from_the_others() -> None:
    """One round in a hundred takes five times as long, which says nothing of other kinds."""
    costs = LiveCosts(TIMES)
    for kind in ("plain", "tree"):
        for _ in range(20):
            costs.observe(kind, 0.005, 0.005)
    for i in range(3000):
        costs.observe("chain", 0.005, 0.025 if i % 100 == 50 else 0.005)
    for kind in ("plain", "chain", "tree"):
        assert costs.factors.value(kind, 1) == pytest.approx(1, rel=0.1)


def test_dearer_drafts_are_told_from_a_slower_machine_by_plain_rounds() -> None:
    """As many as follow a change of the pace take away more than half of the error."""
    costs = LiveCosts(TIMES)
    for kind, seconds, count in (("plain", 1, 40), ("chain", 1, 40), ("chain", 1.5, 40)):
        for _ in range(count):
            costs.observe(kind, 0.005, 0.005 * seconds)
    before = costs.factors.value("plain", 1)
    assert before > 1.2
    for _ in range(BURST):
        costs.observe("plain", 0.005, 0.005)
    assert abs(costs.factors.value("plain", 1) - 1) < 0.5 * (before - 1)


def test_rounds_correct_what_a_level_adds() -> None:
    """A first level costs what the table says, and each further one half of it."""
    costs = LiveCosts(TIMES)
    table = [costs.table_seconds(chain_shape(d), 1, 64).total for d in range(5)]
    true = [0.0, *(table[1] + 0.5 * (at - table[1]) for at in table[1:])]
    for i in range(400):
        depth = (1, 3, 2, 4)[i % 4]
        costs.observe("chain", table[depth], true[depth], table[depth] - table[1])
    found = [costs.seconds(chain_shape(d), 1, 64).total for d in range(1, 5)]
    assert found == pytest.approx(true[1:], rel=0.05)


def test_chains_of_all_depths_cost_what_each_one_costs() -> None:
    costs = LiveCosts(TIMES)
    for i in range(40):
        costs.observe("plain", 0.003, 0.004)
        costs.observe("chain", 0.005, 0.006 + 0.0001 * (i % 3), 0.002)
    for batch, context, deepest in ((1, 64, 4), (4, 300, 2), (1, 64, 0)):
        costs.observe("plain", 0.003, 0.005, batch=batch)
        expected = [costs.seconds(chain_shape(d), batch, context) for d in range(deepest + 1)]
        found = costs.chain_seconds(batch, context, deepest)
        assert [*map(tuple, found)] == [pytest.approx(tuple(one)) for one in expected]


def test_other_kinds_begin_as_plain_rounds() -> None:
    """On a machine that is half as fast as when it was measured."""
    costs = LiveCosts(TIMES)
    for _ in range(40):
        costs.observe("plain", 0.003, 0.006)
    costs.observe("tree", 0.005, 0.01)
    assert costs.factors.value("tree", 1) == pytest.approx(2, rel=0.02)


def test_a_table_covers_drafts_of_its_size() -> None:
    assert measurement.covers(TIMES, 4, 256, LargestDraft(4, 1, 4))
    assert not measurement.covers(TIMES, 4, 256, LargestDraft(5, 1, 5))
    assert not measurement.covers(TIMES, 4, 256, LargestDraft(4, 4, 8)), (
        "its drafts are one node wide"
    )
    assert not measurement.covers(TIMES, 5, 256, LargestDraft(4, 1, 4))


def grid_of(
    batches: Sequence[int], contexts: Sequence[int], tokens: Sequence[int] = (1, 9)
) -> MeasuredTimes:
    points = product(tokens, batches, contexts)
    axes = {"tokens": (*tokens,), "batch": (*batches,), "context": (*contexts,)}
    return replace(TIMES, target=TimeGrid(axes, dict.fromkeys(points, 1.0)))


@pytest.mark.parametrize(
    ("batches", "contexts"), [([4], [64, 256]), ([1, 4], [128, 256]), ([1, 4], [64])]
)
def test_a_table_of_large_settings_alone_does_not_cover_small_ones(
    batches: list[int], contexts: list[int]
) -> None:
    """A round of four requests does not take the time of one, nor one at 256 rows that at 64."""
    assert measurement.covers(grid_of([1, 4], [64, 256]), 1, 128, LargestDraft(4, 1, 4))
    assert not measurement.covers(grid_of(batches, contexts), 1, 128, LargestDraft(4, 1, 4))


def test_a_table_replaces_those_that_it_covers(tmp_path: Path) -> None:
    def kept(new: MeasuredTimes) -> list[bool]:
        write_costs(file, old, SETTING)
        keep_costs(file, new, SETTING)
        tables = read_costs(file, SETTING)[0]
        assert tables[0].target == new.target
        return [one.target in [table.target for table in tables[1:]] for one in old]

    file = tmp_path / "costs.json"
    old = [grid_of([1], [64, 256]), grid_of([1, 4], [64, 128]), grid_of([1, 2], [64, 1000])]
    assert kept(grid_of([1, 4], [64, 256])) == [False, False, True]
    assert kept(grid_of([1, 2], [64, 512])) == [False, True, True]
    assert kept(grid_of([1, 4], [64, 256], (1, 5))) == [True, True, True], "fewer tokens"
    for rows in range(9, 30):
        keep_costs(file, grid_of([1], [64, 64 * rows], range(1, 40 - rows)), SETTING)
    assert len(read_costs(file, SETTING)[0]) == MOST_TABLES


def test_a_table_that_cannot_be_used_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    keep_costs(file, TIMES, SETTING)
    for batches, contexts in (([4], [64, 256]), ([1, 4], [128, 256])):
        keep_costs(file, grid_of(batches, contexts), SETTING)
    assert read_costs(file, SETTING) == ([replace(TIMES, name=SETTING.name)], "")


def test_of_two_tables_that_cover_a_need_the_finer_one_is_read(tmp_path: Path) -> None:
    """One that was measured for single requests times more tokens of each."""
    need = 64, LargestDraft(2, 2, 31)
    assert measured(tmp_path, [(1, *need), (16, *need)]) == "mm"
    target, file = tiny.target(), tmp_path / "costs.json"
    for slots, tokens in ((1, 32), (16, 9)):
        drafter = tiny.drafter("medusa", target).eval()
        setting = CostSetting.of(target, drafter)
        times, note = read_or_measure(target, drafter, setting, file, slots, *need)
        assert (times.target.axes["tokens"][-1], note) == (tokens, "")


def test_where_no_file_can_be_written_the_process_holds_the_tables(tmp_path: Path) -> None:
    (tmp_path / "costs.json").mkdir()
    needs = [(slots, 30, LargestDraft(2, 1, 2)) for slots in (1, 3, 1, 2)]
    assert measured(tmp_path, needs) == "mm.."


def measured(tmp_path: Path, needs: Sequence[tuple[int, int, LargestDraft]]) -> str:
    """Return which needs were measured (m), and which were read (.), in turn."""
    target, file = tiny.target(), tmp_path / "costs.json"
    drafter, notes = tiny.drafter("medusa", target).eval(), []
    for need in needs:
        times, note = read_or_measure(target, drafter, CostSetting.of(target, drafter), file, *need)
        assert measurement.covers(times, *need, drafter.bends)
        notes.append(note)
    return "".join("m" if note else "." for note in notes)


def test_sizes_of_drafts_by_turns_are_measured_once_each(tmp_path: Path) -> None:
    """A larger tree is measured too: rows beyond the table are not extrapolated."""
    sizes = [(2, 1, 2), (2, 2, 15), (2, 2, 31), (3, 1, 3), (2, 2, 15), (2, 2, 31), (2, 1, 2)]
    needs = [(1, 64, LargestDraft(*size)) for size in sizes]
    assert measured(tmp_path, needs) == "mmmm..."


def test_batches_and_contexts_by_turns_are_measured_once_each(tmp_path: Path) -> None:
    """Of many requests nine tokens each are timed at most, and not more of them for one."""
    needs = [(slots, 30, LargestDraft(2, 2, 31)) for slots in (1, 16, 1, 16, 5, 1)]
    needs += [(slots, rows, needs[0][2]) for slots, rows in ((1, 128), (16, 30), (1, 128))]
    assert measured(tmp_path, needs) == "mm....m.."


@pytest.mark.parametrize("positions", [4, 32, 100, 128])
def test_a_text_of_few_rows_is_measured_once(positions: int, tmp_path: Path) -> None:
    """A tree of 84 nodes is larger than half of it."""
    target = tiny.target(max_position_embeddings=positions)
    auto = Auto(depth=2, budget=84, file=tmp_path / "costs.json")
    engine = Engine(target, tiny.drafter("medusa", target).eval(), auto)
    for _ in range(3):
        engine.start([], 1)
    assert len(auto.notes) == 1


def test_weights_are_hashed_once_for_settings_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafters = tiny.target(), list[Drafter]()
    auto = Auto(depth=2, budget=2, file=tmp_path / "costs.json")
    medusa, eagle = (tiny.drafter(name, target).eval() for name in ("medusa", "eagle3"))
    real = CostSetting.of

    def counted(of: Target, drafter: Drafter) -> CostSetting:
        drafters.append(drafter)
        return real(of, drafter)

    monkeypatch.setattr(CostSetting, "of", counted)
    for drafter, slots, rows in (
        (medusa, 1, 128), (medusa, 3, 30), (medusa, 1, 128), (medusa, 3, 30), (eagle, 3, 30),
    ):  # fmt: skip
        monkeypatch.setattr(policy, "LEAST_ROWS", rows)
        auto.wrap(drafter, target)
        auto.prepare(target, slots, rows)
    assert drafters == [medusa, eagle]
    assert len(auto.notes) == 3


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 0.005 + JUMP_SECONDS + 0.001])
def test_a_time_that_cannot_be_is_left_out(seconds: float) -> None:
    costs = LiveCosts(TIMES)
    assert costs.observe("plain", 0.005, seconds) == 0.005
    assert (costs.ignored, costs.factors.of("plain", 1).rounds) == (1, 0)
    assert costs.observe("plain", 0.005, 0.006) == 0.006


@pytest.mark.parametrize("seconds", [[0.2], [0.2, 0.005], [0.005, 0.2]])
def test_one_long_round_of_sixteen_is_taken_for_a_pause(seconds: list[float]) -> None:
    """Drafts that take 0.2 s, each or every other one, in batches of changing size."""
    costs, left_out = LiveCosts(TIMES), []
    for n in range(40):
        measured = seconds[n % len(seconds)]
        if costs.observe("chain", 0.005, measured, batch=1 + n % 3) != measured:
            left_out.append(n)
        assert costs.observe("plain", 0.003, 0.003) == pytest.approx(0.003)
    assert left_out[0] == seconds.index(0.2)
    assert all(later - earlier > APART for earlier, later in pairwise(left_out))


def test_a_pause_is_ten_times_as_long_and_a_tenth_of_a_second() -> None:
    for table, seconds, counted in (
        (0.1, 0.9, 0.9), (0.1, 1.01, 0.1), (0.005, 0.104, 0.104), (0.005, 0.106, 0.005),
    ):  # fmt: skip
        assert LiveCosts(TIMES).observe("plain", table, seconds) == counted


def test_a_policy_measures_once_and_then_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two policies, one measurement; a third after the number of threads has changed."""
    target = tiny.target()
    drafter = tiny.drafter("medusa", target).eval()
    notes, announced = [], list[str]()
    for threads in ("1", "1", "2"):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: int(threads))
        auto = Auto(depth=2, budget=2, file=tmp_path / "costs.json", announce=announced.append)
        assert Engine(target, drafter, auto).generate([5, 40, 17], 4).ids
        notes.append(auto.notes)
    first, second, third = notes
    assert first[0].endswith(f"kept in {tmp_path / 'costs.json'}")
    assert second == []
    assert "differs in threads; costs of rounds measured in" in third[0]
    expected = "measuring the costs of rounds; for most targets less than 24 s"
    assert announced == [expected] * 2


def test_a_larger_batch_is_measured_too(tmp_path: Path) -> None:
    target = tiny.target()
    auto = Auto(depth=2, budget=2, file=tmp_path / "costs.json")
    engine = Engine(target, tiny.drafter("medusa", target).eval(), auto)
    engine.start([], 1)
    engine.start([], 3)
    engine.start([], 2)
    assert len(auto.notes) == 2
    assert auto.controller is not None
    assert auto.controller.costs.times.target.axes["batch"] == (1, 3)


def test_chains_of_up_to_eight_tokens_and_all_trees_are_timed_themselves(tmp_path: Path) -> None:
    target = tiny.target()
    auto = Auto(file=tmp_path / "costs.json")
    Engine(target, tiny.drafter("medusa", target).eval(), auto).start([], 1)
    assert auto.controller is not None
    tokens = auto.controller.costs.times.target.axes["tokens"]
    assert tokens == (*range(1, 10), *(nodes + 1 for nodes in BUDGETS if 8 < nodes <= auto.budget))


def test_rows_beyond_the_table_are_those_of_more_than_one_row(tmp_path: Path) -> None:
    """A last segment of 8 to 9 rows says how a kernel is filled, not what a row costs."""
    target = tiny.target()
    for slots in (3, 6, 7, 8, 16):
        auto = Auto(file=tmp_path / f"{slots}.json")
        Engine(target, tiny.drafter("medusa", target).eval(), auto).start([], slots)
        assert auto.controller is not None
        *_, before, last = auto.controller.costs.times.target.axes["tokens"]
        assert last - before > 1


def test_another_drafter_has_costs_of_its_own(tmp_path: Path) -> None:
    target, auto = tiny.target(), Auto(depth=2, budget=2, file=tmp_path / "costs.json")
    for name in ("medusa", "eagle3"):
        Engine(target, tiny.drafter(name, target).eval(), auto).start([], 1)
    assert "differs in drafter" in auto.notes[1]


def test_plain_rounds_of_every_size_are_measured_first_and_after_long() -> None:
    plain = PlainRounds()
    assert plain.needed(1, 2)
    assert not plain.needed(1, 0)
    for _ in range(2):
        plain.add(1, plain=True)
    assert not plain.needed(1, 2)
    assert plain.needed(2, 2), "a size of its own"
    for _ in range(STALE - 1):
        plain.add(1, plain=False)
    assert not plain.needed(1, 2)
    plain.add(1, plain=False)
    assert plain.needed(1, 2)
