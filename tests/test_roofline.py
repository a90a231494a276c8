"""Roofline: worked examples, and sizes of real modules."""

from typing import Any

import pytest
import torch

from outrider.eval.plan.roofline import (
    ASSUMPTIONS,
    MACHINES,
    Machine,
    ModelSize,
    RooflineTimes,
    drafter_sizes,
    forward_seconds,
)
from outrider.eval.theory import expected_tokens
from outrider.models.decode.costs.round_costs import PLAIN, DraftShape, Grid
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target
from tests import tiny

TOY = Machine("toy", bandwidth=10.0, flops=100.0, fixed=1.0)
MODEL = ModelSize(parameters=20, weights=40, kv=2, hidden=3, layers=2)
LARGE = ModelSize(8e9, 16e9, 131_072, 4096, 32)  # an 8B with grouped queries, bfloat16
SMALL = ModelSize(0.4e9, 0.8e9, 4096, 4096, 1)  # a layer and a head of it
H100 = MACHINES["h100"]
LONG = ModelSize(6.75e9, 13.5e9, 524_288, 4096, 32)  # a 7B with as many key heads as query heads
RATES = Machine("MagicDec's", bandwidth=2e12, flops=3e14, fixed=0.0)


def chain(depth: int) -> DraftShape:
    return DraftShape(depth, depth, (1,) * depth)


def test_forward_seconds_worked_example() -> None:
    """Reading 40 + 2 x 6 x 2 = 64 bytes; 2 x 2 x (2 x 20 + 6 x 4 x 3 x 2) = 736 operations."""
    assert forward_seconds(TOY, MODEL, batch=2, tokens=2, context=5) == pytest.approx(7.36 + 1)
    slow = Machine("slow", bandwidth=4.0, flops=100.0, fixed=0.0)
    assert forward_seconds(slow, MODEL, batch=2, tokens=2, context=5) == pytest.approx(16)


def test_model_without_weights_takes_no_time() -> None:
    assert forward_seconds(TOY, ModelSize(0, 0, 0, 3, 2), 4, 4, 100) == 0


def test_stored_scales_all_bytes() -> None:
    half = MODEL.stored(1)
    assert (half.parameters, half.weights, half.kv) == (20, 20, 1)
    assert half.stored(2) == MODEL


def test_round_is_the_sum_of_its_forwards() -> None:
    """`absorb` reads 10 bytes, the first step nothing, deeper ones 20: 2 + 0 + 3 + 3 seconds."""
    sizes = [ModelSize(count, count, 0, 1, 0) for count in (10, 0, 20)]
    times = RooflineTimes(Machine("toy", 10.0, 1e9, 1.0), MODEL, sizes)
    assert times.parts(chain(3), batch=1, context=7).draft == pytest.approx(8000)
    assert times.parts(PLAIN, 1, 5) == pytest.approx((0.0, 1000 * (1 + 50 / 10), 0.0))


def test_arithmetic_of_a_step_grows_with_nodes() -> None:
    """Bound by arithmetic: 2 operations per parameter and node; 1 node, then 3."""
    times = RooflineTimes(Machine("toy", 1e9, 10.0, 0.0), MODEL, [ModelSize(10, 10, 0, 1, 0)])
    tree = DraftShape(depth=2, nodes=6, parents=(1, 3))
    assert times.parts(tree, 1, 7).draft == pytest.approx(1000 * 2 * (1 + 1 + 3))


def test_budget_limits_the_drafter_only() -> None:
    free, bound = (RooflineTimes(H100, LARGE, (LARGE,), budget) for budget in (None, 512))
    assert free.parts(chain(4), 64, 512) == bound.parts(chain(4), 64, 512)
    long, short = free.parts(chain(4), 64, 32_768), bound.parts(chain(4), 64, 32_768)
    assert long.draft > 3 * short.draft
    assert long.target == short.target


def _against_plain(batch: int, context: int, budget: int, gamma: int) -> tuple[float, float]:
    """MagicDec's T_D / T_T for a target that drafts for itself, and T_V / T_T."""
    times = RooflineTimes(RATES, LONG, (LONG,), budget)
    plain, cost = times.parts(PLAIN, batch, context), times.parts(chain(gamma), batch, context)
    return cost.draft / (gamma + 1) / plain.target, cost.target / plain.target


def test_magicdec_limit_of_long_contexts() -> None:
    """S -> large: T_D / T_T -> b / S, T_V / T_T -> 1."""
    draft, verify = _against_plain(batch=256, context=200_000, budget=50_000, gamma=3)
    assert draft == pytest.approx(1 / 4, rel=0.01)
    assert verify == pytest.approx(1, rel=0.01)


def test_self_speculation_gains_nothing_at_short_contexts() -> None:
    """Both forwards read little but the weights."""
    assert _against_plain(1, 600, 512, gamma=3) == pytest.approx((1, 1), rel=0.01)


@pytest.mark.parametrize(("context", "grows"), [(32_768, True), (64, False)])
def test_effect_of_batch_size_depends_on_the_context(context: int, grows: bool) -> None:
    """The paper's claim, alpha 0.8; a drafter of a fiftieth of the target for the short context."""
    drafter, budget = (LONG, 512) if grows else (ModelSize(0.27e9, 0.27e9, 10_000, 50, 50), 1024)
    times = RooflineTimes(RATES, LONG, (ModelSize(0, 0, 0, 1, 0), drafter), budget)
    speedups = [
        expected_tokens(0.8, 4)
        * times.parts(PLAIN, batch, context).total
        / times.parts(chain(4), batch, context).total
        for batch in (1, 8, 64, 256)
    ]
    assert speedups == sorted(speedups, reverse=not grows)
    assert abs(speedups[0] - speedups[-1]) > 0.5


