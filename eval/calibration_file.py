"""`calibration.json` beside a run's drafter: read, and given to a drafter of the same weights.

`eval/calibration.py` measures and writes it.
"""

from pathlib import Path
from typing import Any

from outrider.conf.json_shapes import read_object
from outrider.conf.tensor_files import fingerprint
from outrider.models.drafting.calibration import Bin, Calibration
from outrider.models.drafting.drafter import Drafter

FILE, FORMAT = "calibration.json", "outrider-calibration-1"
BIN = {"from, confidence, right": float, "guesses": int}
DEPTH = {"depth, guesses": int, "error": float, "bins": [BIN]}
CALIBRATION = {"format": FORMAT, "report, drafter": str, "depths": [DEPTH]}


def attach_calibration(drafter: Drafter, folder: Path) -> None:
    """Give a drafter the calibration beside it, if it was measured with the same weights.

    Args:
        folder: of the drafter; of a run's own, the file is in the run's folder.
    """
    found = read_calibration(folder) or read_calibration(folder.parent)
    if found is None or found["drafter"] != fingerprint(drafter.state_dict()):
        return
    depths = [
        [Bin(one["confidence"], one["guesses"], one["right"]) for one in depth["bins"]]
        for depth in found["depths"]
        if depth["bins"]  # short answers have no guess at the deepest ones
    ]
    drafter.calibration = Calibration(depths) if depths else None


def read_calibration(folder: Path) -> dict[str, Any] | None:
    """Read what `calibrate` wrote; None without the file, a CorruptFile in another format."""
    fix = f"Measure it again: outrider report run.dir={folder} report.measure=true"
    return read_object(folder / FILE, fix, CALIBRATION) if (folder / FILE).is_file() else None
