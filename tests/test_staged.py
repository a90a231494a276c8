"""Tests specific to staged speculation; the common contract is in test_drafter_contract.py.

Against a second way to the same numbers: `draft_lm`, transformers on every node's text, the engine
that decodes the draft model with the inner drafter, and plain decoding.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Draft, Policy
from outrider.models.decode.request import Output, Request
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafters.staged import Staged
from outrider.models.drafting.drafter import Drafter, State
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import tiny
from tests.enumeration import distance
from tests.families import FAMILIES, small_model
from tests.test_drafter_contract import (
    BUDGET,
    PROMPT,
    SAMPLED,
    emitted_distribution,
    five_token_pair,
    plain_distribution,
)
from tests.test_lookup import REPEATING, trace_of

NGRAM: dict[str, Any] = {"name": "ngram"}
SILENT: dict[str, Any] = {"name": "ngram", "n": 64, "least": 64}  # longer than every text here
THREE: dict[str, Any] = {"name": "staged", "depths": 6, "inner": NGRAM}
INNER: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "suffix": {"name": "suffix"},
    "eagle3": {"name": "eagle3"},
    "medusa": {"name": "medusa"},
    "mtp": {"name": "mtp"},
    "draft_lm": {"name": "draft_lm"},
    "three stages": THREE,
}
each_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
POLICIES: list[Policy] = [Chain(5), DynamicTree(4, 2, 6)]
PROMPTS = [REPEATING, REPEATING[:5], [11], REPEATING[2:] * 2]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def staged(of: Target, inner: dict[str, Any] | None, size: int = tiny.VOCAB, **how: Any) -> Staged:
    drafter = tiny.drafter("staged", of, tiny.vocab(size, of.vocab_size), inner=inner, **how)
    assert isinstance(drafter, Staged)
    return drafter.eval()


def plain_lm(of: Target, size: int = tiny.VOCAB) -> DraftLm:
    """With the weights of `staged`."""
    drafter = tiny.drafter("draft_lm", of, tiny.vocab(size, of.vocab_size))
    assert isinstance(drafter, DraftLm)
    return drafter.eval()


def decoded(of: Target, drafter: Drafter | None, policy: Policy | None, batch: int) -> list[Output]:
    requests = [Request(prompt, 16, seed) for seed, prompt in enumerate(PROMPTS)]
    return Engine(of, drafter, policy).generate_all(requests, batch)


def answers(outputs: Sequence[Output]) -> list[tuple[list[int], list[int]]]:
    return [(out.ids, out.accepted) for out in outputs]


@torch.no_grad()
def alone(drafter: DraftLm, text: Sequence[int]) -> Tensor:
    """The draft model's logits after a text by transformers, without cache or mask."""
    ids = torch.tensor([list(text)])
    out: Tensor = drafter.lm.model(input_ids=ids, use_cache=False).logits[0, -1]
    return out[drafter.vocab.target_ids]


def absorbed(drafter: Drafter, text: Sequence[int]) -> State:
    with torch.no_grad():
        return drafter.absorb(None, trace_of(list(text[:-1]), text[-1]))


class Forwards:
    """Counts the forwards of a draft model, the prompts in them, and tokens per prompt."""

    def __init__(self, drafter: DraftLm, patch: pytest.MonkeyPatch) -> None:
        self.count, self.prompts, self.widths = 0, 0, list[int]()
        forward = drafter.lm.forward

        def counted(ids: Tensor, *args: Any, **named: Any) -> Any:
            self.count, self.prompts = self.count + 1, self.prompts + len(ids)
            self.widths.append(ids.shape[1])
            return forward(ids, *args, **named)

        patch.setattr(drafter.lm, "forward", counted)


# ---- without an inner draft it is draft_lm -------------------------------------------------------


def logits_of_run(
    of: Target, drafter: Drafter, policy: Policy, batch: int, patch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[tuple[list[int], list[int]]]]:
    """The logits of every step of a run, and its answers."""
    rows, step = list[Tensor](), drafter.step_batch

    def recorded(*level: Any) -> Any:
        logits, states = step(*level)
        rows.append(logits)
        return logits, states

    patch.setattr(drafter, "step_batch", recorded)
    return rows, answers(decoded(of, drafter, policy, batch))


