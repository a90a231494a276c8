"""Argmax and maximum with ties to the lowest index."""

import pytest
import torch

from outrider.models.argmax import first_argmax, first_max


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
def test_nan_is_the_largest(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 7], logits[1, 8], logits[2, 9] = float("nan"), float("inf"), float("-inf")
    logits[1, 9] = float("nan")
    _, largest = first_max(logits)
    assert largest.isfinite().tolist() == [False, False, True, True]
