"""Small, seeded targets, drafters, traces and policies, from which tests are built.

Targets are the random models of `families.py` (V = 61, H = 32, four layers). Rows are packed with
several documents, answers in the middle of prompts, and padding. The guesses of `ScriptedDrafter`
are any function of the text so far: always right, always wrong, or a table of probabilities.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.models import drafters
from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Draft, Policy
from outrider.models.decode.request import ActiveRequest, Request
from outrider.models.decode.round_times import RoundTimes, Stopwatch
from outrider.models.decode.rules.round_outcome import outcomes
from outrider.models.decode.sampling import GeneratorSource, RandomSource
from outrider.models.decode.sampling_params import Sampling, TokenHistory
from outrider.models.decode.tree import Tree
from outrider.models.decode.verifier import Decision
from outrider.models.drafting.drafter import Absorbed, Drafter
from outrider.models.drafting.target_drafting import TargetDrafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, Trace
from outrider.models.target.layer_parts import WHOLE, Part
from outrider.models.target.target import Target, TargetStates
from outrider.train.objective import Objective
from tests.enumeration import Law, enumerate_law
from tests.families import small_model

VOCAB, DRAFTED = 61, 40
DEPTHS = 3
LAYOUT = ((9, 7, 5), (14, 10))  # lengths of the documents in each packed row
LENGTH = 24  # the first row ends in three tokens of padding
# trained drafters that draft without the target; test_target_drafting.py has the others
STANDALONE = [
    name
    for name in drafters.trained_names()
    if not issubclass(drafters.drafter_class(name), TargetDrafter)
]
# drafters made of others, and settings that name these
COMPOSITE: dict[str, dict[str, Any]] = {
    "hybrid": {
        "trained": {"name": "eagle3", "depths": DEPTHS, "draft_vocab_size": None},
        "levels": DEPTHS + 1,
        "depths": 8,
    },
    "multi": {
        "drafters": [
            {"name": "eagle3", "depths": DEPTHS, "draft_vocab_size": None, "taps": [2, 0, 1]},
            {"name": "eagle", "depths": DEPTHS, "draft_vocab_size": DRAFTED},
        ],
        "depths": 8,
    },
}
# drafters that train copies of the target's layers, and may propose each of its tokens
CHANGES_TARGET = ("layerskip",)


def target(family: str = "llama", seed: int = 0, **changes: object) -> Target:
    return Target(small_model(family, seed, **changes), name=family)


def config(name: str, **changes: object) -> Any:
    """The `Config` of a drafter; fields that it does not have are left out."""
    kind = drafters.drafter_module(name).Config
    settings = {
        "depths": DEPTHS,
        "draft_vocab_size": DRAFTED,
        "anchors": 1.0,
        "keep": 1.0,
        **COMPOSITE.get(name, {}),
        **changes,
    }
    if name in CHANGES_TARGET or name in COMPOSITE:
        settings["draft_vocab_size"] = None
    return kind(**{f.name: settings[f.name] for f in fields(kind) if f.name in settings})


def vocab(size: int = DRAFTED, whole: int = VOCAB) -> DraftVocab:
    """A reduced draft vocabulary with gaps; the identity when size == whole."""
    counts = torch.randint(100, (whole,), generator=torch.Generator().manual_seed(1))
    return DraftVocab.from_counts(counts, size)


def drafter(
    name: str, of: Target, draft_vocab: DraftVocab | None = None, seed: int = 2, **changes: object
) -> Drafter:
    """Untrained, built as a run builds it."""
    torch.manual_seed(seed)
    if name in CHANGES_TARGET:
        draft_vocab = DraftVocab.identity(of.vocab_size)
    if draft_vocab is None:
        draft_vocab = DraftVocab.identity(of.vocab_size) if name in COMPOSITE else vocab()
    return drafters.build(config(name, **changes), of, draft_vocab)


def packed_trace(of: Target, seed: int = 3) -> Trace:
    """Two rows of random text in five documents; two answers in the longer ones."""
    ids = torch.randint(
        3, of.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    document = torch.full_like(ids, -1)
    positions, answer = torch.zeros_like(ids), torch.ones_like(ids).bool()
    name = 0
    for row, lengths in enumerate(LAYOUT):
        start = 0
        for length in lengths:
            stop = start + length
            document[row, start:stop] = name
            positions[row, start:stop] = torch.arange(length)
            answer[row, start : start + 2] = False  # the prompt
            if length > 5:
                answer[row, start + 5] = False  # a turn of the user inside the answer
            name, start = name + 1, stop
        positions[row, start:] = torch.arange(LENGTH - start)
    # the answer mask is True on padding, which must not count
    return of.trace(ids, answer, document, positions)


def document_spans(trace: Trace) -> list[tuple[int, int, int]]:
    """(row of the batch, start, stop) of every document."""
    spans = []
    for index in range(int(trace.document.max()) + 1):
        rows = (trace.document == index).nonzero()
        spans.append((int(rows[0, 0]), int(rows[0, 1]), int(rows[-1, 1]) + 1))
    return spans


def slice_trace(trace: Trace, rows: slice, columns: slice = slice(None)) -> Trace:
    """A part of a trace; absent fields stay absent."""
    present = {k: v for k, v in vars(trace).items() if v is not None}
    return Trace(**{name: value[rows, columns] for name, value in present.items()})


def verified_rows(trace: Trace, row: int, start: int, stop: int) -> Trace:
    """Rows start..stop as the decoder passes them: one document, no answer mask."""
    part = slice_trace(trace, slice(row, row + 1), slice(start, stop))
    return replace(
        part, answer=torch.zeros_like(part.answer), document=torch.zeros_like(part.document)
    )


def with_tokens(trace: Trace, row: int, first: int, tokens: list[int]) -> Trace:
    """Other tokens from x_first on, with the target's states unchanged."""
    ids, following = trace.ids.clone(), torch.zeros_like(trace.ids)
    ids[row, first : first + len(tokens)] = torch.tensor(tokens)
    following[:, :-1] = ids[:, 1:]
    return replace(trace, ids=ids, next_ids=following)


