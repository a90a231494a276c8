"""Atomic writes, checked reads, folder locks and hashes.

`write` uses a temporary name, fsync, rename, fsync of the folder: a crash or a full disk leaves the
old file or the new one. Folders are renamed too: one under its final name is complete.
"""

import errno
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from filelock import FileLock, SoftFileLock, Timeout
from rich.filesize import decimal

from outrider.conf.errors import DISK_FULL_ERRNOS, CorruptFile, DiskFull, RunError, UnusablePlace

JSON_BYTES, LINES_BYTES, JSON_DEPTH = 1 << 26, 1 << 30, 64  # of a file, of a JSONL file; nesting
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of this machine


def write(file: Path, data: bytes) -> None:
    """Write a file atomically, and create its folder.

    Raises:
        DiskFull, UnusablePlace: the disk is full, or the folder cannot be written.
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
        raise as_run_error(file, error, len(data)) from error


def append(file: Path, text: str) -> None:
    """Append text to a file, with the errors of `write`; a full disk may leave a part of it."""
    try:
        with file.open("a") as stream:
            stream.write(text)
    except OSError as error:
        raise as_run_error(file, error, len(text.encode())) from error


def remove_temporary(folder: Path, name: str, before: float = math.inf) -> None:
    """Remove what killed processes left of `write` before this time; `name` is a glob pattern."""
    for file in folder.glob(f".{name}.[0-9]*.tmp"):
        with suppress(OSError):
            if file.stat().st_mtime < before:
                file.unlink()


def copy_files(source: Path, final: Path, names: Sequence[str]) -> None:
    """Copy these files of a folder into `final`, in this order; its other files stay.

    An error of `write` leaves `final` unchanged.
    """
    partial = final.with_name(f".{final.name}.new")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name in names:
            write(partial / name, read_bytes(source / name, MEMORY))
        final.mkdir(exist_ok=True)
        for name in names:
            (partial / name).replace(final / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(final)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it exists."""
    renamed = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(renamed, ignore_errors=True)  # left by a killed process
    with suppress(OSError):
        folder.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def as_run_error(file: Path, error: OSError, size: int) -> RunError:
    """Return the error for a failed write: the file's size, the reason, the free space."""
    message = f"{file} ({decimal(size)}) could not be written: {error.strerror or error}"
    if error.errno not in DISK_FULL_ERRNOS:
        return UnusablePlace(f"{message}.")
    place = next(folder for folder in file.absolute().parents if folder.exists())
    return DiskFull(f"{message}; {decimal(shutil.disk_usage(place).free)} are free there.")


def _require_room(folder: Path) -> bool:
    """Write to a file without a name, which ends with its process; return if the folder is new."""
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
        return new
    except OSError as error:
        raise as_run_error(folder / ".lock", error, 4096) from error


@contextmanager
def folder_lock(folder: Path, on_wait: Callable[[], object] | None = None) -> Iterator[bool]:
    """Hold a folder's lock, which the system releases when the process dies.

    If another process holds it, calls `on_wait` once and waits; without `on_wait`, raises a
    `RunError`, and a new folder that stays empty is removed. Yields False on a file system without
    locks: nothing is held then.

    Raises:
        DiskFull, UnusablePlace: no file can be written there.
    """
    temporary = _require_room(folder) and on_wait is None
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if on_wait is None:
            message = f"Another process is using {folder}."
            fix = "Wait for it or stop it, or choose another folder."
            raise RunError(message, fix) from None
        on_wait()
        lock.acquire()
    except (OSError, NotImplementedError):  # no flock on this file system
        yield False
        return
    if isinstance(lock, SoftFileLock):  # filelock's substitute for flock outlives a killed process
        lock.release()
    try:
        yield lock.is_locked
    finally:
        if temporary and [file.name for file in folder.glob("*")] == [".lock"]:
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise as_run_error(folder, error, 0) from error
    finally:
        os.close(handle)


def write_json(file: Path, value: object) -> None:
    """Write sorted, indented JSON atomically."""
    write(file, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def read_json(file: Path, fix: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CorruptFile: missing, not a regular file, too large, not JSON, or not an object; the message
            ends with `fix`.
    """
    try:
        value = parse_json(read_checked(file, fix, JSON_BYTES))
    except ValueError as error:
        raise CorruptFile(f"{file} cannot be read: {error}", fix) from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{file} does not hold a JSON object.", fix)
    return value


def parse_json(text: bytes | str) -> Any:
    """Parse JSON of JSON_DEPTH levels at most, whose text can be encoded; else a `ValueError`."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value)
    if (b"\\u" if isinstance(text, bytes) else "\\u") in text:  # type: ignore[operator]
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is a ValueError
    return value


def check_depth(value: Any) -> Any:
    """Return a JSON value of JSON_DEPTH levels at most; else a `ValueError`."""
    level, depth = [value], 0
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        if depth > JSON_DEPTH:
            raise ValueError(f"it is nested deeper than {JSON_DEPTH} levels")
        level = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]
    return value


def read_lines(file: Path, fix: str, torn: bool = False) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file; `torn` skips an incomplete last line (after a crash).

    Raises:
        CorruptFile: missing, or a line is not an object.
    """
    entries, lines = [], read_checked(file, fix, LINES_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            entries.append(value)
        elif not (torn and number == len(lines)):
            raise CorruptFile(f"{file} cannot be read: line {number} is not a JSON object.", fix)
    return entries


@contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; an `OSError` for a FIFO or device, which might never end.

    Every `OSError` of the block has the file's name.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def read_bytes(file: Path, largest: int = JSON_BYTES) -> bytes:
    """Read a regular file of `largest` bytes at most; an `OSError` otherwise."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            message = f"its {decimal(size)} are more than {decimal(largest)}"
            raise OSError(errno.EINVAL, message)
        return stream.read()


def read_checked(file: Path, fix: str, largest: int = MEMORY) -> bytes:
    """Read a regular file of `largest` bytes at most; a `CorruptFile` that ends with `fix`."""
    try:
        return read_bytes(file, largest)
    except OSError as error:
        raise CorruptFile(f"{file} cannot be read: {error.strerror or error}", fix) from None


def sha256_of(file: Path) -> str:
    """Return the sha256 of a file in hex."""
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
