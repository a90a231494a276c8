"""From settings to training material: what is mixed, recorded and shared."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from outrider.data.prepare import Material, material
from outrider.models import drafters
from outrider.models.load import Loaded, load
from outrider.train.compose import compose
from outrider.train.config import parse
from outrider.train.errors import ConfigError

ANSWERS = 20
OWN = [
    "target=tiny", "data=self", "data.max_length=64", "data.holdout=0.2",
    f"data.generate.samples={ANSWERS}", "data.generate.max_new_tokens=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(parse(compose(["target=tiny"])).target)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Ten conversations that nobody wrote here."""
    turns = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Good day."}]
    lines = [json.dumps({"id": f"given-{i}", "messages": turns}) for i in range(10)]
    file = tmp_path / "given.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def prepared(loaded: Loaded, *words: str) -> Material:
    config = parse(compose([*OWN, *words]))
    taps = drafters.taps_of(config.drafter, loaded.target.depth)
    return material(config, loaded, taps, Console(quiet=True), rank=0)


def test_given_conversations_are_mixed_in_at_their_share(loaded: Loaded, given: Path) -> None:
    """A quarter of all: seven beside twenty; the target reads them anew, for nothing is noted."""
    made = prepared(loaded, f"data.given={given}", "data.given_share=0.25")
    assert len(made.documents) == ANSWERS + 7
    assert made.recorded is None
    assert "given" in made.about
    alone = prepared(loaded)
    assert len(alone.documents) == ANSWERS
    assert alone.recorded is not None
    assert made.documents[:ANSWERS] == alone.documents


@pytest.mark.parametrize("first", ["medusa", "eagle3"])
def test_drafters_share_the_recorded_text(loaded: Loaded, first: str) -> None:
    """Whoever came first, the usual taps lie beside the text."""
    for name in (first, *drafters.names()):
        made = prepared(loaded, f"drafter={name}")
        assert made.recorded is not None, name
        assert made.recorded[0].store.taps == (1, 3, 4)


def test_text_that_is_given_anyway_is_not_mixed(given: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.given"):
        parse(compose(["data=jsonl", f"data.path={given}", f"data.given={given}"]))