def with_other_states(trace: Trace, row: int, first: int, stop: int) -> Trace:
    """Other states of the target at rows first..stop."""
    generator, states = torch.Generator().manual_seed(9), {}
    for name in ("taps", "last"):
        value = states[name] = getattr(trace, name).clone()
        value[row, first:stop] += torch.randn(value[row, first:stop].shape, generator=generator)
    return replace(trace, **states)


# ---- greedy text of the target, and short training ----

PROMPTS = ((5, 40, 17, 23, 9), (11,))
ANSWER = 18  # tokens


def greedy_tokens(of: Target, prompt: Sequence[int], count: int = ANSWER) -> list[int]:
    """Greedy tokens by transformers alone: no cache and no mask."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = of.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def answered_trace(of: Target, answers: Sequence[Sequence[int]]) -> Trace:
    """PROMPTS with these answers, cut to one length, every token supervised."""
    ids = torch.tensor([[*p, *a][:ANSWER] for p, a in zip(PROMPTS, answers, strict=True)])
    row = torch.arange(len(ids))[:, None].expand_as(ids)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return of.trace(ids, torch.ones_like(ids).bool(), row.clone(), positions.clone())


def train_drafter(student: Drafter, of: Target, trace: Trace, steps: int) -> list[float]:
    """AdamW on one batch; the mean over depths of the nats per row, before each step."""
    depths = [guess.depth for guess in student.unroll(trace) if guess.depth]
    objective = Objective(student, of, weights=[1 / len(depths)] * len(depths))
    divide = torch.stack([trace.supervised_mask(d).sum() for d in depths]).float()
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = objective(trace, divide)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class HalfTrained(NamedTuple):
    """A target with the drafter's changes, its greedy answers to PROMPTS, and the drafter."""

    target: Target
    answers: tuple[list[int], ...]
    drafter: Drafter


@cache
def half_trained(name: str, family: str, **changes: Any) -> HalfTrained:
    """Train for twelve steps on the answers, after which some guesses are right.

    A head that reads the token before is right at every place by then: eight steps.
    """
    of = target(family)
    answers = tuple(greedy_tokens(of, prompt) for prompt in PROMPTS)
    student = drafter(name, of, vocab(VOCAB), **changes)
    steps = 8 if name == "dspark" else 12
    train_drafter(student, of, answered_trace(of, answers), steps=steps)
    if student.patch_target(of):
        answers = tuple(greedy_tokens(of, prompt) for prompt in PROMPTS)
    return HalfTrained(of, answers, student.eval())


