"""Tensors in safetensors files, and their fingerprints.

Apart from `files.py`, so that reading settings does not import torch.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor

from outrider.conf.errors import CorruptFile
from outrider.conf.files import read_checked, write


def write_tensors(file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Write a safetensors file with metadata `about`; return the sha256 of its bytes."""
    data = bytes_of({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, dict(about))
    write(file, data)
    return hashlib.sha256(data).hexdigest()


def read_tensors(file: Path, sha256: str | None, fix: str) -> dict[str, Tensor]:
    """Read a safetensors file; a `CorruptFile` if it is missing, truncated or of another hash."""
    data = read_checked(file, fix)
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptFile(f"{file} is damaged: its bytes are not the ones that were written.", fix)
    try:
        tensors: dict[str, Tensor] = tensors_from(data)
        return tensors
    except SafetensorError as error:
        raise CorruptFile(f"{file} is damaged or truncated: {error}", fix) from None


def int_column(file: Any, name: str) -> Tensor:
    """Return a list of integers >= 0 of an open safetensors file; a `ValueError` if it is none."""
    column: Tensor = file.get_tensor(name)
    if column.ndim != 1 or column.is_floating_point() or bool((column < 0).any()):
        raise ValueError(f"{name} does not hold integers of at least 0")
    return column.int()


def fingerprint(tensors: Mapping[str, Tensor], rows: int = 64) -> str:
    """Return a short hash of names, shapes and the first `rows` rows of each tensor.

    Values are rounded to bfloat16 first, so the hash is the same in float32 and bfloat16.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        digest.update(f"{name} {tuple(value.shape)}".encode())
        sample = value.reshape(-1, value.shape[-1])[:rows] if value.ndim else value.reshape(1)
        rounded = sample.to(torch.bfloat16).cpu().contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
