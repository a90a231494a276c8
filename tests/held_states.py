"""A program: print the bytes of weights and optimizer moments of one rank after two steps.

    torchrun --nproc_per_node=2 tests/held_states.py RUN_DIR launch=zero2

It counts all live CPU tensors except those of the target and the text.
"""

import gc
import os
import sys
from pathlib import Path

import torch

from outrider.launch import train
from outrider.train import best_drafter
from outrider.train.trainer import Trainer
from tests import runs


def storages(tensors: object) -> dict[int, int]:
    """Return the size in bytes of each storage, by address."""
    sizes = {}
    for tensor in tensors:  # type: ignore[attr-defined]
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def bytes_per_parameter(run: Trainer) -> float:
    """Bytes per parameter, without gradients."""
    gc.collect()
    model, material = run.target.model, run.data
    excluded = storages([*model.parameters(), *model.buffers()])
    excluded |= storages(
        [v for part in (material.train, material.held) for v in vars(part).values()]
    )
    live = storages(obj for obj in gc.get_objects() if type(obj) is not type)
    count = sum(getattr(p, "ds_numel", p.numel()) for p in run.objective.parameters())
    return sum(size for address, size in live.items() if address not in excluded) / count


def main(folder: str, *words: str) -> None:
    def publish(run: Trainer) -> Path:
        if run.main:
            print(f"held {bytes_per_parameter(run):.2f}", flush=True)
        return run.folder

    best_drafter.write_result, best_drafter.save_if_best = publish, lambda *_: False
    Trainer.save = lambda self: None  # type: ignore[method-assign]
    config = runs.config(Path(folder), "train.max_steps=2", "train.eval_every=9", *words)
    train.train(config)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
