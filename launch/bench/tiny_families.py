"""Tiny random models of every family of targets: four layers, 61 tokens, seeded weights.

A family is the name of a configuration class of transformers and its fields. Windows, chunks and
kernels' chunks are shorter than a dozen tokens, so that a short text shows a wrong one.
"""

from typing import Any

import torch

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

ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", WINDOWS),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", {**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "olmo2": ("Olmo2Config", {}),
    "gpt2": ("GPT2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "head_dim": 8}),
    "granite": ("GraniteConfig", MULTIPLIERS),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    # chunks and steps of the query scale that are shorter than the test's prefix
    "llama4": ("Llama4TextConfig", {**LLAMA4, "attention_chunk_size": 6, "floor_scale": 4}),
}

ROUTED = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    "layer_types": DELTA["layer_types"], "num_key_value_heads": 4, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4, **EXPERTS,
}  # fmt: skip
# chunks of the kernels that are shorter than the tests' texts
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}  # fmt: skip
MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
SHARED = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 8}
SHARED |= {"tie_word_embeddings": False}
UNTIED = {"tie_word_embeddings": False}  # tied ones repeat a token
CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], **UNTIED}
CONV_ATTENTION = {
    "head_dim": 8, "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    "moe_intermediate_size": 24,
}  # fmt: skip
INKLING = {
    **CONV_ATTENTION, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 8, "sliding_window_size": 6, "d_rel": 4, "rel_extent": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "log_scaling_n_floor": 4, "log_scaling_alpha": 0.5,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "mamba_num_heads": 8,
    "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8, "head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip
JAMBA = {
    "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2, "num_experts_per_tok": 1,
    "mamba_d_state": 8, "mamba_dt_rank": 4,
}  # fmt: skip
BARE = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **ROUTED}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA, **ROUTED}),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA),
    "kimi_linear": ("KimiLinearConfig", {
        **LATENT, "linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }),
    "bailing_hybrid": ("BailingHybridConfig", {
        **LATENT, "head_dim": 8, "num_local_experts": 8, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1,
    }),
    "bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [2]}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {
        **MAMBA2, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    }),
    "falcon_h1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8, **UNTIED}),
    "nemotron_h": ("NemotronHConfig", NEMOTRON),
    "zamba": ("ZambaConfig", {**SHARED, "n_mamba_heads": 2, "mamba_dt_rank": 4}),
    "zamba2": ("Zamba2Config", {
        **SHARED, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 8,
        "num_mem_blocks": 1,
    }),
    "jamba": ("JambaConfig", JAMBA),
    "lfm2": ("Lfm2Config", {**CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2MoeConfig", {**CONV, **EXPERTS, "num_experts": 4, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", {
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "head_dim": 8,
        "conv_L_cache": 4, **WINDOWS,
    }),
    "minimax": ("MiniMaxConfig", {
        "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8,
    }),
    "zaya": ("ZayaConfig", {
        **CONV_ATTENTION, "num_experts": 4, "router_hidden_size": 8, **WINDOWS, **UNTIED,
    }),
    "inkling": ("InklingTextConfig", {
        **INKLING, "logits_mup_width_multiplier": 1.0,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }),
    "inkling2": ("Inkling2TextConfig", {
        **INKLING, "unpadded_vocab_size": 61, "n_layers_per_attn_res_block": 2,
    }),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "mamba2": ("Mamba2Config", BARE),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 8}),
}  # fmt: skip


def known_families() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the families that the installed transformers has, recurrent ones last."""
    import transformers

    both = {**ATTENTION, **RECURRENT}
    return {name: pair for name, pair in both.items() if hasattr(transformers, pair[0])}


def small_model(family: str, seed: int = 0, **changes: object) -> Any:
    """Build a random float32 model whose weights are so large that a wrong mask changes logits."""
    import transformers

    torch.manual_seed(seed)
    kind, extra = known_families()[family]
    fields = {**SMALL, **extra, **changes}
    if family == "gpt2":
        fields = {
            "vocab_size": fields["vocab_size"], "n_embd": 32, "n_layer": 4, "n_head": 4,
            "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
    if family == "gpt_neox":
        del fields["num_key_value_heads"]
    config = getattr(transformers, kind)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.float().eval()
