"""Writing that leaves a whole file or none, and reading that says what is wrong.

Everything a run keeps goes through `write`: a temporary name, fsync, rename, fsync of the folder.
A crash at any moment leaves the old file or the new one.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor

from outrider.train.errors import Damaged, RunError


def write(file: Path, data: bytes) -> None:
    """All of `data` under its final name, or nothing.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{file} could not be written: {error}", "Free some space.") from error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Nobody else writes there meanwhile.

    Raises:
        RunError: another process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"Another process is at work in {folder}."
            raise RunError(message, "Wait for it or stop it, or choose another folder.") from None
        except OSError:
            pass  # a file system without locks
        yield


def sync_folder(folder: Path) -> None:
    """Make a rename inside the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(file: Path, value: object) -> None:
    write(file, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def read_json(file: Path, fix: str) -> dict[str, Any]:
    """
    Raises:
        Damaged: missing, not json, or not an object.
    """
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{file} cannot be read: {error}", fix) from None
    if not isinstance(value, dict):
        raise Damaged(f"{file} does not hold a json object.", fix)
    return value


def write_tensors(file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """A safetensors file with its metadata; returns the sha256 of its bytes."""
    data = bytes_of({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, dict(about))
    write(file, data)
    return hashlib.sha256(data).hexdigest()


def read_tensors(file: Path, sha256: str | None, fix: str) -> dict[str, Tensor]:
    """
    Args:
        sha256: what the bytes must hash to; None skips the check.

    Raises:
        Damaged: missing, truncated, or not the bytes that were written.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise Damaged(f"{file} cannot be read: {error}", fix) from None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise Damaged(f"{file} is damaged: its bytes are not the ones that were written.", fix)
    try:
        tensors: dict[str, Tensor] = tensors_from(data)
        return tensors
    except SafetensorError as error:
        raise Damaged(f"{file} is damaged or truncated: {error}", fix) from None


def sha256_of(file: Path) -> str:
    """In hex, read in pieces."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def fingerprint(tensors: Mapping[str, Tensor], rows: int = 64) -> str:
    """A short name for a set of weights: names, shapes and a sample of the values.

    Values are rounded to bfloat16 first, so that the name is the same in float32 and bfloat16.
    Reads at most `rows` leading rows of each tensor, so that it is fast for any size.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        digest.update(f"{name} {tuple(value.shape)}".encode())
        sample = value.reshape(-1, value.shape[-1])[:rows] if value.ndim else value.reshape(1)
        rounded = sample.to(torch.bfloat16).cpu().contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
