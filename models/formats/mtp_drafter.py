"""Formats of MTP modules, separate or in a copy of their target's folder (`mtp_merge.py`).

The layouts and their names are those of `mtp_layouts.py`. All of them join [embedding; state]: the
halves of `eh_proj` are swapped for drafters trained the other way. Qwen3-Next's layout stores norms
as weight - 1, exact for weights in 0.5 .. 2 and rounded elsewhere.

An engine runs a module as one more decoder layer of the target that holds it, with the target's
rotary embedding and head, and feeds the next depth the module's output after its norm; drafters
trained otherwise are refused, and targets whose layers are not those of `drafting/layers.py` (four
norms, experts, multipliers). Biases of the target's layers are written as zeros.
docs/formats.md lists the target families that an engine serves.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models import drafters
from outrider.models.drafters.mtp import Mtp
from outrider.models.formats import hf_config
from outrider.models.formats.eagle3_speculators import speculators_fields
from outrider.models.formats.external import JOINT_ORDER, DrafterSpec, ExternalFormat, Sidecar
from outrider.models.formats.mtp_layouts import DEEPSEEK, QWEN3_NEXT, SPECULATORS, ModuleLayout
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.interface import ModelShape
from outrider.models.target.hf_folder import summarise
from outrider.models.target.target import Target

ROPE = "an engine would use the target's rotary embedding, which is scaled, partial or missing"
OTHER_SIZES = "its layers have other sizes than the target's, whose config engines build them from"
FEED = (
    "engines feed the next depth a module's output after its norm (drafter.feed=normed), and this "
    "drafter the one before it"
)
LAYER = "an engine builds the module as one of the target's decoder layers"
MULTIPLIERS = ("residual_multiplier", "attn_logit_softcapping", "attention_multiplier")
NO_LLAMA = (
    "speculators' MTP layers are Qwen3's, with norms on queries and keys (drafter.qk_norm=true)"
)


class MtpFormat(ExternalFormat):
    """What the layouts share."""

    drafters = ("mtp",)
    joint_order = JOINT_ORDER
    reduced = "its draft vocabulary is reduced, and engines use the target's whole head"
    layout: ModuleLayout
    several = False  # whether more than one module can be stored
    inside_target = True  # whether the engine builds its layers from the target's config

    def prefix(self, stage: int, target: Target) -> str:
        return self.layout.prefix.format(target.num_layers + stage)

    def rename(self, key: str, drafter: Mtp, target: Target) -> str | None:
        if key.startswith("vocab."):
            return None
        _, stage, name = key.split(".", 2)
        return self.prefix(int(stage), target) + self.layout.parts()[name]

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        """Take the modules' keys in a target's folder, and all keys elsewhere."""
        keys = module_keys(folder, target.num_layers) if is_merged(folder) else folder.shapes
        return {key: key for key in keys}

    def export_weights(self, drafter: Mtp, target: Target) -> dict[str, Tensor]:
        out = super().export_weights(drafter, target)
        dtype = hf_config.weight_dtype(out)
        for key, value in out.items():
            if key.endswith("eh_proj.weight"):
                out[key] = _swap_halves(value, drafter)
            if value.ndim == 1 and self.layout.offset and key.startswith("stages."):
                out[key] = (value.float() - self.layout.offset).to(dtype)
        return out

    def import_weights(
        self, weights: dict[str, Tensor], drafter: Mtp, target: Target
    ) -> dict[str, Tensor]:
        for key, value in weights.items():
            if key.endswith("eh_proj.weight"):
                weights[key] = _swap_halves(value, drafter)
            if value.ndim == 1 and self.layout.offset:
                weights[key] = value.float() + self.layout.offset
        return weights

    def refusal_reason(self, drafter: Mtp, target: Target) -> str:
        if why := super().refusal_reason(drafter, target):
            return why
        if len(drafter.stages) > 1 and not self.several:
            return f"it has {drafter.cfg.depths} modules, and this layout holds one"
        if drafter.cfg.feed == "raw" and drafter.cfg.depths > 1:
            return FEED
        if drafters.custom_shape(drafter) is not None:
            return OTHER_SIZES
        if not plain_rope(target):
            return ROPE
        return other_layer(drafter, target) if self.inside_target else ""

    def config(self, drafter: Mtp, target: Target) -> dict[str, Any]:
        """Return the modules' shape and the target's number of layers."""
        kind = "qwen3" if drafter.cfg.qk_norm else "llama"
        weights, shape = drafter.state_dict(), target.shape()
        fields = hf_config.layer_fields(weights, shape, target.num_layers, kind)
        return {**fields, "num_nextn_predict_layers": len(drafter.stages)}

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        shape = self._shape(folder, target)
        if folder.config.get("num_hidden_layers", target.num_layers) != target.num_layers:
            why = f"its target has {folder.config['num_hidden_layers']} layers, and this one"
            raise folder.error(f"{why} {target.num_layers}.", hf_config.USE_TARGET)
        keys = self.file_keys(folder, target)
        count = sum(key.endswith(self.layout.parts()["eh_proj.weight"]) for key in keys)
        expected = folder.config.get("num_nextn_predict_layers", count)
        if expected != count:
            why = f"config.json has {expected} modules, and the weights {count}."
            raise folder.error(why, "Correct num_nextn_predict_layers in config.json.")
        mode = str(sidecar.get("drafter", {}).get("mode", "chained")) if count == 1 else "chained"
        qk_norm = any(key.endswith("self_attn.q_norm.weight") for key in keys)
        depths = {"depths": count} if mode == "chained" else {}
        return DrafterSpec("mtp", {"qk_norm": qk_norm, "mode": mode, **depths}, shape)

    def _shape(self, folder: WeightFolder, target: Target) -> ModelShape:
        """Return the layers' shape: config.json's, or in a target's folder the target's."""
        if not is_merged(folder):
            return hf_config.read_config(folder, self.layer_config(folder), target.shape())
        if not plain_rope(target):
            raise folder.error(f"{ROPE}. {hf_config.NOT_SUPPORTED}", hf_config.USE_OTHER)
        return target.shape()


class MtpDeepSeek(MtpFormat):
    """Decoder layers after the target's last one, each with copies of its embedding and head."""

    names = ("deepseek",)
    engines = "engines, from inside the target's checkpoint"
    layout = DEEPSEEK
    several = True
    writes_target_copies = True

    def target_copies(self, drafter: Mtp, target: Target) -> dict[str, Tensor]:
        ends = zip(self.layout.shared, (target.embedding.weight, target.head_weight), strict=True)
        copies, stages = {**dict(ends), **_zero_biases(target)}, range(len(drafter.stages))
        return {self.prefix(k, target) + key: copies[key] for k in stages for key in copies}

    def matches(self, folder: WeightFolder) -> bool:
        return any(key.endswith(".eh_proj.weight") for key in folder.shapes)


