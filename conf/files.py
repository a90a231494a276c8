"""Writing that leaves a whole file or none, and reading that says what is wrong.

Everything a run keeps goes through `write`: a temporary name, fsync, rename, fsync of the folder.
A crash or a full disk at any moment leaves the old file or the new one. Folders come and go by
renaming too (`copy_folder`, `remove`): one that has its name is whole.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor

from outrider.conf.errors import NO_ROOM, Damaged, NoRoom, RunError


def write(file: Path, data: bytes) -> None:
    """All of `data` under its final name, or nothing.

    Raises:
        NoRoom: the disk is full.
        RunError: the folder cannot be written.
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
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritten(file, error, len(data)) from error


def append(file: Path, text: str) -> None:
    """Add to the end of a file. A full disk may leave a part of the text there.

    Raises:
        NoRoom: the disk is full.
        RunError: the file cannot be written.
    """
    try:
        with file.open("a") as stream:
            stream.write(text)
    except OSError as error:
        raise unwritten(file, error, len(text.encode())) from error


def copy_folder(source: Path, final: Path) -> None:
    """The files of one folder under another name, in place of what had it.

    Raises:
        NoRoom, RunError: as `write`; what was there before is still there.
    """
    partial = final.with_name(f".{final.name}.new")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for file in sorted(source.iterdir()):
            write(partial / file.name, file.read_bytes())
    except RunError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    remove(final)
    partial.rename(final)
    sync_folder(final.parent)


def remove(folder: Path) -> None:
    """Take a folder away, if it is there."""
    going = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(going, ignore_errors=True)  # of a process that was killed here
    with suppress(OSError):
        folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def unwritten(file: Path, error: OSError, size: int) -> RunError:
    """What to say of a file that could not be written: its size, the reason, the room there is."""
    message = f"{file} ({decimal(size)}) could not be written: {error.strerror or error}"
    if error.errno not in NO_ROOM:
        return RunError(f"{message}.", "See that the folder can be written to.")
    place = next(folder for folder in file.absolute().parents if folder.exists())
    return NoRoom(f"{message}; {decimal(shutil.disk_usage(place).free)} are free there.")


@contextmanager
def claimed(folder: Path, waiting: Callable[[], object] | None = None) -> Iterator[bool]:
    """Nobody else writes there meanwhile; False on a file system without locks, which cannot say.

    Args:
        waiting: called if another process does, which is then waited for; None: refused.

    Raises:
        RunError: another process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                message = f"Another process is at work in {folder}."
                fix = "Wait for it or stop it, or choose another folder."
                raise RunError(message, fix) from None
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


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


def read_lines(file: Path, fix: str, torn: bool = False) -> list[dict[str, Any]]:
    """The objects of a jsonl file.

    Args:
        torn: the last line may have been cut off by a crash; it is left out then.

    Raises:
        Damaged: missing, or a line is no object.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise Damaged(f"{file} cannot be read: {error}", fix) from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif not (torn and number == len(lines)):
            raise Damaged(f"{file} cannot be read: line {number} is no json object.", fix)
    return found


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
