"""`outrider bench turns`: drafters of one target by turns, and the ratios of its table."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import Config
from outrider.data.conversations import Prompt
from outrider.data.suite import alternating
from outrider.eval.decoder import Decoder
from outrider.launch.bench import turns
from outrider.launch.bench.turns import Answer, Turn
from outrider.models.decode.request import Request
from outrider.models.drafters.eagle3 import Eagle3
from outrider.models.drafters.suffix import Suffix
from outrider.models.drafting.drafter import Drafter
from tests import tiny
from tests.test_eval_run import workspace  # noqa: F401 - a fixture
from tests.test_plan_command import run  # noqa: F401 - a fixture


def measured(run: Config, tmp_path: Path, *words: str) -> list[dict[str, Any]]:  # noqa: F811
    """Return the rows of the benchmark."""
    out = tmp_path / "turns.json"
    suite = f"prompts={Path(run.run.dir).parent / 'suite.jsonl'}"
    assert turns.turns([f"run.dir={run.run.dir}", "tokens=6", suite, f"out={out}", *words]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_every_drafter_decodes_every_prompt(
    run: Config,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They share a target."""
    targets, decoded = set[int](), list[str]()
    names = {"eagle3", "suffix", "hybrid"}
    load, answer = Decoder.with_target, turns._answer

    def with_target(target: Any, *values: Any) -> Decoder:
        targets.add(id(target))
        return load(target, *values)

    def counted(request: Any, decoders: Any, name: str, temperature: float) -> Answer:
        decoded.append(name)
        return answer(request, decoders, name, temperature)

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Decoder, "with_target", with_target)
    monkeypatch.setattr(turns, "_answer", counted)
    rows = measured(run, tmp_path, "repeats=2", "drafters=suffix,hybrid")
    assert len(targets) == 1
    rounds = [decoded[i : i + 4] for i in range(0, len(decoded), 4)]
    assert len(rounds) == 1 + 2 * 3  # the first to warm up
    assert all({*one} == {"plain", *names} for one in rounds)
    assert [(row["category"], row["prompts"], row["answers"]) for row in rows] == [
        ("short", 2, 4), ("talk", 1, 2), (turns.ALL, 3, 6),
    ]  # fmt: skip
    for row in rows:
        assert {*row["speedup"]} == names
        assert row["same"] == row["compared"] == 3 * row["answers"]
        assert row["last"] == "hybrid"
        assert (row["last of best_95"] is None) == (row["prompts"] == 1)
        assert row["extra"] is not None
    printed = capsys.readouterr()
    assert all(name in printed.out for name in (*names, "hybrid of best"))
    for name in names:
        assert f"{name}: measuring the costs of rounds; for most" in printed.err


