"""The fast forward against transformers' modules, and the models that it does not support.

`test_target.py` compares trees, prefixes and cropped caches in every family.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.models.target import target_check
from outrider.models.target.fast_llama import supports
from outrider.models.target.lora import Adapters
from outrider.models.target.target import Target, TargetStates
from tests.families import FAMILIES, small_model
from tests.test_target import DEPTHS, PARENTS, PREFIX, causal, tree_mask

SUPPORTED = ("llama", "llama_tied", "qwen2", "qwen3", "mistral")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
ROPES = [{"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN]
CHANGES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in SUPPORTED),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    *(("llama", {"rope_parameters": {**rope, "rope_theta": 100.0}}) for rope in ROPES),
]


def tree_after_prefix(target: Target, slots: int = 1) -> TargetStates:
    """The tree of `test_target.py`, after the same prompt in every slot."""
    cache = target.new_cache(64, slots)
    prompt = (torch.arange(PREFIX) + 3).expand(slots, -1)
    at = torch.arange(PREFIX).expand(slots, -1)
    target.forward(prompt, at, causal(PREFIX).expand(slots, -1, -1), cache)
    tree = (torch.arange(len(PARENTS)) + 20).expand(slots, -1)
    depths = (torch.tensor(DEPTHS) + PREFIX).expand(slots, -1)
    return target.forward(tree, depths, tree_mask(PREFIX).expand(slots, -1, -1), cache)


def by_modules(target: Target, slots: int = 1) -> TargetStates:
    """The same by transformers' own modules."""
    fast, target.fast_forward = target.fast_forward, None
    try:
        return tree_after_prefix(target, slots)
    finally:
        target.fast_forward = fast


@pytest.mark.parametrize(("family", "changes"), CHANGES)
@pytest.mark.parametrize("fuse", [True, False])
def test_fast_forward_equals_transformers(family: str, changes: dict[str, Any], fuse: bool) -> None:
    model = small_model(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases other than the identity
                parameter.add_(0.1 * torch.randn(parameter.shape))
                assert "norm" in name or "bias" in name
    target = Target(model, taps=(0, 2), fuse=fuse)
    assert target.fast_forward is not None
    for slots in (1, 3):
        ours, theirs = tree_after_prefix(target, slots), by_modules(target, slots)
        torch.testing.assert_close(ours.last, theirs.last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.taps, theirs.taps, atol=1e-5, rtol=1e-5)


def test_bfloat16_rounds_as_transformers_does() -> None:
    """Neither is closer to float32: they differ by the order of sums only."""
    target = Target(small_model("qwen3").bfloat16(), taps=(0,))
    ours, theirs = tree_after_prefix(target), by_modules(target)
    difference = (ours.last - theirs.last).float().abs().mean() / theirs.last.float().abs().mean()
    assert difference < 2**-8


def test_only_decoding_uses_the_fast_forward() -> None:
    target = Target(small_model("llama"))
    assert target.fast_forward is not None
    calls = list[int]()
    target.fast_forward.register_forward_hook(lambda *_: calls.append(1))
    tree_after_prefix(target)
    assert len(calls) == 2
    target.trace(torch.arange(3, 7)[None], *_a_row())  # training: no cache
    with torch.enable_grad():
        ids = torch.arange(3, 7)[None]
        target.forward(ids, torch.arange(4)[None], causal(4), target.new_cache(8), grad=True)
    assert len(calls) == 2


def _a_row() -> tuple[Tensor, Tensor, Tensor]:
    zeros = torch.zeros(1, 4, dtype=torch.long)
    return zeros.bool(), zeros, torch.arange(4)[None]


def test_fused_weights_remain_the_models_parameters() -> None:
    model = small_model("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = Target(model)
    assert target.fast_forward is not None
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    first: Any = target.layers[0]
    q, k = first.self_attn.q_proj.weight, first.self_attn.k_proj.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr(), "no second copy"
    with torch.no_grad():
        k.mul_(0.5)  # in place: both forwards follow
    torch.testing.assert_close(tree_after_prefix(target).last, by_modules(target).last)


def test_trained_weights_are_not_fused() -> None:
    """A sharded optimizer moves them elsewhere; the fast forward reads them at every call."""
    target = Target(small_model("llama"), fuse=False)
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.data = parameter.data.clone() * 0.9
    torch.testing.assert_close(tree_after_prefix(target).last, by_modules(target).last)


def test_adapted_layers_use_their_modules() -> None:
    target = Target(small_model("llama"))
    plain = tree_after_prefix(target).last
    pairs = Adapters(target.layers, rank=2, alpha=4.0)
    torch.nn.init.normal_(pairs.pairs["0/mlp/up_proj"].b)  # type: ignore[arg-type]
    with pairs.active(target.layers), torch.no_grad():
        adapted = tree_after_prefix(target).last
        torch.testing.assert_close(adapted, by_modules(target).last, atol=0.0, rtol=0.0)
    assert (adapted - plain).abs().max() > 0.01
    torch.testing.assert_close(tree_after_prefix(target).last, plain)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SUPPORTED])
def test_other_families_use_their_modules(family: str) -> None:
    assert Target(small_model(family)).fast_forward is None


def test_similar_models_are_not_supported() -> None:
    class Packed(nn.Linear):
        """A subclass of Linear, as quantised maps are."""

    model = small_model("llama")
    assert supports(model, model.model)
    other = copy.deepcopy(model)
    inside = other.model.layers[1].mlp
    inside.up_proj = Packed(inside.up_proj.in_features, inside.up_proj.out_features, bias=False)
    assert not supports(other, other.model)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    other = small_model("llama", rope_parameters=dynamic)
    assert not supports(other, other.model)
    other = small_model("llama", hidden_act="gelu")
    assert not supports(other, other.model)
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.extra_norm = nn.Identity()
    assert not supports(other, other.model)


def test_a_wrong_fast_forward_is_detected_and_dropped() -> None:
    """`check_target` runs on every load; transformers' modules are the reference."""
    target = Target(small_model("llama"))
    assert target.fast_forward is not None
    for layer in target.fast_forward._layers:
        layer.scale *= 1.5
    target_check.check_target(target)
    assert target.fast_forward is None
    torch.testing.assert_close(tree_after_prefix(target).last, by_modules(target).last)
