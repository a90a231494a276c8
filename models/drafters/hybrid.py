"""Hybrid drafts: a look-up and a trained drafter, of which every round uses one or both.

Source: Oliaro et al. 2024, "SuffixDecoding", arXiv:2411.04975: the look-up drafts where its
expected number of accepted tokens is high enough, and the draft model elsewhere.

After every round the look-up drafts the text at hand, which costs next to nothing. Then a choice:

    look-up alone    (1 + L) (1 + cost) >= 1 + max(L, M)       expected tokens over expected time
    both             else, or if the look-up drafts nothing

L is the expected number of accepted tokens of the look-up's draft, by its probabilities times the
share of them that has come true; M the mean number of accepted tokens of rounds that used both; and
`cost` the time of a trained draft, in steps of the target. Where both draft a node, its row is a
mixture of both rows, so that a tree holds the branches of both.

The choice depends on the text so far and on earlier outcomes alone, with decode=auto also on the
measured `cost`: never on a drawn token of the round, or on other requests. `step` returns the rows
that tokens are drawn from. So every verification rule is exact, and without decode=auto answers do
not depend on their batch.

Differs (docs/drafters/hybrid.md): the time of the draft counts; the look-up's probabilities are
corrected by what has come true; both may draft one tree.

Shape letters: B prompts, N nodes, V tokens, R prompts with a trained draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.conf.fields import DEPTHS, option
from outrider.conf.schema import UntrainedConfig
from outrider.models.drafters.parts.part import Part, trained_part, trained_settings
from outrider.models.drafting.drafter import Drafter, LevelIds, LookingDrafter, State
from outrider.models.drafting.lookup import Draft, LookupDrafter, LookupState, children
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target

WAITING = 64  # rows that the trained drafter has not read, at most, but for decode=auto
PIECE = 512  # rows that it reads at once
KEEP = 0.95  # weight of the rounds before, after every round
COST = 0.2  # of a trained draft, in steps of the target, until it is given or measured
PRIOR = 2.0  # rounds, or look-up tokens, that the first estimates stand for


def _no_lookup(kind: type[Drafter]) -> str:
    return "" if issubclass(kind, LookupDrafter) else "It does not look tokens up in text."


LOOKUP = Part("drafter.lookup", "Use suffix or ngram.", _no_lookup)
TRAINED = trained_part("drafter.trained")


@dataclass(frozen=True)
class Config(UntrainedConfig):
    """Settings of hybrid drafts; conf/drafter/hybrid.yaml describes each."""

    name: str = "hybrid"
    depths: int = option(16, "", DEPTHS)
    lookup: Any = "suffix"
    trained: Any = None
    levels: int | None = option(None, "", DEPTHS)
    cost: float | None = option(None, "", "[0, 100]")

    def __post_init__(self) -> None:
        super().__post_init__()
        LOOKUP.parse(self.lookup_settings)
        if self.trained is not None:
            trained_settings(self.trained, TRAINED)

    @property
    def lookup_settings(self) -> dict[str, Any]:
        values = {"name": self.lookup} if isinstance(self.lookup, str) else self.lookup
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            raise ValueError(f"lookup = {self.lookup}: use suffix, ngram or {{name: ngram, n: 4}}")
        return values

    @property
    def trained_settings(self) -> dict[str, Any]:
        if self.trained is None:
            why = "A hybrid drafter combines a look-up and a trained drafter."
            raise ConfigError("drafter.trained", None, why, f"{TRAINED.fix} Or use drafter=suffix.")
        return trained_settings(self.trained, TRAINED)


# ---- what has come true --------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Outcomes of a request so far; older rounds weigh less.

    Attributes:
        hits, guesses: look-up tokens that were right, and how many were expected to be, up to the
            first wrong one of every draft. A draft that was not verified counts too: the text
            tells what would have been accepted.
        accepted, rounds: draft tokens accepted in rounds that used both, and the number of these.
    """

    hits: float = 0.0
    guesses: float = 0.0
    accepted: float = 0.0
    rounds: float = 0.0

    def after(self, draft: Draft, tokens: Sequence[int], both: bool) -> "Record":
        """Return the record after the tokens that follow a text.

        Args:
            draft: of the look-up for that text.
            both: the trained drafter has drafted too.
        """
        hits, guesses = _hits(draft, tokens)
        accepted = KEEP * self.accepted + both * (len(tokens) - 1)
        return Record(
            KEEP * self.hits + hits, KEEP * self.guesses + guesses, accepted,
            KEEP * self.rounds + both,
        )  # fmt: skip

    @property
    def reliability(self) -> float:
        """The share of the look-up's expected hits that come true; one half at first."""
        return min(1.0, (self.hits + PRIOR / 2) / (self.guesses + PRIOR))

    def mean_accepted(self, levels: int) -> float:
        """Return M; half of the trained drafter's levels at first."""
        return (self.accepted + PRIOR * levels / 2) / (self.rounds + PRIOR)

    def prefers_lookup(self, draft: Draft, depth: int, levels: int, cost: float) -> bool:
        """Return whether the look-up's draft alone has more expected tokens per time."""
        if not draft:
            return False
        alone, both = expected_hits(draft, depth, self.reliability), self.mean_accepted(levels)
        return (1 + alone) * (1 + cost) >= 1 + max(alone, both)

    def lookup_share(self, levels: int) -> float:
        """Return the weight of the look-up's rows in mixtures, in proportion to its accuracy."""
        mean = self.mean_accepted(levels)
        other = mean / (1 + mean)  # per token, for a mean of a geometric distribution
        return self.reliability / (self.reliability + other)


