"""Tests specific to staged speculation; the common contract is in test_drafter_contract.py.

Against a second way to the same numbers: `draft_lm`, transformers on every node's text, the engine
that decodes the draft model with the inner drafter, and plain decoding.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Draft, Policy
from outrider.models.decode.request import Output, Request
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafter import Drafter, State
from outrider.models.drafters import _inner
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafters.ngram import NGram
from outrider.models.drafters.staged import Config, Staged, add_inner
from outrider.models.formats import native
from outrider.models.interface import Trace
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train.settings import parse
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


# ---- the recursion through the engine ------------------------------------------------------------


def rounds_of_chain(
    drafter: Staged, text: Sequence[int], count: int, patch: pytest.MonkeyPatch
) -> tuple[list[int], list[int]]:
    """Greedy tokens of a chain, and how many guesses in a row each forward made known."""
    forwards = Forwards(drafter, patch)
    state, token, tokens = absorbed(drafter, text), text[-1], list[int]()
    assert drafter.inner is not None
    starts = [1] if drafter.inner.required_features == "ids" else []  # guesses after the text
    for depth in range(1, count + 1):
        before, ids = forwards.count, torch.tensor([token])
        with torch.no_grad():
            logits, state = drafter.step(state, depth, ids, torch.zeros_like(ids))
        if forwards.count > before:
            starts.append(depth)
        token = int(drafter.vocab.to_target(logits[0].argmax()))
        tokens.append(token)
    return tokens, [b - a - 1 for a, b in pairwise(starts)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A draft model, and an EAGLE-3 drafter that was trained for it a little."""
    lm, eagle = (str(tmp_path_factory.mktemp(name)) for name in ("lm", "eagle"))
    of, _, drafter = tiny.half_trained("eagle3", "llama")
    of.model.save_pretrained(lm)
    native.save(drafter, Path(eagle), of, drafter.cfg, {})
    return lm, eagle


