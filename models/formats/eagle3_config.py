"""Fields of an EAGLE-3 config.json, as the projects that write SGLang's or vLLM's format use them.

ModelOpt writes d2t without t2d, ordered by frequency, and outputs as layer ids beside `layers.0.*`,
which suit vLLM's reading too; Automodel writes the name of its class and the target's number of
layers; AngelSlim names the tapped layers by a field of its own. Switches may be at the top level or
inside `eagle_config`.

Source: the projects' releases (tests/test_folders_of_projects.py).
"""

from collections.abc import Mapping
from typing import Any

from outrider.models.formats import hf_config
from outrider.models.formats.weight_folder import WeightFolder, equal_values
from outrider.models.target.target import Target

IDS = "eagle_aux_hidden_state_layer_ids"
ANGELSLIM_IDS = "aux_hidden_states_layer_ids"  # outputs
AUTOMODEL = "LlamaEagle3DraftModel"  # its class; its config is a copy of the target's
MODELOPT = "next_layer_regular"  # a field that it alone writes into eagle_config
EAGLE_CONFIG = {  # ModelOpt's eagle_config: the only values that Outrider's network has
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1,
}  # fmt: skip


def layer_ids(config: Mapping[str, Any], name: str = IDS) -> Any:
    """Return the list of tapped layers; an empty one, which ModelOpt writes, names none."""
    return None if config.get(name) == [] else config.get(name)


def switch(folder: WeightFolder, name: str) -> bool | None:
    """Return a switch of config.json, also one inside `eagle_config`; None: it is in neither."""
    nested = folder.config_object("eagle_config", required=False).get(name)
    value = folder.config.get(name)
    if value is not None and nested is not None and bool(value) != bool(nested):
        raise folder.error(f"config.json has {name}: {value}, and its eagle_config {nested}.")
    value = nested if value is None else value
    return None if value is None else bool(value)


def fc_norm(folder: WeightFolder, keys: Mapping[str, str]) -> str:
    """Return the setting `fc_norm`, which weights and config.json must agree about."""
    stored = {"fc_norm": "fc_norm.0.weight" in keys, "norm_before_fc": "input_norm.weight" in keys}
    for name, found in stored.items():
        if switch(folder, name) not in (None, found):
            fix = f"Set {name} to {str(found).lower()} in config.json, or use other weights."
            raise folder.error(f"{name} of config.json contradicts the weights.", fix)
    if all(stored.values()):
        why = f"it norms each tap and all taps together. {hf_config.NOT_SUPPORTED}"
        raise folder.error(why, hf_config.USE_OTHER)
    return "each" if stored["fc_norm"] else "joint" if stored["norm_before_fc"] else "none"


def count_layers(folder: WeightFolder, config: Mapping[str, Any], keys: Mapping[str, str]) -> int:
    """Return the number of decoder layers."""
    if AUTOMODEL not in folder.architectures:
        return folder.positive_int("num_hidden_layers", 1, config)
    names = [key.split(".")[1] for key in keys if key.startswith("layers.")]
    return 1 + len(set(names) - {"0"})


def refuse_other_networks(folder: WeightFolder, keys: Mapping[str, str], target: Target) -> None:
    """Refuse variants of EAGLE-3 that Outrider does not have."""
    head, shape = keys.get("lm_head.weight"), (target.vocab_size, target.shape().hidden)
    whole = head is None or folder.shapes[head] == shape  # another size: the target's flag, copied
    if folder.config.get("tie_word_embeddings") and whole:
        weight = target.head_weight if head is None else folder.tensors([head])[head]
        if not equal_values(target.embedding.weight, weight):
            why = "config.json ties head and embedding, and its head is another matrix."
            raise folder.error(why, "Set tie_word_embeddings to false if the head was trained.")
    aux = folder.config_object("eagle_config", required=False)
    for name, value in EAGLE_CONFIG.items():
        if aux.get(name, value) not in (value, None):
            why = f"eagle_config has {name}: {aux[name]}. {hf_config.NOT_SUPPORTED}"
            raise folder.error(why, hf_config.USE_OTHER)