def _hits(draft: Draft, tokens: Sequence[int]) -> tuple[int, float]:
    """Return how many tokens of a text follow a draft, and how many were expected to."""
    hits, expected = 0, 0.0
    for token in tokens:
        if not draft:
            break
        expected += min(1.0, sum(p for p, _ in draft.values()))
        if token not in draft:
            break
        hits, draft = hits + 1, draft[token][1]
    return hits, expected


def expected_hits(draft: Draft, depth: int, reliability: float) -> float:
    """Return the expected number of accepted tokens of a draft, at most `depth` levels deep."""
    total, level = 0.0, [(1.0, draft)]
    for _ in range(depth):
        level = [
            (above * reliability * p, below)
            for above, nodes in level
            for p, below in nodes.values()
        ]  # fmt: skip
        total += sum(p for p, _ in level)
        if not level:
            break
    return total


# ---- the drafter ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class HybridState:
    """Decoding state of a prompt.

    Attributes:
        text: of the look-up.
        draft: of the look-up for the text.
        trained: of the trained drafter after the rows that it has read; None: it has read none.
        waiting: rows that it has not read.
        both: whether the next round uses both drafters; else the look-up alone.
        drafted: whether a token of that round was verified.
        level: what the look-up drafts after each node of the last step.
        shift: of each node of the last step, the log-confidence in its most probable child less
            the logarithm of that child's probability in the row.
    """

    text: LookupState
    draft: Draft
    record: Record
    both: bool
    trained: State | None = None
    waiting: tuple[Trace, ...] = ()
    drafted: bool = False
    level: tuple[Draft, ...] = ()
    shift: Float[Tensor, " N"] | None = None


