"""Tests specific to Medusa; the common contract is in test_drafter_contract.py."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.drafters.medusa import Config, Medusa
from outrider.models.formats import native
from outrider.models.interface import Trace
from outrider.models.target.lora import LoraPair, linear_layers
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from outrider.train.settings import parse
from tests import tiny

H, RANK, ALPHA = 32, 4, 16.0
KINDS: list[dict[str, Any]] = [{}, {"own_heads": False}, {"res_layers": 2}]

each_kind = pytest.mark.parametrize("changes", KINDS, ids=str)


@pytest.fixture
def target() -> Target:
    return tiny.target()  # one per test: some tests change it


@pytest.fixture
def trace(target: Target) -> Trace:
    return tiny.packed_trace(target)


def medusa(target: Target, **changes: Any) -> Medusa:
    size = tiny.VOCAB if changes.get("draft_vocab_size", 0) is None else tiny.DRAFTED
    drafter = tiny.drafter("medusa", target, tiny.vocab(size), **changes)
    assert isinstance(drafter, Medusa)
    drafter.initialise(target, [])
    return drafter.eval()


def medusa2(target: Target, **changes: Any) -> Medusa:
    settings = {"adapter_rank": RANK, "adapter_alpha": ALPHA, "draft_vocab_size": None}
    return medusa(target, **settings, **changes)


def perturb(drafter: Medusa, scale: float = 0.05) -> Medusa:
    """Change every parameter from its initial value; none is zero."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return drafter


@torch.no_grad()
def logits(drafter: Medusa, trace: Trace) -> dict[int, Tensor]:
    return {
        guess.depth: drafter.heads_by_depth(
            [tiny.spread(guess, trace).flatten(0, 1)], [guess.depth]
        ).unflatten(0, trace.ids.shape)
        for guess in drafter.unroll(trace)
    }


# ---- Medusa-1: heads -----------------------------------------------------------------------------


@each_kind
def test_untrained_heads_repeat_the_target(
    target: Target, trace: Trace, changes: dict[str, Any]
) -> None:
    """W = 0 and b = 0 add silu(0) = 0, to the bit."""
    drafter = medusa(target, init="copy", **changes)
    guesses, last = list(drafter.unroll(trace)), trace.last.flatten(0, 1)
    assert [guess.depth for guess in guesses] == list(range(1, tiny.DEPTHS + 1))
    assert all(torch.equal(guess.hidden, last[guess.rows]) for guess in guesses)
    own = target.logits(trace.last)[..., drafter.vocab.target_ids]
    for depth, found in logits(drafter, trace).items():
        rows = trace.supervised_mask(depth)
        torch.testing.assert_close(found[rows], own[rows])


@torch.no_grad()
def test_linear_init_beats_copied_heads(target: Target, trace: Trace) -> None:
    """A linear fit cannot predict random text, but its logits have the best scale."""
    losses = {}
    for init in ("linear", "copy"):
        drafter = medusa(target, init=init)
        description = drafter.initialise(target, [trace])
        assert ("linear fit" in description) == (init == "linear")
        objective = Objective(drafter, target, weights=[1.0] * tiny.DEPTHS)
        losses[init] = float(objective(trace, torch.ones(tiny.DEPTHS))[0])
    assert losses["linear"] < losses["copy"]


@pytest.mark.parametrize("own_heads", [False, True])
def test_heads_equal_loops_over_rows_depths_and_layers(
    target: Target, trace: Trace, own_heads: bool
) -> None:
    """Each layer adds z sigmoid(z), z = W x + b; then the matrix of the head or of the target."""
    drafter = perturb(medusa(target, own_heads=own_heads, res_layers=2))
    w, draft_ids = dict(drafter.state_dict()), drafter.vocab.target_ids
    for depth, found in logits(drafter, trace).items():
        head = f"blocks.{depth - 1}.layers"
        matrix = w[f"lm_heads.{depth - 1}.weight"] if own_heads else target.head_weight[draft_ids]
        for row, t in trace.supervised_mask(depth).nonzero().tolist():
            x = trace.last[row, t]
            for layer in range(2):
                z = w[f"{head}.{layer}.weight"] @ x + w[f"{head}.{layer}.bias"]
                x = x + z * z.sigmoid()
            torch.testing.assert_close(found[row, t], matrix @ x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("own_heads", "layers"), [(False, 1), (False, 2), (True, 2)])
