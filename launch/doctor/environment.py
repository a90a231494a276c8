"""Checks of the environment: processes, libraries, threads, and the precisions of this device."""

import torch

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.packages import install_command
from outrider.conf.quantities import format_count
from outrider.conf.schema import Config
from outrider.launch.cost_estimate import matmul_rate
from outrider.launch.doctor.finding import Finding
from outrider.launch.processes import ENTRY
from outrider.models.target import process
from outrider.train import distributed
from outrider.train.manifest import versions

FASTER = 1.3  # speed ratio from which the other precision is recommended


def check_launcher(config: Config) -> Finding:
    """Report world size, backend and device, and whether launcher and configuration agree."""
    launch, world, gpus = config.launch, process.world_size(), torch.cuda.device_count()
    try:
        device = process.device()
    except RunError as error:
        return Finding(
            "launcher", "wrong", error.message, {"ranks": world, "gpus": gpus}, error.fix
        )
    backend = process.backend() if world > 1 else None
    facts = {"launch": launch.name, "ranks": world, "device": str(device), "gpus": gpus,
             "backend": backend, "wait_minutes": launch.wait}  # fmt: skip
    message = f"launch={launch.name}, {format_count(world, 'process', 'processes')}"
    message += f" over {backend}" if backend else ""
    message += f" on {device}, {format_count(gpus, 'GPU') if gpus else 'no GPU'}"
    try:
        distributed.require_matching_launcher(launch)
    except ConfigError as error:
        message = f"{error.key}={error.value}: {error.why}"
        return Finding("launcher", "wrong", message, facts, error.fix)
    start = f"accelerate launch --num_processes {gpus} {' '.join(ENTRY)}"
    fix = f"{start} launch=ddp ... uses all GPUs."
    idle = world == 1 and gpus > 1
    return Finding("launcher", "note" if idle else "ok", message, facts, fix)


def check_libraries(config: Config) -> Finding:
    """Report versions; DeepSpeed must be installed if the launch uses it."""
    installed = versions()
    message = "  ".join(f"{name} {version}" for name, version in installed.items())
    fix = f"Install it: {install_command('deepspeed')}, or use launch=ddp."
    missing = config.launch.name.startswith("zero") and installed["deepspeed"] == "not installed"
    return Finding("libraries", "wrong" if missing else "ok", message, {"versions": installed}, fix)


def check_threads() -> Finding:
    """Compare the threads of the ranks on this machine with its cores."""
    local, cores = process.local_world_size(), process.available_cores()
    each = torch.get_num_threads()
    facts = {"threads": each, "cores": cores, "ranks_here": local}
    here = f"{format_count(local, 'rank')} on this machine"
    message = f"{each} per rank, {here}, {format_count(cores, 'core')}"
    fix = ""
    if each * local > cores:
        fix = f"More threads than cores: set OMP_NUM_THREADS={max(1, cores // local)}."
    elif (each + 1) * local <= cores and process.device().type == "cpu":
        fix = f"Cores are idle: set OMP_NUM_THREADS={cores // local}, or leave it unset."
    return Finding("threads", "note" if fix else "ok", message, facts, fix)


def check_precision(config: Config) -> Finding:
    """Measure matrix products in bfloat16 and float32, and compare with the configuration."""
    bf16 = config.launch.precision == "bf16" or config.target.dtype == "bfloat16"
    half, full = _bf16_rate(), matmul_rate(4)
    facts = {"launch_precision": config.launch.precision, "target_dtype": config.target.dtype,
             "bf16_works": half > 0, "bf16_flops": half, "fp32_flops": full}  # fmt: skip
    if not half:
        message = "this device has no bfloat16 matrix products"
        fix = "Use launch.precision=no and target.dtype=float32."
        return Finding("precision", "wrong" if bf16 else "ok", message, facts, fix)
    message = (
        f"launch.precision={config.launch.precision}, target.dtype={config.target.dtype}; matrix "
        f"products in bfloat16: {half / 1e9:.0f} GFLOP/s, in float32: {full / 1e9:.0f}"
    )
    fix = ""
    if config.target.dtype == "float16" and process.device().type == "cpu":
        fix = "float16 is slow on a CPU: use target.dtype=bfloat16 or float32."
    elif bf16 and full > FASTER * half:
        fix = "float32 is faster on this device: use launch.precision=no, target.dtype=float32."
    elif config.launch.precision == "no" and half > FASTER * full:
        fix = f"launch.precision=bf16 is faster: its products run {half / full:.1f}x as fast."
    return Finding("precision", "note" if fix else "ok", message, facts, fix)


def _bf16_rate() -> float:
    """FLOP/s of bfloat16 products; 0 if the device has none."""
    on_gpu = process.device().type == "cuda"
    if on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        return 0.0
    try:
        return matmul_rate(2)
    except RuntimeError:
        return 0.0