class Hybrid(LookingDrafter):
    """A look-up and a trained drafter.

    Attributes:
        levels: levels at most that the trained drafter drafts.
        cost: seconds of its draft over those of a step of the target.
    """

    is_trained = False
    is_composite = True
    may_abstain = True
    lookup: LookupDrafter
    trained: Drafter

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        vocab.require_full()
        assert isinstance(target, Target), "drafters are built for it"
        lookup, _ = LOOKUP.build(cfg.lookup_settings, target)
        trained, settings = TRAINED.build(cfg.trained_settings, target)
        assert isinstance(lookup, LookupDrafter), "see _no_lookup"
        self.lookup, self.trained = lookup, trained
        self.cfg, self.vocab, self.taps = cfg, vocab, trained.taps
        self.levels = min(cfg.levels or int(settings["depths"]), cfg.depths, trained.max_depth)
        self.max_depth, self.chains_only = cfg.depths, trained.chains_only
        self.bends = (self.levels,)
        self.cost = COST if cfg.cost is None else cfg.cost

    @classmethod
    def check_settings(cls, cfg: Config, shape: ModelShape) -> None:
        LOOKUP.check(cfg.lookup_settings, shape)
        TRAINED.check(cfg.trained_settings, shape)

    def describe_target_change(self) -> str | None:
        return self.trained.describe_target_change()

    def patch_target(self, target: TargetEnds) -> str | None:
        return self.trained.patch_target(target)

    def use_cost(self, cost: float) -> None:
        self.cost = cost if self.cfg.cost is None else self.cfg.cost

    def finish(self, answer: Sequence[int]) -> None:
        self.lookup.finish(answer)
        self.trained.finish(answer)

    # ---- the text ----

    def look(
        self, states: Sequence[HybridState | None], traces: Sequence[Trace]
    ) -> list[HybridState]:
        return list(map(self._after_text, states, traces))

    def rows_to_read(self, state: HybridState) -> int | None:
        return _rows(state.waiting) if state.both else None

    def without_weights(self, state: HybridState) -> tuple[HybridState, bool]:
        return replace(state, both=False), bool(state.draft)

    def read_waiting(self, states: Sequence[HybridState]) -> list[HybridState]:
        out = list(states)
        while late := [
            i for i, state in enumerate(out)
            if state.waiting and (state.both or _rows(state.waiting) > WAITING)
        ]:  # fmt: skip
            pieces = [_first_rows(out[i].waiting) for i in late]
            joined = [*map(Trace.joined, pieces)]
            read = self.trained.absorb_batch([out[i].trained for i in late], joined)
            for i, trained, piece in zip(late, read, pieces, strict=True):
                left = out[i].waiting[len(piece) :]
                out[i] = replace(out[i], trained=trained, waiting=left)
        return out

    def _after_text(self, state: HybridState | None, trace: Trace) -> HybridState:
        """Return the state after rows that the trained drafter has not read, and the choice."""
        text = self.lookup.absorb(None if state is None else state.text, trace)
        draft, record = self.lookup.draft_after(text), Record()
        if state is not None:
            tokens = trace.next_ids[0].tolist()
            tokens = tokens[: self.max_depth + 1]  # more follow where the user has gone on
            record = state.record.after(state.draft, tokens, state.both and state.drafted)
        alone = record.prefers_lookup(draft, self.cfg.depths, self.levels, self.cost)
        if state is None:
            return HybridState(text, draft, record, not alone, waiting=(trace,))
        waiting = (*state.waiting, trace)
        return HybridState(text, draft, record, not alone, state.trained, waiting)

    def end_draft(self, state: HybridState, drafted: HybridState, depth: int) -> HybridState:
        return replace(state, drafted=depth > 0)

    # ---- the tree ----

    def step_batch(
        self, states: Sequence[HybridState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[HybridState]]:
        logits = torch.full((*ids.shape, len(self.vocab)), float("-inf"), device=ids.device)
        shift = torch.zeros(ids.shape, device=ids.device)
        found = list(states)
        runs = [i for i, state in enumerate(states) if state.both and depth <= self.levels]
        if runs:
            before = [states[i].trained for i in runs]
            rows, after = self.trained.step_batch(before, depth, ids[runs], parents[runs])
            logits[runs] = self.trained.vocab.expand_logits(rows)
            shift[runs] = self._confidence_shift(rows, depth, after)
            for i, trained in zip(runs, after, strict=True):
                found[i] = replace(found[i], trained=trained)
        for i, state in enumerate(found):
            level = [state.draft] if depth == 1 else children(state.level, ids[i], parents[i])
            for node, draft in enumerate(level):
                if draft:
                    row = logits[i, node]
                    shift[i, node] = self._add_lookup(row, draft, state.record, i in runs)
            found[i] = replace(state, level=tuple(level), shift=shift[i])
        return logits, found

    def _confidence_shift(
        self, rows: Float[Tensor, "R N Vt"], depth: int, after: Sequence[State]
    ) -> Float[Tensor, "R N"] | float:
        """Return the trained drafter's log-confidence less the largest log-probability."""
        hidden = self.trained.node_hidden(after)
        if hidden is None:  # its confidence is that probability
            return 0.0
        log_q = rows.float().log_softmax(-1)
        return self.trained.log_confidence(log_q, depth, hidden) - log_q.amax(-1)

    def _add_lookup(
        self, row: Float[Tensor, " V"], draft: Draft, record: Record, both: bool
    ) -> Float[Tensor, ""] | float:
        """Add the look-up's tokens to a row that was made for this step; return its shift."""
        tokens = torch.tensor(list(draft), device=row.device)
        p = torch.tensor([p for p, _ in draft.values()], device=row.device)
        if not both:
            row[tokens] = p.log()
            return (p.sum() * record.reliability).clamp(max=1.0).log()
        p = p * record.lookup_share(self.levels)
        row[:] = row.log_softmax(-1) + (1 - p.sum()).log()
        row[tokens] = torch.logaddexp(row[tokens], p.log())
        return 0.0

    def log_confidence(
        self,
        log_q: Float[Tensor, "*nodes Vd"],
        depth: int,
        hidden: Float[Tensor, "*nodes 1"] | None,
    ) -> Float[Tensor, "*nodes"]:
        best = log_q.amax(-1)
        return best if hidden is None else best + hidden[..., 0]

    def node_hidden(self, states: Sequence[HybridState]) -> Float[Tensor, "B N 1"]:
        """Return the shift of every node of the last step, which `log_confidence` adds."""
        return torch.stack([_shift_of(state) for state in states])[..., None]


def _rows(waiting: Sequence[Trace]) -> int:
    return sum(trace.ids.shape[1] for trace in waiting)


def _first_rows(waiting: tuple[Trace, ...]) -> tuple[Trace, ...]:
    """Return the first waiting rows that are read at once: PIECE at most, or one trace."""
    ends = accumulate(trace.ids.shape[1] for trace in waiting)
    return waiting[: max(1, sum(end <= PIECE for end in ends))]


def _shift_of(state: HybridState) -> Float[Tensor, " N"]:
    assert state.shift is not None, "set by every step"
    return state.shift
