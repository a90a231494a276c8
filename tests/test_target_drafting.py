"""Drafters that run draft tokens through the target: what all of them owe.

A new subclass of `TargetDrafter` is tested here without a change to this file, except for the
settings of its variants. Trained ones have random weights here, and the target is changed if they
change it; test_drafter_contract.py has the tests of training.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models import drafters
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.decode.adaptive_confidence import AdaptiveConfidence
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.rules.rule_table import COUPLED, DRAWN, INDEPENDENT, bind_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.target_drafting import TargetDrafter
from outrider.models.target.target import Target
from tests import tiny
from tests.enumeration import distance
from tests.families import FAMILIES, small_model
from tests.test_drafter_contract import (
    emitted_distribution,
    plain_distribution,
    same,
    supervised,
    unrolled,
    walked,
)

NAMES = [
    name for name in drafters.names() if issubclass(drafters.drafter_class(name), TargetDrafter)
]
# settings with which a drafter drafts badly, and with which it drafts what the target decodes
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "layerskip": [{"exit_layer": 1}, {"exit_layer": 3}],
    "draft_verify": [{"skip_attention": (1, 2), "skip_mlp": (0, 2)}, {"skip_attention": (3,)}],
    "kangaroo": [{"exit_layer": 2}, {"exit_layer": 4}],
    "sparse_kv": [
        {"budget": 3, "sinks": 1},
        {"method": "snapkv", "budget": 3, "window": 2, "pool": 3},
    ],
}
PERFECT: dict[str, dict[str, Any]] = {
    "draft_verify": {},
    "layerskip": {"exit_layer": 4},
    "sparse_kv": {"method": "snapkv"},
}
CASES = [(name, changes) for name in NAMES for changes in SETTINGS[name]]
TRAINED = [case for case in CASES if drafters.drafter_class(case[0]).is_trained]
each_drafter = pytest.mark.parametrize(
    ("name", "changes"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
)
each_trained = pytest.mark.parametrize(
    ("name", "changes"), TRAINED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(TRAINED)]
)
TREE = ((0,), (1,), (0, 0))
POLICIES: list[Policy] = [
    Chain(4),
    Chain(3, confidence=0.5),
    Chain(3, confidence=AdaptiveConfidence(start=0.3, step=2.0)),
    DynamicTree(3, 3, 7),
    StaticTree(TREE),
]
PROMPTS = [[5, 40, 17, 23, 9], [11], [7, 8, 9, 5, 9, 7, 8], [3] * 11]


FAST_FAMILIES = ("llama", "llama_tied", "qwen2", "qwen3", "mistral")
# families, each with the modules of transformers, and with the fast forward where there is one
PATHS = [(f, True) for f in FAMILIES] + [(f, False) for f in FAST_FAMILIES]
each_path = pytest.mark.parametrize(("family", "modules"), PATHS)


def target_of(family: str, modules: bool) -> Target:
    target = Target(small_model(family))
    assert (target.fast_forward is not None) == (family in FAST_FAMILIES)
    if modules:
        target.fast_forward = None
    return target


def random_drafter(name: str, target: Target, changes: dict[str, Any]) -> Drafter:
    """Weights of initial value 0, or that of the target's, are changed."""
    vocab = tiny.vocab(target.vocab_size, target.vocab_size)
    drafter = tiny.drafter(name, target, vocab, draft_vocab_size=None, **changes).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for value in drafter.parameters():
            value.add_(0.05 * torch.randn_like(value))
    return drafter


def build(name: str, target: Target, changes: dict[str, Any]) -> Drafter:
    """Return a drafter and apply its changes of the target."""
    drafter = random_drafter(name, target, changes)
    drafter.patch_target(target)
    return drafter


def requests(budget: int = 14) -> list[Request]:
    return [Request(prompt, budget, seed) for seed, prompt in enumerate(PROMPTS)]


