"""MTP modules in a target's folder: tiny checkpoints in both layouts against a reference."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.models.drafters.mtp import Mtp
from outrider.models.formats import mtp_layouts
from outrider.models.target.target import Target
from tests import tiny

H, HEADS, KEY_HEADS, SIZE, INNER, LAYERS = 32, 4, 2, 8, 48, 4  # of the small llama
LAYER = {
    "input_layernorm": (H,),
    "post_attention_layernorm": (H,),
    "self_attn.q_proj": (HEADS * SIZE, H),
    "self_attn.k_proj": (KEY_HEADS * SIZE, H),
    "self_attn.v_proj": (KEY_HEADS * SIZE, H),
    "self_attn.o_proj": (H, HEADS * SIZE),
    "mlp.gate_proj": (INNER, H),
    "mlp.up_proj": (INNER, H),
    "mlp.down_proj": (H, INNER),
}
QK = {"self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,)}
Ends = tuple[str, str, str, str]  # norm of the embedding, norm of the state, joint, last norm
DEEPSEEK: Ends = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN: Ends = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def weights(prefix: str, ends: Ends, layer: str, seed: int, qk: bool = False) -> dict[str, Tensor]:
    """One random module under the names of a layout."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(zip(ends, [(H,), (H,), (H, 2 * H), (H,)], strict=True))
    shapes |= {layer + name: shape for name, shape in {**LAYER, **(QK if qk else {})}.items()}
    return {
        f"{prefix}{name}.weight": 0.3 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def body() -> dict[str, Tensor]:
    """Other weights of the folder: the target's own."""
    own = {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(2, 2) for i in range(LAYERS)}
    return {**own, "model.norm.weight": torch.ones(2), "model.embed_tokens.weight": torch.ones(2)}


def deepseek(modules: int = 2, qk: bool = False) -> dict[str, Tensor]:
    out = body()
    for k in range(modules):
        prefix = f"model.layers.{LAYERS + k}."
        out |= weights(prefix, DEEPSEEK, "", seed=k, qk=qk)
        out |= {f"{prefix}embed_tokens.weight": torch.ones(2, 2)}
        out |= {f"{prefix}shared_head.head.weight": torch.ones(2, 2)}
    return out


def qwen(qk: bool = False) -> dict[str, Tensor]:
    return {**body(), **weights("mtp.", QWEN, "layers.0.", seed=7, qk=qk)}


def stored(folder: Path, tensors: dict[str, Tensor], shards: int = 1, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS, **config}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {key: f"model-{i % shards}.safetensors" for i, key in enumerate(tensors)}
    for name in set(where.values()):
        save_file({k: v for k, v in tensors.items() if where[k] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def initialised(target: Target, folder: Path, **changes: Any) -> Mtp:
    drafter = tiny.drafter("mtp", target, init="target", warm_start=str(folder), **changes)
    assert isinstance(drafter, Mtp)
    drafter.initialise(target, [])
    return drafter.eval()


# ---- reference implementation after the papers, on the file's tensors ----------------------------


class Module:
    """One module over all rows of one document."""

    def __init__(self, target: Target, raw: dict[str, Tensor], ends: Ends, layer: str) -> None:
        self.shape, self.raw, self.ends, self.layer = target.shape(), raw, ends, layer
        self.one = 1.0 if ends == QWEN else 0.0  # its norms multiply by 1 + weight

    def norm(self, name: str, x: Tensor) -> Tensor:
        size = (x.square().mean(-1, keepdim=True) + self.shape.eps).sqrt()
        return x / size * (self.raw[f"{name}.weight"] + self.one)

    def heads(self, which: str, x: Tensor) -> Tensor:
        """[T, heads, C], rotated as complex numbers; key heads repeated."""
        name = f"{self.layer}self_attn.{which}"
        out: Tensor = (x @ self.raw[f"{name}_proj.weight"].T).unflatten(-1, (-1, SIZE))
        if which == "v":
            return out.repeat_interleave(HEADS // KEY_HEADS, dim=1)
        if f"{name}_norm.weight" in self.raw:
            out = self.norm(f"{name}_norm", out)
        turns = self.shape.rope_theta ** (-torch.arange(0, SIZE, 2) / SIZE)
        angle = torch.arange(len(x))[:, None] * turns
        number = torch.complex(*out.chunk(2, dim=-1)) * torch.polar(torch.ones(()), angle)[:, None]
        out = torch.cat([number.real, number.imag], dim=-1)
        return out if which == "q" else out.repeat_interleave(HEADS // KEY_HEADS, dim=1)

    def __call__(self, embedding: Tensor, state: Tensor) -> Tensor:
        """Output before the last norm; both arguments [T, H]."""
        first, second, joint, _ = self.ends
        pair = torch.cat([self.norm(first, embedding), self.norm(second, state)], dim=-1)
        x = pair @ self.raw[f"{joint}.weight"].T
        read = self.norm(f"{self.layer}input_layernorm", x)
        q, k, v = (self.heads(which, read) for which in "qkv")
        scores = torch.einsum("tac,sac->ats", q, k) / SIZE**0.5
        causal = torch.ones(len(x), len(x)).tril().bool()
        gathered = torch.einsum("ats,sac->tac", scores.where(causal, -torch.inf).softmax(-1), v)
        x = x + gathered.flatten(1) @ self.raw[f"{self.layer}self_attn.o_proj.weight"].T
        read = self.norm(f"{self.layer}post_attention_layernorm", x)
        gate, up, down = (
            self.raw[f"{self.layer}mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        out: Tensor = x + (F.silu(read @ gate.T) * (read @ up.T)) @ down.T
        return out


def expected(target: Target, modules: list[Module], ids: Tensor, last: Tensor) -> Iterator[Tensor]:
    """Logits [T-k-1, V] of depth k = 1, 2, .. for one document."""
    state = last
    for k, module in enumerate(modules, start=1):
        rows = len(ids) - k - 1
        state = module.norm(module.ends[-1], module(target.embed(ids[k:-1]), state[:rows]))
        yield target.logits(state)


def check(target: Target, drafter: Mtp, modules: list[Module]) -> None:
    ids = torch.randint(3, tiny.VOCAB, (1, 12), generator=torch.Generator().manual_seed(4))
    row = torch.arange(12)[None]
    trace = target.trace(ids, torch.ones_like(ids).bool(), torch.zeros_like(ids), row)
    found = [drafter.head(tiny.spread(guess, trace))[0] for guess in drafter.unroll(trace)]
    reference = list(expected(target, modules, ids[0], trace.last[0]))
    assert len(found) == len(reference)
    for logits, want in zip(found, reference, strict=True):
        want = want if drafter.vocab.is_full else want[:, drafter.vocab.target_ids]
        torch.testing.assert_close(logits[: len(want)], want, atol=1e-4, rtol=1e-4)


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("qk", [False, True])
@torch.no_grad()
def test_deepseek_layout_matches_reference(
    target: Target, tmp_path: Path, shards: int, qk: bool
) -> None:
    tensors = deepseek(2, qk)
    drafter = initialised(target, stored(tmp_path, tensors, shards), depths=2, qk_norm=qk)
    raw = [part(tensors, f"model.layers.{LAYERS + k}.") for k in range(2)]
    check(target, drafter, [Module(target, each, DEEPSEEK, "") for each in raw])


@pytest.mark.parametrize("qk", [False, True])
@torch.no_grad()
def test_qwen3_next_layout_matches_reference(target: Target, tmp_path: Path, qk: bool) -> None:
    tensors = qwen(qk)
    drafter = initialised(target, stored(tmp_path, tensors), depths=1, qk_norm=qk)
    check(target, drafter, [Module(target, part(tensors, "mtp."), QWEN, "layers.0.")])


@torch.no_grad()
def test_additional_modules_copy_the_last(target: Target, tmp_path: Path) -> None:
    tensors = deepseek(2)
    drafter = initialised(target, stored(tmp_path, tensors), depths=3)
    raw = [part(tensors, f"model.layers.{LAYERS + k}.") for k in (0, 1, 1)]
    check(target, drafter, [Module(target, each, DEEPSEEK, "") for each in raw])


def test_recurrent_drafter_loads_the_first_module(target: Target, tmp_path: Path) -> None:
    tensors = deepseek(2)
    drafter = initialised(target, stored(tmp_path, tensors), mode="recurrent")
    first = tensors[f"model.layers.{LAYERS}.eh_proj.weight"]
    assert torch.equal(drafter.state_dict()["stages.0.eh_proj.weight"], first)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "self_attn.kv_a_proj_with_mqa.weight",  # latent attention
        "mlp.experts.0.gate_proj.weight",
        "mlp.gate.weight",
        "self_attn.q_proj.bias",
        "eh_proj.weight_scale_inv",
    ],
)
def test_unsupported_key_is_named(tmp_path: Path, key: str) -> None:
    for prefix, tensors in (("model.layers.4.", deepseek(1)), ("mtp.layers.0.", qwen())):
        folder = stored(tmp_path, {**tensors, prefix + key: torch.ones(2)})
        with pytest.raises(RunError, match=re.escape(prefix + key)):
            mtp_layouts.read_modules(folder, LAYERS)


@pytest.mark.parametrize("prefix", ["model.layers.4.", "mtp."])
def test_missing_weight_is_named(tmp_path: Path, prefix: str) -> None:
    tensors = deepseek(1) if prefix != "mtp." else qwen()
    name = "mlp.up_proj.weight" if prefix != "mtp." else "layers.0.mlp.up_proj.weight"
    del tensors[prefix + name]
    with pytest.raises(RunError, match=f"lacks {re.escape(name)}"):
        mtp_layouts.read_modules(stored(tmp_path, tensors), LAYERS)


def test_missing_key_norm_is_refused(tmp_path: Path) -> None:
    tensors = deepseek(1, qk=True)
    del tensors["model.layers.4.self_attn.k_norm.weight"]
    with pytest.raises(RunError, match=r"lacks self_attn\.k_norm\.weight"):
        mtp_layouts.read_modules(stored(tmp_path, tensors), LAYERS)


def test_gap_between_modules_is_refused(tmp_path: Path) -> None:
    tensors = {k: v for k, v in deepseek(3).items() if not k.startswith("model.layers.5.")}
    with pytest.raises(RunError, match="gaps"):
        mtp_layouts.read_modules(stored(tmp_path, tensors), LAYERS)


def test_folder_without_modules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no MTP modules"):
        mtp_layouts.read_modules(stored(tmp_path, body()), LAYERS)


@pytest.mark.parametrize(
    "config",
    [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.25}}],
)
def test_partial_rotary_embedding_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="rotary embedding is partial"):
        mtp_layouts.read_modules(stored(tmp_path, deepseek(1), **config), LAYERS)


def test_gated_queries_are_refused(target: Target, tmp_path: Path) -> None:
    """The attention of Qwen3-Next itself."""
    key = "mtp.layers.0.self_attn.q_proj.weight"
    folder = stored(tmp_path, {**qwen(), key: torch.ones(2 * HEADS * SIZE, H)})
    with pytest.raises(RunError, match=r"size mismatch for block\.self_attn\.q_proj"):
        initialised(target, folder)


@pytest.mark.parametrize("change", [{"order": "state_first"}, {"qk_norm": True}])
def test_contradicting_settings_are_refused(
    target: Target, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"drafter.{next(iter(change))}"):
        initialised(target, stored(tmp_path, deepseek(1)), **change)


def test_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path, deepseek(1), shards=2)
    (folder / "model-0.safetensors").write_bytes(b"torn")
    with pytest.raises(RunError, match=r"model-0\.safetensors cannot be read"):
        mtp_layouts.read_modules(folder, LAYERS)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"mtp.fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(RunError, match="does not map weights to files"):
        mtp_layouts.read_modules(folder, LAYERS)
    index.unlink()
    with pytest.raises(RunError, match="neither"):
        mtp_layouts.read_modules(folder, LAYERS)
