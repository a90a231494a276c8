"""Exported files as engines read them: the loader's name rules, and the network.

vLLM runs by hand (docs/serving.md), and SGLang needs a GPU. Their rules for names are restated from
docs/formats.md, and the networks from the papers, on the files alone: weights, config.json and a
Hugging Face target whose hidden states are numbered as each engine numbers them. Engines feed rows
of the embedding as they are stored, whatever the target multiplies them by, and their layers have
silu alone. The targets are of families that differ in that: Gemma scales its embedding, Gemma-2
caps its logits, Granite multiplies everything, Qwen3 has other layers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import outside, tiny
from tests.outside import CASES, Case

SERVED = [c for c in CASES if c.name in ("eagle", "hass", "eagle3") and c.word != "native"]
STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]
TARGETS = ("llama", "gemma2", "gemma3", "granite", "qwen3")
# what EAGLE's engines do not apply after the target's head; the order of the logits is the same
IGNORED = {
    "eagle": ("gemma2", "granite"),  # EAGLE's own code: the head alone
    "vllm": ("gemma2",),  # no cap
    "sglang": ("granite",),  # no factor
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return tiny.target(request.param)


@pytest.fixture
def folder(case: Case, target: Target, tmp_path: Path) -> Path:
    drafter = case.drafter(target)
    case.format.write(drafter, target, getattr(drafter, "cfg", None), tmp_path / "out")
    return tmp_path / "out"


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def body_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("transformer_layer_config") or config.get("model") or config
    return found


# ---- parameters that an engine creates from config.json ------------------------------------------


def engine_layer(p: str, cfg: dict[str, Any], wide: int, norms: tuple[str, ...]) -> Shapes:
    hidden, inner, size = cfg["hidden_size"], cfg["intermediate_size"], cfg["head_dim"]
    rows = (cfg["num_attention_heads"] + 2 * cfg["num_key_value_heads"]) * size
    out: Shapes = {
        f"{p}.self_attn.qkv_proj.weight": (rows, wide * hidden),
        f"{p}.self_attn.o_proj.weight": (hidden, cfg["num_attention_heads"] * size),
        f"{p}.mlp.gate_up_proj.weight": (2 * inner, hidden),
        f"{p}.mlp.down_proj.weight": (hidden, inner),
    }
    out |= {f"{p}.{norm}.weight": (hidden,) for norm in (*norms, "post_attention_layernorm")}
    if cfg["model_type"] == "qwen3":
        out |= {f"{p}.self_attn.{x}_norm.weight": (size,) for x in "qk"}
    return out


def engine_eagle3(config: dict[str, Any], deeper: str) -> Shapes:
    """Return the parameters; the input norm of later layers has another name in each engine."""
    cfg = body_of(config)
    hidden, aux = cfg["hidden_size"], len(tap_ids(config))
    out: Shapes = {
        "model.fc.weight": (hidden, aux * hidden), "model.norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "model.embed_tokens.weight": (cfg["vocab_size"], hidden),
    }  # fmt: skip
    for i in range(cfg["num_hidden_layers"]):
        norms = ("hidden_norm", "input_layernorm") if i == 0 else (deeper,)
        out |= engine_layer(f"model.layers.{i}", cfg, 1 if i else 2, norms)
    if config.get("norm_before_fc"):
        out |= {"model.input_norm.weight": (aux * hidden,)}
    if config["fc_norm"]:
        out |= {f"model.fc_norm.{i}.weight": (hidden,) for i in range(aux)}
    return out


def engine_eagle(config: dict[str, Any], bias: bool) -> Shapes:
    cfg = body_of(config)
    hidden = cfg["hidden_size"]
    out = engine_layer("model.layers.0", cfg, 1, ())
    out |= {"model.fc.weight": (hidden, 2 * hidden)} | (
        {"model.fc.bias": (hidden,)} if bias else {}
    )
    return out | {"model.embed_tokens.weight": (cfg["vocab_size"], hidden)}


def tap_ids(config: dict[str, Any]) -> list[int]:
    name = "eagle_aux_hidden_state_layer_ids"
    return list(config.get(name) or config["eagle_config"][name])


# ---- names after the loader's rules --------------------------------------------------------------


def loaded(folder: Path, parameters: Shapes) -> Shapes:
    """Rename every key by the rules; several keys share one stacked parameter."""
    out: Shapes = {}
    for key, value in outside.weights(folder).items():
        if key in ("d2t", "t2d"):
            continue  # one becomes a table of ids, the other is ignored
        name = key.replace("midlayer.", "layers.0.")
        name = name if name.startswith("lm_head") else f"model.{name}"
        for part, whole in STACKED.items():
            name = name.replace(f".{part}.", f".{whole}.")
        assert name in parameters, f"{key} would be skipped silently, or fail"
        rows = out.get(name, (0,))[0] if any(w in name for w in STACKED.values()) else 0
        out[name] = (rows + value.shape[0], *value.shape[1:])
    return out


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_loader_fills_every_parameter(case: Case, folder: Path) -> None:
    config = config_of(folder)
    if case.name == "eagle3":
        deeper = "hidden_norm" if case.word == "sglang" else "input_layernorm"
        parameters = engine_eagle3(config, deeper)
    else:
        parameters = engine_eagle(config, bias=case.word == "sglang" or bool(config.get("bias")))
    found = loaded(folder, parameters)
    shared = {"model.embed_tokens.weight"}  # absent: the engine shares the target's
    assert {k: v for k, v in parameters.items() if k not in shared - found.keys()} == found


def test_medusa_keys_match_vllm(target: Target, tmp_path: Path) -> None:
    for case in (c for c in CASES if (c.name, c.word) == ("medusa", "vllm")):
        folder = tmp_path / str(case)
        case.format.write(case.drafter(target), target, None, folder)
        config = config_of(folder)
        hidden, size = config["hidden_size"], config["truncated_vocab_size"]
        expected: Shapes = {"lm_head.weight": (size, hidden)}
        if not config["original_lm_head"]:
            expected = {f"lm_heads.{h}.weight": (size, hidden) for h in range(config["num_heads"])}
        for h in range(config["num_heads"]):
            for n in range(config["num_hidden_layers"]):
                expected |= {f"blocks.{h}.layers.{n}.weight": (hidden, hidden)}
                expected |= (
                    {f"blocks.{h}.layers.{n}.bias": (hidden,)} if config["medusa_fc_bias"] else {}
                )
        if size < config["vocab_size"]:
            expected |= {"token_map": (size,)}
        assert {k: tuple(v.shape) for k, v in outside.weights(folder).items()} == expected


# ---- the network, from the files alone -----------------------------------------------------------


class Engine:
    """EAGLE or EAGLE-3 over the rows of one document, after the papers."""

    def __init__(self, folder: Path, word: str) -> None:
        self.config, self.w, self.word = config_of(folder), outside.weights(folder), word
        self.cfg = body_of(self.config)
        kind = {"llama": hf.LlamaConfig, "qwen3": hf.Qwen3Config}[self.cfg["model_type"]]
        self.rotary = LlamaRotaryEmbedding(
            kind(**{k: v for k, v in self.cfg.items() if k != "model_type"})
        )
        self.first = "midlayer" if "midlayer.mlp.up_proj.weight" in self.w else "layers.0"
        self.three = "norm.weight" in self.w

    def norm(self, name: str, x: Tensor) -> Tensor:
        size = x.square().mean(-1, keepdim=True) + self.cfg["rms_norm_eps"]
        out: Tensor = x / size.sqrt() * self.w[f"{name}.weight"]
        return out

    def heads(self, p: str, which: str, x: Tensor) -> Tensor:
        out: Tensor = (x @ self.w[f"{p}.self_attn.{which}_proj.weight"].T).unflatten(
            -1, (-1, self.cfg["head_dim"])
        )
        if f"{p}.self_attn.{which}_norm.weight" in self.w:
            out = self.norm(f"{p}.self_attn.{which}_norm", out)
        return out.transpose(0, 1)[None]

    def layer(self, p: str, residual: Tensor, read: Tensor) -> Tensor:
        q, k, v = (self.heads(p, which, read) for which in "qkv")
        cos, sin = self.rotary(read, torch.arange(len(read))[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        flat = out[0].transpose(0, 1).flatten(1)
        x = residual + flat @ self.w[f"{p}.self_attn.o_proj.weight"].T
        read = self.norm(f"{p}.post_attention_layernorm", x)
        gate, up, down = (self.w[f"{p}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return x + (F.silu(read @ gate.T) * (read @ up.T)) @ down.T

    def run(self, embedding: Tensor, state: Tensor) -> Tensor:
        """The last layer's output at every row; both arguments [T, H]."""
        if not self.three:
            joint = torch.cat([embedding, state], -1) @ self.w["fc.weight"].T
            x = joint + self.w.get("fc.bias", torch.zeros(()))
            return self.layer("layers.0", x, x)
        normed = self.norm(f"{self.first}.hidden_norm", state)
        read = torch.cat([self.norm(f"{self.first}.input_layernorm", embedding), normed], -1)
        before = self.config.get("norm_before_residual", False)
        x = self.layer(self.first, normed if before else state, read)
        for i in range(1, self.cfg["num_hidden_layers"]):
            norm = "hidden_norm" if self.word == "sglang" else "input_layernorm"
            x = self.layer(f"layers.{i}", x, self.norm(f"layers.{i}.{norm}", x))
        return x

    def start(self, states: tuple[Tensor, ...]) -> Tensor:
        """Return the first state, from hidden states; the last one is after the final norm."""
        if not self.three:
            return states[-1]
        shift = 1 if self.word == "sglang" else 0  # SGLang numbers outputs, others inputs
        aux = [states[i + shift] for i in tap_ids(self.config)]
        if self.config["fc_norm"]:
            aux = [self.norm(f"fc_norm.{i}", tap) for i, tap in enumerate(aux)]
        joint = torch.cat(aux, -1)
        if self.config.get("norm_before_fc"):
            joint = self.norm("input_norm", joint)
        return joint @ self.w["fc.weight"].T

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """Return logits over the target's vocabulary; -inf outside the draft vocabulary."""
        if not self.three:
            return self.finish(x @ head.T)
        logits = self.norm("norm", x) @ self.w["lm_head.weight"].T
        out = torch.full((len(x), self.cfg["vocab_size"]), -torch.inf)
        d2t = self.w.get("d2t", torch.zeros(logits.shape[1], dtype=torch.long))
        out[:, torch.arange(len(d2t)) + d2t] = logits
        return out

    def finish(self, logits: Tensor) -> Tensor:
        """Apply what the engine reads from the folder."""
        if self.word == "vllm":
            logits = logits * self.config.get("logit_scale", 1.0)
        cap = self.config.get("final_logit_softcapping") if self.word == "sglang" else None
        return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("case", SERVED, ids=str)
