"""Tests specific to EAGLE-3; the common contract is in test_drafter_contract.py."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafters.eagle3 import Config, Eagle3, default_taps, spread_taps
from outrider.models.drafting.self_feeding import SelfFeedingState
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import tiny

H, HEADS, KEY_HEADS, SIZE, INNER = 32, 4, 2, 8, 48  # of the small llama in families.py


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def eagle3(target: Target, **changes: Any) -> Eagle3:
    drafter = tiny.drafter("eagle3", target, **changes)
    assert isinstance(drafter, Eagle3)
    return drafter


def built(target: Target, **changes: Any) -> Eagle3:
    drafter = eagle3(target, **changes)
    torch.manual_seed(5)
    with torch.no_grad():  # norms of 1 and one scale for all taps would hide a wrong order
        for name, value in (*drafter.named_parameters(), ("tap_scale", drafter.tap_scale)):
            if name.endswith(("norm.weight", "tap_scale")):
                value.uniform_(0.5, 1.5)
    return drafter.eval()


# ---- taps and parameters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (32, (1, 15, 28)),  # the inputs of layers 2, 16 and 29
        (36, (1, 17, 32)),
        (7, (1, 2, 3)),  # the shallowest target with three distinct ones
        (6, (0, 2, 4)),
        (4, (0, 1, 2)),
        (2, (0, 1)),
        (1, (0,)),
    ],
)
def test_default_taps_are_low_middle_and_high(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


@pytest.mark.parametrize("rule", [default_taps, spread_taps])
def test_default_taps_exist_and_ascend(rule: Callable[[int], tuple[int, ...]]) -> None:
    for layers in range(1, 100):
        taps = rule(layers)
        assert list(taps) == sorted(set(taps))
        assert 0 <= taps[0] <= taps[-1] < layers
        assert len(taps) == (3 if layers > 3 else min(2, layers))


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(4, (0, 1, 2)), (8, (1, 3, 6)), (12, (1, 5, 9)), (24, (1, 11, 20)), (32, (1, 15, 28))],
)
def test_spread_taps_leave_an_eighth_of_the_layers_above(
    layers: int, taps: tuple[int, ...]
) -> None:
    """From 24 layers on they are the reference's; the last layer is never tapped."""
    assert spread_taps(layers) == taps
    assert Config(taps="spread").tap_layers(layers) == taps
    assert Config().tap_layers(layers) == default_taps(layers)


def test_parameters_match_published_checkpoints(target: Target) -> None:
    """Keys of SGLang's format; attention reads [embedding; state], twice the hidden size."""
    shapes = {name: tuple(p.shape) for name, p in built(target).named_parameters()}
    assert shapes == {
        "fc.weight": (H, 3 * H),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (HEADS * SIZE, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KEY_HEADS * SIZE, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KEY_HEADS * SIZE, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * SIZE),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (INNER, H),
        "midlayer.mlp.up_proj.weight": (INNER, H),
        "midlayer.mlp.down_proj.weight": (H, INNER),
        "norm.weight": (H,),
        "lm_head.weight": (tiny.DRAFTED, H),
    }


@pytest.mark.parametrize(
    "wrong", [{"depths": 0}, {"init": "best"}, {"attention": "flash"}, {"normalise": "batch"}]
)
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)  # type: ignore[arg-type]


# ---- a second implementation: plain loops over rows and depths -----------------------------------