def test_the_order_is_another_for_the_prompts_of_a_category(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight categories alternate, so that every eighth prompt is of the same one."""
    decoded = list[str]()

    def answer(request: Any, decoders: Any, name: str, temperature: float) -> Answer:
        decoded.append(name)
        return Answer(1.0, 1, [0])

    monkeypatch.setattr(turns, "_answer", answer)
    decoders = dict.fromkeys("abc", Decoder(tiny.target(), None, None))
    for number in range(0, 48, 8):
        found = turns.answers_to(Request([1], 2), decoders, number, 0.0)
        assert [*found] == ["plain", *"abc"]
    orders = {tuple(decoded[i : i + 4]) for i in range(0, len(decoded), 4)}
    assert {order[0] for order in orders} == {"plain", *"abc"}
    assert len(orders) > 4


def test_drafters_of_other_folders_are_compared(run: Config, tmp_path: Path) -> None:  # noqa: F811
    (row,) = measured(run, tmp_path, f"drafters={run.run.dir}", "order=grouped", "limit=2")[-1:]
    assert {*row["speedup"]} == {"eagle3", run.run.dir}
    assert row["same"] == row["compared"]


def test_no_round_is_an_error(run: Config) -> None:  # noqa: F811
    with pytest.raises(RunError, match="ends at once"):
        turns.turns([f"run.dir={run.run.dir}", "tokens=1", "limit=2"])


def test_drawn_answers_are_not_compared(run: Config, tmp_path: Path) -> None:  # noqa: F811
    words = ("drafters=suffix", "temperature=1", "decode=chain")
    row = measured(run, tmp_path, *words)[-1]
    assert row["same"] is None
    assert row["extra"] is None  # chains have no ledger


def turn(category: str, prompt: int, **seconds: float) -> Turn:
    """Answers of ten tokens after the first; b is right in prompt 0 alone."""
    return Turn(category, prompt, {
        name: Answer(value, 10, [prompt, 0 if name != "b" else prompt], value / 100)
        for name, value in seconds.items()
    })  # fmt: skip


def test_rows_are_ratios_of_seconds_per_token() -> None:
    done = [
        turn("x", 0, plain=4.0, a=2.0, b=1.0),
        turn("y", 1, plain=8.0, a=2.0, b=4.0),
        turn("x", 2, plain=4.0, a=4.0, b=1.0),
    ]
    x, y, both = turns.rows_of(done, greedy=True)
    assert (x["category"], y["category"], both["category"]) == ("x", "y", turns.ALL)
    assert x["speedup"] == pytest.approx({"a": 8 / 6, "b": 4.0})
    assert x["last of best"] == pytest.approx(3.0)
    assert x["last of best_95"] == pytest.approx((2.0, 4.0))
    assert x["speedup_95"] == {"a": pytest.approx((1.0, 2.0)), "b": pytest.approx((4.0, 4.0))}
    assert x["turns"][1] == {"prompt": 2, "plain": [4.0, 10], "a": [4.0, 10], "b": [1.0, 10]}
    assert y["last of best"] == pytest.approx(0.5)
    assert both["speedup"] == pytest.approx({"a": 2.0, "b": 16 / 6})
    assert both["plain/s"] == pytest.approx(30 / 16)
    assert both["extra"] == pytest.approx(0.04)
    assert (x["same"], y["same"], both["compared"]) == (3, 1, 6)


def test_prompts_whose_answers_end_at_once_are_left_out() -> None:
    counted = turn("x", 0, plain=4.0, a=2.0, b=1.0)
    ended = Turn("y", 1, {**counted.answers, "b": Answer(0.0, 0, [2])})
    (row,) = turns.rows_of([counted, ended], greedy=True)
    assert (row["category"], row["answers"]) == ("x", 1)
    assert turns.rows_of([ended], greedy=True) == []


def test_categories_alternate() -> None:
    prompts = [Prompt(name, name[0], [name]) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    order = [prompt.id for prompt in alternating(prompts)]
    assert order == ["a1", "b1", "c1", "a2", "c2", "a3"]


@pytest.mark.parametrize(("words", "message"), [
    (["drafters=suffix,suffix"], "named twice"),
    (["drafters=eagle"], "It has weights"),
    (["drafters=multi"], "Drafters that draft together"),
    (["drafters=plain"], "compared in any case"),
    (["decode=nothing"], "no draft shape of this name"),
])  # fmt: skip
def test_wrong_words_are_named(run: Config, words: list[str], message: str) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=message):
        turns.turns([f"run.dir={run.run.dir}", *words])


@pytest.mark.parametrize(("kind", "key"), [(Eagle3, "run.dir"), (Suffix, "drafters")])
def test_a_drafter_that_changes_the_target_is_refused(
    run: Config,  # noqa: F811
    kind: type[Drafter],
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for method in ("describe_target_change", "patch_target"):
        monkeypatch.setattr(kind, method, lambda *_: "it has adapters")
    with pytest.raises(ConfigError, match=f"{key} = .*\\s+.*share a target, and it has adapters"):
        turns.turns([f"run.dir={run.run.dir}", "drafters=suffix"])


def test_a_drafter_without_auto_is_refused_before_anything_is_measured(run: Config) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="drafts in the target's cache"):
        turns.turns([f"run.dir={run.run.dir}", "drafters=sparse_kv"])
