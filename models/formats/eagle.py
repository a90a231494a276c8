"""EAGLE-1, EAGLE-2 and HASS in the formats of their authors, SGLang and vLLM.

    ours            in all three
    fc, layers.0.*  the same; fc reads [embedding; state] and may have a bias
                    embed_tokens, a copy of the target's

There is no norm before or after the layer, and no head. Engines feed rows of the embedding as they
are stored: a factor that the target applies to them (Gemma's sqrt(H)) is multiplied into the
embedding's half of fc. A factor or cap on the target's logits is written where the engine reads it:
`logit_scale` for vLLM, `final_logit_softcapping` for SGLang. The bias differs: the authors' config
has `bias`; SGLang's fc always has one (zeros are written where ours has none) and uses the field
`bias` for the attention; vLLM's layer has none and drops it. `add_para_norm` (two more norms) is
refused.

EAGLE and HASS have the same files; without `outrider.json` a folder is read as eagle.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafters.eagle import Eagle
from outrider.models.formats import hf_config
from outrider.models.formats.external import (
    JOINT_ORDER,
    DrafterSpec,
    ExternalFormat,
    Sidecar,
    strip_wrappers,
)
from outrider.models.formats.weight_folder import SIDECAR, WeightFolder
from outrider.models.target.target import Target

PARA_NORMS = ("embedding_layernorm.weight", "hidden_states_layernorm.weight")
OLD_SCALE = (
    "it was exported by a version that did not multiply the scale of the target's embeddings into "
    "fc, which engines need."
)
BIAS = (
    "its fc has a bias, which vLLM's EagleLlamaForCausalLM drops; use format=sglang, or train with "
    "drafter.bias=false"
)

BIAS_FIX = (
    "Set bias to {} in config.json: EAGLE's training scripts train one whatever the copied "
    "config.json says, and its newest code drops one that config.json denies."
)


class EagleFormat(ExternalFormat):
    """What the three formats share."""

    drafters = ("eagle", "hass")
    joint_order = JOINT_ORDER
    reduced = "its draft vocabulary is reduced, and engines use the target's whole head with EAGLE"
    writes_target_copies = True

    def target_copies(self, drafter: Eagle, target: Target) -> dict[str, Tensor]:
        return {"embed_tokens.weight": target.embedding.weight}

    def layer_fields(self, drafter: Eagle, name: str) -> dict[str, Any]:
        """Return the fields of config.json that describe the layer, with its architecture."""
        fields = hf_config.layer_fields(drafter.state_dict(), drafter.shape)
        return {"architectures": [name], **fields}

    def export_weights(self, drafter: Eagle, target: Target) -> dict[str, Tensor]:
        out = super().export_weights(drafter, target)
        return {**out, "fc.weight": _scale_embedding(out["fc.weight"], target.embedding_scale)}

    def import_weights(
        self, weights: dict[str, Tensor], drafter: Eagle, target: Target
    ) -> dict[str, Tensor]:
        scaled = _scale_embedding(weights["fc.weight"], 1 / target.embedding_scale)
        return {**weights, "fc.weight": scaled}

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        keys, config = self.file_keys(folder, target), self.layer_config(folder)
        if folder.config.get("add_para_norm") or any(key in keys for key in PARA_NORMS):
            why = "it has HASS's two norms before fc."
            raise folder.error(f"{why} {hf_config.NOT_SUPPORTED}", hf_config.USE_OTHER)
        if (count := folder.positive_int("num_hidden_layers", 1, config)) != 1:
            why = f"it has {count} layers. {hf_config.NOT_SUPPORTED}"
            raise folder.error(why, hf_config.USE_OTHER)
        trained, bias = sidecar.get("drafter", {}), "fc.bias" in keys
        self.check_bias(folder, bias)
        if "format" in sidecar and "activation" not in trained and target.embedding_scale != 1:
            raise folder.error(OLD_SCALE, "Publish the run again.")
        hf_config.refuse_other_scale(folder, target.logit_scale)
        shape = hf_config.read_config(folder, config, target.shape())
        fields = {"bias": trained.get("bias", bias) if bias else False}
        fields["activation"] = shape.activation
        name = str(trained.get("name", "eagle"))
        if name not in self.drafters:
            fix = f"Write eagle or hass into {SIDECAR}."
            raise folder.error(f"{SIDECAR} names the drafter {name!r}.", fix)
        return DrafterSpec(name, fields, shape._replace(activation=target.shape().activation))

    def check_bias(self, folder: WeightFolder, has_bias: bool) -> None:
        """Refuse a config.json that contradicts the weights."""
        value = folder.config.get("bias")
        if value is not None and bool(value) != has_bias:
            why = f"config.json has bias: {value}, which the weights contradict."
            raise folder.error(why, BIAS_FIX.format(str(has_bias).lower()))


class EagleOriginal(EagleFormat):
    """EAGLE's own code."""

    names = ("eagle",)
    engines = "EAGLE's own code"

    def config(self, drafter: Eagle, target: Target) -> dict[str, Any]:
        bias = "fc.bias" in drafter.state_dict()
        return {**self.layer_fields(drafter, "LlamaForCausalLM"), "bias": bias}

    def matches(self, folder: WeightFolder) -> bool:
        others = EagleVLLM().matches(folder) or EagleSGLang().matches(folder)
        return _is_eagle(folder) and not others


