"""Keys, shapes and fields of every format at the sizes of real targets, on the meta device."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outrider.models import drafters, formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.layers import apply_rotary
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import hf_config
from outrider.models.formats.external import ExternalFormat
from outrider.models.target.target import Target
from tests import outside, tiny

Shapes = dict[str, tuple[int, ...]]
H, DRAFTED = 4096, 32000
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
SIZES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        hf.LlamaConfig,
        {
            "num_hidden_layers": 32, "vocab_size": 128256, "intermediate_size": 14336,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3,
        },
    ),
    "Qwen3-8B": (
        hf.Qwen3Config,
        {
            "num_hidden_layers": 36, "vocab_size": 151936, "intermediate_size": 12288,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}  # fmt: skip


@cache
def large(name: str) -> Target:
    """Return a target on the meta device."""
    kind, fields = SIZES[name]
    both = {"hidden_size": H, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(kind(**both, **fields))
    return Target(model, name=name, fuse=False)


def built(name: str, target: Target, whole: bool, **changes: Any) -> Drafter:
    size = target.vocab_size if whole else DRAFTED
    vocab = DraftVocab.from_counts(torch.zeros(target.vocab_size, dtype=torch.long), size)
    with torch.device("meta"):
        return drafters.build(tiny.config(name, **changes), target, vocab)


def layer(p: str, target: Target, wide: int, norms: tuple[str, ...], qk: bool = False) -> Shapes:
    """A decoder layer of 32 query and 8 key heads of size 128."""
    inner, a = target.shape().intermediate, f"{p}.self_attn"
    out: Shapes = {
        f"{a}.q_proj.weight": (4096, wide * H), f"{a}.k_proj.weight": (1024, wide * H),
        f"{a}.v_proj.weight": (1024, wide * H), f"{a}.o_proj.weight": (H, 4096),
        f"{p}.mlp.gate_proj.weight": (inner, H), f"{p}.mlp.up_proj.weight": (inner, H),
        f"{p}.mlp.down_proj.weight": (H, inner),
    }  # fmt: skip
    out |= {f"{p}.{norm}.weight": (H,) for norm in norms}
    return out | ({f"{a}.{x}_norm.weight": (128,) for x in "qk"} if qk else {})


NORMS = ("input_layernorm", "post_attention_layernorm")


def eagle3(target: Target, first: str) -> Shapes:
    return layer(first, target, 2, ("hidden_norm", *NORMS)) | {
        "fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (DRAFTED, H),
        "d2t": (DRAFTED,), "t2d": (target.vocab_size,),
    }  # fmt: skip


def eagle1(target: Target) -> Shapes:
    ends: Shapes = {"fc.weight": (H, 2 * H), "embed_tokens.weight": (target.vocab_size, H)}
    return layer("layers.0", target, 1, NORMS[1:]) | ends


def medusa(target: Target, v: int, first: str, last: str) -> Shapes:
    out: Shapes = {}
    for head in range(5):
        out |= {first.format(head) + "weight": (H, H), first.format(head) + "bias": (H,)}
        out[last.format(head)] = (v, H)
    return out


def expected(name: str, word: str, target: Target) -> Shapes:
    """Return the keys and shapes of published checkpoints, written by hand."""
    embedding: Shapes = {"embed_tokens.weight": (target.vocab_size, H)}
    n = target.num_layers
    if name == "eagle3":
        first = "midlayer" if word == "sglang" else "layers.0"
        return eagle3(target, first) | (embedding if word == "speculators" else {})
    if name in ("eagle", "hass"):
        return eagle1(target) | ({} if word == "vllm" else {"fc.bias": (H,)})
    if (name, word) == ("medusa", "medusa"):
        return medusa(target, target.vocab_size, "{}.0.linear.", "{}.1.weight")
    if name == "medusa":
        cut = medusa(target, DRAFTED, "blocks.{}.layers.0.", "lm_heads.{}.weight")
        return cut | {"token_map": (DRAFTED,)}
    start, ends, inner, qk = {
        "deepseek": (f"model.layers.{n}", "enorm hnorm eh_proj shared_head.norm", "", False),
        "qwen3_next": (
            "mtp", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm", ".layers.0", True,
        ),
        "speculators": (
            "mtp_layers.0", "token_layernorm hidden_layernorm input_proj final_layernorm", "", True,
        ),
    }[word]  # fmt: skip
    sizes: list[tuple[int, ...]] = [(H,), (H,), (H, 2 * H), (H,)]
    out = {f"{start}.{k}.weight": v for k, v in zip(ends.split(), sizes, strict=True)}
    if word == "deepseek":
        out |= {
            f"{start}.{k}.weight": (target.vocab_size, H)
            for k in ("embed_tokens", "shared_head.head")
        }
    return out | layer(start + inner, target, 1, NORMS, qk)


ALL = [
    ("eagle3", "sglang", {}, 15), ("eagle3", "vllm", {}, 15), ("eagle3", "speculators", {}, 16),
    ("eagle", "eagle", {}, 11), ("eagle", "sglang", {}, 11), ("hass", "eagle", {"bias": True}, 11),
    ("eagle", "vllm", {"bias": False}, 10), ("hass", "vllm", {}, 10),
    ("medusa", "medusa", {"depths": 5}, 15), ("medusa", "vllm", {"depths": 5}, 16),
    ("mtp", "deepseek", {"depths": 1}, 15),
    ("mtp", "qwen3_next", {"depths": 1, "qk_norm": True}, 15),
    ("mtp", "speculators", {"depths": 1, "qk_norm": True}, 15),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "word", "changes", "count"), ALL, ids=str)
def test_keys_and_shapes_match_published_checkpoints(
    size: str, name: str, word: str, changes: dict[str, Any], count: int
) -> None:
    target, form = large(size), formats.find(word, name)
    reduced = name == "eagle3" or (name, word) == ("medusa", "vllm")
    drafter = built(name, target, not reduced, **changes)
    assert isinstance(form, ExternalFormat)
    found = {key: tuple(value.shape) for key, value in form.tensors(drafter, target).items()}
    assert found == expected(name, word, target)
    assert len(found) == count


def test_parameter_counts_match_published_checkpoints() -> None:
    """EAGLE-3 and EAGLE-1 for Qwen3-8B; of EAGLE-1 most are the target's embedding."""
    target = large("Qwen3-8B")
    for name, word, whole, millions in (
        ("eagle3", "sglang", False, 399.5),
        ("eagle", "eagle", True, 848.8),
    ):
        form = formats.find(word, name)
        assert isinstance(form, ExternalFormat)
        tensors = form.tensors(built(name, target, whole), target)
        count = sum(v.numel() for v in tensors.values() if v.is_floating_point())
        assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("word", "one"), [("sglang", 0), ("vllm", 1), ("speculators", 1)])
