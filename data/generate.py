"""The target writes its own training text: `data=self` and `outrider prepare`.

A fixed number of slots writes at once; a slot whose answer ends takes the next prompt, so no slot
waits for the longest answer. All slots append to one common column of the cache, and each sees
only its own columns. Every answer has its own random numbers, from (seed, prompt), so the text
does not depend on which slots it shared a batch with (up to the rounding of the target's
precision). What the target computed on the way (taps, last states) is kept with the text, which
saves the pass over it that training would begin with.
"""

import hashlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.conf.errors import NoRoom
from outrider.data.traces import Store, Written
from outrider.models.decode.sampling import first_argmax, invert, warp
from outrider.models.kv_cache import RowCache
from outrider.models.target import Target

SHARD = 64  # questions per shard
ALIKE = 512  # prompts among which those of like length are neighbours
TOGETHER = 8  # prompts read in one forward


@dataclass(frozen=True)
class Question:
    """A prompt in tokens, and its number among all prompts."""

    place: int
    key: str
    ids: list[int]


@dataclass(frozen=True)
class Settings:
    """How the answers are written; see `data.generate` in the configuration."""

    batch: int = 64
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    record: bool = True


# called with a question and its answer, or None where there is none to be had; False: enough
Done: TypeAlias = Callable[[Question, Written | None], bool]


@runtime_checkable
class Answering(Protocol):
    """Whoever answers questions: a target in this process (`Writer`), or one on a server."""

    wrote: int  # answer tokens so far

    def run(self, questions: Sequence[Question], done: Done) -> None: ...


@dataclass
class Slot:
    """A row of the batch: an answer being written, or a place for the next one."""

    question: Question = Question(-1, "", [])
    start: int = 0  # first column of the cache that is its own
    uniforms: Float[Tensor, " S"] = field(default_factory=lambda: torch.zeros(1))
    ids: list[int] = field(default_factory=lambda: [0])
    taps: list[Tensor] = field(default_factory=list)
    last: list[Tensor] = field(default_factory=list)
    favourite: list[int] = field(default_factory=list)
    open: bool = False


