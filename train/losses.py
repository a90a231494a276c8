"""The loss as a sum of named, weighted terms.

    drafter.loss=[soft_ce]                    the target's distribution (EAGLE-3)
    drafter.loss=[smooth_l1,0.1*soft_ce]      states, and a little of the distribution (EAGLE)
    drafter.loss=[0.5*jsd:0.1,0.5*lk_hybrid]  a term may have a parameter after a colon

A term returns its value at every supervised row of a chunk (entropies in nats) and which rows it
counts; the objective sums both and divides once, by counts of the whole step. All in float32.

In all formulas p is the teacher and q the drafter's softmax over the draft vocabulary. With a
reduced vocabulary there are two p: `p` sums to 1 over the draft vocabulary (with renormalise=false:
to its share), `p_full` are the target's real probabilities, which decide acceptance.

Legend: N rows, M = N or 0, Vd draft vocabulary, D drafter's and H target's hidden size.
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
from outrider.conf.plugins import OWN_PART, Registry

FLOOR = 1e-30  # of an acceptance probability, before its logarithm


@dataclass
class LossInputs:
    """Inputs of the loss terms for one chunk; states are empty if no term needs them."""

    logits: Float[Tensor, "N Vd"]  # of the drafter
    p: Float[Tensor, "N Vd"]  # the teacher
    p_full: Float[Tensor, "N Vd"]  # the target's; sum to the draft vocabulary's share
    argmax_in_vocab: Bool[Tensor, " N"]  # the target's top-1 token is in the draft vocabulary
    token: Int[Tensor, " N"]  # the text's, as a draft id; -1: not in the draft vocabulary
    state: Float[Tensor, "M D"]  # the drafter's
    feature: Float[Tensor, "M H"]  # the target's last state, which `state` approximates
    # `Drafter.log_confidence` of `log_q`; by default that of a drafter without an output for it
    confidence: Callable[[Tensor], Tensor] = lambda log_q: log_q.amax(-1)

    @cached_property
    def log_q(self) -> Float[Tensor, "N Vd"]:
        return self.logits.float().log_softmax(-1)

    @cached_property
    def alpha(self) -> Float[Tensor, " N"]:
        """Probability that sampling accepts: sum_v min(p(v), q(v)) = 1 - TV(p, q)."""
        return torch.minimum(self.p_full.float(), self.log_q.exp()).sum(-1)


class TermSpec(NamedTuple):
    """Definition of a term.

    It counts the rows whose top-1 token under the target is in the draft vocabulary ("top1"), those
    whose token of the text is ("token"), or "all".
    """

    loss: Callable[[LossInputs, float], Float[Tensor, " N"]]  # of every row, given the parameter
    meaning: str
    rows: str = "top1"
    default: float | None = None  # of the parameter; None: the term has none
    interval: str = ""  # of the parameter
    needs_states: bool = False  # compares states, which only drafters in the target's space have
    needs_full_head: bool = False  # reads `p_full`
    # probability that a guess survives, given the parameter: the value of a depth is weighted by
    # the sum over it and the deeper ones of the products up to each (`survival_weights`)
    survival: Callable[[LossInputs, float], Float[Tensor, " N"]] | None = None


@dataclass(frozen=True)
class Term:
    """One summand of the loss."""

    weight: float
    name: str
    parameter: float

    @property
    def spec(self) -> TermSpec:
        return LOSSES[self.name]

    def __call__(self, rows: LossInputs) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
        """Return the values, 0 at rows that do not count, and which rows count."""
        counted = self.counted(rows)
        values = self.spec.loss(rows, self.parameter)
        if values.shape != counted.shape:  # a term of a plugin
            why = f"The term gives values of shape {[*values.shape]} for {len(counted)} rows."
            fix = "Return one value for each row, without averaging: see docs/extending.md."
            raise ConfigError("drafter.loss", self.name, why, fix)
        return values * counted, counted

    def counted(self, rows: LossInputs) -> Bool[Tensor, " N"]:
        """Return which rows count."""
        everywhere = torch.ones_like(rows.argmax_in_vocab)
        masks = {"top1": rows.argmax_in_vocab, "token": rows.token >= 0, "all": everywhere}
        return masks[self.spec.rows]


def parse_loss(parts: Sequence[str]) -> tuple[Term, ...]:
    """Return the terms of a loss: ["0.5*jsd:0.1", "tv"]."""
    terms = tuple(_term(part) for part in parts)
    names = [term.name for term in terms]
    if not terms or len(set(names)) < len(names):
        why = "A loss is one term or several different ones."
        raise ConfigError("drafter.loss", list(parts), why, _syntax())
    return terms


def _term(text: str) -> Term:
    number = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
    match = re.fullmatch(rf"(?:({number})\*)?([a-z][a-z0-9_]*)(?::({number}))?", text)
    spec = LOSSES.get(match[2]) if match else None
    if match is None or spec is None:
        fix = f"{_syntax()} {OWN_PART}"
        raise ConfigError("drafter.loss", text, "This is not a term.", fix)
    weight, name, parameter = float(match[1] or 1.0), match[2], match[3]
    if parameter and spec.default is None:
        raise ConfigError("drafter.loss", text, f"{name} takes no number.", _syntax())
    if weight == 0:
        raise ConfigError("drafter.loss", text, "A term of weight 0 has no effect.", "Remove it.")
    check_interval("", weight, f"drafter.loss: the weight of {name}")
    value = float(parameter) if parameter else spec.default or 0.0
    check_interval(spec.interval, value, f"drafter.loss: the number of {name}")
    return Term(weight, name, value)


def _syntax() -> str:
    return f"Write weight*name or name, of: {', '.join(LOSSES)}."


def parse_depth_weights(text: str, depths: int) -> list[float]:
    """Return the weights of the losses of depths 1, 2, ...

        first             1 0 0        only guesses from a true state
        geometric:0.8     1 .8 .64     EAGLE-3
        exponential:7     1 .87 .75    exp(-(depth - 1) / 7) (DFlash)
        normalised:0.6    .51 .31 .18  the same, summing to 1 (FastMTP)
        mean:0.3          .1 .1 .1     an equal share for each (DeepSeek-V3)
        1/0.5/0.25        as written, one per depth

    Any other text raises a `ConfigError`.
    """
    name, _, number = text.partition(":")
    try:
        if name == "first" and not number:
            weights = [1.0] + [0.0] * (depths - 1)
        elif name in ("geometric", "normalised"):
            rate = float(number)
            weights = [rate**d for d in range(depths)] if math.isfinite(rate) else []
        elif name == "exponential":
            scale = float(number)
            weights = [math.exp(-d / scale) for d in range(depths)] if scale > 0 else []
        elif name == "mean":
            weights = [float(number) / depths] * depths
        else:
            weights = [float(part) for part in text.split("/")]
    except (ValueError, OverflowError):
        weights = []
    if 0 < len(weights) == depths and all(0 <= w < math.inf for w in weights) and any(weights):
        total = sum(weights) if name == "normalised" else 1.0
        return [weight / total for weight in weights]
    raise ConfigError(
        "drafter.depth_weights", text, f"This does not give weights to {depths} depths.",
        "Use first, geometric:0.8, exponential:7, normalised:0.6, mean:0.3, or one number per "
        "depth: 1/0.5/0.25.",
    )  # fmt: skip


def survival_weights(
    factors: Float[Tensor, "D R"], counted: Bool[Tensor, "D R"]
) -> Float[Tensor, "D R"]:
    """Return for each depth the sum, over it and the deeper ones, of the products up to each.

    A guess that is not counted has the factor 1 and adds nothing. Factors .5 .8 .5, all counted:
    products .5 .4 .2, weights 1.1 .6 .2.

    Source: D-PACE, arXiv:2605.18810.
    """
    products = torch.where(counted, factors, 1.0).cumprod(0) * counted
    return products.flip(0).cumsum(0).flip(0)


# ---- the terms ----


def soft_cross_entropy(rows: LossInputs, _: float) -> Float[Tensor, " N"]:
    """-sum_v p(v) log q(v)."""
    out: Tensor = _SoftCrossEntropy.apply(rows.logits, rows.p)  # type: ignore[no-untyped-call]
    return out


def soft_cross_entropy_reference(rows: LossInputs, _: float) -> Float[Tensor, " N"]:
    """Soft cross-entropy as the formula reads, the reference in tests."""
    return -(rows.p.float() * rows.log_q).sum(-1)


def kl(rows: LossInputs, _: float) -> Float[Tensor, " N"]:
    """Forward KL(p | q): soft cross-entropy minus the teacher's entropy."""
    p = rows.p.float()
    return soft_cross_entropy(rows, 0.0) + torch.xlogy(p, p).sum(-1)


