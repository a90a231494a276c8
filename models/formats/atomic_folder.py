"""Atomic writing of a folder of weights: under a temporary name, flushed, then renamed."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import sync_folder, write_json, write_tensors
from outrider.models.formats.weight_folder import SIDECAR

SHARD = 5 * 10**9  # bytes of the largest weight file


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which then replaces `path`, a folder of Outrider's or none.

    Raises:
        RunError: `path` holds something else, or cannot be written.
    """
    occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if occupied and not (path / SIDECAR).exists():
        raise RunError(f"{path} exists and was not written by Outrider.", "Choose another folder.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        _publish(partial, path)
    except OSError as error:
        fix = "Free disk space, or choose another folder."
        raise RunError(f"{path} could not be written: {error}", fix) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, path: Path) -> None:
    """Flush every file and rename the folder, replacing an older one."""
    for file in partial.iterdir():
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
