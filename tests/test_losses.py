"""Loss terms: against loops over tokens, by hand, at extreme inputs; the syntax of a loss."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.train.losses import (
    LOSSES,
    LossInputs,
    Term,
    parse_depth_weights,
    parse_loss,
    survival_weights,
)

SOFT = ("soft_ce", "soft_ce_reference")
each_soft = pytest.mark.parametrize("name", SOFT)
each_term = pytest.mark.parametrize("name", LOSSES)
LN2 = math.log(2)


def rows_of(logits: Tensor, p: Tensor, **changes: Any) -> LossInputs:
    count = len(logits)
    fields: dict[str, Any] = {
        "p_full": p,
        "argmax_in_vocab": torch.ones(count, dtype=torch.bool),
        "token": torch.zeros(count, dtype=torch.long),
        "state": torch.zeros(count, 3),
        "feature": torch.zeros(count, 3),
        **changes,
    }
    return LossInputs(logits, p, **fields)


def value_and_slope(name: str, logits: Tensor, p: Tensor, **changes: Any) -> tuple[Tensor, Tensor]:
    """The term per row, and the gradient by the logits when row i is weighed by i + 1."""
    leaf = logits.clone().requires_grad_()
    (term,) = parse_loss([name])
    values, _ = term(rows_of(leaf, p, **changes))
    values.backward(torch.arange(1.0, len(values) + 1))
    assert leaf.grad is not None
    return values.detach(), leaf.grad


def random_rows(
    seed: int, rows: int, size: int, scale: float, mass: float
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, size, generator=generator)
    teacher = (scale * torch.randn(rows, size, generator=generator)).softmax(-1) * mass
    return logits, teacher


# ---- reference: one token at a time, in float64 --------------------------------------------------


def reference(name: str, number: float, row: int, rows: LossInputs) -> Any:
    """The term at one row as its paper's formula reads, in loops over the vocabulary."""
    logits = rows.logits[row].double()
    total = sum(value.exp() for value in logits)
    q = [value.exp() / total for value in logits]
    p = [value.double() for value in rows.p[row]]
    whole = [value.double() for value in rows.p_full[row]]
    alpha = sum(torch.minimum(a, b) for a, b in zip(whole, q, strict=True))

    def kl(left: list[Tensor], right: list[Tensor]) -> Tensor:
        pairs = zip(left, right, strict=True)
        return sum((a * (a / b).log() for a, b in pairs if a > 0), torch.tensor(0.0).double())

    if name in SOFT:
        return sum(-a * b.log() for a, b in zip(p, q, strict=True))
    if name == "kl":
        return kl(p, q)
    if name == "reverse_kl":
        return kl(q, p)
    if name == "jsd":
        middle = [number * a + (1 - number) * b for a, b in zip(p, q, strict=True)]
        return number * kl(p, middle) + (1 - number) * kl(q, middle)
    if name == "tv":
        return 1 - alpha
    if name == "lk":
        return -torch.as_tensor(alpha).log()
    if name == "lk_hybrid":
        share = math.exp(-number * float(torch.as_tensor(alpha).detach()))
        return share * kl(p, q) + (1 - share) * (1 - alpha)
    if name == "confidence":  # of the largest probability
        share, c = float(torch.as_tensor(alpha).detach()), torch.stack(q).max()
        return -share * c.log() - (1 - share) * (1 - c).log()
    if name in ("renyi_half", "dpard"):  # the objective multiplies dpard and dpace by weights
        return -2 * sum((a * b).sqrt() for a, b in zip(whole, q, strict=True)).log()
    if name in ("ce", "dpace"):
        return -q[int(rows.token[row])].log()
    if name == "topk":
        best = sorted(range(len(q)), key=lambda v: -float(whole[v]))[: int(number)]
        return sum((-whole[v] * q[v].log() for v in best), torch.tensor(0.0).double())
    pairs = zip(rows.state[row].double(), rows.feature[row].double(), strict=True)
    gaps = [(a - b).abs() for a, b in pairs]
    each = [g * g / 2 / number if g < number else g - number / 2 for g in gaps]
    return sum(each, torch.tensor(0.0).double()) / len(each)


