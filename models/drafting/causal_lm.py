"""A trainable causal language model: its configuration, its weights and its head.

`Target` runs it, with the same masks and cache as the target. Configuration keys that could name
code to run are refused.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from outrider.conf.errors import ConfigError
from outrider.conf.hub import require_folder_or_id
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape
from outrider.models.target import hf_folder
from outrider.models.target.target import Target

CODE_KEYS = ("auto_map", "implementation", "kernel", "remote")  # parts of keys that name code
FIX = "Give a folder or hub id of a causal language model with safetensors."


class LmHead(nn.Module):
    """The output embedding, over the draft vocabulary.

    A tied one shares its parameter with the input embedding and is saved there only.
    """

    def __init__(self, lm: Target) -> None:
        super().__init__()
        out = lm.model.get_output_embeddings()
        self.tied = out.weight is lm.model.get_input_embeddings().weight
        self.weight: nn.Parameter = out.weight
        self.bias: nn.Parameter | None = getattr(out, "bias", None)
        self.scale_logits = lm.scale_logits
        # address and version of the weight, and its rows of the draft vocabulary
        self._cached_rows: tuple[tuple[int, int], Tensor] | None = None

    def forward(
        self, hidden: Float[Tensor, "*rows D"], vocab: DraftVocab
    ) -> Float[Tensor, "*rows Vd"]:
        if vocab.is_full:
            return self.scale_logits(F.linear(hidden, self.weight, self.bias))
        bias = None if self.bias is None else self.bias[vocab.target_ids]
        return self.scale_logits(F.linear(hidden, self._select_rows(vocab), bias))

    def _select_rows(self, vocab: DraftVocab) -> Float[Tensor, "Vd D"]:
        """Cached while the weight does not change."""
        if torch.is_grad_enabled():
            self._cached_rows = None
            return self.weight[vocab.target_ids]
        version = (self.weight.data_ptr(), self.weight._version)
        if self._cached_rows is None or self._cached_rows[0] != version:
            self._cached_rows = version, self.weight[vocab.target_ids]
        return self._cached_rows[1]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.tied:
            del destination[f"{prefix}weight"]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        if self.tied:
            missing.remove(f"{prefix}weight")


def small_llama_config(
    target: Target, layers: int, hidden: int | None, heads: int | None
) -> dict[str, Any]:
    shape = target.shape()
    hidden, heads = resolve_width(shape, hidden, heads)
    return {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": max(1, shape.intermediate * hidden // shape.hidden),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": getattr(target.text_config, "eos_token_id", None),
    }


def resolve_width(shape: ModelShape, hidden: int | None, heads: int | None) -> tuple[int, int]:
    """Return hidden size and heads; by default half the target's width, in heads of its size.

    A default adapts to a given value: the width rounds down to whole rotary pairs per head, the
    heads to the largest number that divides the width.
    """
    width = hidden or max(2, shape.hidden // 2)
    count = heads or max(1, width // shape.head_dim)
    if hidden is None:
        width = 2 * count * max(1, width // (2 * count))
    elif heads is None:
        count = max(h for h in range(1, count + 1) if width % (2 * h) == 0)
    return width, count


def build_lm(body: dict[str, Any]) -> Any:
    """Build an untrained model from a configuration."""
    from transformers import AutoModelForCausalLM

    config = lm_config(body)
    with _refusing("drafter.body", body["model_type"]):
        hf_folder.empty_model(config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def lm_config(body: dict[str, Any]) -> Any:
    """Return the configuration of these fields."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if body["model_type"] not in CONFIG_MAPPING:
        why, fix = "transformers has no such model_type.", "Like {model_type: llama, ...}."
        raise ConfigError("drafter.body", body["model_type"], why, fix)
    with _refusing("drafter.body", body["model_type"]):
        hf_folder.check_sizes(body)
        return AutoConfig.for_model(**_with_floats(body))


def _with_floats(value: Any) -> Any:
    """Decode infinite numbers, for which transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(part) for key, part in value.items()}
    return [*map(_with_floats, value)] if isinstance(value, list) else value


def read_lm_config(path: str) -> Any:
    """Return the configuration of a model in a folder or at a hub id."""
    from transformers import AutoConfig

    require_folder_or_id("drafter.path", path)
    place = _place(path)
    with _refusing("drafter.path", path):
        hf_folder.check_config(place, None)
        return AutoConfig.from_pretrained(place, trust_remote_code=False)


def _place(path: str) -> str:
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else path


@contextmanager
def _refusing(key: str, value: str) -> Iterator[None]:
    """Turn every error of fields from outside, of which there are all kinds, into a ConfigError."""
    try:
        yield
    except Exception as error:
        why, fix = f"It could not be loaded: {hf_folder.first_line(error)}", FIX
        if key == "drafter.body":
            why = f"transformers cannot build it: {hf_folder.first_line(error)}"
            fix = "Use the config.json of a causal language model."
        raise ConfigError(key, value, why, fix) from error


def load_lm(path: str) -> Any:
    """Load a model from a folder or hub id, in float32."""
    from transformers import AutoModelForCausalLM

    config, place = read_lm_config(path), _place(path)
    with _refusing("drafter.path", path):
        empty = hf_folder.empty_model(config)
        hf_folder.check_weights(place, None, empty)
        with hf_folder.quiet_loading():
            model, info = AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
                output_loading_info=True,
            )  # fmt: skip
        hf_folder.require_complete(model, info)
        return model


def as_target(model: Any, key: str, target: Target) -> Target:
    """Wrap a draft model in a `Target`, which runs it; `key` is the setting that selected it."""
    name = str(model.config.name_or_path or model.config.model_type)
    try:
        lm = Target(model, name=name, fuse=False)
    except ConfigError as error:
        fix = "Use a model whose layers are all attention layers."
        raise ConfigError(key, name, error.why, fix) from None
    require_vocab(key, name, lm.vocab_size, target.vocab_size)
    return lm


def require_vocab(key: str, name: str, own: int, targets: int) -> None:
    """Raise ConfigError unless the draft model `name` has as many tokens as the target."""
    if own != targets:
        raise ConfigError(
            key, name, f"It has {own} tokens and the target {targets}; ids must agree.",
            "Use a model with the target's tokenizer; if only the padding of the embedding "
            "differs, apply model.resize_token_embeddings and save it again.",
        )  # fmt: skip


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON fields, without its origin and keys that name code."""
    fields: dict[str, Any] = json.loads(config.to_json_string())
    return {k: v for k, v in fields.items() if k != "_name_or_path" and not _names_code(k)}


def _names_code(key: object) -> bool:
    return any(word in str(key) for word in CODE_KEYS)


def refuse_code_keys(fields: object) -> None:
    """Raise ValueError if a key at any depth could name code to run."""
    if isinstance(fields, dict):
        for key in filter(_names_code, fields):
            raise ValueError(f"body = {key}: a configuration must not name code to run")
        fields = list(fields.values())
    for value in fields if isinstance(fields, list | tuple) else ():
        refuse_code_keys(value)
