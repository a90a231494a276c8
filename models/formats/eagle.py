"""EAGLE-1 and -2 as their authors, vLLM and SGLang read them; HASS is the same network.

    ours            all three
    fc, layers.0.*  the same: fc reads [embedding; state] and may have a bias
                    embed_tokens, a copy of the target's

Neither a norm in front of the layer, nor one behind it, nor a head. The bias is where they differ:
the authors' config says `bias`; SGLang's fc always has one (zeros are written where ours has none)
and takes that word for a bias of the attention; vLLM's layer has none and would leave it out.
`add_para_norm` (two more norms) is refused.

EAGLE and HASS cannot be told apart by their files; without `outrider.json` it is called eagle.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafter import Drafter
from outrider.models.drafters.eagle import Eagle
from outrider.models.formats import hf_config as body
from outrider.models.formats.external import JOINS, Outside, bare
from outrider.models.formats.sidecar import Implied
from outrider.models.formats.weight_folder import Folder
from outrider.models.target import Target

PARA = ("embedding_layernorm.weight", "hidden_states_layernorm.weight")
SMALL = (
    "its draft vocabulary is reduced, and EAGLE's files have no place for one: an engine would ask "
    "the target's whole head"
)


class EagleFiles(Outside):
    """What all three have in common."""

    drafters = ("eagle", "hass")
    joins = JOINS

    def refuses(self, drafter: Drafter, target: Target) -> str:
        return "" if drafter.vocab.full else SMALL

    def rename(self, own: str, drafter: Drafter, target: Target) -> str | None:
        return None if own.startswith("vocab.") else own

    def taken(self, own: dict[str, Tensor], drafter: Drafter, target: Target) -> dict[str, Tensor]:
        vocab = {f"vocab.{k}": v for k, v in drafter.vocab.state_dict().items()}
        return {**vocab, **own}

    def shared(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        assert isinstance(drafter, Eagle), "this format holds eagle and hass"
        dtype = drafter.fc.weight.dtype
        return {k: v.to(dtype) for k, v in self.lent(drafter, target).items()}

    def lent(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        return {"embed_tokens.weight": target.embedding.weight}

    def llama(self, drafter: Drafter) -> dict[str, Any]:
        assert isinstance(drafter, Eagle), "this format holds eagle and hass"
        shape = drafter.target.shape()
        out = body.written(shape)
        body.check_written(out, shape)
        return {**out, **body.types(drafter.state_dict())}

    def layers(self, folder: Folder) -> Mapping[str, Any]:
        """The part of config.json that describes the layer."""
        return folder.config

    def implied(self, folder: Folder, target: Target, stamp: Mapping[str, Any]) -> Implied:
        where, config = self.keys(folder, target), self.layers(folder)
        if folder.config.get("add_para_norm") or any(key in where for key in PARA):
            raise folder.wrong(f"it has HASS's two norms in front of fc. {body.NOT_OURS}")
        if (count := folder.count("num_hidden_layers", 1, config)) != 1:
            raise folder.wrong(f"it has {count} layers. {body.NOT_OURS}")
        said = stamp.get("drafter", {})
        bias = "fc.bias" in where
        self.check_bias(folder, bias)
        fields = {"bias": said.get("bias", bias) if bias else False}
        name = str(said.get("name", "eagle"))
        if name not in self.drafters:
            raise folder.wrong(f"outrider.json says it is a drafter {name!r}.")
        shape = body.read(folder, config, target.shape())
        return Implied(name, fields, shape)

    def check_bias(self, folder: Folder, there: bool) -> None:
        """What config.json says of the bias must be what the weights say."""
        said = folder.config.get("bias")
        if said is not None and bool(said) != there:
            raise folder.wrong(f"config.json says bias: {said}, and fc.bias says otherwise.")


class Official(EagleFiles):
    """What EAGLE's own code reads."""

    words = ("eagle",)
    served = "EAGLE's own code"

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        bias = "fc.bias" in drafter.state_dict()
        return {"architectures": ["LlamaForCausalLM"], **self.llama(drafter), "bias": bias}

    def knows(self, folder: Folder) -> bool:
        others = Nested().knows(folder) or SGLang().knows(folder)
        return _is_eagle(folder) and not others


class SGLang(EagleFiles):
    """`LlamaForCausalLMEagle`, whose fc always has a bias."""

    words = ("sglang",)
    served = "SGLang"

    def shared(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = super().shared(drafter, target)
        if "fc.bias" not in drafter.state_dict():
            weight = drafter.state_dict()["fc.weight"]
            out["fc.bias"] = weight.new_zeros(len(weight))
        return out

    def lent(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = super().lent(drafter, target)
        if "fc.bias" not in drafter.state_dict():
            out["fc.bias"] = torch.zeros(target.shape().hidden)
        return out

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLMEagle"], **self.llama(drafter)}

    def knows(self, folder: Folder) -> bool:
        names = folder.config.get("architectures") or []
        return _is_eagle(folder) and "LlamaForCausalLMEagle" in names


class Nested(EagleFiles):
    """vLLM: the layer's config inside one of type eagle."""

    words = ("vllm",)
    served = "vLLM"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        bias = drafter.state_dict().get("fc.bias")
        if bias is not None and (bias.is_meta or bool(bias.any())):
            return (
                "its fc has a bias, and vLLM's EagleLlamaForCausalLM leaves it out; SGLang "
                "honours it, and drafter.bias=false trains without one"
            )
        return super().refuses(drafter, target)

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        layers = {"architectures": ["LlamaForCausalLM"], **self.llama(drafter)}
        return {
            "architectures": ["EagleLlamaForCausalLM"],
            "model_type": "eagle",
            "model": layers,
            "eagle_fc_bias": "fc.bias" in drafter.state_dict(),
            "truncated_vocab_size": target.vocab,
            "dtype": layers["dtype"],
            "torch_dtype": layers["torch_dtype"],
        }

    def knows(self, folder: Folder) -> bool:
        return _is_eagle(folder) and folder.config.get("model_type") == "eagle"

    def layers(self, folder: Folder) -> Mapping[str, Any]:
        found = folder.part("model")
        size = folder.config.get("truncated_vocab_size")
        if size not in (None, found.get("vocab_size")):
            raise folder.wrong(f"its vocabulary is cut to {size}, and nothing says to which.")
        return found

    def check_bias(self, folder: Folder, there: bool) -> None:
        if bool(folder.config.get("eagle_fc_bias")) != there:
            raise folder.wrong("config.json and weights disagree about fc.bias.")


def _is_eagle(folder: Folder) -> bool:
    where = bare(folder)
    wide = folder.shapes.get(where.get("fc.weight", ""), (1, 0))
    head = "norm.weight" in where or "layers.0.hidden_norm.weight" in where
    return wide[1:] == (2 * wide[0],) and not head and "layers.0.mlp.up_proj.weight" in where


FORMATS = (Official(), SGLang(), Nested())
