"""How traces are recorded, as settings: the group `record`."""

import dataclasses
import re
from typing import Literal

from outrider.conf.fields import key

COUNT = "[1, inf)"


@dataclasses.dataclass(frozen=True)
class RecordConfig:
    """What is kept of every row, and how small (data/record/)."""

    name: Literal["full", "small"] = key("full", "which settings (choose with record=...)")
    states: Literal["same", "bf16", "fp8", "int8", "int4", "coded"] = key(
        "bf16", "how states are stored; same: as the target computes them"
    )
    step: float = key(
        0.5, "of states=coded, in sizes of a column (interquartile range / 1.35)", "(0, 4]"
    )
    top: int = key(
        0, "likely tokens kept of the teacher, with the rest's share; 0: its last state", "[0, 256]"
    )
    shard: int = key(65536, "tokens of a file", COUNT)
    check_every: int = key(64, "files between comparisons with a plain forward", COUNT)
    share: str = key("1/1", "this machine's part of the files: 2/4 is the second of four")
    damaged: Literal["refuse", "skip", "again"] = key(
        "refuse", "files that are not what was written: stop, leave out, or record again"
    )

    def __post_init__(self) -> None:
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", self.share)
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError(f"share = {self.share}: write 1/4 for the first of four machines")

    @property
    def part(self) -> tuple[int, int]:
        """(which machine, of how many), counted from 0."""
        mine, _, all_of_them = self.share.partition("/")
        return int(mine) - 1, int(all_of_them)
