"""How ranks share the work: one Accelerator, built from the configuration alone.

`accelerate launch train.py launch=zero2` is enough: the DeepSpeed plugin is made here. A launcher
that was told something else is refused, because one of the two would win silently.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch

from outrider.conf.errors import ConfigError
from outrider.launch.job_pool import THREADS
from outrider.train import deepspeed_build as compiled
from outrider.train.settings import LaunchConfig

REFUSED = {
    "ACCELERATE_USE_FSDP": "to use FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "to use Megatron-LM",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "to read DeepSpeed's settings from a file",
    "ACCELERATE_GRADIENT_CLIPPING": "to clip gradients, which train.clip says",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "to offload the optimizer",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "to offload parameters",
}

# what accelerate's file says of DeepSpeed: compared by `check`, and no rival of our settings
FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
OFFLOADED = {  # what DeepSpeed calls the parts of launch.offload
    "none": (),
    "optimizer": ("offload_optimizer",),
    "parameters": ("offload_optimizer", "offload_param"),
}


BUCKET = 2**26  # gradients that are reduced together, at most


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_here() -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def device() -> torch.device:
    """The device of this rank, known before any process group exists."""
    if torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false") != "true":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cores() -> int:
    """Give each process its share of the cores; returns how many threads it has.

    Launchers set OMP_NUM_THREADS=1 when nothing is said, which halves a two-core machine. Another
    value, or one set without a launcher, is the user's wish and stays.
    """
    if told := os.environ.get(THREADS):
        torch.set_num_threads(int(told))
        return torch.get_num_threads()
    launched = "LOCAL_WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, cores() // ranks_here()))
    return torch.get_num_threads()


def check(launch: LaunchConfig) -> None:
    """
    Raises:
        ConfigError: the launcher and the configuration contradict each other.
    """
    if launch.name == "single" and world_size() > 1:
        raise ConfigError(
            "launch", "single", f"The launcher started {world_size()} processes.",
            "Use launch=ddp, zero1, zero2 or zero3, or start one process.",
        )  # fmt: skip
    asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if asked and launch.name != f"zero{stage}":
        raise ConfigError(
            "launch", launch.name, f"The launcher was told to use DeepSpeed, ZeRO stage {stage}.",
            f"Use launch=zero{stage}, or drop --use_deepspeed from the launcher.",
        )  # fmt: skip
    for name, told in REFUSED.items():
        value = os.environ.get(name, "").lower()
        if value not in ("", "false", "none"):
            raise ConfigError(
                "launch", launch.name, f"The launcher was told {told} ({name}={value}).",
                "Everything about ranks is said by launch=...; drop it from the launcher.",
            )  # fmt: skip
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if steps not in ("", str(launch.accumulation)):
        raise ConfigError(
            "launch.accumulation", launch.accumulation,
            f"The launcher was told gradient_accumulation_steps {steps}, and accelerate obeys it.",
            "Set launch.accumulation alone; drop it from the launcher.",
        )  # fmt: skip
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed not in ("no", launch.precision):
        raise ConfigError(
            "launch.precision", launch.precision,
            f"The launcher was told to use --mixed_precision {mixed}.",
            "Set launch.precision alone, and give the launcher --mixed_precision no.",
        )  # fmt: skip


def accelerator(launch: LaunchConfig, clip: float, micro_batch: int, count: int) -> Any:
    """The Accelerator of this rank.

    Args:
        clip: largest gradient norm (DeepSpeed clips by itself).
        micro_batch: rows per forward, which DeepSpeed wants to know.
        count: parameters that are trained.
    """
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    check(launch)
    options: dict[str, Any] = {
        "gradient_accumulation_steps": launch.accumulation,
        "mixed_precision": launch.precision,
    }
    if world_size() > 1 or launch.name.startswith("zero"):
        wait = timedelta(minutes=launch.wait)
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend=backend(), timeout=wait)]
    if launch.name.startswith("zero"):
        _alone()
        compiled.load()
        os.environ.pop(FIELDS, None)
        options["deepspeed_plugin"] = DeepSpeedPlugin(
            hf_ds_config=deepspeed_settings(launch, clip, micro_batch, count)
        )
    elif not torch.cuda.is_available():
        options["cpu"] = True
    return Accelerator(**options)


def join(launch: LaunchConfig) -> None:
    """Meet the other ranks before accelerate does, to share the target with them."""
    if world_size() == 1 or torch.distributed.is_initialized():
        return
    if device().type == "cuda":
        torch.cuda.set_device(device())
    torch.distributed.init_process_group(backend(), timeout=timedelta(minutes=launch.wait))


def backend() -> str:
    """How ranks talk to each other."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def deepspeed_settings(
    launch: LaunchConfig, clip: float, micro_batch: int, count: int
) -> dict[str, Any]:
    """DeepSpeed's json for this launch; what it would choose by itself is left out."""
    pinned = torch.cuda.is_available()  # memory that a GPU can read by itself
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": launch.accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": int(launch.name.removeprefix("zero")),
            "reduce_bucket_size": min(BUCKET, count),  # allocated whole, by ZeRO-3
            **{part: {"device": "cpu", "pin_memory": pinned} for part in OFFLOADED[launch.offload]},
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's own AdamW steps there (Run._optimizer)
        "bf16": {"enabled": launch.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def _alone() -> None:
    """DeepSpeed wants a process group even for one process; give it the names of one."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def leave() -> None:
    """The ranks part: what comes now is rank 0's alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
