"""The policy of `decode=auto`: each round drafts what has the most expected tokens per second.

A round is planned from the measured seconds of every candidate (`costs/`) and the acceptance of
this request (`acceptance.py`): no draft, a chain that grows while a level pays (`chain_growth.py`),
or a dynamic tree. `controller.py` chooses; the ledger (`ledger.py`) bounds what all drafts together
may cost beyond plain decoding. In rounds without a draft the drafter does not run (`deferred.py`).

Every choice depends on the text so far, earlier outcomes, clocks, and distributions from which
nothing was drawn yet. So the output has the target's distribution. Since times differ from run to
run, so may the sampled text of a seed; greedy and coupled text does not.

Source: docs/decoding.md, "Automatic drafts"; the trees are those of EAGLE-2, arXiv:2406.16858.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from pathlib import Path

import torch

from outrider.conf.errors import ConfigError
from outrider.models.decode.acceptance import (
    CALIBRATED,
    GUESSED,
    Acceptance,
    AcceptanceTable,
    RequestAcceptance,
)
from outrider.models.decode.auto.auto_rule import auto_rule
from outrider.models.decode.auto.chain_growth import ChainGrowth
from outrider.models.decode.auto.choice import ChainCosts, Choice
from outrider.models.decode.auto.controller import LAST, PROBE, Controller, Situation
from outrider.models.decode.auto.deferred import Deferred, DeferredDrafter, PlainRow
from outrider.models.decode.auto.outcomes import Round
from outrider.models.decode.auto.tree_growth import TreeGrowth
from outrider.models.decode.costs.cost_table import CostSetting
from outrider.models.decode.costs.factors import LOOK_UP
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.measurement import (
    Announce,
    LargestDraft,
    covers,
    read_or_measure,
    say_nothing,
)
from outrider.models.decode.costs.round_costs import ABSORBED_ROWS, PLAIN, DraftShape, chain_shape
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.policy import Draft
from outrider.models.decode.request import ActiveRequest
from outrider.models.decode.round_times import Stopwatch
from outrider.models.decode.rules.rule_table import BEST, COUPLED, BoundRule, bind_rule, check_draft
from outrider.models.decode.tree import Tree
from outrider.models.drafting.drafter import Absorbed, Drafter, LookingDrafter
from outrider.models.target.target import Target, TargetStates

LEAST_ROWS = 512  # of the texts that costs are measured for: longer ones may come


@dataclass(eq=False)
class Auto:
    """The policy of `decode=auto`; one object serves many requests and learns from them.

    Attributes:
        depth: tokens of a chain or levels of a tree at most.
        budget: nodes of a tree at most; not above `depth`: chains only.
        width: children per node of a tree.
        draft: kind of draft tokens of chains above temperature 0; those of trees are the top-k, or
            coupled too.
        eps: share of the seconds of plain decoding that speculation may cost.
        file: of the cost tables; None: in the user's cache.
        first_plain: plain rounds of each size of the batch before its first draft, which measure
            plain decoding.
        table: measured acceptance of the drafter, which estimates begin with.
        notes: sentences on the cost table, for the user.
        announce: called with a sentence before costs are measured.
    """

    depth: int = 8
    budget: int = 31
    width: int = 4
    draft: str = BEST
    eps: float = 0.03
    file: Path | None = None
    first_plain: int = 3
    table: AcceptanceTable | None = None
    notes: list[str] = field(default_factory=list)
    announce: Announce = say_nothing
    branches = True

    def __post_init__(self) -> None:
        if min(self.depth, self.budget, self.width) < 1 or self.eps < 0:
            raise ValueError(f"{self}: depth, budget and width are at least 1, eps at least 0")
        check_draft(self.draft)
        self.controller: Controller | None = None
        self._setting: CostSetting | None = None  # kept, since its hashes of weights take seconds
        # by kind, and whether tokens are drawn
        self._acceptance = dict[tuple[str, bool], Acceptance]()
        self._weight = GUESSED  # of the drafter's confidence
        self._drafter: DeferredDrafter | None = None
        self._round: Round | None = None
        self._running: Sequence[ActiveRequest] = ()
        self._gain, self._start, self._device = 1.0, 0.0, torch.device("cpu")

    @property
    def nodes(self) -> int:
        return max(self.depth, self.budget)

    @property
    def levels(self) -> int:
        return self.depth

    @property
    def tree_nodes(self) -> int:
        """Nodes of a tree at most; 0: chains alone, also in rounds that are less deep."""
        return self.budget if self.budget > self.depth else 0

    def default_rule(self, name: str = "auto") -> BoundRule:
        """Return the rule that verifies its chains and its trees; `name` is that of chains."""
        if self.draft == COUPLED or self.draft == BEST:
            return bind_rule(COUPLED if self.draft == COUPLED else "match", self.draft)
        return auto_rule(name, self.draft, self._note_overlaps)

    # ---- before decoding ----

    def wrap(self, drafter: Drafter, target: Target) -> DeferredDrafter:
        """Return the drafter in the form that rounds can skip; recurrent layers leave chains.

        Raises:
            ConfigError: it runs the target on its drafts, so that no round can skip it.
        """
        if drafter.runs_target():
            why = (
                f"{type(drafter).__name__} drafts in the target's cache and takes part in every "
                "round, so that it cannot be turned off."
            )
            raise ConfigError("decode", "auto", why, "Use decode=chain.")
        if target.recurrent or drafter.chains_only:
            self.budget = min(self.budget, self.depth)
        if self._drafter is None or self._drafter.inner is not drafter:
            self.controller = self._setting = None  # its costs are those of another drafter
            self._weight = GUESSED if drafter.calibration is None else CALIBRATED
            self._acceptance.clear()
            self.table = self.table if self._drafter is None else None  # that of another drafter
        self._drafter = DeferredDrafter(drafter, self._end_answer, target.device)
        return self._drafter

    def prepare(self, target: Target, slots: int, rows: int) -> None:
        """Read a cost table for batches of `slots` requests of `rows` rows, or measure it."""
        assert self._drafter is not None, "the engine wraps the drafter first"
        self._device, drafter = target.device, self._drafter.inner
        known = None if self.controller is None else self.controller.costs
        _, rows, largest = need = self.need(target, slots, rows)
        if known is not None and covers(known.times, *need, drafter.bends):
            return
        self._setting = self._setting or CostSetting.of(target, drafter)
        times, note = read_or_measure(
            target, drafter, self._setting, self.file, *need, self.announce
        )
        self.notes += [note] if note else []
        costs = LiveCosts(times) if known is None else LiveCosts(times, known.factors)
        costs.factors.new_table()
        self.use_costs(costs)
        longest = costs.seconds(chain_shape(largest.depth), slots, rows).draft
        self._drafter.use_cost(longest / costs.seconds(PLAIN, slots, rows).total)

    def need(self, target: Target, slots: int = 1, rows: int = 0) -> tuple[int, int, LargestDraft]:
        """Return of which batches, texts and drafts it needs costs, after `wrap`.

        Args:
            rows: of the texts to decode; longer ones may come.
        """
        assert self._drafter is not None, "the engine wraps the drafter first"
        rows = min(max(rows, LEAST_ROWS), target.shape().max_positions)
        half = max(1, rows // 2 - 1)  # of a short text: the other half is context
        deepest = min(self.depth, self._drafter.max_depth, half)
        nodes = min(self.tree_nodes, half)
        return slots, rows, LargestDraft(deepest, self.width if nodes else 1, max(nodes, deepest))

    def use_costs(self, costs: LiveCosts) -> None:
        """Plan with these costs."""
        if self.controller is None:
            limits = self.width, self.tree_nodes, self.first_plain
            self.controller = Controller(costs, self.eps, *limits)
        self.controller.costs = costs

    @property
    def _mixes_rows(self) -> bool:
        """Whether rows are not those of the drafter that the table was measured with alone."""
        return self._drafter is not None and self._drafter.inner.is_composite

    def _shared(self, kind: str, drawn: bool) -> Acceptance:
        """Return the estimates of all requests whose draft tokens are drawn, or are not.

        Args:
            kind: LOOK_UP, or "" for drafts by weights.
        """
        if (kind, drawn) not in self._acceptance:
            weight = GUESSED if drawn else self._weight
            table = None if kind else self.table
            if table and (weight == CALIBRATED or self._mixes_rows):
                table = table._replace(bins=None)  # they are of other confidences
            self._acceptance[kind, drawn] = Acceptance(weight, drawn, table)
        return self._acceptance[kind, drawn]

    # ---- a round ----

    def drafts(self, active: Sequence[ActiveRequest]) -> bool:
        """Return whether the next round may draft; else it is plain, and `defer` ends it."""
        self._start = Stopwatch.clock()
        self.settle()
        control = self.controller
        assert control is not None, "prepare() comes first"
        self._begin(control, active)
        length = _mean_length(active)
        plain = control.costs.seconds(PLAIN, len(active), length).total
        why = control.reason_for_plain(len(active), plain, self._look_seconds(active))
        if not why and max(one.room for one in active) > 0:
            for one in active:  # plain rounds do not keep it
                one.root = torch.tensor(one.out.ids[-1:], device=self._device)
            return True
        choice = Choice(PLAIN, float(len(active)), plain, self._gain, why or LAST)
        self._record(control, Round(list(active), (), choice, plain), length)
        return False

    def _look_seconds(self, active: Sequence[ActiveRequest]) -> float | None:
        """Return the expected seconds of looking; None: the drafter does not look first."""
        if self._drafter is None or not isinstance(self._drafter.inner, LookingDrafter):
            return None
        states: list[Deferred] = [one.state for one in active]  # type: ignore[misc]
        return self._drafter.look_row * sum(state.rows for state in states)

    def defer(
        self, active: Sequence[ActiveRequest], prefix: Sequence[int], states: TargetStates
    ) -> None:
        """Keep the rows of a plain round for the drafter.

        Args:
            prefix: position of each row.
        """
        for slot, one in enumerate(active):
            token, next_token = one.out.ids[-2:]
            row = PlainRow(token, next_token, prefix[slot], slot, states)
            rows, state = one.absorbed
            assert state is not None, "the prompt is absorbed first"
            one.absorbed = Absorbed(rows + 1, state.after(row, 1))

    def propose(self, context: DraftContext) -> Draft:
        """Plan a round by its candidates, and draft it."""
        control, requests = self.controller, context.requests
        assert control is not None, "prepare() comes first"
        if isinstance(context.drafter, DeferredDrafter):  # engines may share this policy
            self._drafter = context.drafter
        assert self._drafter is not None, "the engine wraps the drafter first"
        length = _mean_length(requests)
        deepest = max(0, min(self.depth, context.max_depth, max(context.depth_limits)))
        states: Sequence[Deferred] = context.states  # type: ignore[assignment]
        unread = self._drafter.look(states)
        if control.weights_wait and self._drafter.skip_weights(states):
            unread = [None] * len(states)
        kinds = [LOOK_UP if rows is None else "" for rows in unread]
        kind = min(kinds)  # the weights draft for all, if for one
        costs = ChainCosts.of(control.costs, len(requests), length, deepest, kind)
        waiting = [max(0, (rows or 0) - ABSORBED_ROWS) for rows in unread]
        drawn = self.draft != BEST and not context.sampling.greedy
        control.shared = self._shared(kind, drawn)
        estimates = [
            _estimate(one, own, self._shared(own, drawn))
            for one, own in zip(requests, kinds, strict=True)
        ]
        left = [control.tokens_left(one) for one in requests]
        limits, looked = context.depth_limits, self._drafter.looked
        now = Situation(estimates, limits, costs, length, waiting, left, kind, looked)
        choice = control.choose(now)
        if (depth := min(choice.shape.depth, deepest)) and not kind:
            self._drafter.use_cost(costs.draft[depth] / costs.other[depth])
        plain = costs.total(0)
        last = Round(list(requests), estimates, choice, plain, kinds, vocab=context.vocab)
        last.looked = looked
        own = Stopwatch.clock() - self._start
        draft = self._draft(control, context, now, choice, last)
        self._record(control, last, length)
        last.own = own
        return draft

    def _record(self, control: Controller, last: Round, length: int) -> None:
        """Keep a round until its outcome is known."""
        last.set_table(control.costs, length)
        label, gain = last.label, last.choice.gain
        for one in last.requests:
            one.out.choices.append(label)
            one.out.gains.append(gain)
        self._gain, self._round = last.choice.gain, last
        last.own = Stopwatch.clock() - self._start

    def settle(self) -> None:
        """Learn from the last round, if its outcome is known."""
        last, self._round = self._round, None
        if last is None or self.controller is None or not last.is_over:
            return
        read = (0, 0.0)
        if self._drafter is not None and last.shape.depth:
            read = self._drafter.read
        self.controller.settle(last, read)

    def _end_answer(self, tokens: int) -> None:
        self.settle()
        if self.controller is not None:
            self.controller.end_answer(tokens)

    def _begin(self, control: Controller, active: Sequence[ActiveRequest]) -> None:
        """Start the requests that were not there in the round before."""
        running = self._running
        if len(active) == len(running) and all(map(is_, active, running)):
            return
        before = set(map(id, running))
        new = [one for one in active if id(one) not in before]
        if new:
            control.begin(new, len(new) == len(active), _mean_length(active))
        self._running = list(active)

    def _draft(
        self,
        control: Controller,
        context: DraftContext,
        now: Situation,
        choice: Choice,
        last: Round,
    ) -> Draft:
        if choice.shape == PLAIN:
            return Draft(Tree.chain(context.roots[:, None]), None)
        rate = max(choice.rate, choice.rate / choice.gain)
        if choice.shape.kind == "tree":
            return self._draft_tree(control, context, now, choice, rate, last)
        deepest = len(now.costs.draft) - 1
        while deepest > choice.shape.depth and not control.allows(
            chain_shape(deepest), now.costs.total(deepest), now
        ):
            deepest -= 1
        least = choice.shape.depth if choice.why == PROBE else 0
        growth = self.growth(now.estimates, now.costs, rate, deepest, self.draft, least)
        draft = growth.propose(context)
        last.confidences, last.logits = growth.confidences, growth.logits
        last.unsubmitted = growth.unsubmitted
        last.drafted = chain_shape(max(1, growth.steps))
        return draft

    growth, tree_growth = ChainGrowth, TreeGrowth  # tests replace them

    def _draft_tree(
        self,
        control: Controller,
        context: DraftContext,
        now: Situation,
        choice: Choice,
        rate: float,
        last: Round,
    ) -> Draft:
        """Draft a tree: a level that adds less than its drafting costs is the last one."""
        shape, batch = choice.shape, len(now.rooms)
        level = (now.costs.draft[-1] - now.costs.draft[1]) / max(1, len(now.costs.draft) - 2)
        least = max(0.0, rate * level / batch)
        kind = COUPLED if self.draft == COUPLED else BEST
        rows = control.costs.row_seconds(shape.kind, batch, now.context, shape.nodes)
        growth = self.tree_growth(
            shape.depth, self.width, shape.nodes, least, kind, now.estimates, rate, rows
        )
        draft = growth.propose(context)
        if levels := draft.tree.levels:
            last.is_tree, last.roots = True, growth.roots
            last.dropped = sum(growth.dropped)
            last.drafted = DraftShape(levels, draft.tree.size - 1, shape.parents[:levels])
        else:  # the drafter abstained at once
            last.drafted = chain_shape(1)
        return draft

    def _note_overlaps(self, overlaps: Sequence[Sequence[float]]) -> None:
        if self._round is not None:
            self._round.overlaps = overlaps


def _estimate(one: ActiveRequest, kind: str, shared: Acceptance) -> RequestAcceptance:
    """Return the estimates of a request for drafts of a kind, which it keeps."""
    if kind not in one.acceptance:
        one.acceptance[kind] = RequestAcceptance(shared)
    return one.acceptance[kind]


def _mean_length(requests: Sequence[ActiveRequest]) -> int:
    lengths = [len(one.request.prompt) + len(one.out.ids) for one in requests]
    return sum(lengths) // len(lengths)
