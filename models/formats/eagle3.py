"""EAGLE-3 in the formats of SGLang and vLLM.

    ours                         SGLang                     vLLM, speculators
    fc, norm, lm_head            the same                   the same
    fc_norm.{k}, input_norm      the same                   the same
    midlayer.*                   midlayer.* (layers.0.*     layers.0.*
                                 of several layers)
    layers.{i}.*                 layers.{i+1}.*, its input  layers.{i+1}.*
                                 norm is `hidden_norm`
    vocab.d2t, vocab.t2d         d2t, t2d               d2t, t2d, absent when the drafter can
                                                        propose every token
    tap_scale                    multiplied into fc

Under one field name, SGLang numbers a tapped layer by its output (k), and vLLM by the input of the
next (k + 1). vLLM loads SGLang's folders too; one that suits both readings is refused unless
`outrider.json` settles it. Feeding back the normed state (`feedback: normed`) is `norm_output`, a
field that SpecForge uses for something else; in a folder for SGLang that is not Automodel's it is
refused. `norm_before_residual` is always written for vLLM, whose default is true; writers mean
false when they omit it.

Source: reference tables of the published checkpoints (docs/formats.md).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafters.eagle3 import Eagle3, eagle3_taps
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import hf_config
from outrider.models.formats.eagle3_config import (
    ANGELSLIM_IDS,
    AUTOMODEL,
    IDS,
    MODELOPT,
    count_layers,
    fc_norm,
    layer_ids,
    refuse_other_networks,
    switch,
)
from outrider.models.formats.external import (
    JOINT_ORDER,
    ONCE,
    DrafterSpec,
    ExternalFormat,
    Sidecar,
    strip_wrappers,
)
from outrider.models.formats.weight_folder import SIDECAR, WeightFolder
from outrider.models.target.target import Target

LAST = "it taps the last decoder layer, whose output engines expose only after the final norm"
ORDER = "engines return tapped layers in ascending order, in whatever order they are named"
STATE_TAPS = (
    f"State it in {SIDECAR} in the same folder: "
    '{"taps": [1, 17, 32], "drafter": {"feedback": "raw"}}, with the layers whose output is read.'
)
AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # SGLang's older fc_norm.0 .. 2
QK_NORM = (
    "vLLM's Eagle3LlamaForCausalLM is a Llama layer, without norms on queries and keys; use "
    "format=speculators, which can name Qwen3's layer"
)
WINDOW = (
    "its attention has a window, which vLLM's Eagle3LlamaForCausalLM does not have; "
    "format=speculators can describe it"
)


class Eagle3Format(ExternalFormat):
    """What the formats share."""

    drafters = ("eagle3",)
    joint_order = JOINT_ORDER
    first_layer = "layers.0"  # prefix of the layer of a drafter that has one
    writes_whole_vocab = False  # whether d2t and t2d are written that name every token

    def refusal_reason(self, drafter: Eagle3, target: Target) -> str:
        if list(drafter.taps) != sorted(drafter.taps):
            return f"{ORDER}, and its fc reads them as {list(drafter.taps)}"
        if target.num_layers - 1 in drafter.taps:
            return LAST
        return "" if drafter.cfg.activation == "silu" else hf_config.ONLY_SILU

    # ---- names ----

    def rename(self, key: str, drafter: Eagle3, target: Target) -> str | None:
        if key == "tap_scale":
            return None
        part, _, rest = key.partition(".")
        if part == "vocab":
            return rest
        if part == "layers":
            number, _, rest = rest.partition(".")
            return f"layers.{int(number) + 1}.{self.later_layer_key(rest)}"
        first = self.first_layer if drafter.cfg.layers == 1 else "layers.0"
        return f"{first}.{rest}" if part == "midlayer" else key

    def later_layer_key(self, key: str) -> str:
        """Return the name of a part of the second and later layers."""
        return key

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        """Accept every name in use for a tensor, not only the one that is written."""
        bare, out = super().file_keys(folder, target), dict[str, str]()
        several = any(key.startswith("layers.1.") for key in bare)
        for key, name in bare.items():
            written = self._written_name(key, "layers.0" if several else self.first_layer)
            if written in out:
                raise folder.error(f"{name} and {out[written]} are the same weight.", ONCE)
            out[written] = name
        return out

    def _written_name(self, key: str, first_layer: str) -> str:
        """Map `midlayer`, `layers.0`, `hidden_norm`, `input_layernorm` and `aux_norm_*`."""
        for i, name in enumerate(AUX_NORMS):
            key = key.replace(f"{name}.", f"fc_norm.{i}.")
        for first in ("midlayer.", "layers.0."):
            if key.startswith(first):
                return f"{first_layer}.{key.removeprefix(first)}"
        if re.fullmatch(r"layers\.\d+\.(input_layernorm|hidden_norm)\.weight", key):
            return f"layers.{key.split('.')[1]}.{self.later_layer_key('input_layernorm')}.weight"
        return key

    # ---- weights ----

    def export_weights(self, drafter: Eagle3, target: Target) -> dict[str, Tensor]:
        out = super().export_weights(drafter, target)
        if drafter.vocab.is_full and not self.writes_whole_vocab:
            out = {key: value for key, value in out.items() if not key.startswith("vocab.")}
        return hf_config.merge_tap_scale(out) if drafter.cfg.fc_norm == "none" else out

    def is_omitted(self, key: str, folder: WeightFolder) -> bool:
        name = key.removeprefix("vocab.")
        return name in ("d2t", "t2d", "lm_head.weight") and name not in strip_wrappers(folder)

    def import_weights(
        self, weights: dict[str, Tensor], drafter: Eagle3, target: Target
    ) -> dict[str, Tensor]:
        """Add what is not stored, and sort the rows of the head by the ids of their tokens."""
        dtype = weights["fc.weight"].dtype
        head = weights.get("lm_head.weight", target.head_weight.to("cpu", dtype, copy=True))
        if "vocab.d2t" in weights:
            ids = DraftVocab.ids_of_offsets(weights["vocab.d2t"])
            head = head if bool((ids.diff() > 0).all()) else head[ids.argsort()]
        scale = torch.ones(len(drafter.taps), dtype=dtype)
        return {**weights, "lm_head.weight": head, "tap_scale": scale}

    def target_copies(self, drafter: Eagle3, target: Target) -> dict[str, Tensor]:
        return {"embed_tokens.weight": target.embedding.weight}

    # ---- configuration ----

    def layer_fields(self, drafter: Eagle3) -> dict[str, Any]:
        """Return the fields of config.json that describe the layers."""
        kind = "qwen3" if drafter.cfg.qk_norm else "llama"
        weights, layers = drafter.state_dict(), drafter.cfg.layers
        return hf_config.layer_fields(weights, drafter.shape, layers, kind)

    def architecture_flags(self, drafter: Eagle3) -> dict[str, Any]:
        """Return the fields of vLLM's config.json that select the network around the layers."""
        return {
            "draft_vocab_size": len(drafter.vocab),
            "norm_before_residual": drafter.cfg.residual == "normed",
            "norm_before_fc": drafter.cfg.fc_norm == "joint",
            "fc_norm": drafter.cfg.fc_norm == "each",
            "norm_output": drafter.cfg.feedback == "normed",
            IDS: [tap + 1 for tap in drafter.taps],
        }

    def stored_taps(
        self, folder: WeightFolder, target: Target, sidecar: Sidecar
    ) -> tuple[int, ...] | None:
        """Return the layers whose outputs config.json taps; None: it names none.

        By default, it names the layers whose inputs they are: (2, 18) -> (1, 17).
        """
        nested = folder.config_object("eagle_config", required=False)
        ids = layer_ids(folder.config)
        inputs = folder.int_list(IDS, layer_ids(nested) if ids is None else ids)
        outputs = folder.int_list(ANGELSLIM_IDS, layer_ids(folder.config, ANGELSLIM_IDS))
        if outputs is not None:
            return outputs
        return None if inputs is None else tuple(number - 1 for number in inputs)

    def feedback(self, folder: WeightFolder, sidecar: Sidecar) -> str:
        """Return the setting `feedback`."""
        return "normed" if switch(folder, "norm_output") else "raw"

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        keys, config = self.file_keys(folder, target), self.layer_config(folder)
        refuse_other_networks(folder, keys, target)
        shape = hf_config.read_config(folder, config, target.shape(), windowed=True)
        fields = {
            "activation": shape.activation,
            "taps": self._taps(folder, target, sidecar, keys),
            "layers": count_layers(folder, config, keys),
            "fc_norm": fc_norm(folder, keys),
            "qk_norm": any(key.endswith("self_attn.q_norm.weight") for key in keys),
            "feedback": self.feedback(folder, sidecar),
            "residual": "normed" if switch(folder, "norm_before_residual") else "raw",
        }
        if fields["residual"] == "normed":
            fields["init"] = "random"
        windows = hf_config.read_window(folder, config), sidecar.get("drafter", {}).get("window")
        if any(_is_short(window, target) for window in windows):
            fields["window"] = windows[0]
        default = target.shape().head_dim
        if shape.head_dim != default or sidecar.get("drafter", {}).get("head_dim") is not None:
            fields["head_dim"] = shape.head_dim
        ids = hf_config.read_vocab(folder, keys, target.vocab_size)
        shape = shape._replace(head_dim=default, activation=target.shape().activation)
        return DrafterSpec("eagle3", fields, shape, ids)

    def _taps(
        self, folder: WeightFolder, target: Target, sidecar: Sidecar, keys: Mapping[str, str]
    ) -> tuple[int, ...]:
        width = folder.shapes.get(keys.get("fc.weight", ""), (0, 0))[-1]
        count, rest = divmod(width, target.shape().hidden)
        if rest or not count:
            why = f"fc.weight reads {width} values, no multiple of {target.shape().hidden}."
            raise folder.error(why, hf_config.USE_TARGET)
        if "taps" in sidecar and "format" not in sidecar:  # written by hand
            taps = folder.int_list("taps", sidecar["taps"])
        else:
            taps = self.stored_taps(folder, target, sidecar)
        if taps is None:
            taps = eagle3_taps(target.num_layers)
            if count != 3 or len(set(taps)) != 3 or min(taps) < 0:
                raise folder.error(f"it does not name the {count} layers it taps.", STATE_TAPS)
        if list(taps) != sorted(taps):
            raise folder.error(f"it names the taps {list(taps)}; {ORDER}.", STATE_TAPS)
        if len(taps) != count or not all(0 <= tap < target.num_layers for tap in taps):
            why = f"it taps layers {list(taps)} of {target.num_layers}, and fc.weight reads {count}"
            raise folder.error(f"{why} layers.", STATE_TAPS)
        return taps


