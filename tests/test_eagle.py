"""Tests specific to EAGLE; the common contract is in test_drafter_contract.py."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.drafters.eagle import Config, Eagle
from outrider.models.formats import native
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import tiny

H, HEADS, KEY_HEADS, SIZE, INNER = 32, 4, 2, 8, 48  # of the small llama in families.py


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def eagle(target: Target, name: str = "eagle", **changes: Any) -> Eagle:
    drafter = tiny.drafter(name, target, **changes)
    assert isinstance(drafter, Eagle)
    return drafter


# ---- the network ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_match_published_checkpoints(target: Target, bias: bool) -> None:
    """No norm before or after the layer, no head, no embedding."""
    a, m = "layers.0.self_attn", "layers.0.mlp"
    expected = {
        "fc.weight": (H, 2 * H),
        f"{a}.q_proj.weight": (HEADS * SIZE, H),
        f"{a}.k_proj.weight": (KEY_HEADS * SIZE, H),
        f"{a}.v_proj.weight": (KEY_HEADS * SIZE, H),
        f"{a}.o_proj.weight": (H, HEADS * SIZE),
        f"{m}.gate_proj.weight": (INNER, H),
        f"{m}.up_proj.weight": (INNER, H),
        f"{m}.down_proj.weight": (H, INNER),
        "layers.0.post_attention_layernorm.weight": (H,),
        **({"fc.bias": (H,)} if bias else {}),
    }
    drafter = eagle(target, bias=bias)
    assert {name: tuple(p.shape) for name, p in drafter.named_parameters()} == expected


class Literal:
    """Reference implementation: one row at a time, from the end of a true prefix."""

    def __init__(self, drafter: Eagle, trace: Trace, row: int, start: int) -> None:
        self.w: dict[str, Tensor] = dict(drafter.state_dict())
        self.drafter, self.trace, self.row, self.start = drafter, trace, row, start

    def fuse(self, position: int, state: Tensor) -> Tensor:
        """Of the pair (token x_{position+1}, feature at position), in that order."""
        token = self.trace.ids[self.row, self.start + position + 1]
        both = torch.cat([self.drafter.target.embed(token), state])
        return self.w["fc.weight"] @ both + self.w.get("fc.bias", torch.zeros(H))

    def rotate(self, x: Tensor, position: int) -> Tensor:
        turn = position * 10000.0 ** (-torch.arange(SIZE // 2) / (SIZE // 2))
        both = torch.complex(x[: SIZE // 2], x[SIZE // 2 :]) * torch.exp(1j * turn)
        return torch.cat([both.real, both.imag])

    def layer(self, read: list[Tensor]) -> Tensor:
        """The last position's output, all earlier ones visible."""
        w = {k.removeprefix("layers.0."): v for k, v in self.w.items()}
        heads, last = [], len(read) - 1
        for head in range(HEADS):
            shared = head // (HEADS // KEY_HEADS)
            q = (w["self_attn.q_proj.weight"] @ read[last]).split(SIZE)[head]
            k = [(w["self_attn.k_proj.weight"] @ x).split(SIZE)[shared] for x in read]
            v = [(w["self_attn.v_proj.weight"] @ x).split(SIZE)[shared] for x in read]
            scores = [self.rotate(q, last) @ self.rotate(x, i) for i, x in enumerate(k)]
            weights = (torch.stack(scores) / SIZE**0.5).softmax(0)
            heads.append(weights @ torch.stack(v))
        x = read[last] + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = x / (x.square().mean() + self.drafter.target.shape().eps).sqrt()
        normed = normed * w["post_attention_layernorm.weight"]
        gate = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ normed)
        return x + w["mlp.down_proj.weight"] @ (gate * (w["mlp.up_proj.weight"] @ normed))

    def guesses(self, t: int, depths: int) -> list[Tensor]:
        """Logits of x_{t+2}, x_{t+3}, .. after the true prefix x_0..x_t and the text's tokens."""
        states = [self.trace.last[self.row, self.start + i] for i in range(t + 1)]
        read = [self.fuse(i, state) for i, state in enumerate(states)]
        out = []
        for depth in range(1, depths + 1):
            feature = self.layer(read)
            out.append(self.drafter.head(feature))
            if depth < depths:
                read.append(self.fuse(t + depth, feature))
        return out


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_unroll_equals_drafting_from_every_prefix(target: Target, bias: bool) -> None:
    drafter = eagle(target, bias=bias).eval()
    for name, p in drafter.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            p.uniform_(0.5, 1.5)
    trace = tiny.packed_trace(target)
    trained = [drafter.head(tiny.spread(guess, trace)) for guess in drafter.unroll(trace)]
    compared = 0
    for row, start, stop in tiny.document_spans(trace):
        literal = Literal(drafter, trace, row, start)
        for t in range(stop - start - 1):
            depths = min(tiny.DEPTHS, stop - start - 1 - t)
            for depth, logits in enumerate(literal.guesses(t, depths), start=1):
                if trace.supervised_mask(depth)[row, start + t]:
                    torch.testing.assert_close(
                        trained[depth - 1][row, start + t], logits, atol=1e-4, rtol=1e-4
                    )
                    compared += 1
    assert compared == 78


# ---- the objective -------------------------------------------------------------------------------


