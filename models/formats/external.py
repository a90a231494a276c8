"""Checkpoint formats of other projects: the interface, and the code they share.

A format maps a drafter's parameter names to the names in the file (`rename`) and derives the
drafter's configuration from config.json and the tensor shapes (`read_spec`). Writing and reading
use the same map. What a format has no place for (tapped layers, the state fed back, training
settings) is stored beside it in `outrider.json`. Without that file the reader resolves what the
format defines and refuses what is ambiguous; a hand-written one with `drafter` and `taps` settles
it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models import drafters
from outrider.models.drafter import Drafter
from outrider.models.formats.atomic_folder import write_folder
from outrider.models.formats.hf_config import weight_dtype
from outrider.models.formats.sidecar import (
    DrafterSpec,
    drafter_config,
    read_sidecar,
    sidecar_content,
)
from outrider.models.formats.weight_folder import SIDECAR, WeightFolder, equal_values
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab

JOINT_ORDER = ["embedding", "state"]  # the inputs of the joint projection, in every format
WRAPPERS = ("model.", "draft_model.", "module.")  # prefixes that training frameworks add
Sidecar = Mapping[str, Any]  # content of outrider.json; empty without one


@runtime_checkable
class Format(Protocol):
    """A file layout for some drafters.

    Attributes:
        names: values of `format=`; the first is the format's name.
        drafters: names of the drafters it can hold; empty: all.
        served: the software that loads it.
    """

    names: tuple[str, ...]
    drafters: tuple[str, ...]
    served: str

    def refuses(self, drafter: Drafter, target: Target) -> str:
        """Return why the format cannot hold this drafter, or ""."""

    def write(self, drafter: Drafter, target: Target, cfg: Any, folder: Path) -> None:
        """Write the folder atomically."""

    def matches(self, folder: WeightFolder) -> bool:
        """Return whether the folder is of this format."""

    def read(self, folder: Path, target: Target) -> tuple[Drafter, Any]:
        """Return the drafter, with weights as stored, and its `Config`."""


def require_exportable(form: Format, drafter: Drafter, target: Target, cfg: Any) -> None:
    """
    Raises:
        ConfigError: the format cannot hold this drafter.
    """
    if why := form.refuses(drafter, target):
        name = getattr(drafter, "cfg", cfg).name
        fix = "Choose another format, or train the drafter without it."
        raise ConfigError("format", form.names[0], f"{name}: {why}.", fix)


class ExternalFormat:
    """A format of config.json and safetensors; a subclass defines names and configuration.

    Attributes:
        stem: name of the weight file without its extension.
        joint_order: inputs of the joint projection; None: the drafter has none.
        writes_target_copies: whether `target_copies` are written, or only accepted when read.
    """

    names: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    served = ""
    stem = "model"
    joint_order: list[str] | None = None
    writes_target_copies = False

    # ---- defined by subclasses ----

    def refuses(self, drafter: Drafter, target: Target) -> str:
        """Return why the format cannot hold this drafter, or ""."""
        return ""

    def matches(self, folder: WeightFolder) -> bool:
        """Return whether the folder is of this format."""
        raise NotImplementedError

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        """Return the content of config.json."""
        raise NotImplementedError

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        """Return the part of config.json that describes the decoder layers."""
        return folder.config

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        """Return what config.json and the tensor shapes define."""
        raise NotImplementedError

    def rename(self, key: str, drafter: Drafter, target: Target) -> str | None:
        """Return a parameter's name in the file; None: it is not stored."""
        raise NotImplementedError

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        """Return, for every tensor of the drafter, the name `rename` gives -> its key."""
        return strip_wrappers(folder)

    def is_omitted(self, key: str, folder: WeightFolder) -> bool:
        """Return whether this folder leaves a parameter out, which `import_weights` restores."""
        return False

    def export_weights(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        """Return parameter -> value to store."""
        return dict(drafter.state_dict())

    def import_weights(
        self, weights: dict[str, Tensor], drafter: Drafter, target: Target
    ) -> dict[str, Tensor]:
        """Invert `export_weights`, and add what the format does not store."""
        return weights

    def target_copies(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
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
        """Write the folder atomically.

        Raises:
            ConfigError: the format cannot hold this drafter.
            RunError: the folder cannot be written.
        """
        require_exportable(self, drafter, target, cfg)
        config, tensors = self.config(drafter, target), self.tensors(drafter, target)
        content = sidecar_content(self.names[0], self.joint_order, drafter, target, cfg)
        write_folder(folder, config, tensors, content, self.stem)

    # ---- reading ----

    def read(self, folder: Path, target: Target) -> tuple[Drafter, Any]:
        """Return the drafter, with weights as stored, and its `Config`.

        Raises:
            RunError: the folder is damaged, ambiguous, made for another target, or holds a network
                that Outrider does not have.
        """
        opened = WeightFolder(folder)
        sidecar = read_sidecar(opened, self.names[0], self.joint_order, target)
        spec = self.read_spec(opened, target, sidecar)
        cfg = drafter_config(opened, spec, sidecar)
        vocab = DraftVocab.identity(target.vocab_size)
        if spec.vocab_ids is not None:
            vocab = DraftVocab(spec.vocab_ids, target.vocab_size)
        with torch.device("meta"):  # its weights are read below
            drafter = drafters.build(cfg, target, vocab, spec.shape)
        if "taps" in sidecar and tuple(sidecar["taps"]) != drafter.taps:
            why = f"{SIDECAR} has the taps {sidecar['taps']}"
            raise opened.error(f"{why}, and config.json {list(drafter.taps)}: a tap is shifted.")
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
            _require_like(folder, keys[name], stored[keys[name]], empty[parameter])
        for name in copies.keys() & keys.keys():
            if not equal_values(copies[name], folder.tensors([keys[name]])[keys[name]]):
                why = f"{keys[name]} differs from the target's: it was trained, or the target is"
                raise folder.error(f"{why} another one. Outrider's drafters do not train it.")
        weights = {parameter: stored[keys[name]] for name, parameter in own.items()}
        weights = self.import_weights(weights, drafter, target)
        vocab = {f"vocab.{k}": v for k, v in drafter.vocab.state_dict().items()}
        drafter.load_state_dict({**weights, **vocab}, assign=True)


def _require_like(folder: WeightFolder, key: str, value: Tensor, parameter: Tensor) -> None:
    """Refuse a tensor of another shape or kind than the parameter's."""
    if value.shape != parameter.shape:
        why = f"{key} is {list(value.shape)}, and config.json and target require"
        raise folder.error(f"{why} {list(parameter.shape)}.")
    if value.is_floating_point() != parameter.is_floating_point():
        kind = str(value.dtype).removeprefix("torch.")
        raise folder.error(f"{key} is quantised ({kind}), which cannot be read.")


def strip_wrappers(folder: WeightFolder) -> dict[str, str]:
    """Return key without the prefixes of training frameworks -> key."""
    out: dict[str, str] = {}
    for key in folder.shapes:
        name = key
        while name.startswith(WRAPPERS):
            name = name.partition(".")[2]
        if name in out:
            raise folder.error(f"{out[name]} and {key} are the same weight twice.")
        out[name] = key
    return out