def test_parameters_have_the_documented_names_and_number(
    target: Target, own_heads: bool, layers: int
) -> None:
    """K L (H^2 + H), and K Vd H where each head has its own matrix; names as in vLLM."""
    drafter = medusa(target, own_heads=own_heads, res_layers=layers)
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    expected: dict[str, tuple[int, ...]] = {}
    for k in range(tiny.DEPTHS):
        expected |= {f"blocks.{k}.layers.{i}.weight": (H, H) for i in range(layers)}
        expected |= {f"blocks.{k}.layers.{i}.bias": (H,) for i in range(layers)}
        expected |= {f"lm_heads.{k}.weight": (tiny.DRAFTED, H)} if own_heads else {}
    assert shapes == expected
    numbers = layers * (H * H + H) + own_heads * tiny.DRAFTED * H
    assert sum(p.numel() for p in drafter.parameters()) == tiny.DEPTHS * numbers


def test_own_heads_have_no_common_head(target: Target) -> None:
    with pytest.raises(AssertionError, match="heads"):
        medusa(target, own_heads=True).head(torch.zeros(1, H))


def test_loss_of_the_paper_is_weighted_cross_entropy(target: Target, trace: Trace) -> None:
    """sum_k 0.8^k CE(head_k(h_t), x_{t+1+k}) / 0.8: the paper's weights begin one power later."""
    drafter = perturb(medusa(target, draft_vocab_size=None))
    weights = [0.8**k / 0.8 for k in range(1, tiny.DEPTHS + 1)]
    objective = Objective(drafter, target, weights=weights, loss=["ce"])
    loss, _ = objective(trace, torch.ones(tiny.DEPTHS))
    expected, logits_of_depth = 0.0, logits(drafter, trace)
    for row, start, stop in tiny.document_spans(trace):
        for t in range(start, stop):
            for k in range(1, tiny.DEPTHS + 1):
                position = t + 1 + k  # of the token that head k predicts
                if position < stop and trace.answer[row, position]:
                    probs = logits_of_depth[k][row, t].exp()
                    prob = probs[trace.ids[row, position]] / probs.sum()
                    expected -= 0.8**k / 0.8 * math.log(float(prob))
    torch.testing.assert_close(loss.item(), expected, atol=1e-3, rtol=1e-5)


@each_kind
def test_nodes_of_a_level_have_equal_logits(
    target: Target, trace: Trace, changes: dict[str, Any]
) -> None:
    drafter = perturb(medusa(target, **changes))
    first = drafter.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
    state = drafter.absorb(first, tiny.verified_rows(trace, 1, 6, 9))
    assert torch.equal(state, trace.last[1, 8:9])
    ids, logits_of_depth = torch.tensor([5]), logits(drafter, trace)
    for depth in range(1, drafter.max_depth + 1):
        found, state = drafter.step(state, depth, ids, torch.zeros_like(ids))
        assert found.shape == (len(ids), tiny.DRAFTED)
        torch.testing.assert_close(found, logits_of_depth[depth][1, 8].expand_as(found))
        ids = torch.arange(depth + 1)
    assert drafter.max_depth == tiny.DEPTHS


def test_float32_heads_run_on_a_bfloat16_target(target: Target, trace: Trace) -> None:
    """As in training without autocast: the weights are masters, the target is as stored."""
    for changes in KINDS:
        exact = logits(perturb(medusa(target, **changes)), trace)
        rounded = Target(copy.deepcopy(target.model).bfloat16())
        drafter = perturb(medusa(target, **changes))
        drafter.target = rounded
        found = logits(drafter, tiny.packed_trace(rounded))
        for depth, all_rows in found.items():
            rows = trace.supervised_mask(depth)
            expected = exact[depth][rows]
            assert float((all_rows[rows] - expected).norm() / expected.norm()) < 0.1


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"depths": 0},
        {"res_layers": 0},
        {"adapter_rank": -1},
        {"adapter_alpha": 0.0},
        {"adapter_rate": 0.0},
        {"keep": -0.1},
        {"draft_vocab_size": 40, "adapter_rank": 2},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)  # type: ignore[arg-type]


