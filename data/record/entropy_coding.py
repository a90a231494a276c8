"""Numbers in equal steps, in as many bits as their frequency deserves.

Every number becomes the nearest multiple of one step, and the multiples are coded by how often
they occur (deflate: Huffman codes and runs). For the same mean squared error that takes most of
a bit per number less than a fixed width with a scale per group (docs/log.md), because large
numbers are rare: a uniform quantizer with an entropy coder stays within a quarter of a bit of what
is possible.

    -0.9, 0.1, 0.5 in steps of 0.4  ->  -2, 0, 1  ->  3, 0, 2 (small ones first)  ->  deflate

Columns lie behind each other, so that codes of one column lie together. Their lowest bytes come
first, then the next ones, as many as the largest code has; nearly all of the higher ones are zero
and take nothing. The first byte of all says how many.

Source: H. Gish, J. Pierce, Asymptotically efficient quantizing (1968); RFC 1951 for deflate.

Legend: N rows, X columns, B bytes.
"""

import math
import zlib

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

LARGEST = 2**30  # steps away from 0
LEVEL = 6
WINDOW = -15  # no header: the file has a hash of its own


class OutOfRange(ValueError):
    """A number is more steps away from 0 than can be written."""


def pack(rows: Float[Tensor, "N X"], step: float) -> UInt8[Tensor, " B"]:
    """
    Raises:
        OutOfRange: see above; also for what is no number.
    """
    steps = (rows.float() / step).round()
    if not bool((steps.abs() <= LARGEST).all()):
        raise OutOfRange(f"a number is further away from 0 than {LARGEST} steps of {step}")
    codes = _folded(steps.mT.int()).numpy()
    width = max(1, -(-int(codes.max(initial=0)).bit_length() // 8))
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOW, 9, zlib.Z_RLE)
    said = bytes([width])
    for byte in range(width):
        said += deflate.compress((codes >> 8 * byte).astype(np.uint8).tobytes())
    return torch.frombuffer(bytearray(said + deflate.flush()), dtype=torch.uint8)


def unpack(packed: UInt8[Tensor, " B"], width: int, step: float) -> Float[Tensor, "N X"]:
    """The nearest multiples.

    Args:
        width: columns, X.
    """
    count, said = int(packed[0]), zlib.decompress(packed[1:].numpy().tobytes(), WINDOW)
    parts = np.frombuffer(said, dtype=np.uint8).reshape(count, width, -1).astype(np.int32)
    codes = torch.from_numpy(sum(part << 8 * byte for byte, part in enumerate(parts))).mT
    out: Tensor = _unfolded(codes).float() * step
    return out.contiguous()


def bits(step: float) -> float:
    """About, of a number that varies by 1 (interquartile range / 1.35) with the tails of states.

    The entropy of a normal variable in such steps is log2(1 / step) + 2.05 bits; heavier tails
    and deflate's whole bits add a quarter.
    """
    return max(0.5, math.log2(1 / step) + 2.3)


def _folded(steps: Int[Tensor, "X N"]) -> Int[Tensor, "X N"]:
    """0, -1, 1, -2, 2 -> 0, 1, 2, 3, 4."""
    return torch.where(steps < 0, -2 * steps - 1, 2 * steps)


def _unfolded(codes: Int[Tensor, "N X"]) -> Int[Tensor, "N X"]:
    return torch.where(codes % 2 == 1, -(codes + 1) // 2, codes // 2)
