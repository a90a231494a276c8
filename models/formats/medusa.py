"""Medusa heads as their authors, TGI and vLLM read them.

    ours                        authors, version 1      TGI, version 2       vLLM
    blocks.{h}.layers.{l}.X     {h}.{l}.linear.X        {h}.{l}.linear.X     blocks.{h}.layers.{l}.X
    lm_heads.{h}.weight         {h}.{layers}.weight     the target's head    lm_heads.{h}.weight

vLLM alone has a place for a reduced vocabulary (`token_map`) and for one head that all share
(`original_lm_head`, a copy of the target's). The authors repeat one module `medusa_num_layers`
times, so layers that differ from each other cannot be written for them.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafter import Drafter
from outrider.models.drafters.medusa import Medusa
from outrider.models.formats import hf_config as body
from outrider.models.formats.external import Outside
from outrider.models.formats.sidecar import Implied
from outrider.models.formats.weight_folder import Folder
from outrider.models.target import Target

CHANGED = (
    "it changes its target (adapters), and heads alone would be served beside another model than "
    "the one they read"
)


class MedusaFiles(Outside):
    """What both have in common."""

    drafters = ("medusa",)

    def refuses(self, drafter: Drafter, target: Target) -> str:
        return CHANGED if of(drafter).adapters is not None else ""

    def taken(self, own: dict[str, Tensor], drafter: Drafter, target: Target) -> dict[str, Tensor]:
        vocab = {f"vocab.{k}": v for k, v in drafter.vocab.state_dict().items()}
        return {**vocab, **own}


class Official(MedusaFiles):
    """`medusa_lm_head.safetensors`: heads with a vocabulary matrix each, or with the target's."""

    words = ("medusa",)
    served = "Medusa's own code, TGI"
    stem = "medusa_lm_head"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        if not drafter.vocab.full:
            return (
                "its draft vocabulary is reduced, and these files have no place for one; "
                "format=vllm has (token_map)"
            )
        for block in of(drafter).blocks:
            first, *others = block.layers  # type: ignore[misc]
            if any(not _equal(first, other) for other in others):
                return (
                    "its layers differ, and Medusa's code repeats one of them; format=vllm does not"
                )
        return super().refuses(drafter, target)

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        cfg = of(drafter).cfg
        return {
            "medusa_num_heads": cfg.depths,
            "medusa_num_layers": cfg.res_layers,
            "base_model_name_or_path": str(target.config.name_or_path or target.name),
            "hidden_size": target.shape().hidden,
            "vocab_size": target.vocab,
            "version": "2",
            **body.types(drafter.state_dict()),
        }

    def rename(self, own: str, drafter: Drafter, target: Target) -> str | None:
        part, *rest = own.split(".")
        if part == "vocab":
            return None
        if part == "lm_heads":
            return f"{rest[0]}.{of(drafter).cfg.res_layers}.weight"
        head, _, layer, name = rest
        return f"{head}.{layer}.linear.{name}"

    def knows(self, folder: Folder) -> bool:
        return "medusa_num_heads" in folder.config and any(
            re.fullmatch(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight", key)
            for key in folder.shapes
        )

    def keys(self, folder: Folder, target: Target) -> dict[str, str]:
        found = super().keys(folder, target)
        return {re.sub(r"^medusa_heads?\.", "", key): name for key, name in found.items()}

    def implied(self, folder: Folder, target: Target, stamp: Mapping[str, Any]) -> Implied:
        where = self.keys(folder, target)
        heads = folder.count("medusa_num_heads", 0)
        layers = folder.count("medusa_num_layers", 1)
        fields = {"own_heads": f"0.{layers}.weight" in where, "adapter_rank": 0}
        for key in [k for k in where if re.fullmatch(r"\d+\.[1-9]\d*\.linear\..*", k)]:
            head, _, rest = key.split(".", 2)
            first = where.get(f"{head}.0.{rest}", "")
            weights = folder.read([k for k in (where[key], first) if k])
            if first and not torch.equal(weights[where[key]], weights[first]):
                raise folder.wrong(
                    f"{where[key]} and {first} differ; Medusa's code has one for both."
                )
        sizes = {"depths": heads, "res_layers": layers}
        return Implied("medusa", {**fields, **sizes}, target.shape())


class VLLM(MedusaFiles):
    """`MedusaModel`; its heads may be cut to some tokens, or be one."""

    words = ("vllm",)
    served = "vLLM"

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        cfg = of(drafter).cfg
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.shape().hidden,
            "vocab_size": target.vocab,
            "truncated_vocab_size": len(drafter.vocab),
            "num_heads": cfg.depths,
            "num_hidden_layers": cfg.res_layers,
            "medusa_fc_bias": _biased(drafter),
            "original_lm_head": not cfg.own_heads,
            **body.types(drafter.state_dict()),
        }

    def rename(self, own: str, drafter: Drafter, target: Target) -> str | None:
        return None if own.startswith("vocab.") else own

    def given(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = super().given(drafter, target)
        biased = _biased(drafter)
        return {k: v for k, v in out.items() if biased or not k.endswith(".bias")}

    def lacks(self, own: str, folder: Folder) -> bool:
        return own.endswith(".bias") and not folder.config.get("medusa_fc_bias", False)

    def taken(self, own: dict[str, Tensor], drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = super().taken(own, drafter, target)
        some = own["blocks.0.layers.0.weight"]
        for key in drafter.state_dict().keys() - out.keys():
            out[key] = some.new_zeros(target.shape().hidden)
        return out

    def shared(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = self.lent(drafter, target)
        dtype = next(of(drafter).blocks.parameters()).dtype
        return {k: v if k == "token_map" else v.to(dtype) for k, v in out.items()}

    def lent(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = {} if drafter.vocab.full else {"token_map": drafter.vocab.kept}
        if not of(drafter).cfg.own_heads:
            out["lm_head.weight"] = target.head_weight[drafter.vocab.kept]
        return out

    def knows(self, folder: Folder) -> bool:
        return folder.config.get("model_type") == "medusa"

    def keys(self, folder: Folder, target: Target) -> dict[str, str]:
        found = super().keys(folder, target)
        bare = {key.removeprefix("medusa_heads."): name for key, name in found.items()}
        one = bool(folder.config.get("original_lm_head"))
        return {
            ("lm_head.weight" if one and k == "lm_heads.0.weight" else k): v
            for k, v in bare.items()
        }

    def implied(self, folder: Folder, target: Target, stamp: Mapping[str, Any]) -> Implied:
        where, config = self.keys(folder, target), folder.config
        if config.get("vocab_size") != target.vocab:
            why = f"it was made for {config.get('vocab_size')} tokens, and the target knows"
            raise folder.wrong(f"{why} {target.vocab}.", "Use the target it was trained for.")
        fields = {"own_heads": not config.get("original_lm_head", False), "adapter_rank": 0}
        heads, layers = (folder.count(k, 0) for k in ("num_heads", "num_hidden_layers"))
        sizes = {"depths": heads, "res_layers": layers}
        kept = self._kept(folder, where, target)
        return Implied("medusa", {**fields, **sizes}, target.shape(), kept)

    def _kept(self, folder: Folder, where: Mapping[str, str], target: Target) -> Tensor | None:
        size = folder.config.get("truncated_vocab_size") or target.vocab
        if (size < target.vocab) != ("token_map" in where):
            why = f"its heads are cut to {size} of {target.vocab} tokens, and token_map says which:"
            raise folder.wrong(f"{why} one of the two is missing.")
        if "token_map" not in where:
            return None
        ids = folder.read([where["token_map"]])[where["token_map"]]
        if len(ids) != size or bool((ids.diff() <= 0).any()):
            raise folder.wrong("token_map must name its tokens in ascending order, each once.")
        return ids


def of(drafter: Drafter) -> Medusa:
    assert isinstance(drafter, Medusa), "this format holds medusa"
    return drafter


def _biased(drafter: Drafter) -> bool:
    biases = [v for k, v in drafter.state_dict().items() if k.endswith(".bias")]
    return any(bias.is_meta or bool(bias.any()) for bias in biases)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


FORMATS = (Official(), VLLM())
