"""Loss and metrics of one forward, in chunks of target rows, so that no [B,T,V] tensor exists.

The guess at depth d, row t, is compared with the target's row t+d (the index rule). A chunk holds
*target* rows u: the teacher's distribution there is computed once, and guesses of all depths at the
rows u-1, u-2, ... are compared with it, as far as they have a guess and are supervised. Three paths
give the same numbers:

    fused       the gradient of head and loss is computed within the chunk, while its logits exist
                (as fused linear cross-entropy kernels do), and autograd sees one function
    stored      chunks store the gradient of their logits until the backward pass, for weights that
                are gathered only while their own module runs (ZeRO-3); equally many on every rank
    plain       all rows at once through autograd: the reference

Legend: R flattened rows of the batch (B * T), U target rows that a guess is compared with, N
guesses of a chunk, D depths.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.argmax import first_argmax
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Guess, TopKTeacher, Trace
from outrider.train.acceptance_forecast import expected_rounds
from outrider.train.losses import LossInputs, Term
from outrider.train.metric_sums import MetricSums
from outrider.train.teacher import Teacher, TeacherRows, max_logits

# called with a chunk's loss, the states of its guesses and their places among those of their depth,
# while its graph exists
OnChunk = Callable[[Tensor, list[Tensor], list[Tensor]], None]


class Chunk(NamedTuple):
    """Target rows, and the guesses that are compared with them.

    Attributes:
        rows: the target rows, as indices of the flattened rows.
        guesses: per depth, which of its guesses are compared, as indices of its states.
        which: of every such guess, depth by depth, the index of its target row in `rows`.
    """

    rows: Int[Tensor, " rows"]
    guesses: list[Int[Tensor, " _"]]
    which: Int[Tensor, " N"]

    @property
    def level(self) -> Int[Tensor, " N"]:
        """The index of every guess's depth."""
        counts = torch.tensor([len(guesses) for guesses in self.guesses], device=self.rows.device)
        return torch.arange(len(counts), device=self.rows.device).repeat_interleave(counts)


