"""Tests specific to LayerSkip.

test_drafter_contract.py tests it as every trained drafter, and test_target_drafting.py as every
drafter that drafts through its target.
"""

import copy
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.conf.errors import ConfigError
from outrider.data.training_data import TrainingData
from outrider.models import formats
from outrider.models.cache.attention_masks import document_mask
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Request
from outrider.models.drafters.layerskip import Config, LayerSkip, drop_chances, exit_weights
from outrider.models.formats import native
from outrider.models.interface import Trace
from outrider.models.target import fast_llama
from outrider.models.target.layer_parts import Part
from outrider.models.target.load import LoadedTarget
from outrider.models.target.target import Target
from outrider.train import loop
from outrider.train.objective import Objective
from outrider.train.trainer import Trainer
from tests import tiny
from tests.runs import QUIET, config

LAYERS = 4


@pytest.fixture
def target() -> Target:
    return tiny.target()  # one per test: some tests change it


@pytest.fixture
def trace(target: Target) -> Trace:
    return tiny.packed_trace(target)


def layerskip(target: Target, **changes: Any) -> LayerSkip:
    drafter = tiny.drafter("layerskip", target, **changes)
    assert isinstance(drafter, LayerSkip)
    return drafter


def perturb(drafter: LayerSkip, scale: float = 0.1) -> LayerSkip:
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return drafter


# ---- the weights of the exits --------------------------------------------------------------------


def weights(step: int = 0, done: float = 0.0, **changes: Any) -> list[float]:
    return exit_weights(LAYERS, Config(**changes), step, done)


def test_weights_of_four_exits_by_hand() -> None:
    """The weights 0, 1, 1 + 2, and 3 + (1 + 2) for the last exit; s scales the sums."""
    assert weights(curriculum="all") == pytest.approx([0, 0.1, 0.3, 0.6])
    half = [0, 0.5, 1.5, 3 + 1.5]
    assert weights(curriculum="all", exit_scale=0.5) == pytest.approx([e / 6.5 for e in half])
    assert weights(curriculum="all", exit_scale=0.0) == [0, 0, 0, 1]
    assert exit_weights(1, Config(), 0, 0.0) == [1.0]


def test_rotation_enables_every_second_exit_in_turn() -> None:
    """Steps 0, 1, 2, 3: exits 0 and 2, then 1 and 3, and again; the last one always."""
    even, odd = [0, 0, 3 / 9, 6 / 9], [0, 1 / 7, 0, 6 / 7]
    for step, expected in enumerate([even, odd, even, odd]):
        assert weights(step, curriculum="rotational", rotation=2) == pytest.approx(expected)


def test_rotation_over_more_steps_than_exits() -> None:
    """Exits 1 and 2 once in five steps, the last one always; the weight of exit 0 is 0."""
    enabled = [[i for i, w in enumerate(weights(step, rotation=5)) if w] for step in range(6)]
    assert enabled == [[3], [1, 3], [2, 3], [3], [3], [3]]


def test_gradual_curriculum_starts_at_the_last_exit_and_ends_at_half() -> None:
    """One exit more in every eighth of the training, of four layers."""
    stages = {0.0: [0, 0, 0, 1], 0.124: [0, 0, 0, 1], 0.125: [0, 0, 3 / 9, 6 / 9]}
    stages |= {0.25: [0, 0.1, 0.3, 0.6], 0.5: [0, 0.1, 0.3, 0.6], 1.0: [0, 0.1, 0.3, 0.6]}
    for done, expected in stages.items():
        assert weights(99, done, curriculum="gradual") == pytest.approx(expected)


# ---- the loss ------------------------------------------------------------------------------------


def nats(target: Target, trace: Trace, hidden: Tensor, depth: int) -> float:
    """Cross-entropy of the text's tokens x_{t+1} under the states of rows t, row by row.

    At depth 1 the first row of a document is not counted: it is the row after it that predicts.
    """
    total = 0.0
    for row, start, stop in tiny.document_spans(trace):
        for t in range(start + depth, stop - 1):
            if trace.answer[row, t + 1]:
                probs = target.logits(hidden[row, t]).softmax(-1)
                total -= math.log(float(probs[trace.ids[row, t + 1]]))
    return total


