"""DSpark in the formats of DeepSpec, SGLang, vLLM and speculators.

Tensors are DFlash's (`dflash.py`) with `markov_head.*` and `confidence_head.proj.*`, whose names
are ours, and copies of the target's embedding and head. DeepSpec has all fields at the top level.
The layout is shifted unless `sample_from_anchor` is false; an absent one means true to DeepSpec,
vLLM and SGLang in their own layout, and in that of speculators false to vLLM and true to the
library, which is refused. So is an absent `confidence_head_with_markov` (false to vLLM, true to
SGLang). vLLM has the vanilla head alone.

Source: the releases that docs/formats.md names.
"""

from typing import Any

from outrider.models.drafting.block.backbone import BlockDrafter
from outrider.models.formats.dflash import DFlashFormat, DFlashSpeculators
from outrider.models.formats.external import Sidecar, strip_wrappers
from outrider.models.formats.weight_folder import WeightFolder, read_flag
from outrider.models.target.target import Target

ARCHITECTURE = "Qwen3DSparkModel"
VANILLA = "vLLM has the vanilla head alone"
HEADS = ("vanilla", "gated", "rnn")
SHIFTED_ALONE = "DeepSpec's network is shifted; format=speculators can say otherwise"


def head_fields(drafter: BlockDrafter) -> dict[str, Any]:
    """Return the fields of the heads, which are the same in every format."""
    cfg = drafter.cfg
    return {
        "markov_rank": cfg.markov_rank,
        "markov_head_type": cfg.markov_head,
        "enable_confidence_head": cfg.confidence_head != "none",
        "confidence_head_with_markov": cfg.confidence_head == "markov",
    }


def read_heads(folder: WeightFolder, sidecar: Sidecar) -> dict[str, Any]:
    """Return the settings of the heads.

    Raises:
        RunError: a flag is absent, or contradicts the weights.
    """
    known = folder.config, sidecar
    kind = folder.config.get("markov_head_type")
    kind = sidecar.get("drafter", {}).get("markov_head") if kind is None else kind
    if kind not in HEADS:
        why = f"config.json has markov_head_type: {kind}; it may be {' or '.join(HEADS)}."
        raise folder.error(why, "Write into config.json which it was trained with.")
    rank = read_flag(folder, *known, "markov_rank", "markov_rank", "the rank of the head")
    keys = strip_wrappers(folder)
    stored = folder.shapes.get(keys.get("markov_head.markov_w1.weight", ""), (0, 0))[-1]
    if stored != rank:
        why = f"markov_rank of config.json is {rank}, and markov_head.markov_w1.weight has {stored}"
        raise folder.error(f"{why} columns.", "Correct markov_rank in config.json.")
    choices = (True, False)
    confidence = "none"
    if read_flag(folder, *known, "enable_confidence_head", "", choices):
        markov = read_flag(folder, *known, "confidence_head_with_markov", "", choices)
        confidence = "markov" if markov else "slot"
    return {"markov_head": kind, "markov_rank": rank, "confidence_head": confidence}


class DSparkDeepSpec(DFlashFormat):
    """`Qwen3DSparkModel`, as DeepSpec writes it."""

    names: tuple[str, ...] = ("deepspec", "sglang")
    engines = "SGLang, DeepSpec"
    drafters = ("dspark",)
    reduced = "its head is over the whole vocabulary; format=vllm can hold a reduced one"
    writes_target_copies = True

    def refusal_reason(self, drafter: BlockDrafter, target: Target) -> str:
        if not drafter.cfg.shifted:
            return SHIFTED_ALONE
        return super().refusal_reason(drafter, target)

    def config(self, drafter: BlockDrafter, target: Target) -> dict[str, Any]:
        cfg = drafter.cfg
        return {
            "architectures": [ARCHITECTURE],
            **self.layer_fields(drafter),
            "block_size": cfg.block_size,
            "mask_token_id": cfg.mask_token_id,
            "target_layer_ids": list(drafter.taps),
            "num_target_layers": target.num_layers,
            "sample_from_anchor": True,
            "dspark_bonus_anchor": False,
            "is_causal": cfg.causal,
            **head_fields(drafter),
        }

    def matches(self, folder: WeightFolder) -> bool:
        return folder.architectures == [ARCHITECTURE] and not self._is_vllm(folder)

    def _is_vllm(self, folder: WeightFolder) -> bool:
        return "draft_vocab_size" in folder.config

    def flags(self, folder: WeightFolder, sidecar: Sidecar) -> dict[str, Any]:
        known, choices = (folder.config, sidecar), (False, True)
        ints = {"block_size": "2, 3, ...", "mask_token_id": "the id of a token"}
        return {
            "shifted": read_flag(folder, *known, "sample_from_anchor", "shifted", choices, True),
            "causal": read_flag(folder, *known, "is_causal", "causal", choices, False),
            **{name: read_flag(folder, *known, name, name, text) for name, text in ints.items()},
            "taps": read_flag(
                folder, *known, "target_layer_ids", "taps", "layers whose outputs are read"
            ),
            **read_heads(folder, sidecar),
        }


class DSparkVLLM(DSparkDeepSpec):
    """The same for vLLM, which has a reduced vocabulary and the vanilla head."""

    names = ("vllm",)
    engines = "vLLM"
    reduced = ""

    def refusal_reason(self, drafter: BlockDrafter, target: Target) -> str:
        if drafter.cfg.markov_head != "vanilla":
            return VANILLA
        return super().refusal_reason(drafter, target)

    def rename(self, key: str, drafter: BlockDrafter, target: Target) -> str | None:
        if key == "vocab.d2t" and not drafter.vocab.is_full:
            return "d2t"
        return super().rename(key, drafter, target)

    def config(self, drafter: BlockDrafter, target: Target) -> dict[str, Any]:
        return {**super().config(drafter, target), "draft_vocab_size": len(drafter.vocab)}

    def matches(self, folder: WeightFolder) -> bool:
        return folder.architectures == [ARCHITECTURE] and self._is_vllm(folder)


class DSparkSpeculators(DFlashSpeculators):
    """speculators' `DSparkSpeculator`."""

    drafters = ("dspark",)
    architecture = "DSparkSpeculator"
    default_shift = None

    def config(self, drafter: BlockDrafter, target: Target) -> dict[str, Any]:
        return {**super().config(drafter, target), **head_fields(drafter)}

    def flags(self, folder: WeightFolder, sidecar: Sidecar) -> dict[str, Any]:
        return {**super().flags(folder, sidecar), **read_heads(folder, sidecar)}


FORMATS = (DSparkDeepSpec(), DSparkVLLM(), DSparkSpeculators())
