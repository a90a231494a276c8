"""EAGLE-3 in SGLang's format, which most trainers publish.

One layer is `midlayer.*`, several are `layers.{i}.*`. `eagle_config` names the layers whose output
is tapped. vLLM loads such folders too and reads the same numbers as inputs; a folder that suits
both readings is refused unless `outrider.json` settles it.
"""

from typing import Any

from outrider.models.drafter import Drafter
from outrider.models.drafters.eagle3 import eagle3_taps
from outrider.models.formats.eagle3 import IDS, STATE_TAPS, Eagle3Format, as_eagle3, is_eagle3
from outrider.models.formats.external import Sidecar, strip_wrappers
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.target import Target


class Eagle3SGLang(Eagle3Format):
    """`LlamaForCausalLMEagle3` with `midlayer.*`."""

    names = ("sglang", "specforge")
    served = "SGLang"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        if as_eagle3(drafter).cfg.qk_norm:
            return "SGLang's drafter is a Llama layer, without norms on queries and keys"
        if as_eagle3(drafter).cfg.residual == "normed":
            return "SGLang's residual adds the raw state, and this drafter's the normed one"
        if len(drafter.taps) == 1:
            return "SGLang builds no fc for a single tapped layer"
        return super().refuses(drafter, target)

    def first_layer_name(self, several: bool) -> str:
        return "layers.0" if several else "midlayer"

    def later_layer_key(self, key: str) -> str:
        return key.replace("input_layernorm", "hidden_norm")

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        cfg = as_eagle3(drafter).cfg
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self.layer_fields(drafter),
            "draft_vocab_size": len(drafter.vocab),
            "fc_norm": cfg.fc_norm,
            **({"norm_output": True} if cfg.feedback == "normed" else {}),
            "num_aux_hidden_states": len(drafter.taps),
            "eagle_config": {"use_aux_hidden_state": True, IDS: list(drafter.taps)},
        }

    def matches(self, folder: WeightFolder) -> bool:
        names = folder.config.get("architectures") or []
        return is_eagle3(folder) and "Eagle3LlamaForCausalLM" not in names

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
            raise folder.error(f"{why} outputs, one layer later: a shifted tap.", STATE_TAPS)
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
            raise folder.error(f"{why} fed back for SGLang: it does not say which.", STATE_TAPS)
        return str(value)


FORMATS = (Eagle3SGLang(),)
