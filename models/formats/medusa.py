"""Medusa heads in the formats of their authors, TGI and vLLM.

    ours                        authors, version 1      TGI, version 2       vLLM
    blocks.{h}.layers.{l}.X     {h}.{l}.linear.X        {h}.{l}.linear.X     blocks.{h}.layers.{l}.X
    lm_heads.{h}.weight         {h}.{layers}.weight     the target's head    lm_heads.{h}.weight

Only vLLM has a reduced vocabulary (`token_map`) and one head shared by all depths
(`original_lm_head`, a copy of the target's). The authors' code repeats one module
`medusa_num_layers` times, so layers that differ cannot be written in their format.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafters.medusa import Medusa
from outrider.models.formats import hf_config
from outrider.models.formats.external import DrafterSpec, ExternalFormat, Sidecar
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.target.target import Target

ADAPTERS = "it changes its target (adapters), which no engine does when it loads Medusa heads"
LAYERS_DIFFER = "its layers differ, and Medusa's code repeats one of them; format=vllm stores each"


class MedusaFormat(ExternalFormat):
    """What both formats share."""

    drafters = ("medusa",)

    def refusal_reason(self, drafter: Medusa, target: Target) -> str:
        return ADAPTERS if drafter.adapters is not None else super().refusal_reason(drafter, target)


class MedusaOriginal(MedusaFormat):
    """`medusa_lm_head.safetensors`: heads with a vocabulary matrix each, or with the target's."""

    names = ("medusa",)
    engines = "Medusa's own code, TGI"
    stem = "medusa_lm_head"
    reduced = "its draft vocabulary is reduced, which only format=vllm can hold (token_map)"

    def refusal_reason(self, drafter: Medusa, target: Target) -> str:
        weights = drafter.blocks.state_dict()  # {head}.layers.{layer}.{part}
        for key, value in weights.items():
            first = re.sub(r"layers\.\d+", "layers.0", key)
            if key != first and not torch.equal(value, weights[first]):
                return super().refusal_reason(drafter, target) or LAYERS_DIFFER
        return super().refusal_reason(drafter, target)

    def config(self, drafter: Medusa, target: Target) -> dict[str, Any]:
        return {
            "medusa_num_heads": drafter.cfg.depths,
            "medusa_num_layers": drafter.cfg.res_layers,
            "base_model_name_or_path": str(target.config.name_or_path or target.name),
            "hidden_size": target.shape().hidden,
            "vocab_size": target.vocab_size,
            "version": "2",
            **hf_config.dtype_fields(drafter.state_dict()),
        }

    def rename(self, key: str, drafter: Medusa, target: Target) -> str | None:
        part, *rest = key.split(".")
        if part == "vocab":
            return None
        if part == "lm_heads":
            return f"{rest[0]}.{drafter.cfg.res_layers}.weight"
        head, _, layer, name = rest
        return f"{head}.{layer}.linear.{name}"

    def matches(self, folder: WeightFolder) -> bool:
        key = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight")
        return "medusa_num_heads" in folder.config and any(map(key.fullmatch, folder.shapes))

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        bare = super().file_keys(folder, target)
        return {re.sub(r"^medusa_heads?\.", "", key): name for key, name in bare.items()}

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        keys = self.file_keys(folder, target)
        heads = folder.positive_int("medusa_num_heads", 0)
        layers = folder.positive_int("medusa_num_layers", 1)
        self._refuse_other_layers(folder, keys)
        own = f"0.{layers}.weight" in keys
        fields = {"own_heads": own, "adapter_rank": 0, "depths": heads, "res_layers": layers}
        return DrafterSpec("medusa", fields, target.shape())

    def _refuse_other_layers(self, folder: WeightFolder, keys: Mapping[str, str]) -> None:
        """Refuse layers that differ from the first, since Medusa's code repeats one layer."""
        for key in [k for k in keys if re.fullmatch(r"\d+\.[1-9]\d*\.linear\..*", k)]:
            head, _, rest = key.split(".", 2)
            names = [keys[k] for k in (key, f"{head}.0.{rest}") if k in keys]
            weights = [folder.tensors([name])[name] for name in names]
            if len(weights) == 2 and not torch.equal(*weights):
                why = f"{' and '.join(names)} differ; Medusa's code has one for both."
                raise folder.error(why, "Convert it to vLLM's names, which can store both.")


