"""What DeepSpeed compiles when it first starts, one process at a time.

torch marks a build with a file that a killed process leaves behind, and everybody who comes later
waits for that file to go, without end. Here the builds have a folder of their own and a lock that
the kernel takes back: who holds it knows that a mark in the folder is nobody's.
"""

import os
from pathlib import Path

import torch

from outrider.conf.files import claimed
from outrider.models.load import cache_home

OPERATOR = "ShareMemCommBuilder"  # how ranks of one machine reduce without a GPU
FOLDER = "TORCH_EXTENSIONS_DIR"
MARK = "lock"


def home() -> Path:
    """Where the builds of this torch are kept."""
    return cache_home() / "compiled" / f"torch-{torch.__version__}"


def load() -> None:
    """Have the operator in this process before DeepSpeed asks for it; it keeps what is loaded."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(OPERATOR)
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return
    folder = home() / builder.name
    if not any(folder.glob("*.so")) and os.environ.get("RANK", "0") == "0":
        print("DeepSpeed compiles an operator: about a minute, once on this machine", flush=True)
    told = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(home())
    try:
        with claimed(home(), waiting=lambda: None) as alone:
            if alone:
                (folder / MARK).unlink(missing_ok=True)
            builder.load()
    finally:
        os.environ.pop(FOLDER)
        if told is not None:
            os.environ[FOLDER] = told
