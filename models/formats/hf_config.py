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
from outrider.models.drafting.layers import apply_rotary, rotary_frequencies
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.interface import ModelShape
from outrider.models.target.hf_folder import check_sizes

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
USE_OTHER = "Use another drafter, or train one for this target: outrider train."
ROPE_FIX = (
    "ModelOpt writes such a rope_scaling at export for a drafter that it trained without: if so, "
    "remove it from config.json. Else use another drafter."
)
VOCAB_FIX = (
    "Add d2t to the weight file: int64, for each row of lm_head.weight the id of its token minus "
    "the number of the row."
)
HEAD_FIX = "Add lm_head.weight to the weight file, as it was trained."


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


def merge_tap_scale(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multiply `tap_scale` into the columns of `fc.weight`; powers of two, so exactly."""
    fc, scale = weights["fc.weight"], weights["tap_scale"]
    if not scale.is_meta and not bool((scale != 1).any()):
        return weights
    columns = scale.double().repeat_interleave(fc.shape[1] // len(scale))
    return {**weights, "fc.weight": (fc.double() * columns).to(fc.dtype)}


def read_config(
    folder: WeightFolder,
    config: Mapping[str, Any],
    target: ModelShape,
    windowed: bool = False,
    mixed: bool = False,
) -> ModelShape:
    """Return the drafter's own shape, as transformers reads its config; refuse unsupported ones.

    Args:
        windowed: the drafter has a setting for a window of attention (`read_window`).
        mixed: and one for the layers that have it (`window_layers`).
    """
    hf = to_hf_config(folder, config)
    _refuse_parts(folder, config)
    window = read_window(folder, config, mixed)
    if window is not None and window < target.max_positions and not windowed:
        why = f"its attention has a sliding window of {window:,} tokens, fewer than the target's"
        raise folder.error(f"{why} {target.max_positions:,} positions. {NOT_SUPPORTED}", USE_OTHER)
    _refuse_two_ropes(folder, config)
    if hf.hidden_size != target.hidden:
        why = f"its hidden size is {hf.hidden_size} and the target's {target.hidden}."
        raise folder.error(f"{why} {NOT_SUPPORTED}", USE_TARGET)
    if hf.vocab_size != target.vocab:
        why = f"its vocabulary has {hf.vocab_size} tokens and the target's {target.vocab}."
        raise folder.error(why, USE_TARGET)
    if hf.hidden_act not in ACTIVATIONS:
        raise folder.error(f"its activation is {hf.hidden_act}. {NOT_SUPPORTED}", USE_OTHER)
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
        raise folder.error(why, USE_OTHER)
    fields = {k: v for k, v in config.items() if k not in ("auto_map", "model_type")}
    try:
        check_sizes(config)
        if fields.get("head_dim") is None:
            fields["head_dim"] = _stored_head_dim(folder, fields)
        return kinds[kind](**fields)
    except invalid as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise folder.error(f"config.json is not a {kind} config: {first}") from None


def _stored_head_dim(folder: WeightFolder, config: Mapping[str, Any]) -> int | None:
    """Return the head size by the rows of a stored q_proj; None: the weights do not tell."""
    heads = config.get("num_attention_heads")
    rows = [s[0] for k, s in folder.shapes.items() if k.endswith("self_attn.q_proj.weight") and s]
    if not rows or type(heads) is not int or heads < 1 or rows[0] % heads:
        return None
    return rows[0] // heads


def _refuse_parts(folder: WeightFolder, config: Mapping[str, Any]) -> None:
    for name, value in SUPPORTED.items():
        if config.get(name) not in (None, value):
            why = f"config.json has {name}: {config[name]}. {NOT_SUPPORTED}"
            raise folder.error(why, USE_OTHER)


def read_window(folder: WeightFolder, config: Mapping[str, Any], mixed: bool = False) -> int | None:
    """Return the rows that a row of every layer attends to at most; None: all.

    Args:
        mixed: not every layer needs to have the window (`window_layers`).
    """
    kinds, size = set(config.get("layer_types") or ()), config.get("sliding_window")
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise folder.error(f"its layers have {min(other)}. {NOT_SUPPORTED}", USE_OTHER)
    if len(kinds) > 1 and not mixed:
        why = "layer_types of config.json has layers with a sliding window and layers without."
        raise folder.error(f"{why} {NOT_SUPPORTED}", USE_OTHER)
    used = size is not None and config.get("use_sliding_window", True)
    if not ("sliding_attention" in kinds if kinds else used):
        return None
    if type(size) is not int or size < 1:
        raise folder.error(f"it has sliding-window attention, and sliding_window is {size}.")
    return size


def window_layers(folder: WeightFolder, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layers that have the window; None: all or none of them."""
    kinds, count = config.get("layer_types") or (), config.get("num_hidden_layers")
    if kinds and len(kinds) != count:
        why = (
            f"layer_types of config.json names {len(kinds)} layers, and num_hidden_layers {count}."
        )
        raise folder.error(why, "Correct one of them.")
    found = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return found if 0 < len(found) < len(kinds) else None


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
    """Return the target ids of the draft vocabulary, ascending; None: all.

    `d2t` names them, in any order. `t2d`, which engines ignore, must agree where it is stored.
    Without a head in the files the drafter has the target's, which needs all tokens.

    Args:
        keys: name in the format -> key in the file.
        vocab: number of the target's tokens.
    """
    head, size = keys.get("lm_head.weight"), folder.config.get("draft_vocab_size")
    rows = vocab if head is None else folder.shapes[head][0]
    ids = _read_draft_ids(folder, keys, vocab) if "d2t" in keys else torch.arange(vocab)
    if head is None and (len(ids) != vocab or size not in (None, vocab)):
        drafted = len(ids) if "d2t" in keys else size
        why = f"lm_head.weight is missing, its head of {drafted} tokens; the target's has {vocab}."
        raise folder.error(why, HEAD_FIX)
    if "d2t" not in keys and ("t2d" in keys or rows != vocab):
        why = f"d2t is missing, which names the {rows} tokens of its head; the target has {vocab}."
        raise folder.error(why, VOCAB_FIX)
    if len(ids) != rows or size not in (None, rows):
        named = f"d2t names {len(ids)} tokens" if "d2t" in keys else "d2t is missing"
        why = f"{named}, lm_head.weight has {rows}, and draft_vocab_size of config.json is {size}."
        raise folder.error(why, "Correct draft_vocab_size, or use the d2t that fits the head.")
    return None if len(ids) == vocab else ids


def _read_draft_ids(folder: WeightFolder, keys: Mapping[str, str], vocab: int) -> Tensor:
    """Return the ids that `d2t` names, ascending."""
    maps = folder.tensors(keys[name] for name in ("d2t", "t2d") if name in keys)
    try:
        ids = DraftVocab.ids_of_offsets(maps[keys["d2t"]]).sort().values
        DraftVocab(ids, vocab)
    except ValueError as error:
        why = f"d2t, an offset for each draft id, does not name tokens of the target: {error}."
        raise folder.error(why, VOCAB_FIX) from None
    if "t2d" not in keys:
        return ids
    t2d = maps[keys["t2d"]]
    if t2d.shape != (vocab,) or not torch.equal(torch.nonzero(t2d).flatten(), ids):
        why = "d2t (an offset for each draft id) and t2d do not name the same tokens."
        raise folder.error(why, "Remove t2d from the weight file if d2t is right.")
    return ids


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
        fix = "Keep the one that it was trained with in config.json."
        raise folder.error(f"{why}: {sorted(map(str, bases | kinds))}.", fix)


def _refuse_other_rope(folder: WeightFolder, hf: Any, shape: ModelShape) -> None:
    """Refuse partial rotation and scaled frequencies."""
    part = float(hf.rope_parameters.get("partial_rotary_factor") or 1.0)
    if part != 1.0:
        why = f"its rotary embedding is partial ({part}). {NOT_SUPPORTED}"
        raise folder.error(why, USE_OTHER)
    if not _same_rope(hf, shape):
        kind = hf.rope_parameters.get("rope_type", "default")
        why = f"its rotary embedding is of type {kind}, which Outrider's layers do not have;"
        raise folder.error(f"{why} with unscaled frequencies it would draft worse.", ROPE_FIX)


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