@pytest.mark.parametrize("exit_layer", [2, 3, 4])
def test_loss_is_the_weighted_sum_over_exits(exit_layer: int, target: Target, trace: Trace) -> None:
    """The states of all layers come from the changed target, which runs its own forward."""
    settings = {"exit_layer": exit_layer, "curriculum": "all", "layer_dropout": 0.0}
    drafter = perturb(layerskip(target, **settings, loss=("ce",)))
    loss, sums = Objective(drafter, target, weights=[1.0, 0.0, 0.0], loss=["ce"])(
        trace, torch.full((3,), 10.0)
    )
    drafter.patch_target(target)
    target.set_taps(range(LAYERS))
    changed = tiny.packed_trace(target)
    expected = 0.0
    for layer, weight in enumerate([0, 0.1, 0.3, 0.6]):
        hidden = changed.taps[..., layer * 32 : (layer + 1) * 32]
        depth = int(layer == exit_layer - 1 < LAYERS - 1)
        expected += weight * nats(target, trace, target.final_norm(hidden), depth) / 10
    torch.testing.assert_close(loss.item(), expected, atol=1e-3, rtol=1e-5)
    assert sums.objective == loss
    torch.testing.assert_close(
        sums.target_loss[0].item(), nats(target, trace, changed.last, 0), atol=1e-3, rtol=1e-5
    )


def test_an_exit_without_weight_in_a_step_has_no_gradient(target: Target, trace: Trace) -> None:
    """rotation=2 enables exits 0 and 2 in step 0: exit 1, which drafts, is only measured."""
    drafter = layerskip(target, exit_layer=2, rotation=2, layer_dropout=0.0)
    guesses = {}
    for step in (0, 1):
        drafter.begin_step(step, 0.0)
        guesses[step] = [(guess.depth, guess.weight) for guess in drafter.unroll(trace)]
    assert guesses[0] == [(0, 6 / 9), (0, 3 / 9), (1, 0), (2, 0), (3, 0)]
    assert guesses[1] == [(0, 6 / 7), (1, 1 / 7), (2, 1 / 7), (3, 1 / 7)]


def test_training_lowers_the_loss_of_the_exit_and_keeps_the_target(target: Target) -> None:
    """The part of the exit's loss above the target's entropy, its lower bound, halves."""
    answers = [tiny.greedy_tokens(target, prompt) for prompt in tiny.PROMPTS]
    trace = tiny.answered_trace(target, answers)
    drafter = layerskip(target, exit_layer=2, curriculum="all", layer_dropout=0.1)
    log_p = target.logits(trace.last).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    excess = [exit_loss(drafter, target, trace) - float(entropy[:, 1:-1].mean())]
    tiny.train_drafter(drafter, target, trace, steps=30)
    excess.append(exit_loss(drafter, target, trace) - float(entropy[:, 1:-1].mean()))
    assert 0 < excess[1] < excess[0] / 2


@torch.no_grad()
def exit_loss(drafter: LayerSkip, target: Target, trace: Trace) -> float:
    drafter.eval()
    sums = Objective(drafter, target, weights=[1.0] * 3)(trace, torch.ones(3), True)[1]
    drafter.train()
    return float(sums.means()["loss@1"])


# ---- layer dropout -------------------------------------------------------------------------------


def test_chance_of_a_layer_is_the_formula_of_the_paper() -> None:
    """p_max (exp(l ln2 / (L-1)) - 1): 0, .2 (2^(1/3) - 1), .2 (2^(2/3) - 1), .2."""
    expected = [0.2 * (math.exp(i * math.log(2) / 3) - 1) for i in range(4)]
    assert drop_chances(4, 0.2) == pytest.approx(expected)
    assert drop_chances(4, 0.2)[::3] == pytest.approx([0.0, 0.2])
    assert drop_chances(1, 0.2) == [0.0]