@each_term
@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), size=st.integers(2, 12), mass=st.floats(0.3, 1.0))
def test_value_and_gradient_match_reference(name: str, seed: int, size: int, mass: float) -> None:
    """Gradients by logits and states; `p_full` is a share of the teacher, which sums to 1."""
    logits, p = random_rows(seed, 3, size, 1.5, 1.0)
    generator = torch.Generator().manual_seed(seed)
    states = 2 * torch.randn(2, 3, 4, generator=generator)
    token = torch.randint(size, (3,), generator=generator)
    (term,) = parse_loss([name if name != "topk" else "topk:2"])
    results = []
    for slow in (False, True):
        leaves = [x.clone().requires_grad_() for x in (logits, states[0])]
        rows = rows_of(
            leaves[0], p, p_full=mass * p, token=token, state=leaves[1], feature=states[1]
        )
        values = (
            torch.stack([reference(term.name, term.parameter, i, rows) for i in range(3)])
            if slow
            else term(rows)[0]
        )
        values.float().backward(torch.arange(1.0, 4.0))
        results.append((values.float(), *(leaf.grad for leaf in leaves)))
    for fast, slow_part in zip(*results, strict=True):
        assert (fast is None) == (slow_part is None)
        if fast is not None:
            torch.testing.assert_close(fast, slow_part, atol=2e-5, rtol=2e-5)


def test_every_term_has_a_reference() -> None:
    """`reference` computes Smooth-L1 for unknown names, so a new term fails above."""
    assert set(LOSSES) == {
        *SOFT, "kl", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid", "ce", "topk", "smooth_l1",
        "confidence", "renyi_half", "dpace", "dpard",
    }  # fmt: skip


# ---- identities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid"])
def test_divergences_are_zero_at_equal_distributions(name: str) -> None:
    """At q = p the gradient of the smooth terms is zero too."""
    _, p = random_rows(2, 4, 9, 2.0, mass=1.0)
    values, slope = value_and_slope(name, p.log(), p)
    torch.testing.assert_close(values, torch.zeros(4), atol=1e-5, rtol=0)
    if name in ("kl", "reverse_kl", "jsd"):
        torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-6, rtol=0)


def test_lk_gradient_is_tv_gradient_over_alpha() -> None:
    logits, p = random_rows(5, 3, 8, 1.0, mass=0.7)
    _, tv = value_and_slope("tv", logits, p)
    _, lk = value_and_slope("lk", logits, p)
    torch.testing.assert_close(lk, tv / rows_of(logits, p).alpha[:, None])


def test_hybrid_interpolates_from_kl_to_tv() -> None:
    logits, p = random_rows(6, 3, 8, 1.0, mass=1.0)
    for eta, name in ((1e-6, "kl"), (1e4, "tv")):
        hybrid, slope = value_and_slope(f"lk_hybrid:{eta}", logits, p)
        plain, expected = value_and_slope(name, logits, p)
        torch.testing.assert_close(hybrid, plain, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(slope, expected, atol=1e-4, rtol=1e-4)


def test_topk_of_whole_vocabulary_equals_soft_ce() -> None:
    logits, p = random_rows(7, 3, 8, 1.0, mass=1.0)
    topk, _ = value_and_slope("topk:8", logits, p)
    torch.testing.assert_close(topk, value_and_slope("soft_ce", logits, p)[0])


def test_acceptance_terms_use_p_full_of_reduced_vocabulary() -> None:
    """Half of the target's mass cannot be drafted: no draft is accepted more often than that."""
    p = torch.tensor([[0.5, 0.5]])
    values, _ = value_and_slope("tv", p.log(), p, p_full=p / 2)
    torch.testing.assert_close(values, torch.tensor([0.5]))
    torch.testing.assert_close(
        value_and_slope("kl", p.log(), p, p_full=p / 2)[0], torch.zeros(1), atol=1e-6, rtol=0
    )


def test_terms_mask_rows_outside_draft_vocabulary() -> None:
    """Row 0: the target's top-1 token is outside. Row 1: the text's token is."""
    logits, p = random_rows(8, 2, 5, 1.0, mass=1.0)
    rows = rows_of(
        logits, p, argmax_in_vocab=torch.tensor([False, True]), token=torch.tensor([3, -1])
    )
    counted = {name: parse_loss([name])[0](rows)[1].tolist() for name in ("kl", "ce", "tv")}
    assert counted == {"kl": [False, True], "ce": [True, False], "tv": [True, True]}
    values, _ = parse_loss(["kl"])[0](rows)
    assert values[0] == 0 < values[1]


# ---- soft cross-entropy --------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 5),
    size=st.integers(1, 40),
    scale=st.floats(0.01, 30.0),
    mass=st.floats(0.0, 1.0),
)
def test_soft_cross_entropy_equals_the_formula_in_float64(
    seed: int, rows: int, size: int, scale: float, mass: float
) -> None:
    """A teacher need not sum to 1 (it may be a part of a distribution)."""
    logits, teacher = random_rows(seed, rows, size, scale, mass)
    nats, slope = value_and_slope("soft_ce", logits, teacher)
    leaf = logits.double().requires_grad_()
    exact = -(teacher.double() * leaf.log_softmax(-1)).sum(-1)
    exact.backward(torch.arange(1.0, rows + 1).double())
    assert leaf.grad is not None
    tolerance = 1e-5 * max(1.0, scale)
    torch.testing.assert_close(nats.double(), exact.detach(), atol=tolerance, rtol=1e-5)
    torch.testing.assert_close(slope.double(), leaf.grad, atol=1e-5, rtol=1e-5)


