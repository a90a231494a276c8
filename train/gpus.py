"""GPUs to fit a run on, as settings: the group `memory` of `outrider memory`."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from outrider.conf.compose import verb_group
from outrider.conf.fields import key


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """A target and a number of GPUs."""

    model: Literal["8b", "32b", "70b", "235b"] | None = key(
        None, "a usual target of this size instead of the run's own"
    )
    gpu: Literal["h100", "h200", "a100", "b200", "rtx4090", "mi300x"] = key("h100", "which GPUs")
    gpus: int = key(8, "how many, one rank each", "[1, inf)")
    room: float | None = key(None, "GB of each; null: as the vendor says", "(0, inf)")


def read_memory(overrides: Sequence[str]) -> tuple[MemoryConfig, list[str]]:
    """The settings behind `memory.*`, and the other overrides.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range.
    """
    return verb_group(MemoryConfig, "memory", overrides)