def reverse_kl(rows: LossInputs, _: float) -> Float[Tensor, " N"]:
    """KL(q | p) = sum_v q(v) log(q(v) / p(v)): mode-seeking."""
    log_p = rows.p.float().clamp(min=torch.finfo(torch.float32).tiny).log()
    return (rows.log_q.exp() * (rows.log_q - log_p)).sum(-1)


def jsd(rows: LossInputs, beta: float) -> Float[Tensor, " N"]:
    """Beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q."""
    p, q = rows.p.float(), rows.log_q.exp()
    log_m = (beta * p + (1 - beta) * q).clamp(min=torch.finfo(torch.float32).tiny).log()
    left = torch.xlogy(p, p) - p * log_m
    return (beta * left + (1 - beta) * q * (rows.log_q - log_m)).sum(-1)


def total_variation(rows: LossInputs, _: float) -> Float[Tensor, " N"]:
    """1 - sum_v min(p(v), q(v)): the probability that sampling rejects."""
    return 1 - rows.alpha


def likelihood_of_acceptance(rows: LossInputs, _: float) -> Float[Tensor, " N"]:
    """-log sum_v min(p(v), q(v)): total variation, steeper where acceptance is rare."""
    return -rows.alpha.clamp(min=FLOOR).log()


def hybrid(rows: LossInputs, eta: float) -> Float[Tensor, " N"]:
    """Return s KL(p | q) + (1 - s)(1 - alpha) with s = exp(-eta alpha), without gradient through s.

    The KL is left out where the target's top-1 token is not in the draft vocabulary.
    """
    share = torch.exp(-eta * rows.alpha.detach())
    return share * kl(rows, 0.0) * rows.argmax_in_vocab + (1 - share) * (1 - rows.alpha)


