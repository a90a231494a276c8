"""Who works: processes, threads, libraries, and the precisions that this device multiplies in."""

import torch

from outrider.conf.errors import ConfigError
from outrider.launch.cost_estimate import pieces_rate
from outrider.launch.doctor.finding import Finding, State
from outrider.train import distributed as start
from outrider.train.manifest import versions
from outrider.train.settings import Config

FASTER = 1.3  # times, from which the other precision is worth a word
GOOD = 1e9


def launcher(config: Config) -> Finding:
    """World, backend and device; the launcher's wishes against the configuration's."""
    launch, world = config.launch, start.world_size()
    gpus = torch.cuda.device_count()
    backend = start.backend() if world > 1 else None
    facts = {"launch": launch.name, "ranks": world, "device": str(start.device()), "gpus": gpus,
             "backend": backend, "wait_minutes": launch.wait}  # fmt: skip
    said = f"launch={launch.name}, {world} process" + ("es" if world > 1 else "")
    said += f" over {backend}" if backend else ""
    said += f" on {start.device()}" + (f", {gpus} GPUs here" if gpus else ", no GPU here")
    try:
        start.check(launch)
    except ConfigError as error:
        said = f"{error.key}={error.value}: {error.why}"
        return Finding("launcher", "wrong", said, facts, error.fix)
    if world == 1 and gpus > 1:
        fix = f"accelerate launch --num_processes {gpus} train.py launch=ddp ... uses them all."
        return Finding("launcher", "note", said, facts, fix)
    return Finding("launcher", "ok", said, facts)


def libraries(config: Config) -> Finding:
    """Versions; DeepSpeed must be there where it is to be used."""
    found = versions()
    said = "  ".join(f"{name} {version}" for name, version in found.items())
    if config.launch.name.startswith("zero") and found["deepspeed"] == "not installed":
        fix = "pip install deepspeed, or use launch=ddp."
        return Finding("libraries", "wrong", said, {"versions": found}, fix)
    return Finding("libraries", "ok", said, {"versions": found})


def threads() -> Finding:
    """Threads of each rank against the cores there are."""
    here = start.ranks_here()
    cores = start.cores()
    each = torch.get_num_threads()
    facts = {"threads": each, "cores": cores, "ranks_here": here}
    said = f"{each} per rank, {here} rank(s) here, {cores} cores"
    if each * here > cores:
        fix = f"They wait for each other: OMP_NUM_THREADS={max(1, cores // here)}."
        return Finding("threads", "note", said, facts, fix)
    if (each + 1) * here <= cores and not torch.cuda.is_available():
        fix = f"Cores stand idle: OMP_NUM_THREADS={cores // here}, or leave it unset."
        return Finding("threads", "note", said, facts, fix)
    return Finding("threads", "ok", said, facts)


def precision(config: Config) -> Finding:
    """Whether bfloat16 works here, and how fast it is beside float32: two products, measured."""
    wanted = config.launch.precision == "bf16" or config.target.dtype == "bfloat16"
    brief, full = _brief_rate(), pieces_rate(4)
    facts = {"launch_precision": config.launch.precision, "target_dtype": config.target.dtype,
             "bf16_works": brief > 0, "bf16_flops": brief, "fp32_flops": full}  # fmt: skip
    if not brief:
        state: State = "wrong" if wanted else "ok"
        fix = "Use launch.precision=no and target.dtype=float32."
        return Finding("precision", state, "no bfloat16 products here", facts, fix)
    said = (
        f"launch.precision={config.launch.precision}, target.dtype={config.target.dtype}; products "
        f"of bfloat16 {brief / GOOD:.0f} GFLOP/s, of float32 {full / GOOD:.0f}"
    )
    if config.target.dtype == "float16" and start.device().type == "cpu":
        fix = "A CPU is slow in float16: target.dtype=bfloat16 or float32."
        return Finding("precision", "note", said, facts, fix)
    if wanted and full > FASTER * brief:
        fix = "float32 is faster here: launch.precision=no, target.dtype=float32."
        return Finding("precision", "note", said, facts, fix)
    if config.launch.precision == "no" and brief > FASTER * full:
        fix = f"launch.precision=bf16 may be worth it: products are {brief / full:.1f} x as fast."
        return Finding("precision", "note", said, facts, fix)
    return Finding("precision", "ok", said, facts)


def _brief_rate() -> float:
    """Of bfloat16 products; 0 where there are none."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return 0.0
    try:
        return pieces_rate(2)
    except RuntimeError:
        return 0.0
