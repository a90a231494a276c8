"""EAGLE-3 in the formats of SGLang, vLLM and the speculators library.

    ours                         SGLang                     vLLM, speculators
    fc, norm, lm_head            the same                   the same
    fc_norm.{k}                  the same                   the same
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
field that SpecForge uses for something else; in a folder of unknown origin it is refused.
`norm_before_residual` is always written for vLLM, whose default is true; writers mean false when
they omit it.

Source: reference tables of the published checkpoints (docs/formats.md).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafters.eagle3 import Eagle3, eagle3_taps
from outrider.models.formats import hf_config
from outrider.models.formats.external import (
    JOINT_ORDER,
    DrafterSpec,
    ExternalFormat,
    Sidecar,
    strip_wrappers,
)
from outrider.models.formats.weight_folder import SIDECAR, WeightFolder
from outrider.models.target import Target

LAST = "it taps the last decoder layer, whose output engines expose only after the final norm"
ORDER = "engines return tapped layers in ascending order, in whatever order they are named"
STATE_TAPS = (
    f"State it in {SIDECAR} in the same folder: "
    '{"taps": [1, 17, 32], "drafter": {"feedback": "raw"}}, with the layers whose output is read.'
)
IDS = "eagle_aux_hidden_state_layer_ids"
AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # SGLang's older fc_norm.0 .. 2
EAGLE_CONFIG = {  # ModelOpt's eagle_config: the only values that Outrider's network has
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1,
}  # fmt: skip
VERSION = "0.7.0"  # of the speculators schema that is written
LOSSLESS = {"verifier_accept_k": 1, "accept_tolerance": 0.0}
QK_NORM = (
    "vLLM's Eagle3LlamaForCausalLM is a Llama layer, without norms on queries and keys; use "
    "format=speculators, which can name Qwen3's layer"
)


class Eagle3Format(ExternalFormat):
    """What the formats share."""

    drafters = ("eagle3",)
    joint_order = JOINT_ORDER
    first_layer = "layers.0"  # prefix of the layer of a drafter that has one

    def refusal_reason(self, drafter: Eagle3, target: Target) -> str:
        if list(drafter.taps) != sorted(drafter.taps):
            return f"{ORDER}, and its fc reads them as {list(drafter.taps)}"
        if target.num_layers - 1 in drafter.taps:
            return LAST
        return "" if drafter.cfg.activation == "silu" else hf_config.ONLY_SILU

    # ---- names ----

    def rename(self, key: str, drafter: Eagle3, target: Target) -> str | None:
        if key == "tap_scale" or (key.startswith("vocab.") and drafter.vocab.is_full):
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
                raise folder.error(f"{name} and {out[written]} are the same weight.")
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
        fc, scale = out["fc.weight"], out["tap_scale"]
        if scale.is_meta or bool((scale != 1).any()):
            columns = scale.double().repeat_interleave(fc.shape[1] // len(scale))
            out["fc.weight"] = (fc.double() * columns).to(fc.dtype)
        return out

    def import_weights(self, weights: dict[str, Tensor], drafter: Eagle3) -> dict[str, Tensor]:
        scale = torch.ones(len(drafter.taps), dtype=weights["fc.weight"].dtype)
        return {**weights, "tap_scale": scale}

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
            "norm_before_fc": False,
            "fc_norm": drafter.cfg.fc_norm,
            "norm_output": drafter.cfg.feedback == "normed",
            IDS: [tap + 1 for tap in drafter.taps],
        }

    def stored_taps(
        self, folder: WeightFolder, target: Target, sidecar: Sidecar
    ) -> tuple[int, ...] | None:
        """Return the layers whose outputs config.json taps; None: it names none.

        By default, it names the layers whose inputs they are: (2, 18) -> (1, 17).
        """
        nested = folder.config_object("eagle_config", required=False).get(IDS)
        inputs = folder.int_list(IDS, folder.config.get(IDS) or nested)
        return None if inputs is None else tuple(number - 1 for number in inputs)

    def feedback(self, folder: WeightFolder, sidecar: Sidecar) -> str:
        """Return the setting `feedback`."""
        return "normed" if folder.config.get("norm_output") else "raw"

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        keys, config = self.file_keys(folder, target), self.layer_config(folder)
        _refuse_other_networks(folder)
        shape = hf_config.read_config(folder, config, target.shape())
        fields = {
            "activation": shape.activation,
            "taps": self._taps(folder, target, sidecar, keys),
            "layers": folder.positive_int("num_hidden_layers", 1, config),
            "fc_norm": "fc_norm.0.weight" in keys,
            "qk_norm": any(key.endswith("self_attn.q_norm.weight") for key in keys),
            "feedback": self.feedback(folder, sidecar),
            "residual": "normed" if folder.config.get("norm_before_residual") else "raw",
        }
        if fields["residual"] == "normed":
            fields["init"] = "random"
        if fields["fc_norm"] != bool(folder.config.get("fc_norm", fields["fc_norm"])):
            raise folder.error("fc_norm of config.json contradicts the weights.")
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

    def refusal_reason(self, drafter: Eagle3, target: Target) -> str:
        if drafter.cfg.qk_norm:
            return "SGLang's drafter is a Llama layer, without norms on queries and keys"
        if drafter.cfg.residual == "normed":
            return "SGLang's residual adds the raw state, and this drafter's the normed one"
        if len(drafter.taps) == 1:
            return "SGLang builds no fc for a single tapped layer"
        return super().refusal_reason(drafter, target)

    def later_layer_key(self, key: str) -> str:
        return key.replace("input_layernorm", "hidden_norm")

    def rename(self, key: str, drafter: Eagle3, target: Target) -> str | None:
        """Store the maps of a whole vocabulary too: optimum-intel leaves absent buffers as is."""
        part, _, rest = key.partition(".")
        return rest if part == "vocab" else super().rename(key, drafter, target)

    def is_omitted(self, key: str, folder: WeightFolder) -> bool:
        return key.startswith("vocab.") and "d2t" not in strip_wrappers(folder)

    def config(self, drafter: Eagle3, target: Target) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self.layer_fields(drafter),
            "draft_vocab_size": len(drafter.vocab),
            "fc_norm": drafter.cfg.fc_norm,
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
        value = folder.config_object("eagle_config", required=False).get(IDS)
        if value is None and folder.config.get(IDS) is not None:
            why = "its layer ids are where vLLM reads them, in a folder for SGLang."
            raise folder.error(why, STATE_TAPS)
        taps = folder.int_list(IDS, value)
        if "format" in sidecar:
            return taps
        if taps == tuple(tap + 1 for tap in eagle3_taps(target.num_layers)):
            why = f"layers {value} are vLLM's default, which it reads as inputs, and SGLang as"
            raise folder.error(f"{why} outputs: the taps would be shifted.", STATE_TAPS)
        if taps and "layers.0.mlp.up_proj.weight" in strip_wrappers(folder):
            why = f"layers {value} are inputs for vLLM and outputs for SGLang; its names suit both."
            raise folder.error(why, STATE_TAPS)
        return taps

    def feedback(self, folder: WeightFolder, sidecar: Sidecar) -> str:
        if "norm_output" not in folder.config or "format" in sidecar:
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
        return QK_NORM if drafter.cfg.qk_norm else super().refusal_reason(drafter, target)

    def config(self, drafter: Eagle3, target: Target) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3LlamaForCausalLM"],
            **self.layer_fields(drafter),
            **self.architecture_flags(drafter),
        }

    def matches(self, folder: WeightFolder) -> bool:
        return _is_eagle3(folder) and "Eagle3LlamaForCausalLM" in folder.architectures


class Eagle3Speculators(Eagle3Format):
    """speculators' `Eagle3Speculator`, the only format that can name Qwen3's layer."""

    names = ("speculators",)
    engines = "vLLM"
    writes_target_copies = True

    def config(self, drafter: Eagle3, target: Target) -> dict[str, Any]:
        layers, depths = self.layer_fields(drafter), drafter.cfg.depths
        return {
            **speculators_fields("eagle3", "Eagle3Speculator", layers, depths, target),
            **self.architecture_flags(drafter),
            "target_hidden_size": None,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
        }

    def matches(self, folder: WeightFolder) -> bool:
        return folder.config.get("speculators_model_type") == "eagle3"

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        layers = folder.config_object("transformer_layer_config")
        if folder.config.get("norm_before_residual") is None:
            why = "norm_before_residual is missing: vLLM's default is true, and others' is false."
            raise folder.error(why, "Write into config.json which it was trained with.")
        if folder.config.get("target_hidden_size") not in (None, layers.get("hidden_size")):
            raise folder.error("its target has another hidden size, which is not supported.")
        return layers


def speculators_fields(
    kind: str, architecture: str, layers: dict[str, Any], depths: int, target: Target
) -> dict[str, Any]:
    """Return the fields of every speculators config."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": depths, **LOSSLESS}
    return {
        "architectures": [architecture],
        "transformer_layer_config": layers,
        "dtype": layers["dtype"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": str(target.config.name_or_path or target.name),
                "architectures": list(getattr(target.config, "architectures", None) or []),
            },
        },
    }


def _is_eagle3(folder: WeightFolder) -> bool:
    """Return whether the tensors are an EAGLE-3 drafter's, of SGLang's or vLLM's own format."""
    keys = strip_wrappers(folder)
    first = any(key.startswith(("midlayer.", "layers.0.hidden_norm.")) for key in keys)
    return first and "fc.weight" in keys and "speculators_model_type" not in folder.config


def _refuse_other_networks(folder: WeightFolder) -> None:
    """Refuse variants of EAGLE-3 that Outrider does not have."""
    if folder.config.get("norm_before_fc"):
        raise folder.error(f"config.json has norm_before_fc: true. {hf_config.NOT_SUPPORTED}")
    if folder.config.get("tie_word_embeddings"):
        raise folder.error("config.json ties head and embedding, and lm_head is stored.")
    aux = folder.config_object("eagle_config", required=False)
    for name, value in EAGLE_CONFIG.items():
        if aux.get(name, value) not in (value, None):
            raise folder.error(f"eagle_config has {name}: {aux[name]}. {hf_config.NOT_SUPPORTED}")


FORMATS = (Eagle3SGLang(), Eagle3VLLM(), Eagle3Speculators())
