"""Conversion of a drafter's layers and vocabulary to and from a Hugging Face config.

Only known fields are written, never a copy of the target's config: the target's partial rotary
embedding, M-RoPE sections or windows do not apply to the drafter. The rotary table is rebuilt from
the JSON by transformers' own code and compared with Outrider's, when writing and when reading;
scaled or partial embeddings are refused.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.hf_folder import check_sizes
from outrider.models.interface import ModelShape
from outrider.models.layers import apply_rotary, rotary_frequencies
from outrider.models.vocab import DraftVocab

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}
SUPPORTED = {"attention_bias": False, "mlp_bias": False, "logit_scale": 1.0}  # the only values
ONLY_SILU = (
    "the layers of vLLM and SGLang (Llama's, Qwen3's) have no activation but silu, and its have "
    "gelu; train it with drafter.activation=silu"
)
MAX_FACTOR = 2.0**20  # of the length of a text, by a scaled rotary embedding
NOT_SUPPORTED = "Outrider's drafters have no such part."
USE_TARGET = "Use the target it was trained for."


def layer_fields(
    weights: Mapping[str, Tensor], shape: ModelShape, layers: int = 1, kind: str = "llama"
) -> dict[str, Any]:
    """Return the fields of a drafter's layers; longest text and vocabulary are the target's."""
    fields = {
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "hidden_act": HF_ACTIVATIONS[shape.activation],
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **dtype_fields(weights),
    }
    require_same_rope(fields, shape)
    return fields


def weight_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of the largest floating-point weight."""
    floating = (v for v in weights.values() if v.is_floating_point())
    return max(floating, key=torch.Tensor.numel).dtype


def dtype_fields(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the dtype fields of old and new transformers."""
    name = str(weight_dtype(weights)).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def read_config(folder: WeightFolder, config: Mapping[str, Any], target: ModelShape) -> ModelShape:
    """Return the drafter's own shape, as transformers reads its config; refuse unsupported ones."""
    hf = to_hf_config(folder, config)
    _refuse_parts(folder, config)
    _refuse_two_ropes(folder, config)
    if hf.hidden_size != target.hidden:
        why = f"its hidden size is {hf.hidden_size} and the target's {target.hidden}."
        raise folder.error(f"{why} {NOT_SUPPORTED}", USE_TARGET)
    if hf.vocab_size != target.vocab:
        why = f"its vocabulary has {hf.vocab_size} tokens and the target's {target.vocab}."
        raise folder.error(why, USE_TARGET)
    if hf.hidden_act not in ACTIVATIONS:
        raise folder.error(f"its activation is {hf.hidden_act}. {NOT_SUPPORTED}")
    shape = target._replace(
        intermediate=int(hf.intermediate_size),
        heads=int(hf.num_attention_heads),
        kv_heads=int(hf.num_key_value_heads),
        head_dim=int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads),
        eps=float(hf.rms_norm_eps),
        rope_theta=float(hf.rope_parameters["rope_theta"]),
        activation=ACTIVATIONS[hf.hidden_act],
    )
    _refuse_other_rope(folder, hf, shape)
    return shape


def to_hf_config(folder: WeightFolder, config: Mapping[str, Any]) -> Any:
    """Return a Llama or Qwen3 config, with transformers' defaults for absent fields."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig, Qwen3Config

    invalid = (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError)
    kinds = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    kind = str(config.get("model_type") or "llama")
    if kind not in kinds:
        why = f"its layers are of type {kind}, and only llama and qwen3 are supported."
        raise folder.error(why, "Convert it, or use another drafter.")
    fields = {k: v for k, v in config.items() if k not in ("auto_map", "model_type")}
    try:
        check_sizes(config)
        return kinds[kind](**fields)
    except invalid as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise folder.error(f"config.json is not a {kind} config: {first}") from None


def _refuse_parts(folder: WeightFolder, config: Mapping[str, Any]) -> None:
    for name, value in SUPPORTED.items():
        if config.get(name) not in (None, value):
            raise folder.error(f"config.json has {name}: {config[name]}. {NOT_SUPPORTED}")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    window = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if kinds or window:
        raise folder.error(f"it has sliding-window attention. {NOT_SUPPORTED}")


def logit_scale_field(scale: float) -> dict[str, float]:
    """Return vLLM's field for a factor on the output of a head that is the target's."""
    return {} if scale == 1 else {"logit_scale": scale}


def refuse_other_scale(folder: WeightFolder, scale: float) -> None:
    """Refuse a factor on the logits that is not the one of the target's head."""
    found = folder.config.get("logit_scale")
    if found not in (None, 1.0, scale):
        why = f"its logits are scaled by {found}, and those of the target by {scale}."
        raise folder.error(why, USE_TARGET)


