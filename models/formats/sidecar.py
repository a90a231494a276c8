"""`outrider.json`: what an external format has no place for, stored beside its weights.

It holds the drafter's configuration, the taps as layer outputs, the target's fingerprint, the order
of the joint projection's inputs, the sha256 of the weight files, and dtype and shape of every
tensor. It must agree with the files. One written by hand to settle an ambiguity has only `drafter`
and `taps`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import read_json, sha256_of, write_json
from outrider.models.drafter import Drafter
from outrider.models.formats import native
from outrider.models.formats.native import target_fingerprint
from outrider.models.formats.weight_folder import FIX, SIDECAR, WeightFolder
from outrider.models.interface import ModelShape
from outrider.models.target import Target

FIELDS = {  # name -> type; all are optional
    "format": str, "drafter": dict, "taps": list, "target": dict, "joins": list, "sha256": dict,
    "tensors": dict,
}  # fmt: skip


class DrafterSpec(NamedTuple):
    """A drafter as config.json and the tensor shapes define it.

    Attributes:
        name: of the drafter.
        fields: fields of its `Config` that the files define.
        shape: of its own layers.
        vocab_ids: target ids of the draft vocabulary; None: all.
    """

    name: str
    fields: dict[str, Any]
    shape: ModelShape
    vocab_ids: Tensor | None = None


# ---- writing -------------------------------------------------------------------------------------


def sidecar_content(
    form: str, joint_order: list[str] | None, drafter: Drafter, target: Target, cfg: Any
) -> dict[str, Any]:
    """Return the content of outrider.json, without what describes the weight files.

    Args:
        form: name of the format.
        cfg: the drafter's `Config`, where the drafter itself does not hold one.
    """
    shape = target.shape()
    return {
        "format": form,
        "drafter": dataclasses.asdict(getattr(drafter, "cfg", cfg)),
        "taps": list(drafter.taps),
        "target": {
            "name": target.name, "fingerprint": target_fingerprint(target),
            "vocab": shape.vocab, "hidden": shape.hidden, "layers": shape.layers,
        },
        **({"joins": joint_order} if joint_order else {}),
    }  # fmt: skip


def write_sidecar(folder: Path, content: Mapping[str, Any]) -> None:
    """Write outrider.json into a folder that holds config.json and the weights."""
    opened = WeightFolder(folder)
    sha256 = {name: sha256_of(folder / name) for name in sorted(set(opened.files.values()))}
    tensors = {
        key: {"dtype": opened.dtypes[key], "shape": list(opened.shapes[key])}
        for key in sorted(opened.shapes)
    }
    write_json(folder / SIDECAR, {**content, "sha256": sha256, "tensors": tensors})


# ---- reading -------------------------------------------------------------------------------------


def read_sidecar(
    folder: WeightFolder, form: str, joint_order: list[str] | None, target: Target
) -> dict[str, Any]:
    """Return the content of outrider.json, or {} without one.

    Raises:
        RunError: it is malformed, or of another format or target.
    """
    file = folder.path / SIDECAR
    if not file.exists():
        return {}
    content = read_json(file, FIX)
    invalid = sorted(content.keys() - FIELDS)
    invalid += [k for k, kind in FIELDS.items() if not isinstance(content.get(k, kind()), kind)]
    made_for = content.get("target")
    if isinstance(made_for, dict) and not {"name", "fingerprint"} <= made_for.keys():
        invalid.append("target")
    if invalid:
        raise RunError(f"{file} was not written by Outrider: {', '.join(invalid)}.", FIX)
    if content.get("format", form) != form:
        raise folder.error(f"{SIDECAR} has format {content['format']}, and the files {form}.")
    if content.get("joins", joint_order) != joint_order:
        why = f"{SIDECAR} joins {content['joins']}, and this format {joint_order}"
        raise folder.error(f"{why}: the halves are swapped.")
    if made_for and made_for["fingerprint"] != target_fingerprint(target):
        why = f"it was trained for {made_for['name']}, and this target has other weights."
        raise folder.error(why, f"Use the target it was trained for: {made_for['name']}.")
    return content


def drafter_config(folder: WeightFolder, spec: DrafterSpec, sidecar: Mapping[str, Any]) -> Any:
    """Return the drafter's `Config`: fields of the files, then outrider.json, then defaults."""
    trained = sidecar.get("drafter", {})
    for name in sorted(spec.fields.keys() & trained.keys()):
        ours, theirs = trained[name], spec.fields[name]
        if ours is not None and (tuple(ours) if isinstance(ours, list) else ours) != theirs:
            why = f"{SIDECAR} has {name}: {ours}, and the files {theirs}."
            raise folder.error(why, "One of them was changed; fetch the folder again.")
    size = None if spec.vocab_ids is None else len(spec.vocab_ids)
    fields = {"draft_vocab_size": size, **trained, **spec.fields, "name": spec.name}
    return native.config_from_json(fields, folder.path)