@torch.no_grad()
def test_exported_network_has_equal_logits(case: Case, folder: Path, target: Target) -> None:
    """Depth 1 at every row, depth 2 at one row."""
    drafter, engine = case.drafter(target), Engine(folder, case.word)
    assert engine.cfg["hidden_act"] == "silu"
    ids = torch.randint(3, tiny.VOCAB, (1, 12), generator=torch.Generator().manual_seed(4))
    hidden = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    states = tuple(state[0] for state in hidden)
    embedding, head = target.embedding.weight[ids[0]], target.head_weight
    start = engine.start(states)[:-1]
    first = engine.run(embedding[1:], start)
    ours = draft_logits(drafter, target, ids)
    ignored = not engine.three and target.name in IGNORED[case.word]
    finish = target.scale_logits if ignored else torch.nn.Identity()
    compare(finish(engine.logits(first, head)[:10]), ours[0][:10])
    row = 6
    fed = first[row : row + 1]
    if engine.three and engine.config.get("norm_output"):
        fed = engine.norm("norm", fed)
    rows = torch.cat([start[: row + 1], fed])
    second = engine.run(embedding[1 : row + 3], rows)
    compare(finish(engine.logits(second[-1:], head)), ours[1][row : row + 1])


def draft_logits(drafter: Drafter, target: Target, ids: Tensor) -> list[Tensor]:
    """Return logits over the target's vocabulary, of depths 1, 2, .."""
    target.set_taps(drafter.taps)
    row = torch.arange(ids.shape[1])[None]
    trace: Trace = target.trace(ids, torch.ones_like(ids).bool(), torch.zeros_like(ids), row)
    found = []
    for guess in drafter.unroll(trace):
        logits = drafter.head(tiny.spread(guess, trace)[0])
        out = torch.full((len(logits), tiny.VOCAB), -torch.inf)
        out[:, drafter.vocab.target_ids] = logits
        found.append(out)
    return found


