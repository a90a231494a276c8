"""The wheel of this checkout, for tests that run without it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy, so that no build folder is left in the checkout."""
    unwanted = (".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "tests", "wandb")
    ignore = shutil.ignore_patterns(*unwanted)
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=ignore)
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    command = [sys.executable, "-m", *build, str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    return next(folder.glob("outrider-*.whl"))


def unpack_wheel(folder: Path) -> Path:
    """Return a folder for PYTHONPATH that holds the built wheel."""
    zipfile.ZipFile(build_wheel(folder)).extractall(folder / "site")
    return folder / "site"


def run_outrider(site: Path, cwd: Path, *words: str) -> str:
    """Run `outrider WORDS` from the unpacked wheel, which must succeed; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *words],
        cwd=cwd,
        env={
            **os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1",  # not the current folder
            "COLUMNS": "200",
            "OUTRIDER_CACHE": str(site.parent / "cache"),
        },
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
