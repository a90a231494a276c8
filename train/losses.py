"""The objective as a small language: what a guess costs is a sum of named, weighted terms.

    drafter.loss=[soft_ce]                    the target's distribution (EAGLE-3)
    drafter.loss=[smooth_l1,0.1*soft_ce]      features, and a little of the distribution (EAGLE)
    drafter.loss=[0.5*jsd:0.1,0.5*lk_hybrid]  a term may take one number behind a colon

A term sees the supervised rows of one chunk and returns their values in nats (or what it counts
in) and which of them it speaks of; the objective sums both and divides once, by global counts.
Softmax and sums run in float32 whatever the input.

In every formula p is the target's distribution and q the drafter's softmax over the draft
vocabulary. Two p's must be told apart where the vocabulary is reduced: `rows.p` sums to 1 over the
draft vocabulary (with renormalise=false: to its share of the whole), `rows.whole` is the part of
the target's real distribution that the draft vocabulary covers, which is what acceptance is about.

Legend: N rows, M = N or 0, Vd draft vocabulary, H hidden size.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.conf.fields import check_interval

FLOOR = 1e-30  # of an acceptance chance whose logarithm is taken


@dataclass
class Chunk:
    """What a term may look at.

    Attributes:
        logits: of the drafter.
        p: the teacher over the draft vocabulary.
        whole: the same, its sum the draft vocabulary's share of the target's distribution.
        fair: the target's favourite can be drafted.
        token: the text's token as a draft id, -1 where it cannot be drafted.
        state, feature: the drafter's state, and the target's last state that it should have met;
            no rows of them where no term compares states.
    """

    logits: Float[Tensor, "N Vd"]
    p: Float[Tensor, "N Vd"]
    whole: Float[Tensor, "N Vd"]
    fair: Bool[Tensor, " N"]
    token: Int[Tensor, " N"]
    state: Float[Tensor, "M D"]
    feature: Float[Tensor, "M H"]

    @cached_property
    def log_q(self) -> Float[Tensor, "N Vd"]:
        return self.logits.float().log_softmax(-1)

    @cached_property
    def alpha(self) -> Float[Tensor, " N"]:
        """The chance that sampling accepts: sum_v min(p(v), q(v)) = 1 - TV(p, q)."""
        return torch.minimum(self.whole.float(), self.log_q.exp()).sum(-1)


Cost = Callable[[Chunk, float], Float[Tensor, " N"]]


class Kind(NamedTuple):
    """A term of the language.

    Attributes:
        cost: value of every row; the number is the term's parameter.
        meaning: one line for people, with the source.
        about: which rows it speaks of: "fair" ones, those whose "token" can be drafted, or "all".
        number: the parameter's default; None: it takes none.
        within: the parameter's interval.
        features: it compares states, which only drafters in the target's own space have.
        whole: it needs the share of the draft vocabulary, hence the target's whole head.
    """

    cost: Cost
    meaning: str
    about: str = "fair"
    number: float | None = None
    within: str = ""
    features: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Term:
    """One summand of the objective."""

    weight: float
    name: str
    number: float

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def __call__(self, rows: Chunk) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
        """Values of all rows, 0 where the term does not speak; and where it does."""
        told = {"fair": rows.fair, "token": rows.token >= 0}.get(self.kind.about)
        told = torch.ones_like(rows.fair) if told is None else told
        return self.kind.cost(rows, self.number) * told, told


def parse_loss(parts: Sequence[str]) -> tuple[Term, ...]:
    """["0.5*jsd:0.1", "tv"] -> terms.

    Raises:
        ConfigError: drafter.loss is empty or holds something that is no term.
    """
    terms = tuple(_term(part) for part in parts)
    names = [term.name for term in terms]
    if not terms or len(set(names)) < len(names):
        raise ConfigError(
            "drafter.loss", list(parts), "A loss is one term or several different ones.", _SYNTAX
        )
    return terms


def _term(part: str) -> Term:
    number = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
    found = re.fullmatch(rf"(?:({number})\*)?([a-z][a-z0-9_]*)(?::({number}))?", part)
    kind = KINDS.get(found[2]) if found else None
    if found is None or kind is None:
        raise ConfigError("drafter.loss", part, "This is no term.", _SYNTAX)
    if found[3] and kind.number is None:
        raise ConfigError("drafter.loss", part, f"{found[2]} takes no number.", _SYNTAX)
    weight, value = float(found[1] or 1.0), float(found[3]) if found[3] else kind.number or 0.0
    if weight == 0:
        raise ConfigError("drafter.loss", part, "A term of weight 0 is none.", "Leave it out.")
    check_interval(kind.within, value, f"drafter.loss: the number of {found[2]}")
    return Term(weight, found[2], value)


def parse_depth_weights(text: str, depths: int) -> list[float]:
    """Weights of the losses of depths 1, 2, ...

        first             1 0 0        only what follows a true state
        geometric:0.8     1 .8 .64     EAGLE-3
        normalised:0.6    .51 .31 .18  the same, its sum 1 (FastMTP)
        mean:0.3          .1 .1 .1     a share for each (DeepSeek-V3)
        1/0.5/0.25        as written, one per depth

    Raises:
        ConfigError: drafter.depth_weights is none of these.
    """
    name, _, number = text.partition(":")
    try:
        if name == "first" and not number:
            return [1.0] + [0.0] * (depths - 1)
        if name in ("geometric", "normalised"):
            weights = [float(number) ** d for d in range(depths)]
            whole = sum(weights) if name == "normalised" else 1.0
            return _sound([weight / whole for weight in weights])
        if name == "mean":
            return _sound([float(number) / depths] * depths)
        weights = [float(part) for part in text.split("/")]
        if len(weights) == depths:
            return _sound(weights)
    except ValueError:
        pass
    raise ConfigError(
        "drafter.depth_weights", text, f"This does not give weights to {depths} depths.",
        "Use first, geometric:0.8, normalised:0.6, mean:0.3, or one number per depth: 1/0.5/0.25.",
    )  # fmt: skip


def _sound(weights: list[float]) -> list[float]:
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise ValueError("weights are finite, not negative, and not all zero")
    return weights


# ---- the terms ----


def soft_cross_entropy(rows: Chunk, _: float) -> Float[Tensor, " N"]:
    """-sum_v p(v) log q(v)."""
    out: Tensor = _SoftCrossEntropy.apply(rows.logits, rows.p)  # type: ignore[no-untyped-call]
    return out


def soft_cross_entropy_reference(rows: Chunk, _: float) -> Float[Tensor, " N"]:
    """The same as the formula reads."""
    return -(rows.p.float() * rows.log_q).sum(-1)


def kl(rows: Chunk, _: float) -> Float[Tensor, " N"]:
    """Forward KL(p | q): soft cross-entropy less the teacher's entropy, so 0 is perfect."""
    p = rows.p.float()
    return soft_cross_entropy(rows, 0.0) + torch.xlogy(p, p).sum(-1)


