"""`outrider launch`: check a run for a cluster and print the command of each machine.

    outrider launch cluster.gpus=8 launch=zero2 train.batch_tokens=65536
    outrider launch cluster.hosts=hostfile launch=zero2 train.batch_tokens=65536

The configuration is validated for the cluster's number of ranks before anything starts or queues.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.text import Text

from outrider.conf.clusters import ClusterConfig, list_machines
from outrider.conf.compose import compose, verb_group
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.files import write
from outrider.conf.packages import require_packages
from outrider.conf.schema import Config
from outrider.launch.processes import ENTRY, locate_entry
from outrider.train import distributed
from outrider.train.settings import INPUT_FILES, check_files, parse

SLURM = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={cores}
#SBATCH --time={time}
#SBATCH --signal=TERM@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
{partition}
# {grace} s before the limit Slurm signals every rank, which saves and exits; requeued, it resumes.
set -euo pipefail
{exports}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task={cores} {command}
"""


def launch(overrides: list[str]) -> int:
    """Print the commands, and write or start them if `cluster` is set so. Returns the exit code."""
    cluster, words = verb_group(ClusterConfig, "cluster", overrides)
    config = checked_config(cluster, words)
    text = launch_script(cluster, words, config)
    console, machines = Console(), list_machines(cluster)
    ranks = sum(machine.slots for machine in machines)
    rows = config.train.batch_tokens // config.data.max_length
    summary = (
        f"{ranks} ranks ({config.launch.name}); {config.train.batch_tokens:,} tokens per step: "
        f"{rows // (ranks * config.launch.accumulation)} x {config.data.max_length} per forward "
        "pass and rank"
    )
    console.print(summary, soft_wrap=True)
    console.print(Text(text), soft_wrap=True)
    if cluster.out:
        write(Path(cluster.out), text.encode())
        console.print(f"written: {cluster.out}")
    if not cluster.run:
        return 0
    command = local_command(launch_commands(cluster, words)[0])
    env = {**os.environ, **rank_environment(cluster, machines[0].slots)}
    return subprocess.run(command, env=env, check=False).returncode


def checked_config(cluster: ClusterConfig, words: list[str]) -> Config:
    """Return the configuration, validated for the cluster's number of ranks."""
    machines = list_machines(cluster)
    if len(machines) > 1 and not machines[0].host and cluster.by != "slurm":
        why = "The processes of several machines connect to the first one."
        raise ConfigError("cluster.host", None, why, "Set its name or address.")
    if cluster.run and (len(machines) > 1 or cluster.by == "slurm"):
        why = "Only processes on this machine can be started."
        raise ConfigError("cluster.run", True, why, "Run the commands, or submit the script.")
    with assume_world_size(sum(machine.slots for machine in machines)):
        config = parse(compose(words))
        distributed.require_matching_launcher(config.launch)
    require_packages(config)
    check_files(config, *INPUT_FILES)
    return config


@contextmanager
def assume_world_size(count: int) -> Iterator[None]:
    """Set WORLD_SIZE, which the checks read, to `count`."""
    before = dict(os.environ)
    os.environ["WORLD_SIZE"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("WORLD_SIZE")
        os.environ.update(before)


def rank_environment(cluster: ClusterConfig, slots: int) -> dict[str, str]:
    """Return the environment of the processes of a machine with `slots` of them."""
    return {
        "OMP_NUM_THREADS": str(max(1, cluster.cores // slots)),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(cluster.grace),  # until torchrun kills its ranks
    }


def launch_commands(cluster: ClusterConfig, words: list[str]) -> list[str]:
    """Return a command per machine, or one command for all."""
    machines, run = list_machines(cluster), shlex.join([*ENTRY, *words])
    if cluster.by == "accelerate":
        ranks, host = sum(one.slots for one in machines), shlex.quote(machines[0].host)
        start = f"accelerate launch --num_machines={len(machines)} --num_processes={ranks}"
        start += " --multi_gpu" if ranks > 1 else ""
        first = f"--main_process_ip={host} --main_process_port={cluster.port}"
        joins = [f" --machine_rank={n} {first}" for n in range(len(machines))]
        if len(machines) == 1:
            joins = [""]
        return [f"{start}{join} --mixed_precision=no --dynamo_backend=no {run}" for join in joins]
    if len(machines) == 1:
        return [f"torchrun --standalone --nproc_per_node={machines[0].slots} {run}"]
    host = "$head" if cluster.by == "slurm" else machines[0].host
    commands = [  # machines may have different slots
        f"torchrun --nnodes={len(machines)} --nproc_per_node={machine.slots} --rdzv_id=outrider "
        f'--rdzv_backend=c10d --rdzv_endpoint="{host}:{cluster.port}" {run}'
        for machine in machines
    ]
    return commands if cluster.hosts else commands[:1]


def launch_script(cluster: ClusterConfig, words: list[str], config: Config) -> str:
    """Return a Slurm script, or the commands with their environment."""
    machines, commands = list_machines(cluster), launch_commands(cluster, words)
    if cluster.by == "slurm":
        minutes = round(60 * cluster.hours)
        return SLURM.format(
            name=re.sub(r"[^\w.-]+", "-", Path(config.run.dir).name), nodes=cluster.nodes,
            gpus=cluster.gpus, cores=cluster.cores,
            time=f"{minutes // 60:02d}:{minutes % 60:02d}:00",
            grace=cluster.grace, exports=_exports(cluster, cluster.gpus), command=commands[0],
            partition=f"#SBATCH --partition={cluster.partition}\n" if cluster.partition else "",
        )  # fmt: skip
    if len(commands) == 1:
        comment = "# on every machine\n" if len(machines) > 1 else ""
        return f"{comment}{_exports(cluster, machines[0].slots)}\n{commands[0]}\n"
    return "\n".join(
        f"# on {machine.host if cluster.hosts else f'machine {node}'}\n"
        f"{_exports(cluster, machine.slots)}\n{command}\n"
        for node, (machine, command) in enumerate(zip(machines, commands, strict=True))
    )


def _exports(cluster: ClusterConfig, slots: int) -> str:
    pairs = rank_environment(cluster, slots).items()
    return "\n".join(f"export {name}={value}" for name, value in pairs)


def local_command(command: str) -> list[str]:
    """Return the command with this interpreter's launchers and, in a checkout, its train.py."""
    words = locate_entry(shlex.split(command))
    module = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.launch"}
    rest = words[2:] if words[0] == "accelerate" else words[1:]
    return [sys.executable, "-m", module[words[0]], *rest]
