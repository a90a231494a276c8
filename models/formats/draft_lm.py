"""A draft model as a Hugging Face folder, which any engine loads together with its target.

The folder holds a whole model, so a draft model with a reduced draft vocabulary is refused. The
model is built from transformers' own classes; code in the folder is never run.
"""

import dataclasses
from pathlib import Path
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafting.causal_lm import refuse_code_keys
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.formats.external import ExternalFormat, read_sidecar, sidecar_drafter
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.target.target import Target


class HuggingFaceFormat(ExternalFormat):
    """config.json and weights as written by `save_pretrained`."""

    names = ("transformers", "vllm", "sglang")
    drafters = ("draft_lm",)
    engines = "transformers, vLLM, SGLang, llama.cpp"
    reduced = "its draft vocabulary is reduced, which a Hugging Face folder cannot hold"

    def write_files(self, drafter: DraftLm, target: Target, folder: Path) -> None:
        drafter.lm.model.save_pretrained(folder)

    def matches(self, folder: WeightFolder) -> bool:
        causal = any(str(name).endswith("ForCausalLM") for name in folder.architectures)
        embeddings = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
        embedded = any(key.endswith(embeddings) for key in folder.shapes)
        prefixes = ("fc.", "midlayer.", "mtp.")
        other = any(key.startswith(prefixes) or "eh_proj" in key for key in folder.shapes)
        other |= sidecar_drafter(folder) not in ("", *self.drafters)
        return causal and "model_type" in folder.config and embedded and not other

    def _read(self, opened: WeightFolder, target: Target) -> tuple[Drafter, Any]:
        folder = opened.path
        sidecar = read_sidecar(opened, self.names[0], None, target)
        try:
            refuse_code_keys(opened.config)
        except ValueError as error:
            why = f"config.json names code to run: {error}"
            raise opened.error(why, "Use a model of a class in transformers.") from None
        fields = {**sidecar.get("drafter", {}), "body": None, "path": str(folder)}
        cfg = native.config_from_json({"name": "draft_lm", **fields}, folder)
        try:
            drafter = DraftLm(cfg, target, DraftVocab.identity(target.vocab_size), ())
        except ConfigError as error:
            raise opened.error(f"{error.why}", error.fix) from None
        self._check_keys(opened, drafter)
        opened.check_hashes(sidecar.get("sha256", {}))
        drafter.cfg = dataclasses.replace(drafter.cfg, path=sidecar.get("drafter", {}).get("path"))
        key = next(key for key, shape in opened.shapes.items() if len(shape) > 1)
        drafter.to(opened.tensors([key])[key].dtype).eval()
        for weight in drafter.parameters():
            weight.data = weight.data.clone()  # out of the file's memory, as `WeightFolder.tensors`
        return drafter, drafter.cfg

    def _check_keys(self, folder: WeightFolder, drafter: DraftLm) -> None:
        """Refuse missing and unknown keys, which transformers would initialise or skip."""
        own = drafter.lm.model.state_dict()
        tied = {"lm_head.weight"} if drafter.lm_head.tied else set()
        folder.check_keys({key: key for key in folder.shapes}, own.keys() - tied, tied)
        for key in own.keys() & folder.shapes.keys():
            folder.require_shape(key, own[key].shape)


FORMATS = (HuggingFaceFormat(),)
