"""Joules that this machine has spent, where its counters can be read.

CPUs: the kernel's powercap files (RAPL), which wrap around and often belong to root. GPUs: NVML's
counter, if `pynvml` is installed. What is read is the whole package or GPU, whoever else is on it.
"""

from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")


class Meter:
    """Energy since it was made."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._packages = _packages(powercap)
        self._last = {file: _number(file) for file in self._packages}
        self._gpu_began = _gpus()
        self._cpu = 0.0

    def joules(self) -> float | None:
        """None where no counter can be read. Ask at least every few minutes: they wrap around."""
        for file, most in self._packages.items():
            now = _number(file)
            step = now - self._last[file]
            self._cpu += (step if step >= 0 else step + most) / 1e6
            self._last[file] = now
        gpu = _gpus()
        if not self._packages and gpu is None:
            return None
        return self._cpu + ((gpu or 0.0) - (self._gpu_began or 0.0))


def _packages(powercap: Path) -> dict[Path, int]:
    """Counters of whole packages (microjoules), and where each wraps around."""
    found = {}
    for zone in sorted(powercap.glob("intel-rapl:[0-9]")) if powercap.is_dir() else []:
        file = zone / "energy_uj"
        try:
            _number(file)
            found[file] = _number(zone / "max_energy_range_uj")
        except (OSError, ValueError):
            continue
    return found


def _number(file: Path) -> int:
    return int(file.read_text())


def _gpus() -> float | None:
    """Joules of all GPUs since their drivers were loaded."""
    if not torch.cuda.is_available():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return float(sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))) / 1e3
    except Exception:  # no library, no right, no counter: then there is no number
        return None
