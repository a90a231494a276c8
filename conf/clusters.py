"""The shape of a cluster, as settings: the group `cluster` of `outrider launch`."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from outrider.conf.compose import verb_group
from outrider.conf.errors import ConfigError
from outrider.conf.fields import key

COUNT = "[1, inf)"
LINE = re.compile(r"(?P<host>[\w.-]+)\s+slots\s*=\s*(?P<slots>\d+)(\s+max_slots\s*=\s*\d+)?")


class Machine(NamedTuple):
    """A machine of a cluster.

    Attributes:
        host: its name or address; "" where nobody has said it.
        slots: processes on it, one per GPU.
    """

    host: str
    slots: int


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Machines, and who starts the processes on them."""

    by: Literal["torchrun", "accelerate", "slurm"] = key("torchrun", "who starts the processes")
    nodes: int = key(1, "machines", COUNT)
    gpus: int = key(1, "processes per machine, one per GPU", COUNT)
    host: str | None = key(None, "name or address of the first of several machines")
    hosts: str | None = key(None, "hostfile in place of these three: lines like 'node-0 slots=8'")
    port: int = key(29500, "a free one there", "[1, 65535]")
    cores: int = key(8, "CPU cores per machine", COUNT)
    partition: str | None = key(None, "slurm: partition; null: the cluster's default")
    hours: float = key(24.0, "slurm: time limit", "(0, inf)")
    grace: int = key(120, "seconds that ranks have to save when they are told to stop", COUNT)
    run: bool = key(False, "start it here and now (one machine)")
    out: str | None = key(None, "also write the script or commands to this file")


def read_cluster(overrides: Sequence[str]) -> tuple[ClusterConfig, list[str]]:
    """The settings behind `cluster.*`, and the other overrides.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range.
    """
    return verb_group(ClusterConfig, "cluster", overrides)


def machines(cluster: ClusterConfig) -> list[Machine]:
    """All of them, the one that the others meet at first.

    Raises:
        ConfigError: the hostfile cannot work, or contradicts other keys.
    """
    if cluster.hosts is None:
        return [Machine(cluster.host or "", cluster.gpus)] * cluster.nodes
    for name in ("nodes", "gpus", "host"):
        if getattr(cluster, name) != getattr(ClusterConfig, name):
            why = f"The hostfile {cluster.hosts} says it too."
            raise ConfigError(f"cluster.{name}", getattr(cluster, name), why, "Leave one away.")
    if cluster.by == "slurm":
        why = "Slurm chooses the machines itself."
        raise ConfigError(
            "cluster.hosts", cluster.hosts, why, "Say cluster.nodes and cluster.gpus."
        )
    found = read_hosts(Path(cluster.hosts).expanduser())
    if cluster.by == "accelerate" and len({one.slots for one in found}) > 1:
        slots = ", ".join(f"{one.host} {one.slots}" for one in found)
        why = (
            f"accelerate starts the same number of processes everywhere, and slots differ: {slots}."
        )
        raise ConfigError("cluster.hosts", cluster.hosts, why, "Use cluster.by=torchrun.")
    return found


def read_hosts(path: Path) -> list[Machine]:
    """The machines of a hostfile as DeepSpeed and Open MPI read it.

    Raises:
        ConfigError: no such file, a line of another kind, a host twice, no host at all.
    """
    if not path.is_file():
        why = "There is no such file."
        raise ConfigError("cluster.hosts", str(path), why, f"Paths start at {Path.cwd()}.")
    found = list[Machine]()
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        read_as = LINE.fullmatch(line)
        if read_as is None or int(read_as["slots"]) < 1:
            why = f"Line {number} is {text.strip()!r}."
            raise ConfigError("cluster.hosts", str(path), why, "Write lines like: node-0 slots=8")
        if read_as["host"] in {one.host for one in found}:
            why = f"{read_as['host']} is there twice; the second time in line {number}."
            raise ConfigError(
                "cluster.hosts", str(path), why, "Give it one line with all its slots."
            )
        found.append(Machine(read_as["host"], int(read_as["slots"])))
    if not found:
        raise ConfigError("cluster.hosts", str(path), "It names no host.", "Write: node-0 slots=8")
    return found
