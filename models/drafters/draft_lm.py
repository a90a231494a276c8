"""A small language model of its own as the drafter, distilled from the target.

Source: Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318) draft with
one; DistillSpec (arXiv:2310.08461) trains it on the target's distributions, over given text, the
target's text (`data=self`) or the draft model's own (`on_policy`).

It sees nothing of the target, only tokens. Row t knows x_0..x_{t+1}, so the state after x_{t+1} is
its depth-1 guess and the state after x_{t+d} the one of depth d: a single pass over the text, moved
to the left, holds every depth.

    row t        0   1   2   3   4
    pass         h0  h1  h2  h3  h4     h_i: state after x_i, says x_{i+1}
    depth 1      h1  h2  h3  h4  .
    depth 2      h2  h3  h4  .   .

Differs: all depths are one function, so only the first is trained (`depth_weights: first`) and the
others are measured; the vocabulary may be reduced; text of the model's own replaces one answer per
document and is cut at the document's old length.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.data.batches import Batch
from outrider.models.causal_lm import (
    Head,
    fresh,
    plain,
    pretrained,
    reader,
    refuse_code,
    untrained,
)
from outrider.models.drafter import BatchDrafter, Guess, Recipe, Trace
from outrider.models.kv_cache import RowCache
from outrider.models.self_feeding import descent, of_parents
from outrider.models.target import Target, packed
from outrider.models.vocab import DraftVocab


@dataclass(frozen=True)
class Config(Recipe):
    """Settings of a draft model; conf/drafter/draft_lm.yaml says what each means."""

    name: str = "draft_lm"
    depth_weights: str = "first"
    path: str | None = None
    layers: int = 2
    hidden: int | None = None
    heads: int | None = None
    body: Any = None
    on_policy: float = 0.0
    write_temperature: float = 1.0
    write_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "hidden", "heads", "write_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} = {value}: needs at least one")
        if self.hidden is not None and self.hidden % (2 * (self.heads or 1)):
            raise ValueError(f"hidden = {self.hidden}: rotary pairs need a multiple of 2 * heads")
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"on_policy = {self.on_policy}: a share of the batches is in 0..1")
        if not self.write_temperature > 0:
            raise ValueError(f"write_temperature = {self.write_temperature}: must be above 0")
        if self.body is not None:
            refuse_code(self.body)
            if not isinstance(self.body, dict) or not isinstance(self.body.get("model_type"), str):
                raise ValueError(f"body = {self.body}: needs a model_type")

    def refuses(self, launch: str) -> str:
        """ZeRO-3's ranks gather weights in step, and no two write texts of one length."""
        waits = launch == "zero3" and self.on_policy > 0
        return "With drafter.on_policy its ranks would wait for each other for ever." * waits


Rows = tuple[tuple[Float[Tensor, "1 A L C"], Float[Tensor, "1 A L C"]], ...]  # of each layer


@dataclass(frozen=True)
class Memory:
    """Keys and values of the text read so far, then of the branch; reading on makes a new one."""

    rows: Rows
    positions: Int[Tensor, "1 L"]
    hidden: Float[Tensor, "N D"]  # final states of the newest tokens
    seen: Bool[Tensor, "N M"]  # which nodes of the branch each newest token descends from


class Place(NamedTuple):
    """Where one document's first answer lies: row of the batch, and columns."""

    row: int
    start: int  # of the document
    first: int  # of the answer
    stop: int  # of the document


