"""MTP modules into a copy of the folder of the target that they draft for.

That is where engines look for them. Every file of the target is copied as it is; weights of modules
that it came with are left out, and those of the new ones lie in a file of their own.
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file

from outrider.conf.files import read_json, write_json, write_tensors
from outrider.models.formats.atomic_folder import appearing
from outrider.models.formats.mtp_drafter import modules_of, stitched_in
from outrider.models.formats.weight_folder import PICKLES, STAMP, Folder, payload

MODULES = "model-mtp.safetensors"


def stitch(alone: Path, target: Path, folder: Path) -> None:
    """A copy of the target's folder that holds the modules of another folder too.

    Every file is copied as it is; modules that the target came with are replaced.

    Raises:
        RunError: a folder is damaged, or the modules do not belong behind this target's layers.
    """
    modules, whole = Folder(alone), Folder(target)
    if "speculators_model_type" in modules.config:
        why = "its keys are those of speculators' tools, under which no engine looks in a target."
        raise modules.wrong(why, "Write the drafter with format=deepseek or qwen3_next.")
    if not stitched_in(whole):
        why = "its layers are not called model.layers.*, behind which engines look for modules."
        raise whole.wrong(why, "There is no layout for such a target.")
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        ours, theirs = modules.config.get(name), whole.config.get(name)
        if ours != theirs:
            why = f"{name} is {ours} there and {theirs} in {target}."
            raise modules.wrong(why, "Stitch them into the target they were trained for.")
    with appearing(folder) as partial:
        _stitched(modules, whole, partial)


def _stitched(modules: Folder, whole: Folder, partial: Path) -> None:
    for file in whole.path.iterdir():
        weights = file.suffix in (*PICKLES, ".safetensors") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in ("config.json", STAMP):
            shutil.copy2(file, partial / file.name)
    old, where = modules_of(whole, whole.config["num_hidden_layers"]), dict[str, str]()
    for name in sorted(set(whole.files.values())):
        keys = [key for key, file in whole.files.items() if file == name and key not in old]
        where |= dict.fromkeys(keys, _shard(name))
        if keys and any(whole.files[key] == name for key in old):
            kept = load_file(whole.path / name)
            write_tensors(partial / _shard(name), {k: kept[k] for k in keys}, {"format": "pt"})
        elif keys:
            shutil.copy2(whole.path / name, partial / _shard(name))
    stored = modules.read(modules.shapes)
    sha256 = write_tensors(partial / MODULES, stored, {"format": "pt"})
    where |= dict.fromkeys(stored, MODULES)
    size = sum(payload(partial / name) for name in set(where.values()))
    index = {"metadata": {"total_size": size}, "weight_map": where}
    write_json(partial / "model.safetensors.index.json", index)
    if (modules.path / STAMP).exists():
        stamp = {**read_json(modules.path / STAMP, modules.fix), "sha256": {MODULES: sha256}}
        write_json(partial / STAMP, stamp)
    count = {"num_nextn_predict_layers": modules.count("num_nextn_predict_layers", 1)}
    write_json(partial / "config.json", {**whole.config, **count})


def _shard(name: str) -> str:
    """A lone model.safetensors would be read in the index's place."""
    return "model-body.safetensors" if name == "model.safetensors" else name
