"""Tiny random models of every family that Outrider supports."""

from typing import Any

import torch
import transformers as hf

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 6}  # shorter than the test's prefix, so that a wrong mask shows
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}  # fmt: skip
LLAMA4 = {
    "num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8,
    "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, {}),
    "llama_tied": (hf.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3Config, {"head_dim": 16}),
    "mistral": (hf.MistralConfig, WINDOWS),
    "phi3": (hf.Phi3Config, {}),
    "gemma2": (hf.Gemma2Config, {**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": (hf.Gemma3TextConfig, {**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "olmo2": (hf.Olmo2Config, {}),
    "gpt2": (hf.GPT2Config, {}),
    "gpt_neox": (hf.GPTNeoXConfig, {}),
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (hf.Qwen3MoeConfig, {**EXPERTS, "num_experts": 4, "head_dim": 8}),
    "granite": (hf.GraniteConfig, MULTIPLIERS),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.25}),
    # chunks and steps of the query scale that are shorter than the test's prefix
    "llama4": (hf.Llama4TextConfig, {**LLAMA4, "attention_chunk_size": 6, "floor_scale": 4}),
}


def small_model(family: str, seed: int = 0, **changes: object) -> Any:
    """A random float32 model with weights large enough that a wrong mask changes its logits."""
    torch.manual_seed(seed)
    kind, extra = FAMILIES[family]
    fields = {**SMALL, **extra, **changes}
    if family == "gpt2":
        fields = {
            "vocab_size": fields["vocab_size"], "n_embd": 32, "n_layer": 4, "n_head": 4,
            "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
    if family == "gpt_neox":
        del fields["num_key_value_heads"]
    model = hf.AutoModelForCausalLM.from_config(kind(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.float().eval()
