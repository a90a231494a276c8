"""Quantisation of stored hidden states: none, bfloat16, or int8 with a scale per column group.

    same   as the target computed them
    bf16   two bytes
    int8   one byte; one bfloat16 scale per 64 columns of a row, because the states of one row
           differ in size by orders of magnitude between layers and channels

Legend: N rows, X columns, G groups.
"""

import torch
from jaxtyping import Float
from torch import Tensor

GROUP = 64  # columns that share a scale
LARGEST = 127.0


class NotFinite(ValueError):
    """NaN or infinity, which cannot be recorded."""


def require_finite(rows: Tensor) -> None:
    """Raise NotFinite if a value is NaN or infinite."""
    if not bool(rows.isfinite().all()):
        raise NotFinite("the target outputs NaN or infinity")


def encode(states: str, rows: Float[Tensor, "N X"]) -> dict[str, Tensor]:
    """Return the parts of a file that store these rows: "codes", and with int8 "scales".

    `states` is same, bf16 or int8. Raises NotFinite.
    """
    require_finite(rows)
    if states != "int8":
        return {"codes": rows.to(torch.bfloat16) if states == "bf16" else rows}
    groups = _grouped(rows.float())
    scales = (groups.abs().amax(-1) / LARGEST).to(torch.bfloat16)
    # divide by the rounded scale, with which `decode` multiplies
    units = groups / scales.float().clamp(min=torch.finfo(torch.bfloat16).tiny)[..., None]
    codes = units.clamp(-LARGEST, LARGEST).flatten(1)[:, : rows.shape[1]].round().to(torch.int8)
    return {"codes": codes.contiguous(), "scales": scales}


def decode(states: str, parts: dict[str, Tensor], width: int) -> Float[Tensor, "N X"]:
    """Return the stored rows of X = `width`: float32 for int8, else the type they are stored in."""
    codes = parts["codes"]
    if states != "int8":
        return codes
    out: Tensor = (_grouped(codes.float()) * parts["scales"].float()[..., None]).flatten(1)
    return out[:, :width]


def row_bytes(states: str, width: int, itemsize: int) -> float:
    """Return the bytes of a row; `itemsize` is those of a number in the target's precision."""
    sizes = {"same": width * itemsize, "bf16": 2 * width, "int8": width + 2 * -(-width // GROUP)}
    return float(sizes[states])


def _grouped(rows: Float[Tensor, "N X"]) -> Float[Tensor, "N G 64"]:
    """Split the columns into groups; zeros fill the last one."""
    padding = -rows.shape[1] % GROUP
    out: Tensor = torch.nn.functional.pad(rows, (0, padding)).unflatten(1, (-1, GROUP))
    return out
