"""Parts of a target's layers against its whole forward; split caches against undivided ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.target.layer_parts import Part, limit_layers
from outrider.models.target.target import Target
from tests.families import FAMILIES, small_model

PREFIX, TREE = 9, [[-1, 0, 0, 1], [-1, 0, 1, 1]]  # parents of two prompts' trees
each_family = pytest.mark.parametrize("family", FAMILIES)
each_path = pytest.mark.parametrize("modules", [False, True], ids=["fast", "modules"])


def target_of(family: str, modules: bool = False) -> Target:
    target = Target(small_model(family), taps=(0, 2))
    if modules:
        target.fast_forward = None
    return target


def prefix_rows() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(3, 60, (2, PREFIX), generator=torch.Generator().manual_seed(1))
    visible = torch.ones(2, PREFIX, PREFIX, dtype=torch.bool).tril()
    return ids, torch.arange(PREFIX).expand(2, -1), visible


def tree_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and mask of two trees after the prefix."""
    ids = torch.tensor([[5, 9, 11, 13], [7, 20, 21, 22]])
    visible = torch.ones(2, 4, PREFIX + 4, dtype=torch.bool)
    visible[:, :, PREFIX:] = False
    depths = torch.zeros(2, 4, dtype=torch.long)
    for prompt, parents in enumerate(TREE):
        for node, parent in enumerate(parents):
            if parent >= 0:
                visible[prompt, node] = visible[prompt, parent]
                depths[prompt, node] = depths[prompt, parent] + 1
            visible[prompt, node, PREFIX + node] = True
    return ids, PREFIX + depths, visible


def read_prefix(target: Target, splits: tuple[int, ...] = ()) -> KVCache | SplitCache:
    cache = target.new_cache(PREFIX + 8, 2, splits)
    target.forward(*prefix_rows(), cache)
    return cache


@each_family
@each_path
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@torch.inference_mode()
def test_two_parts_equal_the_whole_forward(family: str, modules: bool, exit_layer: int) -> None:
    target = target_of(family, modules)
    ids, positions, visible = tree_rows()
    whole_cache = read_prefix(target)
    whole = target.forward(ids, positions, visible, whole_cache)
    cache = read_prefix(target, (exit_layer,))
    assert isinstance(cache, SplitCache)
    lower = target.forward(ids, positions, visible, cache.parts[0], part=Part(0, exit_layer))
    assert [part.lengths for part in cache.parts] == [[PREFIX + 4] * 2, [PREFIX] * 2]
    rest = Part(exit_layer, hidden=lower.last)
    upper = target.forward(ids, positions, visible, cache.parts[1], part=rest)
    torch.testing.assert_close(upper.last, whole.last, rtol=1e-5, atol=1e-5)
    taps = torch.cat([lower.taps, upper.taps], dim=-1)
    torch.testing.assert_close(taps, whole.taps, rtol=1e-5, atol=1e-5)
    for layer in range(target.num_layers):
        for slot in range(2):
            for mine, expected in zip(
                cache.rows(layer, slot), whole_cache.rows(layer, slot), strict=True
            ):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@each_family
@each_path
@torch.inference_mode()
def test_the_final_norm_turns_the_last_layer_into_the_last_state(
    family: str, modules: bool
) -> None:
    target = target_of(family, modules)
    target.set_taps([target.num_layers - 1])
    states = target.forward(*prefix_rows())
    torch.testing.assert_close(target.final_norm(states.taps), states.last)


def _silence(module: Any) -> None:
    """Set the last linear map of a sublayer to zero."""
    *_, last = [m for m in module.modules() if getattr(m, "weight", None) is not None]
    last.weight.data.zero_()
    if getattr(last, "bias", None) is not None:
        last.bias.data.zero_()


def _silence_experts(mlp: Any) -> None:
    for name, weight in mlp.named_parameters():
        if "down_proj" in name:
            weight.data.zero_()


@each_family
@each_path
@torch.inference_mode()
def test_a_skipped_sublayer_is_one_whose_output_is_zero(family: str, modules: bool) -> None:
    """The reference is a model whose output projections are zero in these sublayers."""
    target, reference = target_of(family, modules), target_of(family, True)
    skips = Part(skip_attention=frozenset({1, 3}), skip_mlp=frozenset({0, 3}))
    for i, layer in enumerate(reference.layers):
        children: dict[str, Any] = dict(layer.named_children())
        attention = next(children[n] for n in ("self_attn", "attn", "attention") if n in children)
        if i in skips.skip_attention:
            name = next(n for n in ("o_proj", "c_proj", "dense") if hasattr(attention, n))
            _silence(getattr(attention, name))
        mlp = next(children[n] for n in ("mlp", "feed_forward") if n in children)
        if i in skips.skip_mlp and any("experts" in n for n, _ in mlp.named_modules()):
            _silence_experts(mlp)
        elif i in skips.skip_mlp:
            names = ("down_proj", "c_proj", "dense_4h_to_h")
            _silence(next(getattr(mlp, n) for n in names if hasattr(mlp, n)))
    ids, positions, visible = tree_rows()
    expected = reference.forward(ids, positions, visible, read_prefix(reference)).last
    cache = target.new_cache(PREFIX + 8, 2)
    target.forward(*prefix_rows(), cache, part=skips)
    found = target.forward(ids, positions, visible, cache, part=skips).last
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    whole = target.forward(ids, positions, visible, read_prefix(target)).last
    assert (found - whole).abs().max() > 1e-2


def test_layers_run_as_before_after_a_part() -> None:
    model = small_model("gpt2")
    target = Target(model)
    before = target.forward(*prefix_rows()).last
    with pytest.raises(ZeroDivisionError), limit_layers(target.layers, Part(1, 2)):
        raise ZeroDivisionError
    assert torch.equal(target.forward(*prefix_rows()).last, before)
    assert all("forward" not in vars(layer) for layer in target.layers)


def test_a_layer_without_a_known_sublayer_is_refused() -> None:
    layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2))])
    part = Part(skip_mlp=frozenset({0}))
    with pytest.raises(RunError, match="no part named mlp"), limit_layers(layers, part):
        pass


@pytest.mark.parametrize("splits", [(0,), (4,), (2, 2), (3, 1)])
def test_an_empty_range_is_refused(splits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        SplitCache(1, 8, 4, torch.device("cpu"), splits)


@torch.inference_mode()
def test_draft_rows_are_written_after_the_length_and_dropped() -> None:
    """Lengths are as before; the next forward replaces the rows."""
    target = target_of("llama")
    cache, fresh = read_prefix(target), read_prefix(target)
    ids, positions, visible = tree_rows()
    with cache.after_draft(0):
        target.forward(ids + 1, positions, visible, cache)
        assert cache.lengths == [PREFIX + 4] * 2
    assert cache.lengths == [PREFIX] * 2
    found = target.forward(ids, positions, visible, cache).last
    assert torch.equal(found, target.forward(ids, positions, visible, fresh).last)
