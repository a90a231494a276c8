"""Warping, penalties and bans: equal to transformers' own processors at every step.

The reference is plain decoding: the model itself, without a cache, and the classes that
`generate` of transformers is made of, on the history of each step.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Draft, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.rules.rule_table import DRAWN, INDEPENDENT
from outrider.models.decode.sampling import GeneratorSource
from outrider.models.decode.sampling_params import Sampling, TextTokens, TokenHistory
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree import Tree
from outrider.models.decode.tree_shapes import parse
from outrider.models.decode.verifier import Decision
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.target.target import Target
from tests import tiny
from tests.tiny import TOKENS, Row, ScriptedDrafter, Text, mean_target, random_logits

SHAPE = parse([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
POLICIES: dict[str, Policy] = {
    "chain": Chain(3),
    "static": StaticTree(SHAPE),
    "dynamic": DynamicTree(depth=3, width=3, budget=8),
    "drawn": StaticTree(SHAPE, DRAWN),
    "independent": StaticTree(SHAPE, INDEPENDENT),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
PROMPTS = ([27, 8, 30, 18, 56, 56, 34, 59], [5, 5, 11], [40])
BANNED = (0, 4, 17, 23, 41, 58)
CHANGES: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.6},
    "reward": {"repetition_penalty": 0.7},
    "banned": {"banned": BANNED},
    "both": {"repetition_penalty": 1.3, "banned": BANNED},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8, "presence_penalty": -0.4, "repetition_penalty": 1.1},
}
WARPS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "all": {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.05, **CHANGES["both"]},
}
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
SETTINGS: dict[str, dict[str, Any]] = {
    **WARPS,
    **{name: {"temperature": 0.9, **how} for name, how in CHANGES.items()},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def scores(sampling: Sampling, text: Sequence[int], logits: Tensor) -> Tensor:
    """Logits after a text, processed by transformers in its own order.

    It has no presence and frequency penalty: those are computed by OpenAI's formula.
    """
    chosen: list[Any] = []
    if sampling.repetition_penalty != 1:
        chosen.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.counts_tokens:
        (prompt,) = (one for one in PROMPTS if list(text[: len(one)]) == one)
        counts = torch.tensor(text[len(prompt) :], dtype=torch.long).bincount(minlength=tiny.VOCAB)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty * counts.sign()
        chosen.append(lambda ids, logits: logits - penalties)
    if sampling.banned:
        chosen.append(hf.SuppressTokensLogitsProcessor(list(sampling.banned)))
    if sampling.temperature > 0:
        chosen.append(hf.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chosen.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chosen.append(hf.MinPLogitsWarper(sampling.min_p))
    ids = torch.tensor([list(text)])
    out: Tensor = hf.LogitsProcessorList(chosen)(ids, logits[None].clone())[0]
    return out


@torch.no_grad()
def model_logits(target: Target, text: Sequence[int]) -> Tensor:
    out: Tensor = target.model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0, -1]
    return out


def fresh(number: int, count: int) -> Random:
    """Random numbers of a prompt's next token, of nothing else."""
    return Random(1000 * number + count)


def numbered(sampling: Sampling) -> Engine:
    """Plain decoding with the random numbers of `fresh`."""
    engine = Engine(tiny.target(), None, None, sampling=sampling)
    verifier = engine.verifier
    verifier.random_source = lambda **_: GeneratorSource(  # type: ignore[method-assign]
        [fresh(one.number, len(one.out.ids)) for one in verifier.requests], 1
    )
    return engine


def plainly(sampling: Sampling, prompt: Sequence[int], count: int, number: int = 0) -> list[int]:
    """Plain decoding with transformers' processors; one uniform per token, the law inverted."""
    target, text = tiny.target(), list(prompt)
    for step in range(count):
        left = scores(sampling, text, model_logits(target, text))
        if sampling.greedy:
            text.append(int(left.argmax()))
            continue
        ends = left.softmax(-1).double().cumsum(0)
        uniform = fresh(number, step).random()
        text.append(int((ends <= uniform * ends[-1]).sum()))
    return text[len(prompt) :]


def requests(budget: int = 14) -> list[Request]:
    """Of unequal length, so that slots are given on and their histories with them."""
    return [Request(prompt, budget - 4 * n, n) for n, prompt in enumerate(PROMPTS)]


