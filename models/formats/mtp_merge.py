"""Merging of MTP modules into a copy of their target's folder, from which engines load them.

The target's files are copied unchanged, except for existing MTP modules; the new modules are
stored in a separate file.
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file

from outrider.conf.files import read_json, write_json
from outrider.conf.tensor_files import write_tensors
from outrider.models.formats.atomic_folder import atomic_folder
from outrider.models.formats.hf_config import USE_TARGET
from outrider.models.formats.mtp_drafter import is_merged, module_keys
from outrider.models.formats.weight_folder import (
    PICKLES,
    SIDECAR,
    WeightFolder,
    damaged_means_error,
)
from outrider.models.target.hf_folder import weights_size

MODULES = "model-mtp.safetensors"


def merge_into_target(modules: Path, target: Path, folder: Path) -> None:
    """Write a copy of the target's folder that holds the modules of another folder."""
    own, whole = WeightFolder(modules), WeightFolder(target)
    if "speculators_model_type" in own.config:
        why = "its keys are those of the speculators library, which engines do not read here."
        raise own.error(why, "Write the drafter with format=deepseek or qwen3_next.")
    if not is_merged(whole):
        why = "its layers are not named model.layers.*, as engines require."
        raise whole.error(why, "There is no layout for such a target.")
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        ours, theirs = own.config.get(name), whole.config.get(name)
        if ours != theirs:
            raise own.error(f"{name} is {ours}, and in {target} {theirs}.", USE_TARGET)
    with damaged_means_error(target), atomic_folder(folder) as partial:
        for file in target.iterdir():
            weights = file.suffix in (*PICKLES, ".safetensors") or file.name.endswith(".index.json")
            if file.is_file() and not weights and file.name not in ("config.json", SIDECAR):
                shutil.copy2(file, partial / file.name)
        keys = _copy_weights(whole, partial)
        _add_modules(own, whole, keys, partial)


def _copy_weights(whole: WeightFolder, partial: Path) -> dict[str, str]:
    """Copy the target's weights without its modules; return key -> file."""
    old, files = module_keys(whole, whole.config["num_hidden_layers"]), dict[str, str]()
    for name in sorted(set(whole.files.values())):
        keys = [key for key, file in whole.files.items() if file == name and key not in old]
        # readers would prefer a lone model.safetensors to the index
        shard = "model-body.safetensors" if name == "model.safetensors" else name
        files |= dict.fromkeys(keys, shard)
        if keys and any(whole.files[key] == name for key in old):
            tensors = load_file(whole.path / name)
            write_tensors(partial / shard, {k: tensors[k] for k in keys}, {"format": "pt"})
        elif keys:
            shutil.copy2(whole.path / name, partial / shard)
    return files


def _add_modules(
    own: WeightFolder, whole: WeightFolder, keys: dict[str, str], partial: Path
) -> None:
    """Write the modules' weights, the index, outrider.json and config.json."""
    tensors = own.tensors(own.shapes)
    sha256 = write_tensors(partial / MODULES, tensors, {"format": "pt"})
    keys = {**keys, **dict.fromkeys(tensors, MODULES)}
    size = sum(weights_size(partial / name) for name in set(keys.values()))
    index = {"metadata": {"total_size": size}, "weight_map": keys}
    write_json(partial / "model.safetensors.index.json", index)
    if (own.path / SIDECAR).exists():
        content = {**read_json(own.path / SIDECAR, own.fix), "sha256": {MODULES: sha256}}
        write_json(partial / SIDECAR, content)
    count = own.positive_int("num_nextn_predict_layers", 1)
    config = {**whole.config, "num_nextn_predict_layers": count}
    if whole.config.get("layer_types"):  # transformers asks for those of the modules
        config["mtp_layer_types"] = ["full_attention"] * count
    write_json(partial / "config.json", config)
