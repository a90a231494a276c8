"""What is particular to P-EAGLE: mask rows, dropped depths, one pass per round."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from outrider.conf.errors import ConfigError
from outrider.models import drafters
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.drafters.p_eagle import Config, PEagle
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import tiny


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture
def trace(target: Target) -> Trace:
    target.set_taps((0, 1, 2))
    return tiny.packed_trace(target)


def built(target: Target, **changes: Any) -> PEagle:
    made = tiny.drafter("p_eagle", target, **changes)
    assert isinstance(made, PEagle)
    return made


@torch.no_grad()
def test_depth_one_is_that_of_eagle3(target: Target, trace: Trace) -> None:
    drafter, body = built(target).eval(), tiny.drafter("eagle3", target, layers=2).eval()
    body.load_state_dict({k: v for k, v in drafter.state_dict().items() if k != "mask_hidden"})
    one, other = next(drafter.unroll(trace)), next(body.unroll(trace))
    torch.testing.assert_close(one.hidden, other.hidden)


@torch.no_grad()
def test_deeper_depths_equal_a_dense_forward_of_one_row(target: Target, trace: Trace) -> None:
    """Rows of depth 1 up to t, then the mask rows, through both layers under one causal mask."""
    drafter, t = built(target, depths=4).eval(), 6
    rows = slice(tiny.LENGTH, tiny.LENGTH + t + 1)
    ids = torch.cat([trace.next_ids.flatten()[rows], torch.full((3,), tiny.VOCAB - 1)])
    taps = torch.cat([trace.taps.flatten(0, 1)[rows], drafter.mask_hidden[0].expand(3, -1)])
    residual, x = drafter._embed(ids, drafter.fc(drafter._normalise_taps(taps)))
    positions, causal = torch.arange(t + 4), torch.ones(t + 4, t + 4).tril().bool()
    for i, layer in enumerate(drafter.decoder_layers):
        x = x if i == 0 else layer.input_layernorm(residual)
        q, key, value = layer.self_attn.query_key_value(x, positions)
        key, value = (
            part.repeat_interleave(q.shape[1] // key.shape[1], 1) for part in (key, value)
        )
        q, key, value = (part.transpose(0, 1)[None] for part in (q, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, key, value, causal)
        residual = layer.finish(residual, out[0].transpose(0, 1))
    for guess in drafter.unroll(trace):
        found = guess.states(torch.tensor([tiny.LENGTH + t]))[0]
        torch.testing.assert_close(found, residual[t + guess.depth - 1], atol=1e-5, rtol=1e-5)


def test_dropped_depths_are_nested_and_have_their_share(target: Target, trace: Trace) -> None:
    drafter = built(target, depths=4, keep=0.6, keep_floor=0.3).train()
    torch.manual_seed(1)
    drafter.begin_step(0, 0.0)
    masks = [drafter.trained_mask(trace, d) for d in range(1, 5)]
    rows = int(trace.supervised_mask(1).sum())
    for depth, (above, mask) in enumerate(pairwise(masks), start=2):
        assert not (mask & ~above).any()
        assert not (mask & ~trace.supervised_mask(depth)).any()
        possible = int((above & trace.supervised_mask(depth)).sum())
        assert int(mask.sum()) == min(possible, round(max(0.6 ** (depth - 1), 0.3) * rows))
    guesses = list(drafter.unroll(trace))
    for guess, mask in zip(guesses, masks, strict=True):
        assert set(torch.nonzero(mask.flatten()).flatten().tolist()) <= set(guess.rows.tolist())
    assert len(guesses[3].rows) == int(masks[3].sum()) < len(guesses[0].rows)


@torch.no_grad()
def test_dropping_depths_changes_no_other_guess(target: Target, trace: Trace) -> None:
    drafter = built(target, depths=4, keep=0.5)
    measured = {g.depth: g for g in drafter.eval().unroll(trace)}
    drafter.train().begin_step(0, 0.0)
    for guess in drafter.unroll(trace):
        expected = measured[guess.depth].states(guess.rows)
        torch.testing.assert_close(guess.hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_windows_decode_as_they_train(window: int | None, target: Target, trace: Trace) -> None:
    drafter, state = built(target, window=window).eval(), None
    root = torch.zeros(1, dtype=torch.long)
    for t in range(10):
        state = drafter.absorb(state, tiny.verified_rows(trace, 1, t, t + 1))
    drafted = state
    for guess in drafter.unroll(trace):
        logits, drafted = drafter.step(drafted, guess.depth, root, root)
        expected = drafter.head(guess.states(torch.tensor([tiny.LENGTH + 9])))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_round_runs_the_layers_twice_whatever_the_depth(target: Target) -> None:
    """Once for verified rows, once for the mask rows."""
    drafter, runs = built(target, depths=5).eval(), []
    drafter.midlayer.mlp.register_forward_hook(lambda *_: runs.append(1))
    for depth in (2, 5):
        runs.clear()
        out = Engine(target, drafter, Chain(depth)).generate([5, 6, 7], 12)
        assert len(runs) <= 2 * len(out.drafted)


def test_settings_that_contradict_are_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="no state is fed back"):
        Config(feedback="normed")
    for changes in ({"keep": 0.0}, {"keep_floor": 1.5}):
        with pytest.raises((ValueError, ConfigError)):
            Config(**changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokens 0 to 60"):
        drafters.check(Config(mask_token_id=61), target.shape())
