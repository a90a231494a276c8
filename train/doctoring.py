"""How far `outrider doctor` looks and what `outrider advise` tries: the groups of these verbs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from outrider.conf.compose import verb_group
from outrider.conf.errors import ConfigError
from outrider.conf.fields import key

COUNT = "[1, inf)"
FEWEST = 2  # pilots, for a line


@dataclasses.dataclass(frozen=True)
class DoctorConfig:
    """How thoroughly a run is looked at."""

    json: str | None = key(None, "file for everything that was found; json=... for short")
    conversations: int = key(64, "of the data, rendered turn by turn for the template", COUNT)
    measure: bool = key(True, "try batches and time steps; false: sums alone")
    steps: int = key(3, "timed, after one that warms up", COUNT)


@dataclasses.dataclass(frozen=True)
class AdviseConfig:
    """Pilot runs on small parts of the training text."""

    shares: tuple[float, ...] = key((0.01, 0.02, 0.04), "of the training tokens", "(0, 1]")
    steps: int = key(150, "of every pilot, however much text it has", COUNT)
    repeats: int = key(2, "pilots of each share, on other text and another seed", COUNT)


def read_doctor(overrides: Sequence[str]) -> tuple[DoctorConfig, list[str]]:
    """The settings behind `doctor.*`, and the other overrides.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range.
    """
    words = [f"doctor.{word}" if word.startswith("json=") else word for word in overrides]
    found, rest = verb_group(DoctorConfig, "doctor", words)
    if found.json is not None and Path(found.json).expanduser().is_dir():
        why = "There is a folder of this name, and a file is written."
        raise ConfigError("doctor.json", found.json, why, "Like json=doctor.json.")
    return found, rest


def read_advise(overrides: Sequence[str]) -> tuple[AdviseConfig, list[str]]:
    """The settings behind `advise.*`, and the other overrides.

    Raises:
        ConfigError: as `read_doctor`; or too few shares to draw a line through.
    """
    found, words = verb_group(AdviseConfig, "advise", overrides)
    if len(set(found.shares)) < FEWEST:
        why = "What more text brings is a line through pilots of several sizes."
        raise ConfigError("advise.shares", list(found.shares), why, "Like [0.01,0.02,0.04].")
    return found, words