def hard_cross_entropy(rows: LossInputs, _: float) -> Float[Tensor, " N"]:
    """-log q(the text's token)."""
    return -rows.log_q.gather(-1, rows.token.clamp(min=0)[:, None])[:, 0]


def top_k(rows: LossInputs, count: float) -> Float[Tensor, " N"]:
    """-sum p(v) log q(v) over the target's `count` most probable tokens, not renormalised."""
    best = rows.p_full.topk(min(int(count), rows.p_full.shape[-1]), dim=-1)
    return -(best.values.float() * rows.log_q.gather(-1, best.indices)).sum(-1)


def smooth_l1(rows: LossInputs, beta: float) -> Float[Tensor, " N"]:
    """Smooth-L1 between the states, averaged over the hidden size."""
    each = F.smooth_l1_loss(rows.state.float(), rows.feature.float(), reduction="none", beta=beta)
    return each.mean(-1)


def confidence(rows: LossInputs, _: float) -> Float[Tensor, " N"]:
    """-alpha log c - (1 - alpha) log(1 - c), without gradient through alpha (DSpark)."""
    log_c, alpha = rows.confidence(rows.log_q).clamp(max=-1e-6), rows.alpha.detach()
    return -alpha * log_c - (1 - alpha) * torch.log(-torch.expm1(log_c))


def renyi_half(rows: LossInputs, _: float = 0.0) -> Float[Tensor, " N"]:
    """-2 log sum_v sqrt(p(v) q(v)): Renyi's divergence of order one half."""
    p = rows.p_full.float().clamp(min=FLOOR)
    return -2 * torch.logsumexp((p.log() + rows.log_q) / 2, -1)


def label_survival(rows: LossInputs, floor: float) -> Float[Tensor, " N"]:
    """(1 - floor) q(the text's token) + floor (D-PACE)."""
    return (1 - floor) * torch.exp(-hard_cross_entropy(rows, 0.0)) + floor


def acceptance_survival(rows: LossInputs, floor: float) -> Float[Tensor, " N"]:
    """(1 - floor) alpha + floor (D-PARD)."""
    return (1 - floor) * rows.alpha + floor


class _SoftCrossEntropy(torch.autograd.Function):
    """Soft cross-entropy that saves one [N, Vd] buffer, its gradient q * sum(p) - p."""

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


LOSSES: Registry[TermSpec] = Registry("loss", TermSpec, {
    "soft_ce": TermSpec(soft_cross_entropy, "cross-entropy under the target's distribution"),
    "soft_ce_reference": TermSpec(soft_cross_entropy_reference, "the same, as the formula reads"),
    "kl": TermSpec(kl, "forward KL(p|q)"),
    "reverse_kl": TermSpec(reverse_kl, "reverse KL(q|p) (DistillSpec, arXiv:2310.08461)"),
    "jsd": TermSpec(jsd, "Jensen-Shannon with beta (DistillSpec)", "top1", 0.5, "(0, 1)"),
    "tv": TermSpec(total_variation, "total variation, the rejection rate", "all",
                   needs_full_head=True),
    "lk": TermSpec(likelihood_of_acceptance, "-log alpha (LK, arXiv:2602.23881)", "all",
                   needs_full_head=True),
    "lk_hybrid": TermSpec(hybrid, "adaptive mix of kl and tv with eta (LK)", "all", 3.0, "(0, inf)",
                          needs_full_head=True),
    "ce": TermSpec(hard_cross_entropy, "cross-entropy of the text's token", "token"),
    "topk": TermSpec(top_k, "the target's K most probable tokens (HASS)", "all", 10.0, "[1, inf)",
                     needs_full_head=True),
    "confidence": TermSpec(confidence, "confidence against acceptance (DSpark)", "all",
                           needs_full_head=True),
    "renyi_half": TermSpec(renyi_half, "Renyi divergence of order 1/2", "all",
                           needs_full_head=True),
    "dpace": TermSpec(hard_cross_entropy, "ce, weighted by the survival of its depth (D-PACE)",
                      "token", 0.5, "[0, 1)", survival=label_survival),
    "dpard": TermSpec(renyi_half, "renyi_half, weighted by the survival of its depth (D-PARD)",
                      "all", 0.5, "[0, 1)", needs_full_head=True, survival=acceptance_survival),
    "smooth_l1": TermSpec(smooth_l1, "Smooth-L1 to the target's next state (EAGLE)", "all", 1.0,
                          "(0, inf)", needs_states=True),
})  # fmt: skip
