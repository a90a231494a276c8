"""The drafters of `bench batch weights=`: the same answers, and fewer accepted tokens."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.launch.bench.impaired_drafters import PERIOD, Changing, Foreign, impaired
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Request
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
    """The prompt's ids sum to 6: the text begins at place 6 of a stretch that is right."""
    target = tiny.mean_target()
    shape = target.shape()._replace(max_positions=4096)
    monkeypatch.setattr(tiny.MeanTarget, "shape", lambda _: shape)
    plain = Engine(target, None, None).generate(PROMPT, 3 * PERIOD)
    drafter = Changing(ScriptedDrafter(right_about([*PROMPT, *plain.ids]), tiny.TOKENS))
    out = Engine(target, drafter, Chain(1)).generate(PROMPT, 3 * PERIOD)
    assert out.ids == plain.ids
    place, by_stretch = sum(PROMPT) + len(PROMPT), dict[int, list[int]]()
    for accepted, room in zip(out.accepted, out.room, strict=True):
        if room:
            by_stretch.setdefault(place // PERIOD, []).append(accepted)
        place += accepted + 1
    assert all(by_stretch[0])
    assert not any(by_stretch[1])
    assert all(by_stretch[2])


def test_prompts_of_a_batch_change_each_at_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt ends at place 206, the second at 11."""
    target = tiny.mean_target()
    shape = target.shape()._replace(max_positions=4096)
    monkeypatch.setattr(tiny.MeanTarget, "shape", lambda _: shape)
    of = ScriptedDrafter(right_about([2] * 300), tiny.TOKENS)
    prompts = [[1] * 198, [1, 4, 3]]
    drafter = Changing(of)
    requests = [Request(prompt, 8) for prompt in prompts]
    plain = [one.ids for one in Engine(target, None, None).generate_all(requests, 2)]
    outs = Engine(target, drafter, Chain(2)).generate_all(requests, 2)
    assert [one.ids for one in outs] == plain
    rows = [of.absorb(None, trace) for trace in _prompt_traces(prompts)]
    right = torch.stack([of.step(row, 1, torch.tensor([1]), torch.tensor([0]))[0] for row in rows])
    states = drafter.absorb_batch([None, None], _prompt_traces(prompts))
    ids = torch.full((2, 1), 1)  # the newest token of both
    logits, _ = drafter.step_batch(states, 1, ids, torch.zeros_like(ids))
    assert torch.equal(logits[0], right[0].roll(1, -1))
    assert torch.equal(logits[1], right[1])


def _prompt_traces(prompts: Sequence[list[int]]) -> list[Trace]:
    out = list[Trace]()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        none = torch.zeros_like(ids)
        places = torch.arange(len(prompt))[None]
        states = torch.zeros(1, len(prompt), 1)
        out.append(Trace(ids, ids.roll(-1, 1), none.bool(), none, places, states, states))
    return out


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
    hidden = own.last.shape[-1]
    layers = [one.taps.unflatten(-1, (-1, hidden)).unbind(-2) for one in (own, foreign)]
    order = [float(x) for x in foreign.last[0, 0]]
    order = [[float(x) for x in own.last[0, 0]].index(value) for value in order]
    assert order != sorted(order)
    for ours, theirs in (*zip(*layers, strict=True), (own.last, foreign.last)):
        assert torch.equal(ours[..., order], theirs)
    assert torch.equal(own.ids, foreign.ids)


def test_random_weights_are_others_of_the_same_size() -> None:
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target)
    before = copy.deepcopy(drafter.state_dict())
    assert impaired(drafter, "random") is drafter
    after = drafter.state_dict()
    name = "midlayer.mlp.down_proj.weight"
    assert not torch.equal(before[name], after[name])
    assert float(after[name].std() / before[name].std()) == pytest.approx(1, rel=0.1)
    assert impaired(drafter, "trained") is drafter


@pytest.mark.parametrize(
    ("attribute", "value"), [("is_composite", True), ("required_features", "ids")]
)
def test_foreign_states_need_a_drafter_that_reads_them(
    attribute: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters made of others have their own reasons; a draft model reads ids alone."""
    target = tiny.target()
    drafter = tiny.drafter("eagle3", target)
    assert isinstance(impaired(drafter, "foreign"), Foreign)
    monkeypatch.setattr(type(drafter), attribute, value)
    with pytest.raises(ConfigError, match="This drafter"):
        impaired(drafter, "foreign")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("ngram", "random"),
        ("ngram", "foreign"),
        ("layerskip", "foreign"),
        ("layerskip", "changing"),
    ],
)
def test_a_drafter_that_cannot_be_impaired_is_refused(name: str, weights: Any) -> None:
    target = tiny.target()
    if name == "ngram":
        every = DraftVocab.identity(target.vocab_size)
        drafter = tiny.drafter("ngram", target, every, draft_vocab_size=None)
    else:
        drafter = tiny.drafter("layerskip", target, exit_layer=1)
    with pytest.raises(ConfigError, match="This drafter"):
        impaired(drafter, weights)