class ColumnCache(RowCache):
    """A cache whose rows (slots) begin at columns of their own, with room reclaimed in front."""

    first = 0  # no slot needs a column before this one

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key, value, layer_idx)
        return keys[:, :, self.first :], values[:, :, self.first :]

    def past(self) -> Int[Tensor, "B S"]:
        """Without the columns in front of `first`."""
        return self.positions[:, self.first :]

    def place(self, slot: int, prompts: RowCache, row: int, length: int) -> int:
        """Copy one prompt's rows so that they end at the common column; returns the first."""
        start = self.length - length
        for layer in range(prompts.layers_written):
            own = (self._keys[layer], self._values[layer])
            for buffer, rows in zip(own, prompts.rows(layer), strict=True):
                buffer[slot, :, start : self.length] = rows[row, :, :length]
        self.positions[slot, start : self.length] = prompts.positions[row, :length]
        return start

    def open(self, like: RowCache, slots: int, length: int) -> None:
        """Allocate for `slots` rows and put the common column at `length`."""
        for layer in range(like.layers_written):
            keys, values = like.rows(layer)
            self._keys[layer] = self._allocate(keys[:1].expand(slots, -1, -1, -1))
            self._values[layer] = self._allocate(values[:1].expand(slots, -1, -1, -1))
        self.length = length
        self.positions = torch.zeros(slots, length, dtype=torch.long, device=like.positions.device)

    def reclaim(self, first: int) -> None:
        """Move the columns from `first` on to the front."""
        for buffer in (*self._keys.values(), *self._values.values()):
            buffer[:, :, : self.length - first] = buffer[:, :, first : self.length].clone()
        self.positions = self.positions[:, first:]
        self.length, self.first = self.length - first, 0

    def drop(self, slots: Int[Tensor, " R"]) -> None:
        """Keep only these slots."""
        for buffers in (self._keys, self._values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer[slots]
        self.positions = self.positions[slots]


class Writer:
    """Answers questions with a target; `run` hands over every answer as it ends."""

    def __init__(self, target: Target, stop_ids: Sequence[int], settings: Settings) -> None:
        self.target, self.settings = target, settings
        self.stop_ids = set(stop_ids)
        self.slots: list[Slot] = []
        self.read = 0  # prompt tokens read
        self.wrote = 0  # answer tokens written

    @torch.no_grad()
    def run(self, questions: Sequence[Question], done: Done) -> None:
        """Answer all questions, in the order of the list.

        Args:
            done: called with each finished answer; returning False stops the writing.
        """
        if not questions:
            return
        waiting = deque(questions)
        self.longest = max(len(q.ids) for q in questions)
        self.cache = ColumnCache(2 * (self.longest + self.settings.max_new_tokens) + 1)
        self.slots = [Slot() for _ in range(min(self.settings.batch, len(waiting)))]
        while waiting or any(slot.open for slot in self.slots):
            self._fill(waiting)
            if not self._hand_over(done):
                return
            if not waiting:
                self._close_empty()
            if any(slot.open for slot in self.slots):
                self._advance()

    def _fill(self, waiting: deque[Question]) -> None:
        """Give free slots new prompts, several in one forward: few at a time waste the machine."""
        free = [i for i, slot in enumerate(self.slots) if not slot.open]
        if len(free) < min(TOGETHER, len(self.slots), max(1, len(waiting))):
            return
        while free and waiting:
            count = min(TOGETHER, len(free), len(waiting))
            self._admit([waiting.popleft() for _ in range(count)], free[:count])
            free = free[count:]

    def _admit(self, questions: Sequence[Question], slots: Sequence[int]) -> None:
        """Read prompts, padded on the right, and put each into its slot."""
        lengths = [len(q.ids) for q in questions]
        longest, device = max(lengths), self.target.device
        ids = torch.zeros(len(questions), longest, dtype=torch.long, device=device)
        for row, question in enumerate(questions):
            ids[row, : lengths[row]] = torch.tensor(question.ids)
        positions = torch.arange(longest, device=device).expand(len(questions), -1)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        prompts = self.target.new_cache(longest)
        seen = self.target.forward(ids, positions, causal.expand(len(ids), -1, -1), prompts)
        if not self.cache.layers_written:
            self.cache.open(prompts, len(self.slots), self.longest)
        ends = seen.last[torch.arange(len(ids)), torch.tensor(lengths) - 1]
        uniforms = [self._uniforms(question) for question in questions]
        first, favourite = self._choose(ends, torch.stack([u[0] for u in uniforms]))
        for row, (question, slot) in enumerate(zip(questions, slots, strict=True)):
            start = self.cache.place(slot, prompts, row, lengths[row])
            new = Slot(question, start, uniforms[row], [first[row]], open=True)
            noted = [-1] * (lengths[row] - 1) + [favourite[row]]
            self._record(new, seen.taps[row, : lengths[row]], seen.last[row, : lengths[row]], noted)
            self.slots[slot] = new
        self.read += sum(lengths)
        self.wrote += len(first)

    def _hand_over(self, done: Done) -> bool:
        """Finished answers leave their slots; False when no more are wanted."""
        for slot in self.slots:
            if slot.open and self._over(slot):
                slot.open = False
                if not done(slot.question, _written(slot)):
                    return False
        return True

    def _uniforms(self, question: Question) -> Float[Tensor, " S"]:
        """Random numbers of one answer, from the seed and the prompt alone."""
        name = f"{self.settings.seed} {question.key}".encode()
        seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(self.settings.max_new_tokens, generator=generator, dtype=torch.float64)

    def _record(self, slot: Slot, taps: Tensor, last: Tensor, favourite: list[int]) -> None:
        if self.settings.record:
            slot.taps.append(taps.clone())
            slot.last.append(last.clone())
            slot.favourite.extend(favourite)

    def _choose(
        self, last: Float[Tensor, "B H"], uniforms: Float[Tensor, " B"]
    ) -> tuple[list[int], list[int]]:
        """Per row: the token drawn, and the most probable one."""
        logits = self.target.logits(last)
        favourite = first_argmax(logits)
        if self.settings.temperature == 0:
            return favourite.tolist(), favourite.tolist()
        probs = warp(
            logits, temperature=self.settings.temperature, top_k=0, top_p=self.settings.top_p
        )
        return invert(probs, uniforms.to(probs.device)).tolist(), favourite.tolist()

    def _advance(self) -> None:
        """One token for every slot; a free slot sees only its own meaningless column."""
        cache = self.cache
        for slot in self.slots:
            if not slot.open:
                slot.start = cache.length
        cache.first = min(slot.start for slot in self.slots)
        if cache.length == cache.capacity:
            shift = min(cache.first, cache.length - self.longest)  # room for the longest prompt
            cache.reclaim(shift)
            for slot in self.slots:
                slot.start -= shift
        ids = torch.tensor([[s.ids[-1]] for s in self.slots], device=self.target.device)
        lengths = [len(s.question.ids) + len(s.ids) - 1 for s in self.slots]
        positions = torch.tensor(lengths, device=ids.device)[:, None]
        starts = torch.tensor([s.start for s in self.slots], device=ids.device)
        column = torch.arange(cache.first, cache.length + 1, device=ids.device)
        seen = self.target.forward(ids, positions, column >= starts[:, None, None], cache)
        uniforms = torch.stack(
            [s.uniforms[min(len(s.ids), len(s.uniforms) - 1)] for s in self.slots]
        )
        chosen, favourite = self._choose(seen.last[:, 0], uniforms)
        for i, (slot, token) in enumerate(zip(self.slots, chosen, strict=True)):
            if slot.open:
                self._record(slot, seen.taps[i], seen.last[i], [favourite[i]])
                slot.ids.append(token)
                self.wrote += 1

    def _over(self, slot: Slot) -> bool:
        return slot.ids[-1] in self.stop_ids or len(slot.ids) >= self.settings.max_new_tokens

    def _close_empty(self) -> None:
        keep = [i for i, slot in enumerate(self.slots) if slot.open]
        if len(keep) < len(self.slots):
            self.cache.drop(torch.tensor(keep, dtype=torch.long, device=self.target.device))
            self.slots = [self.slots[i] for i in keep]


def _alike(questions: Sequence[Question]) -> list[Question]:
    """Neighbours of like length, else in order.

    Reading some together then pads little, and no long prompt widens the common window for slots
    that hold short ones.
    """
    blocks = [questions[i : i + ALIKE] for i in range(0, len(questions), ALIKE)]
    return [q for block in blocks for q in sorted(block, key=lambda q: len(q.ids))]


def _written(slot: Slot) -> Written:
    question = slot.question
    taps, last = (torch.cat(part).cpu() if part else None for part in (slot.taps, slot.last))
    noted = torch.tensor(slot.favourite, dtype=torch.int32) if slot.favourite else None
    ids, prompt = question.ids + slot.ids, len(question.ids)
    return Written(question.place, question.key, ids, prompt, taps, last, noted)


def write_answers(
    writer: Answering,
    questions: Sequence[Question],
    store: Store,
    *,
    minutes: float | None = None,
    tick: Callable[[int, int, float], None] = lambda done, tokens, rate: None,
) -> None:
    """Answer what the store does not hold yet.

    `SHARD` questions that are asked one after the other make a shard, written when the last of
    their answers is there; later ones are asked meanwhile. What a shard holds is thus known
    before anything is written, and a call that goes on after a kill makes the shards that the
    killed one would have made. Whatever else ends the writing, an error or Ctrl-C too, what is
    finished by then is kept.

    Args:
        minutes: stop when the store holds so many minutes of writing, those of earlier, killed or
            shorter calls included.
        tick: called after each answer with (answers, answer tokens, answer tokens per second).
    """
    before, started, count = store.seconds, time.monotonic(), 0
    if minutes is not None and before >= 60 * minutes:
        return
    shard_of, open_in = _shards(questions, {answer.place for answer in store.answers()})
    held: dict[int, list[Written]] = defaultdict(list)

    def keep(shard: int) -> None:
        store.add(held[shard], before + time.monotonic() - started - store.seconds)
        del held[shard]

    def done(question: Question, answer: Written | None) -> bool:
        nonlocal count
        shard = shard_of[question.place]
        open_in[shard] -= 1
        elapsed = time.monotonic() - started
        if answer is not None:
            held[shard].append(answer)
            count += 1
            tick(count, writer.wrote, writer.wrote / elapsed)
        if not open_in[shard] and shard in held:
            keep(shard)
        return minutes is None or before + elapsed < 60 * minutes

    try:
        writer.run([q for q in _alike(questions) if q.place in shard_of], done)
    except NoRoom:
        held.clear()  # for smaller files there may be room, but they would not be whole shards
        raise
    finally:
        for shard in list(held):
            keep(shard)


def _shards(questions: Sequence[Question], known: set[int]) -> tuple[dict[int, int], Counter[int]]:
    """For the place of every question that is not known its shard; how many each of them has."""
    shard_of = {
        q.place: i // SHARD for i, q in enumerate(_alike(questions)) if q.place not in known
    }
    return shard_of, Counter(shard_of.values())
