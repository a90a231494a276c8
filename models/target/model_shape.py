"""Shape of a model, read from its configuration."""

from typing import Any

from outrider.models.interface import ModelShape

HEAD = 64  # numbers of a head of a drafter, where the target's layers have none: Mamba


def shape_of(cfg: Any, layers: int, vocab: int) -> ModelShape:
    """Return the shape of a text model by its configuration, layers and vocabulary."""
    hidden = int(cfg.hidden_size)
    heads = int(getattr(cfg, "num_attention_heads", None) or max(1, hidden // HEAD))
    act = str(getattr(cfg, "hidden_act", None) or getattr(cfg, "hidden_activation", "silu"))
    return ModelShape(
        hidden=hidden,
        intermediate=int(getattr(cfg, "intermediate_size", None) or 4 * hidden),
        layers=layers,
        heads=heads,
        kv_heads=int(getattr(cfg, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(cfg, "head_dim", None) or hidden // heads),
        vocab=vocab,
        eps=float(getattr(cfg, "rms_norm_eps", None) or 1e-5),
        rope_theta=_rope_theta(cfg),
        activation="gelu" if act.startswith("gelu") else "silu",
        max_positions=int(getattr(cfg, "max_position_embeddings", None) or 2048),
    )


def config_shape(config: Any) -> ModelShape | None:
    """Return the shape of a text model by its configuration; None if that does not tell it."""
    text = config.get_text_config(decoder=True)
    try:
        return shape_of(text, int(text.num_hidden_layers), int(text.vocab_size))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return None


def _rope_theta(config: Any) -> float:
    """Return the base of the rotary embedding; 10000 for families that have none."""
    fields = getattr(config, "rope_parameters", None) or {}
    value = fields.get("full_attention", fields).get("rope_theta")
    return float(value or getattr(config, "rope_theta", None) or 10000.0)
