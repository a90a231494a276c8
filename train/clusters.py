"""The shape of a cluster, as settings: the group `cluster` of `outrider launch`."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from outrider.train.compose import compose, plain
from outrider.train.fields import key, read

COUNT = "[1, inf)"


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Machines, and who starts the processes on them."""

    by: Literal["torchrun", "accelerate", "slurm"] = key("torchrun", "who starts the processes")
    nodes: int = key(1, "machines", COUNT)
    gpus: int = key(1, "processes per machine, one per GPU", COUNT)
    host: str | None = key(None, "name or address of the first of several machines")
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
    own = [word for word in overrides if word.startswith("cluster.")]
    values = plain(compose(own, "cluster/default"))["cluster"]
    found: ClusterConfig = read(ClusterConfig, values, "cluster")
    return found, [word for word in overrides if word not in own]
