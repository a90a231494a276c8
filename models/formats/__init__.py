"""One file per outside checkpoint format: each writes it and reads it back.

A file holds `FORMATS`, objects that fill `outside.Format`. There is no table to extend: a format is
found by the words it goes by and the drafters it holds. Which format a folder has is read from its
files, never from its name.
"""

import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.conf.errors import ConfigError, RunError

if TYPE_CHECKING:
    import torch

    from outrider.models.drafter import Drafter
    from outrider.models.formats.external import Format
    from outrider.models.target import Target

HERE = Path(__file__).parent
WHY_NOT = {  # (word, drafter): what an engine cannot do
    ("vllm", "mtp"): "vLLM serves MTP modules from inside a copy of their target alone: write "
    "format=deepseek or qwen3_next, and stitch it in.",
    ("sglang", "mtp"): "SGLang serves MTP modules from inside a copy of their target alone: write "
    "format=deepseek or qwen3_next, and stitch it in.",
    ("sglang", "medusa"): "SGLang has no Medusa heads; vLLM has.",
    ("eagle", "eagle3"): "EAGLE's code reads EAGLE-3 in the flavour that SGLang reads.",
    ("speculators", "eagle"): "Its schema of today has no EAGLE-1; vLLM and SGLang read their own.",
    ("speculators", "hass"): "Its schema of today has no EAGLE-1; vLLM and SGLang read their own.",
}
FOREIGN = {  # words in a config -> drafters of the field that Outrider has not
    "dflash": "DFlash", "dspark": "DSpark", "domino": "Domino", "peagle": "P-EAGLE",
}  # fmt: skip


@cache
def every() -> tuple["Format", ...]:
    """All formats, in the order of their files."""
    found: list[Format] = []
    for file in sorted(HERE.glob("[a-z]*.py")):
        room = importlib.import_module(f"outrider.models.formats.{file.stem}")
        found.extend(getattr(room, "FORMATS", ()))
    return tuple(found)


def words() -> list[str]:
    """What a user may call a format, sorted."""
    return sorted({word for form in every() for word in form.words})


def find(word: str, drafter: str) -> "Format":
    """The format of this name that holds this drafter.

    Raises:
        ConfigError: there is none; the message says why and lists those there are.
    """
    fitting = [form for form in every() if not form.drafters or drafter in form.drafters]
    for form in fitting:
        if word in form.words:
            return form
    names = sorted({name for form in fitting for name in form.words})
    why = "There is no such format."
    if word in words():
        others = sorted({d for form in every() if word in form.words for d in form.drafters})
        why = WHY_NOT.get((word, drafter), f"It holds {', '.join(others)}, and this is {drafter}.")
    raise ConfigError("format", word, why, f"Use one of: {', '.join(names)}.")


def fitting(drafter: "Drafter", name: str, target: "Target") -> dict[str, str]:
    """Every format that holds this drafter, by name: why it cannot be written so, or ""."""
    held = [form for form in every() if not form.drafters or name in form.drafters]
    return {form.words[0]: form.refuses(drafter, target) for form in held}


def recognise(folder: Path) -> "Format":
    """The format of a folder, from its files.

    Raises:
        RunError: it is damaged, of no known format, or a drafter that Outrider has not.
    """
    from outrider.models.formats import native
    from outrider.models.formats.weight_folder import FIX, Folder

    opened = Folder(folder)
    if opened.config.get("format") == native.FORMAT:
        return native.FORMATS[0]
    found = [form for form in every() if form.knows(opened)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{form.words[0]} ({form.drafters[0]})" for form in found)
        raise RunError(f"{folder} could be of several formats: {names}.", FIX)
    if kind := opened.config.get("speculators_model_type"):
        raise RunError(
            f"{folder} is a speculators folder of type {kind}.", "It cannot be read here."
        )
    text = str(opened.config).lower()
    if foreign := [name for word, name in FOREIGN.items() if word in text]:
        raise RunError(f"{folder} is a {foreign[0]} drafter.", "Outrider has no such drafter.")
    some = ", ".join(sorted(opened.shapes)[:3])
    why = f"{folder} is of no format that Outrider reads; its weights begin with {some}."
    raise RunError(why, f"Formats: {', '.join(words())}.")


def load(
    folder: Path, target: "Target", dtype: "torch.dtype | None" = None
) -> tuple["Drafter", Any]:
    """The drafter of a folder of any format, ready to decode; and its `Config`.

    Args:
        dtype: of its weights; None takes the target's.

    Raises:
        RunError: it is damaged, unknown, ambiguous, or was made for another target.
    """
    drafter, cfg = recognise(folder).read(folder, target)
    drafter.to(target.device, dtype or target.dtype).eval().requires_grad_(False)
    return drafter, cfg