class DraftLm(BatchDrafter):
    """The model's body and its output embedding; `Target` does the reading, masks and all."""

    reads = "ids"

    def __init__(
        self, cfg: Config, target: Target, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.vocab, self.taps, self.depths = vocab, taps, cfg.depths
        self._recomputes = False
        self.read_from = cfg.path if cfg.body is None else None
        if self.read_from is None:
            self.lm = reader(
                untrained(cfg.body or fresh(target, cfg.layers, cfg.hidden, cfg.heads)),
                "drafter.body",
                target,
            )
        else:
            self.lm = reader(pretrained(self.read_from), "drafter.path", target)
            self.lm.check()
        self.cfg = replace(cfg, body=plain(self.lm.config))
        self.body = self.lm.body.requires_grad_(True)
        self.lm_head = Head(self.lm).requires_grad_(True)
        self.train()

    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        return "random weights" if self.read_from is None else f"the weights of {self.read_from}"

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        out: Tensor = self.lm_head(hidden, self.vocab)
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> "DraftLm":
        """Rotary frequencies stay float32 whatever the weights become: they count positions."""
        turning = [
            (module, name, value)
            for module in self.body.modules()
            for name, value in module.named_buffers(recurse=False)
            if name.endswith("inv_freq")
        ]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, value in turning:
            setattr(module, name, value.to(getattr(module, name).device))
        return self

    # ---- training ----

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        if self.recompute and not self._recomputes:
            self._recompute_layers()
        read = packed(trace.document)
        last = self.lm.forward(trace.ids, trace.positions, read, grad=torch.is_grad_enabled()).last
        for depth in range(1, self.depths + 1):
            moved = torch.zeros_like(last)
            moved[:, :-depth] = last[:, depth:]
            yield Guess(depth, moved)

    def _recompute_layers(self) -> None:
        """Layer by layer, in transformers' own way, whose name is changing."""
        model = self.lm.model
        new = getattr(model, "activation_checkpointing_enable", None)
        (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
        self._recomputes = True

    # ---- decoding ----

    def absorb_all(self, states: Sequence[Memory | None], traces: Sequence[Trace]) -> list[Memory]:
        """Known prompts read on together; new ones, of other lengths, read together too."""
        pairs = list(zip(states, traces, strict=True))
        old = [(state, trace) for state, trace in pairs if state is not None]
        longer = iter(
            self._read_on(
                [state for state, _ in old],
                [trace.next_ids[0] for _, trace in old],
                [trace.positions[0] + 1 for _, trace in old],
            )
        )
        begun = iter(self._begun([trace for state, trace in pairs if state is None]))
        return [next(begun if state is None else longer) for state in states]

    def _begun(self, traces: Sequence[Trace]) -> list[Memory]:
        """The first rows, and x_0, which is nobody's next token."""
        ids = [torch.cat([t.ids[0, :1], t.next_ids[0]]) for t in traces]
        positions = [torch.cat([t.positions[0, :1], t.positions[0] + 1]) for t in traces]
        return self._read_on([None] * len(traces), ids, positions)

    def _read_on(
        self,
        states: Sequence[Memory | None],
        ids: Sequence[Int[Tensor, " _"]],
        positions: Sequence[Int[Tensor, " _"]],
    ) -> list[Memory]:
        """Memories with decided tokens behind them."""
        if not states:
            return []
        count = max(len(tokens) for tokens in ids)
        causal = torch.ones(1, count, count, dtype=torch.bool, device=ids[0].device).tril()
        tokens, at = (pad_sequence(list(rows), batch_first=True) for rows in (ids, positions))
        memories = self._read(states, tokens, at, [len(rows) for rows in ids], causal)
        ends = zip(memories, ids, strict=True)
        return [replace(m, hidden=m.hidden[len(t) - 1 : len(t)], seen=m.seen[:1]) for m, t in ends]

    def step_all(
        self,
        states: Sequence[Memory],
        depth: int,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> tuple[Float[Tensor, "B N Vd"], list[Memory]]:
        if depth == 1:
            return self.head(torch.stack([state.hidden for state in states])), list(states)
        lasting = [state.positions.shape[1] - state.seen.shape[1] for state in states]
        newest = [state.positions[0, n - 1] for state, n in zip(states, lasting, strict=True)]
        last = self.lm.shape().max_positions - 1  # guesses that nobody wants may lie beyond it
        at = (torch.stack(newest)[:, None] + (depth - 1)).clamp(max=last).expand_as(ids)
        seen = descent(of_parents([state.seen for state in states], parents))
        memories = self._read(states, ids, at, [ids.shape[1]] * len(ids), seen)
        memories = [replace(m, seen=own) for m, own in zip(memories, seen.unbind(), strict=True)]
        return self.head(torch.stack([memory.hidden for memory in memories])), memories

    def _read(
        self,
        states: Sequence[Memory | None],
        ids: Int[Tensor, "B W"],
        positions: Int[Tensor, "B W"],
        counts: Sequence[int],
        seen: Bool[Tensor, "_ W M"],
    ) -> list[Memory]:
        """Run new tokens behind every memory, on a copy of all.

        What was read ends in one column and what is new begins behind it, so that the rows of a
        prompt stay together; the rest is padding. With memories of two and four rows:

            . . r r n n n
            r r r r n n .

        Args:
            counts: how many of the W tokens are a prompt's; the rest is padding.
            seen: which of the last M columns each new token attends to; of the others, all that
                are not padding.
        """
        width = ids.shape[1]
        cache = self._copied([state for state in states if state], width)
        blank = [cache.length - (state.positions.shape[1] if state else 0) for state in states]
        seen = F.pad(seen, (cache.capacity - seen.shape[2], 0), value=True)
        if any(blank):
            columns = torch.arange(cache.capacity, device=seen.device)
            seen = seen & (columns >= columns.new_tensor(blank)[:, None])[:, None]
        hidden = self.lm.forward(ids, positions, seen.expand(len(ids), -1, -1), cache).last
        past = cache.past()
        places = zip(blank, [cache.length - width + n for n in counts], strict=True)
        return [
            Memory(_rows(cache, i, *place), past[i : i + 1, slice(*place)], own, seen[0, :, :0])
            for i, (place, own) in enumerate(zip(places, hidden, strict=True))
        ]

    def _copied(self, memories: Sequence[Memory], room: int) -> RowCache:
        """A cache with their rows, zeros in front of the shorter ones, and room behind them."""
        longest = max((memory.positions.shape[1] for memory in memories), default=0)
        cache = self.lm.new_cache(longest + room)
        for layer in range(self.lm.depth if memories else 0):
            keys, values = zip(*(memory.rows[layer] for memory in memories), strict=True)
            cache.update(_flush(keys, longest), _flush(values, longest), layer)
        if memories:
            held = [memory.positions[:, None, :, None] for memory in memories]
            cache.commit(_flush(held, longest)[:, 0, :, 0])
        return cache

    def passes(self, depths: int) -> int:
        return 1

    def kept(self, depths: int) -> float:
        shape = self.lm.shape()
        heads = (shape.heads + shape.kv_heads) * shape.head_dim
        layer = 3.4 * (shape.hidden + heads) + 4.0 * shape.intermediate
        return shape.layers * layer + (2 + depths) * shape.hidden

    # ---- text of its own ----

    def rewrite(self, batch: Batch) -> Batch | None:
        """Every first answer in the model's own words, at temperature `write_temperature`.

        An answer ends with an end token of the model's configuration, after `write_tokens`, or
        where its document ended; the rest of the document becomes padding.
        """
        if self.cfg.on_policy == 0:
            return None
        places = _answers(batch)
        if not places or float(torch.rand(())) >= self.cfg.on_policy:
            return None
        ids, answer, document = (c.clone() for c in (batch.ids, batch.answer, batch.document))
        for (row, _, first, stop), said in zip(places, self._write(batch, places), strict=True):
            end = first + len(said)
            ids[row, first:stop] = F.pad(said.to(ids.device), (0, stop - end))
            answer[row, first:end], answer[row, end:stop] = True, False
            document[row, end:stop] = -1
        return batch._replace(ids=ids, answer=answer, document=document)

    def _write(self, batch: Batch, places: list[Place]) -> list[Int[Tensor, " _"]]:
        """Sampled answers to the prompts in front of these places."""
        rooms = [min(place.stop - place.first, self.cfg.write_tokens) for place in places]
        prompts = [batch.ids[p.row, p.start : p.first].to(self.lm.device) for p in places]
        training, stops = self.training, self._stops()
        self.eval()  # no dropout
        said = self._sampled(prompts, max(rooms), stops)
        self.train(training)
        return [_ended(row[:room], stops) for row, room in zip(said, rooms, strict=True)]

    @torch.no_grad()
    def _sampled(
        self, prompts: list[Int[Tensor, " _"]], count: int, stops: Int[Tensor, " E"]
    ) -> Int[Tensor, "N m"]:
        """`count` tokens behind each prompt, or fewer once all have ended."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.stack([F.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
        blank = torch.tensor([longest - len(prompt) for prompt in prompts], device=ids.device)
        columns = torch.arange(longest, device=ids.device)
        real, positions = columns >= blank[:, None], (columns - blank[:, None]).clamp(min=0)
        causal = columns <= columns[:, None]
        seen = (real[:, None, :] & causal) | torch.eye(longest, device=ids.device).bool()
        cache, said = self.lm.new_cache(longest + count), ids[:, :0]
        while True:
            last = self.lm.forward(ids, positions, seen, cache).last[:, -1]
            ids, positions = self._drawn(last), positions[:, -1:] + 1
            said, real = torch.cat([said, ids], dim=1), F.pad(real, (0, 1), value=True)
            over = torch.isin(said, stops).any(dim=1)
            if said.shape[1] == count or bool(over.all()):
                return said
            seen = real[:, None, :]

    def _drawn(self, hidden: Float[Tensor, "N D"]) -> Int[Tensor, "N 1"]:
        chances = (self.head(hidden).float() / self.cfg.write_temperature).softmax(-1)
        return self.vocab.to_target(torch.multinomial(chances, 1))

    def _stops(self) -> Int[Tensor, " E"]:
        """End tokens that the model's own configuration names."""
        found = getattr(self.lm.text, "eos_token_id", None)
        found = [] if found is None else found if isinstance(found, list) else [found]
        return torch.tensor(found, dtype=torch.long, device=self.lm.device)


# ---- memories side by side -----------------------------------------------------------------------


def _flush(
    rows: Sequence[Shaped[Tensor, "1 A _ C"]], length: int
) -> Shaped[Tensor, "B A {length} C"]:
    """One below the other, all of them ending in the last column."""
    if len(rows) == 1:
        return rows[0]
    return torch.cat([F.pad(part, (0, 0, length - part.shape[2], 0)) for part in rows])


def _rows(cache: RowCache, prompt: int, start: int, stop: int) -> Rows:
    """Keys and values of one prompt: views, which keep the whole cache alive."""
    layers = [cache.rows(layer) for layer in range(len(cache))]
    own = (slice(prompt, prompt + 1), slice(None), slice(start, stop))
    return tuple((key[own], value[own]) for key, value in layers)


# ---- where answers lie ---------------------------------------------------------------------------


def _answers(batch: Batch) -> list[Place]:
    """The first answer of every document that has one; a token at least stays in front of it."""
    places = []
    rows = zip(batch.document.cpu(), batch.answer.tolist(), strict=True)
    for row, (document, answer) in enumerate(rows):
        for name in document.unique().tolist():
            columns = torch.nonzero(document == name).flatten().tolist()
            start, stop = columns[0], columns[-1] + 1
            first = next((i for i in columns if answer[i]), stop)
            first = max(first, start + 1)
            if name >= 0 and first < stop:
                places.append(Place(row, start, first, stop))
    return places


def _ended(said: Int[Tensor, " m"], stops: Int[Tensor, " E"]) -> Int[Tensor, " n"]:
    """Up to the first end token, itself included."""
    over = torch.nonzero(torch.isin(said, stops)).flatten()
    return said[: int(over[0]) + 1] if len(over) else said