def test_medusa_2_needs_the_full_vocabulary() -> None:
    config = parse(
        compose(["drafter=medusa", "drafter.adapter_rank=32", "drafter.draft_vocab_size=null"])
    )
    assert isinstance(config.drafter, Config)
    assert config.drafter.adapter_rank == 32


def test_a_loss_on_features_is_refused() -> None:
    """A head's state is an input of the head, not an estimate of the target's next state."""
    with pytest.raises(ConfigError, match="compares hidden states") as caught:
        parse(compose(["drafter=medusa", "drafter.loss=[smooth_l1]"]))
    assert caught.value.key == "drafter.loss"


# ---- Medusa-2: the target is changed -------------------------------------------------------------


def test_untrained_adapters_do_not_change_the_target(target: Target, trace: Trace) -> None:
    """Depth 0 at row t is about x_{t+1}: the target's own state, to the bit."""
    own, *guesses = medusa2(target).unroll(trace)
    assert own.depth == 0
    assert torch.equal(own.hidden, trace.last.flatten(0, 1))
    assert [guess.depth for guess in guesses] == [1, 2, 3]


def test_training_does_not_change_the_target(target: Target, trace: Trace) -> None:
    own, first, *_ = perturb(medusa2(target)).unroll(trace)
    assert not torch.allclose(own.hidden, trace.last.flatten(0, 1), atol=0.01)
    assert not torch.allclose(first.hidden, own.hidden[first.rows], atol=0.01)
    assert torch.equal(tiny.packed_trace(target).last, trace.last)
    assert not any(module._forward_hooks for module in target.model.modules())


def test_no_graph_is_recorded_without_gradients(target: Target, trace: Trace) -> None:
    drafter = medusa2(target)
    with torch.no_grad():
        assert not next(drafter.unroll(trace)).hidden.requires_grad
    assert next(drafter.unroll(trace)).hidden.requires_grad


@pytest.mark.parametrize("own_heads", [False, True])
def test_gradients_reach_adapters_and_heads_only(
    target: Target, trace: Trace, own_heads: bool
) -> None:
    drafter = perturb(medusa2(target, own_heads=own_heads))
    guesses = list(drafter.unroll(trace))
    found = drafter.heads_by_depth([g.hidden for g in guesses], [g.depth for g in guesses])
    found.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in drafter.parameters())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


def test_target_loss_is_cross_entropy_with_the_original(target: Target, trace: Trace) -> None:
    """Row t of the changed target against row t of the old one, wherever x_{t+1} is supervised."""
    weights, divide = [1.0] * tiny.DEPTHS, torch.ones(tiny.DEPTHS)
    losses = [
        Objective(perturb(medusa2(target, keep=keep)), target, weights=weights)(trace, divide)[0]
        for keep in (0.0, 0.5)
    ]
    changed, expected = tiny.packed_trace(merged(target, perturb(medusa2(target)))), 0.0
    for row, start, stop in tiny.document_spans(trace):
        for t in range(start, stop - 1):
            if trace.answer[row, t + 1]:
                old, new = (target.logits(x.last[row, t]).softmax(-1) for x in (trace, changed))
                expected -= 0.5 * float((old * new.log()).sum())
    torch.testing.assert_close((losses[1] - losses[0]).item(), expected, atol=1e-2, rtol=1e-4)


def learn(drafter: Medusa, target: Target, trace: Trace) -> None:
    objective = Objective(drafter, target, weights=[1.0] * tiny.DEPTHS)
    divide = torch.stack(
        [trace.supervised_mask(d).sum() for d in range(1, tiny.DEPTHS + 1)]
    ).float()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        objective(trace, divide)[0].backward()
        optimizer.step()


def test_target_loss_limits_the_change(target: Target) -> None:
    moved = []
    trace = tiny.answered_trace(
        target, [tiny.greedy_tokens(target, prompt) for prompt in tiny.PROMPTS]
    )
    for keep in (0.0, 10.0):
        drafter = medusa2(target, keep=keep).train()
        learn(drafter, target, trace)
        with torch.no_grad():
            own = next(drafter.unroll(trace)).hidden
            moved.append(float((own - trace.last.flatten(0, 1)).norm()))
    assert 0 < moved[1] < moved[0] / 2