# ---- drafters that are functions of the text ----


Text = tuple[int, ...]
Row = Callable[[Text], Tensor]  # logits of the token that follows a text


@dataclass(frozen=True)
class ScriptState:
    """State of `ScriptedDrafter`: the committed text, and the branches drafted after it."""

    text: Text
    branches: tuple[Text, ...] = ((),)


class ScriptedDrafter(Drafter):
    """A drafter whose guesses are a function of the text; it checks and records what it absorbs."""

    def __init__(self, row: Row, size: int, taps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.row, self.vocab, self.taps = row, DraftVocab.identity(size), taps
        self.handed: list[Trace] = []

    def absorb(self, state: ScriptState | None, trace: Trace) -> ScriptState:
        ids, following = trace.ids[0].tolist(), trace.next_ids[0].tolist()
        past = () if state is None else state.text[:-1]
        assert state is None or state.text[-1] == ids[0], "the rows do not continue the text"
        assert following[:-1] == ids[1:], "next_ids is not the token after ids"
        assert trace.positions[0].tolist() == list(range(len(past), len(past) + len(ids)))
        self.handed = [trace] if state is None else [*self.handed, trace]
        return ScriptState((*past, *ids, following[-1]))

    def step(
        self, state: ScriptState, depth: int, ids: Tensor, parents: Tensor
    ) -> tuple[Tensor, ScriptState]:
        if depth == 1:
            assert ids.tolist() == [state.text[-1]], "depth 1 continues the newest token"
        else:
            pairs = zip(parents.tolist(), ids.tolist(), strict=True)
            state = ScriptState(
                state.text, tuple((*state.branches[p], token) for p, token in pairs)
            )
        assert all(len(branch) == depth - 1 for branch in state.branches)
        return torch.stack([self.row(state.text + branch) for branch in state.branches]), state


def random_logits(size: int, seed: int = 0, scale: float = 1.0) -> Row:
    """Random logits that depend on the text alone."""

    @cache
    def row(text: Text) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**31)
        return scale * torch.randn(size, generator=generator)

    return row


def scripted_logits(text: Sequence[int], size: int, right: Callable[[int], bool]) -> Row:
    """Make the token of `text` near certain where `right(index)`, near impossible elsewhere."""
    known, noise = tuple(text), random_logits(size)

    def row(prefix: Text) -> Tensor:
        logits = noise(prefix).clone()
        index = len(prefix)
        if prefix == known[:index] and index < len(known):
            logits[known[index]] = 20.0 if right(index) else -20.0
        return logits

    return row


# ---- a target without layers ----

TOKENS = 5


class MeanTarget(Target):
    """A target without layers: the mean of all attended rows, through tanh and the head.

    Fast enough for thousands of answers. It depends on the mask, the positions and the cached
    rows, as an attention layer does.
    """

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: AttentionCache | None = None,
        grad: bool = False,
        part: Part = WHOLE,
    ) -> TargetStates:
        rows = self.embed(ids) * (1 + positions[..., None] % 3)
        if cache is not None:
            cache.reserve(ids.shape[1])
            rows = cache.update(rows[:, None], rows[:, None], 0)[0][:, 0]
            cache.commit(positions)
        mean = mask.to(rows.dtype) @ rows / mask.sum(-1, keepdim=True)
        last = torch.tanh(mean)
        return TargetStates(last[..., :0], last)


@cache
def mean_target(dtype: torch.dtype = torch.float32) -> Target:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": TOKENS}
    model = small_model("llama", num_attention_heads=2, num_key_value_heads=1, **small)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(40.0)
    return MeanTarget(model.to(dtype))


def logits_after(target: Target, ids: Sequence[int]) -> Tensor:
    """Logits of the next token, without a cache."""
    count = len(ids)
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    states = target.forward(torch.tensor([list(ids)]), torch.arange(count)[None], causal)
    return target.logits(states.last[0, -1])


# ---- policies, called outside of an engine ----


