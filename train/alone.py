"""The configuration to measure a published drafter with, which no run folder describes."""

from pathlib import Path

from outrider.conf.compose import choices, compose
from outrider.conf.errors import ConfigError
from outrider.train.settings import Config, only_measures, parse


def load_alone(overrides: list[str]) -> Config:
    """The target is chosen as in training, or `target=` names a folder or hub id; `drafter` is a
    placeholder until the drafter's own files are read.

    Raises:
        ConfigError: there is no target or no folder for the report, or a key does not exist.
    """
    words = [word for word in overrides if word.startswith(("target=", "target."))]
    asked = compose([word for word in overrides if word not in words], "eval")
    only_measures(asked)
    folder = asked.run.dir
    if not folder or (Path(folder) / "config.yaml").exists():
        why = "The report of a published drafter needs a folder of its own, not a training run's."
        raise ConfigError("run.dir", folder, why, "Add run.dir=runs/<name>.")
    base = compose(_target(words), "train")
    base.eval, base.decode, base.run.dir = asked.eval, asked.decode, folder
    base.run.seed = asked.run.seed or 0
    return parse(base)


def _target(words: list[str]) -> list[str]:
    """`target=Qwen/Qwen3-8B` is `target=hf target.path=Qwen/Qwen3-8B`."""
    named = [word.partition("=")[2] for word in words if word.startswith("target=")]
    if not named:
        why = "A drafter drafts for one target, and no run folder says which."
        raise ConfigError("target", None, why, "Add target=<folder or hub id>, tiny or smollm2.")
    if named[-1] in choices("target"):
        return words
    others = [word for word in words if not word.startswith("target=")]
    return ["target=hf", f"target.path={named[-1]}", *others]
