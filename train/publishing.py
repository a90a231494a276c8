"""What `outrider publish` writes and where, as settings: the group `publish`."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from outrider.conf.compose import verb_group
from outrider.conf.errors import ConfigError
from outrider.conf.fields import key

COUNT = "[1, inf)"
REPO = r"[\w.-]+/[\w.-]+"


@dataclasses.dataclass(frozen=True)
class PublishConfig:
    """Formats, places, and what the card cannot know by itself."""

    format: str = key("all", "sglang, vllm, speculators, ..., native; all: every one that fits")
    out: str | None = key(None, "folder to write; null: <run.dir>/published/<format>")
    repo: str | None = key(None, "on the model hub, OWNER/NAME; with all, -<format> is added")
    private: bool = key(True, "only you can see a repository that is made for it")
    dry_run: bool = key(False, "write and check the folder, show its files, upload nothing")
    prompts: int = key(3, "of the run's suite, decoded before and after", COUNT)
    new_tokens: int = key(32, "of each answer", COUNT)
    license: str | None = key(None, "of the drafter; null: the target's, as its card says")
    base_model: str | None = key(None, "hub id of the target; null: target.path, if it is one")
    datasets: tuple[str, ...] = key((), "hub ids of the data it was trained on, for the card")


def read_publish(overrides: Sequence[str]) -> PublishConfig:
    """The settings behind `publish.*` overrides.

    Raises:
        ConfigError: an unknown key, a wrong type, a format or a name that cannot be.
    """
    found, _ = verb_group(PublishConfig, "publish", overrides)
    for name, value, usual in (
        ("repo", found.repo, "me/eagle3-qwen3-8b"),
        ("base_model", found.base_model, "Qwen/Qwen3-8B"),
    ):  # fmt: skip
        if value is not None and not re.fullmatch(REPO, value):
            why = "A repository on the hub has an owner and a name."
            raise ConfigError(f"publish.{name}", value, why, f"Like publish.{name}={usual}.")
    if found.out is not None and Path(found.out).expanduser().is_file():
        why = "There is a file of this name, and a folder is written."
        raise ConfigError("publish.out", found.out, why, "Choose another name.")
    return found
