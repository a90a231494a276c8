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

from outrider.models.drafter import Drafter
from outrider.models.drafters.medusa import Medusa
from outrider.models.formats import hf_config
from outrider.models.formats.external import ExternalFormat, Sidecar
from outrider.models.formats.sidecar import DrafterSpec
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.target import Target

ADAPTERS = "it changes its target (adapters), which no engine does when it loads Medusa heads"
REDUCED = "its draft vocabulary is reduced, which only format=vllm can hold (token_map)"
LAYERS_DIFFER = "its layers differ, and Medusa's code repeats one of them; format=vllm stores each"


class MedusaFormat(ExternalFormat):
    """What both formats share."""

    drafters = ("medusa",)

    def refuses(self, drafter: Drafter, target: Target) -> str:
        return ADAPTERS if as_medusa(drafter).adapters is not None else ""


class MedusaOriginal(MedusaFormat):
    """`medusa_lm_head.safetensors`: heads with a vocabulary matrix each, or with the target's."""

    names = ("medusa",)
    served = "Medusa's own code, TGI"
    stem = "medusa_lm_head"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        if not drafter.vocab.is_full:
            return REDUCED
        for block in as_medusa(drafter).blocks:
            first, *others = block.layers  # type: ignore[misc]
            if any(not _equal_layers(first, other) for other in others):
                return LAYERS_DIFFER
        return super().refuses(drafter, target)

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        cfg = as_medusa(drafter).cfg
        return {
            "medusa_num_heads": cfg.depths,
            "medusa_num_layers": cfg.res_layers,
            "base_model_name_or_path": str(target.config.name_or_path or target.name),
            "hidden_size": target.shape().hidden,
            "vocab_size": target.vocab_size,
            "version": "2",
            **hf_config.dtype_fields(drafter.state_dict()),
        }

    def rename(self, key: str, drafter: Drafter, target: Target) -> str | None:
        part, *rest = key.split(".")
        if part == "vocab":
            return None
        if part == "lm_heads":
            return f"{rest[0]}.{as_medusa(drafter).cfg.res_layers}.weight"
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
        fields = {"own_heads": f"0.{layers}.weight" in keys, "adapter_rank": 0}
        sizes = {"depths": heads, "res_layers": layers}
        return DrafterSpec("medusa", {**fields, **sizes}, target.shape())

    def _refuse_other_layers(self, folder: WeightFolder, keys: Mapping[str, str]) -> None:
        """Refuse a second layer that is not the first: Medusa's code has one for both."""
        for key in [k for k in keys if re.fullmatch(r"\d+\.[1-9]\d*\.linear\..*", k)]:
            head, _, rest = key.split(".", 2)
            names = [keys[k] for k in (key, f"{head}.0.{rest}") if k in keys]
            weights = [folder.tensors([name])[name] for name in names]
            if len(weights) == 2 and not torch.equal(*weights):
                raise folder.error(f"{' and '.join(names)} differ; Medusa's code has one for both.")


class MedusaVLLM(MedusaFormat):
    """vLLM's `MedusaModel`: one head per depth or one for all, of all tokens or of some."""

    names = ("vllm",)
    served = "vLLM"
    writes_target_copies = True

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        cfg = as_medusa(drafter).cfg
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.shape().hidden,
            "vocab_size": target.vocab_size,
            "truncated_vocab_size": len(drafter.vocab),
            "num_heads": cfg.depths,
            "num_hidden_layers": cfg.res_layers,
            "medusa_fc_bias": _has_bias(drafter),
            "original_lm_head": not cfg.own_heads,
            **hf_config.dtype_fields(drafter.state_dict()),
        }

    def rename(self, key: str, drafter: Drafter, target: Target) -> str | None:
        return None if key.startswith("vocab.") else key

    def export_weights(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out, biased = super().export_weights(drafter, target), _has_bias(drafter)
        return {k: v for k, v in out.items() if biased or not k.endswith(".bias")}

    def is_omitted(self, key: str, folder: WeightFolder) -> bool:
        return key.endswith(".bias") and not folder.config.get("medusa_fc_bias", False)

    def import_weights(
        self, weights: dict[str, Tensor], drafter: Drafter, target: Target
    ) -> dict[str, Tensor]:
        weight, hidden = weights["blocks.0.layers.0.weight"], target.shape().hidden
        biases = [k for k in drafter.state_dict() if k.endswith(".bias")]
        return {**{k: weight.new_zeros(hidden) for k in biases}, **weights}

    def target_copies(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = {} if drafter.vocab.is_full else {"token_map": drafter.vocab.target_ids}
        if not as_medusa(drafter).cfg.own_heads:
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
        fields = {"own_heads": not config.get("original_lm_head", False), "adapter_rank": 0}
        heads, layers = (folder.positive_int(k, 0) for k in ("num_heads", "num_hidden_layers"))
        sizes = {"depths": heads, "res_layers": layers}
        ids = self._vocab_ids(folder, keys, target)
        return DrafterSpec("medusa", {**fields, **sizes}, target.shape(), ids)

    def _vocab_ids(
        self, folder: WeightFolder, keys: Mapping[str, str], target: Target
    ) -> Tensor | None:
        size = folder.config.get("truncated_vocab_size") or target.vocab_size
        if (size < target.vocab_size) != ("token_map" in keys):
            why = f"truncated_vocab_size is {size} of {target.vocab_size} tokens"
            raise folder.error(f"{why}, and token_map, which names them, does not fit it.")
        if "token_map" not in keys:
            return None
        ids = folder.tensors([keys["token_map"]])[keys["token_map"]]
        ascending = len(ids) == size and not bool((ids.diff() <= 0).any())
        if not ascending or ids[0] < 0 or ids[-1] >= target.vocab_size:
            raise folder.error("token_map must name tokens of the target in ascending order.")
        return ids


def as_medusa(drafter: Drafter) -> Medusa:
    """Return the drafter as a `Medusa`."""
    assert isinstance(drafter, Medusa), "this format holds medusa"
    return drafter


def _has_bias(drafter: Drafter) -> bool:
    biases = [v for k, v in drafter.state_dict().items() if k.endswith(".bias")]
    return any(bias.is_meta or bool(bias.any()) for bias in biases)


def _equal_layers(one: Any, other: Any) -> bool:
    return torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


FORMATS = (MedusaOriginal(), MedusaVLLM())