def test_memory_warning() -> None:
    card, large = MACHINES["rtx4090"], ModelSize(70e9, 140e9, 1e6, 8192, 80)
    (text,) = RooflineTimes(card, large, [large]).memory_warnings(Grid([1], contexts=[64]))
    assert "280 GB" in text
    assert "RTX 4090 has 24 GB" in text
    small, steps = ModelSize(1e9, 2e9, 1e6, 64, 8), [ModelSize(1, 2, 0, 64, 1)] * 3
    times = RooflineTimes(card, small, steps)
    assert times.memory_warnings(Grid([1], contexts=[1000])) == ()
    (text,) = times.memory_warnings(Grid([1], batches=[1, 23, 24], contexts=[1000]))
    assert "Batch 23 with 1000 tokens each" in text


def test_assumptions_have_the_machine_and_its_rates() -> None:
    text = RooflineTimes(H100, LARGE, (SMALL,)).assumptions
    assert text[0].startswith("H100 SXM 80GB: 3.35 TB/s, 989.4 TFLOP/s, 50 microseconds")
    assert text[1:] == ASSUMPTIONS


def test_presets_are_memory_bound_at_batch_one_and_compute_bound_at_large_batches() -> None:
    """The ridge of every preset is between 100 and 400 operations per byte."""
    for machine in MACHINES.values():
        assert 100 < machine.flops / machine.bandwidth < 400
        one, many = (forward_seconds(machine, LARGE, 1, n, 0) for n in (1, 8))
        assert many == pytest.approx(one, rel=1e-3)
        one_batch, many_batch = (forward_seconds(machine, LARGE, 1024, n, 0) for n in (1, 8))
        assert many_batch > 7 * one_batch


# ---- real modules --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3", "gemma3", "gpt2"])
def test_model_size_equals_matrices_and_cache(family: str) -> None:
    """Compared with its layers' parameters, and the cache after a forward of ten tokens."""
    target = tiny.target(family)
    size = ModelSize.of(target)
    cache = target.new_cache(10)
    ids = torch.arange(10)[None]
    target.forward(ids, ids, torch.ones(1, 10, 10, dtype=torch.bool).tril(), cache)
    cached_bytes = sum(
        x.numel() * 4 for layer in range(target.num_layers) for x in cache.rows(layer)
    )
    assert size.kv == cached_bytes / 10
    body = sum(p.numel() for layer in target.layers for p in layer.parameters())
    head = target.head_weight.numel()
    norms = target.shape().hidden * 2  # the final one, with a bias in GPT-2
    assert body + head <= size.parameters <= body + head + norms
    assert size.weights == 4 * size.parameters


def _matrices(*modules: torch.nn.Module) -> int:
    """Elements in the weights of all linear layers."""
    layers = [m for module in modules for m in module.modules()]
    return sum(m.weight.numel() for m in layers if isinstance(m, torch.nn.Linear))


def _sizes(name: str) -> tuple[Any, Target, list[int], list[float]]:
    target = tiny.target()
    drafter = tiny.drafter(name, target).eval()
    sizes = drafter_sizes(drafter, target, depth=3)
    assert all(size.weights == 4 * size.parameters for size in sizes)
    return drafter, target, [int(size.parameters) for size in sizes], [s.kv for s in sizes]


def test_eagle3_sizes() -> None:
    drafter, target, read, kv = _sizes("eagle3")
    layer, head = _matrices(drafter.midlayer), drafter.lm_head.weight.numel()
    assert read == [_matrices(drafter.fc) + layer, head, layer + head, layer + head]
    shape = target.shape()
    assert kv == [4 * 2 * shape.kv_heads * shape.head_dim] * 4


def test_medusa_sizes() -> None:
    drafter, _, read, kv = _sizes("medusa")
    assert read == [0, _matrices(drafter), 0, 0]
    assert kv == [0] * 4


def test_mtp_sizes() -> None:
    drafter, target, read, kv = _sizes("mtp")
    head = tiny.DRAFTED * target.shape().hidden
    stage = _matrices(drafter.stages[0])
    assert read[1:] == [head, stage + head, stage + head]
    assert 2 * stage < read[0] < 3 * stage  # of the last stage no more than its keys and values
    shape = target.shape()
    assert kv[0] == 3 * 4 * 2 * shape.kv_heads * shape.head_dim


def test_draft_lm_sizes() -> None:
    drafter, _, read, kv = _sizes("draft_lm")
    shape = drafter.lm.shape()
    body, head = _matrices(drafter.body), tiny.DRAFTED * shape.hidden
    assert read == [body, head, body + head, body + head]
    assert kv == [4 * 2 * shape.layers * shape.kv_heads * shape.head_dim] * 4


def test_drafter_sizes_does_not_change_the_drafter() -> None:
    target = tiny.target()
    drafter: Drafter = tiny.drafter("eagle3", target).eval()
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    drafter_sizes(drafter, target, depth=2)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
