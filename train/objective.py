"""From a trace to one number: unroll the drafter, judge every supervised row, sum.

A guess at depth d, row t, is judged by the target's row t+d (the index rule). So a chunk of
*target* rows u is taken at a time: its distribution is computed once and judges the rows u-1, u-2,
.. of all depths. `[B,T,V]` never exists. Sums and counts come out, never means: the caller divides
once, by global counts. Three paths give the same numbers:

    fused       the gradient of head and loss is taken inside the chunk, while its logits are alive
                (as fused linear cross-entropy kernels do), and handed to autograd as one function
    kept        chunks that keep the gradient of their logits until the backward pass, for weights
                that exist only while their own module runs (ZeRO-3); as many on every rank
    plain       all rows at once through ordinary autograd: the reference
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.decode.sampling import first_argmax
from outrider.models.drafter import Drafter, Guess, Top, Trace
from outrider.train.acceptance_forecast import rounds
from outrider.train.losses import Chunk, Term, parse_loss
from outrider.train.metric_sums import Sums

CHUNK = 2**23  # largest number of logits held at once, target's or drafter's: 32 MB in float32
KEPT = parse_loss(["soft_ce"])  # what a changed target costs
CHUNK_GPU = 2**27  # there small products leave most of the machine idle


@runtime_checkable
class Teacher(Protocol):
    """The part of a target that judges: its head. `models.target.Target` is one."""

    @property
    def vocab(self) -> int: ...

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]: ...

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]: ...


class Judged(NamedTuple):
    """What the target says at some rows, over the draft vocabulary."""

    p: Float[Tensor, "N Vd"]  # as the objective wants it, see `losses.Chunk`
    whole: Float[Tensor, "N Vd"]  # its real share; the same as p where nobody asked for it
    favourite: Int[Tensor, " N"]  # argmax over the whole vocabulary
    fair: Bool[Tensor, " N"]  # the favourite can be drafted


class Objective(nn.Module):
    """The module that accelerate wraps: drafter inside, target beside."""

    def __init__(
        self,
        drafter: Drafter,
        target: Teacher,
        *,
        weights: list[float],
        loss: Sequence[str] = ("soft_ce",),
        renormalise: bool = True,
        path: Literal["fused", "kept", "plain"] = "fused",
    ) -> None:
        """
        Args:
            weights: of the depths, depth 1 first; depths of weight 0 are only measured.
            loss: terms, see train/losses.py.
            renormalise: the teacher sums to 1 over the draft vocabulary.
            path: how chunks meet autograd, see above; not a matter of results.
        """
        super().__init__()
        self.drafter, self.weights = drafter, weights
        self.renormalise, self.path = renormalise, path
        self.terms = parse_loss(loss)
        self._target = (target,)  # in a tuple: not a submodule, not trained, not saved

    def zero(self, device: torch.device | str) -> Sums:
        """Nothing summed yet."""
        return Sums.zero(len(self.weights), device, [term.name for term in self.terms])

    def asks_whole(self, measure: bool) -> bool:
        """Whether the share of the draft vocabulary matters, for which the whole head must run."""
        wanted = measure or not self.renormalise or any(term.kind.whole for term in self.terms)
        return wanted and not self.drafter.vocab.full

    def forward(
        self, trace: Trace, divide: Float[Tensor, " D"], measure: bool = False
    ) -> tuple[Float[Tensor, ""], Sums]:
        """
        Args:
            divide: per depth, what its sum is divided by (the global count of rows).
            measure: go through all depths, and sum what costs more: alpha, rounds.

        Returns:
            sum over depths of weight * loss / divide, with gradient; and the sums behind it.
        """
        trained = max(i for i, weight in enumerate(self.weights, start=1) if weight)
        asked = len(self.weights) if measure else trained
        guesses = self._guesses(trace, asked)
        device = trace.last.device
        divide = divide.to(device)
        weights, sums = torch.tensor(self.weights, device=device) / divide, self.zero(device)
        job = _Job(self, trace, guesses[1:], weights, sums, self.terms, measure)
        loss = self._run(job)
        if guesses[0]:  # the drafter changes its target, which should stay what it was
            own, weight = Sums.zero(1, device), self.drafter.keep / divide[:1]
            loss = loss + self._run(_Job(self, trace, guesses[:1], weight, own, KEPT, False))
            sums.kept.copy_(torch.stack([own.loss[0], own.rows[0]]))
        return loss, sums

    def _guesses(self, trace: Trace, asked: int) -> list[Guess | None]:
        """By depth, 0 to `asked`; None at depth 0 unless the drafter changes its target."""
        found: list[Guess | None] = [None]
        for guess in self.drafter.unroll(trace):
            if guess.depth:
                found.append(guess)
            else:
                found[0] = guess
            if len(found) > asked:
                break
        return found

    def _run(self, job: "_Job") -> Float[Tensor, ""]:
        if self.path != "fused" or not torch.is_grad_enabled():
            return job.run(job.hidden, None)
        params = [p for p in self.drafter.parameters() if p.requires_grad]
        loss: Tensor = _Fused.apply(job, len(job.hidden), *job.hidden, *params)  # type: ignore[no-untyped-call]
        return loss

    def judge(
        self, last: Float[Tensor, "N H"], whole: bool, favourite: Int[Tensor, " N"] | None = None
    ) -> Judged:
        """The target's distribution at some rows, restricted to the draft vocabulary.

        Args:
            whole: also find out which share of the whole the draft vocabulary has.
            favourite: known already; then only the draft vocabulary's part of the head is needed.
        """
        vocab, (target,) = self.drafter.vocab, self._target
        if vocab.full or whole or favourite is None:
            logits = target.logits(last)
            favourite = first_argmax(logits) if favourite is None else favourite
            inside = logits if vocab.full else logits[:, vocab.kept]
        else:
            inside = target.logits_of(last, vocab.kept)
        p = inside.float().softmax(-1)
        share = p
        if whole:
            share = p * (inside.float().logsumexp(-1) - _logsumexp(logits)).exp()[:, None]
        return Judged(p if self.renormalise else share, share, favourite, vocab.t2d[favourite])

    def judge_noted(self, top: Top, favourite: Int[Tensor, " N"]) -> Judged:
        """The same from what was recorded of the distribution: no head runs."""
        p = top.spread(len(self.drafter.vocab))
        p = p / p.sum(-1, keepdim=True)  # 16 bits do not sum to 1 exactly
        share = p * top.share[..., None]
        return Judged(
            p if self.renormalise else share, share, favourite, self.drafter.vocab.t2d[favourite]
        )


def chunk_of(device: torch.device) -> int:
    """Logits that may be held at once there."""
    return CHUNK_GPU if device.type == "cuda" else CHUNK


def _logsumexp(logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """In float32, without a float32 copy of the whole."""
    parts = [part.float().logsumexp(-1) for part in logits.split(2**15, dim=-1)]
    return torch.stack(parts).logsumexp(0)


class _Job:
    """One forward's judging: the chunks, and the sums they add up to."""

    def __init__(
        self,
        objective: Objective,
        trace: Trace,
        guesses: Sequence[Guess | None],
        scale: Float[Tensor, " D"],
        sums: Sums,
        terms: Sequence[Term],
        measure: bool,
    ) -> None:
        """
        Args:
            scale: per depth, what its sum is multiplied by.
            sums: what is counted is added here, in the order of `guesses`.
        """
        self.objective, self.trace, self.measure = objective, trace, measure
        told = [guess for guess in guesses if guess is not None]
        self.depths = [guess.depth for guess in told]
        self.hidden = [guess.hidden.flatten(0, 1) for guess in told]
        self.scale, self.sums, self.terms = scale.float(), sums, terms
        self.last, self.following = trace.last.flatten(0, 1), trace.next_ids.flatten()
        self.favourite = None if trace.favourite is None else trace.favourite.flatten()
        self.top = None if trace.top is None else Top(*(part.flatten(0, 1) for part in trace.top))
        self.counts = [trace.counts(d).flatten() for d in self.depths]
        sums.rows[: len(self.depths)] = torch.stack([c.sum() for c in self.counts]).double()
        self.whole = objective.asks_whole(measure)
        size = (2, len(self.depths), *trace.ids.shape)  # of being accepted: greedy, sampling
        self.chances = torch.zeros(size if measure else 0, device=self.last.device)

    def chunks(self) -> list[Tensor]:
        """Target rows that judge at least one guess, in chunks."""
        wanted = torch.zeros_like(self.counts[0])
        for depth, counts in zip(self.depths, self.counts, strict=True):
            wanted[depth:] |= counts[: len(counts) - depth]
        rows = torch.nonzero(wanted).flatten()
        if self.objective.path == "plain":
            return [rows] if len(rows) else []
        (target,), vocab = self.objective._target, len(self.objective.drafter.vocab)
        most = chunk_of(rows.device)
        if self.objective.path == "kept":  # as many as if every row judged
            size = max(1, most // max(target.vocab, vocab * len(self.depths)))
            return list(rows.tensor_split(-(-len(wanted) // size)))
        judging = target.vocab if self.whole or self._known(rows) is None else vocab
        size = max(1, most // max(judging, vocab * len(self.depths)))
        return list(rows.split(size)) if len(rows) else []

    def _known(self, rows: Tensor) -> Tensor | None:
        """The target's favourites at these rows, if every one was noted."""
        noted = None if self.favourite is None else self.favourite[rows]
        return None if noted is None or bool((noted < 0).any()) else noted

    def _judged(self, rows: Tensor) -> Judged:
        """What the target says at these rows, by its head or as it was recorded."""
        if self.top is not None and self.favourite is not None:
            top = Top(*(part[rows] for part in self.top))
            return self.objective.judge_noted(top, self.favourite[rows])
        return self.objective.judge(self.last[rows], self.whole, self._known(rows))

    def run(self, hidden: list[Tensor], take: Any) -> Tensor:
        """Judge everything. `take(loss, states, places)` is called while a chunk's graph lives."""
        total = self.last.new_zeros((), dtype=torch.float32)
        for rows in self.chunks():
            places = [
                (rows - depth)[ok]
                for depth, ok in zip(self.depths, self._judges(rows), strict=True)
            ]
            states = [h[at] for h, at in zip(hidden, places, strict=True)]
            if take is not None:
                states = [state.detach().requires_grad_() for state in states]
            loss = self._chunk(states, rows)
            if take is not None:
                take(loss, states, places)
                loss = loss.detach()
            total = total + loss
        if self.measure:
            self._forecast()
        return total

    def _judges(self, rows: Tensor) -> list[Tensor]:
        """Per depth, which of the target rows judge a supervised guess."""
        return [
            (rows >= d) & c[(rows - d).clamp(min=0)]
            for d, c in zip(self.depths, self.counts, strict=True)
        ]

    def _chunk(self, states: list[Tensor], rows: Tensor) -> Tensor:
        """Loss of one chunk; its statistics are added to the sums."""
        drafter = self.objective.drafter
        with torch.no_grad():
            judged = self._judged(rows)
        judges = self._judges(rows)
        which = torch.cat([torch.nonzero(ok).flatten() for ok in judges])
        level = torch.cat(
            [torch.full_like(rows[ok], i) for i, ok in enumerate(judges)]
        )  # index of the depth
        p, compared = judged.p[which], any(term.kind.features for term in self.terms)
        told = Chunk(
            logits=drafter.heads(states, self.depths),
            p=p,
            whole=p if judged.whole is judged.p else judged.whole[which],
            fair=judged.fair[which],
            token=drafter.vocab.to_draft(self.following[rows[which]]),
            state=torch.cat(states) if compared else self.last[:0],
            feature=self.last[rows[which]] if compared else self.last[:0],
        )
        loss = self._cost(told, level)
        with torch.no_grad():
            self._count(told, judged.favourite[which], rows[which], level)
        return loss

    def _cost(self, rows: Chunk, level: Tensor) -> Tensor:
        """All terms together, depths weighted."""
        whole = torch.zeros_like(level, dtype=torch.float32)
        for i, term in enumerate(self.terms):
            values, told = term(rows)
            whole = whole + term.weight * values
            self.sums.terms[i].index_add_(0, level, values.detach().double())
            self.sums.told[i].index_add_(0, level, told.double())
        self.sums.loss.index_add_(0, level, whole.detach().double())
        return (whole * self.scale[level]).sum()

    def _count(self, rows: Chunk, favourite: Tensor, judge: Tensor, level: Tensor) -> None:
        """
        Args:
            favourite: the target's, at each row.
            judge: the target row that judges it.
            level: index of its depth.
        """
        sums, vocab = self.sums, self.objective.drafter.vocab
        agree = vocab.to_target(first_argmax(rows.logits)) == favourite
        sums.agree.index_add_(0, level, agree.double())
        if not self.measure:
            return
        sums.alpha.index_add_(0, level, rows.alpha.double())
        depth = torch.tensor(self.depths, device=judge.device)[level]
        token = rows.token.clamp(min=0)[:, None]
        q, p = rows.log_q.gather(1, token).exp(), rows.whole.gather(1, token)
        kept = torch.where(rows.token >= 0, (q / p.clamp(min=1e-30))[:, 0].clamp(max=1.0), 0.0)
        greedy, sampling = self.chances.flatten(2)
        greedy[level, judge - depth] = agree.float()
        sampling[level, judge - depth] = kept.float()

    def _forecast(self) -> None:
        for i, chances in enumerate(self.chances, start=1):
            tokens, expected = rounds(chances, self.trace)
            self.sums.rounds[0] = tokens
            self.sums.rounds[i] = expected


class _Fused(torch.autograd.Function):
    """Head and loss as one function of the states and the parameters behind them."""

    @staticmethod
    def forward(ctx, job: _Job, depths: int, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        hidden, params = list(inputs[:depths]), list(inputs[depths:])
        slopes = [torch.zeros_like(h, dtype=torch.float32) for h in hidden]
        sums: list[Tensor | None] = [None] * len(params)

        def take(loss: Tensor, states: list[Tensor], places: list[Tensor]) -> None:
            grads = torch.autograd.grad(loss, [*states, *params], allow_unused=True)
            for slope, at, part in zip(slopes, places, grads, strict=False):
                if part is not None:
                    slope[at] = part.float()
            for i, grad in enumerate(grads[depths:]):
                if grad is not None:
                    sums[i] = grad if sums[i] is None else sums[i].add_(grad)  # type: ignore[union-attr]

        with torch.enable_grad():
            total = job.run(hidden, take)
        ctx.slopes, ctx.sums = [s.to(h.dtype) for s, h in zip(slopes, hidden, strict=True)], sums
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        slopes = [slope.mul_(grad.to(slope.dtype)) for slope in ctx.slopes]
        sums = [None if s is None else s.mul_(grad) for s in ctx.sums]
        ctx.slopes = ctx.sums = None
        return (None, None, *slopes, *sums)
