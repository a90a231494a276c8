"""MTP modules as a drafter: alone, or in a copy of the target they draft for (`stitching.py`).

The layouts and their names are those of `formats/mtp.py`. All of them join [embedding; state]: the
halves of `eh_proj` change places where ours were trained the other way. Norms of Qwen3-Next's
layout are stored as weight - 1, exact for weights in 0.5 .. 2 and off by a rounding elsewhere.

An engine runs a module with the rotary embedding and the head of the target it lies in, and what it
feeds to the next depth is the module's output before its norm (DeepSeek's layout): drafters that
were trained otherwise are refused. vLLM's and SGLang's classes for these layouts are written for
their own families (latent attention, gated queries, experts); a module of plain attention is
served where the target's family has one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models import drafters
from outrider.models.drafter import Drafter, Shape
from outrider.models.drafters.mtp import Mtp
from outrider.models.formats import eagle3_vllm as vllm
from outrider.models.formats import hf_config as body
from outrider.models.formats.external import JOINS, Outside
from outrider.models.formats.mtp_target import DEEPSEEK, QWEN3_NEXT, SPECULATORS, Layout
from outrider.models.formats.sidecar import Implied
from outrider.models.formats.weight_folder import Folder
from outrider.models.target import Target

ROPE = "an engine would turn its heads as the target does, by scaled or partial frequencies"


class ModuleFiles(Outside):
    """What all layouts have in common."""

    drafters = ("mtp",)
    joins = JOINS
    layout: Layout
    several = False  # whether more than one module has a place

    # ---- names ----

    def prefix(self, stage: int, target: Target) -> str:
        return self.layout.prefix.format(target.depth + stage)

    def rename(self, own: str, drafter: Drafter, target: Target) -> str | None:
        if own.startswith("vocab."):
            return None
        _, stage, name = own.split(".", 2)
        names = {mine: theirs for theirs, mine in self.layout.names().items()}
        return self.prefix(int(stage), target) + names[name]

    def keys(self, folder: Folder, target: Target) -> dict[str, str]:
        """In a target's folder, those of the modules; alone, all there are."""
        if not stitched_in(folder):
            return {key: key for key in folder.shapes}
        return {key: key for key in modules_of(folder, target.depth)}

    # ---- weights ----

    def given(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        out, cfg = super().given(drafter, target), of(drafter).cfg
        dtype = out["stages.0.eh_proj.weight"].dtype
        for key, value in out.items():
            if key.endswith("eh_proj.weight") and cfg.order == "state_first":
                out[key] = swapped(value)
            if value.ndim == 1 and self.layout.offset and key.startswith("stages."):
                out[key] = (value.float() - self.layout.offset).to(dtype)
        return out

    def taken(self, own: dict[str, Tensor], drafter: Drafter, target: Target) -> dict[str, Tensor]:
        for key, value in own.items():
            if key.endswith("eh_proj.weight") and of(drafter).cfg.order == "state_first":
                own[key] = swapped(value)
            if value.ndim == 1 and self.layout.offset:
                own[key] = value.float() + self.layout.offset
        vocab = {f"vocab.{k}": v for k, v in drafter.vocab.state_dict().items()}
        return {**vocab, **own}

    # ---- meaning ----

    def refuses(self, drafter: Drafter, target: Target) -> str:
        cfg = of(drafter).cfg
        if not drafter.vocab.full:
            return "its draft vocabulary is reduced, and an engine asks the target's whole head"
        if len(of(drafter).stages) > 1 and not self.several:
            return f"it has {cfg.depths} modules, and this layout has a place for one"
        if drafters.own_shape(drafter) is not None:
            return (
                "its layers are of other sizes than the target's, from whose config they are built"
            )
        return "" if plain_rope(target) else f"{ROPE}, and it was trained with plain ones"

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        """Of the modules alone: their layers' shape, and how many layers the target has."""
        shape, kind = target.shape(), "qwen3" if of(drafter).cfg.qk_norm else "llama"
        out = body.written(shape, target.depth, kind)
        body.check_written(out, shape)
        count = {"num_nextn_predict_layers": len(of(drafter).stages)}
        return {**out, **count, **body.types({"": drafter.state_dict()["stages.0.eh_proj.weight"]})}

    def layers(self, folder: Folder) -> Mapping[str, Any]:
        """The part of config.json that describes the layers."""
        return folder.config

    def implied(self, folder: Folder, target: Target, stamp: Mapping[str, Any]) -> Implied:
        shape = self._shape(folder, target)
        if folder.config.get("num_hidden_layers", target.depth) != target.depth:
            why = f"it stands behind {folder.config['num_hidden_layers']} layers, the target has"
            raise folder.wrong(f"{why} {target.depth}.", "Use the target it was trained for.")
        where, said = self.keys(folder, target), stamp.get("drafter", {})
        count = sum(key.endswith(self._joint()) for key in where)
        if folder.config.get("num_nextn_predict_layers", count) != count:
            promised = folder.config["num_nextn_predict_layers"]
            raise folder.wrong(f"config.json promises {promised} modules, and {count} are there.")
        mode = str(said.get("mode", "chained"))
        fields: dict[str, Any] = {
            "qk_norm": any(key.endswith("self_attn.q_norm.weight") for key in where),
            "mode": mode if count == 1 else "chained",
        }
        fields |= {"depths": count} if fields["mode"] == "chained" else {}
        return Implied("mtp", fields, shape)

    def _shape(self, folder: Folder, target: Target) -> Shape:
        """That of its layers: alone they say it, in a target's folder they are as the target's."""
        if not stitched_in(folder):
            return body.read(folder, self.layers(folder), target.shape())
        if not plain_rope(target):
            raise folder.wrong(f"{ROPE}, which Outrider's layers do not have.")
        return target.shape()

    def _joint(self) -> str:
        return next(part for part, mine in self.layout.names().items() if mine == "eh_proj.weight")


class DeepSeek(ModuleFiles):
    """Decoder layers behind the target's last one, each with copies of the target's ends."""

    words = ("deepseek",)
    served = "engines, from inside the target's checkpoint"
    layout = DEEPSEEK
    several = True

    def refuses(self, drafter: Drafter, target: Target) -> str:
        cfg = of(drafter).cfg
        if cfg.feed == "normed" and cfg.depths > 1:
            return "engines feed a module's output on before its norm, and it was trained behind it"
        return super().refuses(drafter, target)

    def shared(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        dtype = drafter.state_dict()["stages.0.eh_proj.weight"].dtype
        return {k: v.to(dtype) for k, v in self.lent(drafter, target).items()}

    def lent(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        embedding, head = target.embedding.weight, target.head_weight
        starts = [self.prefix(k, target) for k in range(len(of(drafter).stages))]
        ends = dict(zip(self.layout.shared, (embedding, head), strict=True))
        return {start + name: value for start in starts for name, value in ends.items()}

    def knows(self, folder: Folder) -> bool:
        return any(key.endswith(".eh_proj.weight") for key in folder.shapes)


class Qwen3Next(ModuleFiles):
    """One module under `mtp.`."""

    words = ("qwen3_next",)
    served = "engines, from inside the target's checkpoint"
    layout = QWEN3_NEXT

    def knows(self, folder: Folder) -> bool:
        return "mtp.fc.weight" in folder.shapes


class Speculator(ModuleFiles):
    """One module as a speculator, for its tools; engines want it stitched in."""

    words = ("speculators",)
    served = "speculators' tools"
    layout = SPECULATORS

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        layers = super().config(drafter, target)
        count = layers.pop("num_nextn_predict_layers")
        about = vllm.about("mtp", of(drafter).cfg.depths, target)
        return {
            "architectures": ["MTPDraftModel"],
            **about,
            "transformer_layer_config": layers,
            "num_nextn_predict_layers": count,
            "dtype": layers["dtype"],
        }

    def layers(self, folder: Folder) -> Mapping[str, Any]:
        return folder.part("transformer_layer_config")

    def knows(self, folder: Folder) -> bool:
        return folder.config.get("speculators_model_type") == "mtp"


def of(drafter: Drafter) -> Mtp:
    assert isinstance(drafter, Mtp), "this format holds mtp"
    return drafter


def plain_rope(target: Target) -> bool:
    """Whether the target turns its heads whole and by frequencies that are not scaled."""
    rope = getattr(target.text, "rope_parameters", None) or {}
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    return whole and rope.get("rope_type") == "default" and "rope_theta" in rope


def swapped(joint: Tensor) -> Tensor:
    """The halves of a joint's columns in the other order."""
    return torch.cat(joint.chunk(2, dim=1)[::-1], dim=1)


def stitched_in(folder: Folder) -> bool:
    """Whether modules lie beside the whole target."""
    return any(key.startswith("model.layers.0.") for key in folder.shapes)


def modules_of(folder: Folder, behind: int) -> list[str]:
    """Keys of the modules that lie in the folder of a target of so many layers."""
    numbers = {key: key.split(".")[2] for key in folder.shapes if key.startswith("model.layers.")}
    late = [key for key, n in numbers.items() if n.isdigit() and int(n) >= behind]
    return late + [key for key in folder.shapes if key.startswith("mtp.")]


FORMATS = (DeepSeek(), Qwen3Next(), Speculator())
