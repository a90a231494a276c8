"""Numbers in 16, 8 or 4 bits: how rows of states are stored.

A row is cut into groups of columns, and each group keeps a scale of its own in bfloat16, because
the states of one row differ in size by orders of magnitude between layers and channels:

    same   as the target computed them          bf16   two bytes
    fp8    float8_e4m3, one scale per 256       int8   one byte, one scale per 64
    int4   two columns per byte, one scale per 32

Legend: N rows, X columns, G groups.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class NotFinite(ValueError):
    """NaN or infinity cannot be recorded."""


class Code(NamedTuple):
    """Columns that share a scale, the largest code, bytes of one column; no scale where it is 0."""

    group: int
    largest: float
    bytes: float


CODES: dict[str, Code] = {
    "fp8": Code(256, 448.0, 1.0),
    "int8": Code(64, 127.0, 1.0),
    "int4": Code(32, 7.0, 0.5),
}


def encode(kind: str, rows: Float[Tensor, "N X"]) -> dict[str, Tensor]:
    """The parts of a file that hold these rows: "codes" and, of the small kinds, "scales".

    Raises:
        NotFinite: a number is none.
    """
    if not bool(rows.isfinite().all()):
        raise NotFinite("the target said something that is not a number")
    if kind not in CODES:
        return {"codes": rows.to(torch.bfloat16) if kind == "bf16" else rows}
    code = CODES[kind]
    groups = _grouped(rows.float(), code.group)
    scales = (groups.abs().amax(-1) / code.largest).to(torch.bfloat16)
    # of the rounded scale, so that reading undoes exactly what writing did
    units = groups / scales.float().clamp(min=torch.finfo(torch.bfloat16).tiny)[..., None]
    flat = units.clamp(-code.largest, code.largest).flatten(1)
    if kind == "fp8":
        return {"codes": flat[:, : rows.shape[1]].to(torch.float8_e4m3fn), "scales": scales}
    whole = flat.round().to(torch.int8)
    if kind == "int8":
        return {"codes": whole[:, : rows.shape[1]].contiguous(), "scales": scales}
    return {"codes": _paired(whole), "scales": scales}


def decode(kind: str, parts: dict[str, Tensor], width: int) -> Float[Tensor, "N X"]:
    """The rows again: in their own type where nothing was lost, else in bfloat16's or float32.

    Args:
        width: columns, X.
    """
    codes = parts["codes"]
    if kind not in CODES:
        return codes
    numbers = _apart(codes) if kind == "int4" else codes
    groups = _grouped(numbers[:, :width].float(), CODES[kind].group)
    out: Tensor = (groups * parts["scales"].float()[..., None]).flatten(1)[:, :width]
    return out


def bytes_per_row(kind: str, width: int, itemsize: int) -> float:
    """What a row of so many columns takes.

    Args:
        itemsize: bytes of a number of the target's.
    """
    if kind not in CODES:
        return 2.0 * width if kind == "bf16" else float(width * itemsize)
    groups = -(-width // CODES[kind].group)
    columns = groups * CODES[kind].group if kind == "int4" else width
    return columns * CODES[kind].bytes + 2.0 * groups


def _grouped(rows: Float[Tensor, "N X"], size: int) -> Float[Tensor, "N G size"]:
    """Groups of columns, the last one filled up with zeros."""
    missing = -rows.shape[1] % size
    out: Tensor = torch.nn.functional.pad(rows, (0, missing)).unflatten(1, (-1, size))
    return out


def _paired(whole: Tensor) -> Tensor:
    """Two numbers -7..7 per byte: [1, -2, 3, 0] -> [1 + 7 + 16 * (-2 + 7), 3 + 7 + 16 * 7]."""
    shifted = (whole + 7).to(torch.uint8)
    out: Tensor = shifted[:, ::2] | (shifted[:, 1::2] << 4)
    return out


def _apart(pairs: Tensor) -> Tensor:
    both = torch.stack([pairs & 15, pairs >> 4], dim=-1)
    return both.flatten(1).to(torch.int8) - 7
