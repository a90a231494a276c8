"""A program, not a test: bytes of weights, gradients and moments that a rank holds after two steps.

    torchrun --nproc_per_node=2 tests/held_states.py RUN_DIR launch=zero2

Everything that Python still knows is counted, but for the target and the text.
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
    """Address and bytes of what lies under some tensors."""
    found = {}
    for tensor in tensors:  # type: ignore[attr-defined]
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def held(run: Trainer) -> float:
    """Bytes per parameter, gradients not counted."""
    gc.collect()
    model, material = run.target.model, run.data
    known = storages([*model.parameters(), *model.buffers()])
    known |= storages([v for part in (material.train, material.held) for v in vars(part).values()])
    found = storages(obj for obj in gc.get_objects() if type(obj) is not type)
    count = sum(getattr(p, "ds_numel", p.numel()) for p in run.objective.parameters())
    return sum(size for place, size in found.items() if place not in known) / count


def main(folder: str, *words: str) -> None:
    def publish(run: Trainer) -> Path:
        if run.main:
            print(f"held {held(run):.2f}", flush=True)
        return run.folder

    best_drafter.publish, best_drafter.save_if_best = publish, lambda *_: False
    Trainer.save = lambda self: None  # type: ignore[method-assign]
    config = runs.config(Path(folder), "train.max_steps=2", "train.eval_every=9", *words)
    train.train(config)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
