"""EAGLE-3 in files: what SGLang's and vLLM's flavours share (`sglang.py`, `vllm.py`).

The same tensors, and two ways to say what they mean:

    ours                         SGLang                     vLLM
    fc, norm, lm_head            the same                   the same
    fc_norm.{k}                  the same                   the same
    midlayer.*                   midlayer.* (layers.0.*     layers.0.*
                                 of several layers)
    layers.{i}.*                 layers.{i+1}.*, its input  layers.{i+1}.*
                                 norm is `hidden_norm`
    vocab.d2t, vocab.t2d         d2t, t2d, absent when the drafter can propose every token
    tap_scale                    multiplied into fc

A tapped layer k, "the output of decoder layer k", is number k where SGLang is told and k + 1, "the
input of layer k + 1", where vLLM is told: one field name, two meanings. Feeding back the normed
state (`feedback: normed`) is `norm_output`, a name under which SpecForge means something else; in
a folder of unknown origin it is refused.

Source: reference tables of the published checkpoints (docs/formats.md).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.drafter import Drafter
from outrider.models.drafters.eagle3 import Eagle3
from outrider.models.formats import hf_config as body
from outrider.models.formats.external import JOINS, Outside, bare
from outrider.models.formats.sidecar import Implied
from outrider.models.formats.weight_folder import STAMP, Folder
from outrider.models.target import Target, usual_taps

LAST = "it taps the last decoder layer, whose output no engine hands out before the final norm"
ORDER = "engines hand out tapped layers in ascending order, whatever the order they are named in"
SAY = (
    f"Say what it is in {STAMP} beside it: "
    '{"taps": [1, 17, 32], "drafter": {"feedback": "raw"}}, with the layers whose output is read.'
)
IDS = "eagle_aux_hidden_state_layer_ids"
AUX = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # SGLang's older names of fc_norm.0 .. 2
OURS = {  # of ModelOpt's eagle_config: how our network is built
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1,
}  # fmt: skip


class Eagle3Files(Outside):
    """What both have in common."""

    drafters = ("eagle3",)
    joins = JOINS

    def refuses(self, drafter: Drafter, target: Target) -> str:
        if list(drafter.taps) != sorted(drafter.taps):
            return f"{ORDER}, and its fc reads them as {list(drafter.taps)}"
        return LAST if target.depth - 1 in drafter.taps else ""

    # ---- names ----

    def rename(self, own: str, drafter: Drafter, target: Target) -> str | None:
        if own == "tap_scale" or (own.startswith("vocab.") and drafter.vocab.full):
            return None
        part, _, rest = own.partition(".")
        if part == "vocab":
            return rest
        if part == "layers":
            number, _, rest = rest.partition(".")
            return f"layers.{int(number) + 1}.{self.deeper(rest)}"
        several = eagle3(drafter).cfg.layers > 1
        return f"{self.first(several)}.{rest}" if part == "midlayer" else own

    def first(self, several: bool) -> str:
        """What stands before the names of the first layer, of one or of several."""
        return "layers.0"

    def deeper(self, part: str) -> str:
        """A part of the layers behind the first."""
        return part

    def given(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out = super().given(drafter, target)
        out["fc.weight"] = folded(out["fc.weight"], out["tap_scale"])
        return out

    def taken(self, own: dict[str, Tensor], drafter: Drafter, target: Target) -> dict[str, Tensor]:
        vocab = {f"vocab.{k}": v for k, v in drafter.vocab.state_dict().items()}
        scale = torch.ones(len(drafter.taps), dtype=own["fc.weight"].dtype)
        return {**own, "tap_scale": scale, **vocab}

    def lent(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        return {"embed_tokens.weight": target.embedding.weight}

    def keys(self, folder: Folder, target: Target) -> dict[str, str]:
        """As `rename` says them, whichever of the names in use the file has."""
        found, out = super().keys(folder, target), dict[str, str]()
        several = any(key.startswith("layers.1.") for key in found)
        for key, name in found.items():
            usual = self._usual(key, several)
            if usual in out:
                raise folder.wrong(f"{name} and {out[usual]} are one and the same.")
            out[usual] = name
        return out

    def _usual(self, key: str, several: bool) -> str:
        """`midlayer` or `layers.0`; `hidden_norm` or `input_layernorm` further behind; fc_norm."""
        for i, name in enumerate(AUX):
            key = key.replace(f"{name}.", f"fc_norm.{i}.")
        for first in ("midlayer.", "layers.0."):
            if key.startswith(first):
                return f"{self.first(several)}.{key.removeprefix(first)}"
        if re.fullmatch(r"layers\.\d+\.(input_layernorm|hidden_norm)\.weight", key):
            return f"layers.{key.split('.')[1]}.{self.deeper('input_layernorm')}.weight"
        return key

    # ---- meaning ----

    def body(self, drafter: Drafter) -> dict[str, Any]:
        """Fields of the layers; SGLang and vLLM know Llama's alone."""
        kind = "qwen3" if eagle3(drafter).cfg.qk_norm else "llama"
        out = body.written(eagle3(drafter).shape, eagle3(drafter).cfg.layers, kind)
        body.check_written(out, eagle3(drafter).shape)
        return {**out, **body.types(drafter.state_dict())}

    def switches(self, drafter: Drafter) -> dict[str, Any]:
        """Fields that are not the layers'."""
        return {
            "draft_vocab_size": len(drafter.vocab),
            "norm_before_residual": eagle3(drafter).cfg.residual == "normed",
            "norm_before_fc": False,
            "fc_norm": eagle3(drafter).cfg.fc_norm,
            "norm_output": eagle3(drafter).cfg.feedback == "normed",
        }

    def layers(self, folder: Folder) -> Mapping[str, Any]:
        """The part of config.json that describes the layers."""
        return folder.config

    def told_taps(
        self, folder: Folder, target: Target, stamp: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        """Layers whose outputs are read, as the files name them; None: they do not."""
        raise NotImplementedError

    def feedback(self, folder: Folder, stamp: Mapping[str, Any]) -> str:
        """Of the state: "raw" or "normed"."""
        return "normed" if folder.config.get("norm_output") else "raw"

    def implied(self, folder: Folder, target: Target, stamp: Mapping[str, Any]) -> Implied:
        where, config = self.keys(folder, target), self.layers(folder)
        _refuse_switches(folder)
        shape = body.read(folder, config, target.shape())
        fields = {
            "taps": self._taps(folder, target, stamp, where),
            "layers": folder.count("num_hidden_layers", 1, config),
            "fc_norm": "fc_norm.0.weight" in where,
            "qk_norm": any(key.endswith("self_attn.q_norm.weight") for key in where),
            "feedback": self.feedback(folder, stamp),
            "residual": "normed" if folder.config.get("norm_before_residual") else "raw",
        }
        if fields["residual"] == "normed":
            fields["init"] = "random"
        if fields["fc_norm"] != bool(folder.config.get("fc_norm", fields["fc_norm"])):
            raise folder.wrong("config.json and weights disagree about fc_norm.")
        usual, said = target.shape().head_dim, stamp.get("drafter", {}).get("head_dim")
        if shape.head_dim != usual or said is not None:
            fields["head_dim"] = shape.head_dim
        shape = shape._replace(head_dim=usual)
        return Implied("eagle3", fields, shape, body.kept(folder, where, target.vocab))

    def _taps(
        self, folder: Folder, target: Target, stamp: Mapping[str, Any], where: Mapping[str, str]
    ) -> tuple[int, ...]:
        wide = folder.shapes.get(where.get("fc.weight", ""), (0, 0))[-1]
        count, rest = divmod(wide, target.shape().hidden)
        if rest or not count:
            why = f"fc.weight reads {wide} numbers, which are no states of {target.shape().hidden}."
            raise folder.wrong(why, "Use the target it was trained for.")
        if "taps" in stamp and "format" not in stamp:  # written by hand, to end a doubt
            told = folder.numbers("taps", stamp["taps"])
        else:
            told = self.told_taps(folder, target, stamp)
        if told is None:
            told = usual_taps(target.depth)
            if count != 3 or len(set(told)) != 3 or min(told) < 0:
                raise folder.wrong(f"it does not say which {count} layers it taps.", SAY)
        if list(told) != sorted(told):
            raise folder.wrong(f"it names its taps as {list(told)}; {ORDER}.", SAY)
        if len(told) != count or not all(0 <= tap < target.depth for tap in told):
            why = f"it taps layers {list(told)} of {target.depth}, and fc.weight reads {count}."
            raise folder.wrong(why, SAY)
        return told


def eagle3(drafter: Drafter) -> Eagle3:
    assert isinstance(drafter, Eagle3), "this format holds eagle3"
    return drafter


def is_eagle3(folder: Folder) -> bool:
    keys = bare(folder)
    first = any(key.startswith(("midlayer.", "layers.0.hidden_norm.")) for key in keys)
    return first and "fc.weight" in keys and "speculators_model_type" not in folder.config


def inputs(told: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The layers whose outputs are the inputs of these."""
    return None if told is None else tuple(number - 1 for number in told)


def folded(fc: Tensor, scale: Tensor) -> Tensor:
    """The sizes of the taps in the columns that read them; untouched where they are 1."""
    if not scale.is_meta and bool((scale == 1).all()):
        return fc
    wide = scale.double().repeat_interleave(fc.shape[1] // len(scale))
    return (fc.double() * wide).to(fc.dtype)


def _refuse_switches(folder: Folder) -> None:
    """Networks of the family that ours is not."""
    if folder.config.get("norm_before_fc"):
        raise folder.wrong(f"config.json says norm_before_fc: true. {body.NOT_OURS}")
    if folder.config.get("tie_word_embeddings"):
        raise folder.wrong("config.json says that its head is its embedding, and lm_head is there.")
    aux = folder.part("eagle_config", needed=False)
    for name, value in OURS.items():
        if aux.get(name, value) not in (value, None):
            raise folder.wrong(f"eagle_config says {name}: {aux[name]}. {body.NOT_OURS}")
