"""Numbers in few bits: what is read back, how far off it is, and what it takes."""

import pytest
import torch

from outrider.data.record.basis import fit
from outrider.data.record.codes import CODES, bytes_per_row, decode, encode

WIDTHS = (1, 31, 64, 100, 256, 600)
FAR = {"fp8": 2**-4, "int8": 0.5 / 127, "int4": 0.5 / 7}  # half a step, of a group's largest


def rows(width: int, seed: int = 0) -> torch.Tensor:
    """Sizes over many orders of magnitude, zeros and a massive column: states look like that."""
    torch.manual_seed(seed)
    out = torch.randn(7, width) * 10 ** torch.linspace(-3, 3, 7)[:, None]
    out[0] = 0
    out[3, width // 2] = 3e4
    return out


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_read_is_near_what_was_written(kind: str, width: int) -> None:
    told = rows(width)
    back = decode(kind, encode(kind, told), width)
    group = CODES[kind].group
    missing = -width % group
    peaks = torch.nn.functional.pad(told, (0, missing)).unflatten(1, (-1, group)).abs().amax(-1)
    slack = peaks.repeat_interleave(group, 1)[:, :width] * (FAR[kind] + 2**-8)
    assert back.shape == told.shape
    assert ((back - told).abs() <= slack + 1e-12).all()


@pytest.mark.parametrize("kind", CODES)
def test_reading_and_writing_again_changes_nothing(kind: str) -> None:
    """A recording that is copied through its own codes stays what it is."""
    once = decode(kind, encode(kind, rows(100)), 100)
    twice = decode(kind, encode(kind, once), 100)
    torch.testing.assert_close(twice, once, rtol=2**-7, atol=0)


def test_full_kinds_lose_what_they_say() -> None:
    told = rows(64)
    assert torch.equal(decode("same", encode("same", told), 64), told)
    assert torch.equal(decode("bf16", encode("bf16", told), 64), told.bfloat16())


@pytest.mark.parametrize("kind", ["same", "bf16", *CODES])
@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_are_foretold(kind: str, width: int) -> None:
    parts = encode(kind, rows(width)).values()
    taken = sum(part.numel() * part.element_size() for part in parts)
    assert taken == 7 * bytes_per_row(kind, width, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_written(bad: float) -> None:
    told = rows(64)
    told[2, 5] = bad
    with pytest.raises(ValueError, match="not a number"):
        encode("int8", told)


def test_directions_that_hold_everything_lose_nothing() -> None:
    """Features of rank 5 in 12 columns: five directions restore them, four do not."""
    torch.manual_seed(1)
    told = torch.randn(200, 5) @ torch.randn(5, 12) * torch.logspace(-2, 2, 12) + 3.0
    basis, missed = fit(told.split(50), 5)
    torch.testing.assert_close(basis.restore(basis.project(told)), told, rtol=1e-3, atol=1e-3)
    assert missed < 1e-6
    poorer, missed = fit(told.split(50), 4)
    assert missed > 1e-3
    assert (poorer.restore(poorer.project(told)) - told).abs().max() > 1e-2