@each_soft
def test_soft_ce_of_one_row_by_hand(name: str) -> None:
    """With q = (1/2, 1/4, 1/4), p = (1/4, 3/4, 0): 1/4 ln 2 + 3/4 ln 4; the gradient is q - p."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log() + 7.0  # softmax ignores a shift
    nats, slope = value_and_slope(name, logits, torch.tensor([[0.25, 0.75, 0.0]]))
    torch.testing.assert_close(nats, 1.75 * torch.tensor([2.0]).log())
    torch.testing.assert_close(slope, torch.tensor([[0.25, -0.5, 0.25]]))


@each_soft
def test_gradient_of_partial_teacher(name: str) -> None:
    logits, teacher = random_rows(1, 1, 6, 2.0, mass=0.3)
    _, slope = value_and_slope(name, logits, teacher)
    torch.testing.assert_close(slope, 0.3 * logits.softmax(-1) - teacher)


@each_soft
def test_soft_ce_is_minimal_at_teacher(name: str) -> None:
    """Gibbs: cross-entropy >= entropy, with equality and zero gradient at q = p."""
    logits, teacher = random_rows(2, 4, 9, 2.0, mass=1.0)
    entropy = torch.distributions.Categorical(probs=teacher).entropy()
    perfect, slope = value_and_slope(name, teacher.log(), teacher)
    torch.testing.assert_close(perfect, entropy)
    torch.testing.assert_close(slope, torch.zeros_like(slope))
    assert (value_and_slope(name, logits, teacher)[0] > entropy).all()


@pytest.mark.parametrize("name", [*SOFT, "ce"])
def test_one_hot_teacher_equals_cross_entropy(name: str) -> None:
    logits, _ = random_rows(3, 3, 5, 1.0, 1.0)
    labels = torch.tensor([4, 0, 2])
    teacher = torch.nn.functional.one_hot(labels, 5).float()
    ordinary = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(value_and_slope(name, logits, teacher, token=labels)[0], ordinary)


@pytest.mark.parametrize("name", [*SOFT, "ce", "topk:1000"])
def test_softmax_and_sums_run_in_float32(name: str) -> None:
    """1000 equal bfloat16 logits cost ln 1000; bfloat16 arithmetic gives 6.9 +- 0.016."""
    logits = torch.zeros(2, 1000, dtype=torch.bfloat16)
    nats, slope = value_and_slope(name, logits, torch.full((2, 1000), 1e-3))
    assert nats.dtype == torch.float32
    assert slope.dtype == torch.bfloat16
    torch.testing.assert_close(nats, torch.full((2,), 1000.0).log(), atol=1e-5, rtol=0)


@each_soft
def test_huge_logits_stay_finite(name: str) -> None:
    """The draft is (1, e^-2e4, e^-4e4): the cost is 2e4 nats, not infinity."""
    logits = torch.tensor([[1e4, -1e4, -3e4]])
    nats, slope = value_and_slope(name, logits, torch.tensor([[0.0, 1.0, 0.0]]))
    torch.testing.assert_close(nats, torch.tensor([2e4]))
    torch.testing.assert_close(slope, torch.tensor([[1.0, -1.0, 0.0]]))


@each_term
def test_one_hot_distributions_stay_finite(name: str) -> None:
    logits, p = torch.tensor([[200.0, 0.0, -200.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    values, slope = value_and_slope(name, logits, p) if name != "smooth_l1" else (p, p)
    assert values.isfinite().all()
    assert slope.isfinite().all()


def test_soft_ce_saves_one_matrix_for_backward() -> None:
    """The formula saves two: the teacher and the softmax."""
    saved: list[int] = []

    def record(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    logits, teacher = random_rows(4, 8, 16, 1.0, 1.0)
    for name, expected in zip(SOFT, (1, 2), strict=True):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            parse_loss([name])[0].spec.loss(rows_of(logits.clone().requires_grad_(), teacher), 0.0)
        assert sum(size == 8 * 16 for size in saved) == expected


# ---- syntax --------------------------------------------------------------------------------------


def test_parse_loss() -> None:
    assert parse_loss(["smooth_l1", "0.1*soft_ce", "2*jsd:0.1", "lk_hybrid:3e-1"]) == (
        Term(1.0, "smooth_l1", 1.0),
        Term(0.1, "soft_ce", 0.0),
        Term(2.0, "jsd", 0.1),
        Term(1.0, "lk_hybrid", 0.3),
    )


@pytest.mark.parametrize(
    "parts",
    [
        [], ["nats"], ["tv", "tv"], ["soft_ce:3"], ["-1*tv"], ["tv*0.5"], ["1..2*tv"], ["3*"],
        ["0*tv"], ["jsd:0"], ["jsd:2"], ["topk:0"], ["smooth_l1:0"], ["lk_hybrid:0"],
    ],
)  # fmt: skip
def test_parse_loss_refuses_invalid_terms(parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.loss"):
        parse_loss(parts)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("first", [1, 0, 0]),
        ("geometric:0.8", [1, 0.8, 0.64]),
        ("exponential:2", [1, 0.6065307, 0.3678794]),
        ("normalised:0.5", [4 / 7, 2 / 7, 1 / 7]),
        ("mean:0.3", [0.1, 0.1, 0.1]),
        ("3/2/0", [3, 2, 0]),
    ],
)
def test_parse_depth_weights(text: str, weights: list[float]) -> None:
    assert parse_depth_weights(text, 3) == pytest.approx(weights)


def test_normalised_weights_match_fastmtp_paper() -> None:
    """arXiv:2509.18362: .51, .31, .18."""
    assert [round(w, 2) for w in parse_depth_weights("normalised:0.6", 3)] == [0.51, 0.31, 0.18]


@pytest.mark.parametrize(
    "text", ["", "last", "1/2", "geometric", "mean:x", "0/0/0", "-1/1/1", "nan/1/1"]
)
def test_parse_depth_weights_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.depth_weights"):
        parse_depth_weights(text, 3)


# ---- weights by survival -------------------------------------------------------------------------


def test_survival_weights_equal_a_triple_loop_with_a_hole_in_the_mask() -> None:
    """A guess that does not count has the factor 1 in products, and adds nothing to sums."""
    factors = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    counted = torch.ones(5, 7).bool()
    counted[2, 3] = counted[0, 4] = counted[4, 5] = False
    counted[:, 6] = False
    expected = torch.zeros(5, 7)
    for row in range(7):
        for depth in range(5):
            for last in range(depth, 5):
                product = 1.0
                for i in range(last + 1):
                    product *= float(factors[i, row]) if counted[i, row] else 1.0
                expected[depth, row] += product if counted[last, row] else 0.0
    torch.testing.assert_close(survival_weights(factors, counted), expected)


def test_renyi_half_by_hand() -> None:
    """-2 log (sqrt(.5 * .25) + sqrt(.5 * .75)), and 0 where draft and target are equal."""
    p, q = torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([[0.25, 0.75], [0.25, 0.75]])
    none = torch.zeros(0, 1)
    inputs = LossInputs(q.log(), p, p, torch.ones(2).bool(), torch.zeros(2).long(), none, none)
    found = LOSSES["renyi_half"].loss(inputs, 0.0)
    torch.testing.assert_close(found, torch.tensor([0.0693365, 0.0]), atol=1e-5, rtol=1e-4)