class EagleSGLang(EagleFormat):
    """SGLang's `LlamaForCausalLMEagle`, whose fc always has a bias."""

    names = ("sglang",)
    engines = "SGLang"

    def target_copies(self, drafter: Eagle, target: Target) -> dict[str, Tensor]:
        out = super().target_copies(drafter, target)
        if "fc.bias" not in drafter.state_dict():
            out["fc.bias"] = torch.zeros(target.shape().hidden)
        return out

    def refusal_reason(self, drafter: Eagle, target: Target) -> str:
        return super().refusal_reason(drafter, target) or only_silu(drafter)

    def config(self, drafter: Eagle, target: Target) -> dict[str, Any]:
        cap = {} if target.logit_cap is None else {"final_logit_softcapping": target.logit_cap}
        return {**self.layer_fields(drafter, "LlamaForCausalLMEagle"), **cap}

    def matches(self, folder: WeightFolder) -> bool:
        return _is_eagle(folder) and "LlamaForCausalLMEagle" in folder.architectures


class EagleVLLM(EagleFormat):
    """vLLM: the layer's config is nested in one of type eagle."""

    names = ("vllm",)
    engines = "vLLM"

    def refusal_reason(self, drafter: Eagle, target: Target) -> str:
        bias = drafter.state_dict().get("fc.bias")
        if bias is not None and (bias.is_meta or bool(bias.any())):
            return BIAS
        return super().refusal_reason(drafter, target) or only_silu(drafter)

    def config(self, drafter: Eagle, target: Target) -> dict[str, Any]:
        layers = self.layer_fields(drafter, "LlamaForCausalLM")
        return {
            "architectures": ["EagleLlamaForCausalLM"],
            "model_type": "eagle",
            "model": layers,
            "eagle_fc_bias": "fc.bias" in drafter.state_dict(),
            "truncated_vocab_size": target.vocab_size,
            **hf_config.logit_scale_field(target.logit_scale),
            **{name: layers[name] for name in ("dtype", "torch_dtype")},
        }

    def matches(self, folder: WeightFolder) -> bool:
        return _is_eagle(folder) and folder.config.get("model_type") == "eagle"

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        layers = folder.config_object("model")
        size = folder.config.get("truncated_vocab_size")
        if size not in (None, layers.get("vocab_size")):
            why = f"its vocabulary is truncated to {size}, without naming the tokens."
            raise folder.error(why, hf_config.USE_OTHER)
        return layers

    def check_bias(self, folder: WeightFolder, has_bias: bool) -> None:
        if bool(folder.config.get("eagle_fc_bias")) != has_bias:
            fix = f"Set eagle_fc_bias to {str(has_bias).lower()} in config.json."
            raise folder.error("eagle_fc_bias of config.json contradicts the weights.", fix)


def only_silu(drafter: Eagle) -> str:
    """Return why engines cannot load the layer, or ""."""
    return "" if drafter.cfg.activation == "silu" else hf_config.ONLY_SILU


def _scale_embedding(fc: Tensor, scale: float) -> Tensor:
    """Multiply the half of `fc` that reads the embedding."""
    if scale == 1 or fc.is_meta:
        return fc
    embedding, state = fc.chunk(2, dim=1)
    return torch.cat([(embedding.double() * scale).to(fc.dtype), state], dim=1)


def _is_eagle(folder: WeightFolder) -> bool:
    keys = strip_wrappers(folder)
    fc = folder.shapes.get(keys.get("fc.weight", ""), (1, 0))
    normed = "norm.weight" in keys or "layers.0.hidden_norm.weight" in keys
    return fc[1:] == (2 * fc[0],) and not normed and "layers.0.mlp.up_proj.weight" in keys


FORMATS = (EagleOriginal(), EagleSGLang(), EagleVLLM())
