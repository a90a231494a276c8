"""`outrider launch`: what to type where, for a cluster of a given shape; or why it cannot work.

    outrider launch cluster.nodes=2 cluster.gpus=8 cluster.host=node-0 launch=zero2 drafter=eagle3
    outrider launch cluster.hosts=hostfile launch=zero2 drafter=eagle3

The run's configuration is checked as every rank will check it, for as many ranks as there will be,
before anything is started or a queue is waited for.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from outrider.conf.clusters import ClusterConfig, Machine, machines
from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.conf.files import write
from outrider.launch.job_pool import ROOT
from outrider.train import distributed as start
from outrider.train import trackers
from outrider.train.settings import NEEDED, Config, check_files, parse

ENTRY = "train.py"
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
# {grace} s before the limit every rank is told, saves and leaves; submitted again, it goes on.
set -euo pipefail
{exports}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task={cores} {command}
"""


def launch(overrides: list[str]) -> int:
    """The verb: print, write, or start.

    Raises:
        ConfigError: the run is wrong for so many ranks, or the shape lacks something.
    """
    from outrider.conf.clusters import read_cluster

    cluster, words = read_cluster(overrides)
    config = checked(cluster, words)
    text = script(cluster, words, config)
    console = Console()
    ranks = sum(one.slots for one in machines(cluster))
    rows = config.train.batch_tokens // config.data.max_length
    each = rows // (ranks * config.launch.accumulation)
    console.print(
        f"{ranks} ranks ({config.launch.name}); a step of {config.train.batch_tokens:,} tokens is "
        f"{each} x {config.data.max_length} per forward pass and rank",
        highlight=False,
        soft_wrap=True,
    )
    console.print(Text(text), soft_wrap=True)
    if cluster.out:
        write(Path(cluster.out), text.encode())
        console.print(f"written: {cluster.out}", highlight=False)
    if not cluster.run:
        return 0
    command = run_here(commands(cluster, words)[0])
    env = {**os.environ, **environment(cluster, machines(cluster)[0].slots)}
    return subprocess.run(command, env=env, check=False).returncode


def checked(cluster: ClusterConfig, words: list[str]) -> Config:
    """The configuration, if so many ranks can train it."""
    there = machines(cluster)
    if len(there) > 1 and not there[0].host and cluster.by != "slurm":
        why = "Several machines meet at the first one."
        raise ConfigError("cluster.host", None, why, "Give its name or address.")
    if cluster.run and (len(there) > 1 or cluster.by == "slurm"):
        why = "Only one machine's processes can be started from here."
        raise ConfigError("cluster.run", True, why, "Type the commands, or submit the script.")
    with as_ranks(sum(one.slots for one in there)):
        config = parse(compose(words))
        start.check(config.launch)
    trackers.check(config)
    check_files(config, *NEEDED)
    return config


@contextmanager
def as_ranks(count: int) -> Iterator[None]:
    """Checks ask the environment how many ranks there are."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(count)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def environment(cluster: ClusterConfig, slots: int) -> dict[str, str]:
    """What every process finds, on a machine of so many."""
    threads = max(1, cluster.cores // slots)
    return {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(cluster.grace),  # before torchrun kills its ranks
    }


def commands(cluster: ClusterConfig, words: list[str]) -> list[str]:
    """One per machine, or one that is the same on all."""
    there, run = machines(cluster), [ENTRY, *words]
    if cluster.by == "accelerate":
        return [
            shlex.join([*_accelerate(cluster, there, node), *run]) for node in range(len(there))
        ]
    if len(there) == 1:
        how = ["torchrun", "--standalone", f"--nproc_per_node={there[0].slots}"]
        return [shlex.join([*how, *run])]
    typed = [_torchrun(cluster, there, one, run) for one in there]
    return typed if cluster.hosts else typed[:1]


def _torchrun(cluster: ClusterConfig, there: list[Machine], one: Machine, run: list[str]) -> str:
    """Numbers of processes may differ: each machine says its own when they meet."""
    host = "$head" if cluster.by == "slurm" else there[0].host
    how = [
        "torchrun", f"--nnodes={len(there)}", f"--nproc_per_node={one.slots}",
        "--rdzv_id=outrider", "--rdzv_backend=c10d",
    ]  # fmt: skip
    return f'{shlex.join(how)} --rdzv_endpoint="{host}:{cluster.port}" {shlex.join(run)}'


def _accelerate(cluster: ClusterConfig, there: list[Machine], node: int) -> list[str]:
    ranks = sum(one.slots for one in there)
    several = [] if len(there) == 1 else [
        f"--machine_rank={node}", f"--main_process_ip={there[0].host}",
        f"--main_process_port={cluster.port}",
    ]  # fmt: skip
    return [
        "accelerate", "launch", f"--num_machines={len(there)}", f"--num_processes={ranks}",
        *(["--multi_gpu"] if ranks > 1 else []), *several,
        "--mixed_precision=no", "--dynamo_backend=no",
    ]  # fmt: skip


def script(cluster: ClusterConfig, words: list[str], config: Config) -> str:
    """A Slurm script, or the commands with their environment."""
    there, typed = machines(cluster), commands(cluster, words)
    if cluster.by == "slurm":
        minutes = round(60 * cluster.hours)
        return SLURM.format(
            name=Path(config.run.dir).name, nodes=cluster.nodes, gpus=cluster.gpus,
            cores=cluster.cores, time=f"{minutes // 60:02d}:{minutes % 60:02d}:00",
            grace=cluster.grace, exports=_exports(cluster, cluster.gpus), command=typed[0],
            partition=f"#SBATCH --partition={cluster.partition}\n" if cluster.partition else "",
        )  # fmt: skip
    if len(typed) == 1:
        where = "# on every machine\n" if len(there) > 1 else ""
        return f"{where}{_exports(cluster, there[0].slots)}\n{typed[0]}\n"
    return "\n".join(
        f"# on {one.host if cluster.hosts else f'machine {node}'}\n"
        f"{_exports(cluster, one.slots)}\n{command}\n"
        for node, (one, command) in enumerate(zip(there, typed, strict=True))
    )


def _exports(cluster: ClusterConfig, slots: int) -> str:
    pairs = environment(cluster, slots).items()
    return "\n".join(f"export {name}={value}" for name, value in pairs)


def run_here(command: str) -> list[str]:
    """The command with this interpreter's own launchers and this checkout's entry."""
    words = [str(ROOT / ENTRY) if word == ENTRY else word for word in shlex.split(command)]
    module = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.launch"}
    rest = words[2:] if words[0] == "accelerate" else words[1:]
    return [sys.executable, "-m", module[words[0]], *rest]