class Eagle3SGLang(Eagle3Format):
    """`LlamaForCausalLMEagle3` with `midlayer.*`."""

    names = ("sglang", "specforge")
    engines = "SGLang"
    first_layer = "midlayer"
    writes_whole_vocab = True  # optimum-intel leaves absent ones uninitialised

    def refusal_reason(self, drafter: Eagle3, target: Target) -> str:
        if _is_short(drafter.cfg.window, target):
            return "SGLang takes a window from its launch flag alone, not from the folder"
        if drafter.cfg.qk_norm:
            return "SGLang's drafter is a Llama layer, without norms on queries and keys"
        if drafter.cfg.residual == "normed":
            return "SGLang's residual adds the raw state, and this drafter's the normed one"
        if len(drafter.taps) == 1:
            return "SGLang builds no fc for a single tapped layer"
        return super().refusal_reason(drafter, target)

    def later_layer_key(self, key: str) -> str:
        return key.replace("input_layernorm", "hidden_norm")

    def config(self, drafter: Eagle3, target: Target) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self.layer_fields(drafter),
            "draft_vocab_size": len(drafter.vocab),
            "fc_norm": drafter.cfg.fc_norm == "each",
            **({"norm_before_fc": True} if drafter.cfg.fc_norm == "joint" else {}),
            **({"norm_output": True} if drafter.cfg.feedback == "normed" else {}),
            "num_aux_hidden_states": len(drafter.taps),
            "eagle_config": {"use_aux_hidden_state": True, IDS: list(drafter.taps)},
        }

    def matches(self, folder: WeightFolder) -> bool:
        return _is_eagle3(folder) and "Eagle3LlamaForCausalLM" not in folder.architectures

    def stored_taps(
        self, folder: WeightFolder, target: Target, sidecar: Sidecar
    ) -> tuple[int, ...] | None:
        """Return the ids as outputs; refuse ids that could be vLLM's inputs."""
        nested = folder.config_object("eagle_config", required=False)
        value = layer_ids(nested)
        if value is None and layer_ids(folder.config) is not None:
            why = "its layer ids are where vLLM reads them, in a folder for SGLang."
            raise folder.error(why, STATE_TAPS)
        taps = folder.int_list(IDS, value)
        if "format" in sidecar:
            return taps
        if taps == tuple(tap + 1 for tap in eagle3_taps(target.num_layers)):
            why = f"layers {value} are vLLM's default, which it reads as inputs, and SGLang as"
            raise folder.error(f"{why} outputs: the taps would be shifted.", STATE_TAPS)
        either = MODELOPT not in nested and "layers.0.mlp.up_proj.weight" in strip_wrappers(folder)
        if taps and either:
            why = f"layers {value} are inputs for vLLM and outputs for SGLang; its names suit both."
            raise folder.error(why, STATE_TAPS)
        return taps

    def feedback(self, folder: WeightFolder, sidecar: Sidecar) -> str:
        settled = "format" in sidecar or AUTOMODEL in folder.architectures
        if settled or "norm_output" not in folder.config:
            return super().feedback(folder, sidecar)
        value = sidecar.get("drafter", {}).get("feedback")
        if value is None:
            why = "norm_output is the norm before the head for SpecForge, and that of the state"
            raise folder.error(f"{why} fed back in SGLang; which one is undefined.", STATE_TAPS)
        return str(value)


