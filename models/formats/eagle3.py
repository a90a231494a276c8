"""EAGLE-3: what the formats of SGLang (eagle3_sglang.py) and vLLM (eagle3_vllm.py) share.

The tensors are the same, their names and the meaning of the layer ids differ:

    ours                         SGLang                     vLLM
    fc, norm, lm_head            the same                   the same
    fc_norm.{k}                  the same                   the same
    midlayer.*                   midlayer.* (layers.0.*     layers.0.*
                                 of several layers)
    layers.{i}.*                 layers.{i+1}.*, its input  layers.{i+1}.*
                                 norm is `hidden_norm`
    vocab.d2t, vocab.t2d         d2t, t2d, absent when the drafter can propose every token
    tap_scale                    multiplied into fc

A tap k, "the output of decoder layer k", is number k for SGLang and k + 1, "the input of layer
k + 1", for vLLM, under one field name. Feeding back the normed state (`feedback: normed`) is
`norm_output`, a field that SpecForge uses for something else; in a folder of unknown origin it is
refused.

Source: reference tables of the published checkpoints (docs/formats.md).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafter import Drafter
from outrider.models.drafters.eagle3 import Eagle3, eagle3_taps
from outrider.models.formats import hf_config
from outrider.models.formats.external import JOINT_ORDER, ExternalFormat, Sidecar, strip_wrappers
from outrider.models.formats.sidecar import DrafterSpec
from outrider.models.formats.weight_folder import SIDECAR, WeightFolder
from outrider.models.target import Target

LAST = "it taps the last decoder layer, whose output engines expose only after the final norm"
ORDER = "engines return tapped layers in ascending order, in whatever order they are named"
STATE_TAPS = (
    f"State it in {SIDECAR} beside it: "
    '{"taps": [1, 17, 32], "drafter": {"feedback": "raw"}}, with the layers whose output is read.'
)
IDS = "eagle_aux_hidden_state_layer_ids"
AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # SGLang's older fc_norm.0 .. 2
EAGLE_CONFIG = {  # ModelOpt's eagle_config: the only values that Outrider's network has
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1,
}  # fmt: skip


class Eagle3Format(ExternalFormat):
    """What the formats share."""

    drafters = ("eagle3",)
    joint_order = JOINT_ORDER

    def refuses(self, drafter: Drafter, target: Target) -> str:
        if list(drafter.taps) != sorted(drafter.taps):
            return f"{ORDER}, and its fc reads them as {list(drafter.taps)}"
        return LAST if target.num_layers - 1 in drafter.taps else ""

    # ---- names ----

    def rename(self, key: str, drafter: Drafter, target: Target) -> str | None:
        if key == "tap_scale" or (key.startswith("vocab.") and drafter.vocab.is_full):
            return None
        part, _, rest = key.partition(".")
        if part == "vocab":
            return rest
        if part == "layers":
            number, _, rest = rest.partition(".")
            return f"layers.{int(number) + 1}.{self.later_layer_key(rest)}"
        several = as_eagle3(drafter).cfg.layers > 1
        return f"{self.first_layer_name(several)}.{rest}" if part == "midlayer" else key

    def first_layer_name(self, several: bool) -> str:
        """Return the prefix of the first layer, of one layer or of several."""
        return "layers.0"

    def later_layer_key(self, key: str) -> str:
        """Return the name of a part of the second and later layers."""
        return key

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        """Accept every name in use for a tensor, not only the one that is written."""
        bare, out = super().file_keys(folder, target), dict[str, str]()
        several = any(key.startswith("layers.1.") for key in bare)
        for key, name in bare.items():
            written = self._written_name(key, several)
            if written in out:
                raise folder.error(f"{name} and {out[written]} are the same weight.")
            out[written] = name
        return out

    def _written_name(self, key: str, several: bool) -> str:
        """Map `midlayer`, `layers.0`, `hidden_norm`, `input_layernorm` and `aux_norm_*`."""
        for i, name in enumerate(AUX_NORMS):
            key = key.replace(f"{name}.", f"fc_norm.{i}.")
        for first in ("midlayer.", "layers.0."):
            if key.startswith(first):
                return f"{self.first_layer_name(several)}.{key.removeprefix(first)}"
        if re.fullmatch(r"layers\.\d+\.(input_layernorm|hidden_norm)\.weight", key):
            return f"layers.{key.split('.')[1]}.{self.later_layer_key('input_layernorm')}.weight"
        return key

    # ---- weights ----

    def export_weights(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = super().export_weights(drafter, target)
        out["fc.weight"] = fold_tap_scale(out["fc.weight"], out["tap_scale"])
        return out

    def import_weights(
        self, weights: dict[str, Tensor], drafter: Drafter, target: Target
    ) -> dict[str, Tensor]:
        scale = torch.ones(len(drafter.taps), dtype=weights["fc.weight"].dtype)
        return {**weights, "tap_scale": scale}

    def target_copies(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        return {"embed_tokens.weight": target.embedding.weight}

    # ---- configuration ----

    def layer_fields(self, drafter: Drafter) -> dict[str, Any]:
        """Return the fields of config.json that describe the layers."""
        own = as_eagle3(drafter)
        kind = "qwen3" if own.cfg.qk_norm else "llama"
        return hf_config.layer_fields(own.state_dict(), own.shape, own.cfg.layers, kind)

    def architecture_flags(self, drafter: Drafter) -> dict[str, Any]:
        """Return the fields of vLLM's config.json that select the network around the layers."""
        cfg = as_eagle3(drafter).cfg
        return {
            "draft_vocab_size": len(drafter.vocab),
            "norm_before_residual": cfg.residual == "normed",
            "norm_before_fc": False,
            "fc_norm": cfg.fc_norm,
            "norm_output": cfg.feedback == "normed",
        }

    def stored_taps(
        self, folder: WeightFolder, target: Target, sidecar: Sidecar
    ) -> tuple[int, ...] | None:
        """Return the layers whose outputs config.json taps; None: it names none."""
        raise NotImplementedError

    def feedback(self, folder: WeightFolder, sidecar: Sidecar) -> str:
        """Return which state is fed back: "raw" or "normed"."""
        return "normed" if folder.config.get("norm_output") else "raw"

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        keys, config = self.file_keys(folder, target), self.layer_config(folder)
        _refuse_other_networks(folder)
        shape = hf_config.read_config(folder, config, target.shape())
        fields = {
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
        return DrafterSpec("eagle3", fields, shape._replace(head_dim=default), ids)

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


def as_eagle3(drafter: Drafter) -> Eagle3:
    """Return the drafter as an `Eagle3`."""
    assert isinstance(drafter, Eagle3), "this format holds eagle3"
    return drafter


def is_eagle3(folder: WeightFolder) -> bool:
    """Return whether the tensors are an EAGLE-3 drafter's, of SGLang's or vLLM's own format."""
    keys = strip_wrappers(folder)
    first = any(key.startswith(("midlayer.", "layers.0.hidden_norm.")) for key in keys)
    return first and "fc.weight" in keys and "speculators_model_type" not in folder.config


def taps_from_inputs(numbers: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the layers whose outputs are the inputs of these: (2, 18) -> (1, 17)."""
    return None if numbers is None else tuple(number - 1 for number in numbers)


def fold_tap_scale(fc: Tensor, scale: Tensor) -> Tensor:
    """Multiply the scale of each tap into its columns of fc."""
    if not scale.is_meta and bool((scale == 1).all()):
        return fc
    columns = scale.double().repeat_interleave(fc.shape[1] // len(scale))
    return (fc.double() * columns).to(fc.dtype)


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
