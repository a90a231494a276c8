"""First weights of block drafters: the linear fit, and warm starts that change no logit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.drafters.dflash import Config, DFlash
from outrider.models.drafting import closed_form_init
from outrider.models.drafting.block.backbone import BlockDrafter
from outrider.models.formats import native
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import tiny
from tests.test_drafter_contract import absorbed


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def block(target: Target, name: str = "dflash", **changes: Any) -> BlockDrafter:
    made = tiny.drafter(name, target, **changes)
    assert isinstance(made, BlockDrafter)
    return made


def traces(target: Target, count: int) -> list[Trace]:
    return [tiny.packed_trace(target, seed=seed) for seed in range(1, count)]


# ---- the linear fit ------------------------------------------------------------------------------


def first_losses(target: Target, name: str, init: str) -> Tensor:
    """Nats of every depth on text that the fit has not read."""
    drafter = block(target, name, init=init, anchors=0.3).train()
    drafter.initialise(target, iter(traces(target, 40)))
    objective = Objective(drafter.eval(), target, weights=[1.0] * tiny.DEPTHS)
    with torch.no_grad():
        sums = objective(tiny.packed_trace(target, seed=0), torch.ones(tiny.DEPTHS))[1]
    nats: Tensor = sums.loss / sums.rows
    return nats


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_linear_fit_beats_random_weights_at_every_depth(name: str, target: Target) -> None:
    linear, random = (first_losses(target, name, init) for init in ("linear", "random"))
    assert bool((linear < random - 0.03).all())


@pytest.mark.parametrize(
    ("name", "changes"), [("dflash", {}), ("dspark", {}), ("dspark", {"markov_head": "rnn"})]
)
@torch.no_grad()
def test_fresh_drafters_guess_what_the_regression_predicts(
    name: str, changes: dict[str, Any], target: Target
) -> None:
    """One layer: the states are the embedded slots and the regression on what the heads read."""
    drafter, text = block(target, name, init="linear", layers=1, **changes), traces(target, 12)
    drafter.initialise(target, iter(text))
    read = list[Tensor]()
    layer = drafter.decoder_layers[0]
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    drafter.train().begin_step(0, 0.0)
    features, teacher, found = list[Tensor](), list[Tensor](), list[Tensor]()
    embedded = target.embed(torch.tensor(tiny.VOCAB - 1))
    for trace in text:
        read.clear()
        guesses = {guess.depth: guess for guess in drafter.unroll(trace)}
        rows = torch.nonzero(trace.supervised_mask(1).flatten()).flatten()
        kept = torch.isin(rows, torch.nonzero(trace.supervised_mask(3).flatten()).flatten())
        kept &= trace.supervised_mask(2).flatten()[rows]
        slots = drafter.drafted(read[0].unflatten(0, (-1, drafter.cfg.block_size)))[kept]
        hidden = torch.stack([guesses[d].states(rows[kept]) for d in (1, 2, 3)], dim=1)
        ahead = [trace.last.flatten(0, 1)[rows[kept] + d] for d in (1, 2, 3)]
        features, found = [*features, slots], [*found, hidden[..., : embedded.shape[-1]]]
        teacher.append(torch.stack(ahead, dim=1))
    x, y, states = (torch.cat(part).flatten(0, 1).double() for part in (features, teacher, found))
    shared = embedded.expand(len(y), -1).clone()
    if drafter.cfg.shifted:  # the first slot embeds the anchor
        kept_rows = [_full(trace) for trace in text]
        anchors = [t.next_ids.flatten()[r] for t, r in zip(text, kept_rows, strict=True)]
        shared[:: tiny.DEPTHS] = target.embed(torch.cat(anchors))
    rest = y / y.std(0) - shared
    moments = x.mT @ x / len(x)
    moments.diagonal().add_(closed_form_init.RIDGE * moments.diagonal().mean())
    weight = torch.linalg.solve(moments, x.mT @ rest / len(x))
    torch.testing.assert_close(states, shared + x @ weight, atol=2e-3, rtol=2e-3)
    guess = next(drafter.unroll(text[0]))
    logits = drafter.slot_logits(guess.hidden[:, : embedded.shape[-1]])
    assert torch.equal(drafter.head(guess.hidden), logits)  # a head for the token before is silent


def _full(trace: Trace) -> Tensor:
    masks = torch.stack([trace.supervised_mask(depth) for depth in (1, 2, 3)])
    return torch.nonzero(masks.all(0).flatten()).flatten()


@torch.no_grad()
def test_heads_read_the_row_at_their_lag() -> None:
    """Head size 64: of slot 2 the heads with lags 1 to 4 read a mask slot, anchor, c_t, c_t-1."""
    target = tiny.target(head_dim=64)
    drafter = block(target, init="linear", layers=1)
    drafter.initialise(target, iter(traces(target, 12)))
    layer, read = drafter.decoder_layers[0], list[Tensor]()
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    trace = tiny.packed_trace(target)
    root = torch.zeros(1, dtype=torch.long)
    drafter.step(absorbed(drafter.eval(), trace, 1, 0, 9), 1, trace.ids[1, 9:10], root)
    context = drafter.context(trace)[tiny.LENGTH : tiny.LENGTH + 9]
    slots = layer.input_layernorm(drafter.embed_block(trace.ids[1, 9:10]))[0]
    values = layer.self_attn.v_proj(torch.cat([context, slots])).unflatten(-1, (-1, 64))
    heads = read[-1].unflatten(-1, (-1, 64))[2]  # of slot 2, at row 9 + 2
    groups = len(heads) // values.shape[1]
    for head, out in enumerate(heads):
        expected = values[9 + 2 - (head + 1), head // groups]
        assert float((out - expected).norm() / expected.norm()) < 0.1


def test_text_without_whole_blocks_leaves_random_weights(target: Target) -> None:
    drafter, trace = block(target, init="linear"), tiny.packed_trace(target)
    silent = dataclasses.replace(trace, answer=torch.zeros_like(trace.answer))
    before = drafter.fc.weight.clone()
    assert "no answer as long as a block" in drafter.initialise(target, [silent])
    assert torch.equal(drafter.fc.weight, before)
    assert "linear fit" in drafter.initialise(target, [silent, *traces(target, 4)])
    assert all(p.isfinite().all() for p in drafter.parameters())


# ---- warm starts ---------------------------------------------------------------------------------


def stored(target: Target, folder: Path, name: str = "dflash", **changes: Any) -> BlockDrafter:
    drafter = block(target, name, seed=9, **changes).eval()
    native.save(drafter, folder, target, drafter.cfg, {})
    return drafter


def started(target: Target, folder: Path, name: str, **changes: Any) -> BlockDrafter:
    drafter = block(target, name, warm_start=str(folder), **changes).eval()
    type(drafter).check_first_weights(drafter.cfg, target.shape())
    assert str(folder) in drafter.initialise(target, [])
    return drafter


@torch.no_grad()
def logits(drafter: BlockDrafter, trace: Trace, depths: int = tiny.DEPTHS) -> list[Tensor]:
    rows = _full(trace)
    guesses = [guess for guess in drafter.unroll(trace) if guess.depth <= depths]
    return [drafter.head(guess.states(rows)) for guess in guesses]


UNSHIFTED = {"shifted": False}
STARTS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("dflash", {}, "dflash", {}),
    ("dflash", {}, "dspark", {**UNSHIFTED}),
    ("dflash", {}, "dspark", {**UNSHIFTED, "markov_head": "rnn", "confidence_head": "markov"}),
    ("dflash", {"shifted": True}, "dspark", {"markov_head": "gated", "layers": 4}),
    ("dflash", {"layers": 1}, "dflash", {"layers": 3}),
    ("dflash", {"causal": True, "window": 8}, "dflash", {"causal": True, "window": 8, "layers": 3}),
    ("dspark", {}, "dspark", {"layers": 3, "confidence_head": "slot"}),
]


@pytest.mark.parametrize(("first", "of", "then", "to"), STARTS, ids=str)
def test_a_warm_start_changes_no_logit(
    first: str, of: dict[str, Any], then: str, to: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    before = stored(target, tmp_path, first, **of)
    after, trace = started(target, tmp_path, then, **to), tiny.packed_trace(target)
    assert all(map(torch.equal, logits(after, trace), logits(before, trace)))
    root = torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        steps = [
            drafter.step(absorbed(drafter, trace, 1, 0, 9), 1, trace.ids[1, 9:10], root)[0]
            for drafter in (before, after)
        ]
    torch.testing.assert_close(*steps, rtol=0, atol=0)


@pytest.mark.parametrize("depths", [2, 6])
def test_another_length_of_a_causal_block_changes_no_guess(
    depths: int, target: Target, tmp_path: Path
) -> None:
    """At the depths that both have, up to the order of sums in attention of another size."""
    before = stored(target, tmp_path, causal=True)
    after = started(target, tmp_path, "dflash", causal=True, depths=depths)
    shared, trace = min(depths, tiny.DEPTHS), tiny.packed_trace(target)
    pairs = zip(logits(after, trace, shared), logits(before, trace, shared), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_another_length_of_a_bidirectional_block_is_the_old_network_at_that_length(
    target: Target, tmp_path: Path
) -> None:
    """Every slot reads every slot: the control, at the old length, has other logits."""
    before = stored(target, tmp_path)
    after, trace = started(target, tmp_path, "dflash", depths=6), tiny.packed_trace(target)
    longer = block(target, depths=6).eval()
    longer.load_state_dict(before.state_dict())
    assert all(map(torch.equal, logits(after, trace, 6), logits(longer, trace, 6)))
    assert not any(map(torch.equal, logits(after, trace), logits(before, trace)))


def test_what_is_new_learns_from_the_first_step(target: Target, tmp_path: Path) -> None:
    """Zero outputs have gradients: of the new layer, and of the head."""
    stored(target, tmp_path)
    after = started(target, tmp_path, "dspark", layers=3, depths=3, shifted=False).train()
    tiny.train_drafter(after, target, tiny.packed_trace(target), steps=2)
    new = [after.decoder_layers[2].self_attn.o_proj, after.get_submodule("markov_head.markov_w2")]
    assert all(module.get_parameter("weight").any() for module in new)


def test_a_published_folder_starts_a_training(target: Target, tmp_path: Path) -> None:
    from outrider.models import formats
    from tests import outside

    drafter = outside.Case("dflash", "zlab", {}, True).drafter(target)
    assert isinstance(drafter, BlockDrafter)
    formats.find("zlab", "dflash").write(drafter, target, None, tmp_path / "zlab")
    fields = {"taps": drafter.taps, "layers": 3, "shifted": False, "markov_rank": 4}
    after = started(target, tmp_path / "zlab", "dspark", **fields, depths=drafter.cfg.depths)
    trace = tiny.packed_trace(target)
    pairs = zip(drafter.unroll(trace), after.unroll(trace), strict=True)
    for theirs, ours in pairs:
        expected, found = drafter.head(theirs.hidden), after.slot_logits(ours.hidden[..., :32])
        ids = after.vocab.target_ids
        torch.testing.assert_close(found, expected[:, ids], atol=1e-5, rtol=1e-5)


REFUSED: list[tuple[str, dict[str, Any], str, dict[str, Any], str]] = [
    ("dflash", {}, "dspark", {}, "Set drafter.shifted=false"),
    ("dflash", {"causal": True}, "dflash", {}, "Set drafter.causal=true"),
    ("dflash", {}, "dflash", {"taps": (0, 2)}, r"Set drafter.taps=\[0,1,2\]"),
    ("dflash", {"window": 6}, "dflash", {}, "Set drafter.window=6"),
    ("dflash", {"mask_token_id": 3}, "dflash", {}, "Set drafter.mask_token_id=3"),
    ("dflash", {"activation": "gelu"}, "dflash", {}, "Set drafter.activation=gelu"),
    ("dflash", {"layers": 3}, "dflash", {}, "Set drafter.layers=3 or more"),
    ("dspark", {}, "dflash", {"shifted": True}, "Use drafter=dspark"),
    ("dspark", {"markov_rank": 4}, "dspark", {"markov_rank": 8}, "Set drafter.markov_rank=4"),
    ("dspark", {}, "dspark", {"markov_head": "rnn"}, "Set drafter.markov_head=vanilla"),
    ("dspark", {"confidence_head": "slot"}, "dspark", {}, "Set drafter.confidence_head=slot"),
    ("eagle3", {}, "dflash", {}, "Give drafter.warm_start a dflash or dspark drafter"),
]


@pytest.mark.parametrize(("first", "of", "then", "to", "fix"), REFUSED, ids=str)
def test_weights_that_do_not_fit_are_refused_with_the_setting(
    first: str, of: dict[str, Any], then: str, to: dict[str, Any], fix: str, target: Target,
    tmp_path: Path,
) -> None:  # fmt: skip
    """By the headers, before the target is read, and again by the weights."""
    drafter = tiny.drafter(first, target, **of)
    native.save(drafter, tmp_path, target, getattr(drafter, "cfg", None), {})
    after = block(target, then, warm_start=str(tmp_path), **to)
    with pytest.raises(RunError, match=fix):
        type(after).check_first_weights(after.cfg, target.shape())
    with pytest.raises(RunError, match=fix):
        after.initialise(target, [])


def test_a_layer_of_another_shape_is_refused(target: Target, tmp_path: Path) -> None:
    from outrider.models import drafters

    shape = target.shape()._replace(intermediate=80)
    other = drafters.build(tiny.config("dflash"), target, tiny.vocab(), shape)
    native.save(other, tmp_path, target, other.cfg, {})
    after = block(target, warm_start=str(tmp_path))
    with pytest.raises(RunError, match="intermediate = 80"):
        after.initialise(target, [])


def test_a_head_over_other_tokens_is_refused(target: Target, tmp_path: Path) -> None:
    stored(target, tmp_path, "dspark")
    other = tiny.drafter("dspark", target, tiny.vocab(tiny.VOCAB), warm_start=str(tmp_path))
    with pytest.raises(RunError, match=r"Set drafter\.draft_vocab_size=40"):
        other.initialise(target, [])


def test_a_warm_start_has_its_own_weights(tmp_path: Path, target: Target) -> None:
    assert Config(warm_start="x").adjusted == ("init=random",)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty"):
        DFlash.check_first_weights(Config(warm_start=str(tmp_path / "empty")), target.shape())
