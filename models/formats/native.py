"""Outrider's own format for a drafter: config.json and model.safetensors.

`config.json` holds the drafter's settings, its taps ("output of decoder layer k"), and the shape
and fingerprint of its target. `model.safetensors` holds the drafter's own weights, none of the
target's.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import convert, from_dict
from outrider.conf.files import read_json, write_json
from outrider.conf.plugins import advice, is_plugin
from outrider.conf.shown_text import mask_home, mask_values
from outrider.conf.tensor_files import fingerprint, read_tensors, write_tensors
from outrider.models import drafters
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats.weight_folder import WeightFolder, damaged_means_error
from outrider.models.interface import ModelShape
from outrider.models.target import hf_folder
from outrider.models.target.hf_folder import summarise
from outrider.models.target.target import Target

FORMAT = "outrider-drafter-1"
PARTS = {"drafter": dict, "taps": list, "target": dict}  # required, as sha256 is
TARGET_PARTS = {"name", "fingerprint", "vocab", "hidden", "layers"}
FIX = "Train again, or copy the folder again."


class NativeFormat:
    """The native format, with the interface of `ExternalFormat`; it holds every drafter."""

    names: tuple[str, ...] = ("native",)
    drafters: tuple[str, ...] = ()
    engines = "Outrider"

    def refusal_reason(self, drafter: Drafter, target: Target) -> str:
        return ""

    def write(self, drafter: Drafter, target: Target, cfg: Any, folder: Path) -> None:
        """Write the folder; replace only a folder of this format."""
        occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if occupied and read_json(folder / "config.json", FIX).get("format") != FORMAT:
            message = f"{folder} exists and was not written by Outrider."
            raise RunError(message, "Choose another folder.")
        save(drafter, folder, target, cfg, {})

    def matches(self, folder: WeightFolder) -> bool:
        return folder.config.get("format") == FORMAT

    def read(self, folder: Path, target: Target) -> tuple[Drafter, Any]:
        """Return the drafter, with weights as stored, and its `Config`.

        Raises:
            RunError: the folder is damaged or incomplete, or was made for another target.
        """
        config, tensors = _read_files(folder, target)
        fields = _with_old_defaults(config)
        if "taps" in fields:
            fields = {**fields, "taps": config["taps"]}
        cfg = config_from_json(fields, folder, _fix_of(config))
        with damaged_means_error(folder, FIX):
            vocab = DraftVocab.from_offsets(tensors["vocab.d2t"], target.vocab_size)
            shape = None if "shape" not in config else shape_from_json(config["shape"])
            with torch.device("meta"):  # nothing is allocated for sizes that the file does not have
                expected = drafters.build(cfg, target, vocab, shape).state_dict()
            if wrong := sorted(expected.keys() ^ tensors.keys()):
                why = f"config.json and model.safetensors disagree about {summarise(wrong, 1)}"
                raise RunError(f"{folder}: {why}.", FIX)
            for name, value in expected.items():
                kinds = [(t.shape, t.is_floating_point()) for t in (tensors[name], value)]
                if kinds[0] != kinds[1]:
                    both = [f"{list(t.shape)} of {t.dtype}" for t in (tensors[name], value)]
                    why = f"it is {both[0]}, and config.json describes {both[1]}"
                    raise RunError(f"{folder}: size mismatch for {name}: {why}.", FIX)
            drafter = drafters.build(cfg, target, vocab, shape)
            for name, value in drafter.state_dict(keep_vars=True).items():
                if value.is_floating_point():
                    value.data = value.data.to(tensors[name].dtype)
            drafter.load_state_dict(tensors)
        return drafter.eval(), cfg


def _with_old_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the drafter's fields, with what a version without a field did for its value."""
    fields = config["drafter"]
    shape = config["shape"] if isinstance(config.get("shape"), dict) else config["target"]
    activation = {"activation": shape.get("activation", "silu")}  # the target's
    names = ("eagle", "eagle3", "hass")
    old = {"mtp": {"feed": "raw"}, **dict.fromkeys(names, activation)}
    return {**old.get(str(fields.get("name")), {}), **fields}


def _fix_of(config: Mapping[str, Any]) -> str:
    """Return what to do about settings that cannot be read: of a plugin's drafter, to name it."""
    plugin, name = config.get("plugin"), config["drafter"].get("name")
    if not is_plugin(plugin) or name in drafters.names():
        return FIX
    return f"The drafter {name} is of the plugin {plugin}. {advice([str(plugin)])}"


