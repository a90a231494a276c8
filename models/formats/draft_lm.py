"""A draft model as the plain Hugging Face folder it is: any engine loads it beside its target.

Its weights are whole: a reduced draft vocabulary is a part of Outrider's drafter and not of the
model, so such a one is refused. Reading builds the model from transformers' own classes only.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from outrider.conf.errors import ConfigError
from outrider.conf.files import sha256_of, write_json
from outrider.models.causal_lm import refuse_code
from outrider.models.drafter import Drafter
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.formats import native
from outrider.models.formats.atomic_folder import appearing
from outrider.models.formats.external import Outside, demand
from outrider.models.formats.sidecar import read_stamp, stamped
from outrider.models.formats.weight_folder import STAMP, Folder
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab


class HuggingFace(Outside):
    """config.json and weights as `save_pretrained` writes them."""

    words: tuple[str, ...] = ("transformers", "vllm", "sglang")
    drafters: tuple[str, ...] = ("draft_lm",)
    served = "transformers, vLLM, SGLang"

    def refuses(self, drafter: Drafter, target: Target) -> str:
        if drafter.vocab.full:
            return ""
        return "its draft vocabulary is reduced, and a language model's folder has no place for one"

    def write(self, drafter: Drafter, target: Target, cfg: Any, folder: Path) -> None:
        demand(self, drafter, target, cfg)
        assert isinstance(drafter, DraftLm), "this format holds draft_lm"
        with appearing(folder) as partial:
            drafter.lm.model.save_pretrained(partial)
            hashes = {f.name: sha256_of(f) for f in sorted(partial.glob("*.safetensors"))}
            write_json(
                partial / STAMP,
                {**stamped(self.words[0], None, drafter, target, cfg), "sha256": hashes},
            )

    def knows(self, folder: Folder) -> bool:
        names = folder.config.get("architectures") or []
        whole = "model_type" in folder.config and any(str(n).endswith("ForCausalLM") for n in names)
        keys = [key for key in folder.shapes if key.endswith("embed_tokens.weight")]
        keys += [key for key in folder.shapes if key.endswith(("wte.weight", "embed_in.weight"))]
        lone = any(key.startswith(("fc.", "midlayer.", "mtp.")) for key in folder.shapes)
        return whole and bool(keys) and not lone and not any("eh_proj" in k for k in folder.shapes)

    def read(self, folder: Path, target: Target) -> tuple[Drafter, Any]:
        opened = Folder(folder)
        stamp = read_stamp(opened, self.words[0], None, target)
        try:
            refuse_code(opened.config)
        except ValueError as error:
            raise opened.wrong(
                f"config.json names code to run, which is never done: {error}"
            ) from None
        said = {**stamp.get("drafter", {}), "body": None, "path": str(folder)}
        cfg = native.settings({"name": "draft_lm", **said}, folder)
        try:
            drafter = DraftLm(cfg, target, DraftVocab.whole(target.vocab), ())
        except ConfigError as error:
            raise opened.wrong(f"{error.why}", error.fix) from None
        self._account(opened, drafter)
        opened.verify(stamp.get("sha256", {}))
        drafter.cfg = dataclasses.replace(drafter.cfg, path=stamp.get("drafter", {}).get("path"))
        drafter.to(_dtype(opened)).eval()
        for weight in drafter.parameters():
            weight.data = weight.data.clone()  # out of the file's memory, as `Folder.read` says
        return drafter, drafter.cfg

    def _account(self, folder: Folder, drafter: DraftLm) -> None:
        """Nothing is filled in at random or left out, as transformers does where keys differ."""
        own = drafter.lm.model.state_dict()
        tied = {"lm_head.weight"} if drafter.lm_head.tied else set()
        where = {key: key for key in folder.shapes}
        folder.account(where, own.keys() - tied, tied)
        for key in own.keys() & where.keys():
            if tuple(own[key].shape) != folder.shapes[key]:
                why = f"{key} is {list(folder.shapes[key])}, and config.json asks for"
                raise folder.wrong(f"{why} {list(own[key].shape)}.")


def _dtype(folder: Folder) -> torch.dtype:
    key = next(key for key, shape in folder.shapes.items() if len(shape) > 1)
    return folder.read([key])[key].dtype


FORMATS = (HuggingFace(),)