@each_drafter
@each_path
def test_greedy_output_equals_plain_decoding(
    name: str, changes: dict[str, Any], family: str, modules: bool
) -> None:
    """Every policy, alone and in a batch of prompts of several lengths."""
    target = target_of(family, modules)
    drafter = build(name, target, changes)
    plain = [out.ids for out in Engine(target, None, None).generate_all(requests(), 1)]
    for policy in POLICIES:
        for batch in (1, 4):
            outputs = Engine(target, drafter, policy).generate_all(requests(), batch)
            assert [out.ids for out in outputs] == plain
            assert sum(sum(out.drafted) for out in outputs) > 0


@pytest.mark.parametrize("name", PERFECT)
@each_path
def test_a_draft_of_the_whole_target_is_accepted(name: str, family: str, modules: bool) -> None:
    target = target_of(family, modules)
    drafter = build(name, target, PERFECT[name])
    for batch in (1, 4):
        for out in Engine(target, drafter, Chain(4)).generate_all(requests(), batch):
            assert out.accepted == out.drafted
            assert sum(out.accepted) > 0


class FreshPrefill(Engine):
    """Compare the cache after every round with one prefill of the whole text."""

    compared = 0

    def _round(self, active: list[Any]) -> list[int]:
        counts = super()._round(active)
        for slot, one in enumerate(active):
            text = [*one.request.prompt, *one.out.ids][:-1]
            length = self.cache.lengths[slot]
            assert length <= len(text)  # cut at the end of an answer
            parts = self.cache.parts if isinstance(self.cache, SplitCache) else [self.cache]
            assert {part.lengths[slot] for part in parts} == {length}
            fresh = self.target.new_cache(length)
            visible = torch.ones(1, length, length, dtype=torch.bool).tril()
            ids = torch.tensor([text[:length]])
            self.target.forward(ids, torch.arange(length)[None], visible, fresh)
            for layer in range(self.target.num_layers):
                pairs = zip(self.cache.rows(layer, slot), fresh.rows(layer), strict=True)
                for mine, expected in pairs:
                    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(self.cache.positions(slot)[0], torch.arange(length))
            type(self).compared += 1
        return counts


@each_drafter
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_cache_after_every_round_equals_a_fresh_prefill(
    name: str, changes: dict[str, Any], family: str
) -> None:
    target = Target(small_model(family))
    drafter = build(name, target, changes)
    for policy in POLICIES:
        FreshPrefill.compared = 0
        FreshPrefill(target, drafter, policy).generate_all(requests(8), 4)
        assert FreshPrefill.compared > 4


SAMPLED: list[tuple[str, Policy, str | None]] = [
    ("drawn chain", Chain(2, DRAWN), None),
    ("best chain", Chain(2, "best"), None),
    ("dynamic tree", DynamicTree(2, 2, 3), None),
    ("drawn tree", StaticTree(TREE, DRAWN), None),
    ("independent tree", StaticTree(TREE, INDEPENDENT), None),
    ("coupled chain", Chain(2, COUPLED), "coupled"),
]


def five_token_pair(name: str, changes: dict[str, Any]) -> tuple[Target, Drafter]:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target(vocab_size=5, **sizes, **heads)
    return target, build(name, target, changes)


@pytest.mark.slow
@each_drafter
@pytest.mark.parametrize("case", SAMPLED[:5], ids=[label for label, *_ in SAMPLED[:5]])
def test_sampling_has_exactly_the_distribution_of_plain_sampling(
    name: str, changes: dict[str, Any], case: tuple[str, Policy, str | None]
) -> None:
    """Four tokens jointly over five."""
    target, drafter = five_token_pair(name, changes)
    sampling = Sampling(0.8, 1.0, 2)
    rule = None if case[2] is None else bind_rule(case[2], COUPLED)
    decoder = Engine(target, drafter, case[1], sampling=sampling, rule=rule)
    found, expected = emitted_distribution(decoder), plain_distribution(target, sampling)
    assert distance(found, expected) < 1e-5


