"""P-EAGLE in the formats of vLLM and speculators.

Tensors and fields are those of EAGLE-3 for vLLM (`eagle3.py`), and `mask_hidden`, [1, 1, taps times
hidden size]. The mask token is `pard_token` (vLLM) or `mask_token_id` (speculators). vLLM drafts
with method eagle3 and `parallel_drafting`. It maps neither `fc_norm` nor `norm_output` of a
speculators folder, and reads an absent `norm_before_residual` as false.

Source: the releases that docs/formats.md names.
"""

from typing import Any

from outrider.models.formats.eagle3 import Eagle3VLLM
from outrider.models.formats.eagle3_speculators import Eagle3Speculators
from outrider.models.formats.external import DrafterSpec, Sidecar, strip_wrappers
from outrider.models.formats.weight_folder import WeightFolder, read_flag
from outrider.models.target.target import Target

READ = {"Eagle3LlamaForCausalLM", "PeagleLlamaForCausalLM", "PEagleDraftModel"}  # names of it
NORMS = "vLLM maps no fc_norm of a P-EAGLE folder of speculators; format=vllm holds it"


def with_mask(
    spec: DrafterSpec, folder: WeightFolder, sidecar: Sidecar, names: tuple[str, ...]
) -> DrafterSpec:
    """Return the spec of an EAGLE-3 as that of a P-EAGLE, with the mask token."""
    name = next((n for n in names if folder.config.get(n) is not None), names[0])
    mask = read_flag(
        folder, folder.config, sidecar, name, "mask_token_id", "the id of the mask token"
    )
    return spec._replace(name="p_eagle", fields={**spec.fields, "mask_token_id": mask})


class PEagleVLLM(Eagle3VLLM):
    """vLLM's `Eagle3LlamaForCausalLM` with `mask_hidden`; other names are only read."""

    drafters = ("p_eagle",)
    mask_names = ("pard_token", "ptd_token_id", "mask_token_id")

    def config(self, drafter: Any, target: Target) -> dict[str, Any]:
        mask = {"pard_token": drafter.cfg.mask_token_id}
        return {**super().config(drafter, target), **mask}

    def matches(self, folder: WeightFolder) -> bool:
        keys = strip_wrappers(folder)
        return "mask_hidden" in keys and bool(READ & set(folder.architectures))

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        spec = super().read_spec(folder, target, sidecar)
        return with_mask(spec, folder, sidecar, self.mask_names)


class PEagleSpeculators(Eagle3Speculators):
    """speculators' `PEagleSpeculator`."""

    drafters = ("p_eagle",)
    kind, architecture = "peagle", "PEagleSpeculator"

    def refusal_reason(self, drafter: Any, target: Target) -> str:
        if drafter.cfg.fc_norm == "each":
            return NORMS
        return super().refusal_reason(drafter, target)

    def config(self, drafter: Any, target: Target) -> dict[str, Any]:
        mask = {"mask_token_id": drafter.cfg.mask_token_id}
        return {**super().config(drafter, target), **mask, "embed_requires_grad": True}

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        spec = super().read_spec(folder, target, sidecar)
        return with_mask(spec, folder, sidecar, ("mask_token_id",))


FORMATS = (PEagleVLLM(), PEagleSpeculators())
