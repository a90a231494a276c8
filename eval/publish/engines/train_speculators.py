"""Run `speculators train` in the engine's own environment, also where there is no accelerator.

The library asks torch for its accelerator and pins memory. Without an accelerator the answers are
those of a CPU; nothing else is changed. Arguments: those of `speculators train`.
"""

import sys
from typing import Any

import torch
from speculators.train import cli, dataloader, trainer
from speculators.train.config import TrainConfig


def use_cpu() -> None:
    """Answer the library's questions about accelerators with the CPU."""
    cpu = torch.device("cpu")

    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else cpu

    class UnpinnedLoader(dataloader.DataLoader):
        def __init__(self, *words: Any, **settings: Any) -> None:
            super().__init__(*words, **{**settings, "pin_memory": False})

    torch.accelerator.current_accelerator = current
    torch.accelerator.is_available = lambda: False  # it would ask the function above
    torch.accelerator.synchronize = lambda *_: None
    trainer.get_local_rank = lambda: cpu
    dataloader.DataLoader = UnpinnedLoader


if __name__ == "__main__":
    if not torch.accelerator.is_available():
        use_cpu()
    cli.main(TrainConfig.resolve(sys.argv[1:]))
