"""What `outrider report` shows, as settings: the group `report`."""

import dataclasses
from collections.abc import Sequence

from outrider.conf.compose import compose, plain
from outrider.conf.errors import ConfigError
from outrider.conf.fields import key, read


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """A page on a run."""

    measure: bool = key(False, "measure first what is cheap: calibration of the drafter")
    examples: int = key(4, "answers shown of each report", "[1, inf)")


def read_report(overrides: Sequence[str]) -> tuple[str, ReportConfig, list[str]]:
    """`run.dir`, the settings behind `report.*`, and the other overrides.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, no run.
    """
    values = plain(compose(overrides, "report"))
    folder = values["run"]["dir"]
    if not folder:
        why, fix = "A report is about a run.", "Add run.dir=runs/<name>."
        raise ConfigError("run.dir", folder, why, fix)
    found: ReportConfig = read(ReportConfig, values["report"], "report")
    return str(folder), found, [word for word in overrides if not word.startswith("report.")]
