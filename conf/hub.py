"""The model hub: what may be an id of it, and its cache alone where it does not answer."""

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from outrider.conf.errors import ConfigError

HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w[\w.-]{0,95}(?<![.-])", re.ASCII)
SECONDS = 5.0  # to wait for a connection
_reached, _missed = set[str](), set[str]()  # endpoints


def require_folder_or_id(key: str, path: str) -> None:
    """Raise a `ConfigError` for text that is no folder and can be no hub id.

    What is written as a path (./a, /a, ~/a, a/b/c) is none.
    """
    place = Path(path).expanduser()
    if (path and place.is_dir()) or (HUB_ID.fullmatch(path) and not place.exists()):
        return
    why = "It is not a folder."
    if not (path and place.exists()):
        why = "There is no such folder, and it can be no hub id."
    fix = f"Paths start at the current folder, {Path.cwd()}; a hub id is NAME or OWNER/NAME."
    raise ConfigError(key, path, why, fix)


def use_cache_if_unreachable() -> None:
    """Set HF_HUB_OFFLINE=1 while the hub cannot be reached, unless the user has set it.

    Its client would retry every request for half a minute; with the variable it reads its cache, or
    fails at once. A later call connects again.
    """
    from huggingface_hub import constants

    endpoint = constants.ENDPOINT
    if endpoint in _reached or (constants.HF_HUB_OFFLINE and not _missed):
        return
    answers = _answers(endpoint)
    (_reached if answers else _missed).add(endpoint)
    if answers == constants.HF_HUB_OFFLINE:
        os.environ["HF_HUB_OFFLINE"] = "0" if answers else "1"
        readers: list[Any] = [constants]
        if "datasets" in sys.modules:  # it has read the variable
            readers.append(sys.modules["datasets"].config)
        for reader in readers:
            reader.HF_HUB_OFFLINE = not answers


def _answers(endpoint: str) -> bool:
    """Return whether a connection can be opened; True without a try if a proxy is set."""
    place = urlsplit(endpoint)
    if getproxies().keys() & {place.scheme, "all"}:
        return True
    try:
        port = place.port or {"http": 80}.get(place.scheme, 443)
        socket.create_connection((place.hostname or "", port), SECONDS).close()
    except OSError:
        return False
    return True
