"""DFlash in the formats of z-lab, SGLang, vLLM, transformers and speculators.

    ours              z-lab, SGLang, vLLM     transformers                      speculators
    fc                fc                      encoder.fc                        fc
    hidden_norm       hidden_norm             encoder.output_norm_enc           hidden_norm
    layers.*, norm    the same                the same                          the same
    vocab.d2t, .t2d   d2t with a head of its  -                                 d2t, t2d
                      tokens (vLLM alone)
    tap_scale         multiplied into fc      the same                          the same

z-lab, transformers and vLLM number a tapped layer by its output (k), speculators by the input of
the next (k + 1). Engines disagree about absent flags, so that all are written, and a folder without
one of them is refused unless `outrider.json` settles it:

    flag                                  absent, it means
    dflash_config.sample_from_anchor      unshifted (z-lab, engines) or shifted (DeepSpec)
    dflash_config.causal, of windows      causal (vLLM) or bidirectional (z-lab, transformers)
    sliding_window_non_causal             bidirectional (vLLM) or causal (speculators)
    layer_types                           no window (z-lab) or a window of 2,048 (transformers)
    the rotary base                       10,000 (z-lab), 500,000 (transformers) or 1,000,000 (vLLM)

A window of w reaches w - 1 rows back in z-lab's code and vLLM, w rows in transformers, and w rows
before the anchor in speculators (`drafter.window_from`).

Source: the releases that docs/formats.md names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafting.block.backbone import BlockDrafter
from outrider.models.formats import hf_config
from outrider.models.formats.eagle3 import LAST, ORDER
from outrider.models.formats.eagle3_speculators import speculators_fields
from outrider.models.formats.external import DrafterSpec, ExternalFormat, Sidecar, strip_wrappers
from outrider.models.formats.weight_folder import (
    WeightFolder,
    missing_flag,
    read_flag,
    read_nested,
    require_rope,
)
from outrider.models.target.target import Target

NESTED = "dflash_config"
SLIDING, FULL = "sliding_attention", "full_attention"
FULL_HEAD = "its head is the target's, of all tokens; format=vllm can hold a reduced one"
SHIFTED = "engines read DFlash unshifted, where the anchor's slot predicts nothing"
SCALED = "transformers feeds the target's scaled embedding to it, and it was trained on the rows"


class DFlashFormat(ExternalFormat):
    """What the formats share."""

    drafters: tuple[str, ...] = ("dflash",)
    window_from = "slot"  # of the windows that its software has
    can_be_causal = False  # without a window
    only_silu = True
    reduced = FULL_HEAD

    def refusal_reason(self, drafter: BlockDrafter, target: Target) -> str:
        cfg = drafter.cfg
        if list(drafter.taps) != sorted(drafter.taps):
            return f"{ORDER}, and its fc reads them as {list(drafter.taps)}"
        if target.num_layers - 1 in drafter.taps:
            return LAST
        if cfg.window is not None and cfg.window_from != self.window_from:
            return f"its windows are counted from the {self.window_from}"
        if cfg.causal and not self.can_be_causal:
            return "its blocks are bidirectional, and this drafter's are causal"
        if self.only_silu and cfg.activation != "silu":
            return hf_config.ONLY_SILU
        return super().refusal_reason(drafter, target)

    # ---- names and weights ----

    def rename(self, key: str, drafter: BlockDrafter, target: Target) -> str | None:
        return None if key == "tap_scale" or key.startswith("vocab.") else key

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
        out = dict[str, str]()
        for key, stored in strip_wrappers(folder).items():
            for theirs, ours in names.items():
                key = key.replace(theirs, ours)
            out[key] = stored
        return out

    def export_weights(self, drafter: BlockDrafter, target: Target) -> dict[str, Tensor]:
        return hf_config.merge_tap_scale(super().export_weights(drafter, target))

    def import_weights(
        self, weights: dict[str, Tensor], drafter: BlockDrafter, target: Target
    ) -> dict[str, Tensor]:
        fc = weights["fc.weight"]
        return {**weights, "tap_scale": fc.new_ones(len(drafter.taps), device="cpu")}

    def target_copies(self, drafter: BlockDrafter, target: Target) -> dict[str, Tensor]:
        head = target.head_weight
        if not drafter.vocab.is_full:
            head = head[drafter.vocab.target_ids.to(head.device)]
        return {"embed_tokens.weight": target.embedding.weight, "lm_head.weight": head}

    # ---- configuration ----

    def layer_fields(self, drafter: BlockDrafter) -> dict[str, Any]:
        """Return the fields of config.json that describe the layers, and their window."""
        cfg, shape = drafter.cfg, drafter.shape._replace(activation=drafter.cfg.activation)
        windows = [cfg.window_of(i) for i in range(cfg.layers)]
        return {
            **hf_config.layer_fields(drafter.state_dict(), shape, cfg.layers, "qwen3"),
            "layer_types": [FULL if window is None else SLIDING for window in windows],
            "sliding_window": self.stored_window(cfg.window),
            "use_sliding_window": cfg.window is not None,
        }

    def stored_window(self, window: int | None) -> int | None:
        """Return the number in the file for a window of this many rows."""
        return window

    def flags(self, folder: WeightFolder, sidecar: Sidecar) -> dict[str, Any]:
        """Return the settings of the network that are neither shapes nor windows."""
        raise NotImplementedError

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        config, keys = self.layer_config(folder), self.file_keys(folder, target)
        require_rope(folder, config)
        shape = hf_config.read_config(folder, config, target.shape(), windowed=True, mixed=True)
        fields = self.flags(folder, sidecar)
        window = self.read_window(folder, config, sidecar)
        described = folder.config if "layer_types" in folder.config else config
        layers = hf_config.window_layers(folder, described)
        if window is not None:
            fields |= {"window": window, "window_from": self.window_from, "window_layers": layers}
        fields["layers"] = folder.positive_int("num_hidden_layers", 0, config)
        fields["activation"] = shape.activation
        fields["depths"] = fields["block_size"] - (not fields["shifted"])
        self._check_taps(folder, target, keys, fields["taps"])
        ids = hf_config.read_vocab(folder, keys, target.vocab_size)
        shape = shape._replace(activation=target.shape().activation)  # the drafter's is a setting
        return DrafterSpec(self.drafters[0], fields, shape, ids)

    def read_window(
        self, folder: WeightFolder, config: Mapping[str, Any], sidecar: Sidecar
    ) -> int | None:
        """Return the rows of the window, this one's own included; None: all."""
        return hf_config.read_window(folder, config, mixed=True)

    def _check_taps(
        self, folder: WeightFolder, target: Target, keys: Mapping[str, str], taps: Sequence[int]
    ) -> None:
        fc = next((keys[key] for key in ("fc.weight", "encoder.fc.weight") if key in keys), "")
        width = folder.shapes.get(fc, (0, 0))[-1]
        if width != len(taps) * target.shape().hidden:
            why = f"fc.weight reads {width} values, and it names {len(taps)} taps of"
            raise folder.error(f"{why} {target.shape().hidden}.", hf_config.USE_TARGET)
        if list(taps) != sorted(set(taps)) or not all(0 <= t < target.num_layers for t in taps):
            why = f"it taps layers {list(taps)} of {target.num_layers}"
            raise folder.error(f"{why}; {ORDER}, each once.")


