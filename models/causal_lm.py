"""A causal language model as a part that is trained: built from settings, read, and its head.

`Target` does the reading (masks, cache, families), as it does for the model that is drafted for.
Nothing that a configuration names is ever run: keys that could name code are refused.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn

from outrider.conf.errors import ConfigError
from outrider.models.drafter import Shape
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab

CODE = ("auto_map", "implementation", "kernel", "remote")  # words of keys that can name code to run
MODEL = "Give a folder or hub id of a causal language model with safetensors."


class Head(nn.Module):
    """The output embedding, over the draft vocabulary.

    A tied one is the body's input embedding: the same parameter, and it is saved there alone.
    """

    def __init__(self, lm: Target) -> None:
        super().__init__()
        out = lm.model.get_output_embeddings()
        self.tied = out.weight is lm.model.get_input_embeddings().weight
        self.weight: nn.Parameter = out.weight
        self.bias: nn.Parameter | None = getattr(out, "bias", None)
        self.finish = lm.shape_logits
        self.rows: tuple[tuple[int, int], Tensor] | None = None  # their origin, and they

    def forward(
        self, hidden: Float[Tensor, "*rows D"], vocab: DraftVocab
    ) -> Float[Tensor, "*rows Vd"]:
        if vocab.full:
            return self.finish(F.linear(hidden, self.weight, self.bias))
        bias = None if self.bias is None else self.bias[vocab.kept]
        return self.finish(F.linear(hidden, self._rows(vocab), bias))

    def _rows(self, vocab: DraftVocab) -> Float[Tensor, "Vd D"]:
        """The rows of the draft vocabulary; kept as long as nothing is trained."""
        if torch.is_grad_enabled():
            self.rows = None
            return self.weight[vocab.kept]
        now = (self.weight.data_ptr(), self.weight._version)
        if self.rows is None or self.rows[0] != now:
            self.rows = now, self.weight[vocab.kept]
        return self.rows[1]

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


def fresh(target: Target, layers: int, hidden: int | None, heads: int | None) -> dict[str, Any]:
    """A small Llama for this target: configuration as transformers writes it."""
    shape = target.shape()
    hidden, heads = sizes(shape, hidden, heads)
    return {
        "model_type": "llama",
        "vocab_size": target.vocab,
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
        "eos_token_id": getattr(target.text, "eos_token_id", None),
    }


def sizes(shape: Shape, hidden: int | None, heads: int | None) -> tuple[int, int]:
    """Hidden size and heads: half the target's width, heads of the target's size.

    What is not given follows what is: the width is rounded down to whole pairs per head, the
    heads to the largest number that divides the width.
    """
    width = hidden or max(2, shape.hidden // 2)
    count = heads or max(1, width // shape.head_dim)
    if hidden is None:
        width = 2 * count * max(1, width // (2 * count))
    elif heads is None:
        count = max(h for h in range(1, count + 1) if width % (2 * h) == 0)
    return width, count


def untrained(body: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(**body)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            "drafter.body", body["model_type"], f"transformers cannot build it: {_first(error)}",
            "Use the config.json of a causal language model.",
        ) from error  # fmt: skip


def pretrained(path: str) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    wrong = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)
    folder = Path(path).expanduser()
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder) if folder.is_dir() else path,
            dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        )  # fmt: skip
    except (*wrong, StrictDataclassError) as error:
        why = f"It could not be loaded: {_first(error)}"
        raise ConfigError("drafter.path", path, why, MODEL) from error


def _first(error: Exception) -> str:
    """First line of what another library says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reader(model: Any, key: str, target: Target) -> Target:
    """What runs the model; a target is read in the same way."""
    name = str(model.config.name_or_path or model.config.model_type)
    try:
        lm = Target(model, name=name, fuse=False)
    except ConfigError as error:
        fix = "Use a model whose layers are all attention layers."
        raise ConfigError(key, name, error.why, fix) from None
    if lm.vocab != target.vocab:
        raise ConfigError(
            key, name, f"It knows {lm.vocab} tokens and the target {target.vocab}; ids must agree.",
            "Use a model with the target's tokenizer; where only the padding of the embedding "
            "differs, save it once more behind model.resize_token_embeddings.",
        )  # fmt: skip
    return lm


def plain(config: Any) -> dict[str, Any]:
    """A model's configuration as json says it, without where it came from and what could run."""
    fields: dict[str, Any] = json.loads(config.to_json_string())
    return {k: v for k, v in fields.items() if k != "_name_or_path" and not _names_code(k)}


def _names_code(key: object) -> bool:
    return any(word in str(key) for word in CODE)


def refuse_code(fields: object) -> None:
    """No configuration may name code to run, however deep."""
    if isinstance(fields, dict):
        for key, value in fields.items():
            if _names_code(key):
                raise ValueError(f"body = {key}: a configuration must not name code to run")
            refuse_code(value)
    elif isinstance(fields, list | tuple):
        for value in fields:
            refuse_code(value)
