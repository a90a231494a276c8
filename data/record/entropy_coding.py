"""Entropy coded states: multiples of a step, compressed by deflate.

Every number is rounded to the nearest multiple of a step, and the multiples are coded by frequency.
At equal mean squared error this saves most of a bit per number against a fixed width with a scale
per group (docs/log.md), because large numbers are rare: a uniform quantizer with an entropy coder
is within a quarter of a bit of the optimum.

    -0.9, 0.1, 0.5 in steps of 0.4  ->  -2, 0, 1  ->  zigzag 3, 0, 2  ->  deflate

Format: one byte with the number of bytes of a code; then a raw deflate stream of the codes' lowest
bytes, column by column, then of their next bytes, which are nearly all zero.

States differ in size by orders of magnitude between layers and channels, so that steps are relative
to the spread of a column. A few rows, above all the first one of a document, are a hundred times as
large as the others: location and spread are medians and quartiles, not means and deviations.

Source: H. Gish, J. Pierce, Asymptotically efficient quantizing (1968); RFC 1951 for deflate.

Legend: N rows, X columns, B bytes.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

LARGEST = 2**30  # steps
LEVEL = 6
SAMPLE = 4096  # rows that the scales are fitted on
NORMAL_RANGE = 1.349  # interquartile range of a normal variable of variance 1
LEAST = 1e-3  # smallest spread, relative to the median column's; a column may be constant
WINDOW = -15  # raw deflate, without a checksum: files have a sha256


class OutOfRange(ValueError):
    """A number is NaN, or more than 2^30 steps away from 0."""


@dataclass(frozen=True)
class ColumnScales:
    """states = middle + spread * units."""

    middle: Float[Tensor, " X"]
    spread: Float[Tensor, " X"]

    def units(self, rows: Float[Tensor, "N X"]) -> Float[Tensor, "N X"]:
        return (rows.float() - self.middle) / self.spread

    def restore(self, units: Float[Tensor, "N X"]) -> Float[Tensor, "N X"]:
        return units * self.spread + self.middle

    @staticmethod
    def fit(parts: Iterable[Float[Tensor, "N X"]]) -> "ColumnScales":
        """Return medians and normalised interquartile ranges of the first `SAMPLE` rows."""
        rows = torch.cat([part.float() for part in parts])[:SAMPLE]
        # torch.quantile has a limit
        quartiles = np.quantile(rows.numpy(), [0.25, 0.5, 0.75], axis=0)
        low, middle, high = torch.from_numpy(quartiles).float()
        spread = (high - low) / NORMAL_RANGE
        typical = spread.median().clamp(min=torch.finfo(torch.float32).tiny / LEAST)
        return ColumnScales(middle, spread.clamp(min=LEAST * typical))


def compress(rows: Float[Tensor, "N X"], step: float) -> UInt8[Tensor, " B"]:
    """Return the compressed bytes of these rows; raise OutOfRange."""
    steps = (rows.float() / step).round()
    if not bool((steps.abs() <= LARGEST).all()):
        raise OutOfRange(f"a number is further away from 0 than {LARGEST} steps of {step}")
    integers = steps.mT.int()
    codes = torch.where(integers < 0, -2 * integers - 1, 2 * integers).numpy()  # zigzag
    width = max(1, -(-int(codes.max(initial=0)).bit_length() // 8))
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOW, 9, zlib.Z_RLE)
    content = bytes([width])
    for byte in range(width):
        content += deflate.compress((codes >> 8 * byte).astype(np.uint8).tobytes())
    return torch.frombuffer(bytearray(content + deflate.flush()), dtype=torch.uint8)


def decompress(
    packed: UInt8[Tensor, " B"], width: int, step: float, longest: int
) -> Float[Tensor, "N X"]:
    """Return the rows of X = `width` columns, rounded to multiples of `step`.

    Raises a ValueError if they are damaged, or more than `longest`.
    """
    count, inflate = int(packed[0]), zlib.decompressobj(WINDOW)
    try:
        content = inflate.decompress(packed[1:].numpy().tobytes(), count * width * longest + 1)
    except zlib.error as error:
        raise ValueError(error) from None
    if not inflate.eof or len(content) > count * width * longest:
        raise ValueError(f"coded states are cut off, or more than {longest} rows")
    parts = np.frombuffer(content, dtype=np.uint8).reshape(count, width, -1).astype(np.int32)
    codes = torch.from_numpy(sum(part << 8 * byte for byte, part in enumerate(parts))).mT
    steps = torch.where(codes % 2 == 1, -(codes + 1) // 2, codes // 2)
    return (steps.float() * step).contiguous()


def bits_per_value(step: float) -> float:
    """Return the approximate bits of a number whose column has spread 1.

    The entropy of a normal variable in such steps is log2(1 / step) + 2.05 bits; heavier tails and
    the whole bits of deflate add a quarter.
    """
    return max(0.5, math.log2(1 / step) + 2.3)
