"""The Accelerator of a rank, built only from the `launch` settings.

`accelerate launch train.py launch=zero2` is enough: the DeepSpeed plugin is made here. Options of
the launcher that differ are refused, because one of the two would be ignored silently.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import LaunchConfig
from outrider.models.target.process import backend, device, world_size
from outrider.train import deepspeed_build

REFUSED = {
    "ACCELERATE_USE_FSDP": "to use FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "to use Megatron-LM",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "to read DeepSpeed's settings from a file",
    "ACCELERATE_GRADIENT_CLIPPING": "to clip gradients, which train.clip sets",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "to offload the optimizer",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "to offload parameters",
}

# DeepSpeed settings of accelerate's file, which `require_matching_launcher` compares
FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
OFFLOADED = {  # launch.offload -> options of DeepSpeed
    "none": (),
    "optimizer": ("offload_optimizer",),
    "parameters": ("offload_optimizer", "offload_param"),
}
BUCKET = 2**26  # most gradients that are reduced together


def require_matching_launcher(launch: LaunchConfig) -> None:
    """Raise a `ConfigError` if the launcher and the configuration contradict each other."""
    if launch.name == "single" and world_size() > 1:
        why = f"The launcher started {world_size()} processes."
        fix = "Use launch=ddp, zero1, zero2 or zero3, or start one process."
        raise ConfigError("launch", "single", why, fix)
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if deepspeed and launch.name != f"zero{stage}":
        why = f"The launcher uses DeepSpeed, ZeRO stage {stage}."
        fix = f"Use launch=zero{stage}, or drop --use_deepspeed from the launcher."
        raise ConfigError("launch", launch.name, why, fix)
    for name, option in REFUSED.items():
        value = os.environ.get(name, "").lower()
        if value not in ("", "false", "none"):
            why = f"The launcher is configured {option} ({name}={value})."
            fix = "launch=... sets everything about ranks; drop it from the launcher."
            raise ConfigError("launch", launch.name, why, fix)
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if steps not in ("", str(launch.accumulation)):
        why = f"The launcher sets gradient_accumulation_steps {steps}, which accelerate uses."
        fix = "Set only launch.accumulation; drop it from the launcher."
        raise ConfigError("launch.accumulation", launch.accumulation, why, fix)
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed not in ("no", launch.precision):
        why = f"The launcher sets --mixed_precision {mixed}."
        fix = "Set only launch.precision, and give the launcher --mixed_precision no."
        raise ConfigError("launch.precision", launch.precision, why, fix)


def build_accelerator(launch: LaunchConfig, clip: float, micro_batch: int, count: int) -> Any:
    """Return the Accelerator of this rank.

    DeepSpeed clips by itself, and needs the rows per forward and the number of trained parameters.
    """
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, patch_environment

    require_matching_launcher(launch)
    options: dict[str, Any] = {
        "gradient_accumulation_steps": launch.accumulation,
        "mixed_precision": launch.precision,
    }
    if world_size() > 1 or launch.name.startswith("zero"):
        wait = timedelta(minutes=launch.wait)
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend=backend(), timeout=wait)]
    if launch.name.startswith("zero"):
        _set_single_process()
        on_cpu = device().type == "cpu"
        if on_cpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # also on a machine with a GPU
        deepspeed_build.load_operator()
        os.environ.pop(FIELDS, None)
        options["deepspeed_plugin"] = DeepSpeedPlugin(
            hf_ds_config=deepspeed_settings(launch, clip, micro_batch, count)
        )
        # accelerate drops DeepSpeed without a message where its variable asks for the CPU
        variables = {"accelerate_use_cpu": "false", "accelerate_torch_device": "cpu"}
        with patch_environment(**(variables if on_cpu else {})):
            return _with_deepspeed(Accelerator(**options))
    if device().type == "cpu":
        options["cpu"] = True
    return Accelerator(**options)


def _with_deepspeed(accelerator: Any) -> Any:
    """Return the Accelerator; raise a RunError if it would train without DeepSpeed."""
    if accelerator.distributed_type != "DEEPSPEED":
        message = f"accelerate chose {accelerator.distributed_type} in place of DeepSpeed."
        raise RunError(message, "Unset the variables ACCELERATE_*, or use launch=ddp.")
    return accelerator


def limit_waits(minutes: float) -> None:
    """Set the timeout of all process groups; DeepSpeed makes its own with PyTorch's default."""
    if torch.distributed.is_initialized():
        c10d = torch.distributed.distributed_c10d
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(timedelta(minutes=minutes), group)


def deepspeed_settings(
    launch: LaunchConfig, clip: float, micro_batch: int, count: int
) -> dict[str, Any]:
    """Return DeepSpeed's settings for this launch, where they differ from its defaults."""
    pinned = device().type == "cuda"  # page-locked memory, which a GPU reads directly
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": launch.accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": int(launch.name.removeprefix("zero")),
            "reduce_bucket_size": min(BUCKET, count),  # ZeRO-3 allocates all of it
            **{part: {"device": "cpu", "pin_memory": pinned} for part in OFFLOADED[launch.offload]},
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW steps, see optimizer.py
        "bf16": {"enabled": launch.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def _set_single_process() -> None:
    """Set the environment of a process group of one, which DeepSpeed needs."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
