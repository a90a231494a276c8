"""Numbers in few bits: what is read back, how far off it is, and what it takes."""

import pytest
import torch

from outrider.data.record import entropy_coding as steps
from outrider.data.record.column_scales import fit
from outrider.data.record.quantise import CODES, bytes_per_row, decode, encode

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


def coded(step: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal numbers, with rows that are far larger; and what is read back."""
    torch.manual_seed(2)
    told = torch.randn(300, 64)
    told[0] *= 1000
    told[1] *= 1e6 * step
    return told, steps.unpack(steps.pack(told, step), 64, step)


@pytest.mark.parametrize("step", [0.1, 0.3, 0.5, 1.0])
def test_steps_are_never_further_off_than_half_of_one(step: float) -> None:
    told, back = coded(step)
    assert ((back - told).abs() <= step / 2 + 2**-22 * told.abs()).all()
    assert torch.equal(steps.unpack(steps.pack(back, step), 64, step), back)


@pytest.mark.parametrize("step", [0.3, 0.5])
def test_coded_steps_take_near_what_their_entropy_is(step: float) -> None:
    """Of every column by itself: within a tenth, and less than a fixed width would need."""
    torch.manual_seed(3)
    told = torch.randn(2000, 64)
    counts = [(told[:, i] / step).round().unique(return_counts=True)[1] for i in range(64)]
    entropy = sum(float(-(n / 2000 * (n / 2000).log2()).sum()) for n in counts) / 64
    taken = 8 * len(steps.pack(told, step)) / told.numel()
    assert entropy - 0.1 < taken < 1.1 * entropy
    assert taken == pytest.approx(steps.bits(step), rel=0.15)


def test_an_empty_document_and_far_numbers() -> None:
    assert steps.unpack(steps.pack(torch.zeros(0, 5), 0.5), 5, 0.5).shape == (0, 5)
    for bad in (float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="further away from 0"):
            steps.pack(torch.tensor([[0.0, bad]]), 0.5)


def test_sizes_do_not_follow_the_few_massive_rows() -> None:
    torch.manual_seed(4)
    spread = torch.tensor([1e-3, 0.1, 1, 1, 10, 100])
    told = torch.randn(1000, 6) * spread + 7
    plain = fit([told])
    torch.testing.assert_close(plain.spread, spread, rtol=0.2, atol=0)
    torch.testing.assert_close(plain.restore(plain.units(told)), told, rtol=1e-4, atol=1e-4)
    told[::300, 2] = 5000.0
    torch.testing.assert_close(fit(told.split(100)).spread, plain.spread, rtol=0.1, atol=0)


def test_a_large_target_has_sizes_too() -> None:
    """More numbers than torch.quantile takes at once."""
    wide = torch.arange(4200.0).expand(4096, 4200) * torch.linspace(-1, 1, 4096)[:, None]
    wished = torch.arange(10, 4200) / 1.349
    torch.testing.assert_close(fit([wide]).spread[10:], wished, rtol=1e-2, atol=0)


def test_a_column_that_never_changes_has_a_size() -> None:
    told = torch.randn(50, 3) * torch.tensor([1.0, 1.0, 0.0])
    assert (fit([told]).spread > 0).all()
    assert (fit([torch.zeros(50, 3)]).spread > 0).all()
