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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.data.loader import Batch
from outrider.models.base import Drafter, Guess, Recipe, Trace
from outrider.models.small_lm import (
    Head,
    fresh,
    plain,
    pretrained,
    reader,
    refuse_code,
    untrained,
)
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


@dataclass(frozen=True)
class Memory:
    """Keys and values of the text read so far, then of the branch; reading on makes a new one."""

    rows: tuple[tuple[Float[Tensor, "1 A L C"], Float[Tensor, "1 A L C"]], ...]  # of each layer
    positions: Int[Tensor, "1 L"]
    hidden: Float[Tensor, "N D"]  # final states of the newest tokens
    seen: Bool[Tensor, "N M"]  # which nodes of the branch each newest token descends from


class Place(NamedTuple):
    """Where one document's first answer lies: row of the batch, and columns."""

    row: int
    start: int  # of the document
    first: int  # of the answer
    stop: int  # of the document


class DraftLm(Drafter):
    """The model's body and its output embedding; `Target` does the reading, masks and all."""

    def __init__(
        self, cfg: Config, target: Target, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.vocab, self.taps, self.depths = vocab, taps, cfg.depths
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
        read = packed(trace.document)
        last = self.lm.forward(trace.ids, trace.positions, read, grad=torch.is_grad_enabled()).last
        for depth in range(1, self.depths + 1):
            moved = torch.zeros_like(last)
            moved[:, :-depth] = last[:, depth:]
            yield Guess(depth, moved)

    # ---- decoding ----

    def absorb(self, state: Memory | None, trace: Trace) -> Memory:
        ids, positions, past = trace.next_ids, trace.positions + 1, 0
        if state is None:  # x_0 is nobody's next token
            ids = torch.cat([trace.ids[:, :1], ids], dim=1)
            positions = torch.cat([trace.positions[:, :1], positions], dim=1)
        else:
            past = state.positions.shape[1]
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        memory = self._read(state, ids, positions, F.pad(causal, (past, 0), value=True))
        return replace(memory, hidden=memory.hidden[-1:], seen=causal[:1, :0])

    def step(
        self, state: Memory, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], Memory]:
        if depth == 1:
            return self.head(state.hidden), state
        lasting = state.positions.shape[1] - state.seen.shape[1]
        newest = state.positions[:, lasting - 1 : lasting]
        myself = torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        seen = torch.cat([state.seen[parents], myself], dim=1)
        positions = (newest + depth - 1).expand(1, len(ids))
        memory = self._read(state, ids[None], positions, F.pad(seen, (lasting, 0), value=True))
        memory = replace(memory, seen=seen)
        return self.head(memory.hidden), memory

    def _read(
        self,
        state: Memory | None,
        ids: Int[Tensor, "1 N"],
        positions: Int[Tensor, "1 N"],
        seen: Bool[Tensor, "N S"],
    ) -> Memory:
        """Run new tokens behind a memory, on a copy of it."""
        held = positions[:, :0] if state is None else state.positions
        cache = self.lm.new_cache(seen.shape[1])
        for layer, (key, value) in enumerate(() if state is None else state.rows):
            cache.update(key, value, layer)
        cache.commit(held)
        hidden = self.lm.forward(ids, positions, seen[None], cache).last[0]
        rows = tuple(cache.rows(layer) for layer in range(self.lm.depth))
        return Memory(rows, cache.past(), hidden, seen[:, :0])

    def passes(self, depths: int) -> int:
        return 1

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
