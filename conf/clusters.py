"""Shape of a cluster: the group `cluster` of `outrider launch`, and hostfiles."""

import dataclasses
import re
from pathlib import Path
from typing import Literal, NamedTuple

from outrider.conf.errors import ConfigError
from outrider.conf.fields import option, require_word
from outrider.conf.files import read_bytes

COUNT = "[1, inf)"
HOSTFILE_LINE = re.compile(
    r"(?P<host>[\w.-]+)\s+slots\s*=\s*(?P<slots>\d{1,4})(\s+max_slots\s*=\s*\d+)?"
)


class Host(NamedTuple):
    """A machine of a cluster."""

    host: str  # name or address; "" if unknown
    slots: int  # processes on it, one per GPU


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Machines and launcher."""

    by: Literal["torchrun", "accelerate", "slurm"] = option("torchrun", "launcher of the processes")
    nodes: int = option(1, "machines", "[1, 65536]")
    gpus: int = option(1, "processes per machine, one per GPU", "[1, 1024]")
    host: str | None = option(None, "name or address of the first of several machines")
    hosts: str | None = option(
        None, "hostfile, replaces nodes, gpus and host; lines like 'node-0 slots=8'"
    )
    port: int = option(29500, "free port on the first machine", "[1, 65535]")
    cores: int = option(8, "CPU cores per machine", COUNT)
    partition: str | None = option(None, "slurm: partition; null: the cluster's default")
    hours: float = option(24.0, "slurm: time limit", "(0, inf)")
    grace: int = option(120, "seconds for ranks to save after a stop signal", COUNT)
    run: bool = option(False, "also start the run (one machine)")
    out: str | None = option(None, "also write the script or commands to this file")

    def __post_init__(self) -> None:
        require_word("cluster.host", self.host)
        require_word("cluster.partition", self.partition)


def list_machines(cluster: ClusterConfig) -> list[Host]:
    """Return all machines; the first one hosts the rendezvous."""
    if cluster.hosts is None:
        return [Host(cluster.host or "", cluster.gpus)] * cluster.nodes
    for name in ("nodes", "gpus", "host"):
        if getattr(cluster, name) != getattr(ClusterConfig, name):
            why = f"The hostfile {cluster.hosts} also defines it."
            raise ConfigError(f"cluster.{name}", getattr(cluster, name), why, "Set only one.")
    if cluster.by == "slurm":
        why = "Slurm chooses the machines itself."
        raise ConfigError("cluster.hosts", cluster.hosts, why, "Set cluster.nodes, cluster.gpus.")
    machines = read_hostfile(Path(cluster.hosts).expanduser())
    if cluster.by == "accelerate" and len({machine.slots for machine in machines}) > 1:
        slots = ", ".join(f"{machine.host} {machine.slots}" for machine in machines)
        why = f"accelerate starts equally many processes on every machine; slots differ: {slots}."
        raise ConfigError("cluster.hosts", cluster.hosts, why, "Use cluster.by=torchrun.")
    return machines


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile in the format of DeepSpeed and Open MPI; a `ConfigError` names its line."""

    def refused(why: str, fix: str = "Write lines like: node-0 slots=8") -> ConfigError:
        return ConfigError("cluster.hosts", str(path), why, fix)

    if not path.is_file():
        raise refused("There is no such file.", f"Paths start at {Path.cwd()}.")
    try:
        lines = read_bytes(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise refused(f"It cannot be read: {error}") from None
    machines = dict[str, Host]()
    for number, text in enumerate(lines, start=1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        match = HOSTFILE_LINE.fullmatch(line)
        if match is None or int(match["slots"]) < 1:
            raise refused(f"Line {number} is {text.strip()!r}.")
        host = match["host"]
        if host in machines:
            raise refused(f"Line {number} repeats {host}.", "Give it one line with all its slots.")
        machines[host] = Host(host, int(match["slots"]))
    if not machines:
        raise refused("It contains no host.")
    return list(machines.values())