def reverse_kl(rows: Chunk, _: float) -> Float[Tensor, " N"]:
    """KL(q | p) = sum_v q(v) log(q(v) / p(v)): seeks a mode instead of covering all."""
    log_p = rows.p.float().clamp(min=torch.finfo(torch.float32).tiny).log()
    return (rows.log_q.exp() * (rows.log_q - log_p)).sum(-1)


def jsd(rows: Chunk, beta: float) -> Float[Tensor, " N"]:
    """Beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q."""
    p, q = rows.p.float(), rows.log_q.exp()
    log_m = (beta * p + (1 - beta) * q).clamp(min=torch.finfo(torch.float32).tiny).log()
    left = torch.xlogy(p, p) - p * log_m
    return (beta * left + (1 - beta) * q * (rows.log_q - log_m)).sum(-1)


def total_variation(rows: Chunk, _: float) -> Float[Tensor, " N"]:
    """1 - sum_v min(p(v), q(v)): the chance that sampling rejects."""
    return 1 - rows.alpha


def likelihood_of_acceptance(rows: Chunk, _: float) -> Float[Tensor, " N"]:
    """-log sum_v min(p(v), q(v)): total variation, steeper where acceptance is rare."""
    return -rows.alpha.clamp(min=FLOOR).log()


def hybrid(rows: Chunk, eta: float) -> Float[Tensor, " N"]:
    """A share s = exp(-eta alpha), held fixed, of KL(p | q), and 1 - s of 1 - alpha.

    Without its KL where the target's favourite cannot be drafted.
    """
    share = torch.exp(-eta * rows.alpha.detach())
    return share * kl(rows, 0.0) * rows.fair + (1 - share) * (1 - rows.alpha)