def test_adapters_have_a_separate_learning_rate(target: Target) -> None:
    drafter = medusa2(target, adapter_rate=0.1)
    ((prefix, rate),) = drafter.lr_factors().items()
    slow = {name for name, _ in drafter.named_parameters() if name.startswith(prefix)}
    assert rate == 0.1
    assert slow == {
        f"adapters.pairs.{name}.{half}" for name, _ in linear_layers(target.layers) for half in "ab"
    }
    assert medusa(target).lr_factors() == {}


def merged(target: Target, drafter: Medusa) -> Target:
    """A copy of the target with W + (alpha / rank) B A written into its matrices."""
    clone = Target(copy.deepcopy(target.model))
    assert drafter.adapters is not None
    with torch.no_grad():
        for name, linear in linear_layers(clone.layers):
            pair = drafter.adapters.pairs[name]
            assert isinstance(pair, LoraPair)
            linear.weight += ALPHA / RANK * pair.b @ pair.a
    return clone


def test_patch_target_attaches_the_adapters_once(target: Target, trace: Trace) -> None:
    drafter = perturb(medusa2(target))
    expected = tiny.packed_trace(merged(target, drafter)).last
    trained = next(drafter.unroll(trace)).hidden
    for _ in range(2):
        description = drafter.patch_target(target)
        assert description == "the target is changed by LoRA adapters of rank 4 (Medusa-2)"
        torch.testing.assert_close(tiny.packed_trace(target).last, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(trained, expected.flatten(0, 1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(next(drafter.unroll(trace)).hidden, trained)


def test_without_adapters_nothing_is_changed(target: Target, trace: Trace) -> None:
    assert medusa(target).patch_target(target) is None
    assert torch.equal(tiny.packed_trace(target).last, trace.last)


def test_steps_on_the_changed_target_repeat_the_unroll(target: Target, trace: Trace) -> None:
    drafter = perturb(medusa2(target))
    trained = logits(drafter, trace)
    drafter.patch_target(target)
    now = tiny.packed_trace(target)
    for t in range(2, 9):
        state = drafter.absorb(None, tiny.verified_rows(now, 1, 0, t + 1))
        for depth in range(1, tiny.DEPTHS + 1):
            found, state = drafter.step(
                state, depth, now.ids[1, t + depth][None], torch.tensor([0])
            )
            if trace.supervised_mask(depth)[1, t]:
                torch.testing.assert_close(found[0], trained[depth][1, t], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("policy", [Chain(3), DynamicTree(depth=3, width=3, budget=7)], ids=str)
def test_greedy_decoding_equals_the_changed_target(
    target: Target, policy: Policy, own_heads: bool
) -> None:
    drafter = perturb(medusa2(target, own_heads=own_heads), scale=0.1)
    before = [tiny.greedy_tokens(target, prompt) for prompt in tiny.PROMPTS]
    expected = [tiny.greedy_tokens(merged(target, drafter), prompt) for prompt in tiny.PROMPTS]
    assert expected != before
    drafter.patch_target(target)
    fast, plain = Engine(target, drafter, policy), Engine(target, None, None)
    for prompt, answer in zip(tiny.PROMPTS, expected, strict=True):
        assert fast.generate(prompt, tiny.ANSWER).ids == answer
        assert plain.generate(prompt, tiny.ANSWER).ids == answer


def test_loaded_drafter_changes_the_target_equally(target: Target, tmp_path: Path) -> None:
    drafter = perturb(medusa2(target))
    native.save(drafter, tmp_path, target, drafter.cfg, {})
    fresh = tiny.target()
    again, _ = native.load(tmp_path, fresh)
    again.patch_target(fresh)
    drafter.patch_target(target)
    assert torch.equal(tiny.packed_trace(fresh).last, tiny.packed_trace(target).last)


def test_a_target_without_linear_maps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nn\.Linear") as caught:
        medusa2(tiny.target("gpt2"))
    assert caught.value.key == "drafter.adapter_rank"