class MedusaVLLM(MedusaFormat):
    """vLLM's `MedusaModel`: one head per depth or one for all, of all tokens or of some."""

    names = ("vllm",)
    engines = "vLLM"
    writes_target_copies = True

    def config(self, drafter: Medusa, target: Target) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.shape().hidden,
            "vocab_size": target.vocab_size,
            "truncated_vocab_size": len(drafter.vocab),
            "num_heads": drafter.cfg.depths,
            "num_hidden_layers": drafter.cfg.res_layers,
            "medusa_fc_bias": _has_bias(drafter),
            "original_lm_head": not drafter.cfg.own_heads,
            **hf_config.logit_scale_field(1.0 if drafter.cfg.own_heads else target.logit_scale),
            **hf_config.dtype_fields(drafter.state_dict()),
        }

    def export_weights(self, drafter: Medusa, target: Target) -> dict[str, Tensor]:
        out, biased = super().export_weights(drafter, target), _has_bias(drafter)
        return {k: v for k, v in out.items() if biased or not k.endswith(".bias")}

    def is_omitted(self, key: str, folder: WeightFolder) -> bool:
        return key.endswith(".bias") and not folder.config.get("medusa_fc_bias", False)

    def import_weights(
        self, weights: dict[str, Tensor], drafter: Medusa, target: Target
    ) -> dict[str, Tensor]:
        first = weights["blocks.0.layers.0.weight"]
        biases = {
            k: first.new_zeros(len(first)) for k in drafter.state_dict() if k.endswith("bias")
        }
        return {**biases, **weights}

    def target_copies(self, drafter: Medusa, target: Target) -> dict[str, Tensor]:
        out = {} if drafter.vocab.is_full else {"token_map": drafter.vocab.target_ids}
        if not drafter.cfg.own_heads:
            out["lm_head.weight"] = target.head_weight[drafter.vocab.target_ids]
        return out

    def matches(self, folder: WeightFolder) -> bool:
        return folder.config.get("model_type") == "medusa"

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        bare = super().file_keys(folder, target)
        keys = {key.removeprefix("medusa_heads."): name for key, name in bare.items()}
        if folder.config.get("original_lm_head") and "lm_heads.0.weight" in keys:
            keys["lm_head.weight"] = keys.pop("lm_heads.0.weight")
        return keys

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        keys, config = self.file_keys(folder, target), folder.config
        if config.get("vocab_size") != target.vocab_size:
            why = f"its vocabulary has {config.get('vocab_size')} tokens and the target's"
            raise folder.error(f"{why} {target.vocab_size}.", hf_config.USE_TARGET)
        own = not config.get("original_lm_head", False)
        hf_config.refuse_other_scale(folder, 1.0 if own else target.logit_scale)
        heads, layers = (folder.positive_int(k, 0) for k in ("num_heads", "num_hidden_layers"))
        fields = {"own_heads": own, "adapter_rank": 0, "depths": heads, "res_layers": layers}
        ids = self._vocab_ids(folder, keys.get("token_map"), target.vocab_size)
        return DrafterSpec("medusa", fields, target.shape(), ids)

    def _vocab_ids(self, folder: WeightFolder, key: str | None, vocab: int) -> Tensor | None:
        size = folder.config.get("truncated_vocab_size") or vocab
        if (size < vocab) != (key is not None):
            why = f"truncated_vocab_size is {size} of {vocab} tokens"
            fix = "Add token_map to the weight file, or correct truncated_vocab_size."
            raise folder.error(f"{why}, and token_map, which names them, does not fit it.", fix)
        if key is None:
            return None
        ids = folder.tensors([key])[key]
        ascending = len(ids) == size and not bool((ids.diff() <= 0).any())
        if not ascending or ids[0] < 0 or ids[-1] >= vocab:
            why = "token_map must name tokens of the target in ascending order."
            raise folder.error(why, "Sort token_map, and the rows of every head in the same order.")
        return ids


def _has_bias(drafter: Medusa) -> bool:
    biases = [v for k, v in drafter.state_dict().items() if k.endswith(".bias")]
    return any(bias.is_meta or bool(bias.any()) for bias in biases)


FORMATS = (MedusaOriginal(), MedusaVLLM())