def shape_from_json(fields: Any) -> ModelShape:
    """Return the shape of a drafter's layers; ValueError for sizes of other types or bounds."""
    hints = get_type_hints(ModelShape)
    if not isinstance(fields, dict) or fields.keys() != hints.keys():
        raise ValueError("shape does not have the fields of a shape")
    for name, kind in hints.items():
        value = convert(kind, fields[name], f"shape.{name}")
        if kind is not str and not 0 < value < 2**40:
            raise ValueError(f"shape.{name} is {value}")
    return ModelShape(**fields)


def target_fingerprint(target: Target) -> str:
    """Return a hash of the target's embedding and head, which identifies its weights."""
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
        about: provenance (step, metrics, data).
        weights: the drafter's parameters, if its module holds only a shard or a rounded copy.
    """
    tensors, shape = {**drafter.state_dict(), **(weights or {})}, drafters.custom_shape(drafter)
    sha256 = write_tensors(folder / "model.safetensors", tensors, {"format": FORMAT})
    made_for = {"name": target.name, "fingerprint": target_fingerprint(target)}
    settings = getattr(drafter, "cfg", cfg)
    plugin = drafters.DRAFTERS.plugin_of(settings.name)
    config = {
        "format": FORMAT,
        "drafter": dataclasses.asdict(settings),
        **({} if plugin is None else {"plugin": plugin}),
        "taps": list(drafter.taps),
        "target": {**made_for, **target.shape()._asdict()},
        "draft_vocab_size": len(drafter.vocab),
        **({} if shape is None else {"shape": shape._asdict()}),
        "sha256": sha256,
        "about": about,
    }
    write_json(folder / "config.json", mask_values(config, mask_home))


def _read_files(folder: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the checked config.json and tensors of a folder."""
    config = read_json(folder / "config.json", FIX)
    if config.get("format") != FORMAT or not config.keys() >= PARTS.keys() | {"sha256"}:
        raise RunError(f"{folder} is not a drafter of this format ({FORMAT}).", FIX)
    valid = all(isinstance(config[part], kind) for part, kind in PARTS.items())
    if not valid or not config["target"].keys() >= TARGET_PARTS:
        raise RunError(f"{folder}/config.json does not describe drafter and target.", FIX)
    _require_target(folder, config["target"], target)
    tensors = read_tensors(folder / "model.safetensors", config["sha256"], FIX)
    if "vocab.d2t" not in tensors:
        raise RunError(f"{folder}/model.safetensors lacks vocab.d2t, the draft vocabulary.", FIX)
    return config, tensors


def load(folder: Path, target: Target, dtype: torch.dtype | None = None) -> tuple[Drafter, Any]:
    """Load a drafter in eval mode on the target's device; return it and its `Config`.

    Args:
        dtype: dtype of its weights; None: the target's.
    """
    drafter, cfg = FORMATS[0].read(folder, target)
    drafter.to(target.device, dtype or target.dtype).requires_grad_(False)
    return drafter, cfg


def config_from_json(fields: dict[str, Any], folder: Path, fix: str = FIX) -> Any:
    """Return the drafter's `Config` from a folder's JSON; unknown fields are refused."""
    try:
        return from_dict(drafters.config_class(str(fields["name"])), fields, "drafter")
    except (ConfigError, TypeError, KeyError, ValueError, RecursionError) as error:
        why = hf_folder.first_line(error)
        why = f"{why}: {error.why}" if isinstance(error, ConfigError) else why
        raise RunError(f"{folder} does not fit this version: {why}", fix) from None


def _require_target(folder: Path, made_for: dict[str, Any], target: Target) -> None:
    shape, fix = target.shape(), f"Use the target it was trained for: {made_for['name']}."
    for name in ("vocab", "hidden", "layers"):
        if made_for[name] != getattr(shape, name):
            why = f"{folder} was trained for a target with {name} {made_for[name]}"
            raise RunError(f"{why}, and {target.name} has {getattr(shape, name)}.", fix)
    if made_for["fingerprint"] != target_fingerprint(target):
        why = f"{folder} was trained for other weights than those of {target.name}"
        raise RunError(f"{why} (fingerprint {made_for['fingerprint']}).", fix)


FORMATS = (NativeFormat(),)