def compare(engine: Tensor, ours: Tensor) -> None:
    assert torch.equal(engine.isinf(), ours.isinf())
    torch.testing.assert_close(engine.nan_to_num(0), ours.nan_to_num(0), atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_exported_medusa_heads_have_equal_logits(target: Target, tmp_path: Path) -> None:
    """Head i reads the state after the final norm and predicts the token i + 2 ahead."""
    for case in (c for c in CASES if c.name == "medusa" and c.word != "native"):
        drafter, folder = case.drafter(target), tmp_path / str(case)
        case.format.write(drafter, target, None, folder)
        config, w = config_of(folder), outside.weights(folder)
        x = torch.randn(5, 32)
        heads = config.get("num_heads") or config["medusa_num_heads"]
        layers = config.get("num_hidden_layers") or config["medusa_num_layers"]
        for h in range(heads):
            out = x
            for n in range(layers):
                name = f"blocks.{h}.layers.{n}" if case.word == "vllm" else f"{h}.{n}.linear"
                out = out + F.silu(out @ w[f"{name}.weight"].T + w[f"{name}.bias"])
            last = f"lm_heads.{h}.weight" if case.word == "vllm" else f"{h}.{layers}.weight"
            matrix = w.get(last, w.get("lm_head.weight", target.head_weight))
            logits = out @ matrix.T * (config.get("logit_scale", 1.0) if case.word == "vllm" else 1)
            if last not in w and (case.word == "medusa" or target.logit_cap):  # order-equal
                logits = target.scale_logits(logits)
            ours = drafter.heads_by_depth([drafter.blocks[h](x)], [h + 1])  # type: ignore[operator, index]
            torch.testing.assert_close(logits, ours, atol=1e-4, rtol=1e-4)
        if "token_map" in w:
            assert torch.equal(w["token_map"], drafter.vocab.target_ids)