class ChunkedLoss:
    """The loss of guesses at some depths under a trace."""

    def __init__(
        self, drafter: Drafter, teacher: Teacher, trace: Trace, guesses: Sequence[Guess],
        scale: Float[Tensor, " D"], sums: MetricSums, terms: Sequence[Term],
        *, path: str, full: bool, measure: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            scale: per depth, factor of its sum.
            sums: receives what is counted, in the order of `guesses`.
            full: compute the target's real probabilities, which needs its whole head.
            measure: compute alpha and rounds too.
        """
        self.drafter, self.teacher, self.trace = drafter, teacher, trace
        self.scale, self.sums, self.terms = scale.float(), sums, terms
        self.path, self.full, self.measure = path, full, measure
        self.depths = [guess.depth for guess in guesses]
        self.hidden = [guess.hidden for guess in guesses]
        self.last, self.next_ids = trace.last.flatten(0, 1), trace.next_ids.flatten()
        self.argmax = None if trace.top1_ids is None else trace.top1_ids.flatten()
        top = trace.topk_teacher
        self.top = None if top is None else TopKTeacher(*(part.flatten(0, 1) for part in top))
        masks = [trace.supervised_mask(d).flatten() for d in self.depths]
        pairs = [*zip(guesses, masks, strict=True)]
        self.supervised = [torch.nonzero(mask[guess.rows]).flatten() for guess, mask in pairs]
        self.target_rows = [
            guess.rows[at] + guess.depth for guess, at in zip(guesses, self.supervised, strict=True)
        ]
        counts = [len(at) for at in self.supervised]
        sums.rows[: len(counts)] = torch.tensor(counts, dtype=torch.float64)
        self.complete = measure and [int(mask.sum()) for mask in masks] == counts
        size = (2, len(self.depths), *trace.ids.shape)  # acceptance: greedy, sampling
        self.chances = torch.zeros(size if measure else 0, device=self.last.device)

    def loss(self) -> Float[Tensor, ""]:
        """Return the loss; the sums are updated."""
        if self.path != "fused" or not torch.is_grad_enabled():
            return self.run(self.hidden, None)
        parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        out: Tensor = _Fused.apply(self, len(self.hidden), *self.hidden, *parameters)  # type: ignore[no-untyped-call]
        return out

    def run(self, hidden: list[Tensor], on_chunk: OnChunk | None) -> Float[Tensor, ""]:
        """Return the loss of these states by depth.

        Args:
            on_chunk: computes gradients of a chunk, whose graph is then freed.
        """
        total = self.last.new_zeros((), dtype=torch.float32)
        for chunk in self._chunks():
            states = [h[at] for h, at in zip(hidden, chunk.guesses, strict=True)]
            if on_chunk is not None:
                states = [state.detach().requires_grad_() for state in states]
            loss = self._chunk_loss(states, chunk)
            if on_chunk is not None:
                on_chunk(loss, states, chunk.guesses)
                loss = loss.detach()
            total = total + loss
        if self.measure and not self.complete:
            self.sums.rounds.fill_(torch.nan)
            return total
        for i, chances in enumerate(self.chances, start=1):  # none if not measured
            self.sums.rounds[0], self.sums.rounds[i] = expected_rounds(chances, self.trace)
        return total

    def _chunks(self) -> Iterator[Chunk]:
        """Yield the target rows that a guess is compared with, in chunks, with these guesses."""
        needed = torch.zeros_like(self.next_ids, dtype=torch.bool)
        for target_rows in self.target_rows:
            needed[target_rows] = True
        rows = torch.nonzero(needed).flatten()
        parts = self._split(rows)
        ends = torch.tensor([len(part) for part in parts], device=rows.device).cumsum(0)
        places = [torch.searchsorted(rows, target_rows) for target_rows in self.target_rows]
        stops = [torch.searchsorted(place, ends).tolist() for place in places]
        start, starts = 0, [0] * len(places)
        for i, part in enumerate(parts):
            spans = [slice(start, stop[i]) for start, stop in zip(starts, stops, strict=True)]
            which = [place[span] - start for place, span in zip(places, spans, strict=True)]
            guesses = [at[span] for at, span in zip(self.supervised, spans, strict=True)]
            yield Chunk(part, guesses, torch.cat(which))
            start, starts = start + len(part), [span.stop for span in spans]

    def _split(self, rows: Int[Tensor, " U"]) -> Sequence[Int[Tensor, " _"]]:
        """Split target rows into chunks of bounded memory."""
        if self.path == "plain":
            return [rows] if len(rows) else []
        most = max_logits(rows.device)
        target_vocab, draft_vocab = self.teacher.target.vocab_size, len(self.drafter.vocab)
        if self.path == "stored":  # as many chunks as if every row were needed
            size = max(1, most // max(target_vocab, draft_vocab * len(self.depths)))
            return rows.tensor_split(-(-len(self.next_ids) // size))
        full = self.full or self._known_argmax(rows) is None
        width = max(target_vocab if full else draft_vocab, draft_vocab * len(self.depths))
        return rows.split(max(1, most // width)) if len(rows) else []

    def _known_argmax(self, rows: Int[Tensor, " rows"]) -> Tensor | None:
        """Return the recorded top-1 tokens of these rows; None if one is missing."""
        argmax = None if self.argmax is None else self.argmax[rows]
        return None if argmax is None or bool((argmax < 0).any()) else argmax

    def _teacher_rows(self, rows: Int[Tensor, " rows"]) -> TeacherRows:
        if self.top is not None and self.argmax is not None:
            top = TopKTeacher(*(part[rows] for part in self.top))
            return self.teacher.from_recording(top, self.argmax[rows])
        return self.teacher.compute(self.last[rows], self._known_argmax(rows), self.full)

    def _chunk_loss(self, states: list[Tensor], chunk: Chunk) -> Float[Tensor, ""]:
        """Return the loss of one chunk; its metrics are added to the sums."""
        rows, which, level = chunk.rows, chunk.which, chunk.level
        with torch.no_grad():
            teacher = self._teacher_rows(rows)
        p, compare_states = teacher.p[which], any(term.spec.needs_states for term in self.terms)
        inputs = LossInputs(
            logits=self.drafter.heads_by_depth(states, self.depths),
            p=p,
            p_full=p if teacher.p_full is teacher.p else teacher.p_full[which],
            argmax_in_vocab=teacher.argmax_in_vocab[which],
            token=self.drafter.vocab.to_draft(self.next_ids[rows[which]]),
            state=torch.cat(states) if compare_states else self.last[:0],
            feature=self.last[rows[which]] if compare_states else self.last[:0],
        )
        loss = self._sum_terms(inputs, level)
        with torch.no_grad():
            self._count(inputs, teacher.argmax[which], rows[which], level)
        return loss

    def _sum_terms(self, inputs: LossInputs, level: Int[Tensor, " N"]) -> Float[Tensor, ""]:
        """Return all terms together, weighted by depth; `level` is the index of a guess's depth."""
        total = torch.zeros_like(level, dtype=torch.float32)
        for i, term in enumerate(self.terms):
            values, counted = term(inputs)
            total = total + term.weight * values
            self.sums.terms[i].index_add_(0, level, values.detach().double())
            self.sums.term_rows[i].index_add_(0, level, counted.double())
        self.sums.loss.index_add_(0, level, total.detach().double())
        return (total * self.scale[level]).sum()

    def _count(self, inputs: LossInputs, argmax: Tensor, rows: Tensor, level: Tensor) -> None:
        """Add agreement and, if measured, acceptance of the guesses.

        Args:
            argmax: the target's top-1 token at each guess's target row, in `rows`.
        """
        agree = self.drafter.vocab.to_target(first_argmax(inputs.logits)) == argmax
        self.sums.agree.index_add_(0, level, agree.double())
        if not self.measure:
            return
        self.sums.alpha.index_add_(0, level, inputs.alpha.double())
        depth = torch.tensor(self.depths, device=rows.device)[level]
        token = inputs.token.clamp(min=0)[:, None]
        q, p = inputs.log_q.gather(1, token).exp(), inputs.p_full.gather(1, token)
        accepted = (q / p.clamp(min=1e-30))[:, 0].clamp(max=1.0)
        greedy, sampling = self.chances.flatten(2)
        greedy[level, rows - depth] = agree.float()
        sampling[level, rows - depth] = torch.where(inputs.token >= 0, accepted, 0.0)


class _Fused(torch.autograd.Function):
    """Head and loss; gradients are computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx, loss: ChunkedLoss, depths: int, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        hidden, parameters = list(inputs[:depths]), list(inputs[depths:])
        state_grads = [torch.zeros_like(h, dtype=torch.float32) for h in hidden]
        grads: list[Tensor | None] = [None] * len(parameters)

        def on_chunk(chunk: Tensor, states: list[Tensor], rows: list[Tensor]) -> None:
            parts = torch.autograd.grad(chunk, [*states, *parameters], allow_unused=True)
            for total, at, part in zip(state_grads, rows, parts, strict=False):
                if part is not None:
                    total[at] = part.float()
            for i, part in enumerate(parts[depths:]):
                if part is not None:
                    grads[i] = part if grads[i] is None else grads[i].add_(part)  # type: ignore[union-attr]

        with torch.enable_grad():
            out = loss.run(hidden, on_chunk)
        ctx.state_grads = [g.to(h.dtype) for g, h in zip(state_grads, hidden, strict=True)]
        ctx.grads = grads
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        states = [total.mul_(grad.to(total.dtype)) for total in ctx.state_grads]
        parameters = [None if part is None else part.mul_(grad) for part in ctx.grads]
        ctx.state_grads = ctx.grads = None
        return (None, None, *states, *parameters)
