"""Drafters that `bench batch weights=` misleads: the same answers, and fewer accepted tokens."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.launch.bench.misled import PERIOD, Changing, Foreign, misled
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Trace
from tests import tiny
from tests.tiny import ScriptedDrafter, Text

PROMPT = [1, 2, 3]


def right_about(text: Sequence[int]) -> Callable[[Text], Tensor]:
    """Return the rows of a drafter that knows a text."""

    def row(prefix: Text) -> Tensor:
        logits = torch.zeros(tiny.TOKENS)
        logits[text[len(prefix)] if len(prefix) < len(text) else 0] = 9.0
        return logits

    return row


def test_a_changing_drafter_is_right_in_every_second_stretch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny.mean_target()
    shape = target.shape()._replace(max_positions=4096)
    monkeypatch.setattr(tiny.MeanTarget, "shape", lambda _: shape)
    plain = Engine(target, None, None).generate(PROMPT, 3 * PERIOD)
    drafter = Changing(ScriptedDrafter(right_about([*PROMPT, *plain.ids]), tiny.TOKENS))
    out = Engine(target, drafter, Chain(1)).generate(PROMPT, 3 * PERIOD)
    assert out.ids == plain.ids
    right, ends = list[int](), [3]
    for accepted in out.accepted:
        right.append(accepted)
        ends.append(ends[-1] + accepted + 1)
    first = [a for a, end in zip(right, ends, strict=False) if end < PERIOD]
    second = [a for a, end in zip(right, ends, strict=False) if PERIOD < end < 2 * PERIOD - 1]
    third = [a for a, end in zip(right, ends, strict=False) if end > 2 * PERIOD]
    assert all(first)
    assert not any(second)
    assert sum(third) > 0.9 * len(third) > 0


def test_a_foreign_drafter_reads_all_states_in_another_order() -> None:
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target)
    seen = list[Trace]()

    class Seen(type(drafter)):  # type: ignore[misc]
        def absorb_batch(self, states: Any, traces: Any) -> Any:
            seen.extend(traces)
            return super().absorb_batch(states, traces)

    drafter.__class__ = Seen
    for one in drafter, Foreign(drafter):
        assert (
            Engine(target, one, Chain(2)).generate(PROMPT, 2).ids
            == Engine(target, None, None).generate(PROMPT, 2).ids
        )
    own, foreign = seen[0], seen[len(seen) // 2]
    for name in "taps", "last":
        ours, theirs = getattr(own, name), getattr(foreign, name)
        assert not torch.equal(ours, theirs)
        assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
    assert torch.equal(own.ids, foreign.ids)


def test_random_weights_are_others_of_the_same_size() -> None:
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target)
    before = copy.deepcopy(drafter.state_dict())
    assert misled(drafter, "random") is drafter
    after = drafter.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert misled(drafter, "trained") is drafter


@pytest.mark.parametrize("weights", ["random", "foreign"])
def test_a_look_up_cannot_be_misled_by_weights(weights: Any) -> None:
    target = tiny.target()
    every = DraftVocab.identity(target.vocab_size)
    look_up = tiny.drafter("ngram", target, every, draft_vocab_size=None)
    with pytest.raises(ConfigError, match="This drafter"):
        misled(look_up, weights)