def test_config_describes_the_drafter_only(size: str, word: str, one: int) -> None:
    """Plain frequencies of the target's base, its longest text, its vocabulary; known fields."""
    target, form = large(size), formats.find(word, "eagle3")
    assert isinstance(form, ExternalFormat)
    config = form.config(built("eagle3", target, False), target)
    n = target.num_layers
    ids = (
        config.get("eagle_aux_hidden_state_layer_ids")
        or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    )
    assert ids == [tap + one for tap in (1, n // 2 - 1, n - 4)]
    layers = config.get("transformer_layer_config", config)
    fields = SIZES[size][1]
    for name in ("vocab_size", "max_position_embeddings", "rms_norm_eps", "intermediate_size"):
        assert layers[name] == fields[name]
    assert layers["rope_theta"] == fields["rope_parameters"]["rope_theta"]
    assert layers["rope_scaling"] is None
    assert layers["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == DRAFTED
    own = hf_config.layer_fields({"w": torch.ones(1)}, target.shape()).keys()
    assert layers.keys() & set(vars(target.config)) <= own | {"architectures"}
    json.dumps(config)


# ---- rotary embedding ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in outside.CASES if c.word != "native"], ids=str)
@torch.no_grad()
def test_written_rope_equals_that_of_the_layers(case: outside.Case, tmp_path: Path) -> None:
    """Rotate queries by transformers with the written config, at every position."""
    target = tiny.target(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    if case.name in ("medusa", "draft_lm"):
        return
    drafter = case.drafter(target)
    case.format.write(drafter, target, None, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config = config.get("transformer_layer_config") or config.get("model") or config
    assert config["max_position_embeddings"] == 128
    kind = hf.AutoConfig.for_model(config.pop("model_type")).__class__
    positions = torch.arange(config["max_position_embeddings"])
    x = torch.randn(len(positions), 4, config["head_dim"])
    cos, sin = LlamaRotaryEmbedding(kind(**config))(x, positions[None])
    rotated, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(apply_rotary(x, positions, 5000.0), rotated[0].transpose(0, 1))


def test_contradicting_rope_is_refused() -> None:
    shape = tiny.target().shape()
    config = {
        **hf_config.layer_fields({"w": torch.ones(1)}, shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    }
    with pytest.raises(RuntimeError, match="another rotary embedding"):
        hf_config.require_same_rope(config, shape)