class Literal:
    """Reference implementation of training-time test: one row, one depth, one head at a time.

    depth d, row t: embedding of x_{t+d}; state g_t, or the row's own output of depth d-1; rotary
    position t+d-1; keys of depth 1 at all rows <= t, and the row's own keys of depths 2..d.
    """

    def __init__(self, drafter: Eagle3, trace: Trace, row: int, start: int) -> None:
        self.w: dict[str, Tensor] = dict(drafter.state_dict())
        self.drafter, self.trace, self.row, self.start = drafter, trace, row, start

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + self.drafter.shape.eps).sqrt() * self.w[f"{name}.weight"]

    def wide(self, t: int, depth: int, state: Tensor) -> Tensor:
        embedding = self.drafter.target.embed(self.trace.ids[self.row, t + depth])
        return torch.cat(
            [
                self.norm("midlayer.input_layernorm", embedding),
                self.norm("midlayer.hidden_norm", state),
            ]
        )

    def project(self, which: str, x: Tensor, position: int) -> list[Tensor]:
        """One vector per head; queries and keys rotated by position * theta^(-2i/size)."""
        heads = list((self.w[f"midlayer.self_attn.{which}_proj.weight"] @ x).split(SIZE))
        return heads if which == "v" else [self.turn(head, position) for head in heads]

    def turn(self, x: Tensor, position: int) -> Tensor:
        out = torch.empty_like(x)
        for i in range(SIZE // 2):
            angle = torch.tensor(position * self.drafter.shape.rope_theta ** (-2 * i / SIZE))
            a, b = x[i], x[i + SIZE // 2]
            out[i] = a * angle.cos() - b * angle.sin()
            out[i + SIZE // 2] = a * angle.sin() + b * angle.cos()
        return out

    def fused(self, t: int) -> Tensor:
        low, middle, high = self.trace.taps[self.row, t].split(H)
        scale = self.w["tap_scale"]
        return self.w["fc.weight"] @ torch.cat([low * scale[0], middle * scale[1], high * scale[2]])

    def logits(self, t: int, depths: int) -> list[Tensor]:
        """Of row t, depth 1 first."""
        keys, values, out = [], [], []
        for before in range(self.start, t):
            wide = self.wide(before, 1, self.fused(before))
            keys.append(self.project("k", wide, before - self.start))
            values.append(self.project("v", wide, 0))
        state = self.fused(t)
        for depth in range(1, depths + 1):
            position = t - self.start + depth - 1
            wide = self.wide(t, depth, state)
            keys.append(self.project("k", wide, position))
            values.append(self.project("v", wide, 0))
            state = self.layer(state, self.project("q", wide, position), keys, values)
            out.append(self.w["lm_head.weight"] @ self.norm("norm", state))
        return out

    def layer(
        self,
        state: Tensor,
        query: list[Tensor],
        keys: list[list[Tensor]],
        values: list[list[Tensor]],
    ) -> Tensor:
        heads = []
        for head, q in enumerate(query):
            shared = head // (HEADS // KEY_HEADS)
            scores = torch.stack([q @ key[shared] for key in keys]) / SIZE**0.5
            weights = scores.softmax(0)
            heads.append(sum(w * value[shared] for w, value in zip(weights, values, strict=True)))
        state = state + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = self.norm("midlayer.post_attention_layernorm", state)
        gate, up = (self.w[f"midlayer.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        inner = gate * gate.sigmoid() * up
        return state + self.w["midlayer.mlp.down_proj.weight"] @ inner


@pytest.mark.parametrize("attention", ["fast", "reference"])
@torch.no_grad()
def test_the_unroll_equals_loops_over_rows_and_depths(target: Target, attention: str) -> None:
    drafter = built(target, attention=attention)
    trace = tiny.packed_trace(target)
    trained = [drafter.head(tiny.spread(guess, trace)) for guess in drafter.unroll(trace)]
    assert len(trained) == tiny.DEPTHS
    compared = 0
    for row, start, stop in tiny.document_spans(trace):
        literal = Literal(drafter, trace, row, start)
        for t in range(start, stop - 1):
            depths = min(tiny.DEPTHS, stop - 1 - t)
            for depth, logits in enumerate(literal.logits(t, depths), start=1):
                if trace.supervised_mask(depth)[row, t]:
                    torch.testing.assert_close(
                        trained[depth - 1][row, t], logits, atol=1e-4, rtol=1e-4
                    )
                    compared += 1
    assert compared == sum(int(trace.supervised_mask(d).sum()) for d in (1, 2, 3)) == 78


def test_fast_and_reference_attention_give_equal_gradients(target: Target) -> None:
    grads = []
    for attention in ("fast", "reference"):
        drafter = built(target, attention=attention)
        objective = Objective(drafter, target, weights=[1.0, 0.8, 0.64])
        loss, _ = objective(tiny.packed_trace(target), torch.ones(3))
        loss.backward()
        grads.append({name: p.grad for name, p in drafter.named_parameters()})
    for name, fast in grads[0].items():
        torch.testing.assert_close(fast, grads[1][name], atol=1e-4, rtol=1e-4, msg=name)


@torch.no_grad()
def test_every_depth_depends_on_the_newest_token(target: Target) -> None:
    """Depth d embeds x_{t+d}, and only the guesses from there on change."""
    drafter = built(target)
    trace = tiny.packed_trace(target)
    before = [tiny.spread(guess, trace) for guess in drafter.unroll(trace)]
    for newest in (1, 2, 3):
        ids, following = trace.ids.clone(), trace.next_ids.clone()
        ids[1, 6 + newest] = following[1, 5 + newest] = (int(ids[1, 6 + newest]) + 9) % tiny.VOCAB
        changed = dataclasses.replace(trace, ids=ids, next_ids=following)
        after = [tiny.spread(guess, changed) for guess in drafter.unroll(changed)]
        differs = [not torch.allclose(a[1, 6], b[1, 6]) for a, b in zip(before, after, strict=True)]
        assert differs == [depth >= newest for depth in (1, 2, 3)]


# ---- decoding state ------------------------------------------------------------------------------


@torch.no_grad()
def test_a_state_is_never_mutated(target: Target) -> None:
    drafter = built(target)
    trace = tiny.packed_trace(target)
    memory = drafter.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
    wider = drafter.step(memory, 2, torch.tensor([4, 9]), torch.tensor([0, 0]))[1]
    saved = [copy.deepcopy(contents(memory)), copy.deepcopy(contents(wider))]
    drafter.step(memory, 1, torch.tensor([3]), torch.tensor([0]))
    drafter.step(memory, 2, torch.tensor([7]), torch.tensor([0]))
    drafter.step(wider, 3, torch.tensor([5, 6, 8]), torch.tensor([1, 0, 1]))
    drafter.absorb(memory, tiny.verified_rows(trace, 1, 6, 9))
    for now, before in zip((memory, wider), saved, strict=True):
        torch.testing.assert_close(contents(now), before)


def contents(state: SelfFeedingState) -> list[Tensor]:
    """All tensors of a state; of buffers that states share, the rows that it reads."""
    kept = [part.rows for one in state.rows for part in (one.keys, one.values)]
    branch = [part for one in state.rows for part in one.branch or ()]
    return [*kept, *branch, state.hidden, state.position, state.ancestors]


@torch.no_grad()
def test_state_grows_by_verified_rows_only(target: Target) -> None:
    """Keys of a branch are stored in that branch's state only."""
    drafter = built(target)
    trace = tiny.packed_trace(target)
    memory = drafter.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
    branch = memory
    for depth in (1, 2, 3):
        _, branch = drafter.step(branch, depth, torch.tensor([4]), torch.tensor([0]))
    assert [len(m.rows[0]) for m in (memory, branch)] == [6, 6]
    assert memory.rows[0].branch is None
    assert branch.rows[0].branch is not None
    assert len(branch.rows[0].branch[0]) == 2  # depth 1 reads rows already absorbed
    longer = drafter.absorb(memory, tiny.verified_rows(trace, 1, 6, 9))
    assert len(longer.rows[0]) == 9
    assert longer.rows[0].branch is None
    assert memory.position == 5


# ---- initial weights -----------------------------------------------------------------------------


def first_loss(target: Target, init: str, **changes: Any) -> float:
    drafter = tiny.drafter("eagle3", target, init=init, **changes)
    traces = [tiny.packed_trace(target, seed=seed) for seed in range(40)]
    drafter.initialise(target, iter(traces[1:]))
    objective = Objective(drafter, target, weights=[1.0] * tiny.DEPTHS)
    with torch.no_grad():
        sums = objective(traces[0], torch.ones(tiny.DEPTHS))[1]
    return float(sums.loss[0] / sums.rows[0])


@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}])
def test_linear_init_beats_random_weights(heads: dict[str, Any]) -> None:
    target = tiny.target(**heads)
    linear, random = (first_loss(target, init) for init in ("linear", "random"))
    assert linear < random - 0.05


@pytest.mark.parametrize("kind", ["each", "joint"])
def test_linear_init_beats_random_weights_behind_a_norm(target: Target, kind: str) -> None:
    changes: Any = {"fc_norm": kind, "feedback": "normed"}
    linear, random = (first_loss(target, init, **changes) for init in ("linear", "random"))
    assert linear < random - 0.05


@torch.no_grad()
def test_linear_init_keeps_the_logits_of_a_state_that_is_fed_back(target: Target) -> None:
    """Also where the dimensions of the target's states have very different sizes."""
    sizes = torch.logspace(-1, 1, H)
    drafter = eagle3(target, init="linear", feedback="normed")
    traces = [tiny.packed_trace(target, seed=seed) for seed in range(20)]
    traces = [dataclasses.replace(one, last=one.last * sizes) for one in traces]
    drafter.initialise(target, traces)
    state = next(drafter.unroll(traces[0])).hidden
    fed_back = drafter.next_state(state)
    torch.testing.assert_close(drafter.head(fed_back), drafter.head(state), atol=1e-3, rtol=1e-3)
    assert float(drafter.head(state).std()) > 0.01


@pytest.mark.parametrize("kind", ["none", "each", "joint"])
@torch.no_grad()
def test_linear_init_fits_the_inputs_of_fc(target: Target, kind: str) -> None:
    """Each tap has about unit size, and `fc` is the ridge regression on what it reads."""
    drafter = eagle3(target, init="linear", fc_norm=kind)
    trace = tiny.packed_trace(target)
    drafter.initialise(target, [trace])
    rows = trace.supervised_rows(1)
    taps = trace.taps.flatten(0, 1)[rows].unflatten(-1, (3, H))
    eps = target.shape().eps
    if kind == "each":
        taps = taps / (taps.square().mean(-1, keepdim=True) + eps).sqrt()
    elif kind == "joint":
        taps = taps / (taps.square().mean((-2, -1), keepdim=True) + eps).sqrt()
        scale = drafter.get_parameter("input_norm.weight").view(3, H)
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
        taps = taps * scale
    else:
        taps = taps * drafter.tap_scale[:, None]
    assert drafter.tap_scale.eq(1).all() == (kind != "none")
    sizes = taps.square().mean(-1).sqrt().median(0).values
    assert bool(((sizes > 0.6) & (sizes < 1.6)).all())
    embedded = drafter.midlayer.input_layernorm(target.embed(trace.next_ids.flatten()[rows]))
    x = torch.cat([taps.flatten(1), embedded], -1).double()
    y = trace.last.flatten(0, 1)[rows + 1].double()
    moments = x.mT @ x / len(x)
    moments.diagonal().add_(0.01 * moments.diagonal().mean())
    fit = torch.linalg.solve(moments, x.mT @ (y / y.std(0, correction=0)) / len(x)).mT
    torch.testing.assert_close(drafter.fc.weight, fit[:, : 3 * H].float(), atol=1e-3, rtol=1e-3)
    read = drafter.initial_state(trace)[rows]
    torch.testing.assert_close(read, taps.flatten(1) @ drafter.fc.weight.T, atol=1e-4, rtol=1e-4)


def test_text_without_answers_leaves_random_weights(target: Target) -> None:
    drafter = eagle3(target, init="linear")
    trace = tiny.packed_trace(target)
    silent = dataclasses.replace(trace, answer=torch.zeros_like(trace.answer))
    before = copy.deepcopy(drafter.fc.weight)
    assert "no answer" in drafter.initialise(target, [silent])
    assert torch.equal(drafter.fc.weight, before)
    spoken = [silent, *(tiny.packed_trace(target, seed=seed) for seed in range(20))]
    assert "linear fit" in drafter.initialise(target, spoken)
    assert all(p.isfinite().all() for p in drafter.parameters())


def test_rows_first_attend_to_themselves() -> None:
    """Head size 64, as real targets have it: the fast pairs then single out one row."""
    target = tiny.target(head_dim=64)
    drafter = eagle3(target, init="linear")
    traces = [tiny.packed_trace(target, seed=seed) for seed in range(40)]
    drafter.initialise(target, traces)
    attn, trace = drafter.midlayer.self_attn, traces[0]
    states = drafter.initial_state(trace)
    wide = drafter._embed(trace.tokens_ahead(1).flatten(), states)[1]
    at = torch.arange(trace.ids.numel())
    query, key = attn.query(wide, at), attn.key_value(wide, at)[0]
    for group, head in enumerate(drafter._self_heads()):
        scores = query[:, head] @ key[:, group].mT * 64**-0.5
        causal = torch.ones_like(scores).tril().bool()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        assert weights.diagonal()[1:].median() > 0.5


# ---- later variants ------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {"layers": 3},
    {"qk_norm": True},
    {"head_dim": 12},
    {"fc_norm": "each"},
    {"fc_norm": "joint"},
    {"window": 3},
    {"layers": 2, "window": 3},
    {"feedback": "normed"},
    {"residual": "normed", "init": "random"},
    {"layers": 2, "qk_norm": True, "head_dim": 6, "fc_norm": "each", "feedback": "normed"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.no_grad()
def test_every_variant_decodes_as_it_was_trained(target: Target, changes: dict[str, Any]) -> None:
    """Rows in uneven pieces, then the text's own tokens as drafts, three deep."""
    drafter, compared = built(target, **changes), 0
    trace = tiny.packed_trace(target)
    trained = [drafter.head(tiny.spread(guess, trace)) for guess in drafter.unroll(trace)]
    for row, start, stop in tiny.document_spans(trace):
        state = None
        for first in range(start, stop - 1, 2):
            last = min(first + 2, stop - 1)
            state = drafter.absorb(state, tiny.verified_rows(trace, row, first, last))
            branch, t = state, last - 1
            for depth in range(1, min(tiny.DEPTHS, stop - 1 - t) + 1):
                ids = trace.ids[row, t + depth][None]
                logits, branch = drafter.step(branch, depth, ids, torch.zeros_like(ids))
                if trace.supervised_mask(depth)[row, t]:
                    torch.testing.assert_close(
                        logits[0], trained[depth - 1][row, t], atol=1e-4, rtol=1e-4
                    )
                    compared += 1
    assert compared > 30


def test_every_variant_is_another_network(target: Target) -> None:
    """The control: with the same shared weights, each setting changes the logits."""
    plain, trace = built(target), tiny.packed_trace(target)
    before = list(plain.unroll(trace))[1].hidden
    for changes in VARIANTS:
        drafter = built(target, **changes)
        own = drafter.state_dict()
        shared = {k: v for k, v in plain.state_dict().items() if own[k].shape == v.shape}
        drafter.load_state_dict(shared, strict=False)
        assert not torch.allclose(list(drafter.unroll(trace))[1].hidden, before, atol=1e-4)


def test_names_of_extra_layers_and_norms(target: Target) -> None:
    """Later layers read H values; q and k norms have the head size."""
    shapes = {
        name: tuple(p.shape)
        for name, p in eagle3(
            target, layers=2, qk_norm=True, head_dim=6, fc_norm="each"
        ).named_parameters()
    }
    assert shapes["layers.0.self_attn.q_proj.weight"] == (HEADS * 6, H)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (HEADS * 6, 2 * H)
    assert shapes["midlayer.self_attn.o_proj.weight"] == (H, HEADS * 6)
    assert shapes["midlayer.self_attn.q_norm.weight"] == (6,)
    assert [shapes[f"fc_norm.{i}.weight"] for i in range(3)] == [(H,)] * 3


def test_linear_init_of_several_layers(target: Target) -> None:
    """Later layers output zero at first: the guesses are those of one layer."""
    one, two = (eagle3(target, layers=layers, init="linear").eval() for layers in (1, 2))
    two.load_state_dict(one.state_dict(), strict=False)  # equal random weights
    trace, guesses = tiny.packed_trace(target), []
    for drafter in (one, two):
        drafter.initialise(target, [trace])
        guesses.append(drafter.head(next(drafter.unroll(trace)).hidden))
    torch.testing.assert_close(guesses[0], guesses[1], atol=1e-4, rtol=1e-4)
