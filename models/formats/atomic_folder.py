"""Atomic writing of a folder of weights: under a temporary name, flushed, then renamed."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import read_json, sync_folder, write_json
from outrider.conf.tensor_files import write_tensors
from outrider.models.formats.weight_folder import SIDECAR

SHARD = 5 * 10**9  # bytes of the largest weight file
HASHES = (SIDECAR, "golden.json")  # their field sha256 names files of a published folder
UNHASHED = {"golden.json", "README.md", "verify.py", "config.json", SIDECAR}


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which then replaces `path`, a folder of Outrider's or none.

    Raises:
        RunError: `path` holds something else, also beside Outrider's files, or cannot be written.
    """
    occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if occupied and not (path / SIDECAR).exists():
        raise RunError(f"{path} exists and was not written by Outrider.", "Choose another folder.")
    if (path / "golden.json").exists():  # it names every file
        _refuse_other_files(path, set())
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        _refuse_other_files(path, _file_names(partial))
        _publish(partial, path)
    except OSError as error:
        fix = "Free disk space, or choose another folder."
        raise RunError(f"{path} could not be written: {error}", fix) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _file_names(folder: Path) -> set[str]:
    files = (f for f in folder.rglob("*") if f.is_symlink() or not f.is_dir())
    return {str(file.relative_to(folder)) for file in files}


def _refuse_other_files(path: Path, new: set[str]) -> None:
    """Raise a `RunError` if a folder holds files that are neither Outrider's nor among `new`."""
    fix = "Move them, or choose another folder."
    hashed = [read_json(path / n, fix).get("sha256") for n in HASHES if (path / n).exists()]
    known = new.union(UNHASHED, *(names for names in hashed if isinstance(names, dict)))
    if others := sorted(_file_names(path) - known):
        listed = f"{', '.join(others[:5])}{', ..' if others[5:] else ''}"
        raise RunError(f"{path} holds files that Outrider did not write: {listed}.", fix)


def _publish(partial: Path, path: Path) -> None:
    """Flush every file and rename the folder, replacing an older one."""
    for file in (f for f in partial.rglob("*") if f.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    if path.exists():
        path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_weights(path: Path, tensors: Mapping[str, Tensor], stem: str, shard: int = SHARD) -> None:
    """Write one file, or several of at most `shard` bytes and an index."""
    separate = _without_shared_memory(tensors)
    plan = split_torch_state_dict_into_shards(
        separate, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=shard
    )
    for name, keys in plan.filename_to_tensors.items():
        write_tensors(path / name, {key: separate[key] for key in keys}, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(path / f"{stem}.safetensors.index.json", index)


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with another, which safetensors cannot store."""
    seen: set[int] = set()
    out = {}
    for key, value in tensors.items():
        value = value.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        out[key] = value.clone() if address in seen else value
        seen.add(address)
    return out
