"""The changed target of LayerSkip as a Hugging Face folder: a whole model.

It holds every weight, embedding and head included, so that transformers loads it like the original
target. `outrider.json` names the drafter and its settings; without it the folder is a plain model.
"""

from pathlib import Path
from typing import Any

from outrider.models.drafters.layerskip import LayerSkip
from outrider.models.drafting.causal_lm import as_target, load_lm
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.formats.external import ExternalFormat, read_sidecar, sidecar_drafter
from outrider.models.formats.hf_config import USE_TARGET
from outrider.models.formats.weight_folder import WeightFolder, equal_values
from outrider.models.target.target import Target


class ChangedTargetFormat(ExternalFormat):
    """config.json and weights as written by `save_pretrained`."""

    names = ("transformers",)
    drafters = ("layerskip",)
    engines = "transformers"

    def write_files(self, drafter: LayerSkip, target: Target, folder: Path) -> None:
        drafter.body.lm.model.save_pretrained(folder)

    def matches(self, folder: WeightFolder) -> bool:
        return sidecar_drafter(folder) in self.drafters

    def _read(self, opened: WeightFolder, target: Target) -> tuple[Drafter, Any]:
        sidecar = read_sidecar(opened, self.names[0], None, target)
        opened.check_hashes(sidecar.get("sha256", {}))
        cfg = native.config_from_json(sidecar["drafter"], opened.path)
        drafter = LayerSkip(cfg, target, DraftVocab.identity(target.vocab_size), ())
        changed = as_target(load_lm(str(opened.path)), "drafter", target)
        key = next(key for key, shape in opened.shapes.items() if len(shape) > 1)
        dtype = opened.tensors([key])[key].dtype  # `load_lm` converts it
        for name in ("embedding", "head"):
            weight = getattr(changed, name).weight.to(dtype)
            if not equal_values(weight, getattr(target, name).weight):
                why = f"its {name} differs from that of {target.name}."
                raise opened.error(why, USE_TARGET)
        drafter.body.read_from(changed)
        return drafter.to(dtype).eval(), cfg


FORMATS = (ChangedTargetFormat(),)