def mostly_right(sampling: Sampling) -> Row:
    """Logits that favour two of three tokens of the greedy answers under these processors."""
    noise, known = random_logits(tiny.VOCAB, scale=2.0), dict[Text, int]()
    for prompt, budget, *_ in requests():
        text = (*prompt, *plainly(sampling._replace(temperature=0.0), prompt, budget))
        known.update({text[:i]: text[i] for i in range(len(prompt), len(text))})

    def row(prefix: Text) -> Tensor:
        logits = noise(prefix).clone()
        if prefix in known and len(prefix) % 3:
            logits[known[prefix]] = 15.0
        return logits

    return row


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, *POLICIES.values()], ids=["plain", *POLICIES])
@each_change
def test_greedy_answers_match_transformers(policy: Policy | None, change: dict[str, Any]) -> None:
    sampling = Sampling(**change)
    drafter = ScriptedDrafter(mostly_right(sampling), tiny.VOCAB) if policy else None
    for batch in (1, 2):
        decoder = Engine(tiny.target(), drafter, policy, sampling=sampling)
        outs = decoder.generate_all(requests(), batch)
        assert [out.ids for out in outs] == [plainly(sampling, p, n) for p, n, *_ in requests()]
        assert policy is None or sum(sum(out.accepted) for out in outs) > 5


@each_setting
def test_sampled_answers_match_transformers(setting: dict[str, Any]) -> None:
    sampling = Sampling(**setting)
    outs = numbered(sampling).generate_all(requests(), 3)
    assert [out.ids for out in outs] == [plainly(sampling, p, n, s) for p, n, s, _ in requests()]


# ---- the rows of trees ---------------------------------------------------------------------------


class Checked(Engine):
    """Compares the rows of every node with transformers' on the node's own text."""

    compared = 0
    row: Row

    def _decide(self, draft: Draft, logits: Tensor) -> Decision:
        rows = self.sampling.probs(logits)
        for i, one in enumerate(self.verifier.requests):
            text = (*one.request.prompt, *one.out.ids)
            nodes = draft.tree.real[i].nonzero().flatten().tolist()
            for node, path in zip(nodes, [(), *tiny.paths(draft.tree, i)], strict=True):
                self._compare(rows[i, node], model_logits(self.target, text + path), text + path)
                if draft.q_rows is not None and draft.q_rows[i, node].any():
                    self._compare_draft(draft.q_rows[i, node], text + path)
        return super()._decide(draft, logits)

    def _compare(self, mine: Tensor, logits: Tensor, text: Text) -> None:
        theirs = scores(self.sampling, text, logits).softmax(-1)
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
        self.compared += 1

    def _compare_draft(self, mine: Tensor, text: Text) -> None:
        assert self.drafter is not None
        whole = torch.full((tiny.VOCAB,), float("-inf"))
        whole[self.drafter.vocab.target_ids] = self.row(text)
        self._compare(mine, whole, text)


def compare(policy: Policy, setting: dict[str, Any], draft_vocab: int) -> None:
    row = random_logits(draft_vocab, scale=2.0)
    drafter = ScriptedDrafter(row, tiny.VOCAB)
    drafter.vocab = tiny.vocab(draft_vocab)
    decoder = Checked(tiny.target(), drafter, policy, sampling=Sampling(**setting))
    decoder.row = row
    decoder.generate_all(requests(12), 2)
    assert decoder.compared > 40


@each_setting
@each_policy
def test_penalties_of_every_node_use_its_own_text(policy: Policy, setting: dict[str, Any]) -> None:
    """Target and drafter alike (R7)."""
    compare(policy, setting, draft_vocab=tiny.VOCAB)


@each_policy
def test_penalties_over_a_reduced_draft_vocabulary(policy: Policy) -> None:
    for name in ("all", "reward"):
        compare(policy, SETTINGS[name], draft_vocab=30)


# ---- bans ----------------------------------------------------------------------------------------


class Listening(Engine):
    """Notes what was drafted."""

    drafted: set[int]

    def _decide(self, draft: Draft, logits: Tensor) -> Decision:
        for i in range(len(draft.tree.ids)):
            self.drafted |= {path[-1] for path in tiny.paths(draft.tree, i)}
        return super()._decide(draft, logits)


