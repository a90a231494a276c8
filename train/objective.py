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

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.eval.decode.sampling import first_argmax
from outrider.models.base import Drafter, Trace
from outrider.train.losses import LOSSES, Loss

CHUNK = 2**23  # largest number of logits held at once, target's or drafter's: 32 MB in float32
CHUNK_GPU = 2**27  # there small products leave most of the machine idle


@dataclass
class Sums:
    """Per depth, summed over rows. Divide by `rows`; add over micro-batches and ranks.

    loss: nats of the rows that are judged (0 where the target's favourite cannot be drafted).
    agree: the drafter's favourite is the target's.
    survive: it was so at this and all shallower depths, like a draft that is accepted so far; a
        share of the rows of depth 1, for a draft that runs past the answer's end is cut there.
    alpha: sum over tokens of min(p, q), the chance that sampling accepts (all tokens, T = 1).
    rows: supervised rows.
    """

    loss: Float[Tensor, " D"]
    agree: Float[Tensor, " D"]
    survive: Float[Tensor, " D"]
    alpha: Float[Tensor, " D"]
    rows: Float[Tensor, " D"]

    @classmethod
    def zero(cls, depths: int, device: torch.device | str) -> "Sums":
        return cls(*(torch.zeros(depths, dtype=torch.float64, device=device) for _ in fields(cls)))

    def add(self, other: "Sums") -> None:
        for f in fields(self):
            getattr(self, f.name).add_(getattr(other, f.name))

    def stacked(self) -> Float[Tensor, "fields D"]:
        """For one all-reduce."""
        return torch.stack([getattr(self, f.name) for f in fields(self)])

    def means(self) -> dict[str, float]:
        """Flat metrics, `name@depth`, and the acceptance length they predict, bonus included."""
        rows = self.rows.clamp(min=1)
        shares = {name: getattr(self, name) / rows for name in ("loss", "agree", "alpha")}
        shares["survive"] = self.survive / rows[0]
        out = {
            f"{name}@{i}": value
            for name, values in shares.items()
            for i, value in enumerate(values.tolist(), start=1)
        }
        out["accept_length"] = 1.0 + float(shares["survive"].sum())
        out["accept_length_sampling"] = 1.0 + float((self.alpha / rows).cumprod(0).sum())
        return out


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

    probs: Float[Tensor, "N Vd"]
    mass: Float[Tensor, " N"]  # probability of the draft vocabulary as a whole; 1 if not asked for
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
        renormalise: bool = True,
        loss: str = "soft_cross_entropy",
        path: Literal["fused", "kept", "plain"] = "fused",
    ) -> None:
        """
        Args:
            weights: of the depths, depth 1 first.
            renormalise: the teacher sums to 1 over the draft vocabulary.
            path: how chunks meet autograd, see above; not a matter of results.
        """
        super().__init__()
        self.drafter, self.weights = drafter, weights
        self.renormalise, self.path = renormalise, path
        self.loss: Loss = LOSSES[loss]
        self._target = (target,)  # in a tuple: not a submodule, not trained, not saved

    def forward(
        self, trace: Trace, divide: Float[Tensor, " D"], measure: bool = False
    ) -> tuple[Float[Tensor, ""], Sums]:
        """
        Args:
            divide: per depth, what its sum of nats is divided by (the global count of rows).
            measure: also sum alpha, which costs a softmax per row.

        Returns:
            sum over depths of weight * nats / divide, with gradient; and the sums behind it.
        """
        guesses = list(self.drafter.unroll(trace))
        hidden = [guess.hidden.flatten(0, 1) for guess in guesses]
        job = _Job(self, trace, [guess.depth for guess in guesses], divide, measure)
        if self.path != "fused" or not torch.is_grad_enabled():
            loss = job.run(hidden, None)
        else:
            params = [p for p in self.drafter.parameters() if p.requires_grad]
            loss = _Fused.apply(job, len(hidden), *hidden, *params)  # type: ignore[no-untyped-call]
        return loss, job.sums

    def judge(
        self, last: Float[Tensor, "N H"], mass: bool, favourite: Int[Tensor, " N"] | None = None
    ) -> Judged:
        """The target's distribution at some rows, restricted to the draft vocabulary.

        Args:
            mass: also find out which share of the whole the draft vocabulary has.
            favourite: known already; then only the draft vocabulary's part of the head is needed.
        """
        vocab, (target,) = self.drafter.vocab, self._target
        mass = not vocab.full and (mass or not self.renormalise)
        if vocab.full or mass or favourite is None:
            logits = target.logits(last)
            favourite = first_argmax(logits) if favourite is None else favourite
            inside = logits if vocab.full else logits[:, vocab.kept]
        else:
            inside = target.logits_of(last, vocab.kept)
        probs = inside.float().softmax(-1)
        share = probs.new_ones(len(last))
        if mass:
            share = (inside.float().logsumexp(-1) - _logsumexp(logits)).exp()
        if not self.renormalise:
            probs = probs * share[:, None]
        return Judged(probs, share, favourite, vocab.t2d[favourite])


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
        self, objective: Objective, trace: Trace, depths: list[int], divide: Tensor, measure: bool
    ) -> None:
        self.objective, self.depths, self.measure = objective, depths, measure
        self.last = trace.last.flatten(0, 1)
        self.favourite = None if trace.favourite is None else trace.favourite.flatten()
        self.counts = [trace.counts(d).flatten() for d in depths]
        device = self.last.device
        self.sums = Sums.zero(len(depths), device)
        self.sums.rows.copy_(torch.stack([c.sum() for c in self.counts]))
        self.scale = (torch.tensor(objective.weights, device=device) / divide.to(device)).float()
        self.agree = torch.zeros(len(depths), len(self.last), dtype=torch.bool, device=device)

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
        whole = self.measure or not self.objective.renormalise or self._known(rows) is None
        judging = target.vocab if whole else vocab
        size = max(1, most // max(judging, vocab * len(self.depths)))
        return list(rows.split(size)) if len(rows) else []

    def _known(self, rows: Tensor) -> Tensor | None:
        """The target's favourites at these rows, if every one was noted."""
        noted = None if self.favourite is None else self.favourite[rows]
        return None if noted is None or bool((noted < 0).any()) else noted

    def run(self, hidden: list[Tensor], take: Any) -> Tensor:
        """Judge everything. `take(loss, states, places)` is called while a chunk's graph lives."""
        total = self.last.new_zeros((), dtype=torch.float32)
        for rows in self.chunks():
            places = [
                (rows - depth)[ok]
                for depth, ok in zip(self.depths, self._judges(rows), strict=True)
            ]
            states = torch.cat([h[at] for h, at in zip(hidden, places, strict=True)])
            if take is not None:
                states = states.detach().requires_grad_()
            loss = self._chunk(states, rows)
            if take is not None:
                take(loss, states, places)
                loss = loss.detach()
            total = total + loss
        self._survive()
        return total

    def _judges(self, rows: Tensor) -> list[Tensor]:
        """Per depth, which of the target rows judge a supervised guess."""
        return [
            (rows >= d) & c[(rows - d).clamp(min=0)]
            for d, c in zip(self.depths, self.counts, strict=True)
        ]

    def _chunk(self, states: Tensor, rows: Tensor) -> Tensor:
        """Loss of one chunk; its statistics are added to the sums."""
        with torch.no_grad():
            judged = self.objective.judge(self.last[rows], self.measure, self._known(rows))
        judges = self._judges(rows)
        which = torch.cat([torch.nonzero(ok).flatten() for ok in judges])
        level = torch.cat(
            [torch.full_like(rows[ok], i) for i, ok in enumerate(judges)]
        )  # index of the depth
        logits = self.objective.drafter.head(states)
        nats = self.objective.loss(logits, judged.probs[which])
        fair = judged.fair[which]
        loss = (nats * (fair * self.scale[level])).sum()
        with torch.no_grad():
            self._count(logits, nats * fair, rows, which, level, judged)
        return loss

    def _count(
        self,
        logits: Tensor,
        nats: Tensor,
        rows: Tensor,
        which: Tensor,
        level: Tensor,
        judged: Judged,
    ) -> None:
        sums, vocab = self.sums, self.objective.drafter.vocab
        same = vocab.to_target(first_argmax(logits)) == judged.favourite[which]
        sums.loss.index_add_(0, level, nats.double())
        sums.agree.index_add_(0, level, same.double())
        depth = torch.tensor(self.depths, device=rows.device)[level]
        self.agree[level, rows[which] - depth] = same
        if self.measure:
            p = judged.probs[which]
            if self.objective.renormalise:
                p = p * judged.mass[which, None]
            alpha = torch.minimum(p, logits.float().softmax(-1)).sum(-1)
            sums.alpha.index_add_(0, level, alpha.double())

    def _survive(self) -> None:
        alive = torch.ones_like(self.agree[0])
        for i, counts in enumerate(self.counts):
            alive = alive & self.agree[i]
            self.sums.survive[i] = (alive & counts).sum()


class _Fused(torch.autograd.Function):
    """Head and loss as one function of the states and the parameters behind them."""

    @staticmethod
    def forward(ctx, job: _Job, depths: int, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        hidden, params = list(inputs[:depths]), list(inputs[depths:])
        slopes = [torch.zeros_like(h, dtype=torch.float32) for h in hidden]
        sums: list[Tensor | None] = [None] * len(params)

        def take(loss: Tensor, states: Tensor, places: list[Tensor]) -> None:
            first, *rest = torch.autograd.grad(loss, [states, *params], allow_unused=True)
            for slope, at, part in zip(
                slopes, places, first.split([len(at) for at in places]), strict=True
            ):
                slope[at] = part.float()
            for i, grad in enumerate(rest):
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