# ---- vocabulary ----------------------------------------------------------------------------------


def read_vocab(folder: WeightFolder, keys: Mapping[str, str], vocab: int) -> Tensor | None:
    """Return the target ids of the draft vocabulary, from d2t and t2d; None: all.

    `keys` maps names in the format to keys in the file.
    """
    rows = folder.shapes.get(keys.get("lm_head.weight", ""), (0,))[0]
    if ("d2t" in keys) != ("t2d" in keys) or ("d2t" not in keys and rows != vocab):
        missing = "d2t" if "d2t" not in keys else "t2d"
        why = f"{missing} is missing, and the head has {rows} of {vocab} tokens"
        raise folder.error(f"{why}: d2t and t2d must name them.")
    if "d2t" not in keys:
        return None
    maps = folder.tensors([keys["d2t"], keys["t2d"]])
    d2t, t2d = maps[keys["d2t"]], maps[keys["t2d"]]
    why = "d2t (an offset for each draft id) and t2d do not name the same ascending tokens"
    try:
        ids = DraftVocab.from_offsets(d2t, vocab).target_ids
    except ValueError as error:
        raise folder.error(f"{why}: {error}.") from None
    if t2d.shape != (vocab,) or not torch.equal(torch.nonzero(t2d).flatten(), ids):
        raise folder.error(f"{why}.")
    if len(ids) != rows or folder.config.get("draft_vocab_size", rows) != rows:
        raise folder.error(f"d2t names {len(ids)} tokens and lm_head.weight {rows}.")
    return None if len(ids) == vocab else ids


# ---- rotary embedding ----------------------------------------------------------------------------


def _refuse_two_ropes(folder: WeightFolder, config: Mapping[str, Any]) -> None:
    """Refuse old and new fields that disagree: engines differ in which they read."""
    new, old = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise folder.error("rope_parameters or rope_scaling of config.json is not an object.")
    bases = {config.get("rope_theta"), new.get("rope_theta"), old.get("rope_theta")} - {None}
    kinds = {part.get("rope_type") or part.get("type") for part in (new, old)} - {None}
    if len(bases) > 1 or len(kinds) > 1:
        why = "config.json has two rotary embeddings, in rope_parameters and in older fields"
        raise folder.error(f"{why}: {sorted(map(str, bases | kinds))}.")


def _refuse_other_rope(folder: WeightFolder, hf: Any, shape: ModelShape) -> None:
    """Refuse partial rotation and scaled frequencies."""
    part = float(hf.rope_parameters.get("partial_rotary_factor") or 1.0)
    if part != 1.0:
        raise folder.error(f"its rotary embedding is partial ({part}). {NOT_SUPPORTED}")
    if not _same_rope(hf, shape):
        kind = hf.rope_parameters.get("rope_type", "default")
        why = f"its rotary embedding is of type {kind}, which Outrider's layers do not have;"
        raise folder.error(f"{why} with unscaled frequencies it would draft worse.")


def require_same_rope(config: Mapping[str, Any], shape: ModelShape) -> None:
    """Check that a config about to be written describes the rotary embedding of the layers."""
    from transformers import LlamaConfig

    if not _same_rope(LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"}), shape):
        why = "config.json would describe another rotary embedding than the drafter's."
        raise RunError(why, "This is a bug in Outrider; please report it.")


def _same_rope(hf: Any, shape: ModelShape) -> bool:
    """Compare transformers' rotary embedding with that of `layers.py`, for short and long texts.

    Scaled kinds change the frequencies beyond a length (dynamic, longrope), or those of the slowest
    pairs, which the first positions do not show (llama3, yarn).
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions, rotary, size = torch.arange(64), LlamaRotaryEmbedding(hf), shape.head_dim
    ours = rotary_frequencies(size // 2, shape.rope_theta, torch.device("cpu"))
    for last in (63, _longest_text(hf, shape) - 1):
        rotary(torch.zeros(1), torch.tensor([[last]]))
        theirs = rotary.inv_freq
        if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=0):
            return False
    tables = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    halves = torch.cat([table[0].chunk(2, dim=-1)[0] for table in tables], dim=-1)
    one = (torch.arange(size) < size // 2).float().expand(64, 1, -1)  # rotates to cos and sin
    rotated = apply_rotary(one, positions, shape.rope_theta)[:, 0]
    return torch.allclose(halves, rotated, atol=1e-5)


def _longest_text(hf: Any, shape: ModelShape) -> int:
    """Return the length up to which the drafter could be used: the target's, or a scaled one."""
    factor = hf.rope_parameters.get("factor")
    factor = min(float(factor), MAX_FACTOR) if isinstance(factor, int | float) else 1.0
    return int(max(shape.max_positions, hf.max_position_embeddings) * max(1.0, factor))