def test_loss_is_smooth_l1_plus_a_tenth_of_cross_entropy(target: Target) -> None:
    """At depth 1: mean over H of Smooth-L1 to the target's next state, + 0.1 cross-entropy."""
    drafter = tiny.drafter("eagle", target, tiny.vocab(tiny.VOCAB), noise=0.0)
    trace = tiny.packed_trace(target)
    cfg = Config()
    objective = Objective(drafter, target, weights=[1.0, 0.0, 0.0], loss=cfg.loss)
    rows = trace.supervised_mask(1)
    loss, _ = objective(trace, rows.sum()[None].float().expand(3))
    guess = tiny.spread(next(drafter.unroll(trace)), trace)[rows]
    following = trace.last.roll(-1, 1)[rows]
    gap = (guess - following).abs()
    smooth = torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
    draft_ids = drafter.vocab.target_ids
    logits = target.logits(following)
    p = logits[:, draft_ids].softmax(-1)
    nats = -(p * target.logits(guess)[:, draft_ids].log_softmax(-1)).sum(-1)
    nats = nats * drafter.vocab.t2d[logits.argmax(-1)]
    torch.testing.assert_close(loss, smooth + 0.1 * nats.mean())


# ---- noise ---------------------------------------------------------------------------------------


def noise_of(target: Target, **changes: Any) -> tuple[Tensor, Trace]:
    drafter, trace = eagle(target, **changes).train(), tiny.packed_trace(target)
    return (drafter.initial_state(trace) - trace.last.flatten(0, 1)).view_as(trace.last), trace


def test_noise_is_uniform_and_in_training_only(target: Target) -> None:
    noise, trace = noise_of(target)
    assert 0.095 < noise.abs().max() <= 0.1
    torch.testing.assert_close(noise.std(), torch.tensor(0.2 / 12**0.5), atol=0.003, rtol=0)
    drafter = eagle(target).eval()
    assert torch.equal(drafter.initial_state(trace), trace.last.flatten(0, 1))


def test_noise_by_length_shrinks_with_the_document(target: Target) -> None:
    """0.2 * 512 / S: at 14 rows that is 7.3, at 5 rows 20.5."""
    noise, trace = noise_of(target, noise_by_length=True)
    for row, start, stop in tiny.document_spans(trace):
        largest = noise[row, start:stop].abs().max()
        half = 0.1 * 512 / (stop - start)
        assert 0.9 * half < largest <= half


# ---- initial weights -----------------------------------------------------------------------------


def test_linear_init_predicts_states_better_than_the_mean(target: Target) -> None:
    """The regression beats the mean of the next states; random weights do not."""
    trace = tiny.packed_trace(target)
    rows, losses = trace.supervised_mask(1), {}
    for init in ("linear", "random"):
        drafter = eagle(target, init=init, draft_vocab_size=None).eval()
        drafter.initialise(target, [trace])
        guess = tiny.spread(next(drafter.unroll(trace)), trace)[rows]
        losses[init] = float((guess.detach() - trace.last.roll(-1, 1)[rows]).square().mean())
    targets = trace.last.roll(-1, 1)[rows]
    assert losses["linear"] < float((targets - targets.mean(0)).square().mean()) < losses["random"]


@pytest.mark.parametrize(("first", "then"), [("eagle", "hass"), ("hass", "eagle")])
def test_hass_and_eagle_exchange_weights(
    target: Target, tmp_path: Path, first: str, then: str
) -> None:
    """One network under two names; its head is the target's, so the vocabulary may differ."""
    before = eagle(target, first, bias=True)
    native.save(before, tmp_path, target, before.cfg, {})
    after = eagle(target, then, bias=True, warm_start=str(tmp_path), seed=9)
    assert not torch.equal(after.fc.weight, before.fc.weight)
    assert str(tmp_path) in after.initialise(target, [])
    for name, p in before.named_parameters():
        assert torch.equal(after.get_parameter(name), p)


def test_warm_start_from_another_network_is_refused(target: Target, tmp_path: Path) -> None:
    other = tiny.drafter("eagle3", target)
    native.save(other, tmp_path, target, tiny.config("eagle3"), {})
    with pytest.raises(RunError, match="eagle3"):
        eagle(target, warm_start=str(tmp_path)).initialise(target, [])


@pytest.mark.parametrize("bias", [True, False])
def test_warm_start_with_another_bias_names_the_key(
    target: Target, tmp_path: Path, bias: bool
) -> None:
    before = eagle(target, bias=bias)
    native.save(before, tmp_path, target, before.cfg, {})
    with pytest.raises(
        RunError, match=f"Set drafter.bias={str(bias).lower()}, which it was trained with"
    ):
        eagle(target, "hass", bias=not bias, warm_start=str(tmp_path)).initialise(target, [])


def test_warm_start_with_another_activation_names_the_key(target: Target, tmp_path: Path) -> None:
    """Weights fit both; the network would be another one."""
    before = eagle(target, activation="gelu", bias=False)
    native.save(before, tmp_path, target, before.cfg, {})
    after = eagle(target, "hass", bias=False, warm_start=str(tmp_path))
    for check in (
        lambda: after.initialise(target, []),
        lambda: Eagle.check_first_weights(after.cfg, target.shape()),
    ):
        with pytest.raises(RunError, match=r"Set drafter\.activation=gelu, which it was trained"):
            check()


def test_hass_has_a_bias_only_if_its_settings_say_so(target: Target, tmp_path: Path) -> None:
    """The default is false, and was true: a stored drafter keeps its own."""
    assert "fc.bias" not in eagle(target, "hass").state_dict()
    older = eagle(target, "hass", bias=True)
    native.save(older, tmp_path, target, older.cfg, {})
    assert "fc.bias" in native.FORMATS[0].read(tmp_path, target)[0].state_dict()


@pytest.mark.parametrize("wrong", [{"noise": -0.1}, {"init": "zeros"}, {"depths": 0}])
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(Config(), **wrong)