class DFlashZLab(DFlashFormat):
    """`DFlashDraftModel`, as z-lab, SpecForge and ModelOpt write it."""

    names: tuple[str, ...] = ("zlab", "sglang", "specforge")
    engines = "SGLang, vLLM"

    def refusal_reason(self, drafter: BlockDrafter, target: Target) -> str:
        return SHIFTED if drafter.cfg.shifted else super().refusal_reason(drafter, target)

    def config(self, drafter: BlockDrafter, target: Target) -> dict[str, Any]:
        cfg = drafter.cfg
        window = {}
        if cfg.window is not None and cfg.window_layers is None:  # of all layers
            window = {"use_swa": True, "swa_window_size": cfg.window}
        return {
            "architectures": ["DFlashDraftModel"],
            **self.layer_fields(drafter),
            "block_size": cfg.block_size,
            "num_target_layers": target.num_layers,
            NESTED: {
                "mask_token_id": cfg.mask_token_id,
                "target_layer_ids": list(drafter.taps),
                "causal": cfg.causal,
                "sample_from_anchor": False,
                "block_size": cfg.block_size,
                **window,
            },
        }

    def matches(self, folder: WeightFolder) -> bool:
        return folder.architectures == ["DFlashDraftModel"] and not _is_reduced(folder)

    def flags(self, folder: WeightFolder, sidecar: Sidecar) -> dict[str, Any]:
        known = read_nested(folder, NESTED), sidecar
        windowed = SLIDING in (folder.config.get("layer_types") or ()) or known[0].get("use_swa")
        return {
            "shifted": read_flag(folder, *known, "sample_from_anchor", "shifted", (False, True)),
            "causal": read_flag(
                folder, *known, "causal", "causal", (False, True), None if windowed else False
            ),
            **_block(folder, *known),
            "taps": _taps(folder, *known),
        }  # fmt: skip

    def read_window(
        self, folder: WeightFolder, config: Mapping[str, Any], sidecar: Sidecar
    ) -> int | None:
        nested = read_nested(folder, NESTED)
        if nested.get("use_swa") and SLIDING not in (config.get("layer_types") or ()):
            size = nested.get("swa_window_size", config.get("sliding_window"))
            config = {"sliding_window": size, "use_sliding_window": True}
        return hf_config.read_window(folder, config, mixed=True)


