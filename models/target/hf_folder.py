"""A causal language model from outside, checked before and after transformers reads it.

transformers opens every file that an index names, allocates the sizes in config.json, and gives
random values to missing weights. Each function raises a ValueError with the reason.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outrider.conf.errors import RunError
from outrider.conf.files import read_json
from outrider.conf.hub import use_cache_if_unreachable

LAYERS, HEADS, WIDTH, TOKENS = 1024, 65536, 2**24, 2**40
SIZES = {  # field of config.json -> its largest value; the smallest is 1
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("hidden_size", "head_dim", "n_embd", "d_model"), WIDTH),
    **dict.fromkeys(("vocab_size",), 2**28),
}
FROM_0 = {  # the smallest is 0
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner"), WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4096),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), TOKENS),
}
PER_BYTE = 16  # parameters in a byte of the densest file; quantised ones hold up to five
SMALL_JSON = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
TABLES = 2**30  # numbers in buffers, such as the causal masks of older models
INDEX = "model.safetensors.index.json"
KNOWN_SURPLUS = re.compile(  # buffers of older versions, MTP modules, parts for images and sound
    r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|position_ids)$"
    r"|^(model\.)?mtp(_layers)?\.|(^|\.)(visual|vision_\w+|audio_\w+|multi_modal_projector)\."
)


def check_sizes(fields: Any) -> None:
    """Refuse a size in a config.json, also inside, that is no integer or that no model has."""
    if not isinstance(fields, Mapping):
        return
    for name, value in fields.items():
        check_sizes(value)
        low, high = 0 if name in FROM_0 else 1, SIZES.get(name) or FROM_0.get(name)
        for number in value if isinstance(value, list) else [value]:
            if high and number is not None and not (type(number) is int and low <= number <= high):
                why = f"{name}: {repr(number)[:80]}, which must be an integer in {low}..{high}"
                raise ValueError(f"its config.json has {why}.")


def check_config(weights: str, revision: str | None) -> dict[str, Any]:
    """Check config.json of a folder or hub id; return it, {} if there is none."""
    if Path(weights).is_dir():
        for entry in sorted(Path(weights).iterdir()):
            if entry.exists() and not (entry.is_file() or entry.is_dir()):
                raise ValueError(f"{entry.name} is not a regular file.")
            if entry.name in SMALL_JSON:
                read_json(entry, "")
    file = _find(weights, "config.json", revision)
    fields = {} if file is None else read_json(file, "")
    check_sizes(fields)
    if not isinstance(fields.get("model_type", ""), str):
        raise ValueError(f"its config.json has model_type: {fields['model_type']!r}"[:120])
    return fields


def check_weights(weights: str, revision: str | None, empty: Any) -> None:
    """Check the names, before any is opened, and the size of the weight files.

    Args:
        empty: the model on the meta device; None: its size is not checked.
    """
    if _find(weights, "adapter_config.json", revision):
        raise ValueError("it holds an adapter: merge it into its model (peft: merge_and_unload).")
    chosen = check_config(weights, revision).get("transformers_weights")
    names = ["model.safetensors", INDEX] if chosen is None else [str(chosen)]
    files = set[Path]()
    for name in names:
        if not plain_weights_name(name.removesuffix(".index.json")):
            raise ValueError(f"its config.json names weights {name}, not a safetensors file.")
        file = _find(weights, name, revision)
        if file is not None and name.endswith(".index.json"):
            shards = (_find(weights, n, revision) for n in {*read_weight_map(file, "").values()})
            files |= {shard for shard in shards if shard}  # transformers names a missing one
        elif file is not None:
            files.add(file)
    count = 0 if empty is None else sum(p.numel() for p in empty.parameters())
    held = sum(map(weights_size, files))
    if files and count > PER_BYTE * held:
        why = f"{count:,} parameters, and the weight files hold {held:,} bytes"
        raise ValueError(f"its config.json describes {why}.")


def require_complete(model: Any, info: Mapping[str, Iterable[Any]], surplus: bool = False) -> None:
    """Refuse a model with weights that its files lack, or files with unknown tensors.

    Args:
        info: transformers' `output_loading_info`.
        surplus: accept unknown tensors.
    """
    if missing := sorted(map(str, info["missing_keys"])):
        raise ValueError(f"its folder lacks {summarise(missing, 3)}.")
    keys = sorted(map(str, info["unexpected_keys"]))
    modules = tuple(k.removesuffix("eh_proj.weight") for k in keys if k.endswith("eh_proj.weight"))
    unknown = [k for k in keys if not (KNOWN_SURPLUS.search(k) or k.startswith(modules))]
    quantised = getattr(model.config, "quantization_config", None)  # with scales of many names
    if unknown and not surplus and not quantised:
        why = f"its folder holds {summarise(unknown, 3)}, which a {model.config.model_type} model"
        raise ValueError(f"{why} does not know.")


def summarise(keys: list[str], shown: int) -> str:
    """Return the first `shown` keys and the number of the others."""
    more = len(keys) - shown
    return ", ".join(keys[:shown]) + (f" and {more} more" if more > 0 else "")


def _find(weights: str, name: str, revision: str | None) -> Path | None:
    """Return a file of a folder or hub id, fetched if need be; None if there is none."""
    if Path(weights).is_dir():
        return Path(weights, name) if Path(weights, name).is_file() else None
    from transformers.utils.hub import cached_file

    use_cache_if_unreachable()
    found = cached_file(
        weights, name, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return None if found is None else Path(found)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers' table of missing and unknown tensors, which become one message.

    Its progress bar is for a terminal only.
    """
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the second if the first ends in a colon."""
    text = error.message if isinstance(error, RunError) else str(error).strip()
    first, *more = (text or type(error).__name__).splitlines()
    return (f"{first} {more[0].strip()}" if more and first.endswith(":") else first)[:500]


def empty_model(config: Any, **kwargs: Any) -> Any:
    """Return a model without weights, on the meta device; refuse one with endless tables."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **kwargs)
    if (count := sum(b.numel() for b in model.buffers())) > TABLES:
        raise ValueError(f"its config.json describes tables of {count:,} numbers.")
    return model


# ---- names and sizes of weight files ----


def plain_weights_name(name: object) -> bool:
    """Return whether this is the name of a safetensors file, without a folder."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def read_weight_map(index: Path, fix: str) -> dict[str, str]:
    """Return the key -> file of an index; refuse files that are not safetensors beside it."""
    names: Any = read_json(index, fix).get("weight_map")
    why = f"{index} does not map weights to files beside it"
    if not isinstance(names, dict) or not names:
        raise RunError(f"{why}.", fix)
    if wrong := [name for name in names.values() if not plain_weights_name(name)]:
        raise RunError(f"{why}: {str(wrong[0])[:80]!r} is not a safetensors file beside it.", fix)
    return names


def weights_size(file: Path) -> int:
    """Return the bytes of the tensors in a safetensors file, without length and header."""
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    return file.stat().st_size - 8 - header
