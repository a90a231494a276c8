"""Forward times on this machine: the target over n tokens, the drafter over its steps.

A grid of forwards is timed; `round_costs.py` interpolates the rest. All compared forwards are
interleaved, so that drift affects all alike, and the lower quartile of each counts: other programs
move the median, and a processor that is faster for a moment moves the shortest time.

Token ids and target states are random, since they do not change the time. The forward that runs
before does, through the processor's caches: as in decoding, the target runs before every draft,
the drafter before every verifying forward, and a plain step before a plain step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import torch
from torch import Tensor

from outrider.models.cache.kv_cache import KVCache
from outrider.models.decode.costs.round_costs import ABSORBED_ROWS, Grid, MeasuredTimes, TimeGrid
from outrider.models.decode.round_times import Stopwatch
from outrider.models.drafting.drafter import Drafter, State
from outrider.models.interface import Trace
from outrider.models.target.target import Target

READ_ROWS = 128  # that a drafter absorbs at once, after rounds without it
CHUNK = 512  # tokens of a prompt per forward
LEAST = 5  # repetitions, whatever they take
Run = Callable[[], object]


def measure_forwards(
    target: Target,
    drafter: Drafter,
    name: str,
    tokens: Sequence[int],
    grid: Grid,
    repeats: int,
    advance: Callable[[], object] = lambda: None,
    seconds: float = inf,
) -> MeasuredTimes:
    """Time target and drafter forwards on the grid; both token axes also contain 1.

    Args:
        advance: called after every combination of a batch and a context.
        seconds: see `SyntheticRounds`.
    """
    counts, wide = tuple(sorted({1, *tokens})), tuple(sorted({1, *grid.widths}))
    axes = (grid.depths, grid.batches, grid.contexts)
    levels, prompts, rows = (tuple(sorted(set(axis))) for axis in axes)
    verified: dict[tuple[int, ...], float] = {}
    drafted: dict[tuple[int, ...], float] = {}
    taps, rounds = target.taps, SyntheticRounds(drafter, target, seconds)
    target.set_taps(drafter.taps)  # as in a round
    try:
        for batch, context in product(prompts, rows):
            times = rounds.target_ms(counts, batch, context, repeats)
            verified |= {(n, batch, context): ms for n, ms in times.items()}
            step_times = rounds.draft_ms(wide, levels, batch, context, repeats)
            drafted |= {(*shape, batch, context): ms for shape, ms in step_times.items()}
            advance()
        read = rounds.read_ms(repeats)
    finally:
        target.set_taps(taps)
    last = {"batch": prompts, "context": rows}
    return MeasuredTimes(
        name,
        TimeGrid({"tokens": counts, **last}, verified),
        TimeGrid({"width": wide, "depth": levels, **last}, drafted),
        read=read,
    )


def interleaved_ms(
    runs: Sequence[Run],
    before: Sequence[Run],
    repeats: int,
    device: torch.device,
    seconds: float = inf,
) -> list[list[float]]:
    """Return all times of each function in `runs`; those in `before` are not timed.

    Runs are interleaved after one warm-up of each.

    Args:
        seconds: after which no repetition begins, once there are LEAST.
    """
    samples: list[list[float]] = [[] for _ in runs]
    watch, end = Stopwatch(device), Stopwatch.clock() + seconds
    for done in range(repeats + 1):
        if done > LEAST and Stopwatch.clock() > end:
            break
        for prepare, run, times in zip(before, runs, samples, strict=True):
            prepare()
            watch.lap()
            run()
            times.append(1000 * watch.lap())
    return [times[1:] for times in samples]


def lower_quartile(times: Sequence[float]) -> float:
    """Return the time that a quarter of the others are below; of up to three, the shortest."""
    return sorted(times)[len(times) // 4]


# ---- random inputs ----


@dataclass(frozen=True)
class SyntheticRounds:
    """Forwards on random rows and nodes, in the shapes that the engine passes to a drafter.

    Attributes:
        seconds: of a set of interleaved forwards, see `interleaved_ms`.
    """

    drafter: Drafter
    target: Target
    seconds: float = inf

    def rows(self, start: int, stop: int) -> Trace:
        """Return verified rows start..stop of one prompt, with random states."""
        count, device = stop - start, self.target.device
        hidden, tapped = self.target.shape().hidden, len(self.drafter.taps)
        ids = torch.randint(self.target.vocab_size, (1, count + 1), device=device)
        zeros = torch.zeros_like(ids[:, 1:])
        wide = torch.randn(1, count, (tapped + 1) * hidden, device=device)
        taps, last = wide.to(self.target.dtype).split([tapped * hidden, hidden], dim=-1)
        positions = torch.arange(start, stop, device=device)[None]
        return Trace(ids[:, :-1], ids[:, 1:], zeros.bool(), zeros, positions, taps, last)

    def drafts(self, batch: int, context: int) -> Callable[[int, int], Run]:
        """Return (width, depth) -> a draft of that shape after `context` rows of every prompt."""
        states = [self.drafter.absorb(None, self.rows(0, context)) for _ in range(batch)]
        verified = [self.rows(context, context + ABSORBED_ROWS) for _ in range(batch)]

        def draft(width: int, depth: int) -> Run:
            def run() -> object:
                level_states = self.drafter.absorb_batch(states, verified)
                for level in range(1, depth + 1):
                    level_states = self.step(level_states, level, width)
                return level_states

            return run

        return draft

    def step(self, states: Sequence[State], depth: int, width: int) -> list[State]:
        """Draft one level: from the roots at depth 1, their children at 2, then a child each."""
        tokens = self.drafter.vocab.target_ids.to(self.target.device)
        index = torch.arange(1 if depth == 1 else width, device=tokens.device)
        ids, parents = tokens[index % len(tokens)], index * (depth > 2)
        both = (part.expand(len(states), -1) for part in (ids, parents))
        return self.drafter.step_batch(states, depth, *both)[1]

    def target_ms(
        self, tokens: Sequence[int], batch: int, context: int, repeats: int
    ) -> dict[int, float]:
        """Return milliseconds of one forward, head included, per number of new tokens.

        Half of the tokens are kept afterwards, which takes time where layers are recurrent.

        The drafter drafts before every forward of more than one token.
        """
        target = self.target
        with torch.no_grad():
            cache = _filled_cache(target, batch, context, context + max(tokens))
            cache.undo_rows = max(tokens)
            drafted = self.drafts(batch, 1)(1, 1)

            def forward(count: int) -> Run:
                ids, positions, visible = _new_tokens(target, batch, context, count)

                kept = [range(-(-count // 2))] * batch  # recurrent layers read these twice

                def run() -> object:
                    for slot in range(batch):
                        cache.crop(slot, context)
                    logits = target.logits(target.forward(ids, positions, visible, cache).last)
                    cache.keep_rows(kept)
                    return logits

                return run

            runs = [forward(count) for count in tokens]
            before = [run if n == 1 else drafted for n, run in zip(tokens, runs, strict=True)]
            times = interleaved_ms(runs, before, repeats, target.device, self.seconds)
        return dict(zip(tokens, map(lower_quartile, times), strict=True))

    def draft_ms(
        self, widths: Sequence[int], depths: Sequence[int], batch: int, context: int, repeats: int
    ) -> dict[tuple[int, int], float]:
        """Return milliseconds of absorbing `ABSORBED_ROWS` rows and drafting (width, depth).

        Args:
            widths: nodes per step, from the second step on; the first step expands only the root.
            depths: steps, at most `drafter.max_depth`.
            context: rows absorbed before, at least 1.
        """
        target = self.target
        with torch.no_grad():
            draft = self.drafts(batch, context)

            def verify() -> object:
                return target.logits(target.forward(*_new_tokens(target, batch, 0, 1)).last)

            shapes = list(product(widths, depths))
            runs = [draft(*shape) for shape in shapes]
            before = [verify] * len(runs)
            times = interleaved_ms(runs, before, repeats, target.device, self.seconds)
        return dict(zip(shapes, map(lower_quartile, times), strict=True))

    def read_ms(self, repeats: int) -> float:
        """Return milliseconds per row of absorbing `READ_ROWS` rows of a prompt at once."""
        with torch.no_grad():
            trace = self.rows(0, min(READ_ROWS, self.target.shape().max_positions - 1))

            def read() -> object:
                return self.drafter.absorb(None, trace)

            times = interleaved_ms([read], [lambda: None], repeats, self.target.device)
        return lower_quartile(times[0]) / trace.ids.shape[1]


def _filled_cache(target: Target, batch: int, context: int, capacity: int) -> KVCache:
    """Return a cache with `context` rows of every prompt."""
    cache = target.new_cache(capacity, batch)
    for start in range(0, context, CHUNK):
        new = _new_tokens(target, batch, start, min(CHUNK, context - start))
        target.forward(*new, cache)
    return cache


def _new_tokens(
    target: Target, batch: int, context: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and causal mask of `count` new tokens after `context` cached ones."""
    device = target.device
    ids = torch.randint(target.vocab_size, (batch, count), device=device)
    positions = (context + torch.arange(count, device=device)).expand(batch, -1)
    visible = torch.ones(batch, count, context + count, dtype=torch.bool, device=device)
    return ids, positions, visible.tril(diagonal=context)
