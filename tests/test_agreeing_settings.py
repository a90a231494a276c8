"""A drafter's setting that has its default agrees with the one that is given."""

from typing import Any

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.models.adapt import adapt
from outrider.train.settings import parse


def drafter_of(*words: str) -> tuple[Any, list[str]]:
    """The drafter's settings, and the notes of the run."""
    notes = list[str]()
    config = adapt(parse(compose(words), to_train=False), notes.append)
    return config.drafter, notes


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["drafter=lookahead", "drafter.n=4"], "depths", 3),
        (["drafter=lookahead", "drafter.depths=6"], "n", 7),
        (["drafter=ngram", "drafter.least=5"], "n", 5),
        (["drafter=sparse_kv", "drafter.budget=4"], "sinks", 2),
        (["drafter=sparse_kv", "drafter.budget=1"], "sinks", 0),
        (["drafter=sparse_kv", "drafter.sinks=1024"], "budget", 1536),
        (["drafter=sparse_kv", "drafter.method=snapkv", "drafter.budget=16"], "window", 8),
        (["drafter=sparse_kv", "drafter.method=snapkv", "drafter.window=600"], "budget", 1112),
        (["drafter.residual=normed"], "init", "random"),
        (["drafter=medusa", "drafter.adapter_rank=8"], "draft_vocab_size", None),
        (["drafter=mtp", "drafter.warm_start=folder"], "init", "target"),
        (["drafter.depth_weights=1/0.5/0.25"], "depths", 3),
    ],
)
def test_the_other_setting_adapts_with_a_note(words: list[str], key: str, value: object) -> None:
    drafter, notes = drafter_of(*words)
    assert getattr(drafter, key) == value
    shown = "null" if value is None else value
    assert any(f"drafter.{key}={shown}" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["drafter=lookahead", "drafter.n=4", "drafter.depths=5"], "drafter.depths"),
        (["drafter=ngram", "drafter.n=2", "drafter.least=4"], "drafter.least"),
        (["drafter=sparse_kv", "drafter.budget=8", "drafter.sinks=9"], "drafter.budget"),
        (["drafter=medusa", "drafter.adapter_rank=8", "drafter.draft_vocab_size=64"],
         "drafter.draft_vocab_size"),
        (["drafter.depth_weights=1/0.5", "drafter.depths=3"], "drafter.depth_weights"),
    ],
)  # fmt: skip
def test_two_given_settings_that_contradict_each_other_are_refused(
    words: list[str], key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        drafter_of(*words)
    assert refused.value.key == key


def test_a_note_on_depth_names_the_depth() -> None:
    assert drafter_of("drafter=lookahead", "drafter.depths=2")[1] == [
        "not set, so chosen: decode.depth=2, as deep as the drafter can"
    ]


def test_settings_that_agree_have_no_note() -> None:
    assert drafter_of("drafter=lookahead", "drafter.n=4", "drafter.depths=3")[1] == []
