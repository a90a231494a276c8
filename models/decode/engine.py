"""The speculative decoder: draft, verify, commit, for a batch of requests.

Between rounds, a request's slot of the target's cache holds every committed token but the newest,
the root. A round runs the root and the draft tree of every request in one forward, keeps the rows
of the accepted paths and emits one token more than was accepted. A request that has ended frees its
slot at once; prompts of one length that start together are read in one forward. Without a drafter
every tree is only the root, which is the baseline.

An answer does not depend on its batch: every request has its own slot, random numbers and drafter
state. Earlier answers (`Drafter.finish`) and the times of rounds (decode=auto) change how drafts
use random numbers: another sampled answer of the same seed, with the same distribution.

Shape letters: B requests, N nodes, V tokens.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.decode import tree_layout
from outrider.models.decode.draft_context import DRAFTER_FIX, DraftContext
from outrider.models.decode.policy import (
    Draft,
    Policy,
    SkippingPolicy,
    check_compatible,
    default_rule_of,
)
from outrider.models.decode.request import (
    ActiveRequest,
    DialogueCache,
    Event,
    Output,
    Request,
    Stops,
    check_request,
    same_length_batch,
)
from outrider.models.decode.round_times import RoundTimes, Stopwatch
from outrider.models.decode.rules.rule_table import WITH_ROWS, VerifyFn
from outrider.models.decode.rules.token_rules import Rows
from outrider.models.decode.sampling import EmptyDistribution
from outrider.models.decode.sampling_params import Sampling, TokenHistory
from outrider.models.decode.tree import Tree
from outrider.models.decode.verifier import NO_RANDOMNESS, Decision, verifier_class
from outrider.models.drafting.drafter import Drafter, State, TargetInput
from outrider.models.interface import Trace
from outrider.models.target.target import Target, TargetStates

PREFILL_MASK = 2**24  # elements of the mask with which a piece of a prompt is read


class Engine:
    """Speculative decoder of a target; `rounds` is the number of rounds of the last `run`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy | None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 - an immutable value
        stops: Stops | None = None,
        rule: VerifyFn | None = None,
        seed: int = 0,
        keep_gaps: bool = False,
        timed: bool = True,
    ) -> None:
        """
        Args:
            drafter: None decodes without speculation; the policy is None too.
            rule: verification at temperatures above 0; None: the default lossless rule for the
                policy's drafts.
            seed: of `generate`, whose answers continue one stream of random numbers.
            keep_gaps: record the margin of the target's top-1 at every token (Output.gaps).
            timed: measure the parts of a round, which synchronises with a GPU at each.

        Raises:
            ValueError: the sampling parameters are invalid for this target, or the rule does not
                fit the policy's drafts.
            ConfigError: trees for a target or a draft model with recurrent layers.
        """
        self.skipping = policy if isinstance(policy, SkippingPolicy) else None
        if self.skipping is not None and drafter is not None:
            drafter = self.skipping.wrap(drafter, target)
        elif policy is not None and policy.branches:
            tree_layout.require_no_states(target, drafter)
        self.target, self.drafter, self.policy = target, drafter, policy
        self.sampling = sampling.check(target.vocab_size)
        self.stops, self.keep_gaps, self.timed = stops or Stops(), keep_gaps, timed
        rule = rule or default_rule_of(policy)
        if policy is not None and not sampling.greedy:
            check_compatible(rule, policy)
        verifier = verifier_class(sampling, rule)
        self.verifier = verifier(target, sampling, rule, policy, all_scores=keep_gaps)
        self.generator = Random(seed)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Output:
        """Return one answer; its random numbers continue the stream of the previous call."""
        events = self.run([Request(prompt, max_new_tokens)], 1, [self.generator])
        return [event.out for event in events][-1]

    def generate_all(self, requests: Sequence[Request], batch: int) -> list[Output]:
        """Return all answers, in the order of the requests, decoding `batch` at a time."""
        outputs = {event.number: event.out for event in self.run(requests, batch)}
        return [outputs[number] for number in range(len(requests))]

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        batch: int,
        generators: Sequence[Random] | None = None,
        dialogue: DialogueCache | None = None,
    ) -> Iterator[Event]:
        """Decode; yield each request's new tokens after every round.

        Args:
            batch: maximum number of requests decoded together.
            generators: one per request; None: seeded by the requests' seeds.
            dialogue: of the only request: the part of the prompt that it holds is not read again.

        Raises:
            RunError: the target cannot decode a request; logits of the target are NaN, or those of
                the drafter that are drawn from or begin an answer.
            ValueError: batch < 1, or a dialogue with several requests.
        """
        if batch < 1:
            raise ValueError(f"batch={batch}: must be at least 1")
        if dialogue is not None and len(requests) > 1:
            raise ValueError(f"a dialogue takes one request, not {len(requests)}")
        self.start(requests, min(batch, max(1, len(requests))), dialogue)
        waiting = deque(enumerate(requests))
        while waiting or self.active:
            while waiting and len(self.active) < batch:
                group = [*same_length_batch(waiting, batch - len(self.active))]
                chosen = [generators[n] for n, _ in group] if generators else None
                yield from self.admit(group, chosen, dialogue)
            if self.active:
                yield from self.advance(dialogue)

    # ---- steps of a run ----

    def start(
        self, requests: Sequence[Request], slots: int, dialogue: DialogueCache | None = None
    ) -> None:
        """Start a batch of `slots` requests, with room for each of `requests`.

        Raises:
            RunError: the target cannot decode a request.
        """
        self.rounds, self.active = 0, list[ActiveRequest]()
        for request in requests:
            check_request(request, self.target.shape().max_positions, self.target.vocab_size)
        rows = max(map(self.rows_of, requests), default=1)
        if self.skipping is not None:
            self.skipping.prepare(self.target, slots, rows)
        if dialogue is not None and dialogue.cache is not None:
            self.cache = dialogue.cache
            self.cache.ensure_capacity(rows)
        elif self.drafter is None:
            self.cache = self.target.new_cache(rows, slots)
        else:
            self.cache = self.drafter.new_cache(self.target, rows, slots)
        self.cache.undo_rows = 0 if self.policy is None else self.policy.nodes + 1
        self.watch = Stopwatch(self.target.device, self.timed)
        self.history = None
        if not self.sampling.has_no_processors:
            counts, of = self.sampling.counts_tokens, self.target
            self.history = TokenHistory(slots, of.vocab_size, of.device, counts)

    def rows_of(self, request: Request) -> int:
        """Return the rows of the cache that a request needs, draft tree included."""
        nodes = 1 + (self.policy.nodes if self.policy is not None else 0)
        nodes += 0 if self.drafter is None else self.drafter.extra_rows
        return nodes + len(request.prompt) + max(0, request.budget)

    def admit(
        self,
        requests: Sequence[tuple[int, Request]],
        generators: Sequence[Random] | None = None,
        dialogue: DialogueCache | None = None,
    ) -> Iterator[Event]:
        """Read the prompts of numbered requests of one length, and yield their first tokens."""
        chosen = generators or [Random(one.seed) for _, one in requests]
        started = [ActiveRequest(*one, rng) for one, rng in zip(requests, chosen, strict=True)]
        for one in started:
            self.verifier.start_request(one)
        nonempty = [one for one in started if one.request.budget > 0]
        self.active.extend(nonempty)
        if nonempty:
            self._prefill(nonempty, len(self.active) - len(nonempty), dialogue)
        for one in started:
            yield Event(one.number, list(one.out.ids), one.out)
        self.release()

    def advance(self, dialogue: DialogueCache | None = None) -> Iterator[Event]:
        """Run a round of the active requests, and yield the new tokens of each."""
        counts = self._round(self.active)
        self.rounds += 1
        if dialogue is not None:
            text = [*self.active[0].request.prompt, *self.active[0].out.ids]
            dialogue.add_round(text, self.active[0].absorbed)
        for one, count in zip(self.active, counts, strict=True):
            yield Event(one.number, one.out.ids[-count:], one.out)
        self.release()

    # ---- requests start and end ----

    def _set_taps(self) -> None:
        """Set the target's taps, which another engine may have changed since the last round."""
        taps = () if self.drafter is None else self.drafter.taps
        if self.target.taps != taps:
            self.target.set_taps(taps)

    def _prefill(
        self, started: list[ActiveRequest], first: int, dialogue: DialogueCache | None
    ) -> None:
        """Read prompts of one length into the slots from `first` on; emit their first tokens.

        A long prompt is read in pieces: no mask has the square of its length.
        """
        watch, device = self.watch, self.target.device
        prompts = [list(one.request.prompt) for one in started]
        if dialogue is not None:
            started[0].absorbed = dialogue.match_prefix(prompts[0])
        cached, length = started[0].absorbed.rows, len(prompts[0])
        self._set_taps()
        watch.lap()
        start, read = watch.latest, 0.0
        for slot in range(first, first + len(started)):
            self.cache.crop(slot, cached)
        self.cache.select_slots(first, len(started))
        ids = torch.tensor([prompt[cached:] for prompt in prompts], device=device)
        positions = torch.arange(cached, length, device=device).expand(len(started), -1)
        size = max(1, PREFILL_MASK // (len(started) * length))
        pieces = [*zip(ids.split(size, 1), positions.split(size, 1), strict=True)]
        for (piece, at), (following, _) in pairwise(pieces):
            states = self._read(started, piece, at)
            next_ids = torch.cat([piece[:, 1:], following[:, :1]], dim=1)
            read += self._absorb_rows(started, tree_layout.KeptRows(piece, next_ids, at), states)
        ids, positions = pieces[-1]
        states = self._read(started, ids, positions)
        logits = self.target.logits(states.last[:, -1:])
        if self.history is not None:
            for slot, prompt in enumerate(prompts, start=first):
                self.history.start(slot, prompt)
        tree = Tree.chain(ids[:, -1:])
        self.verifier.start_round(started, 0)
        decision = self._decide(Draft(tree, None), self._adjusted(logits, tree, first))
        roots = [outcome.next_id for outcome in decision.outcomes]
        for i, (one, root) in enumerate(zip(started, roots, strict=True)):
            one.add_first(root, self.stops)
            self._record(one, first + i, decision.scores[i], [0])
        next_ids = torch.cat([ids[:, 1:], torch.tensor(roots, device=device)[:, None]], dim=1)
        read += self._absorb_rows(started, tree_layout.KeptRows(ids, next_ids, positions), states)
        if dialogue is not None:
            dialogue.add_prompt(self.cache, [*prompts[0], roots[0]], started[0].absorbed)
        watch.lap()
        for one in started:
            one.out.times.prefill += (watch.latest - start) / len(started)
            one.out.times.prompt += read / len(started)

    def _read(
        self, started: list[ActiveRequest], ids: Int[Tensor, "B T"], positions: Int[Tensor, "B T"]
    ) -> TargetStates:
        """Read the next tokens of prompts of one length."""
        width = self.cache.active_lengths[0] + ids.shape[1]
        visible = torch.arange(width, device=ids.device) <= positions[..., None]
        return self._run_target(started, TargetInput(ids, positions, visible))

    def _run_target(self, active: list[ActiveRequest], new: TargetInput) -> TargetStates:
        if self.drafter is None:
            return self.target.forward(new.ids, new.positions, new.visible, self.cache)
        before = [one.state for one in active]
        states, after = self.drafter.run_target(self.target, self.cache, before, new)
        for one, state in zip(active, after, strict=True):
            one.absorbed = one.absorbed._replace(state=state)
        return states

    def _absorb_rows(
        self, started: list[ActiveRequest], rows: tree_layout.KeptRows, states: TargetStates
    ) -> float:
        """Pass the drafter rows of a prompt, all of them; return its seconds."""
        times = RoundTimes()
        if self.drafter is not None:
            traces = tree_layout.kept_traces([rows.ids.shape[1]] * len(started), rows, states)
            self._absorb(self.drafter, started, traces, times)
        return times.draft

    def release(self) -> None:
        """Remove ended requests; the last slots move into theirs."""
        active = self.active
        for slot in reversed(range(len(active))):
            if not active[slot].out.stop_reason:
                continue
            if self.drafter is not None:
                self.drafter.finish(active[slot].out.ids)
            last = len(active) - 1
            if slot != last:
                self.cache.move_slot(last, slot)
                if self.history is not None:
                    self.history.move(last, slot)
                active[slot] = active[last]
            active.pop()

    # ---- a round ----

    def _round(self, active: list[ActiveRequest]) -> list[int]:
        """Run one round; return the number of new tokens of every request."""
        watch, cache = self.watch, self.cache
        watch.lap()
        start, times = watch.latest, RoundTimes()
        self._set_taps()
        cache.select_slots(0, len(active))
        self.verifier.start_round(active, 0 if self.policy is None else self.policy.levels)
        skips = self.skipping is not None and not self.skipping.drafts(active)
        draft, drafted, steps = self._no_draft(active) if skips else self._draft(active, times)
        tree, prefix = draft.tree, cache.active_lengths
        positions, visible = tree_layout.positions_and_mask(tree, prefix)
        watch.lap()  # building the tree and its mask counts as overhead
        states = self._run_target(active, TargetInput(tree.ids, positions, visible, tree, drafted))
        logits = self.target.logits(states.last)
        times.target += watch.lap()
        decision = self._decide(draft, self._adjusted(logits, tree))
        paths = []
        for slot, (one, outcome) in enumerate(zip(active, decision.outcomes, strict=True)):
            paths.append(outcome.path[: one.add_round(outcome, self.stops, steps)])
            self._record(one, slot, decision.scores[slot], paths[-1])
        counts = [*map(len, paths)]
        times.verify += watch.lap()
        for one, after in zip(active, drafted):  # noqa: B905 - none without a policy
            one.end_draft(self.drafter, after)
        if skips or self.drafter is None:
            cache.keep_rows(paths)
            if self.skipping is not None:
                self.skipping.defer(active, prefix, states)
            times.commit += watch.lap()
        else:
            texts = [one.out.ids[-count - 1 :] for one, count in zip(active, counts, strict=True)]
            rows = tree_layout.kept_rows(tree, decision.choice, positions, prefix, texts, paths)
            cache.keep_rows(paths, rows.paths)
            times.commit += watch.lap()
            traces = tree_layout.kept_traces(counts, rows, states)
            self._absorb(self.drafter, active, traces, times)
        times.rounds = watch.latest - start
        for one in active:
            one.out.times.add(times, 1 / len(active))
        return counts

    def _draft(
        self, active: list[ActiveRequest], times: RoundTimes
    ) -> tuple[Draft, Sequence[State], int]:
        """Return the draft, the drafter's states after its last step, and how many it has run."""
        if self.drafter is None or self.policy is None:
            return self._no_draft(active)
        rng = NO_RANDOMNESS  # draws need not check: verification refuses tokens of NaN rows
        if self.policy.draft in WITH_ROWS:
            rng = self.verifier.random_source(check_mass=False)
        scores, history = self.verifier.draft_scores, self.history
        context = DraftContext(
            self.drafter, active, self.sampling, rng, history, scores, self.watch, times
        )
        if max(context.depth_limits) < 1:
            return Draft(Tree.chain(context.roots[:, None]), None), context.states, 0
        try:
            return self.policy.propose(context), context.states, context.steps
        except EmptyDistribution as error:
            raise RunError(f"A round could not be drafted: {error}", DRAFTER_FIX) from error

    def _no_draft(self, active: list[ActiveRequest]) -> tuple[Draft, Sequence[State], int]:
        newest = [one.out.ids[-1:] for one in active]
        return Draft(Tree.chain(torch.tensor(newest, device=self.target.device)), None), (), 0

    def _adjusted(self, logits: Rows, tree: Tree, first: int = 0) -> Rows:
        """Apply penalties and bans, each node with its own text."""
        if self.history is None:
            return logits
        return self.sampling.adjust(logits, self.history.at_nodes(tree, first))

    def _decide(self, draft: Draft, logits: Rows) -> Decision:
        return self.verifier.decide_or_explain(draft, logits)

    def _record(
        self, one: ActiveRequest, slot: int, scores: Float[Tensor, "N V"], path: list[int]
    ) -> None:
        """Record the margins and the token history of the newest tokens."""
        if self.keep_gaps:
            top = scores[path].float().topk(2, dim=-1).values
            one.out.gaps.extend((top[:, 0] - top[:, 1]).tolist())
        if self.history is not None:
            self.history.add(slot, one.out.ids[-len(path) :])

    def _absorb(
        self, drafter: Drafter, active: list[ActiveRequest], traces: list[Trace], times: RoundTimes
    ) -> None:
        """Pass the drafter the kept rows, each with its next token."""
        for one, trace in zip(active, traces, strict=True):
            one.root = trace.next_ids[0, -1:]
        self.watch.lap()  # building the traces counts as overhead
        read = drafter.absorb_next([one.absorbed for one in active], traces)
        for one, absorbed in zip(active, read, strict=True):
            one.absorbed = absorbed
        times.draft += self.watch.lap()