class MtpQwen3Next(MtpFormat):
    """One module under `mtp.`."""

    names = ("qwen3_next",)
    engines = "engines, from inside the target's checkpoint"
    layout = QWEN3_NEXT

    def matches(self, folder: WeightFolder) -> bool:
        return "mtp.fc.weight" in folder.shapes


class MtpSpeculators(MtpFormat):
    """One module for the speculators library's tools; engines need it in the target's folder."""

    names = ("speculators",)
    engines = "speculators' tools"
    layout = SPECULATORS
    inside_target = False

    def refusal_reason(self, drafter: Mtp, target: Target) -> str:
        why = super().refusal_reason(drafter, target)
        return why or ("" if drafter.cfg.qk_norm else NO_LLAMA)

    def config(self, drafter: Mtp, target: Target) -> dict[str, Any]:
        layers, depths = super().config(drafter, target), drafter.cfg.depths
        count = {"num_nextn_predict_layers": layers.pop("num_nextn_predict_layers")}
        return {**speculators_fields("mtp", "MTPDraftModel", layers, depths, target), **count}

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        return folder.config_object("transformer_layer_config")

    def matches(self, folder: WeightFolder) -> bool:
        return folder.config.get("speculators_model_type") == "mtp"


def plain_rope(target: Target) -> bool:
    """Return whether the target rotates whole heads by unscaled frequencies."""
    rope = getattr(target.text_config, "rope_parameters", None) or {}
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    return whole and rope.get("rope_type") == "default" and "rope_theta" in rope


def other_layer(drafter: Mtp, target: Target) -> str:
    """Return what a decoder layer of the target has more or less than a module, or ""."""
    own, zeros = _sizes(drafter._stages()[0].block), _zero_biases(target).keys()
    theirs = {name: size for name, size in _sizes(target.layers[-1]).items() if name not in zeros}
    if own.keys() ^ theirs.keys() == {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}:
        norms = "with" if len(own) < len(theirs) else "without"
        use = f"drafter.qk_norm={len(own) < len(theirs)}".lower()
        return f"{LAYER}, {norms} norms on queries and keys ({use})"
    if other := sorted(own.keys() ^ theirs.keys()):
        return f"{LAYER}, and the two differ in {summarise(other, 1)}"
    for name, size in own.items():
        if size != theirs[name]:  # such as gated queries, which have a gate per number
            return f"{LAYER}, whose {name} is {theirs[name]} and not {size}"
    config, neutral = target.text_config, (1.0, None, target.shape().head_dim ** -0.5)
    for name, value in zip(MULTIPLIERS, neutral, strict=True):
        if (found := getattr(config, name, value)) != value:
            return f"{LAYER}, which have {name} {found}"
    return ""


def _sizes(layer: nn.Module) -> dict[str, list[int]]:
    """Return the size of every parameter by name, before any quantisation."""
    out = dict[str, list[int]]()
    for prefix, part in layer.named_modules():
        for name, p in part.named_parameters(prefix, recurse=False):
            is_matrix = isinstance(part, nn.Linear) and name.endswith(".weight")
            out[name] = [part.out_features, part.in_features] if is_matrix else list(p.shape)
    return out


def _zero_biases(target: Target) -> dict[str, Tensor]:
    """Return biases that the target's layers have (Qwen2) and a module has not."""
    layer = target.layers[-1].named_parameters()
    return {name: torch.zeros_like(p) for name, p in layer if name.endswith(".bias")}


def _swap_halves(joint: Tensor, drafter: Mtp) -> Tensor:
    """Swap the halves of a matrix's columns, if the drafter reads the state first."""
    swap = drafter.cfg.order == "state_first"
    return torch.cat(joint.chunk(2, dim=1)[::-1], dim=1) if swap else joint


def is_merged(folder: WeightFolder) -> bool:
    """Return whether the folder holds a whole target."""
    return any(key.startswith("model.layers.0.") for key in folder.shapes)


def module_keys(folder: WeightFolder, layers: int) -> list[str]:
    """Return the keys of the modules in the folder of a target with this many layers."""
    numbers = {key: key.split(".")[2] for key in folder.shapes if key.startswith("model.layers.")}
    late = [key for key, n in numbers.items() if n.isdigit() and int(n) >= layers]
    return late + [key for key in folder.shapes if key.startswith("mtp.")]


FORMATS = (MtpDeepSeek(), MtpQwen3Next(), MtpSpeculators())
