"""Outrider's own folder for a drafter: config.json and model.safetensors, nothing else.

`config.json` holds the drafter's settings, the shape of its target, the taps by their physical
names ("output of decoder layer k") and the fingerprint of the target it was trained for.
`model.safetensors` holds the drafter's own weights; nothing of the target.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import fingerprint, read_json, read_tensors, write_json, write_tensors
from outrider.models import drafters
from outrider.models.drafter import Drafter, Shape
from outrider.models.formats.weight_folder import Folder
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab

FORMAT = "outrider-drafter-1"
PARTS = {"drafter", "taps", "target", "sha256"}  # without one of them nothing can be loaded
TARGET_PARTS = {"name", "fingerprint", "vocab", "hidden", "layers"}
FIX = "Train again, or copy the folder again from where it is whole."


class Native:
    """Our folder among the other formats; it holds every drafter."""

    words: tuple[str, ...] = ("native",)
    drafters: tuple[str, ...] = ()
    served = "Outrider"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        return ""

    def write(self, drafter: Drafter, target: Target, cfg: Any, folder: Path) -> None:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if taken and read_json(folder / "config.json", FIX).get("format") != FORMAT:
            message = f"{folder} exists and was not written by Outrider."
            raise RunError(message, "Choose another folder.")
        save(drafter, folder, target, cfg, {})

    def knows(self, folder: Folder) -> bool:
        return folder.config.get("format") == FORMAT

    def read(self, folder: Path, target: Target) -> tuple[Drafter, Any]:
        drafter, cfg = _stored(folder, target)
        return drafter.eval(), cfg


def target_fingerprint(target: Target) -> str:
    """Names the target's weights by its embedding and head: what a drafter is tied to."""
    return fingerprint({"embedding": target.embedding.weight, "head": target.head_weight})


def save(
    drafter: Drafter,
    folder: Path,
    target: Target,
    cfg: Any,
    about: dict[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the folder; each file appears whole or not at all, config.json last.

    Args:
        cfg: the drafter's `Config`, where the drafter itself does not hold one.
        about: provenance that travels along (step, metrics, data).
        weights: its parameters, when the module itself holds only a slice or a rounded copy.
    """
    tensors, shape = {**drafter.state_dict(), **(weights or {})}, drafters.own_shape(drafter)
    sha256 = write_tensors(folder / "model.safetensors", tensors, {"format": FORMAT})
    made_for = {"name": target.name, "fingerprint": target_fingerprint(target)}
    config = {
        "format": FORMAT,
        "drafter": dataclasses.asdict(getattr(drafter, "cfg", cfg)),
        "taps": list(drafter.taps),
        "target": {**made_for, **target.shape()._asdict()},
        "draft_vocab_size": len(drafter.vocab),
        **({} if shape is None else {"shape": shape._asdict()}),
        "sha256": sha256,
        "about": about,
    }
    write_json(folder / "config.json", config)


def read(folder: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a folder holds, checked: its config.json, and its tensors.

    Raises:
        RunError: the folder is damaged or incomplete, or was made for another target.
    """
    config = read_json(folder / "config.json", FIX)
    if config.get("format") != FORMAT or not config.keys() >= PARTS:
        raise RunError(f"{folder} is not a drafter of this format ({FORMAT}).", FIX)
    kinds = {"drafter": dict, "taps": list, "target": dict}
    whole = all(isinstance(config[part], kind) for part, kind in kinds.items())
    if not whole or not config["target"].keys() >= TARGET_PARTS:
        raise RunError(f"{folder}/config.json does not say what reads which target.", FIX)
    _same_target(folder, config["target"], target)
    tensors = read_tensors(folder / "model.safetensors", config["sha256"], FIX)
    if "vocab.d2t" not in tensors:
        raise RunError(f"{folder}/model.safetensors lacks vocab.d2t, the draft vocabulary.", FIX)
    return config, tensors


def load(folder: Path, target: Target, dtype: torch.dtype | None = None) -> tuple[Drafter, Any]:
    """The drafter of a folder, in eval mode on the target's device; and its `Config`.

    Args:
        dtype: of its weights; None takes the target's.

    Raises:
        RunError: the folder is damaged or incomplete, or was made for another target.
    """
    drafter, cfg = _stored(folder, target)
    drafter.to(target.device, dtype or target.dtype).eval().requires_grad_(False)
    return drafter, cfg


def _stored(folder: Path, target: Target) -> tuple[Drafter, Any]:
    """The drafter as it is stored."""
    config, tensors = read(folder, target)
    cfg = settings(config["drafter"], folder)
    vocab = DraftVocab(tensors["vocab.d2t"] + torch.arange(len(tensors["vocab.d2t"])), target.vocab)
    if hasattr(cfg, "taps"):
        cfg = dataclasses.replace(cfg, taps=tuple(config["taps"]))
    try:
        shape = Shape(**config["shape"]) if "shape" in config else None
        drafter = drafters.build(cfg, target, vocab, shape)
        for name, value in drafter.state_dict(keep_vars=True).items():
            value.data = value.data.to(tensors[name].dtype if name in tensors else value.dtype)
        drafter.load_state_dict(tensors)
    except (RuntimeError, TypeError) as error:
        raise RunError(f"{folder}: {error}", FIX) from None
    return drafter, cfg


def settings(fields: dict[str, Any], folder: Path) -> Any:
    """The drafter's `Config` from the json of a folder, refusing fields it does not know."""
    try:
        kind = drafters.module(str(fields["name"])).Config
        lists = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return kind(**lists)
    except (ConfigError, TypeError, KeyError, ValueError) as error:
        raise RunError(f"{folder} does not fit this version: {error}", FIX) from None


def _same_target(folder: Path, made_for: dict[str, Any], target: Target) -> None:
    shape = target.shape()
    for name in ("vocab", "hidden", "layers"):
        if made_for[name] != getattr(shape, name):
            raise RunError(
                f"{folder} drafts for a target with {name} {made_for[name]}, and "
                f"{target.name} has {getattr(shape, name)}.",
                f"Use the target it was trained for: {made_for['name']}.",
            )
    if made_for["fingerprint"] != target_fingerprint(target):
        raise RunError(
            f"{folder} was trained for other weights than those of {target.name} "
            f"(fingerprint {made_for['fingerprint']}).",
            f"Use the target it was trained for: {made_for['name']}.",
        )


FORMATS = (Native(),)
