"""The built-in decoder: draft, verify, commit, for a batch of prompts that come and go.

It knows four nouns: Target, Drafter, Policy, verify. The invariant between rounds: a prompt's slot
of the target's cache holds every committed token but the newest, the root. A round feeds the root
and the drafted tree of every prompt in one forward, keeps the rows of the accepted paths and emits
one token more than was accepted, each prompt as many as it got. A prompt that is over makes room
for the next at once; prompts of one length that come together are read in one forward. Without a
drafter the trees are roots alone: that is the baseline, the same engine and the same cache.

What a prompt is told does not depend on the batch it is in: it has its own slot, random numbers
and drafter state, and what fills up the batch is masked.

Shape letters: B prompts, N nodes, V tokens.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.batch_kv_cache import in_front
from outrider.models.decode import tree_layout as layout
from outrider.models.decode.draft_context import BROKEN, Ask
from outrider.models.decode.gumbel_coupling import Noise, Race, Winners
from outrider.models.decode.policy import Draft, Policy, check_fit, usual_rule
from outrider.models.decode.request import Live, Memory, Output, Request, Stops, alike, check
from outrider.models.decode.round_outcome import News, decided, read
from outrider.models.decode.round_times import Clock, Stopwatch
from outrider.models.decode.rules import COUPLED, TOSSED, Fitted, Judge
from outrider.models.decode.sampling import GeneratorCoins, NoMass
from outrider.models.decode.sampling_params import History, Sampling
from outrider.models.decode.tree import Tree
from outrider.models.decode.verify_cpu import match
from outrider.models.drafter import Drafter, Trace
from outrider.models.target import Target

NO_COINS = GeneratorCoins([], 0)
HINT = "Is the model right, its precision wide enough, its cache what it believes?"


class Event(NamedTuple):
    """News of one request: the tokens that have just come, and all so far."""

    number: int
    tokens: list[int]
    out: Output


class Engine:
    """Decodes prompts, with a drafter or, as the baseline, without one.

    Attributes:
        rounds: of the batch, since `run` was called last.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy | None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 - an immutable value
        stops: Stops | None = None,
        rule: Judge | None = None,
        seed: int = 0,
        keep_gaps: bool = False,
        timed: bool = True,
    ) -> None:
        """
        Args:
            drafter: None decodes plainly, one token per forward; policy is None with it.
            rule: how guesses are verified at temperatures above 0; None takes the usual lossless
                one for the policy's guesses (rules.py). Greedy decoding has one rule.
            seed: of `generate`, whose answers draw from one stream of numbers.
            keep_gaps: measure the lead of the target's favourite at every token, in what decides.
            timed: book time where it is spent, which waits for a GPU at every part of a round.

        Raises:
            ValueError: the sampling makes no sense for this target, or the rule was made for
                other drafts than the policy's.
        """
        self.target, self.drafter, self.policy = target, drafter, policy
        self.sampling = sampling.check(target.vocab)
        self.stops, self.keep_gaps, self.timed = stops or Stops(), keep_gaps, timed
        self.rule = rule or usual_rule(policy)
        warm = not self.sampling.greedy
        self.coupled = warm and isinstance(self.rule, Fitted) and self.rule.coupled
        self.guesses_coupled = warm and policy is not None and policy.draft == COUPLED
        if policy is not None and not self.sampling.greedy:
            check_fit(self.rule, policy)
        self.generator = Random(seed)

    # ---- from outside ----

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Output:
        """One answer; its random numbers go on where those of the answer before ended."""
        events = self.run([Request(prompt, max_new_tokens)], 1, [self.generator])
        return [event.out for event in events][-1]

    def generate_all(self, requests: Sequence[Request], batch: int) -> list[Output]:
        """All answers, `batch` prompts at a time, in the order of the requests."""
        done = {event.number: event.out for event in self.run(requests, batch)}
        return [done[number] for number in range(len(requests))]

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        batch: int,
        generators: Sequence[Random] | None = None,
        memory: Memory | None = None,
    ) -> Iterator[Event]:
        """Decode; say what has come of whom after every round.

        Args:
            batch: prompts decoded together at most.
            generators: of each request; None makes them of the requests' seeds.
            memory: of a dialogue: what it holds of the prompt is not read again. For one request.

        Raises:
            RunError: a prompt is empty, or too long for the target; a seed is negative; logits of
                the target, or those of the drafter that are drawn from or begin an answer, are NaN.
            ValueError: no batch, or a memory for several requests.
        """
        self.rounds = 0
        self._start(requests, batch, memory)
        waiting, live = deque(enumerate(requests)), list[Live]()
        while waiting or live:
            while waiting and len(live) < batch:
                come = [
                    self._come(n, request, generators[n] if generators else Random(request.seed))
                    for n, request in alike(waiting, batch - len(live))
                ]
                asked = [one for one in come if one.request.budget > 0]
                live.extend(asked)
                if asked:
                    self._prefill(asked, len(live) - len(asked), memory)
                for one in come:
                    yield Event(one.number, list(one.out.ids), one.out)
                self._release(live)
            if live:
                counts = self._round(live)
                self.rounds += 1
                if memory is not None:
                    memory.go_on([*live[0].request.prompt, *live[0].out.ids], live[0].state)
                for one, count in zip(live, counts, strict=True):
                    yield Event(one.number, one.out.ids[-count:], one.out)
                self._release(live)

    # ---- prompts come and go ----

    def _start(self, requests: Sequence[Request], batch: int, memory: Memory | None) -> None:
        if batch < 1:
            raise ValueError(f"batch={batch}: at least one prompt at a time")
        if memory is not None and len(requests) > 1:
            raise ValueError(f"a dialogue's memory is of one prompt, and {len(requests)} are asked")
        positions = self.target.shape().max_positions
        for request in requests:
            check(request, positions, self.target.vocab)
        nodes = self.policy.nodes if self.policy is not None else 0
        slots = min(batch, max(1, len(requests)))
        rows = nodes + 1 + max((len(r.prompt) + max(0, r.budget) for r in requests), default=1)
        if memory is None or memory.cache is None:
            self.cache = self.target.new_slots(slots, rows)
        else:
            self.cache = memory.cache
            self.cache.ensure(rows)
        self.watch = Stopwatch(self.target.device, self.timed)
        plain, vocab = self.sampling.plain, self.target.vocab
        self.history = None if plain else History(slots, vocab, self.target.device)

    def _come(self, number: int, request: Request, generator: Random) -> Live:
        noise = None
        if self.coupled or self.guesses_coupled:
            noise = Noise(generator.getrandbits(64), self.target.vocab, self.target.device)
        return Live(number, request, generator, noise)

    def _set_taps(self) -> None:
        """Between two rounds another engine may have used the target."""
        taps = () if self.drafter is None else self.drafter.taps
        if self.target.taps != taps:
            self.target.set_taps(taps)

    def _prefill(self, come: list[Live], first: int, memory: Memory | None) -> None:
        """Read prompts of one length into slots from `first` on, and say their first tokens.

        Args:
            memory: for one prompt.
        """
        watch, device = self.watch, self.target.device
        prompts = [list(one.request.prompt) for one in come]
        known, length = 0, len(prompts[0])
        if memory is not None:
            known, come[0].state = memory.known(prompts[0])
        self._set_taps()
        watch.lap()
        began = watch.then
        for slot in range(first, first + len(come)):
            self.cache.crop(slot, known)
        self.cache.focus(first, len(come))
        ids = torch.tensor([prompt[known:] for prompt in prompts], device=device)
        positions = torch.arange(known, length, device=device).expand(len(come), -1)
        visible = torch.arange(length, device=device) <= positions[..., None]
        seen = self.target.forward(ids, positions, visible, self.cache)
        logits = self.target.logits(seen.last[:, -1:])
        if self.history is not None:
            for slot, prompt in enumerate(prompts, start=first):
                self.history.start(slot, prompt)
        tree = Tree.chain(ids[:, -1:])
        self.race = self._race(come, 0)
        scores = self._scores(logits, tree, first)
        news, _ = self._decide(come, Draft(tree, None), scores)
        roots = [new.following for new in news]
        for i, (one, root) in enumerate(zip(come, roots, strict=True)):
            one.begin(root, self.stops)
            if self.keep_gaps:
                self._measure(one, scores[i], [0])
            if self.history is not None:
                self.history.add(first + i, [root])
        if self.drafter is not None:
            following = torch.cat([ids[:, 1:], torch.tensor(roots, device=device)[:, None]], dim=1)
            rows = layout.Rows(ids, following, positions)
            traces = layout.traces([length - known] * len(come), rows, seen)
            self._absorb(self.drafter, come, traces, Clock())
        if memory is not None:
            memory.begin(self.cache, [*prompts[0], roots[0]], come[0].state)
        watch.lap()
        for one in come:
            one.out.clock.prefill += (watch.then - began) / len(come)

    def _release(self, live: list[Live]) -> None:
        """Slots of answers that are over go to the prompts behind them."""
        for slot in reversed(range(len(live))):
            one = live[slot]
            if not one.out.ended:
                continue
            last = len(live) - 1
            if slot != last:
                self.cache.move(last, slot)
                if self.history is not None:
                    self.history.move(last, slot)
                live[slot] = live[last]
            live.pop()

    # ---- a round ----

    def _round(self, live: list[Live]) -> list[int]:
        """One tree per prompt; returns how many tokens each was given."""
        watch, cache = self.watch, self.cache
        watch.lap()
        began = watch.then
        clock = Clock()
        self._set_taps()
        cache.focus(0, len(live))
        self.race = self._race(live, 0 if self.policy is None else self.policy.levels)
        draft = self._draft(live, clock)
        tree, prefix = draft.tree, cache.active
        positions, visible = layout.laid_out(tree, prefix)
        watch.lap()  # choosing the tree and laying it out: nobody's, so it counts as overhead
        seen = self.target.forward(tree.ids, positions, visible, cache)
        logits = self.target.logits(seen.last)
        clock.target += watch.lap()
        scores = self._scores(logits, tree)
        news, choice = self._decide(live, draft, scores)
        counts = [one.take(new, self.stops) for one, new in zip(live, news, strict=True)]
        kept = [new.path[:count] for new, count in zip(news, counts, strict=True)]
        for slot, (one, path) in enumerate(zip(live, kept, strict=True)):
            if self.keep_gaps:
                self._measure(one, scores[slot], path)
            if self.history is not None:
                self.history.add(slot, one.out.ids[-len(path) :])
        clock.verify += watch.lap()
        if self.drafter is None:
            cache.keep(kept)
            clock.commit += watch.lap()
        else:
            rows = _rows(live, kept, tree, choice, positions, prefix)
            cache.keep(kept, rows.paths)
            clock.commit += watch.lap()
            self._absorb(self.drafter, live, layout.traces(counts, rows, seen), clock)
        clock.rounds = watch.then - began  # the same stamps as the parts: they never exceed it
        for one in live:
            one.out.clock.add(clock, 1 / len(live))
        return counts

    def _race(self, live: list[Live], levels: int) -> Race | None:
        """The noise of a round whose guesses are so deep; None where nothing is chosen with any."""
        if not (self.coupled or self.guesses_coupled):
            return None
        noises = [one.noise for one in live if one.noise is not None]
        places = [len(one.out.ids) for one in live]
        return Race(noises, places, levels + 1, self.sampling.temperature)

    def _draft(self, live: list[Live], clock: Clock) -> Draft:
        if self.drafter is None or self.policy is None:
            said = [[one.out.ids[-1]] for one in live]
            return Draft(Tree.chain(torch.tensor(said, device=self.target.device)), None)
        roots = live[0].root if len(live) == 1 else torch.cat([one.root for one in live])
        rooms = [one.room - 1 for one in live]
        # whatever the rooms; a guess from a row of a GPU that is NaN is a bad one, or refused where
        # it is verified, so that nobody waits for every guess
        coins = self._coins(live, look=False) if self.policy.draft in TOSSED else NO_COINS
        if max(rooms) < 1:
            return Draft(Tree.chain(roots[:, None]), None)
        states = [one.state for one in live]
        fresh = [slot for slot, one in enumerate(live) if not one.out.accepted]
        race = self.race if self.guesses_coupled else None
        ask = Ask(self.drafter, states, self.sampling, self.history, self.watch, clock, fresh, race)
        try:
            return self.policy.propose(ask, roots, rooms, self.sampling, coins)
        except NoMass as error:
            raise RunError(f"A round could not be drafted: {error}", BROKEN) from error

    def _coins(self, live: list[Live], look: bool = True) -> GeneratorCoins:
        """Random numbers for drafting, or for verifying: a stream of its own for every prompt.

        However many are used of it, the next stream is the same: what a prompt is told must not
        depend on how deep the batch around it drafts.
        """
        if self.sampling.greedy:
            return NO_COINS
        most = 1 if self.policy is None else self.policy.nodes + 1
        return GeneratorCoins([Random(one.generator.getrandbits(64)) for one in live], most, look)

    def _scores(
        self, logits: Float[Tensor, "B N V"], tree: Tree, slot: int = 0
    ) -> Float[Tensor, "B N V"]:
        """Logits with penalties and bans, each node under its own text; and with noise, where it
        decides at all nodes at once.
        """
        if self.history is not None:
            logits = self.sampling.adjust(logits, self.history.at_nodes(tree, slot))
        if self.race is None or not self.coupled or self._climbs(tree):
            return logits
        return self.race.decided(self.sampling.scores(logits), tree)

    def _decide(
        self, live: list[Live], draft: Draft, scores: Float[Tensor, "B N V"]
    ) -> tuple[list[News], Int[Tensor, "B N"] | None]:
        """What is kept and said; and, where that is a choice, what the target says behind every
        node (None where a rule has drawn).
        """
        try:
            if self.race is not None and self.coupled and self._climbs(draft.tree):
                winners = Winners(self.race)
                return match(draft.tree, scores, self.sampling.scores, None, winners), None
            if self.sampling.greedy or self.coupled:
                choice, lead = self.sampling.favourites(scores)
                return decided(draft.tree, choice, lead), choice
            return self._judge(live, draft, scores), None
        except FloatingPointError:
            message = "The target's logits are not finite (NaN or infinite)."
            raise RunError(message, HINT) from None

    def _climbs(self, tree: Tree) -> bool:
        """A CPU goes up a tree whose rows have noise level by level, as with any draws."""
        return not tree.straight and tree.ids.device.type == "cpu" and not self.keep_gaps

    def _judge(self, live: list[Live], draft: Draft, logits: Float[Tensor, "B N V"]) -> list[News]:
        """What the rule decides, at temperatures above 0."""
        (tree, q_rows), coins = draft, self._coins(live)
        here = self.rule.on_cpu if isinstance(self.rule, Fitted) else None
        try:
            if here is not None and logits.device.type == "cpu":
                return here(tree, logits, self.sampling.rows, q_rows, coins)
            p_rows = self.sampling.rows(logits)
            if q_rows is None and tree.size == 1:  # nothing was drafted, from no row
                q_rows = torch.zeros_like(p_rows)
            return read(tree, self.rule(tree, p_rows, q_rows, coins), logits.amax(2))
        except ValueError as error:
            raise RunError(f"A round could not be verified: {error}", HINT) from error

    def _absorb(
        self, drafter: Drafter, live: list[Live], traces: list[Trace], clock: Clock
    ) -> None:
        """Hand the drafter the rows that were kept, each with the token behind it."""
        for one, trace in zip(live, traces, strict=True):
            one.root = trace.next_ids[0, -1:]
        self.watch.lap()  # handing over is nobody's work
        states = drafter.absorb_all([one.state for one in live], traces)
        for one, state in zip(live, states, strict=True):
            one.state = state
        clock.draft += self.watch.lap()

    def _measure(self, one: Live, scores: Float[Tensor, "N V"], rows: list[int]) -> None:
        """Leads of the target's favourites at some rows."""
        top = scores[rows].float().topk(2, dim=-1).values
        one.out.gaps.extend((top[:, 0] - top[:, 1]).tolist())


def _rows(
    live: list[Live],
    kept: list[list[int]],
    tree: Tree,
    choice: Int[Tensor, "B N"] | None,
    positions: Int[Tensor, "B N"],
    prefix: list[int],
) -> layout.Rows:
    """What a drafter is told of a round's kept rows.

    Where they lie in front, and the target's choice follows each, the device has it all already.
    """
    if choice is not None and in_front(kept):
        return layout.Rows(tree.ids, choice, positions)
    texts = [one.out.ids[-len(path) - 1 :] for one, path in zip(live, kept, strict=True)]
    return layout.send_rows(texts, prefix, kept, positions.device)
