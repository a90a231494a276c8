"""Tests specific to Kangaroo; those of all drafters that draft with the target are shared."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.drafters.kangaroo import Kangaroo
from outrider.models.drafting.layers import apply_rotary
from outrider.models.target.target import Target
from tests import tiny


def build(target: Target, **changes: Any) -> Kangaroo:
    drafter = tiny.drafter("kangaroo", target, **changes)
    assert isinstance(drafter, Kangaroo)
    return drafter.eval()


@torch.no_grad()
def adapted(target: Target, drafter: Kangaroo, text: list[int]) -> Tensor:
    """The last row's logits by the paper's formula, from transformers' own hidden states."""
    out = target.model(input_ids=torch.tensor([text]), output_hidden_states=True)
    exits = out.hidden_states[drafter.cfg.exit_layer][0]
    attn, shape = drafter.layer.self_attn, target.shape()
    weight = drafter.get_parameter("layers.0.input_layernorm.weight")
    x = F.rms_norm(exits, (shape.hidden,), weight, shape.eps)
    at = torch.arange(len(text))
    heads = (F.linear(x, m.weight).unflatten(-1, (-1, shape.head_dim)) for m in
             (attn.q_proj, attn.k_proj, attn.v_proj))  # fmt: skip
    query, key, value = heads
    query, key = (apply_rotary(part, at, shape.rope_theta) for part in (query, key))
    groups = shape.heads // shape.kv_heads
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = torch.einsum("hc,mhc->hm", query[-1], key) * shape.head_dim**-0.5
    attended = torch.einsum("hm,mhc->hc", scores.softmax(-1), value).flatten()
    state = exits[-1] + attn.o_proj(attended)
    state = F.rms_norm(state, (shape.hidden,), drafter.norm.weight, shape.eps)
    return F.linear(state, target.head_weight)[drafter.vocab.target_ids]


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@torch.no_grad()
def test_guesses_follow_the_papers_formula(exit_layer: int) -> None:
    target = tiny.target()
    drafter = build(target, exit_layer=exit_layer)
    target.set_taps(drafter.taps)
    trace, compared = tiny.packed_trace(target), 0
    for guess in drafter.unroll(trace):
        logits = drafter.head(tiny.spread(guess, trace))
        for row, start, stop in tiny.document_spans(trace):
            for t in range(start, stop):
                if trace.supervised_mask(guess.depth)[row, t]:
                    text = trace.ids[row, start : t + guess.depth + 1].tolist()
                    expected = adapted(target, drafter, text)
                    torch.testing.assert_close(logits[row, t], expected, atol=1e-4, rtol=1e-4)
                    compared += 1
    assert compared == 78


def test_the_parameters_have_the_names_of_published_checkpoints() -> None:
    drafter = build(tiny.target())
    attention = [f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"]
    expected = {"norm.weight", "layers.0.input_layernorm.weight", *attention}
    assert {name for name, _ in drafter.named_parameters()} == expected


def layer_rows(target: Target) -> list[list[int]]:
    """Record how many rows per prompt each decoder layer runs on, forward by forward."""
    assert target.fast_forward is not None
    counts: list[list[int]] = [[] for _ in target.layers]
    for layer, rows in zip(target.fast_forward._layers, counts, strict=True):
        attend = layer.attend

        def counted(x: Tensor, *rest: Any, attend: Any = attend, rows: list[int] = rows) -> Tensor:
            rows.append(x.shape[1])
            out: Tensor = attend(x, *rest)
            return out

        layer.attend = counted  # type: ignore[assignment, method-assign]
    return counts


def test_verification_runs_the_lower_layers_on_the_last_token_only() -> None:
    """A prompt of five tokens, a round with three draft tokens, exit after two of four layers."""
    target = tiny.target()
    drafter = build(target, exit_layer=2)
    counts = layer_rows(target)
    out = Engine(target, drafter, Chain(3)).generate([5, 40, 17, 23, 9], 5)
    assert out.drafted[0] == 3
    # the prompt; the root and two draft tokens one by one; in verification the third one only
    assert counts[0][:5] == counts[1][:5] == [5, 1, 1, 1, 1]
    assert counts[2][:2] == counts[3][:2] == [5, 4]


def test_the_norm_is_fitted_to_the_targets_states() -> None:
    """Each weight is the least-squares coefficient of its own regression."""
    target = tiny.target()
    drafter = build(target, exit_layer=4)
    target.set_taps(drafter.taps)
    trace = tiny.packed_trace(target)
    drafter.layer.self_attn.o_proj.weight.data.zero_()
    # the target's own norm over the same states is then the best fit
    drafter.initialise(target, [trace])
    expected = target.base_model.get_parameter("norm.weight")
    torch.testing.assert_close(drafter.norm.weight, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("exit_layer", [5, 6])
def test_an_exit_after_more_layers_than_there_are_is_refused(exit_layer: int) -> None:
    with pytest.raises(ConfigError, match=r"drafter.exit_layer.*\n.*has 4 layers"):
        build(tiny.target(), exit_layer=exit_layer)
    with pytest.raises(ConfigError, match=r"drafter.exit_layer"):
        build(tiny.target(), exit_layer=0)


def test_a_low_confidence_ends_a_draft_after_the_token() -> None:
    """With confidence 1 every draft is one token, which is still verified."""
    target, answers, drafter = tiny.half_trained("kangaroo", "llama")
    decoder = Engine(target, drafter, Chain(4, confidence=1.0))
    outputs = [decoder.generate(prompt, tiny.ANSWER) for prompt in tiny.PROMPTS]
    assert [out.ids for out in outputs] == list(answers)
    assert {drafted for out in outputs for drafted in out.drafted} <= {0, 1}
    assert any(sum(out.accepted) for out in outputs)