class DFlashVLLM(DFlashZLab):
    """The same for vLLM alone: causal blocks, and a head over a reduced vocabulary."""

    names = ("vllm",)
    engines = "vLLM"
    can_be_causal = True
    reduced = ""
    writes_target_copies = True

    def rename(self, key: str, drafter: BlockDrafter, target: Target) -> str | None:
        if key == "vocab.d2t" and not drafter.vocab.is_full:
            return "d2t"
        return super().rename(key, drafter, target)

    def config(self, drafter: BlockDrafter, target: Target) -> dict[str, Any]:
        out = super().config(drafter, target)
        return {**out, "is_causal": drafter.cfg.causal, "draft_vocab_size": len(drafter.vocab)}

    def matches(self, folder: WeightFolder) -> bool:
        return folder.architectures == ["DFlashDraftModel"] and _is_reduced(folder)


UNKNOWN = ("vocab_size", "rope_theta", "rope_scaling", "attention_bias", "use_sliding_window")


class DFlashTransformers(DFlashFormat):
    """transformers' `MuseGlimmerAssistantModel`, for any target."""

    names = ("transformers",)
    engines = "transformers"
    only_silu = False
    reduced = "transformers drafts with the target's head, over the whole vocabulary"

    def refusal_reason(self, drafter: BlockDrafter, target: Target) -> str:
        if drafter.cfg.shifted:
            return SHIFTED
        first = torch.zeros(1, dtype=torch.long, device=target.embedding.weight.device)
        if not target.embedding.weight.is_meta and bool(
            (target.embedding(first) != target.embed(first)).any()
        ):
            return SCALED
        return super().refusal_reason(drafter, target)

    def rename(self, key: str, drafter: BlockDrafter, target: Target) -> str | None:
        name = super().rename(key, drafter, target)
        theirs = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
        part, _, rest = key.partition(".")
        return f"{theirs[part]}.{rest}" if part in theirs else name

    def file_keys(self, folder: WeightFolder, target: Target) -> dict[str, str]:
        return strip_wrappers(folder)

    def target_copies(self, drafter: BlockDrafter, target: Target) -> dict[str, Tensor]:
        return {}

    def stored_window(self, window: int | None) -> int | None:
        """A row of transformers' window sees as many rows before itself, and itself."""
        return None if window is None else window - 1

    def config(self, drafter: BlockDrafter, target: Target) -> dict[str, Any]:
        cfg, fields = drafter.cfg, self.layer_fields(drafter)
        fields = {k: v for k, v in fields.items() if k not in UNKNOWN}
        if cfg.window is None:
            fields["sliding_window"] = fields["max_position_embeddings"]  # unused, and required
        return {
            "architectures": ["MuseGlimmerAssistantModel"],
            **fields,
            "model_type": "muse_glimmer_assistant",
            "block_size": cfg.block_size,
            "mask_token_id": cfg.mask_token_id,
            "target_layer_ids": list(drafter.taps),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }

    def matches(self, folder: WeightFolder) -> bool:
        return folder.config.get("model_type") == "muse_glimmer_assistant"

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        config = {"model_type": "qwen3", "sliding_window": None, "layer_types": None}
        return {**folder.config, **config}

    def flags(self, folder: WeightFolder, sidecar: Sidecar) -> dict[str, Any]:
        known = folder.config, sidecar
        return {
            "shifted": False,
            "causal": False,
            **_block(folder, *known),
            "taps": _taps(folder, *known),
        }  # fmt: skip

    def read_spec(self, folder: WeightFolder, target: Target, sidecar: Sidecar) -> DrafterSpec:
        if "vocab_size" not in folder.config:
            folder.config["vocab_size"] = target.vocab_size
        return super().read_spec(folder, target, sidecar)

    def read_window(
        self, folder: WeightFolder, config: Mapping[str, Any], sidecar: Sidecar
    ) -> int | None:
        if folder.config.get("layer_types") is None:
            kinds = "full_attention or sliding_attention"
            raise missing_flag(folder, "layer_types", f"{kinds} of each layer")
        fields = {k: folder.config.get(k) for k in ("layer_types", "sliding_window")}
        size = hf_config.read_window(folder, fields, mixed=True)
        return None if size is None else size + 1


