"""DeepSpeed's compiled operator, built by one process at a time.

torch marks a running build with a file. A killed process leaves the file, and others wait for it
forever. Here builds have a folder with a kernel lock, whose holder removes a leftover file.
"""

import os
from pathlib import Path

import torch

from outrider.conf.files import folder_lock
from outrider.conf.paths import cache_home

OPERATOR = "ShareMemCommBuilder"  # reduction between ranks of one machine without a GPU
BUILD_LOCK = "lock"


def build_folder() -> Path:
    """Return the folder of builds for this version of torch."""
    return cache_home() / "compiled" / f"torch-{torch.__version__}"


def load_operator() -> None:
    """Load the operator into this process, where DeepSpeed then finds it."""
    import deepspeed
    from accelerate.utils import patch_environment
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(OPERATOR)
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return
    folder = build_folder() / builder.name
    if not any(folder.glob("*.so")) and os.environ.get("RANK", "0") == "0":
        print("DeepSpeed compiles an operator: about a minute, once on this machine", flush=True)
    with (
        patch_environment(TORCH_EXTENSIONS_DIR=str(build_folder())),
        folder_lock(build_folder(), on_wait=lambda: None) as alone,
    ):
        if alone:
            (folder / BUILD_LOCK).unlink(missing_ok=True)
        builder.load()
