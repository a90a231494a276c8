"""`outrider.json`: what an outside format has no place for, beside its weights.

The drafter's configuration, the taps by their outputs, the target's fingerprint, the order of what
a layer reads, the hashes of the weight files. What it says must agree with the files. One that was
written by hand has the parts `drafter` and `taps` alone and no `format`: it ends a doubt.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import read_json
from outrider.models.drafter import Drafter, Shape
from outrider.models.formats import native
from outrider.models.formats.native import target_fingerprint
from outrider.models.formats.weight_folder import FIX, STAMP, Folder
from outrider.models.target import Target

PARTS = {"format", "drafter", "taps", "target", "joins", "sha256"}


class Implied(NamedTuple):
    """What the files say.

    Attributes:
        name: of the drafter.
        fields: of its `Config`; all others are the defaults', or those of `outrider.json`.
        kept: ids of the draft vocabulary; None: all.
        shape: of its own layers.
    """

    name: str
    fields: dict[str, Any]
    shape: Shape
    kept: Tensor | None = None


def stamped(
    word: str, joins: list[str] | None, drafter: Drafter, target: Target, cfg: Any
) -> dict[str, Any]:
    """What outrider.json says, but for the hashes."""
    shape = target.shape()
    return {
        "format": word,
        "drafter": dataclasses.asdict(getattr(drafter, "cfg", cfg)),
        "taps": list(drafter.taps),
        "target": {
            "name": target.name, "fingerprint": target_fingerprint(target),
            "vocab": shape.vocab, "hidden": shape.hidden, "layers": shape.layers,
        },
        **({"joins": joins} if joins else {}),
    }  # fmt: skip


def read_stamp(
    folder: Folder, word: str, joins: list[str] | None, target: Target
) -> dict[str, Any]:
    """What outrider.json says; nothing where there is none.

    Raises:
        RunError: it is of another format or target, or not one of ours.
    """
    file = folder.path / STAMP
    if not file.exists():
        return {}
    stamp = read_json(file, FIX)
    drafter, target_said = stamp.get("drafter", {}), stamp.get("target")
    whole = isinstance(drafter, dict) and isinstance(stamp.get("taps", []), list)
    whole = whole and isinstance(stamp.get("sha256", {}), dict)
    if target_said is not None:
        whole = whole and isinstance(target_said, dict)
        whole = whole and {"name", "fingerprint"} <= target_said.keys()
    unknown = sorted(stamp.keys() - PARTS)
    if unknown or not whole:
        raise RunError(f"{file} is not one of Outrider's: {unknown or 'a part is missing'}.", FIX)
    if stamp.get("format", word) != word:
        raise folder.wrong(f"{STAMP} says it is of the format {stamp['format']}, and it is {word}.")
    if stamp.get("joins", joins) != joins:
        why = f"{STAMP} says that its layer reads {stamp['joins']}, and this format joins"
        raise folder.wrong(f"{why} {joins}: the halves are swapped.")
    if target_said and target_said["fingerprint"] != target_fingerprint(target):
        why = f"it was trained for {target_said['name']}, and this target has other weights."
        raise folder.wrong(why, f"Use the target it was trained for: {target_said['name']}.")
    return stamp


def settings(folder: Folder, implied: Implied, stamp: Mapping[str, Any]) -> Any:
    """The drafter's `Config`: what the files say, then outrider.json, then the defaults."""
    said = {k: v for k, v in stamp.get("drafter", {}).items() if v is not None}
    for name in sorted(implied.fields.keys() & said.keys()):
        ours, theirs = said[name], implied.fields[name]
        if (tuple(ours) if isinstance(ours, list) else ours) != theirs:
            why = f"{STAMP} says {name}: {ours}, and the files say {theirs}."
            raise folder.wrong(why, "One of them was changed; fetch the folder again.")
    size = None if implied.kept is None else len(implied.kept)
    fields = {"draft_vocab_size": size, **stamp.get("drafter", {}), **implied.fields}
    return native.settings({**fields, "name": implied.name}, folder.path)