def test_layers_are_dropped_as_often_as_their_chance(target: Target) -> None:
    """20,000 rows: the standard error is below 0.0036, five of them 0.018."""
    torch.manual_seed(0)
    kept = layerskip(target, layer_dropout=0.5)._draw_kept_rows(20_000)
    assert kept is not None
    dropped, chances = 1 - kept.double().mean(1), torch.tensor(drop_chances(4, 0.5)).double()
    torch.testing.assert_close(dropped, chances, atol=0.018, rtol=0)
    assert kept[0].all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_skips_exactly_its_dropped_layers(family: str) -> None:
    """Against the target without both sublayers of a layer; the other row runs all layers."""
    target = tiny.target(family)
    trace, drafter = tiny.packed_trace(target), layerskip(target)
    drafter.body.layers.eval()  # GPT-2 has dropout of its own
    drafter.body.kept_rows = torch.tensor([[1, 1], [0, 1], [1, 1], [0, 1]]).bool()
    _, last = drafter.body(trace)
    skipped = frozenset((1, 3))
    part = Part(skip_attention=skipped, skip_mlp=skipped)
    without = target.forward(trace.ids, trace.positions, document_mask(trace.document), part=part)
    torch.testing.assert_close(last[0], without.last[0])
    torch.testing.assert_close(last[1], trace.last[1])
    assert (without.last[0] - trace.last[0]).abs().max() > 0.01


def test_dropout_is_off_outside_training_and_follows_the_seed(target: Target, trace: Trace) -> None:
    drafter = layerskip(target, layer_dropout=1.0)

    def last(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return next(drafter.unroll(trace)).hidden.detach()

    assert torch.equal(last(0), last(0))
    assert not all(torch.equal(last(0), last(seed)) for seed in range(1, 9))
    drafter.eval()
    torch.testing.assert_close(last(1), trace.last.flatten(0, 1))


# ---- the changed target --------------------------------------------------------------------------


def test_an_untrained_copy_changes_nothing(target: Target, trace: Trace) -> None:
    drafter = layerskip(target).eval()
    last, *_ = drafter.unroll(trace)
    torch.testing.assert_close(last.hidden, trace.last.flatten(0, 1))
    drafter.patch_target(target)
    assert torch.equal(tiny.packed_trace(target).last, trace.last)


def test_training_changes_the_copy_and_decoding_the_target(target: Target, trace: Trace) -> None:
    """Plain and speculative decoding are those of the changed target, and not of the original."""
    drafter = perturb(layerskip(target)).eval()
    last, *_ = drafter.unroll(trace)
    assert not torch.allclose(last.hidden, trace.last.flatten(0, 1), atol=0.1)
    assert torch.equal(tiny.packed_trace(target).last, trace.last)
    before = [tiny.greedy_tokens(target, prompt) for prompt in tiny.PROMPTS]
    for _ in range(2):
        assert drafter.patch_target(target) == "the layers of the target are changed (LayerSkip)"
        torch.testing.assert_close(tiny.packed_trace(target).last.flatten(0, 1), last.hidden)
    expected = [tiny.greedy_tokens(target, prompt) for prompt in tiny.PROMPTS]
    assert expected != before
    fast, plain = Engine(target, drafter, Chain(3)), Engine(target, None, None)
    for prompt, answer in zip(tiny.PROMPTS, expected, strict=True):
        assert fast.generate(prompt, tiny.ANSWER).ids == answer
        assert plain.generate(prompt, tiny.ANSWER).ids == answer


def test_a_loaded_drafter_changes_the_target_equally(target: Target, tmp_path: Path) -> None:
    drafter = perturb(layerskip(target))
    native.save(drafter, tmp_path, target, drafter.cfg, {})
    fresh = tiny.target()
    again, _ = native.load(tmp_path, fresh)
    assert again.patch_target(fresh) == drafter.patch_target(target)
    assert torch.equal(tiny.packed_trace(fresh).last, tiny.packed_trace(target).last)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "mixtral"])
def test_transformers_loads_the_exported_target_whole(family: str, tmp_path: Path) -> None:
    """Its logits are those of the changed target, and Outrider reads the same drafter."""
    target = tiny.target(family)
    drafter, ids = perturb(layerskip(target)), torch.arange(3, 13)[None]
    before = target.model(input_ids=ids).logits
    formats.find("transformers", "layerskip").write(drafter, target, drafter.cfg, tmp_path / "out")
    drafter.patch_target(target)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, target.model(input_ids=ids).logits)
    assert (model(input_ids=ids).logits - before).abs().max() > 0.1
    again, cfg = formats.load(tmp_path / "out", tiny.target(family))
    assert cfg == drafter.cfg
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_float32_copies_of_a_bfloat16_target(target: Target, trace: Trace) -> None:
    """The copies are masters in float32; a drafter for decoding has the target's dtype."""
    drafter = layerskip(Target(copy.deepcopy(target.model).bfloat16())).eval()
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    for dtype, limit in ((torch.float32, 0.01), (torch.bfloat16, 0.05)):
        last = next(drafter.to(dtype).unroll(trace)).hidden
        assert last.dtype == dtype
        assert float((last.detach() - trace.last.flatten(0, 1)).norm() / trace.last.norm()) < limit


