"""Tests specific to MTP; the common contract is in test_drafter_contract.py."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafters.mtp import Config, Mtp
from outrider.models.drafting.mtp_modules import MtpChainState
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.losses import parse_depth_weights
from outrider.train.metric_sums import MetricSums
from outrider.train.objective import Objective
from tests import tiny

H, HEADS, KEY_HEADS, SIZE, INNER = 32, 4, 2, 8, 48  # of the small llama in families.py
ONLY = torch.zeros(1, dtype=torch.long)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"feed": "raw", "order": "state_first"},
    {"depths": 5, "qk_norm": True},
    {"depths": 1},
    {"mode": "recurrent"},
    {"mode": "recurrent", "feed": "raw", "order": "state_first", "qk_norm": True},
]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def built(target: Target, seed: int = 5, **changes: Any) -> Mtp:
    drafter = tiny.drafter("mtp", target, **changes)
    assert isinstance(drafter, Mtp)
    torch.manual_seed(seed)
    with torch.no_grad():  # norms of 1 would hide where they belong
        for name, value in drafter.named_parameters():
            if name.endswith("norm.weight"):
                value.uniform_(0.5, 1.5)
    return drafter.eval()


def text(target: Target, count: int = 12) -> Trace:
    """One document, every token supervised."""
    ids = torch.randint(3, tiny.VOCAB, (1, count), generator=torch.Generator().manual_seed(8))
    row = torch.arange(count)[None]
    return target.trace(ids, torch.ones_like(ids).bool(), torch.zeros_like(ids), row)


def unrolled(drafter: Mtp, trace: Trace) -> list[Tensor]:
    """Logits [B, T, Vd], depth 1 first."""
    return [drafter.head(tiny.spread(guess, trace)) for guess in drafter.unroll(trace)]


def stepped(drafter: Mtp, memory: Any, tokens: list[int]) -> list[Tensor]:
    """Logits [Vd] of every depth along one path, the newest true token first."""
    found = []
    for depth, token in enumerate(tokens, start=1):
        logits, memory = drafter.step(memory, depth, torch.tensor([token]), ONLY)
        found.append(logits[0])
    return found


# ---- parameters and settings ---------------------------------------------------------------------


def test_parameters_have_the_names_and_shapes_of_the_published_module(target: Target) -> None:
    """DeepSeek's names; those of the decoder layer are under `block`."""
    shapes = {name: tuple(p.shape) for name, p in built(target, depths=1).named_parameters()}
    assert shapes == {
        "stages.0.enorm.weight": (H,),
        "stages.0.hnorm.weight": (H,),
        "stages.0.eh_proj.weight": (H, 2 * H),
        "stages.0.block.input_layernorm.weight": (H,),
        "stages.0.block.self_attn.q_proj.weight": (HEADS * SIZE, H),
        "stages.0.block.self_attn.k_proj.weight": (KEY_HEADS * SIZE, H),
        "stages.0.block.self_attn.v_proj.weight": (KEY_HEADS * SIZE, H),
        "stages.0.block.self_attn.o_proj.weight": (H, HEADS * SIZE),
        "stages.0.block.post_attention_layernorm.weight": (H,),
        "stages.0.block.mlp.gate_proj.weight": (INNER, H),
        "stages.0.block.mlp.up_proj.weight": (INNER, H),
        "stages.0.block.mlp.down_proj.weight": (H, INNER),
        "stages.0.norm.weight": (H,),
    }


@pytest.mark.parametrize(("mode", "stages", "reach"), [("chained", 4, 4), ("recurrent", 1, 2**31)])
def test_a_chain_has_a_module_per_depth_and_a_loop_has_one(
    target: Target, mode: str, stages: int, reach: int
) -> None:
    drafter = built(target, mode=mode, depths=4)
    assert (len(drafter.stages), drafter.max_depth) == (stages, reach)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "looped"},
        {"order": "hidden_first"},
        {"feed": "both"},
        {"init": "best"},
        {"attention": "flash"},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)


def test_target_init_needs_warm_start() -> None:
    with pytest.raises(ValueError, match="warm_start"):
        Config(init="target")


# ---- a second implementation: plain loops over modules and rows ----------------------------------