@pytest.mark.parametrize("inner", [None, SILENT], ids=["null", "silent"])
@pytest.mark.parametrize("policy", [*POLICIES, StaticTree(((0,), (1,), (0, 0)))])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("size", [tiny.VOCAB, tiny.DRAFTED])
def test_without_an_inner_draft_it_is_draft_lm_to_the_bit(
    target: Target, inner: Any, policy: Policy, batch: int, size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    both = [plain_lm(target, size), staged(target, inner, size)]
    runs = [logits_of_run(target, one, policy, batch, monkeypatch) for one in both]
    (rows, expected), (found, ours) = runs
    assert ours == expected
    assert len(found) == len(rows) > 10
    assert all(map(torch.equal, found, rows))


# ---- rows are the draft model's ------------------------------------------------------------------


class InnerRows(Staged):
    """Negative control: returns the inner drafter's own rows."""

    def step_batch(self, states: Any, depth: int, *level: Tensor) -> Any:
        logits, found = super().step_batch(states, depth, *level)
        assert self.inner is not None
        for row, state in zip(logits, found, strict=True):
            for i, node in enumerate(state.level):
                own = state.inner
                for d, token in enumerate((state.newest, *node), start=1):
                    only = torch.zeros(1, dtype=torch.long)
                    rows, own = self.inner.step(own, d, torch.tensor([token]), only)
                row[i] = rows[0].clamp(min=-20)
        return logits, found


@torch.no_grad()
def tree_rows(drafter: DraftLm, text: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """(logits, the draft model's own) of every node of a tree that mixes guesses and others."""
    state, pairs = absorbed(drafter, text), list[tuple[Tensor, Tensor]]()
    ids, parents = [text[-1]], [0]
    nodes: list[tuple[int, ...]] = [()]
    for depth in range(1, 5):
        logits, state = drafter.step(state, depth, torch.tensor(ids), torch.tensor(parents))
        pairs += [
            (row, alone(drafter, [*text, *node])) for row, node in zip(logits, nodes, strict=True)
        ]
        children = []
        for i, row in enumerate(logits[:2]):  # the best two tokens, and one that repeats the text
            tokens = drafter.vocab.to_target(row.topk(2).indices).tolist()
            children += [(i, token) for token in dict.fromkeys([*tokens, text[depth]])]
        parents, ids = [i for i, _ in children], [token for _, token in children]
        nodes = [(*nodes[i], token) for i, token in children]
    return pairs


@each_inner
@pytest.mark.parametrize("text", [REPEATING, [3, 4, 8, 6, 3]], ids=["repeating", "short"])
def test_every_row_is_the_draft_models_own(
    target: Target, inner: dict[str, Any], text: list[int]
) -> None:
    drafter = staged(target, inner, tiny.DRAFTED, inner_width=6)
    with torch.no_grad():  # larger weights, so that a wrong mask shows
        for value in drafter.lm.model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    pairs = tree_rows(drafter, text)
    assert len(pairs) > 12
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inner", [NGRAM, INNER["eagle3"]], ids=["ngram", "eagle3"])
def test_the_inner_drafters_rows_fail_the_comparison(target: Target, inner: dict[str, Any]) -> None:
    """The control of the test above, and of the law of the drafts."""
    drafter = staged(target, {**inner, "draft_vocab_size": None})
    drafter.__class__ = InnerRows
    for found, expected in tree_rows(drafter, REPEATING):
        assert float((found.softmax(0) - expected.softmax(0)).abs().sum()) / 2 > 0.01


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "mistral"])
def test_rows_of_other_families(target: Target, family: str, tmp_path: Path) -> None:
    """Windows that are shorter than the text, and learned positions."""
    small_model(family, seed=7).save_pretrained(tmp_path)
    drafter = staged(target, NGRAM, path=str(tmp_path), inner_width=6)
    for found, expected in tree_rows(drafter, REPEATING):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_the_inner_drafter_reads_the_draft_models_states(
    target: Target, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two pieces of a text and of tree nodes: each row against one pass over its own text."""
    drafter, seen = staged(target, INNER[kind], inner_width=4), list[Trace]()
    assert drafter.inner is not None
    absorb = drafter.inner.absorb_batch

    def recorded(states: Any, traces: Sequence[Trace]) -> Any:
        seen.extend(traces)
        return absorb(states, traces)

    monkeypatch.setattr(drafter.inner, "absorb_batch", recorded)
    with torch.no_grad():
        rows = trace_of(REPEATING[7:11], REPEATING[11])
        rows = dataclasses.replace(rows, positions=rows.positions + 7)
        state = drafter.absorb(absorbed(drafter, REPEATING[:8]), rows)
        levels = [([REPEATING[11]], [0]), ([4, 9, 5], [0, 0, 0]), ([7, 8], [2, 0])]
        for depth, (ids, parents) in enumerate(levels, start=1):
            _, state = drafter.step(state, depth, torch.tensor(ids), torch.tensor(parents))
    assert [trace.ids.shape[1] for trace in seen] == [7, 4, 1, 1, 1, 2, 2]
    for trace in seen:
        first, ids = int(trace.positions[0, 0]), trace.ids[0].tolist()
        text = torch.tensor([[*REPEATING[:first], *ids, int(trace.next_ids[0, -1])]])
        count = text.shape[1]
        causal = torch.ones(1, count, count, dtype=torch.bool).tril()
        states = drafter.lm.forward(text, torch.arange(count)[None], causal)
        assert trace.positions[0].tolist() == list(range(first, count - 1))
        assert trace.next_ids[0].tolist() == text[0, first + 1 :].tolist()
        for found, own in zip((trace.taps, trace.last), states, strict=True):
            torch.testing.assert_close(found, own[:, first:-1], atol=1e-5, rtol=1e-4)


# ---- greedy answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_plain_decoding(family: str) -> None:
    """The next test has every inner drafter in every batch."""
    of = Target(small_model(family))
    plain = [out.ids for out in decoded(of, None, None, 1)]
    for inner, batch in ((NGRAM, 1), (THREE, 4)):
        drafter = staged(of, inner, inner_width=2)
        for policy in POLICIES:
            assert [out.ids for out in decoded(of, drafter, policy, batch)] == plain


@each_inner
def test_accepted_tokens_are_those_of_draft_lm(target: Target, inner: dict[str, Any]) -> None:
    reference, drafter = plain_lm(target), staged(target, inner, inner_width=2)
    for policy in POLICIES:
        for batch in (1, 4):
            expected = answers(decoded(target, reference, policy, batch))
            assert answers(decoded(target, drafter, policy, batch)) == expected


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_bad_inner_logits_are_harmless(
    target: Target, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, step = staged(target, INNER["eagle3"]), None
    assert drafter.inner is not None
    step = drafter.inner.step_batch

    def bad(*level: Any) -> Any:
        logits, states = step(*level)
        return torch.full_like(logits, value), states

    monkeypatch.setattr(drafter.inner, "step_batch", bad)
    expected = answers(decoded(target, plain_lm(target), POLICIES[0], 4))
    assert answers(decoded(target, drafter, POLICIES[0], 4)) == expected


def test_guesses_beyond_the_last_position_are_harmless() -> None:
    of = tiny.target(max_position_embeddings=32)
    requests = [Request(REPEATING, 32 - len(REPEATING), 0)]
    outs = [
        Engine(of, drafter, policy).generate_all(requests, 1)[0].ids
        for drafter, policy in [(None, None), (staged(of, NGRAM), Chain(5))]
    ]
    assert outs[0] == outs[1]


# ---- sampling ------------------------------------------------------------------------------------


def five_tokens(inner: dict[str, Any], size: int = 4) -> tuple[Target, Staged]:
    of, _ = five_token_pair("draft_lm")
    drafter = staged(of, inner, size, inner_width=2)
    with torch.no_grad():  # far from uniform, so that a wrong row shows
        drafter.lm_head.weight.mul_(30)
    drafter.requires_grad_(False)
    return of, drafter


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "sampling"), SAMPLED, ids=["chain", "tree", "drawn tree"])
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "three stages"])
def test_sampling_has_exactly_the_distribution_of_plain_sampling(
    policy: Policy, sampling: Any, kind: str
) -> None:
    """Four tokens jointly, V = 5, four of them draftable; exact up to float32 rounding."""
    of, drafter = five_tokens(INNER[kind])
    decoder = Engine(of, drafter, policy, sampling=sampling)
    assert distance(emitted_distribution(decoder), plain_distribution(of, sampling)) < 1e-5


@dataclasses.dataclass(frozen=True)
class WrongRows(Chain):
    """Negative control: the first row that verification receives is half the inner drafter's.

    The other half is the row that the token was drawn from, since a rule refuses a token of
    probability 0.
    """

    def propose(self, context: DraftContext) -> Draft:
        before: Any = context.states
        draft, only = super().propose(context), torch.zeros(1, 1, dtype=torch.long)
        assert draft.q_rows is not None
        assert isinstance(context.drafter, Staged)
        assert context.drafter.inner is not None
        inner = [state.inner for state in before]
        rows, _ = context.drafter.inner.step_batch(inner, 1, context.roots[:, None], only)
        wrong = draft.q_rows.clone()
        wrong[:, 0] = (wrong[:, 0] + context.sampling.probs(rows)[:, 0]) / 2
        return Draft(draft.tree, wrong)


@pytest.mark.slow
def test_the_inner_drafters_row_has_another_law() -> None:
    """The control of the test above."""
    of, drafter = five_tokens({**INNER["eagle3"], "draft_vocab_size": None}, size=5)
    policy, sampling = SAMPLED[0]
    assert isinstance(policy, Chain)
    wrong = Engine(of, drafter, WrongRows(policy.depth), sampling=sampling)
    assert distance(emitted_distribution(wrong), plain_distribution(of, sampling)) > 0.01


def test_guesses_are_used_while_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumerations above meet known nodes and unknown ones."""
    of, drafter = five_tokens(NGRAM)
    forwards = Forwards(drafter, monkeypatch)
    policy, sampling = SAMPLED[0]
    engine, counts = Engine(of, drafter, policy, sampling=sampling), set[int]()
    for _ in range(12):
        before = forwards.count
        engine.generate(PROMPT, BUDGET)
        counts.add(forwards.count - before)
    assert len(counts) > 1
