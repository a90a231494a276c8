"""A drafter's layers and vocabulary in the words of a Hugging Face config, and back.

What is written is a list of known fields, never a copy of the target's config: a target's partial
rotary, M-RoPE sections or windows would be served to a drafter that was trained without them. The
rotary embedding is rebuilt from the very json, by transformers' own code, and compared with the one
that Outrider's layers turn by; anything else (scaled, partial) is refused, in both directions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.drafter import Shape
from outrider.models.formats.weight_folder import Folder
from outrider.models.layers import rotate

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
WORDS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}
PLAIN = {"attention_bias": False, "mlp_bias": False, "logit_scale": 1.0}  # all there is here
NOT_OURS = "Outrider's drafters have no such part, so its weights would mean something else."


def written(shape: Shape, layers: int = 1, kind: str = "llama") -> dict[str, Any]:
    """Fields of a drafter's body; `max_position_embeddings` and the vocabulary are the target's."""
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    return {
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "hidden_act": WORDS[shape.activation],
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": rope,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def types(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The dtype fields, old and new: those of the largest weight."""
    largest = max((v for v in tensors.values() if v.is_floating_point()), key=torch.Tensor.numel)
    name = str(largest.dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def read(folder: Folder, config: Mapping[str, Any], target: Shape) -> Shape:
    """The drafter's own shape, as transformers understands its config.

    Raises:
        RunError: it is not a layer that Outrider can build, or not of the target's width.
    """
    hf = understood(folder, config)
    _refuse_parts(folder, config)
    _refuse_two_ropes(folder, config)
    if hf.hidden_size != target.hidden:
        why = f"it is {hf.hidden_size} wide and the target {target.hidden}."
        raise folder.wrong(f"{why} {NOT_OURS}", "Use the target it was trained for.")
    if hf.vocab_size != target.vocab:
        why = f"it was made for {hf.vocab_size} tokens, and the target knows {target.vocab}."
        raise folder.wrong(why, "Use the target it was trained for.")
    if hf.hidden_act not in ACTIVATIONS:
        raise folder.wrong(f"its activation is {hf.hidden_act}. {NOT_OURS}")
    shape = target._replace(
        intermediate=int(hf.intermediate_size),
        heads=int(hf.num_attention_heads),
        kv_heads=int(hf.num_key_value_heads),
        head_dim=int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads),
        eps=float(hf.rms_norm_eps),
        rope_theta=float(hf.rope_parameters["rope_theta"]),
        activation=ACTIVATIONS[hf.hidden_act],
    )
    refuse_other_rope(folder, hf, shape)
    return shape


def understood(folder: Folder, config: Mapping[str, Any]) -> Any:
    """A Llama's or Qwen3's config; defaults are those that engines fill in too."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig, Qwen3Config

    wrong = (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError)
    kinds = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    kind = str(config.get("model_type") or "llama")
    if kind not in kinds:
        why = f"its layers are of type {kind}, and only llama and qwen3 can be built."
        raise folder.wrong(why, "Convert it, or use another drafter.")
    fields = {k: v for k, v in config.items() if k not in ("auto_map", "model_type")}
    try:
        return kinds[kind](**fields)
    except wrong as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise folder.wrong(f"config.json is not a {kind} config: {first}") from None


def _refuse_parts(folder: Folder, config: Mapping[str, Any]) -> None:
    for name, plain in PLAIN.items():
        if config.get(name) not in (None, plain):
            raise folder.wrong(f"config.json says {name}: {config[name]}. {NOT_OURS}")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    window = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if kinds or window:
        raise folder.wrong(f"its attention looks through a window. {NOT_OURS}")


# ---- vocabulary --------------------------------------------------------------------------------


def kept(folder: Folder, where: Mapping[str, str], vocab: int) -> Tensor | None:
    """Target ids of the draft vocabulary; None: all.

    Raises:
        RunError: the maps are absent where they are needed, or contradict each other.
    """
    rows = folder.shapes.get(where.get("lm_head.weight", ""), (0,))[0]
    if ("d2t" in where) != ("t2d" in where) or ("d2t" not in where and rows != vocab):
        gone = "d2t" if "d2t" not in where else "t2d"
        why = f"{gone} is missing, and its head has {rows} of {vocab} tokens: which ones,"
        raise folder.wrong(f"{why} only d2t and t2d can say.")
    if "d2t" not in where:
        return None
    maps = folder.read([where["d2t"], where["t2d"]])
    d2t, t2d = maps[where["d2t"]], maps[where["t2d"]]
    ids = d2t + torch.arange(len(d2t))
    if len(t2d) != vocab or not torch.equal(torch.nonzero(t2d).flatten(), ids):
        why = "d2t (an offset to each draft id) and t2d do not name the same ascending tokens."
        raise folder.wrong(why)
    if len(ids) != rows or folder.config.get("draft_vocab_size", rows) != rows:
        raise folder.wrong(f"d2t names {len(ids)} tokens and lm_head.weight {rows}.")
    return ids


# ---- rotary embedding ----------------------------------------------------------------------------


def _refuse_two_ropes(folder: Folder, config: Mapping[str, Any]) -> None:
    """Old fields and new ones, of which an engine reads the ones or the others."""
    new, old = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise folder.wrong("config.json says rope_parameters or rope_scaling without an object.")
    bases = {config.get("rope_theta"), new.get("rope_theta"), old.get("rope_theta")} - {None}
    kinds = {part.get("rope_type") or part.get("type") for part in (new, old)} - {None}
    if len(bases) > 1 or len(kinds) > 1:
        why = "config.json says two rotary embeddings, in rope_parameters and in older fields"
        raise folder.wrong(f"{why}: {sorted(map(str, bases | kinds))}.")


def refuse_other_rope(folder: Folder, hf: Any, shape: Shape) -> None:
    """The tables of the json must be those of our layers.

    Raises:
        RunError: heads are turned in part, or by scaled frequencies.
    """
    kind = hf.rope_parameters.get("rope_type", "default")
    part = float(hf.rope_parameters.get("partial_rotary_factor") or 1.0)
    if part != 1.0:
        raise folder.wrong(f"its heads have rotary positions in part ({part}) only. {NOT_OURS}")
    theirs, ours = table(hf), turned(shape)
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, atol=1e-5):
        why = f"its rotary embedding is of type {kind}, which Outrider's layers do not have;"
        raise folder.wrong(f"{why} drafted with plain frequencies it would guess worse.")


def table(hf: Any, count: int = 64) -> Float[Tensor, "count C"]:
    """Cosines and sines of the first positions, by transformers' own code."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(hf)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(count)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


def turned(shape: Shape, count: int = 64) -> Float[Tensor, "count C"]:
    """The same of our layers: what they make of the vector (1, .., 1, 0, .., 0)."""
    half = shape.head_dim // 2
    one = torch.cat([torch.ones(half), torch.zeros(half)]).expand(count, 1, -1)
    return rotate(one, torch.arange(count), shape.rope_theta)[:, 0]


def check_written(config: Mapping[str, Any], shape: Shape) -> None:
    """The json that is about to be written says the rotary embedding of the layers."""
    from transformers import LlamaConfig

    fields = {k: v for k, v in config.items() if k != "model_type"}
    theirs, ours = table(LlamaConfig(**fields)), turned(shape)
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, atol=1e-5):
        why = (
            "config.json would describe another rotary embedding than the drafter was trained with"
        )
        raise RunError(f"{why}.", "This is a fault of Outrider; please report it.")
