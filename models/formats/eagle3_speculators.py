"""EAGLE-3 in the format of the speculators library, and the fields of all its configs.

Tensors are vLLM's (`eagle3.py`), and a copy of the target's embedding. `transformer_layer_config`
describes the layers, which may be a Llama's or a Qwen3's.

speculators 0.9 trains EAGLE-3 with `norm_before_fc`, `norm_output`, `norm_before_residual` and a
sliding window of 2,048 tokens. vLLM applies a window to Qwen3's layer (`qk_norm`) and not to
Llama's, which then attends to more than in training.

Source: speculators 0.9.0, models/eagle3 (docs/formats.md).
"""

from collections.abc import Mapping
from typing import Any

from outrider.models.drafters.eagle3 import Eagle3
from outrider.models.formats import hf_config
from outrider.models.formats.eagle3 import Eagle3Format
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.target.target import Target

VERSION = "0.7.0"  # of the schema that is written
LOSSLESS = {"verifier_accept_k": 1, "accept_tolerance": 0.0}


class Eagle3Speculators(Eagle3Format):
    """speculators' `Eagle3Speculator`, the only format that can name Qwen3's layer."""

    names = ("speculators",)
    engines = "vLLM"
    writes_target_copies = True
    kind, architecture = "eagle3", "Eagle3Speculator"

    def config(self, drafter: Eagle3, target: Target) -> dict[str, Any]:
        layers, depths = self.layer_fields(drafter), drafter.cfg.depths
        if drafter.cfg.window is not None:
            kinds = ["sliding_attention"] * drafter.cfg.layers
            layers |= {"sliding_window": drafter.cfg.window, "layer_types": kinds}
            layers["use_sliding_window"] = True
        return {
            **speculators_fields(self.kind, self.architecture, layers, depths, target),
            **self.architecture_flags(drafter),
            "target_hidden_size": None,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
        }

    def matches(self, folder: WeightFolder) -> bool:
        return folder.config.get("speculators_model_type") == self.kind

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        layers = folder.config_object("transformer_layer_config")
        if folder.config.get("norm_before_residual") is None:
            why = "norm_before_residual is missing: vLLM's default is true, and others' is false."
            raise folder.error(why, "Write into config.json which it was trained with.")
        if folder.config.get("target_hidden_size") not in (None, layers.get("hidden_size")):
            why = "its target has another hidden size, which is not supported."
            raise folder.error(why, hf_config.USE_OTHER)
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


FORMATS = (Eagle3Speculators(),)
