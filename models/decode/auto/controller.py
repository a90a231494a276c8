"""The controller of `decode=auto`: whether a round drafts, and which shape.

While no draft pays, rounds are plain. After 1, 2, 4, .. at most LONGEST_WAIT plain rounds one round
drafts, to see whether the text has changed; its cost is in the ledger. A new text first waits until
plain rounds have earned what the dearest draft in vain has cost, if earlier drafts have not saved
as much.

A hybrid drafter tells from the text, before the choice, whether it looks the next draft up.
Look-ups cost next to nothing: they are verified as far as that pays, also while no other draft
does.

While drafts pay, a round is plain after 8, 16, 32 and every REFRESH others, so that the seconds of
plain decoding stay measured. So are the first rounds of every size of the batch, and of one that
had none for long. Two are plain when the pace has changed, and when two rounds in turn differ much
from the expected seconds: they show whether the machine has changed or drafts alone have. A plain
round after one that has drafted finds the caches of the processor cold and is not measured: it
comes before these.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from outrider.models.decode.acceptance import Acceptance, RequestAcceptance
from outrider.models.decode.auto.choice import (
    ChainCosts,
    Choice,
    chain_choices,
    chain_tokens,
    optimism_of,
)
from outrider.models.decode.auto.outcomes import Round
from outrider.models.decode.auto.plain_rounds import PlainRounds
from outrider.models.decode.auto.trees import CandidateTrees
from outrider.models.decode.costs.factors import LOOK_UP, READ
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.round_costs import ABSORBED_ROWS, PLAIN, DraftShape
from outrider.models.decode.ledger import Ledger
from outrider.models.decode.request import ActiveRequest

LONGEST_WAIT = 256  # plain rounds before a draft is tried again
LEAST_WAIT = 16  # most plain rounds before the first draft of a text
MOST_WAIT = 4096  # the same while plain rounds still have to earn a draft in vain
PROBES = 0.5  # share of eps for drafts in vain; the rest pays for decisions in plain rounds
SAVED = 50.0  # plain steps that earlier drafts have saved, which pay for drafts in vain, at most
FIRST_REFRESH, REFRESH = 8, 64  # rounds with drafts before a plain one: doubled up to the latter
CHANGED, BURST = 0.1, 2  # relative change of the pace, measured by so many plain rounds
DIFFERING = 2  # rounds in turn that differ from what is expected and bring plain rounds forward,
FIRST_CHECK = 3  # after so many drafts: doubled up to REFRESH until plain rounds set the pace
AMORTISED = 128  # tokens over which reading missed rows is spread, at most
OWN = 0.1  # weight of a round in the seconds of a choice
ANSWERS = 0.05  # weight of an answer in the mean length, after the first ones
MARGIN = 1.02  # gain from which drafting begins again
STILL = 8  # rounds without time after which the clock counts as stopped
PROBE, PAYS, LOOKED_UP, HELD = "probe", "pays", "look-up", "held by the ledger"
OFF, MEASURES, LAST, STOPPED = "no draft pays", "measures plain", "last token", "clock stands still"


@dataclass
class Situation:
    """What a round starts from.

    Attributes:
        rooms: per request, the deepest useful draft token.
        context: mean length of the texts.
        waiting: per request, rows that the drafter has missed, beyond those of an ordinary round.
        left: per request, the tokens that its answer is expected to have left.
        kind: of the next draft: LOOK_UP if it needs no weights, else "".
        looked: seconds that looking at many rows has taken in this round.
    """

    estimates: Sequence[RequestAcceptance]
    rooms: Sequence[int]
    costs: ChainCosts
    context: int
    waiting: Sequence[int]
    left: Sequence[float]
    kind: str = ""
    looked: float = 0.0

    @cached_property
    def read_per_token(self) -> float:
        """Missed rows per token of each request, spread over the tokens that it has left."""
        left = (max(1, min(AMORTISED, *both)) for both in zip(self.rooms, self.left, strict=True))
        return sum(rows / tokens for rows, tokens in zip(self.waiting, left, strict=True))

    def reading(self, tokens: float, seconds: float) -> float:
        """Return the share of reading missed rows, `seconds` each, in a round of so many tokens."""
        return self.read_per_token * seconds * tokens / len(self.rooms)


@dataclass
class Controller:
    """Chooses the shape of every round, and learns from its outcome.

    Attributes:
        width, budget: of trees, see `Auto`; without a budget only chains are drafted.
        first_plain: plain rounds of each size of the batch before its first draft.
    """

    costs: LiveCosts
    eps: float
    width: int
    budget: int
    first_plain: int
    shared: Acceptance = field(default_factory=Acceptance)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.eps)
        self._since_plain = self._wait = self._failures = 0
        self._off = self._probed = self._drafted = False
        self.weights_wait = False  # the next draft may be a look-up alone
        self._own = 0.0  # seconds of a choice after which nothing is verified
        self._gain = 1.0  # expected of the last choice that was compared
        self._waited = 0  # rounds since one drafted with weights
        self._refresh, self._plain = FIRST_REFRESH, PlainRounds()
        self._answers, self._length = 1, float(AMORTISED)  # that have ended, and their mean length
        self._probe_extra = 0.0  # seconds that a draft that is tried may cost, as it was planned
        self._unearned = 0.0  # plain rounds that must still earn what the dearest one in vain cost
        self._saved = 0.0  # seconds that drafts have saved, which pay for those in vain
        self._check_after, self._jumps = FIRST_CHECK, 0  # of the pace
        self._pace, self._burst = 1.0, 0  # at the last plain round; plain rounds still to measure
        self._trees = CandidateTrees()

    def begin(self, new: Sequence[ActiveRequest], alone: bool, context: int) -> None:
        """Start requests.

        The dearest draft in vain is usually one that read a prompt. Plain rounds earn its cost,
        less earlier savings, before a new text is drafted: so prompts of short answers are not all
        read in vain.

        Args:
            alone: no other request is running, so that a new ledger begins.
        """
        if alone:
            plain = self.costs.seconds(PLAIN, len(new), context).total
            self.ledger = Ledger(self.eps, plain)
            self._drafted = False
            earned = math.ceil(self._unearned) if self._off else 0
            most = max(LEAST_WAIT, earned)
            self._failures = min(self._failures, most.bit_length() - 1)
            self._wait = max(min(self._wait, LEAST_WAIT), earned)
        self._trees.renew()
        for one in new:
            self.ledger.add(one.out.times.prefill, one.out.times.prefill)
            one.out.ledger = self.ledger

    def end_answer(self, tokens: int) -> None:
        """Learn the length of an answer; one that ended at its first token had no round."""
        if tokens < 2:
            return
        self._answers += 1
        self._length += max(ANSWERS, 1 / self._answers) * (tokens - self._length)

    def tokens_left(self, one: ActiveRequest) -> float:
        """Return how many tokens an answer is expected to have left, by those that have ended."""
        return max(self._length - len(one.out.ids), self._length / 4)

    # ---- choice ----

    def reason_for_plain(self, batch: int, plain: float, look: float | None) -> str:
        """Return why the next round is plain, whatever the candidates are; "" if they decide.

        Args:
            plain: expected seconds of a plain round.
            look: expected seconds of looking at what the text would draft; None: the drafter
                cannot look.
        """
        if self.costs.still >= STILL:
            return STOPPED
        if self._plain.needed(batch, self.first_plain):
            return MEASURES
        self._wait -= 1
        self.weights_wait = self._wait >= 0
        if self.weights_wait and (look is None or not self._looks_cheaply(plain)):
            return OFF if self._off else HELD
        if look and self.ledger.missing(look) > 0:
            return HELD
        still_drafts = not self._off or self._since_plain > 0  # look-ups go on while it is off
        if (still_drafts or self._burst) and self._is_due():
            return MEASURES
        return ""

    def _looks_cheaply(self, plain: float) -> bool:
        """Return whether rounds without a draft may look what the text would draft."""
        return self._own <= PROBES * self.eps * plain

    def _is_due(self) -> bool:
        """Return whether a plain round is to be measured, between others that draft."""
        if self._burst:
            self._burst -= 1
            return True
        pace = self.costs.factors.pace
        if pace.differing >= DIFFERING and self._since_plain >= self._check_after:
            self._check_after, self._burst = min(2 * self._check_after, REFRESH), BURST
            return True
        if self._since_plain >= FIRST_REFRESH:
            if abs(self.costs.factors.pace.value / self._pace - 1) > CHANGED:
                self._burst = BURST
                return True
            if self._since_plain >= self._refresh:
                self._refresh, self._burst = min(2 * self._refresh, REFRESH), 1
                return True
        return False

    def choose(self, now: Situation) -> Choice:
        """Return what the next round drafts, and why."""
        plain = Choice(PLAIN, float(len(now.rooms)), now.costs.total(0))
        deepest = len(now.costs.draft) - 1
        if deepest < 1:
            return plain._replace(why=LAST)
        if not self._drafted:
            self.ledger.step = plain.seconds  # c0, now that plain rounds have been measured
        if now.kind == LOOK_UP and self._looks_cheaply(now.costs.total(0)):
            return self._look_up(now, plain, deepest)
        plain = plain._replace(gain=self._gain)
        if self.weights_wait:
            return plain._replace(why=OFF if self._off else HELD)
        choices = self._candidates(now, deepest)
        best = max(choices, key=lambda one: one.rate)
        self._gain = best.gain
        plain = plain._replace(gain=best.gain)
        self._turn(best.gain)
        if self._wait > 0:
            self._wait -= 1
            return plain._replace(why=OFF)
        if self._off:
            optimism = optimism_of(sum(room > 0 for room in now.rooms))
            choices = self._candidates(now, deepest, optimism)
        ranked = sorted(choices, key=lambda one: one.rate, reverse=True)
        allowed = (one for one in ranked if self.allows(one.shape, self._without(one, now), now))
        best = next(allowed, plain)
        if best is plain or not (self._off or best.gain > 1):
            self._hold(now, choices)
            return plain._replace(why=HELD)
        if not self._off:
            return best._replace(why=PAYS)
        extras = (self._extra(one.shape, self._without(one, now), now) for one in choices)
        self._probe_extra = max(extras)  # a chain may grow
        return best._replace(why=PROBE)

    def _look_up(self, now: Situation, plain: Choice, deepest: int) -> Choice:
        """Return a chain: it ends where a token does not pay, be it the first, at no cost."""
        tokens = chain_tokens(now.estimates, now.rooms, deepest)
        choices = chain_choices(tokens, now.costs, 0.0)
        ranked = sorted(choices, key=lambda one: one.rate, reverse=True)
        allowed = (one for one in ranked if self.allows(one.shape, one.seconds, now))
        if (best := next(allowed, None)) is None:
            self._hold(now, choices)
            return plain._replace(gain=ranked[0].gain, why=HELD)
        return best._replace(why=LOOKED_UP)

    def _turn(self, gain: float) -> None:
        """Turn drafts off where none pays, and on after a probe that shows that one does."""
        if not self._off and gain < 1:
            self._off, self._wait = True, min(2**self._failures, LONGEST_WAIT)
        elif self._off and self._probed and gain > MARGIN:
            self._off, self._failures, self._wait = False, self._failures // 2, 0
            self._unearned = 0.0
        elif self._off and self._probed:
            self._failures += 1
            self._wait = min(2**self._failures, LONGEST_WAIT)
        self._probed = False

    def _hold(self, now: Situation, choices: Sequence[Choice]) -> None:
        """Wait until plain rounds have earned the cheapest draft."""
        self.ledger.refused += 1
        plain = now.costs.total(0)
        extra = min(self._extra(one.shape, self._without(one, now), now) for one in choices)
        missing = self.ledger.missing(extra) / max(self.eps * plain, 1e-12)
        self._wait = max(self._wait, min(LONGEST_WAIT, max(1, math.ceil(missing))) - 1)

    def _without(self, one: Choice, now: Situation) -> float:
        """Return the expected seconds of a choice without its share of reading missed rows."""
        return one.seconds - now.reading(one.tokens, self.costs.read_seconds(len(now.rooms)))

    def _extra(self, shape: DraftShape, seconds: float, now: Situation) -> float:
        """Return the seconds by which few rounds of this shape exceed a plain one, with reading.

        ABSORBED_ROWS more than `waiting` are missed. The table contains their reading, but the
        factors may come from rounds that have absorbed fewer.
        """
        rows = sum(one + ABSORBED_ROWS for one in now.waiting if one)
        reading = rows * self.costs.read_seconds(len(now.rooms))
        upper = self.costs.upper(now.kind or shape.kind, len(now.rooms))
        return seconds * upper + reading + now.looked - now.costs.total(0)

    def allows(self, shape: DraftShape, seconds: float, now: Situation) -> bool:
        """Return whether the ledger allows a round, even if nothing is accepted."""
        return self.ledger.missing(self._extra(shape, seconds, now)) <= 0

    def _candidates(self, now: Situation, deepest: int, optimism: float = 0.0) -> list[Choice]:
        row = self.costs.read_seconds(len(now.rooms))
        tokens = chain_tokens(now.estimates, now.rooms, deepest, optimism)
        choices = chain_choices(tokens, now.costs, now.reading(1.0, row))
        if not self.budget or optimism or now.kind:
            return choices

        def seconds(shape: DraftShape, expected: float) -> float:
            own = self.costs.seconds(shape, len(now.rooms), now.context).total
            return own + now.reading(expected, row)

        limits = self.width, self.budget
        return choices + self._trees.choices(choices, tokens, self.shared, seconds, limits)

    # ---- outcome ----

    def settle(self, last: Round, read: tuple[int, float]) -> None:
        """Learn from a round.

        Args:
            read: missed rows that the drafter has read in it, and in how many seconds.
        """
        drafts, kind = last.shape.depth > 0, last.kind
        rows, reading = read if read[0] > LEAST_WAIT * len(last.requests) else (0, 0.0)
        # deciding is part of a drafted round's time, but for looking at many rows
        apart = last.looked if drafts else last.own
        batch, measured = len(last.requests), last.seconds - apart - reading * drafts
        cold = not drafts and self._since_plain > 0
        seconds = self.costs.observe(
            kind, last.table, measured, last.levels, batch, learns=not cold
        )
        self.ledger.paused += max(0.0, measured - seconds)
        if rows and self.costs.times.read:
            table = rows * self.costs.times.read / 1000
            counted = self.costs.observe(READ, table, reading, batch=batch)
            self.ledger.paused += max(0.0, reading - counted)
            reading = counted
        if self.costs.still == STILL:
            warnings.warn(f"The {STOPPED}, so that decode=auto drafts nothing.", stacklevel=2)
        worth = last.tokens * last.plain / len(last.requests) if drafts else seconds
        extra = apart + reading * drafts
        self.ledger.add(seconds + extra, worth)
        self._plain.add(batch, not drafts and not cold)
        self._since_plain = self._since_plain + 1 if drafts else 0
        if last.estimates and not last.verified.depth and (last.draft_kind or not drafts):
            self._own += OWN * (last.own - last.looked - self._own)
        if drafts:
            self._learn_draft(last, seconds + extra - worth)
        else:
            self._learn_plain(last)
        self._waited = 0 if drafts and not last.draft_kind else self._waited + 1

    def _learn_plain(self, last: Round) -> None:
        """Learn from a plain round, whose seconds the costs have learnt."""
        pace = self.costs.factors.pace
        self._pace = pace.value
        if pace.jumps != self._jumps:
            self._check_after, self._jumps = FIRST_CHECK, pace.jumps
        self._unearned = max(0.0, self._unearned - 1)

    def _learn_draft(self, last: Round, cost: float) -> None:
        """Learn from a round that drafted.

        Args:
            cost: seconds beyond what plain decoding takes for its tokens.
        """
        probe, batch, plain = last.choice.why == PROBE, len(last.requests), last.plain
        self._drafted = True
        if probe or not last.draft_kind:  # a look-up says nothing of what was tried
            self._probed = probe
        if probe:
            last.restart(self._waited)
            # a pause of the machine is not what drafts cost
            cost = min(cost, self._probe_extra)
        saved = self._saved - cost
        self._saved = min(max(0.0, saved), SAVED * plain)
        if probe:
            rounds = -saved / max(PROBES * self.eps * plain, 1e-12)
            self._unearned = max(self._unearned, min(rounds, MOST_WAIT))
        last.teach()
        if last.is_tree:
            accepted = last.tokens - batch + last.dropped
            self._trees.bias.add(accepted, last.choice.tokens - batch)
        else:  # so that trees that did badly are tried again
            self._trees.bias.forget()
