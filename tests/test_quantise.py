"""Encodings of states: the error after decoding, and the stored bytes."""

import pytest
import torch

from outrider.data.record import entropy_coding
from outrider.data.record.entropy_coding import ColumnScales
from outrider.data.record.quantise import GROUP, LARGEST, decode, encode, row_bytes

WIDTHS = (1, 31, 64, 100, 256, 600)


def rows(width: int, seed: int = 0) -> torch.Tensor:
    """Rows like those of a target: many orders of magnitude, zeros, one massive column."""
    torch.manual_seed(seed)
    out = torch.randn(7, width) * 10 ** torch.linspace(-3, 3, 7)[:, None]
    out[0] = 0
    out[3, width // 2] = 3e4
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_int8_is_within_half_a_step_of_its_group(width: int) -> None:
    states = rows(width)
    decoded = decode("int8", encode("int8", states), width)
    padding = -width % GROUP
    groups = torch.nn.functional.pad(states, (0, padding)).unflatten(1, (-1, GROUP))
    peaks = groups.abs().amax(-1).repeat_interleave(GROUP, 1)[:, :width]
    assert decoded.shape == states.shape
    assert ((decoded - states).abs() <= peaks * (0.5 / LARGEST + 2**-8) + 1e-12).all()


def test_encoding_is_idempotent() -> None:
    once = decode("int8", encode("int8", rows(100)), 100)
    twice = decode("int8", encode("int8", once), 100)
    torch.testing.assert_close(twice, once, rtol=2**-7, atol=0)


def test_same_is_exact_and_bf16_rounds() -> None:
    states = rows(64)
    assert torch.equal(decode("same", encode("same", states), 64), states)
    assert torch.equal(decode("bf16", encode("bf16", states), 64), states.bfloat16())


@pytest.mark.parametrize("states", ["same", "bf16", "int8"])
@pytest.mark.parametrize("width", WIDTHS)
def test_row_bytes_are_the_bytes_stored(states: str, width: int) -> None:
    parts = encode(states, rows(width)).values()
    stored = sum(part.numel() * part.element_size() for part in parts)
    assert stored == 7 * row_bytes(states, width, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_raise(value: float) -> None:
    states = rows(64)
    states[2, 5] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode("int8", states)


def coded(step: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal numbers with two far larger rows, and their decoded values."""
    torch.manual_seed(2)
    states = torch.randn(300, 64)
    states[0] *= 1000
    states[1] *= 1e6 * step
    return states, entropy_coding.decompress(entropy_coding.compress(states, step), 64, step, 300)


@pytest.mark.parametrize("step", [0.1, 0.3, 0.5, 1.0])
def test_entropy_coded_states_are_within_half_a_step(step: float) -> None:
    states, decoded = coded(step)
    assert ((decoded - states).abs() <= step / 2 + 2**-22 * states.abs()).all()
    assert torch.equal(
        entropy_coding.decompress(entropy_coding.compress(decoded, step), 64, step, 300), decoded
    )


@pytest.mark.parametrize("step", [0.3, 0.5])
def test_entropy_coded_states_take_about_their_entropy(step: float) -> None:
    """The entropy of every column on its own, within a tenth of a bit."""
    torch.manual_seed(3)
    states = torch.randn(2000, 64)
    counts = [(states[:, i] / step).round().unique(return_counts=True)[1] for i in range(64)]
    entropy = sum(float(-(n / 2000 * (n / 2000).log2()).sum()) for n in counts) / 64
    stored = 8 * len(entropy_coding.compress(states, step)) / states.numel()
    assert entropy - 0.1 < stored < 1.1 * entropy
    assert stored == pytest.approx(entropy_coding.bits_per_value(step), rel=0.15)


def test_entropy_coding_of_an_empty_document_and_of_far_numbers() -> None:
    assert entropy_coding.decompress(
        entropy_coding.compress(torch.zeros(0, 5), 0.5), 5, 0.5, 0
    ).shape == (
        0,
        5,
    )
    for value in (float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="further away from 0"):
            entropy_coding.compress(torch.tensor([[0.0, value]]), 0.5)


def test_column_scales_are_robust_to_a_few_massive_rows() -> None:
    torch.manual_seed(4)
    spread = torch.tensor([1e-3, 0.1, 1, 1, 10, 100])
    states = torch.randn(1000, 6) * spread + 7
    plain = ColumnScales.fit([states])
    torch.testing.assert_close(plain.spread, spread, rtol=0.2, atol=0)
    torch.testing.assert_close(plain.restore(plain.units(states)), states, rtol=1e-4, atol=1e-4)
    states[::300, 2] = 5000.0
    torch.testing.assert_close(
        ColumnScales.fit(states.split(100)).spread, plain.spread, rtol=0.1, atol=0
    )


def test_column_scales_beyond_the_size_limit_of_torch_quantile() -> None:
    wide = torch.arange(4200.0).expand(4096, 4200) * torch.linspace(-1, 1, 4096)[:, None]
    expected = torch.arange(10, 4200) / 1.349
    torch.testing.assert_close(ColumnScales.fit([wide]).spread[10:], expected, rtol=1e-2, atol=0)


def test_a_constant_column_has_a_positive_spread() -> None:
    states = torch.randn(50, 3) * torch.tensor([1.0, 1.0, 0.0])
    assert (ColumnScales.fit([states]).spread > 0).all()
    assert (ColumnScales.fit([torch.zeros(50, 3)]).spread > 0).all()
