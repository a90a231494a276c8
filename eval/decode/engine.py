"""The built-in decoder: draft, verify, commit, until the end token or the budget.

It knows four nouns: Target, Drafter, Policy, verify. One prompt at a time. The invariant between
rounds: the target's cache holds every committed token but the newest, the root. A round feeds the
root and the drafted tree in one forward, keeps the rows of the accepted path and emits one token
more than was accepted. Without a drafter the tree is the root alone: that is the baseline, the
same engine and the same cache.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.eval.decode import verify as rules
from outrider.eval.decode.policy import Draft, Policy, Sampling
from outrider.eval.decode.sampling import Coins, GeneratorCoins, first_argmax
from outrider.eval.decode.tree import Tree
from outrider.models.base import Drafter, State, Trace
from outrider.models.cache import RowCache
from outrider.models.target import Seen, Target


@dataclass
class Clock:
    """Seconds spent in the parts of the rounds; the whole is measured on its own."""

    prefill: float = 0.0
    draft: float = 0.0  # the drafter: its steps, and taking in verified rows
    target: float = 0.0  # the target's forward and its head
    verify: float = 0.0
    commit: float = 0.0  # thinning the cache, bookkeeping
    rounds: float = 0.0  # all rounds, first to last; what no part claims is overhead too


@dataclass
class Output:
    """One answer.

    Attributes:
        ids: new tokens, the end token included if it came.
        accepted: per round, how many drafted tokens were accepted and emitted.
        drafted: per round, how deep the draft went.
        gaps: per new token, the target's lead of the first over the second choice (logits);
            empty unless asked for.
    """

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    @property
    def rounds(self) -> int:
        """Target forwards behind the prefill."""
        return len(self.accepted)


class Decoder:
    """Decodes prompts one at a time, with a drafter or, as the baseline, without one."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy | None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 - an immutable value
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        keep_gaps: bool = False,
    ) -> None:
        """
        Args:
            drafter: None decodes plainly, one token per forward; policy is None with it.
            stop_ids: tokens that end an answer.
            keep_gaps: measure the lead of the target's favourite at every token.
        """
        self.target, self.drafter, self.policy = target, drafter, policy
        self.sampling, self.stop_ids, self.keep_gaps = sampling, set(stop_ids), keep_gaps
        target.set_taps(drafter.taps if drafter is not None else ())
        self.generator = torch.Generator().manual_seed(seed)
        self.coins: Coins = GeneratorCoins(self.generator)

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Output:
        """Decode one answer.

        Args:
            prompt: at least one token.
            max_new_tokens: exact budget; the answer is shorter only if an end token comes.
        """
        self.target.set_taps(self.drafter.taps if self.drafter is not None else ())
        out = Output()
        watch = self.watch = Stopwatch(self.target.device)
        if max_new_tokens < 1:
            return out
        self.cache, state, root = self._prefill(list(prompt), max_new_tokens, out)
        out.ids.append(root)
        watch.lap()
        out.clock = Clock(prefill=watch.then - watch.start)  # its parts are not a round's
        start = watch.then
        while len(out.ids) < max_new_tokens and out.ids[-1] not in self.stop_ids:
            state = self._round(out, state, max_new_tokens - len(out.ids))
        watch.lap()
        out.clock.rounds = watch.then - start  # the same stamps as the parts: they never exceed it
        return out

    def _prefill(
        self, prompt: list[int], budget: int, out: Output
    ) -> tuple[RowCache, State | None, int]:
        nodes = self.policy.nodes if self.policy is not None else 0
        length = len(prompt)
        cache = self.target.new_cache(length + budget + nodes + 1)
        ids = torch.tensor([prompt], device=self.target.device)
        positions = torch.arange(length, device=ids.device)[None]
        causal = torch.ones(1, length, length, dtype=torch.bool, device=ids.device).tril()
        seen = self.target.forward(ids, positions, causal, cache)
        logits = self.target.logits(seen.last[0, -1:])
        self._measure(out, logits, [0])
        root = self._accept(Draft(Tree.chain(ids[0, -1:]), None), logits).next_id
        state = self._absorb(None, ids[0], [*prompt[1:], root], positions[0], seen, out.clock)
        return cache, state, root

    def _round(self, out: Output, state: State | None, room: int) -> State | None:
        cache, watch, prefix = self.cache, self.watch, self.cache.length
        draft = self._draft(state, out.ids[-1], room, out.clock)
        tree = draft.tree
        positions = (tree.depths + prefix)[None]
        visible = _visible(tree, prefix)
        watch.lap()  # choosing the tree and laying it out: nobody's, so it counts as overhead
        seen = self.target.forward(tree.ids[None], positions, visible, cache)
        logits = self.target.logits(seen.last[0])
        out.clock.target += watch.lap()
        accepted = self._accept(draft, logits)
        path = accepted.path.tolist()
        emitted = [tree.tokens[node] for node in path[1:]] + [accepted.next_id]
        emitted = self._cut(emitted, room)
        path = path[: len(emitted)]
        self._measure(out, logits, path)
        out.clock.verify += watch.lap()
        rows = torch.tensor(path, device=tree.ids.device)
        cache.keep(prefix, rows + prefix)
        kept = Seen(seen.taps[:, rows], seen.last[:, rows])
        out.ids.extend(emitted)
        # of a round that was cut, all that was emitted had been drafted or was the next token
        out.accepted.append(min(len(emitted), len(accepted.path) - 1))
        out.drafted.append(int(tree.depths[-1]) if len(tree) else 0)
        out.clock.commit += watch.lap()
        return self._absorb(state, tree.ids[rows], emitted, positions[0, rows], kept, out.clock)

    def _draft(self, state: State | None, root: int, room: int, clock: Clock) -> Draft:
        if self.drafter is None or self.policy is None or room < 2:
            return Draft(Tree.chain(torch.tensor([root], device=self.target.device)), None)
        drafter = Clocked(self.drafter, self.watch, clock)
        return self.policy.propose(drafter, state, root, room - 1, self.sampling, self.generator)

    def _accept(self, draft: Draft, logits: Float[Tensor, "N V"]) -> rules.Accepted:
        if self.sampling.temperature == 0:
            return rules.greedy(draft.tree, first_argmax(logits))
        return rules.verify(draft.tree, self.sampling.rows(logits), draft.q_rows, self.coins)

    def _absorb(
        self,
        state: State | None,
        ids: Int[Tensor, " T"],
        following: list[int],
        positions: Int[Tensor, " T"],
        seen: Seen,
        clock: Clock,
    ) -> State | None:
        if self.drafter is None:
            return None
        nothing = torch.zeros_like(ids)[None]
        trace = Trace(
            ids=ids[None],
            next_ids=torch.tensor([following], device=ids.device),
            answer=nothing.bool(),
            document=nothing,
            positions=positions[None],
            taps=seen.taps,
            last=seen.last,
        )
        self.watch.lap()
        state = self.drafter.absorb(state, trace)
        clock.draft += self.watch.lap()
        return state

    def _cut(self, emitted: list[int], room: int) -> list[int]:
        """Up to the first end token and the budget (rule R8: cut before the caches are)."""
        for i, token in enumerate(emitted[:room]):
            if token in self.stop_ids:
                return emitted[: i + 1]
        return emitted[:room]

    def _measure(self, out: Output, logits: Float[Tensor, "N V"], rows: list[int]) -> None:
        if self.keep_gaps:
            top = logits[rows].float().topk(2, dim=-1).values
            out.gaps.extend((top[:, 0] - top[:, 1]).tolist())


class Stopwatch:
    """Lap times; waits for the device, so that work is booked where it was ordered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = self.then = self._now()

    def lap(self) -> float:
        now = self._now()
        seconds, self.then = now - self.then, now
        return seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Clocked:
    """A drafter whose steps are booked as drafting; what the policy does between them is not."""

    def __init__(self, drafter: Drafter, watch: Stopwatch, clock: Clock) -> None:
        self.drafter, self.watch, self.clock = drafter, watch, clock
        self.vocab, self.reach = drafter.vocab, drafter.reach

    def step(
        self, state: State, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], State]:
        self.watch.lap()
        out = self.drafter.step(state, depth, ids, parents)
        self.clock.draft += self.watch.lap()
        return out


def _visible(tree: Tree, prefix: int) -> Tensor:
    """[1, N, prefix + N]: the whole prefix, and of the tree each node's ancestors and itself."""
    return torch.nn.functional.pad(tree.mask(), (prefix, 0), value=True)[None]
