"""Checkpoint formats: one file for each, which writes and reads it.

A file lists its formats in `FORMATS`, objects with the interface of `external.ExternalFormat`. A
format is found by its names and the drafters it holds; the format of a folder is recognised from
its files, never from its name.
"""

import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import read_json

if TYPE_CHECKING:
    import torch

    from outrider.models.drafting.drafter import Drafter
    from outrider.models.formats.external import Format
    from outrider.models.target.target import Target

HERE = Path(__file__).parent
MTP = "serves MTP modules only inside a copy of their target: use format=deepseek or qwen3_next, "
MTP += "and merge them into it."
NO_EAGLE1 = "The speculators schema has no EAGLE-1; vLLM and SGLang have separate formats."
UNSUPPORTED = {  # (format, drafter): what the format's software lacks
    ("vllm", "mtp"): f"vLLM {MTP}",
    ("sglang", "mtp"): f"SGLang {MTP}",
    ("sglang", "medusa"): "SGLang has no Medusa heads; vLLM has them up to 0.32.",
    ("eagle", "eagle3"): "EAGLE's code reads EAGLE-3 in SGLang's format.",
    ("speculators", "eagle"): NO_EAGLE1,
    ("speculators", "hass"): NO_EAGLE1,
}
FOREIGN = {  # word in a config -> a drafter that Outrider does not have
    "domino": "Domino",
}  # fmt: skip


@cache
def all_formats() -> tuple["Format", ...]:
    """Return all formats, in the order of their files."""
    names = sorted(file.stem for file in HERE.glob("[a-z]*.py"))
    modules = [importlib.import_module(f"outrider.models.formats.{name}") for name in names]
    return tuple(form for module in modules for form in getattr(module, "FORMATS", ()))


def format_names() -> list[str]:
    """Return every value of `format=`, sorted."""
    return sorted({name for form in all_formats() for name in form.names})


def _formats_of(drafter: str) -> list["Format"]:
    return [form for form in all_formats() if not form.drafters or drafter in form.drafters]


def find(name: str, drafter: str) -> "Format":
    """Return the format `name` for this drafter; raise ConfigError if there is none."""
    forms = _formats_of(drafter)
    for form in forms:
        if name in form.names:
            return form
    others = {d for form in all_formats() if name in form.names for d in form.drafters}
    why = f"It holds {', '.join(sorted(others))}, and this is {drafter}."
    why = UNSUPPORTED.get((name, drafter), why if others else "There is no such format.")
    names = sorted({n for form in forms for n in form.names})
    raise ConfigError("format", name, why, f"Use one of: {', '.join(names)}.")


def export_refusals(drafter: "Drafter", name: str, target: "Target") -> dict[str, str]:
    """Return the formats of a drafter: name -> why this one cannot be written, or ""."""
    return {form.names[0]: form.refusal_reason(drafter, target) for form in _formats_of(name)}


def recognise(folder: Path) -> "Format":
    """Return the format of a folder, from its files."""
    from outrider.models.formats import native
    from outrider.models.formats.weight_folder import WeightFolder, damaged_means_error

    opened = WeightFolder(folder)
    if native.FORMATS[0].matches(opened):
        return native.FORMATS[0]
    with damaged_means_error(folder):
        matches = [form for form in all_formats() if form.matches(opened)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(f"{form.names[0]} ({form.drafters[0]})" for form in matches)
        why = f"{folder} could be of several formats: {names}."
        raise RunError(why, "Remove the tensors or fields that belong to the other one.")
    if kind := opened.config.get("speculators_model_type"):
        why = f"{folder} is a speculators folder of type {kind}."
        raise RunError(why, "Outrider reads those of type eagle3, peagle, dflash, dspark and mtp.")
    text = str(opened.config).lower()
    if foreign := [name for word, name in FOREIGN.items() if word in text]:
        raise RunError(f"{folder} is a {foreign[0]} drafter.", "Outrider has no such drafter.")
    some = ", ".join(sorted(opened.shapes)[:3])
    why = f"{folder} has no format that Outrider reads; its tensors begin with {some}."
    raise RunError(why, f"Formats: {', '.join(format_names())}.")


def holds_drafter(folder: Path) -> bool:
    """Return whether Outrider wrote this folder, so that it is more than a language model's."""
    from outrider.models.formats import native
    from outrider.models.formats.weight_folder import FIX, SIDECAR

    if (folder / SIDECAR).is_file():
        return True
    file = folder / "config.json"
    return file.is_file() and read_json(file, FIX).get("format") == native.FORMAT


def load(
    folder: Path, target: "Target", dtype: "torch.dtype | None" = None
) -> tuple["Drafter", Any]:
    """Load the drafter of a folder of any format for decoding; return it and its `Config`.

    Args:
        dtype: dtype of its weights; None: the target's.
    """
    drafter, cfg = recognise(folder).read(folder, target)
    drafter.to(target.device, dtype or target.dtype).eval().requires_grad_(False)
    return drafter, cfg