def hard_cross_entropy(rows: Chunk, _: float) -> Float[Tensor, " N"]:
    """-log q(the text's token)."""
    return -rows.log_q.gather(-1, rows.token.clamp(min=0)[:, None])[:, 0]


def top_k(rows: Chunk, count: float) -> Float[Tensor, " N"]:
    """-sum p(v) log q(v) over the target's `count` favourites, renormalised on neither side."""
    best = rows.whole.topk(min(int(count), rows.whole.shape[-1]), dim=-1)
    return -(best.values.float() * rows.log_q.gather(-1, best.indices)).sum(-1)


def smooth_l1(rows: Chunk, beta: float) -> Float[Tensor, " N"]:
    """Smooth-L1 between the states, a mean over the hidden size."""
    each = F.smooth_l1_loss(rows.state.float(), rows.feature.float(), reduction="none", beta=beta)
    return each.mean(-1)


class _SoftCrossEntropy(torch.autograd.Function):
    """With one buffer of [N, Vd] kept for the gradient, which is q * sum(p) - p."""

    @staticmethod
    def forward(ctx, logits: Tensor, teacher: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        rows = logits.float()
        lse, mass = rows.logsumexp(-1), teacher.sum(-1)
        nats: Tensor = lse * mass - torch.linalg.vecdot(teacher.float(), rows)
        if ctx.needs_input_grad[0]:
            slope = (rows - lse[:, None]).exp_().mul_(mass[:, None]).sub_(teacher)
            ctx.save_for_backward(slope)
            ctx.dtype = logits.dtype
        return nats

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (slope,) = ctx.saved_tensors
        return slope.mul_(grad[:, None]).to(ctx.dtype), None


KINDS: dict[str, Kind] = {
    "soft_ce": Kind(soft_cross_entropy, "cross-entropy under the target's distribution"),
    "soft_ce_reference": Kind(soft_cross_entropy_reference, "the same, as the formula reads"),
    "kl": Kind(kl, "forward KL(p|q)"),
    "reverse_kl": Kind(reverse_kl, "reverse KL(q|p) (DistillSpec, arXiv:2310.08461)"),
    "jsd": Kind(
        jsd, "Jensen-Shannon, beta behind the colon (DistillSpec)", number=0.5, within="(0, 1)"
    ),
    "tv": Kind(total_variation, "total variation, the chance of rejection", "all", whole=True),
    "lk": Kind(likelihood_of_acceptance, "-log alpha (LK, arXiv:2602.23881)", "all", whole=True),
    "lk_hybrid": Kind(
        hybrid,
        "adaptive mix of kl and tv, eta behind the colon (LK)",
        "all",
        3.0,
        "(0, inf)",
        whole=True,
    ),
    "ce": Kind(hard_cross_entropy, "cross-entropy of the text's token", "token"),
    "topk": Kind(
        top_k,
        "the target's K favourites, K behind the colon (HASS)",
        "all",
        10.0,
        "[1, inf)",
        whole=True,
    ),
    "smooth_l1": Kind(
        smooth_l1,
        "Smooth-L1 to the target's next state (EAGLE)",
        "all",
        1.0,
        "(0, inf)",
        features=True,
    ),
}
_SYNTAX = f"Write weight*name or name, of: {', '.join(KINDS)}."
