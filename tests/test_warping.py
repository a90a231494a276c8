"""Warping, against hand-made rows and transformers' warpers."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider.models.decode import warping
from outrider.models.decode.warping import CANDIDATES, approximate_cutoff, warp

ROW = [0.1, 0.4, 0.2, 0.3]


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (0.5, 0, 1.0, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),  # squares, over their sum 0.30
        (0.0, 0, 1.0, [0, 1, 0, 0]),
        (1.0, 2, 1.0, [0, 4 / 7, 0, 3 / 7]),
        (1.0, 9, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (1.0, 0, 0.65, [0, 4 / 7, 0, 3 / 7]),  # 0.4 is short of 0.65, 0.3 crosses it
        (1.0, 0, 0.75, [0, 4 / 9, 2 / 9, 3 / 9]),
        (1.0, 0, 0.01, [0, 1, 0, 0]),
        (1.0, 3, 0.75, [0, 4 / 7, 0, 3 / 7]),  # 7/9 of what top-k left; 0.7 of all would need three
        (0.5, 0, 0.8, [0, 16 / 25, 0, 9 / 25]),  # 25/30 after the temperature; 0.7 before it
    ],
)
def test_warping_of_a_row_by_hand(
    temperature: float, top_k: int, top_p: float, expected: list[float]
) -> None:
    """The last two rows pin the order: temperature, then top-k, then top-p."""
    warped = warp(logits_of(ROW), temperature, top_k, top_p)
    assert warped.tolist()[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-9)]
)
def test_greedy_settings_break_ties_to_the_lowest_id(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 2.0, 2.0, 2.0]])
    assert warp(logits, temperature, top_k, top_p).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_a_vanishing_temperature_is_greedy_and_shares_between_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.999, -1.0], [2.0, 2.0, 1.0, 1.0]])
    assert warp(logits, 1e-30).tolist() == [[0, 1, 0, 0], [0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("tied", [False, True])
def test_sorting_all_ranks_as_searching_does(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method of a GPU keeps the same tokens, ties included."""
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(6, 700, generator=generator)
    logits = logits.round() if tied else logits
    knobs = [(0.7, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 40, 0.8, 0.01), (1.0, 0, 1e-4, 0.0)]
    searched = [warping.warp(logits, *knob) for knob in knobs]
    monkeypatch.setattr(warping, "_ranked", warping._sorted)
    monkeypatch.setattr(
        warping, "_ranked_to_mass", lambda probs, _: warping._sorted(probs, probs.shape[-1])
    )
    for before, knob in zip(searched, knobs, strict=True):
        after = warping.warp(logits, *knob)
        assert torch.equal(after > 0, before > 0)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)


def test_ties_at_the_cut_go_to_the_lower_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0]])
    assert warp(logits, 1.0, top_k=3)[0].nonzero()[:, 0].tolist() == [0, 1, 4]
    assert warp(torch.zeros(1, 4), 1.0, top_p=0.5).tolist() == [[0.5, 0.5, 0.0, 0.0]]
    flat = warp(torch.zeros(2, 4096), 1.0, top_p=0.5)  # 1/4096 is exact in binary
    assert flat[1].nonzero()[:, 0].tolist() == list(range(2048))


@pytest.mark.parametrize("vocab", [7, 300, 3000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, 0, 0.9), (1.3, 20, 1.0), (1.0, 40, 0.8), (2.0, 0, 0.999), (0.3, 5, 0.5)],
)
def test_warping_agrees_with_transformers(
    vocab: int, temperature: float, top_k: int, top_p: float
) -> None:
    """An independent implementation; random logits have no ties, where the two differ."""
    logits = 3 * torch.randn(6, vocab, generator=seeded(vocab))
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    theirs = TopPLogitsWarper(top_p)(None, theirs).softmax(-1)
    torch.testing.assert_close(warp(logits, temperature, top_k, top_p), theirs)


@pytest.mark.parametrize("bounds", [
    (1, 1.0, 0.0), (7, 1.0, 0.0), (500, 1.0, 0.0), (0, 0.3, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05),
    (7, 0.9, 0.0), (7, 1.0, 0.05), (0, 0.9, 0.05), (7, 0.9, 0.05),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_below_the_cutoff_are_dropped(
    temperature: float, bounds: tuple[int, float, float]
) -> None:
    logits = 6 * torch.randn(2, 40, 300, generator=torch.Generator().manual_seed(bounds[0]))
    selected = warp(logits.view(80, 300), temperature, *bounds).view_as(logits) > 0
    assert (logits >= approximate_cutoff(logits, temperature, *bounds)).equal(selected)


def test_cutoff_at_a_vanishing_temperature_is_finite() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]])
    for bounds in ((0, 0.5, 0.0), (2, 0.5, 0.1), (0, 1.0, 0.1)):
        assert approximate_cutoff(logits, 1e-30, *bounds).item() == 3


def test_cutoff_of_a_flat_row_is_within_the_candidates() -> None:
    logits = torch.linspace(1, 0, 4 * CANDIDATES)[None]
    assert approximate_cutoff(logits, 1.0, 0, 0.99, 0.0).equal(
        logits[:, CANDIDATES - 1 : CANDIDATES]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_probabilities_are_float32_whatever_the_logits(dtype: torch.dtype) -> None:
    for temperature, top_k, top_p in [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.8, 3, 1.0), (0.8, 0, 0.9)]:
        warped = warp(torch.randn(2, 9, generator=seeded()).to(dtype), temperature, top_k, top_p)
        assert warped.dtype == torch.float32
        torch.testing.assert_close(warped.sum(-1), torch.ones(2))


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-math.inf, 5.0, 4.0]])
    for temperature in (1e-38, 1e-3, 1.0, 1e3):
        warped = warp(logits, temperature, top_k=2, top_p=0.99)
        assert warped.isfinite().all()
        assert warped[1, 0] == 0


@pytest.mark.parametrize(
    "setting", [(-0.1, 0, 1.0), (math.nan, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.01)]
)
def test_settings_out_of_range_are_refused(setting: tuple[float, int, float]) -> None:
    with pytest.raises(ValueError, match="needs temperature >= 0"):
        warp(torch.zeros(1, 3), *setting)
