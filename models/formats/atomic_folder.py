"""Writing a folder of weights whole or not at all: under another name, flushed, renamed."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import sync_folder, write_json, write_tensors
from outrider.models.formats.weight_folder import STAMP

SHARD = 5 * 10**9  # bytes


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A folder to write into, which gets this name when all has gone well.

    An older folder of ours is replaced.

    Raises:
        RunError: the place is taken by something else, or cannot be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not (path / STAMP).exists():
        raise RunError(f"{path} exists and was not written by Outrider.", "Choose another folder.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        _publish(partial, path)
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error}", "Make room, or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    stamp: Mapping[str, Any],
    stem: str = "model",
    shard: int = SHARD,
) -> None:
    """config.json, weights, and `outrider.json` with the hashes of the weight files.

    Args:
        shard: weights of more bytes than this are split into several files with an index.
    """
    with appearing(path) as partial:
        hashes = write_weights(partial, tensors, stem, shard)
        write_json(partial / STAMP, {**stamp, "sha256": hashes})
        write_json(partial / "config.json", dict(config))


def _publish(partial: Path, path: Path) -> None:
    """Flush every file and give the folder its name, in the place of an older one."""
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


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], stem: str, shard: int
) -> dict[str, str]:
    """One file, or several and an index; returns the sha256 of each."""
    whole = _separate(tensors)
    plan = split_torch_state_dict_into_shards(
        whole, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=shard
    )
    hashes = {
        name: write_tensors(path / name, {key: whole[key] for key in keys}, {"format": "pt"})
        for name, keys in plan.filename_to_tensors.items()
    }
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(path / f"{stem}.safetensors.index.json", index)
    return hashes


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """No two of them in the same memory: a file would hold one of them only."""
    seen: set[int] = set()
    out = {}
    for key, value in tensors.items():
        value = value.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        out[key] = value.clone() if place in seen else value
        seen.add(place)
    return out