@pytest.mark.parametrize("kind", ["ngram", "suffix", "eagle3", "three stages"])
def test_the_engine_on_the_draft_model_accepts_the_same_guesses(
    target: Target, folders: tuple[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine(draft model, inner drafter, Chain), greedily: its tokens and accepted counts.

    A look-up guesses with the text: the newest token is the engine's first one. A drafter that
    reads states guesses after the first drafted token, which then is the engine's first one.
    """
    lm, eagle = folders
    inner = {"eagle3": {"path": eagle}, "three stages": {**THREE, "path": lm}}.get(kind)
    drafter = staged(target, inner or INNER[kind], path=lm, depths=3)
    assert drafter.inner is not None
    prompt, count = list(tiny.PROMPTS[0]), 40
    engine = Engine(drafter.lm, drafter.inner, Chain(drafter.inner_depths))
    reference = engine.generate(prompt, count)
    reads_states = kind == "eagle3"
    text = prompt if reads_states else [*prompt, reference.ids[0]]
    with monkeypatch.context() as patch:
        tokens, accepted = rounds_of_chain(drafter, text, count - 1, patch)
    assert tokens == (reference.ids[:-1] if reads_states else reference.ids[1:])
    assert len(accepted) > 2
    assert accepted == reference.accepted[: len(accepted)]
    assert sum(accepted) > 5


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "three stages"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_good_inner_drafter_saves_forwards(
    target: Target, folders: tuple[str, str], kind: str, batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Same answers as without one; three stages save forwards of the second model as well."""
    lm, eagle = folders
    inner = {"eagle3": {"path": eagle}, "three stages": {**THREE, "path": lm}}.get(kind, NGRAM)
    counts, outputs = [], []
    for settings in (None, inner):
        drafter = staged(target, settings, path=lm)
        with monkeypatch.context() as patch:
            forwards = Forwards(drafter, patch)
            outputs.append(answers(decoded(target, drafter, Chain(6), batch)))
            counts.append(forwards.prompts)
    assert outputs[0] == outputs[1]
    assert counts[1] < counts[0] * (0.5 if kind == "three stages" else 0.95)


def test_a_perfect_inner_drafter_leaves_two_forwards_per_round(
    target: Target, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one, where it reads tokens only: the draft model guesses for itself."""
    drafter = staged(target, {"name": "draft_lm", "path": folders[0], "depths": 8}, path=folders[0])
    forwards = Forwards(drafter, monkeypatch)
    out = Engine(target, drafter, Chain(6)).generate(PROMPTS[0], 24)
    assert forwards.count == out.rounds + 1  # and that of the prompt


# ---- greedy answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_plain_decoding(family: str) -> None:
    of = Target(small_model(family))
    plain = [out.ids for out in decoded(of, None, None, 1)]
    for inner in (NGRAM, THREE):
        drafter = staged(of, inner, inner_width=2)
        for policy in POLICIES:
            for batch in (1, 4):
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


# ---- guesses -------------------------------------------------------------------------------------


def scripted(tokens: Sequence[int], size: int = tiny.VOCAB) -> Drafter:
    """Drafts these tokens after [1], and abstains after them."""

    def row(text: tuple[int, ...]) -> Tensor:
        out = torch.full((size,), float("-inf"))
        if len(text) <= len(tokens):
            out[tokens[len(text) - 1]] = 1.0
        return out

    return tiny.ScriptedDrafter(row, size)


@pytest.mark.parametrize(
    ("tokens", "depths", "kept"),
    [([5, 6, 7], 9, [5, 6, 7]), ([5, 6, 7], 2, [5, 6]), ([5, 60, 7], 9, [5]), ([], 9, [])],
)
def test_a_chain_ends_before_a_token_that_cannot_be_drafted(
    tokens: list[int], depths: int, kept: list[int]
) -> None:
    """At an abstention, at the depth, and before a token outside the draft vocabulary."""
    allowed = DraftVocab(torch.arange(60), tiny.VOCAB)
    states = [tiny.ScriptState((1,))]
    assert _inner.draft_chains(scripted(tokens), states, [1], depths, allowed) == [kept]


def test_wide_levels_have_no_guesses(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    for width in (1, 2):
        drafter = staged(target, INNER["eagle3"], inner_width=width)
        with monkeypatch.context() as patch:
            forwards = Forwards(drafter, patch)
            state = absorbed(drafter, REPEATING)
            state = drafter.step(state, 1, torch.tensor(REPEATING[-1:]), torch.zeros(1).long())[1]
            drafter.step(state, 2, torch.tensor([4, 9]), torch.zeros(2).long())
            widths.append(forwards.widths[-1])
    assert widths == [2, 2 * (1 + drafter.inner_depths)]


def test_answers_reach_the_inner_drafter(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """`suffix` with learn=true drafts a repeated answer from its first token on."""
    drafter = staged(target, {"name": "suffix", "learn": True})
    forwards, counts, outs = Forwards(drafter, monkeypatch), [0], []
    for _ in range(2):
        outs.append(Engine(target, drafter, Chain(6)).generate([5, 40, 17, 23, 9], 24).ids)
        counts.append(forwards.count)
    assert outs[0] == outs[1]
    assert counts[2] - counts[1] < counts[1]


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "key"),
    [
        ({"name": "ngram", "nn": 2}, "drafter.inner.nn"),
        ({"name": "ngram", "n": 0}, "drafter.inner.n"),
        ({"name": "ngram", "n": 2, "least": 3}, "drafter.inner.least"),
        ({"name": "ngram", "draft_vocab_size": 9}, "drafter.inner.draft_vocab_size"),
        ({"name": "staged", "inner": {"name": "ngram", "n": 0}}, "drafter.inner.inner.n"),
        ({"name": "no_such"}, "drafter.inner"),
        ({"name": 7}, "drafter.inner"),
        ({"name": "outrider.models.drafters.ngram"}, "drafter.inner"),
        ({"name": "draft_lm", "body": {"model_type": "x", "auto_map": {}}}, "drafter.inner.body"),
        ({}, "drafter.inner"),
        ({"n": 3}, "drafter.inner"),
        ({"path": 3}, "drafter.inner"),
        ({"path": "x", "n": 3}, "drafter.inner"),
        ([NGRAM], "drafter.inner"),
        ("ngram", "drafter.inner"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(inner: Any, key: str) -> None:
    config = compose(["drafter=staged"])
    config.drafter.inner = inner
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert caught.value.key == key
    assert "drafter.inner" in str(caught.value)


def test_a_model_that_is_not_found_is_named(target: Target, tmp_path: Path) -> None:
    inner = {"name": "draft_lm", "path": str(tmp_path / "nowhere/at/all")}
    with pytest.raises(ConfigError, match="could not be loaded") as caught:
        staged(target, {"name": "staged", "inner": inner})
    assert caught.value.key == "drafter.inner.inner.path"


def test_a_misspelt_key_has_the_nearest_one_as_its_fix() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean drafter\.inner\.latest\?"):
        Config(inner={"name": "ngram", "lastest": True})


def test_stages_are_bounded() -> None:
    deep = NGRAM
    for _ in range(_inner.MAX_STAGES - 1):
        deep = {"name": "staged", "inner": deep}
    Config(inner=deep)
    with pytest.raises(ValueError, match="stages"):
        Config(inner={"name": "staged", "inner": deep})


def test_the_command_line_sets_an_inner_drafter() -> None:
    words = ["drafter=staged", "drafter.inner={name: ngram, n: 2}"]
    drafter = parse(compose(words)).drafter
    assert isinstance(drafter, Config)
    assert drafter.inner == {"name": "ngram", "n": 2}


def test_a_drafter_that_runs_its_target_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: NGram, *args: Any) -> Any:
        return Drafter.run_target(self, *args)

    monkeypatch.setattr(NGram, "run_target", run)
    with pytest.raises(ConfigError, match="runs its target itself") as caught:
        staged(target, NGRAM)
    assert caught.value.key == "drafter.inner.name"


# ---- files ---------------------------------------------------------------------------------------


def saved_and_loaded(drafter: Staged, of: Target, folder: Path) -> Staged:
    native.save(drafter, folder, of, drafter.cfg, {})
    torch.manual_seed(99)  # what is not in the file would be initialised otherwise
    again, cfg = native.load(folder, of)
    assert isinstance(again, Staged)
    assert cfg.inner == again.cfg.inner == drafter.cfg.inner
    return again


@each_inner
def test_a_loaded_drafter_decodes_alike(
    target: Target, inner: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, accepted tokens and forwards: the inner drafter is the same one."""
    drafter = staged(target, inner)
    runs = []
    for one in (drafter, saved_and_loaded(drafter, target, tmp_path)):
        with monkeypatch.context() as patch:
            forwards = Forwards(one, patch)
            runs.append((answers(decoded(target, one, Chain(6), 4)), forwards.count))
    assert runs[0] == runs[1]


def test_only_an_inner_drafter_with_weights_is_saved(target: Target) -> None:
    reference = plain_lm(target).state_dict()
    assert staged(target, NGRAM).state_dict().keys() == reference.keys()
    more = staged(target, INNER["eagle3"]).state_dict().keys() - reference.keys()
    assert more
    assert all(name.startswith("inner.") for name in more)


def test_a_trained_inner_drafter_needs_its_folder_once(
    target: Target, folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, eagle = (shutil.copytree(folder, tmp_path / Path(folder).name) for folder in folders)
    drafter = staged(target, {"path": str(eagle)}, path=str(lm))
    assert drafter.cfg.inner["name"] == "eagle3"
    assert not any(p.requires_grad for n, p in drafter.named_parameters() if "inner." in n)
    for folder in (lm, eagle):
        shutil.rmtree(folder)
    again = saved_and_loaded(drafter, target, tmp_path / "staged")
    for name, value in drafter.inner.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(value, again.inner.state_dict()[name]), name  # type: ignore[union-attr]


def test_an_inner_drafter_of_another_model_is_refused(
    target: Target, folders: tuple[str, str]
) -> None:
    with pytest.raises(RunError, match="trained for"):
        staged(target, {"path": folders[1]})


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_a_trained_draft_lm_can_get_an_inner_drafter(
    target: Target, folders: tuple[str, str], kind: str, tmp_path: Path
) -> None:
    lm, eagle = folders
    trained = tiny.drafter("draft_lm", target, tiny.vocab(tiny.VOCAB), path=lm).eval()
    assert isinstance(trained, DraftLm)
    drafter = add_inner(trained, target, NGRAM if kind == "ngram" else {"path": eagle})
    expected = answers(decoded(target, trained, Chain(6), 4))
    assert answers(decoded(target, drafter, Chain(6), 4)) == expected
    again = saved_and_loaded(drafter, target, tmp_path)
    assert answers(decoded(target, again, Chain(6), 4)) == expected