class DFlashSpeculators(DFlashFormat):
    """speculators' `DFlashSpeculator`."""

    names = ("speculators",)
    engines = "vLLM"
    architecture = "DFlashSpeculator"
    window_from = "anchor"
    reduced = ""
    writes_target_copies = True

    def refusal_reason(self, drafter: BlockDrafter, target: Target) -> str:
        self.can_be_causal = drafter.cfg.window is not None and drafter.cfg.window_layers is None
        return super().refusal_reason(drafter, target)

    def rename(self, key: str, drafter: BlockDrafter, target: Target) -> str | None:
        if key.startswith("vocab.") and not drafter.vocab.is_full:
            return key.removeprefix("vocab.")
        return super().rename(key, drafter, target)

    def config(self, drafter: BlockDrafter, target: Target) -> dict[str, Any]:
        cfg, kind = drafter.cfg, self.drafters[0]
        layers = self.layer_fields(drafter)
        return {
            **speculators_fields(kind, self.architecture, layers, cfg.depths, target),
            "draft_vocab_size": len(drafter.vocab),
            "block_size": cfg.block_size,
            "target_hidden_size": None,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in drafter.taps],
            "mask_token_id": cfg.mask_token_id,
            "sliding_window_non_causal": not cfg.causal,
            "sample_from_anchor": cfg.shifted,
            "tie_word_embeddings": False,
        }

    def matches(self, folder: WeightFolder) -> bool:
        return folder.config.get("speculators_model_type") == self.drafters[0]

    def layer_config(self, folder: WeightFolder) -> Mapping[str, Any]:
        layers = folder.config_object("transformer_layer_config")
        if folder.config.get("target_hidden_size") not in (None, layers.get("hidden_size")):
            why = "its target has another hidden size, which is not supported."
            raise folder.error(why, hf_config.USE_OTHER)
        return layers

    def flags(self, folder: WeightFolder, sidecar: Sidecar) -> dict[str, Any]:
        known = folder.config, sidecar
        aux = read_flag(
            folder, *known, "aux_hidden_state_layer_ids", "", "layers whose inputs are read"
        )
        both = read_flag(folder, *known, "sliding_window_non_causal", "", (True, False))
        layers = self.layer_config(folder)
        if not both and {*(layers.get("layer_types") or ())} != {SLIDING}:
            why = "sliding_window_non_causal is false and layers have no window: blocks are causal"
            fix = "Write true if it was trained by speculators, whose full attention is not causal."
            raise folder.error(f"{why} in vLLM, and bidirectional in speculators.", fix)
        return {
            "shifted": read_flag(
                folder, *known, "sample_from_anchor", "shifted", (False, True), self.default_shift
            ),
            "causal": not both,
            **_block(folder, *known),
            "taps": tuple(number - 1 for number in aux),
        }  # fmt: skip

    default_shift: bool | None = False  # of an absent sample_from_anchor; None: it is refused


def _block(folder: WeightFolder, stored: Mapping[str, Any], sidecar: Sidecar) -> dict[str, Any]:
    """Return the length of the block, and the token that fills it."""
    known = folder, stored, sidecar
    return {
        "block_size": read_flag(*known, "block_size", "block_size", "2, 3, ..."),
        "mask_token_id": read_flag(*known, "mask_token_id", "mask_token_id", "the id of a token"),
    }


def _taps(folder: WeightFolder, stored: Mapping[str, Any], sidecar: Sidecar) -> Any:
    known = folder, stored, sidecar
    return read_flag(*known, "target_layer_ids", "taps", "layers whose outputs are read")


def _is_reduced(folder: WeightFolder) -> bool:
    return "draft_vocab_size" in folder.config or "d2t" in strip_wrappers(folder)


FORMATS = (DFlashZLab(), DFlashVLLM(), DFlashTransformers(), DFlashSpeculators())
