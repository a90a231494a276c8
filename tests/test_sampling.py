"""Drawing tokens and flips, against exact distributions."""

import math
from itertools import cycle
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from outrider.models.decode.sampling import (
    BLOCK,
    LONG,
    GeneratorSource,
    RandomSource,
    draw,
    inverse_cdf,
)

ROW = [0.1, 0.4, 0.2, 0.3]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_each_token_has_a_slice_as_wide_as_its_probability() -> None:
    """Cumulative law 1/8, 1/8, 5/8, 1, 1: exact in binary, so the ends of slices are too.

    A uniform that was rounded up to 1 still belongs to the last token that has mass.
    """
    row = torch.tensor([0.125, 0.0, 0.5, 0.375, 0.0])
    uniforms = [0.0, 0.1249, 0.125, 0.6249, 0.625, 1 - 2**-53, 1.0]
    tokens = inverse_cdf(row.expand(7, 5), torch.tensor(uniforms, dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3, 3]


def test_grid_of_uniforms_over_a_large_vocabulary_is_exact() -> None:
    """Weights are multiples of 1/S, so S midpoints must hit each token weight-many times."""
    vocab = 3 * BLOCK + 17
    weights = torch.randint(0, 4, (vocab,), generator=seeded())
    total = int(weights.sum())
    uniforms = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    tokens = inverse_cdf((weights / total).expand(total, vocab), uniforms)
    assert torch.equal(torch.bincount(tokens, minlength=vocab), weights)


@settings(max_examples=100)
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
    token = int(inverse_cdf(row, torch.tensor([uniform], dtype=torch.float64)))
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


def test_flips_follow_their_probability_and_are_certain_at_0_and_1() -> None:
    rng = GeneratorSource([Random(0)], 5000)
    assert isinstance(rng, RandomSource)
    chances = torch.tensor([1.0, 0.0, 0.3])[:, None].expand(3, 5000)
    sure, never, some = (int(rng.flip(chances[i : i + 1]).sum()) for i in range(3))
    assert (sure, never) == (5000, 0)
    assert chisquare([some, 5000 - some], [1500, 3500]).pvalue > 1e-3


def test_random_numbers_are_fresh_every_time() -> None:
    """R6: two rounds from one object differ; two objects on equal seeds agree."""
    rng, equal_rng = (GeneratorSource([Random(8)], 5) for _ in range(2))
    rows = torch.ones(1, 5, 1000) / 1000
    first, second = rng.draw(rows).tolist(), rng.draw(rows).tolist()
    assert first != second
    assert [first, second] == [equal_rng.draw(rows).tolist() for _ in range(2)]


def test_a_prompts_random_numbers_depend_neither_on_its_neighbours_nor_on_the_padding() -> None:
    """Two of five numbers requested, alone and in a batch that requests four."""
    rows = torch.ones(1, 1, 1000).expand(2, 4, 1000) / 1000
    alone = GeneratorSource([Random(8)], 5)
    both = GeneratorSource([Random(3), Random(8)], 5)
    for _ in range(3):
        single = alone.draw(rows[:1, :2])
        assert torch.equal(single[0], both.draw(rows)[1, :2])


class Given(Random):
    """Returns the given numbers in turn."""

    def __new__(cls, *numbers: float) -> "Given":
        return super().__new__(cls)

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = cycle(numbers)

    def random(self) -> float:
        return next(self.numbers)


def test_single_rows_have_the_same_slices() -> None:
    """The host searches it by itself."""
    row = torch.tensor([[0.125, 0.0, 0.5, 0.375, 0.0]])
    uniforms = [0.0, 0.1249, 0.125, 0.6249, 0.625, 1 - 2**-53]
    rng = GeneratorSource([Given(*uniforms)], 1)
    assert [rng.draw_host(row)[0] for _ in uniforms] == [0, 0, 2, 2, 3, 3]
    assert [int(rng.draw(row[None])) for _ in uniforms] == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_single_row_without_finite_mass_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive mass"):
        GeneratorSource([Random(0)], 1).draw_host(torch.tensor([[0.0, bad]]))


def test_host_draws_equal_device_draws() -> None:
    """`flip_host` equals `flip`; `draw_host` takes one number of each prompt, in any batch."""
    rows = torch.rand(3, 1000, generator=seeded())
    chances = torch.rand(3, 4, dtype=torch.float64, generator=seeded())
    host_flips, flips, host_draws = (
        GeneratorSource([Random(n) for n in range(3)], 4) for _ in range(3)
    )
    for _ in range(5):
        assert host_flips.flip_host(chances.tolist()) == flips.flip(chances).tolist()
    alone = [GeneratorSource([Random(n)], 4) for n in range(3)]
    for _ in range(5):
        expected = [one.draw_host(rows[n : n + 1])[0] for n, one in enumerate(alone)]
        assert host_draws.draw_host(rows) == expected
    uniforms = torch.tensor([[Random(n).random()] for n in range(3)], dtype=torch.float64)
    first = GeneratorSource([Random(n) for n in range(3)], 4).draw_host(rows)
    assert first == inverse_cdf(rows[:, None], uniforms)[:, 0].tolist()


def test_slices_of_a_large_vocabulary_do_not_depend_on_the_batch() -> None:
    """Numbers at the very ends of slices, where another order of summing would differ."""
    rows = torch.rand(2, 3 * LONG, generator=seeded())
    ends = rows[0].cumsum(0, dtype=torch.float64)
    marks = (ends / ends[-1])[:: LONG // 8].tolist()
    alone, both = (GeneratorSource([Given(*marks) for _ in range(n)], 1) for n in (1, 2))
    for _ in range(2):
        assert [alone.draw_host(rows[:1])[0] for _ in marks] == [
            both.draw_host(rows)[0] for _ in marks
        ]
        expected = [int(alone.draw(rows[:1, None])) for _ in marks]
        assert expected == [int(both.draw(rows[:, None])[0]) for _ in marks]


def test_more_numbers_than_max_count_are_refused() -> None:
    with pytest.raises(ValueError, match="3 random numbers at once, and max_count=2"):
        GeneratorSource([Random(0)], 2).flip(torch.ones(1, 3))
