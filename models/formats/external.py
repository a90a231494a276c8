"""Base class of the checkpoint formats of other projects, and `outrider.json`.

A format maps a drafter's parameter names to the names in the file (`rename`) and derives the
drafter's configuration from config.json and the tensor shapes (`read_spec`). Writing and reading
use the same map.

What a format cannot hold is stored in `outrider.json` in the same folder: the drafter's
configuration, the taps as layer outputs, the target's fingerprint, the order of the joint
projection's inputs, the sha256 of the weight files, and dtype and shape of every tensor. It must
agree with the files.
Without it the reader resolves what the format defines and refuses what is ambiguous; a hand-written
one with `drafter` and `taps` settles it.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import read_json, sha256_of, write_json
from outrider.conf.shown_text import mask_home, mask_values
from outrider.models import drafters
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats.atomic_folder import atomic_folder, write_weights
from outrider.models.formats.hf_config import weight_dtype
from outrider.models.formats.native import NativeFormat, config_from_json, target_fingerprint
from outrider.models.formats.weight_folder import (
    FIX,
    SIDECAR,
    WeightFolder,
    damaged_means_error,
    equal_values,
)
from outrider.models.interface import ModelShape
from outrider.models.target.target import Target

JOINT_ORDER = ["embedding", "state"]  # the inputs of the joint projection, in every format
ONCE = "Remove one of them from the weight file."
OTHER_SIDECAR = f"Use the {SIDECAR} that was written with these files, or remove it."
WRAPPERS = ("model.", "draft_model.", "module.")  # prefixes that training frameworks add
Sidecar = Mapping[str, Any]  # content of outrider.json; empty without one
FIELDS = {  # name -> type; all are optional
    "format": str, "drafter": dict, "taps": list, "target": dict, "joins": list, "sha256": dict,
    "tensors": dict,
}  # fmt: skip


class DrafterSpec(NamedTuple):
    """A drafter as config.json and the tensor shapes define it."""

    name: str
    fields: dict[str, Any]  # fields of its `Config` that the files define
    shape: ModelShape  # of its own layers
    vocab_ids: Tensor | None = None  # target ids of the draft vocabulary; None: all


class ExternalFormat:
    """A format of config.json and safetensors; a subclass defines names and configuration.

    The methods take the drafter as `Any`, so that a subclass can name the class it holds.

    Attributes:
        names: values of `format=`; the first is the format's name.
        drafters: names of the drafters it can hold.
        engines: the software that loads it.
        stem: name of the weight file without its extension.
        joint_order: inputs of the joint projection; None: the drafter has none.
        reduced: why a reduced draft vocabulary is refused; "": it is not.
        writes_target_copies: whether `target_copies` are written, or only accepted when read.
    """

    names: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    engines = ""
    stem = "model"
    joint_order: list[str] | None = None
    reduced = ""
    writes_target_copies = False

    # ---- defined by subclasses ----

    def refusal_reason(self, drafter: Any, target: Target) -> str:
        """Return why the format cannot hold this drafter, or ""."""
        return "" if drafter.vocab.is_full else self.reduced

    def matches(self, folder: WeightFolder) -> bool:
        """Return whether the folder is of this format."""
        raise NotImplementedError

    def config(self, drafter: Any, target: Target) -> dict[str, Any]:
        """Return the content of config.json."""
        raise NotImplementedError

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        """Return the part of config.json that describes the decoder layers."""
        return folder.config

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        """Return what config.json and the tensor shapes define."""
        raise NotImplementedError

    def rename(self, key: str, drafter: Any, target: Target) -> str | None:
        """Return a parameter's name in the file; None: it is not stored."""
        return None if key.startswith("vocab.") else key

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        """Return name in the format (see `rename`) -> key in the file, for every tensor."""
        return strip_wrappers(folder)

    def is_omitted(self, key: str, folder: WeightFolder) -> bool:
        """Return whether this folder leaves a parameter out, which `import_weights` restores."""
        return False

    def export_weights(self, drafter: Any, target: Target) -> dict[str, Tensor]:
        """Return parameter -> value to store."""
        return dict(drafter.state_dict())

    def import_weights(
        self, weights: dict[str, Tensor], drafter: Any, target: Target
    ) -> dict[str, Tensor]:
        """Invert `export_weights`, and add what the format does not store."""
        return weights

    def target_copies(self, drafter: Any, target: Target) -> dict[str, Tensor]:
        """Return weights of the target that the file may repeat, by their names in the file."""
        return {}

    # ---- writing ----

    def tensors(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        """Return everything to store, by the names in the file."""
        out, dtype = {}, weight_dtype(drafter.state_dict())
        if self.writes_target_copies:
            for key, value in self.target_copies(drafter, target).items():
                out[key] = value.to(dtype) if value.is_floating_point() else value
        for key, value in self.export_weights(drafter, target).items():
            if (name := self.rename(key, drafter, target)) is not None:
                out[name] = value
        return out

    def write(self, drafter: Drafter, target: Target, cfg: Any, folder: Path) -> None:
        """Write the folder atomically; raise ConfigError if the format cannot hold the drafter."""
        require_exportable(self, drafter, target, cfg)
        content = sidecar_content(self.names[0], self.joint_order, drafter, target, cfg)
        with atomic_folder(folder) as partial:
            self.write_files(drafter, target, partial)
            write_sidecar(partial, content)

    def write_files(self, drafter: Any, target: Target, folder: Path) -> None:
        """Write config.json and the weights."""
        write_weights(folder, self.tensors(drafter, target), self.stem)
        write_json(folder / "config.json", self.config(drafter, target))

    # ---- reading ----

    def read(self, folder: Path, target: Target) -> tuple[Drafter, Any]:
        """Return the drafter, with weights as stored, and its `Config`.

        Raises:
            RunError: the folder is damaged, ambiguous, made for another target, or of a network
                that Outrider does not have.
        """
        with damaged_means_error(folder):
            return self._read(WeightFolder(folder), target)

    def _read(self, opened: WeightFolder, target: Target) -> tuple[Drafter, Any]:
        sidecar = read_sidecar(opened, self.names[0], self.joint_order, target)
        spec = self.read_spec(opened, target, sidecar)
        cfg = drafter_config(opened, spec, sidecar)
        ids = torch.arange(target.vocab_size) if spec.vocab_ids is None else spec.vocab_ids
        vocab = DraftVocab(ids, target.vocab_size)
        with torch.device("meta"):  # its weights are read below
            drafter = drafters.build(cfg, target, vocab, spec.shape)
        if "taps" in sidecar and tuple(sidecar["taps"]) != drafter.taps:
            why = f"{SIDECAR} has the taps {sidecar['taps']}"
            why = f"{why}, and config.json {list(drafter.taps)}: a tap is shifted."
            raise opened.error(why, f"Correct the one that was changed; {SIDECAR} names outputs.")
        self._load_weights(opened, drafter, target)
        opened.check_hashes(sidecar.get("sha256", {}))
        return drafter.eval(), cfg

    def _load_weights(self, folder: WeightFolder, drafter: Drafter, target: Target) -> None:
        """Load every tensor of the file; refuse missing, unknown and misshapen ones."""
        empty = drafter.state_dict()
        renamed = {key: self.rename(key, drafter, target) for key in empty}
        own = {v: k for k, v in renamed.items() if v is not None and not self.is_omitted(k, folder)}
        copies, keys = self.target_copies(drafter, target), self.file_keys(folder, target)
        folder.check_keys(keys, own, copies)
        stored = folder.tensors(keys[name] for name in own)
        for name, parameter in own.items():
            key, like = keys[name], empty[parameter]
            folder.require_shape(key, like.shape)
            if stored[key].is_floating_point() != like.is_floating_point():
                kind = str(stored[key].dtype).removeprefix("torch.")
                why = f"{key} is quantised ({kind}), which cannot be read."
                raise folder.error(why, "Convert the weights to bfloat16, or use unquantised ones.")
        for name in copies.keys() & keys.keys():
            if not equal_values(copies[name], folder.tensors([keys[name]])[keys[name]]):
                why = f"{keys[name]} differs from the target's: it was trained, or the target is"
                raise folder.error(
                    f"{why} another one. Outrider's drafters do not train it.",
                    "Use the target it was trained for, or a drafter with its target's embedding.",
                )
        weights = {parameter: stored[keys[name]] for name, parameter in own.items()}
        weights = self.import_weights(weights, drafter, target)
        vocab = {f"vocab.{k}": v for k, v in drafter.vocab.state_dict().items()}
        drafter.load_state_dict({**weights, **vocab}, assign=True)


def strip_wrappers(folder: WeightFolder) -> dict[str, str]:
    """Map each key, without the prefixes of training frameworks, to the original key."""
    out: dict[str, str] = {}
    for key in folder.shapes:
        name = key
        while name.startswith(WRAPPERS):
            name = name.partition(".")[2]
        if name in out:
            raise folder.error(f"{out[name]} and {key} are the same weight twice.", ONCE)
        out[name] = key
    return out


Format = NativeFormat | ExternalFormat


def require_exportable(form: Format, drafter: Drafter, target: Target, cfg: Any) -> None:
    """Raise ConfigError if the format cannot hold this drafter."""
    if why := form.refusal_reason(drafter, target):
        name = getattr(drafter, "cfg", cfg).name
        fix = "Choose another format, or train the drafter without it."
        raise ConfigError("format", form.names[0], f"{name}: {why}.", fix)


# ---- outrider.json -------------------------------------------------------------------------------


def sidecar_content(
    form: str, joint_order: list[str] | None, drafter: Drafter, target: Target, cfg: Any
) -> dict[str, Any]:
    """Return outrider.json without what describes the weights; `cfg`: if the drafter has none."""
    shape = target.shape()
    return {
        "format": form,
        "drafter": dataclasses.asdict(getattr(drafter, "cfg", cfg)),
        "taps": list(drafter.taps),
        "target": {
            "name": target.name, "fingerprint": target_fingerprint(target),
            "vocab": shape.vocab, "hidden": shape.hidden, "layers": shape.layers,
        },
        **({"joins": joint_order} if joint_order else {}),
    }  # fmt: skip


def write_sidecar(folder: Path, content: Mapping[str, Any]) -> None:
    """Write outrider.json into a folder that holds config.json and the weights."""
    opened = WeightFolder(folder)
    sha256 = {name: sha256_of(folder / name) for name in set(opened.files.values())}
    tensors = {k: {"dtype": opened.dtypes[k], "shape": list(v)} for k, v in opened.shapes.items()}
    published = mask_values(content, mask_home)
    write_json(folder / SIDECAR, {**published, "sha256": sha256, "tensors": tensors})


def sidecar_drafter(folder: WeightFolder) -> str:
    """Return the name of the drafter in outrider.json; "" without one."""
    file = folder.path / SIDECAR
    fields = read_json(file, FIX).get("drafter") if file.exists() else None
    return str(fields.get("name", "")) if isinstance(fields, dict) else ""


def read_sidecar(
    folder: WeightFolder, form: str, joint_order: list[str] | None, target: Target
) -> dict[str, Any]:
    """Return the content of outrider.json, or {} without one; refuse another format or target."""
    file = folder.path / SIDECAR
    if not file.exists():
        return {}
    content = read_json(file, FIX)
    invalid = sorted(content.keys() - FIELDS)
    invalid += [k for k, kind in FIELDS.items() if not isinstance(content.get(k, kind()), kind)]
    made_for = content.get("target")
    if isinstance(made_for, dict) and not {"name", "fingerprint"} <= made_for.keys():
        invalid.append("target")
    if invalid:
        fix = 'Correct it: {"taps": [1, 17, 32], "drafter": {"depths": 7}}, or remove it.'
        raise RunError(f"{file} was not written by Outrider: {', '.join(invalid)}.", fix)
    if content.get("format", form) != form:
        why = f"{SIDECAR} has format {content['format']}, and the files {form}."
        raise folder.error(why, OTHER_SIDECAR)
    if content.get("joins", joint_order) != joint_order:
        why = f"{SIDECAR} joins {content['joins']}, and this format {joint_order}"
        raise folder.error(f"{why}: the halves are swapped.", OTHER_SIDECAR)
    if made_for and made_for["fingerprint"] != target_fingerprint(target):
        why = f"it was trained for {made_for['name']}, and this target has other weights."
        raise folder.error(why, f"Use the target it was trained for: {made_for['name']}.")
    return content


def drafter_config(folder: WeightFolder, spec: DrafterSpec, sidecar: Sidecar) -> Any:
    """Return the drafter's `Config`: fields of the files, then outrider.json, then defaults."""
    trained = sidecar.get("drafter", {})
    size = None if spec.vocab_ids is None else len(spec.vocab_ids)
    fields = {"draft_vocab_size": size, **trained, **spec.fields, "name": spec.name}
    fix = f"Correct the drafter in {SIDECAR}."
    cfg = config_from_json(fields, folder.path, fix)
    for name in spec.fields:
        if trained.get(name) is not None and not _has_value(cfg, name, trained[name]):
            why = f"{SIDECAR} has {name}: {trained[name]}, and the files {spec.fields[name]}."
            raise folder.error(why, "Correct the one that was changed.")
    return cfg


def _has_value(cfg: Any, name: str, value: Any) -> bool:
    """Return whether a field of a `Config` has this value of a file, perhaps in an older form."""
    try:
        same = dataclasses.replace(cfg, **{name: tuple(value) if type(value) is list else value})
    except (TypeError, ValueError):
        return False
    return bool(same == cfg)
