"""EAGLE-3 in vLLM's own format and in that of the speculators library.

Both use the keys `layers.{i}.*`, write every flag, and number a tapped layer by its input: the
output of layer k is the input of layer k + 1. A speculators folder (`vllm serve FOLDER` needs no
other flag) names its layer type, which may be Qwen3 with norms on queries and keys; it holds a copy
of the target's embedding and names its target. `norm_before_residual` is always written, since
vLLM's default is true and writers mean false when they omit it.
"""

from collections.abc import Mapping
from typing import Any

from outrider.models.drafter import Drafter
from outrider.models.formats.eagle3 import (
    IDS,
    Eagle3Format,
    as_eagle3,
    is_eagle3,
    taps_from_inputs,
)
from outrider.models.formats.external import Sidecar
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.target import Target

VERSION = "0.7.0"  # of the speculators schema that is written
LOSSLESS = {"verifier_accept_k": 1, "accept_tolerance": 0.0}
QK_NORM = (
    "vLLM's Eagle3LlamaForCausalLM is a Llama layer, without norms on queries and keys; use "
    "format=speculators, which can name Qwen3's layer"
)


def speculators_header(kind: str, depths: int, target: Target) -> dict[str, Any]:
    """Return the first fields of every speculators config."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": depths, **LOSSLESS}
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


class Eagle3VLLM(Eagle3Format):
    """vLLM's `Eagle3LlamaForCausalLM`."""

    names = ("vllm",)
    served = "vLLM"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        return QK_NORM if as_eagle3(drafter).cfg.qk_norm else super().refuses(drafter, target)

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3LlamaForCausalLM"],
            **self.layer_fields(drafter),
            **self.architecture_flags(drafter),
            IDS: [tap + 1 for tap in drafter.taps],
        }

    def matches(self, folder: WeightFolder) -> bool:
        names = folder.config.get("architectures") or []
        return is_eagle3(folder) and "Eagle3LlamaForCausalLM" in names

    def stored_taps(
        self, folder: WeightFolder, target: Target, sidecar: Sidecar
    ) -> tuple[int, ...] | None:
        nested = folder.config_object("eagle_config", required=False).get(IDS)
        return taps_from_inputs(folder.int_list(IDS, folder.config.get(IDS) or nested))


class Eagle3Speculators(Eagle3Format):
    """speculators' `Eagle3Speculator`, the only format that can name Qwen3's layer."""

    names = ("speculators",)
    served = "vLLM"
    writes_target_copies = True

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        layers = self.layer_fields(drafter)
        return {
            "architectures": ["Eagle3Speculator"],
            **speculators_header("eagle3", as_eagle3(drafter).cfg.depths, target),
            "transformer_layer_config": layers,
            **self.architecture_flags(drafter),
            "target_hidden_size": None,
            IDS: [tap + 1 for tap in drafter.taps],
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "dtype": layers["dtype"],
        }

    def matches(self, folder: WeightFolder) -> bool:
        return folder.config.get("speculators_model_type") == "eagle3"

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        layers = folder.config_object("transformer_layer_config")
        if folder.config.get("norm_before_residual") is None:
            why = (
                "norm_before_residual is missing: vLLM's default is true, and that of others false."
            )
            raise folder.error(why, "Write into config.json which it was trained with.")
        if folder.config.get("target_hidden_size") not in (None, layers.get("hidden_size")):
            raise folder.error("its target has another hidden size, which is not supported.")
        return layers

    def stored_taps(
        self, folder: WeightFolder, target: Target, sidecar: Sidecar
    ) -> tuple[int, ...] | None:
        return taps_from_inputs(folder.int_list(IDS, folder.config.get(IDS)))


FORMATS = (Eagle3VLLM(), Eagle3Speculators())