@pytest.mark.slow
@each_drafter
def test_a_bonus_from_unwarped_logits_has_another_distribution(
    name: str, changes: dict[str, Any]
) -> None:
    """The control of the test above."""
    target, drafter = five_token_pair(name, changes)
    sampling = Sampling(0.8, 1.0, 2)
    wrong = tiny.RawBonus(target, drafter, Chain(2, DRAWN), sampling=sampling)
    assert distance(emitted_distribution(wrong), plain_distribution(target, sampling)) > 0.01


@each_drafter
def test_every_branch_of_a_tree_repeats_the_logits_of_its_own_chain(
    name: str, changes: dict[str, Any]
) -> None:
    """Root -> {4 -> {8}, 9 -> {6, 4}}, against a chain for each path; a state can be used again."""
    target = tiny.target()
    drafter = build(name, target, changes)
    state = state_after(target, drafter, PROMPTS[0])

    def step(state: Any, depth: int, tokens: list[int], parents: list[int]) -> tuple[Tensor, Any]:
        with torch.inference_mode():
            return drafter.step(state, depth, torch.tensor(tokens), torch.tensor(parents))

    def chain(*tokens: int) -> Tensor:
        now = state
        for depth, token in enumerate((30, *tokens), start=1):
            logits, now = step(now, depth, [token], [0])
        return logits[0]

    expected = {path: chain(*path) for path in ((), (4,), (9,), (4, 8), (9, 6), (9, 4))}
    logits, one = step(state, 1, [30], [0])
    torch.testing.assert_close(logits[0], expected[()])
    logits, two = step(one, 2, [9, 4], [0, 0])
    torch.testing.assert_close(logits, torch.stack([expected[(9,)], expected[(4,)]]))
    logits, _ = step(two, 3, [8, 6, 4], [1, 0, 0])
    deep = [expected[path] for path in ((4, 8), (9, 6), (9, 4))]
    torch.testing.assert_close(logits, torch.stack(deep))
    assert (expected[(4, 8)] - expected[(9, 4)]).abs().max() > 1e-3


def state_after(target: Target, drafter: Drafter, prompt: list[int]) -> Any:
    """Return the state after a prompt and its first token, as the engine does."""
    captured = list[Any]()

    class Captured(Engine):
        def _prefill(self, started: list[Any], first: int, dialogue: Any) -> None:
            super()._prefill(started, first, dialogue)
            captured.append(started[0].state)

    Captured(target, drafter, Chain(1)).generate(prompt, 1)
    assert isinstance(captured[0].cache, KVCache | SplitCache)
    return captured[0]


@each_trained
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_steps_repeat_the_unroll_at_every_row_and_depth(
    name: str, changes: dict[str, Any], family: str
) -> None:
    """Steps after the target has read x_0..x_t, in its cache; the unroll reads packed documents.

    The unroll is of the training: its trace is of the target before a change.
    """
    target = tiny.target(family)
    drafter = random_drafter(name, target, changes)
    target.set_taps(drafter.taps)
    trace, compared = tiny.packed_trace(target), 0
    trained = unrolled(drafter, trace)
    drafter.patch_target(target)
    for row, start, stop in tiny.document_spans(trace):
        for t in range(start, stop - 2):
            state = state_after(target, drafter, trace.ids[row, start : t + 1].tolist())
            text = trace.ids[row, t + 1 : min(stop - 1, t + 1 + len(trained))].tolist()
            with torch.inference_mode():  # as the engine, which wrote the cache
                found = walked(drafter, state, text)
            for depth, logits in found.items():
                if trace.supervised_mask(depth)[row, t]:
                    assert same(logits, trained[depth][row, t]), (row, start, t, depth)
                    compared += 1
    assert compared == len(supervised(trace, list(trained))) > 30