@pytest.mark.parametrize("warm", [0.0, 1.0], ids=["greedy", "warm"])
@pytest.mark.parametrize("banned", [(), BANNED], ids=["free", "banned"])
@each_policy
def test_a_banned_token_is_never_proposed(
    policy: Policy, warm: float, banned: tuple[int, ...]
) -> None:
    """By a drafter that prefers them; without the ban it proposes nothing else at first."""
    noise = random_logits(tiny.VOCAB)
    bonus = torch.zeros(tiny.VOCAB).index_fill_(0, torch.tensor(BANNED), 9.0)
    drafter = ScriptedDrafter(lambda text: noise(text) + bonus, tiny.VOCAB)
    decoder = Listening(tiny.target(), drafter, policy, sampling=Sampling(warm, banned=banned))
    decoder.drafted = set()
    outs = decoder.generate_all(requests(), 3)
    assert len(decoder.drafted) > 2
    assert decoder.drafted.isdisjoint(BANNED) == bool(banned)
    assert not banned or not {token for out in outs for token in out.ids} & set(BANNED)


@pytest.mark.parametrize("warm", [0.0, 1.0], ids=["greedy", "warm"])
@each_policy
def test_banned_tokens_are_not_proposed_when_few_are_left(policy: Policy, warm: float) -> None:
    """Two of five tokens are allowed, where trees have up to three children."""
    sampling = Sampling(warm, banned=(0, 2, 4))
    decoder = Listening(
        mean_target(), ScriptedDrafter(random_logits(TOKENS), TOKENS), policy, sampling=sampling
    )
    decoder.drafted = set()
    outs = decoder.generate_all([Request([1, 3, 4], 12), Request([2], 9)], 2)
    assert {token for out in outs for token in out.ids} <= {1, 3}
    assert decoder.drafted <= {1, 3}


@pytest.mark.parametrize("warm", [0.0, 1.0], ids=["greedy", "warm"])
@each_policy
def test_a_fully_banned_draft_vocabulary_is_supported(policy: Policy, warm: float) -> None:
    """There is nothing to propose; the target goes on alone."""
    drafter = ScriptedDrafter(random_logits(2), TOKENS)
    drafter.vocab = DraftVocab(torch.tensor([0, 4]), TOKENS)
    decoder = Engine(mean_target(), drafter, policy, sampling=Sampling(warm, banned=(0, 4)))
    out = decoder.generate_all([Request([1, 3, 4], 9)], 1)[0]
    assert len(out.ids) == 9
    assert set(out.accepted) == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be positive"),
        ({"banned": (3, 61)}, "banned=61: the target's tokens are 0..60"),
        ({"banned": tuple(range(61))}, "every token is banned"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1e-320}, "temperature=1e-320: must be at least"),
        ({"repetition_penalty": 1e-200}, "repetition_penalty=1e-200: must be at least"),
        ({"min_p": 1.5}, "min_p=1.5"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny.target(), None, None, sampling=Sampling(**change))


# ---- controls ------------------------------------------------------------------------------------


def sampled_ids(policy: Policy) -> list[list[int]]:
    sampling = Sampling(**CHANGES["penalty"])
    decoder = Engine(
        tiny.target(),
        ScriptedDrafter(mostly_right(sampling), tiny.VOCAB),
        policy,
        sampling=sampling,
    )
    return [out.ids for out in decoder.generate_all(requests(), 3)]


def prompt_only(history: TokenHistory, slot: int, text: Sequence[int]) -> None:
    """Wrong on purpose: the tokens of the answer do not count."""
    history.occurs[slot] = False
    history.occurs[slot, torch.tensor(list(text))] = True


def as_the_root(history: TokenHistory, tree: Tree, first: int = 0) -> TextTokens:
    """Wrong on purpose: every node has the history of its root."""
    return history.along(tree.ids[:, :1, None].expand(-1, tree.size, 1), first)


@each_policy
def test_history_without_the_answer_is_detected(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sampled_ids(policy)
    monkeypatch.setattr(TokenHistory, "start", prompt_only)
    monkeypatch.setattr(TokenHistory, "add", lambda *_: None)
    assert sampled_ids(policy) != right


@each_policy
def test_one_history_per_tree_is_detected(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampled_ids(policy)
    monkeypatch.setattr(TokenHistory, "at_nodes", as_the_root)
    assert sampled_ids(policy) != right