class Literal:
    """One module, one row, one head at a time, for a document of a trace."""

    def __init__(self, drafter: Mtp, trace: Trace, row: int, start: int) -> None:
        self.w: dict[str, Tensor] = dict(drafter.state_dict())
        self.cfg, self.target, self.shape = drafter.cfg, drafter.target, tiny.target().shape()
        self.trace, self.row, self.start = trace, row, start

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + self.shape.eps).sqrt() * self.w[f"{name}.weight"]

    def joint(self, k: int, token: int, state: Tensor) -> Tensor:
        """M [enorm(Emb(x)) ; hnorm(h)]."""
        embedding = self.target.embed(self.trace.ids[self.row, token])
        halves = [self.norm(f"stages.{k}.enorm", embedding), self.norm(f"stages.{k}.hnorm", state)]
        if self.cfg.order == "state_first":
            halves.reverse()
        return self.w[f"stages.{k}.eh_proj.weight"] @ torch.cat(halves)

    def project(self, k: int, which: str, joint: Tensor, position: int) -> list[Tensor]:
        read = self.norm(f"stages.{k}.block.input_layernorm", joint)
        name = f"stages.{k}.block.self_attn.{which}"
        heads = list((self.w[f"{name}_proj.weight"] @ read).split(SIZE))
        if which != "v" and self.cfg.qk_norm:
            heads = [self.norm(f"{name}_norm", head) for head in heads]
        return heads if which == "v" else [self.turn(head, position) for head in heads]

    def turn(self, x: Tensor, position: int) -> Tensor:
        out = torch.empty_like(x)
        for i in range(SIZE // 2):
            angle = torch.tensor(position * self.shape.rope_theta ** (-2 * i / SIZE))
            a, b = x[i], x[i + SIZE // 2]
            out[i] = a * angle.cos() - b * angle.sin()
            out[i + SIZE // 2] = a * angle.sin() + b * angle.cos()
        return out

    def layer(self, k: int, joints: list[tuple[Tensor, int]]) -> Tensor:
        """Output at the last of these (input, rotary position), which attends to all of them."""
        name, (residual, at) = f"stages.{k}.block", joints[-1]
        keys = [self.project(k, "k", joint, position) for joint, position in joints]
        values = [self.project(k, "v", joint, 0) for joint, _ in joints]
        heads = []
        for head, query in enumerate(self.project(k, "q", residual, at)):
            shared = head // (HEADS // KEY_HEADS)
            scores = torch.stack([query @ key[shared] for key in keys]) / SIZE**0.5
            weights = scores.softmax(0)
            heads.append(sum(w * value[shared] for w, value in zip(weights, values, strict=True)))
        state = residual + self.w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = self.norm(f"{name}.post_attention_layernorm", state)
        gate, up = (self.w[f"{name}.mlp.{part}_proj.weight"] @ x for part in ("gate", "up"))
        return state + self.w[f"{name}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def fed(self, k: int, hidden: Tensor) -> Tensor:
        return hidden if self.cfg.feed == "raw" else self.norm(f"stages.{k}.norm", hidden)

    def chained(self, t: int, depth: int) -> Tensor:
        """h^depth at row t, before the norm."""
        k, joints = depth - 1, []
        for row in range(self.start, t + 1):
            below = self.trace.last[self.row, row]
            if depth > 1:
                below = self.fed(k - 1, self.chained(row, depth - 1))
            joints.append((self.joint(k, row + depth, below), row - self.start))
        return self.layer(k, joints)

    def recurrent(self, t: int, depth: int) -> Tensor:
        joints = [
            (self.joint(0, row + 1, self.trace.last[self.row, row]), row - self.start)
            for row in range(self.start, t + 1)
        ]
        hidden = self.layer(0, joints)
        for deeper in range(2, depth + 1):
            position = t - self.start + deeper - 1
            joints.append((self.joint(0, t + deeper, self.fed(0, hidden)), position))
            hidden = self.layer(0, joints)
        return hidden

    def state(self, t: int, depth: int) -> Tensor:
        if self.cfg.mode == "chained":
            return self.norm(f"stages.{depth - 1}.norm", self.chained(t, depth))
        return self.norm("stages.0.norm", self.recurrent(t, depth))


@pytest.mark.parametrize("attention", ["fast", "reference"])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "depths" not in v], ids=str)
@torch.no_grad()
def test_the_unroll_equals_loops_over_modules_and_rows(
    target: Target, variant: dict[str, Any], attention: str
) -> None:
    drafter = built(target, attention=attention, **variant)
    trace, compared = tiny.packed_trace(target), 0
    for guess in drafter.unroll(trace):
        depth, hidden = guess.depth, tiny.spread(guess, trace)
        for row, start, stop in tiny.document_spans(trace):
            literal = Literal(drafter, trace, row, start)
            for t in range(start, min(stop, start + 8)):  # loops of loops: eight rows are enough
                if trace.supervised_mask(depth)[row, t]:
                    expected = literal.state(t, depth)
                    torch.testing.assert_close(hidden[row, t], expected, atol=1e-4, rtol=1e-4)
                    compared += 1
    assert compared > 40


@pytest.mark.parametrize("mode", ["chained", "recurrent"])
def test_fast_and_reference_attention_give_equal_gradients(target: Target, mode: str) -> None:
    grads = []
    for attention in ("fast", "reference"):
        drafter = built(target, mode=mode, attention=attention)
        objective = Objective(drafter, target, weights=[0.1] * 3)
        objective(tiny.packed_trace(target), torch.ones(3))[0].backward()
        grads.append({name: p.grad for name, p in drafter.named_parameters()})
    for name, fast in grads[0].items():
        torch.testing.assert_close(fast, grads[1][name], atol=1e-4, rtol=1e-4, msg=name)


# ---- inputs of a row -----------------------------------------------------------------------------

READ_TOKENS = {  # tokens x0..x7 that guesses at rows 0..3 depend on; x0 only through states
    1: ["01000000", "01100000", "01110000", "01111000"],
    2: ["01100000", "01110000", "01111000", "01111100"],
    3: ["01110000", "01111000", "01111100", "01111110"],
}
READ_STATES = ["10000000", "11000000", "11100000", "11110000"]  # at every depth


def changes(drafter: Mtp, before: Trace, after: list[Trace], depth: int) -> list[str]:
    """For rows 0..3, a 1 for every changed trace that changes the guess."""
    ours = unrolled(drafter, before)[depth - 1]
    others = [unrolled(drafter, trace)[depth - 1] for trace in after]
    changed = [
        [int(not torch.equal(ours[0, t], other[0, t])) for other in others] for t in range(4)
    ]
    return ["".join(map(str, row)) for row in changed]


@pytest.mark.parametrize("depth", [1, 2, 3])
@torch.no_grad()
def test_module_k_reads_k_tokens_after_the_row_and_no_later_state(
    target: Target, depth: int
) -> None:
    drafter, trace = built(target), text(target)
    tokens = [tiny.with_tokens(trace, 0, j, [(int(trace.ids[0, j]) + 7) % 61]) for j in range(8)]
    states = [tiny.with_other_states(trace, 0, j, j + 1) for j in range(8)]
    assert changes(drafter, trace, tokens, depth) == READ_TOKENS[depth]
    assert changes(drafter, trace, states, depth) == READ_STATES


@torch.no_grad()
def test_feed_changes_deeper_guesses_and_order_changes_all(target: Target) -> None:
    """The same weights under other settings."""
    trace = text(target)
    plain = unrolled(built(target), trace)
    for name, value, differs in [
        ("feed", "raw", [False, True, True]),
        ("order", "state_first", [True, True, True]),
    ]:
        other = built(target, **{name: value})  # type: ignore[arg-type]
        other.load_state_dict(built(target).state_dict())
        pairs = zip(plain, unrolled(other, trace), strict=True)
        assert [not torch.allclose(a[0, :8], b[0, :8]) for a, b in pairs] == differs


@torch.no_grad()
def test_order_swaps_the_halves_of_the_projection_input(target: Target) -> None:
    drafter, other = built(target), built(target, order="state_first")
    weights = drafter.state_dict()
    for name in weights:
        if name.endswith("eh_proj.weight"):
            weights[name] = weights[name].roll(H, dims=1)
    other.load_state_dict(weights)
    for a, b in zip(unrolled(drafter, text(target)), unrolled(other, text(target)), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


# ---- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@torch.no_grad()
def test_every_variant_decodes_what_it_was_trained_on(
    target: Target, variant: dict[str, Any]
) -> None:
    """From the first row on, where the text is shorter than the chain."""
    drafter, trace, memory = built(target, **variant), text(target), None
    trained = unrolled(drafter, trace)
    for t in range(12 - len(trained) - 1):
        memory = drafter.absorb(memory, tiny.verified_rows(trace, 0, t, t + 1))
        tokens = trace.ids[0, t + 1 : t + 1 + len(trained)].tolist()
        for depth, logits in enumerate(stepped(drafter, memory, tokens)):
            torch.testing.assert_close(logits, trained[depth][0, t], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
@torch.no_grad()
def test_module_k_keeps_k_minus_1_rows_fewer_than_there_are(target: Target, rows: int) -> None:
    drafter = built(target)
    memory = drafter.absorb(None, tiny.verified_rows(text(target), 0, 0, rows))
    expected = [max(0, rows - k + 1) for k in (1, 2, 3)]
    assert [len(one) for one in memory.rows] == expected
    _, branch = drafter.step(memory, 2, torch.tensor([4]), ONLY)
    _, branch = drafter.step(branch, 3, torch.tensor([5]), ONLY)
    assert [len(one) for one in branch.rows] == expected
    assert all(one.branch is None for one in branch.rows)  # drafted rows are not stored


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("onto", ["root", "branch"])
@torch.no_grad()
def test_state_after_partial_acceptance_is_that_of_the_text(
    target: Target, accepted: int, onto: str
) -> None:
    """Eight rows, three drafts of which the first `accepted` are right, and the outcome."""
    drafter, trace = built(target, depths=4), text(target, 14)
    memory = drafter.absorb(None, tiny.verified_rows(trace, 0, 0, 8))
    right = trace.ids[0, 9:12].tolist()
    drafts = right[:accepted] + [(token + 7) % 61 for token in right[accepted:]]
    branch = memory
    for depth, token in enumerate([int(trace.ids[0, 8]), *drafts], start=1):
        _, branch = drafter.step(branch, depth, torch.tensor([token]), ONLY)
    verdict = tiny.verified_rows(trace, 0, 8, 9 + accepted)
    after = drafter.absorb(memory if onto == "root" else branch, verdict)
    fresh = drafter.absorb(None, tiny.verified_rows(trace, 0, 0, 9 + accepted))
    tokens = [int(trace.ids[0, 9 + accepted]), 20, 30, 40]
    found, expected = stepped(drafter, after, tokens), stepped(drafter, fresh, tokens)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rejected_drafts_left_in_the_state_would_change_logits(target: Target) -> None:
    """The control of the test above: rows 6 and 7 absorbed with drafted tokens after them."""
    drafter, trace = built(target), text(target)
    wrong = tiny.with_tokens(trace, 0, 8, [(int(trace.ids[0, 8]) + 7) % 61])
    fresh = drafter.absorb(None, tiny.verified_rows(trace, 0, 0, 9))
    memory = drafter.absorb(None, tiny.verified_rows(wrong, 0, 0, 8))
    stale = drafter.absorb(memory, tiny.verified_rows(trace, 0, 8, 9))
    tokens = trace.ids[0, 9:12].tolist()
    pairs = zip(stepped(drafter, stale, tokens), stepped(drafter, fresh, tokens), strict=True)
    assert not any(torch.allclose(a, b, atol=1e-4) for a, b in pairs)


def contents(state: MtpChainState) -> list[Tensor]:
    """All tensors of a state; `rows` are those that it reads of shared buffers."""
    kept = [part.rows for one in state.rows for part in (one.keys, one.values)]
    return [*kept, *state.newest, state.position, state.path, state.branch]


@torch.no_grad()
def test_a_state_is_never_mutated(target: Target) -> None:
    drafter, trace = built(target), text(target)
    memory = drafter.absorb(None, tiny.verified_rows(trace, 0, 0, 6))
    wider = drafter.step(memory, 2, torch.tensor([4, 9]), torch.tensor([0, 0]))[1]
    saved = [copy.deepcopy(contents(memory)), copy.deepcopy(contents(wider))]
    drafter.step(memory, 1, torch.tensor([3]), ONLY)
    drafter.step(memory, 2, torch.tensor([7]), ONLY)
    drafter.step(wider, 3, torch.tensor([5, 6, 8]), torch.tensor([1, 0, 1]))
    drafter.absorb(memory, tiny.verified_rows(trace, 0, 6, 9))
    for now, before in zip((memory, wider), saved, strict=True):
        torch.testing.assert_close(contents(now), before)


# ---- objective -----------------------------------------------------------------------------------


@torch.no_grad()
def test_hard_label_loss_is_that_of_deepseek(target: Target) -> None:
    """lambda/D sum_k CE_k, lambda = 0.3: cross-entropies of x_{t+k+1}, a mean over rows each."""
    drafter = tiny.drafter("mtp", target, tiny.vocab(tiny.VOCAB)).eval()
    weights = parse_depth_weights(Config().depth_weights, 3)
    assert weights == pytest.approx([0.1, 0.1, 0.1])
    trace = text(target)
    divide = torch.tensor([float(trace.supervised_mask(d).sum()) for d in (1, 2, 3)])
    loss, _ = Objective(drafter, target, weights=weights, loss=["ce"])(trace, divide)
    expected = torch.zeros(())
    for k, guess in enumerate(drafter.unroll(trace), start=1):
        rows = 12 - k - 1
        logits = target.logits(tiny.spread(guess, trace)[0, :rows])
        labels = trace.ids[0, k + 1 :]
        expected += 0.3 / 3 * torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected)


# ---- initial weights -----------------------------------------------------------------------------


def first_losses(target: Target, **settings: Any) -> Tensor:
    """Nats per row at every depth, on held-out text."""
    drafter = tiny.drafter("mtp", target, **settings)
    drafter.initialise(target, iter(tiny.packed_trace(target, seed=seed) for seed in range(1, 60)))
    objective = Objective(drafter, target, weights=[1.0] * tiny.DEPTHS)
    with torch.no_grad():
        sums: MetricSums = objective(tiny.packed_trace(target, seed=0), torch.ones(tiny.DEPTHS))[1]
    return sums.loss / sums.rows


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "depths" not in v], ids=str)
def test_linear_init_beats_random_weights(target: Target, variant: dict[str, Any]) -> None:
    """At every depth that has a regression of its own."""
    linear, random = (first_losses(target, init=init, **variant) for init in ("linear", "random"))
    fitted = 1 if variant.get("mode") == "recurrent" else tiny.DEPTHS
    assert (linear[:fitted] < random[:fitted] - 0.05).all()


@torch.no_grad()
def test_first_module_is_the_ridge_regression(target: Target) -> None:
    """Against the normal equations of the supervised rows; the layers output zero."""
    drafter = tiny.drafter("mtp", target, init="linear")
    assert isinstance(drafter, Mtp)
    traces = [tiny.packed_trace(target, seed=seed) for seed in range(20)]
    drafter.initialise(target, traces)
    inputs, targets = [], []
    for trace in traces:
        for row, t in trace.supervised_mask(1).nonzero().tolist():
            halves = [target.embed(trace.ids[row, t + 1]), trace.last[row, t]]
            units = [x / (x.square().mean() + target.shape().eps).sqrt() for x in halves]
            inputs.append(torch.cat(units))
            targets.append(trace.last[row, t + 1])
    x, y = torch.stack(inputs).double(), torch.stack(targets).double()
    spread = y.std(0, unbiased=False)
    moment = x.T @ x / len(x)
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(2 * H)
    weight = torch.linalg.solve(damped, x.T @ (y / spread) / len(x)).T
    joint, norm = (drafter.state_dict()[f"stages.0.{part}.weight"] for part in ("eh_proj", "norm"))
    torch.testing.assert_close(joint.double(), weight, atol=1e-3, rtol=1e-3)
    ratio = norm.double() / spread
    torch.testing.assert_close(ratio, ratio[:1].expand(H), atol=1e-4, rtol=1e-4)
    trace = traces[0]
    hidden = tiny.spread(next(iter(drafter.unroll(trace))), trace)
    row, t = trace.supervised_mask(1).nonzero()[0].tolist()
    fitted = (x[0] @ weight.T).float()
    expected = fitted / fitted.square().mean().sqrt() * norm
    torch.testing.assert_close(hidden[row, t], expected, atol=1e-3, rtol=1e-3)


def test_text_without_answers_leaves_random_weights(target: Target) -> None:
    drafter = tiny.drafter("mtp", target, init="linear")
    trace = tiny.packed_trace(target)
    silent = dataclasses.replace(trace, answer=torch.zeros_like(trace.answer))
    before = copy.deepcopy(drafter.state_dict())
    assert "no answer" in drafter.initialise(target, [silent])
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    assert "linear fit" in drafter.initialise(target, [silent, trace])
    assert all(p.isfinite().all() for p in drafter.parameters())