# ---- decoding ------------------------------------------------------------------------------------


def test_verification_runs_the_first_layers_on_one_token(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of a chain of three: four tokens through each layer, and no token twice."""
    calls = list[tuple[int, int]]()
    attend = fast_llama._Layer.attend

    def counted(self: Any, x: Tensor, rotary: Any, mask: Tensor, cache: Any, index: int) -> Tensor:
        calls.append((index, x.shape[1]))
        return attend(self, x, rotary, mask, cache, index)

    monkeypatch.setattr(fast_llama._Layer, "attend", counted)
    drafter = layerskip(target, exit_layer=2).eval()
    engine = Engine(target, drafter, Chain(3))
    prompt, rounds = [5, 40, 17, 23, 9], 0
    for event in engine.run([Request(prompt, 12)], 1):
        if len(event.out.ids) > 1 and event.out.drafted[-1] == 3:
            drafting = [(layer, 1) for _ in range(3) for layer in (0, 1)]
            assert calls == [*drafting, (0, 1), (1, 1), (2, 4), (3, 4)]
            rounds += 1
        calls.clear()
    assert rounds > 1


@pytest.mark.parametrize(("exit_layer", "whole"), [(2, False), (LAYERS, True)])
def test_a_draft_of_all_layers_is_always_accepted(
    exit_layer: int, whole: bool, target: Target
) -> None:
    drafter = perturb(layerskip(target, exit_layer=exit_layer)).eval()
    drafter.patch_target(target)
    out = Engine(target, drafter, Chain(4)).generate(tiny.PROMPTS[0], 20)
    assert (out.accepted == out.drafted) == whole
    assert sum(out.drafted) > 0


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 5])
def test_an_exit_that_the_target_does_not_have_is_refused(wrong: int, target: Target) -> None:
    with pytest.raises((ConfigError, ValueError), match=r"exit_layer = [05]"):
        layerskip(target, exit_layer=wrong)


def test_a_quarter_of_the_layers_drafts_by_default() -> None:
    """At least two: the first exit has no weight."""
    exits = {n: layerskip(tiny.target(num_hidden_layers=n)).exit_layer for n in (1, 2, 4, 12)}
    assert exits == {1: 1, 2: 2, 4: 2, 12: 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"curriculum": "linear"},
        {"rotation": 0},
        {"layer_dropout": 1.1},
        {"exit_scale": -1.0},
        {"layer_rate": 0.0},
        {"draft_vocab_size": 40},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)


def test_a_target_on_other_devices_is_refused(target: Target) -> None:
    target.is_remote = True
    with pytest.raises(ConfigError, match="quantised, sharded, elsewhere") as caught:
        layerskip(target)
    assert caught.value.key == "target"


# ---- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("curriculum", ["rotational", "gradual"])
def test_a_resumed_run_ends_bit_equal(
    curriculum: str, loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    """With exits and dropped layers that differ from step to step; stopped after three of five."""
    words = ["drafter=layerskip", f"drafter.curriculum={curriculum}", "drafter.rotation=2"]
    words += ["drafter.layer_dropout=0.5", "train.max_steps=5", "train.eval_every=5"]
    words += ["train.keep_last=9"]
    loop.fit(config(tmp_path / "whole", *words), loaded, made, QUIET)
    stopped = config(tmp_path / "stopped", *words)
    advance, steps = loop._advance, 0

    def interrupted(run: Trainer, tracker: Any) -> None:
        nonlocal steps
        advance(run, tracker)
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_advance", interrupted)
        assert loop.fit(stopped, loaded, made, QUIET) is None
    loop.fit(stopped, loaded, made, QUIET)
    places = ("whole", 5), ("stopped", 5), ("stopped", 3)
    files = (tmp_path / run / "checkpoints" / f"step-0000000{step}" for run, step in places)
    whole, again, start = (load_file(file / "state.safetensors") for file in files)
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert any(not torch.equal(start[name], again[name]) for name in again)
