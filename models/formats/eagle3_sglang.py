"""EAGLE-3 as SGLang reads it: what most trainers publish.

One layer is `midlayer.*`, several are `layers.{i}.*`. Layers are tapped by the number of the one
whose output is read, under `eagle_config`. vLLM loads such folders too and takes the same numbers
for inputs; where a folder could be meant for either, and in nothing else says for which, it is
refused.
"""

from collections.abc import Mapping
from typing import Any

from outrider.models.drafter import Drafter
from outrider.models.formats.eagle3 import IDS, SAY, Eagle3Files, eagle3, is_eagle3
from outrider.models.formats.external import bare
from outrider.models.formats.weight_folder import Folder
from outrider.models.target import Target, usual_taps


class SGLang(Eagle3Files):
    """`LlamaForCausalLMEagle3` with `midlayer.*`: what most trainers publish."""

    words = ("sglang", "specforge")
    served = "SGLang"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        if eagle3(drafter).cfg.qk_norm:
            return "SGLang's drafter is a Llama layer, without norms on queries and keys"
        if eagle3(drafter).cfg.residual == "normed":
            return "SGLang's layer adds to the bare state, and it was trained on the normed one"
        if len(drafter.taps) == 1:
            return "SGLang leaves fc out where one layer is tapped, as nothing has to be narrowed"
        return super().refuses(drafter, target)

    def first(self, several: bool) -> str:
        return "layers.0" if several else "midlayer"

    def deeper(self, part: str) -> str:
        return part.replace("input_layernorm", "hidden_norm")

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        aux = {"use_aux_hidden_state": True, IDS: list(drafter.taps)}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self.body(drafter),
            "draft_vocab_size": len(drafter.vocab),
            "fc_norm": eagle3(drafter).cfg.fc_norm,
            **({"norm_output": True} if eagle3(drafter).cfg.feedback == "normed" else {}),
            "num_aux_hidden_states": len(drafter.taps),
            "eagle_config": aux,
        }

    def knows(self, folder: Folder) -> bool:
        names = folder.config.get("architectures") or []
        return is_eagle3(folder) and "Eagle3LlamaForCausalLM" not in names

    def told_taps(
        self, folder: Folder, target: Target, stamp: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        """Outputs of these layers, unless the file could as well mean vLLM's inputs."""
        said = folder.part("eagle_config", needed=False).get(IDS)
        if said is None and folder.config.get(IDS) is not None:
            why = "its layer ids stand where vLLM reads them, in a folder for SGLang."
            raise folder.wrong(why, SAY)
        told = folder.numbers(IDS, said)
        if "format" in stamp:
            return told
        if told == tuple(tap + 1 for tap in usual_taps(target.depth)):
            why = f"layers {said} are vLLM's usual ones, which it counts by their inputs, and"
            raise folder.wrong(
                f"{why} SGLang would read outputs, one layer on: a shifted tap.", SAY
            )
        if told and "layers.0.mlp.up_proj.weight" in bare(folder):
            why = f"layers {said} are inputs for vLLM and outputs for SGLang; its names suit both."
            raise folder.wrong(why, SAY)
        return told

    def feedback(self, folder: Folder, stamp: Mapping[str, Any]) -> str:
        if "norm_output" not in folder.config or "format" in stamp:
            return super().feedback(folder, stamp)
        said = stamp.get("drafter", {}).get("feedback")
        if said is None:
            why = "norm_output is the norm in front of the head for SpecForge, and of the state"
            raise folder.wrong(f"{why} fed back for SGLang: it does not say which.", SAY)
        return str(said)


FORMATS = (SGLang(),)
