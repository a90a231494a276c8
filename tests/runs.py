"""Configurations of short runs on the embedded target, for tests."""

import json
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.conf.compose import compose
from outrider.conf.console import Console
from outrider.conf.schema import Config
from outrider.train.settings import parse

QUIET = Console(quiet=True)
SMALL = [
    "target=tiny", "data.max_length=128", "data.max_samples=60", "train.batch_tokens=512",
    "train.max_steps=6", "train.eval_every=3", "train.save_every=2", "train.log_every=1",
    "train.lr=1e-3", "drafter.depths=2", "train.quick_eval=false", "train.own_prompts=0",
]  # fmt: skip


def config(folder: Path, *words: str) -> Config:
    return parse(compose([*SMALL, f"run.dir={folder}", *words]))


def generated_text(cache: Path) -> dict[str, Any]:
    """Return the files of self-generated text; the manifest without its seconds."""
    (folder,) = (cache / "self").iterdir()
    files: dict[str, Any] = {file.name: file.read_bytes() for file in folder.iterdir()}
    files["manifest.json"] = json.loads(files["manifest.json"])
    assert files["manifest.json"].pop("seconds") > 0
    return files


def free_port() -> int:
    """Return a free port for a server of a test.

    It is below the ports that the kernel gives to outgoing connections: a client that tries again
    and again before the server listens could otherwise be connected to itself, and keep the port.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