class Eagle3VLLM(Eagle3Format):
    """vLLM's `Eagle3LlamaForCausalLM`."""

    names = ("vllm",)
    engines = "vLLM"

    def refusal_reason(self, drafter: Eagle3, target: Target) -> str:
        if _is_short(drafter.cfg.window, target):
            return WINDOW
        return QK_NORM if drafter.cfg.qk_norm else super().refusal_reason(drafter, target)

    def config(self, drafter: Eagle3, target: Target) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3LlamaForCausalLM"],
            **self.layer_fields(drafter),
            **self.architecture_flags(drafter),
        }

    def matches(self, folder: WeightFolder) -> bool:
        return _is_eagle3(folder) and "Eagle3LlamaForCausalLM" in folder.architectures


def _is_eagle3(folder: WeightFolder) -> bool:
    """Return whether the tensors are an EAGLE-3 drafter's, of SGLang's or vLLM's own format."""
    keys = strip_wrappers(folder)
    first = any(key.startswith(("midlayer.", "layers.0.hidden_norm.")) for key in keys)
    other = "speculators_model_type" in folder.config or "mask_hidden" in keys  # P-EAGLE
    return first and "fc.weight" in keys and not other


def _is_short(window: int | None, target: Target) -> bool:
    """Return whether a window excludes a row of some text that the target reads."""
    return window is not None and window < target.shape().max_positions


FORMATS = (Eagle3SGLang(), Eagle3VLLM())
