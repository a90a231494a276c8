"""EAGLE-3 as vLLM reads it: its own flavour, and "speculators" that say themselves what they are.

Both have the keys `layers.{i}.*`, every switch written out, and number a tapped layer by its input:
the output of layer k is the input of layer k + 1. A speculator (`vllm serve FOLDER` needs no other
flag) names its body, which may be Qwen3's, with norms on queries and keys; it holds a copy of the
target's embedding and says whom it drafts for. `norm_before_residual` is always written: readers
fill in true where writers meant false.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outrider.models.drafter import Drafter
from outrider.models.formats.eagle3 import IDS, Eagle3Files, eagle3, inputs, is_eagle3
from outrider.models.formats.weight_folder import Folder
from outrider.models.target import Target

VERSION = "0.7.0"  # of the config's schema, as these files are laid out
ACCEPT = {"verifier_accept_k": 1, "accept_tolerance": 0.0}  # lossless


def about(kind: str, depths: int, target: Target) -> dict[str, Any]:
    """The fields that every speculator begins with."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": depths, **ACCEPT}
    return {
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


class VLLM(Eagle3Files):
    """vLLM's own `Eagle3LlamaForCausalLM`, every switch written out."""

    words = ("vllm",)
    served = "vLLM"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        if eagle3(drafter).cfg.qk_norm:
            return (
                "vLLM's Eagle3LlamaForCausalLM is a Llama layer, without norms on queries and "
                "keys; format=speculators names the body, and Qwen3's has them"
            )
        return super().refuses(drafter, target)

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3LlamaForCausalLM"],
            **self.body(drafter),
            **self.switches(drafter),
            IDS: [tap + 1 for tap in drafter.taps],
        }

    def knows(self, folder: Folder) -> bool:
        names = folder.config.get("architectures") or []
        return is_eagle3(folder) and "Eagle3LlamaForCausalLM" in names

    def told_taps(
        self, folder: Folder, target: Target, stamp: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        said = folder.config.get(IDS) or folder.part("eagle_config", needed=False).get(IDS)
        return inputs(folder.numbers(IDS, said))


class Eagle3Speculator(Eagle3Files):
    """EAGLE-3; the only flavour that names Qwen3's body, with norms on queries and keys."""

    words = ("speculators",)
    served = "vLLM"

    def shared(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        dtype = eagle3(drafter).fc.weight.dtype
        return {k: v.to(dtype) for k, v in self.lent(drafter, target).items()}

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        layers = self.body(drafter)
        return {
            "architectures": ["Eagle3Speculator"],
            **about("eagle3", eagle3(drafter).cfg.depths, target),
            "transformer_layer_config": layers,
            **self.switches(drafter),
            "target_hidden_size": None,
            IDS: [tap + 1 for tap in drafter.taps],
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "dtype": layers["dtype"],
        }

    def knows(self, folder: Folder) -> bool:
        return folder.config.get("speculators_model_type") == "eagle3"

    def layers(self, folder: Folder) -> Mapping[str, Any]:
        found = folder.part("transformer_layer_config")
        if folder.config.get("norm_before_residual") is None:
            why = "norm_before_residual is not said, which vLLM reads as true and others as false."
            raise folder.wrong(why, "Write into config.json which it was trained with.")
        if folder.config.get("target_hidden_size") not in (None, found.get("hidden_size")):
            raise folder.wrong("its target is wider than it is itself, which cannot be built here.")
        return found

    def told_taps(
        self, folder: Folder, target: Target, stamp: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        return inputs(folder.numbers(IDS, folder.config.get(IDS)))


FORMATS = (VLLM(), Eagle3Speculator())