def propose(
    policy: Policy,
    drafter: Drafter,
    texts: Sequence[Text],
    limits: Sequence[int] = (99,),
    sampling: Sampling = Sampling(),  # noqa: B008 - an immutable value
    seeds: Sequence[int] = (0,),
) -> Draft:
    """Return the draft after these texts; a depth limit and a seed for each of them."""
    nowhere, history = torch.device("cpu"), None
    if not sampling.has_no_processors:
        history = TokenHistory(len(texts), drafter.vocab.t2d.numel(), nowhere)
        for slot, text in enumerate(texts):
            history.start(slot, text)
    requests = []
    for slot, (text, limit) in enumerate(zip(texts, limits, strict=True)):
        absorbed = Absorbed(len(text) - 1, ScriptState(text))
        one = ActiveRequest(slot, Request(text, limit + 1), Random(), absorbed=absorbed)
        one.root = torch.tensor([text[-1]])
        requests.append(one)
    rng = GeneratorSource([Random(seed) for seed in seeds], policy.nodes + 1)
    watch, times = Stopwatch(nowhere), RoundTimes()
    context = DraftContext(
        drafter, requests, sampling, rng, history, lambda logits, *_: logits, watch, times
    )
    return policy.propose(context)


def paths(tree: Tree, row: int = 0) -> list[Text]:
    """The tokens below the root down to each real node of a prompt, in the order of the nodes."""
    ids, parents, real = (part[row].tolist() for part in (tree.ids, tree.parents, tree.real))
    out: list[Text] = [()]
    for token, parent in zip(ids[1:], parents[1:], strict=True):
        out.append((*out[parent], token))
    return [path for path, is_real in zip(out, real, strict=True) if is_real][1:]


def inject_random_source(engine: Engine, rng: Any) -> None:
    """Replace the random numbers of an engine, so that a test can enumerate them."""
    engine.verifier.random_source = lambda *_, **__: rng  # type: ignore[method-assign]


def law_of_answers(engine: Engine, prompt: Sequence[int], length: int) -> Law:
    """Return the exact law of sampled answers, by every path through their random numbers."""

    def process(rng: RandomSource) -> Text:
        inject_random_source(engine, rng)
        return tuple(engine.generate(prompt, length).ids)

    return enumerate_law(process)


def require_plain_output(
    target: Target, drafter: Drafter, policies: Iterable[Policy], requests: Sequence[Request]
) -> None:
    """Require greedy answers of every policy, alone and in a batch, to equal plain decoding.

    Some draft tokens must be accepted, and some rejected.
    """
    plain = [out.ids for out in Engine(target, None, None).generate_all(requests, 1)]
    accepted = drafted = 0
    for policy in policies:
        for batch in (1, 4):
            outputs = Engine(target, drafter, policy).generate_all(requests, batch)
            assert [out.ids for out in outputs] == plain
            accepted += sum(sum(out.accepted) for out in outputs)
            drafted += sum(sum(out.drafted) for out in outputs)
    assert 0 < accepted < drafted


def spread(guess: Guess, trace: Trace) -> Tensor:
    """Return the states [B, T, D] of a guess; NaN in rows that it does not have."""
    rows = trace.ids.numel()
    out = guess.hidden.new_full((rows, guess.hidden.shape[-1]), torch.nan)
    return out.index_copy(0, guess.rows, guess.hidden).view(*trace.ids.shape, -1)


class FixedDrafter(Drafter):
    """A drafter with given states; its head is the target's, or the identity."""

    taps = ()

    def __init__(self, states: list[Tensor], vocab: DraftVocab, head: Target | None = None) -> None:
        super().__init__()
        self.states, self.vocab, self._head = states, vocab, head

    def head(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            return hidden
        return self._head.logits(hidden)[..., self.vocab.target_ids]

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        for depth, state in enumerate(self.states, start=1):
            yield Guess.everywhere(depth, state)


class RawBonus(Engine):
    """Negative control: the token after the last node is drawn from unwarped logits."""

    def _decide(self, draft: Draft, logits: Tensor) -> Decision:
        if draft.tree.size == 1:
            return super()._decide(draft, logits)
        rows = self.sampling.probs(logits)
        rows[:, -1] = logits[:, -1].softmax(-1)
        rng = self.verifier.random_source()
        accepted = self.verifier.rule(draft.tree, rows, draft.q_rows, rng)
        return Decision(outcomes(draft.tree, accepted, logits.amax(2)), logits)
