"""Outrider: draft models for speculative decoding, trained and proved.

The code lives in the checkout's root folders; `outrider/` links to them, so that every
import reads `outrider.models...`. Importing this package loads nothing else.
"""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent

if not (Path(__file__).parent / "models").is_dir() and (_ROOT / "pyproject.toml").is_file():
    __path__.append(str(_ROOT))  # an unzipped or Windows checkout without the links


def _version() -> str:
    """Return the version of the installed package, or that in pyproject.toml."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("outrider")
    except PackageNotFoundError:
        lines = (_ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        return next(line.split('"')[1] for line in lines if line.startswith("version = "))


__version__ = _version()
