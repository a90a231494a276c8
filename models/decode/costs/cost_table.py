"""The file of cost tables: measured times of a target and a drafter on one machine.

Each table is for drafts, batches and contexts of some size. A run keeps them in
`<run.dir>/costs.json`; a published drafter, or one without weights, in the user's cache. The file
names what its times depend on: processor or GPU, threads, torch, precision, target and drafter.
Times of anything else are not used: `read_costs` says what differs.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.conf.errors import CorruptFile
from outrider.conf.files import write_json
from outrider.conf.json_shapes import read_object
from outrider.conf.paths import cache_home
from outrider.conf.quantities import format_count
from outrider.conf.tensor_files import fingerprint
from outrider.models.decode.costs.round_costs import DRAFT_AXES, TARGET_AXES, MeasuredTimes
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats.native import target_fingerprint
from outrider.models.target.process import processor
from outrider.models.target.target import Target

FILE, FORMAT = "costs.json", "outrider-costs-4"
SHAPE = {"depth, nodes": int, "expanded": [int]}
ROUND = {"shape": SHAPE, "draft, target, rest": float}
TABLE = {
    "decoded": {str: [ROUND]}, "read": float,
    "target": [{", ".join(TARGET_AXES): int, "ms": float}],
    "draft": [{", ".join(DRAFT_AXES): int, "ms": float}],
}  # fmt: skip
COSTS = {"format": FORMAT, "setting": {str: str}, "tables": [TABLE]}


@dataclass(frozen=True)
class CostSetting:
    """What measured times depend on."""

    machine: str
    threads: str
    torch: str
    dtype: str
    target: str
    drafter: str

    @classmethod
    def of(cls, target: Target, drafter: Drafter) -> "CostSetting":
        """Return the setting of this process."""
        cuda = target.device.type == "cuda"
        machine = torch.cuda.get_device_name(target.device) if cuda else processor()
        weights = fingerprint(drafter.state_dict())
        return cls(
            machine,
            str(torch.get_num_threads()),
            torch.__version__,
            str(target.dtype).removeprefix("torch."),
            target_fingerprint(target),
            f"{type(drafter).__name__} {weights}",
        )

    @property
    def name(self) -> str:
        """The machine and its threads: `AMD EPYC 9R14, 2 threads`."""
        return f"{self.machine}, {format_count(int(self.threads), 'thread')}"

    def cached_file(self) -> Path:
        """Return where the times of a drafter without a run are kept."""
        digest = hashlib.sha256("\n".join(vars(self).values()).encode()).hexdigest()
        return cache_home() / "costs" / f"{digest[:16]}.json"


def write_costs(file: Path, tables: Sequence[MeasuredTimes], setting: CostSetting) -> None:
    """Write cost tables.

    Raises:
        DiskFull, UnusablePlace: as `files.write`.
    """
    content = [times.fields() for times in tables]
    write_json(file, {"format": FORMAT, "setting": vars(setting), "tables": content})


def read_costs(file: Path, setting: CostSetting) -> tuple[list[MeasuredTimes], str]:
    """Return the cost tables of a file, or none and why they are not used; "" without a file."""
    if not file.is_file():
        return [], ""
    try:
        content = read_object(file, "It is measured again.", COSTS)
        differences = _differences(content["setting"], setting)
        if differences:
            return [], f"{file} differs in {differences}"
        return [MeasuredTimes.from_fields(setting.name, one) for one in content["tables"]], ""
    except (CorruptFile, ValueError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        return [], why if str(file) in why else f"{file}: {why}"


def _differences(known: dict[str, Any], setting: CostSetting) -> str:
    names = [name for name, value in vars(setting).items() if known.get(name) != value]
    return " and ".join(names)
