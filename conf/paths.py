"""Cache folder of the user."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Return the folder of converted models: $OUTRIDER_CACHE, or outrider/ in the user's cache."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider"
