"""LoRA adapters of frozen layers: what they add, and when."""

import copy

import pytest
import torch
from torch import Tensor, nn

from outrider.models.target.lora import Adapters, LoraPair, detach_adapters, linear_layers

RANK, ALPHA = 3, 12.0


def layers(seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in "ab")


def adapters(of: nn.Module, fresh: bool = False, seed: int = 1) -> Adapters:
    torch.manual_seed(seed)
    made = Adapters(of, RANK, ALPHA)
    if not fresh:
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made


def run(through: nn.ModuleList, x: Tensor) -> Tensor:
    out: Tensor = nn.Sequential(*through)(x)
    return out


def merged(of: nn.ModuleList, by: Adapters) -> nn.ModuleList:
    """A copy whose matrices are W + (alpha / rank) B A."""
    copied = copy.deepcopy(of)
    with torch.no_grad():
        for name, linear in linear_layers(copied):
            pair = by.pairs[name]
            assert isinstance(pair, LoraPair)
            linear.weight += ALPHA / RANK * pair.b @ pair.a
    return copied


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_every_linear_map_has_one_named_pair() -> None:
    made = adapters(layers(), fresh=True)
    shapes = {name: tuple(p.shape) for name, p in made.named_parameters()}
    assert shapes == {
        f"pairs.{layer}/{place}.{half}": shape
        for layer in (0, 1)
        for place, into, out in ((0, 6, 5), (2, 5, 6))
        for half, shape in (("a", (RANK, into)), ("b", (out, RANK)))
    }


def test_untrained_pairs_change_no_bit(x: Tensor) -> None:
    of = layers()
    made, before = adapters(of, fresh=True), run(of, x)
    assert all(bool(p.any()) == name.endswith(".a") for name, p in made.named_parameters())
    with made.active(of):
        assert torch.equal(run(of, x), before)


def test_active_layers_equal_merged_matrices(x: Tensor) -> None:
    of = layers()
    made = adapters(of)
    expected = run(merged(of, made), x)
    with made.active(of):
        torch.testing.assert_close(run(of, x), expected)


def test_no_hook_remains_after_an_error(x: Tensor) -> None:
    of = layers()
    before = run(of, x)
    with pytest.raises(RuntimeError, match="inside"), adapters(of).active(of):
        raise RuntimeError("inside")
    assert torch.equal(run(of, x), before)
    assert not any(module._forward_hooks for module in of.modules())


def test_attaching_twice_adds_one_output(x: Tensor) -> None:
    of = layers()
    made = adapters(of)
    expected = run(merged(of, made), x)
    made.attach(of)
    made.attach(of)
    with made.active(of), made.active(of):
        torch.testing.assert_close(run(of, x), expected)
    torch.testing.assert_close(run(of, x), expected)


def test_one_set_acts_at_a_time_and_the_earlier_is_restored(x: Tensor) -> None:
    of = layers()
    before, first, second = run(of, x), adapters(of), adapters(of, seed=2)
    by_first, by_second = run(merged(of, first), x), run(merged(of, second), x)
    first.attach(of)
    with second.active(of):
        torch.testing.assert_close(run(of, x), by_second)
    torch.testing.assert_close(run(of, x), by_first)
    detach_adapters(of)
    assert torch.equal(run(of, x), before)


def test_float32_pairs_adapt_bfloat16_layers(x: Tensor) -> None:
    of = layers().bfloat16()
    made = adapters(of)
    with made.active(of):
        found = run(of, x.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), run(merged(of.float(), made), x), atol=0.15, rtol=0.05
    )


def test_gradients_reach_the_pairs_and_not_the_layers(x: Tensor) -> None:
    of = layers().requires_grad_(False)
    made = adapters(of)
    with made.active(of):
        out = run(of, x)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in made.parameters())
    assert all(p.grad is None for p in of.parameters())


def test_layers_without_linear_maps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        Adapters(nn.ModuleList([nn.Tanh()]), RANK, ALPHA)
