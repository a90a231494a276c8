"""Warping and drawing, against hand-made rows, transformers' warpers and exact laws."""

import math
from itertools import cycle
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider.models.decode import sampling as sampling_room
from outrider.models.decode.sampling import (
    BLOCK,
    CANDIDATES,
    LONG,
    Coins,
    GeneratorCoins,
    bound,
    draw,
    first_argmax,
    first_max,
    invert,
    warp,
)

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
def test_a_hand_made_row_is_warped_as_calculated(
    temperature: float, top_k: int, top_p: float, expected: list[float]
) -> None:
    """The last two rows pin the order: temperature, then top-k, then top-p."""
    warped = warp(logits_of(ROW), temperature, top_k, top_p)
    assert warped.tolist()[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-9)]
)
def test_every_way_of_being_greedy_takes_the_lowest_id_of_equals(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 2.0, 2.0, 2.0]])
    assert warp(logits, temperature, top_k, top_p).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_a_vanishing_temperature_is_greedy_and_shares_between_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.999, -1.0], [2.0, 2.0, 1.0, 1.0]])
    assert warp(logits, 1e-30).tolist() == [[0, 1, 0, 0], [0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("tied", [False, True])
def test_sorting_all_ranks_as_searching_does(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU: the same tokens kept, ties and all."""
    dice = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(6, 700, generator=dice)
    logits = logits.round() if tied else logits
    knobs = [(0.7, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 40, 0.8, 0.01), (1.0, 0, 1e-4, 0.0)]
    searched = [sampling_room.warp(logits, *knob) for knob in knobs]
    monkeypatch.setattr(sampling_room, "_ranked", sampling_room._sorted)
    monkeypatch.setattr(
        sampling_room, "_cover", lambda probs, _: sampling_room._sorted(probs, probs.shape[-1])
    )
    for before, knob in zip(searched, knobs, strict=True):
        after = sampling_room.warp(logits, *knob)
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
def test_what_lies_below_the_bound_is_what_is_dropped(
    temperature: float, bounds: tuple[int, float, float]
) -> None:
    logits = 6 * torch.randn(2, 40, 300, generator=torch.Generator().manual_seed(bounds[0]))
    kept = warp(logits.view(80, 300), temperature, *bounds).view_as(logits) > 0
    assert (logits >= bound(logits, temperature, *bounds)).equal(kept)


def test_the_bound_of_a_vanishing_temperature_is_finite() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]])
    for bounds in ((0, 0.5, 0.0), (2, 0.5, 0.1), (0, 1.0, 0.1)):
        assert bound(logits, 1e-30, *bounds).item() == 3


def test_the_bound_of_a_flat_row_is_looked_for_among_a_few() -> None:
    logits = torch.linspace(1, 0, 4 * CANDIDATES)[None]
    assert bound(logits, 1.0, 0, 0.99, 0.0).equal(logits[:, CANDIDATES - 1 : CANDIDATES])


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


def test_each_token_owns_the_slice_of_its_probability() -> None:
    """Cumulative law 1/8, 1/8, 5/8, 1, 1: exact in binary, so the ends of slices are too.

    A uniform that was rounded up to 1 still belongs to the last token that has mass.
    """
    row = torch.tensor([0.125, 0.0, 0.5, 0.375, 0.0])
    uniforms = [0.0, 0.1249, 0.125, 0.6249, 0.625, 1 - 2**-53, 1.0]
    tokens = invert(row.expand(7, 5), torch.tensor(uniforms, dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3, 3]


def test_a_grid_of_uniforms_counts_out_a_large_vocabulary_exactly() -> None:
    """Weights are multiples of 1/S, so S midpoints must hit each token weight-many times."""
    vocab = 3 * BLOCK + 17
    weights = torch.randint(0, 4, (vocab,), generator=seeded())
    total = int(weights.sum())
    uniforms = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    tokens = invert((weights / total).expand(total, vocab), uniforms)
    assert torch.equal(torch.bincount(tokens, minlength=vocab), weights)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 1000]),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 3.0]),
    uniform=st.one_of(st.sampled_from([0.0, 1 - 2**-53, 0.5]), st.floats(0, 1, exclude_max=True)),
)
def test_a_token_of_probability_zero_is_never_drawn(
    seed: int, vocab: int, scale: float, uniform: float
) -> None:
    """Whatever the sum of the row and however close the uniform to the ends of slices."""
    weights = torch.rand(1, vocab, generator=seeded(seed))
    row = scale * weights * (torch.rand(1, vocab, generator=seeded(seed + 1)) < 0.3)
    row[0, seed % vocab] = scale
    token = int(invert(row, torch.tensor([uniform], dtype=torch.float64)))
    assert 0 <= token < vocab
    assert row[0, token] > 0


def test_drawing_follows_the_row_and_repeats_with_the_seed() -> None:
    """Chi-square over 20,000 draws; the seed is fixed, so the outcome is too."""
    rows = torch.tensor(ROW).expand(20_000, 4)
    tokens = draw(rows, seeded(3))
    counts = torch.bincount(tokens, minlength=4).numpy()
    assert chisquare(counts, [20_000 * p for p in ROW]).pvalue > 1e-3
    assert torch.equal(tokens, draw(rows, seeded(3)))
    assert not torch.equal(tokens, draw(rows, seeded(4)))


def test_rows_are_drawn_independently() -> None:
    """The joint law of two rows drawn together is the product of theirs."""
    generator = seeded(5)
    rows = torch.tensor([ROW, ROW[::-1]])
    pairs = [draw(rows, generator).tolist() for _ in range(2000)]
    counts = torch.bincount(torch.tensor([4 * a + b for a, b in pairs]), minlength=16).numpy()
    expected = [2000 * a * b for a in ROW for b in ROW[::-1]]
    assert chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_row_without_finite_mass_is_refused(bad: float) -> None:
    rows = torch.tensor([[0.5, 0.5], [0.0, bad]])
    with pytest.raises(ValueError, match="positive mass"):
        draw(rows, seeded())


def test_coins_flip_with_their_chance_and_are_sure_at_the_ends() -> None:
    coins = GeneratorCoins([Random(0)], 5000)
    assert isinstance(coins, Coins)
    chances = torch.tensor([1.0, 0.0, 0.3])[:, None].expand(3, 5000)
    sure, never, some = (int(coins.flip(chances[i : i + 1]).sum()) for i in range(3))
    assert (sure, never) == (5000, 0)
    assert chisquare([some, 5000 - some], [1500, 3500]).pvalue > 1e-3


def test_coins_are_fresh_every_time() -> None:
    """R6: two rounds from one object differ; two objects on equal seeds agree."""
    coins, twin = (GeneratorCoins([Random(8)], 5) for _ in range(2))
    rows = torch.ones(1, 5, 1000) / 1000
    first, second = coins.draw(rows).tolist(), coins.draw(rows).tolist()
    assert first != second
    assert [first, second] == [twin.draw(rows).tolist() for _ in range(2)]


def test_a_prompts_coins_depend_neither_on_its_neighbours_nor_on_the_padding() -> None:
    """Two of five numbers asked for, alone and in a batch that asks for four."""
    rows = torch.ones(1, 1, 1000).expand(2, 4, 1000) / 1000
    alone = GeneratorCoins([Random(8)], 5)
    both = GeneratorCoins([Random(3), Random(8)], 5)
    for _ in range(3):
        single = alone.draw(rows[:1, :2])
        assert torch.equal(single[0], both.draw(rows)[1, :2])


class Given(Random):
    """Says what it was told to, turn and turn about."""

    def __new__(cls, *numbers: float) -> "Given":
        return super().__new__(cls)

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = cycle(numbers)

    def random(self) -> float:
        return next(self.numbers)


def test_a_single_row_is_cut_into_the_same_slices() -> None:
    """The host searches it by itself."""
    row = torch.tensor([[0.125, 0.0, 0.5, 0.375, 0.0]])
    uniforms = [0.0, 0.1249, 0.125, 0.6249, 0.625, 1 - 2**-53]
    coins = GeneratorCoins([Given(*uniforms)], 1)
    assert [coins.pick(row)[0] for _ in uniforms] == [0, 0, 2, 2, 3, 3]
    assert [int(coins.draw(row[None])) for _ in uniforms] == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_single_row_without_finite_mass_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive mass"):
        GeneratorCoins([Random(0)], 1).pick(torch.tensor([[0.0, bad]]))


def test_what_the_host_is_told_is_what_the_device_would_be() -> None:
    """Tosses are flips; a pick takes one number of each prompt, alone and among others."""
    rows = torch.rand(3, 1000, generator=seeded())
    chances = torch.rand(3, 4, dtype=torch.float64, generator=seeded())
    tossing, flipping, picking = (
        GeneratorCoins([Random(n) for n in range(3)], 4) for _ in range(3)
    )
    for _ in range(5):
        assert tossing.toss(chances.tolist()) == flipping.flip(chances).tolist()
    alone = [GeneratorCoins([Random(n)], 4) for n in range(3)]
    for _ in range(5):
        told = [one.pick(rows[n : n + 1])[0] for n, one in enumerate(alone)]
        assert picking.pick(rows) == told
    uniforms = torch.tensor([[Random(n).random()] for n in range(3)], dtype=torch.float64)
    first = GeneratorCoins([Random(n) for n in range(3)], 4).pick(rows)
    assert first == invert(rows[:, None], uniforms)[:, 0].tolist()


def test_slices_of_a_large_vocabulary_do_not_depend_on_the_batch() -> None:
    """Numbers at the very ends of slices, where another order of summing would tell."""
    rows = torch.rand(2, 3 * LONG, generator=seeded())
    ends = rows[0].cumsum(0, dtype=torch.float64)
    marks = (ends / ends[-1])[:: LONG // 8].tolist()
    alone, both = (GeneratorCoins([Given(*marks) for _ in range(n)], 1) for n in (1, 2))
    for _ in range(2):
        assert [alone.pick(rows[:1])[0] for _ in marks] == [both.pick(rows)[0] for _ in marks]
        told = [int(alone.draw(rows[:1, None])) for _ in marks]
        assert told == [int(both.draw(rows[:, None])[0]) for _ in marks]


def test_more_coins_than_foreseen_are_refused() -> None:
    with pytest.raises(ValueError, match="3 random numbers at once, where 2 were foreseen"):
        GeneratorCoins([Random(0)], 2).flip(torch.ones(1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [49152, 8192, 1000])
def test_first_argmax_is_the_lowest_index_of_the_largest(size: int, dtype: torch.dtype) -> None:
    """Rounded logits tie often; both must then name the first."""
    logits = torch.randn(7, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3] = logits[3].round()
    logits[4] = 0.0
    best = logits.amax(-1, keepdim=True)
    expected = [int(torch.nonzero(row == top)[0]) for row, top in zip(logits, best, strict=True)]
    assert first_argmax(logits).tolist() == expected
    assert first_argmax(logits[:0]).tolist() == []
    place, largest = first_max(logits)
    assert place.tolist() == expected
    assert torch.equal(largest, best[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [49152, 1000])
def test_what_is_no_number_is_the_largest(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 7], logits[1, 8], logits[2, 9] = float("nan"), float("inf"), float("-inf")
    logits[1, 9] = float("nan")
    _, largest = first_max(logits)
    assert largest.isfinite().tolist() == [False, False, True, True]
