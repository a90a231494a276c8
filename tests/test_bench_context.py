"""`outrider bench context`: prompts are read once, and its ratios and verdicts follow by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import ConfigError
from outrider.launch.bench import context
from outrider.launch.bench.common import build_drafter
from outrider.launch.bench.context import Options, ReadPrompts
from outrider.launch.cli import main
from outrider.models.cache.kv_cache import KVCache
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.target.load import TINY
from tests import tiny
from tests.families import small_model

SMALL = ("contexts=[96,128]", "batches=[1,2]", "rounds=2", "repeats=1", "window=8", "depth=3")


@pytest.mark.parametrize("drafts", ["target", "draft model"])
@pytest.mark.parametrize("method", ["streaming", "snapkv"])
def test_prompts_in_the_cache_are_decoded_as_if_they_were_read(
    method: str, drafts: str, tmp_path: Path
) -> None:
    target = tiny.target()
    if drafts == "draft model":
        small_model("llama", seed=7).save_pretrained(tmp_path)
    path = str(tmp_path) if drafts == "draft model" else ""
    options = Options(path=path, method=method, window=8, sinks=2, depth=3)
    requests = context.requests_of(list(range(3, 40)), 60, 2, 12)
    drafter = build_drafter(options.config(16), target)
    cache = drafter.new_cache(target, 90, 2)
    assert isinstance(cache, KVCache)
    first = ReadPrompts(target, drafter, Chain(3))
    events = first.use_cache(cache, 0).run(requests, 2)
    assert [event.number for event, _ in zip(events, requests, strict=False)] == [0, 1]
    given = ReadPrompts(target, drafter, Chain(3)).use_cache(cache, 60 - 8)
    expected = Engine(target, drafter, Chain(3)).generate_all(requests, 2)
    found = {event.number: event.out for event in given.run(requests, 2)}
    for number, out in enumerate(expected):
        assert found[number].ids == out.ids
        assert found[number].accepted == out.accepted
        assert sum(out.drafted) > 0


def test_the_command_writes_a_row_per_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "context.json"
    words = ["bench", "context", *SMALL, "budgets=[24,128]", f"out={out}"]
    assert main(words) == 0
    rows = json.loads(out.read_text())["rows"]
    cases = [(row["context"], row["batch"], row["budget"]) for row in rows]
    assert cases == [(c, b, k) for c in (96, 128) for b in (1, 2) for k in (24, 128)]
    assert all(row["alpha"] == 1 and row["tau"] == 4 for row in rows if row["budget"] == 128)
    assert any(row["alpha"] < 1 for row in rows if row["budget"] == 24)
    text = capsys.readouterr().out
    assert text.startswith("batch 1: ")
    assert max(map(len, text.splitlines()[:11])) <= 80


def test_a_draft_model_with_the_weights_of_the_target_drafts_all_tokens(tmp_path: Path) -> None:
    out = tmp_path / "context.json"
    words = ["bench", "context", *SMALL, "budgets=[24,128]", f"path={TINY}", f"out={out}"]
    assert main(words) == 0
    rows = json.loads(out.read_text())["rows"]
    assert all(row["alpha"] == 1 and row["tau"] == 4 for row in rows if row["budget"] == 128)
    assert any(row["alpha"] < 1 for row in rows if row["budget"] == 24)


def test_ratios_are_those_of_the_times() -> None:
    """A chain of 4, alpha 0.5: tau = 1.9375 by the formula; (4 * 0.5 + 1.5) plain steps a round."""
    plain = {"seconds": 2.0, "draft": 0.0, "target": 2.0, "tau": 1.0, "alpha": 0.0}
    drafted = {"seconds": 8.0, "draft": 4.0, "target": 3.0, "tau": 2.0, "alpha": 0.5}
    row = context.compare(Options(depth=4), plain, drafted)
    assert (row["draft"], row["verify"], row["found"]) == (0.5, 1.5, 0.5)
    assert row["plan"] == pytest.approx(1.9375 / 3.5)
    assert row["plain_ms"] == 2000


def test_the_verdict_names_the_shortest_context_from_which_all_are_faster() -> None:
    def row(length: int, batch: int, found: float) -> dict[str, Any]:
        return {"context": length, "batch": batch, "budget": 64, "found": found}

    options = Options(contexts=(512, 1024, 2048), batches=(1, 4))
    found = {1: (1.1, 0.9, 1.2), 4: (0.5, 0.7, 0.8)}
    rows = [row(n, b, found[b][i]) for b in found for i, n in enumerate(options.contexts)]
    assert [*context.verdicts(options, rows)] == [
        "batch 1: faster from a context of 2048, at most 1.20x",
        "batch 4: not faster at 2048, at most 0.80x",
    ]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"budgets": (4,)}, "budgets"),
        ({"method": "h2o"}, "method"),
        ({"contexts": (4096,)}, "contexts[0]"),
        ({"contexts": (1024, 100)}, "contexts[1]"),
    ],
)
def test_cases_that_cannot_be_measured_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        context.check(Options(**changes), tiny.target(max_position_embeddings=2048))
    assert error.value.key == key
    assert "drafter." not in str(error.value)
