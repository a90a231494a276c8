"""Tests specific to a draft model; the common contract is in test_drafter_contract.py."""

import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.models.drafters.draft_lm import Config, DraftLm, DraftLmState
from outrider.models.drafting.causal_lm import resolve_width
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.interface import Batch, Trace
from outrider.models.target.target import Target
from outrider.train.losses import parse_depth_weights
from outrider.train.objective import Objective
from outrider.train.settings import parse
from tests import tiny
from tests.families import small_model

V, COLD = tiny.VOCAB, 1e-5
PRETRAINED = ["llama", "llama_tied", "gpt2", "mistral", "gemma2", "gpt_neox"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of published models."""
    found = {}
    for family in PRETRAINED:
        found[family] = str(tmp_path_factory.mktemp(family))
        small_model(family, seed=7).save_pretrained(found[family])
    return found


def draft_lm(of: Target, vocab: DraftVocab | None = None, **changes: Any) -> DraftLm:
    drafter = tiny.drafter("draft_lm", of, vocab, **changes)
    assert isinstance(drafter, DraftLm)
    return drafter.eval()


def whole() -> DraftVocab:
    return tiny.vocab(V)


@torch.no_grad()
def alone(model: Any, text: list[int]) -> Tensor:
    """Return the logits of transformers after a text, without cache or mask."""
    out: Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
    return out


def supervised(trace: Trace, depth: int) -> list[tuple[int, int, int]]:
    """(row, start of the document, t) of every supervised guess."""
    return [
        (row, start, t)
        for row, start, stop in tiny.document_spans(trace)
        for t in range(start, stop)
        if trace.supervised_mask(depth)[row, t]
    ]


# ---- one pass gives all depths -------------------------------------------------------------------


@pytest.mark.parametrize("family", [None, *PRETRAINED])
@torch.no_grad()
def test_unroll_equals_the_model_on_every_prefix(
    target: Target, folders: dict[str, str], family: str | None
) -> None:
    """Depth d, row t: the model's logits after x_0..x_{t+d} of the row's document."""
    drafter = draft_lm(target, path=None if family is None else folders[family])
    trace, compared = tiny.packed_trace(target), 0
    for guess in drafter.unroll(trace):
        logits = drafter.head(tiny.spread(guess, trace))
        for row, start, t in supervised(trace, guess.depth):
            text = trace.ids[row, start : t + guess.depth + 1].tolist()
            expected = alone(drafter.lm.model, text)[drafter.vocab.target_ids]
            torch.testing.assert_close(logits[row, t], expected, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared == 78


@torch.no_grad()
def test_a_depth_is_the_previous_depth_one_row_later(target: Target) -> None:
    """No depth copies the states."""
    first, second, third = draft_lm(target).unroll(tiny.packed_trace(target))
    for earlier, later in ((first, second), (second, third)):
        assert torch.equal(earlier.rows[1:] - 1, later.rows)
        assert later.hidden.data_ptr() == earlier.hidden[1:].data_ptr()


@torch.no_grad()
def test_depths_beyond_the_text_are_empty(target: Target) -> None:
    trace = tiny.slice_trace(tiny.packed_trace(target), slice(0, 1), slice(0, 2))
    rows = [guess.rows.tolist() for guess in draft_lm(target).unroll(trace)]
    assert rows == [[0], [], []]


def test_only_the_first_depth_is_trained() -> None:
    assert parse_depth_weights(Config().depth_weights, 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [tiny.DRAFTED, V])
def test_alpha_is_the_acceptance_probability(target: Target, size: int) -> None:
    """Of each position: sum over tokens of min(p, q), q is 0 outside the draft vocabulary."""
    drafter, trace = draft_lm(target, tiny.vocab(size)), tiny.packed_trace(target)
    _, sums = Objective(drafter, target, weights=[1.0, 0.0, 0.0])(trace, torch.ones(3), True)
    for depth in (1, 2, 3):
        alpha = 0.0
        for row, start, t in supervised(trace, depth):
            text = trace.ids[row, start : t + depth + 1].tolist()
            p = alone(target.model, text).softmax(0).tolist()
            draft_ids = drafter.vocab.target_ids
            q = alone(drafter.lm.model, text)[draft_ids].softmax(0).tolist()
            alpha += sum(min(p[v], qv) for v, qv in zip(draft_ids.tolist(), q, strict=True))
        assert sums.rows[depth - 1] == len(supervised(trace, depth))
        assert float(sums.alpha[depth - 1]) == pytest.approx(alpha, rel=1e-4)


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "jsd:0.5", "tv"])
def test_the_target_itself_is_a_perfect_draft_model(loss: str, tmp_path: Path) -> None:
    """Each divergence of DistillSpec is 0 there, and every draft is accepted."""
    target = tiny.target("llama", seed=7)
    target.model.save_pretrained(tmp_path)
    drafter = draft_lm(target, whole(), path=str(tmp_path))
    objective = Objective(drafter, target, weights=[1.0, 1.0, 1.0], loss=[loss])
    _, sums = objective(tiny.packed_trace(target), torch.ones(3), True)
    torch.testing.assert_close(sums.loss, torch.zeros(3).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(sums.alpha, sums.rows, atol=1e-3, rtol=0)


# ---- decoding state ------------------------------------------------------------------------------


def tensors(state: DraftLmState) -> list[Tensor]:
    layers = state.rows.layers
    kept = [part.rows for rows in layers for part in (rows.keys, rows.values)]
    branch = [part for rows in layers for part in rows.branch or ()]
    return [*kept, *branch, state.rows.branch_positions, state.hidden, state.ancestors]


@torch.no_grad()
def test_a_state_is_never_mutated(target: Target) -> None:
    drafter, trace = draft_lm(target), tiny.packed_trace(target)
    state = drafter.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
    branch = drafter.step(state, 2, torch.tensor([4, 9]), torch.tensor([0, 0]))[1]
    saved = [copy.deepcopy(tensors(state)), copy.deepcopy(tensors(branch))]
    drafter.step(state, 2, torch.tensor([7]), torch.tensor([0]))
    drafter.step(branch, 3, torch.tensor([5, 6, 8]), torch.tensor([1, 0, 1]))
    drafter.absorb(state, tiny.verified_rows(trace, 1, 6, 9))
    for now, before in zip((state, branch), saved, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(now), before, strict=True))


@torch.no_grad()
def test_state_holds_the_text_and_no_branch(target: Target) -> None:
    """Six rows verified: x_0..x_6 are read. Drafted tokens are stored in their branch only."""
    drafter, trace = draft_lm(target), tiny.packed_trace(target)
    state = branch = drafter.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
    for depth in (1, 2, 3):
        _, branch = drafter.step(branch, depth, torch.tensor([4]), torch.tensor([0]))
    longer = drafter.absorb(state, tiny.verified_rows(trace, 1, 6, 9))
    assert [one.rows.length for one in (state, branch, longer)] == [7, 7, 10]
    assert branch.rows.branch_positions.tolist() == [7, 8]  # depth 1 reads nothing new
    assert not len(state.rows.branch_positions) + len(longer.rows.branch_positions)
    for one in (state, branch, longer):
        assert len(one.rows.layers) == drafter.lm.num_layers
        assert {len(rows) for rows in one.rows.layers} == {one.rows.length}


@torch.no_grad()
def test_a_draft_token_copies_no_row_of_the_text(target: Target) -> None:
    drafter, trace = draft_lm(target), tiny.packed_trace(target)
    state = drafter.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
    _, branch = drafter.step(state, 2, torch.tensor([4, 9]), torch.tensor([0, 0]))
    longer = drafter.absorb(state, tiny.verified_rows(trace, 1, 6, 9))
    addresses = {
        tuple(rows.keys.rows.data_ptr() for rows in one.rows.layers)
        for one in (state, branch, longer)
    }
    assert len(addresses) == 1


# ---- weights -------------------------------------------------------------------------------------


def test_a_new_body_has_the_parameters_of_a_small_tied_llama(target: Target) -> None:
    """D = 16, I = 24: V D + layers (4 D D + 3 D I + 2 D) + D, the embedding counted once."""
    drafter = draft_lm(target, whole(), layers=3)
    count = sum(p.numel() for p in drafter.parameters())
    assert count == V * 16 + 3 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 16
    saved = {name: v for name, v in drafter.state_dict().items() if not name.startswith("vocab.")}
    assert sum(v.numel() for v in saved.values()) == count
    assert "lm_head.weight" not in saved


def test_an_embedding_starts_small(target: Target) -> None:
    std = draft_lm(target).lm_head.weight.std().item()
    assert std == pytest.approx(0.02, rel=0.1)


def test_an_untied_head_is_saved_beside_the_embedding(
    target: Target, folders: dict[str, str]
) -> None:
    saved = draft_lm(target, path=folders["llama"]).state_dict()
    assert {"lm_head.weight", "body.embed_tokens.weight"} <= set(saved)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (16, 2)),  # half of 32; heads of the target's size 8
        ({"heads": 3}, (12, 3)),  # 16 rounded down to a multiple of 6
        ({"hidden": 24}, (24, 3)),
        ({"hidden": 20}, (20, 2)),
        ({"hidden": 6}, (6, 1)),
        ({"hidden": 48, "heads": 4}, (48, 4)),
    ],
)
def test_default_sizes_follow_the_target(
    target: Target, given: dict[str, int], found: tuple[int, int]
) -> None:
    assert resolve_width(target.shape(), given.get("hidden"), given.get("heads")) == found


@torch.no_grad()
def test_cached_head_rows_follow_the_weights(target: Target) -> None:
    """They are cached between decoding steps only; every change of the weights takes effect."""
    drafter = draft_lm(target)
    hidden, weight = torch.randn(3, 16), drafter.lm_head.weight

    def matches() -> bool:
        return torch.equal(drafter.head(hidden), hidden @ weight[drafter.vocab.target_ids].mT)

    assert matches()
    weight.mul_(2)
    assert matches()
    other = {name: value + 1 for name, value in drafter.state_dict().items() if "body" in name}
    drafter.load_state_dict(other, strict=False)
    assert matches()
    weight.data.mul_(3)  # as DeepSpeed does, without a version counter
    with torch.enable_grad():
        drafter.head(hidden)  # a training step comes before
    assert matches()
    drafter.to(torch.float64)
    hidden = hidden.double()
    assert matches()


def test_rotary_frequencies_stay_exact_in_bfloat16(target: Target) -> None:
    drafter = draft_lm(target)
    before = {n: b.clone() for n, b in drafter.body.named_buffers()}
    assert "rotary_emb.inv_freq" in before
    drafter.to(torch.bfloat16)
    assert drafter.lm_head.weight.dtype == torch.bfloat16
    for name, value in drafter.body.named_buffers():
        assert torch.equal(value, before[name]), name
        assert value.dtype == torch.float32


# ---- a pretrained start --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama_tied", "gpt2"])
def test_a_trained_drafter_does_not_need_the_folder_it_started_from(
    target: Target, family: str, tmp_path: Path
) -> None:
    origin = tmp_path / "origin"
    small_model(family, seed=7).save_pretrained(origin)
    drafter, trace = draft_lm(target, path=str(origin)), tiny.packed_trace(target)
    assert str(origin) in drafter.initialise(target, [trace])
    tiny.train_drafter(drafter, target, trace, steps=1)
    native.save(drafter, tmp_path / "drafter", target, drafter.cfg, {})
    shutil.rmtree(origin)
    again, cfg = native.load(tmp_path / "drafter", target)
    for mine, theirs in zip(drafter.unroll(trace), again.unroll(trace), strict=True):
        assert torch.equal(drafter.head(mine.hidden), again.head(theirs.hidden))
    assert str(tmp_path) not in json.dumps(cfg.body)
    assert cfg == drafter.cfg


def test_other_vocabularies_are_refused_with_both_sizes(target: Target, tmp_path: Path) -> None:
    small_model("llama", vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="50 tokens and the target 61") as caught:
        draft_lm(target, path=str(tmp_path))
    assert caught.value.key == "drafter.path"


@pytest.mark.parametrize("place", ["empty", "no-such-folder/anywhere/here"])
def test_a_path_without_a_model_is_refused(target: Target, place: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"could not be loaded|There is no such folder"):
        draft_lm(target, path=str(tmp_path / place))


def test_a_recurrent_model_is_refused(target: Target) -> None:
    body = {"model_type": "mamba", "vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1}
    with pytest.raises(ConfigError, match="recurrent state") as caught:
        draft_lm(target, body=body)
    assert caught.value.key == "drafter.body"


def test_an_unknown_model_type_is_refused(target: Target) -> None:
    with pytest.raises(ConfigError, match="has no such model_type"):
        draft_lm(target, body={"model_type": "no_such_model"})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("depths", 0), ("layers", 0), ("hidden", 0), ("hidden", 15), ("heads", 0),
        ("on_policy", 1.5), ("write_temperature", 0.0), ("write_tokens", 0), ("body", {}),
        ("body", {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}),
        ("body", {"model_type": "llama", "text_config": [{"attn_implementation": "who/what"}]}),
    ],
)  # fmt: skip
def test_invalid_settings_and_code_are_refused(name: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=name):
        Config(**{name: wrong})  # type: ignore[arg-type]


# ---- text of its own -----------------------------------------------------------------------------

OPENINGS = (((4, 5, 6), 7), ((8, 9), 6), ((10, 11, 12, 13, 14), 1), ((15, 16), 0), ((), 5))
WIDE = 24


def batch() -> Batch:
    """Documents of a prompt and an answer in two rows; one has no answer, one no prompt."""
    ids, document = torch.zeros(2, WIDE).long(), torch.full((2, WIDE), -1)
    positions, answer = torch.zeros(2, WIDE).long(), torch.zeros(2, WIDE).bool()
    column = {0: 0, 1: 3}  # the second row begins with padding, as a rewritten one may
    for name, (prompt, length) in enumerate(OPENINGS):
        row, size = name % 2, len(prompt) + length
        at = slice(column[row], column[row] + size)
        ids[row, at] = torch.tensor([*prompt, *range(40, 40 + length)])
        document[row, at], positions[row, at] = name, torch.arange(size)
        answer[row, at] = torch.arange(size) >= len(prompt)
        column[row] += size
    return Batch(ids, answer, document, positions)


def on_policy_drafter(target: Target, folders: dict[str, str], **changes: Any) -> DraftLm:
    """A model of large random weights, so that its top-1 tokens are clear."""
    settings: dict[str, Any] = {"path": folders["mistral"], "on_policy": 1.0, **changes}
    drafter = draft_lm(target, whole(), **settings)
    drafter.lm.text_config.eos_token_id = changes.get("eos")
    return drafter


def on_policy_text(drafter: DraftLm, text: Batch) -> Batch:
    out = drafter.on_policy_batch(text)
    assert out is not None
    return out


def prompt_of(text: Batch, name: int) -> tuple[int, list[int], int]:
    """(row, columns, length of the prompt)."""
    row = name % 2
    columns = torch.nonzero(text.document[row] == name).flatten().tolist()
    return row, columns, max(1, len(OPENINGS[name][0]))


def test_without_on_policy_nothing_is_sampled(target: Target) -> None:
    drafter, state = draft_lm(target), torch.get_rng_state()
    assert drafter.on_policy_batch(batch()) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("most", [3, 64])
def test_prompts_stay_and_answers_are_marked(
    target: Target, folders: dict[str, str], most: int
) -> None:
    text = batch()
    before = Batch(*(column.clone() for column in text))
    out = on_policy_text(on_policy_drafter(target, folders, write_tokens=most), text)
    assert all(torch.equal(a, b) for a, b in zip(text, before, strict=True))
    assert torch.equal(out.positions, text.positions)
    untouched = text.document < 0
    for name, (_, length) in enumerate(OPENINGS):
        row, columns, prompt = prompt_of(text, name)
        written = min(most, len(columns) - prompt) if length else 0
        end = columns[0] + prompt + written if length else columns[-1] + 1
        for column in columns:
            if column < columns[0] + prompt or not length:
                untouched[row, column] = True
            elif column < end:
                assert out.answer[row, column]
                assert out.document[row, column] == name
            else:
                assert not out.answer[row, column]
                assert out.ids[row, column] == 0
                assert out.document[row, column] == -1
    for old, new in zip(text, out, strict=True):
        assert torch.equal(old[untouched], new[untouched])


@pytest.mark.parametrize("family", ["mistral", "gpt2", "gemma2"])
def test_low_temperature_samples_are_greedy_continuations(
    target: Target, folders: dict[str, str], family: str
) -> None:
    """Prompts of five lengths at once, separate documents; no dropout in training mode."""
    drafter = on_policy_drafter(
        target, folders, write_temperature=COLD, path=folders[family]
    ).train()
    out = on_policy_text(drafter, batch())
    assert drafter.training
    assert drafter.body.training
    drafter.eval()
    for name, (_, length) in enumerate(OPENINGS):
        row, columns, prompt = prompt_of(batch(), name)
        for column in columns[prompt:] if length else []:
            logits = alone(drafter.lm.model, out.ids[row, columns[0] : column].tolist())
            assert out.ids[row, column] == logits.argmax()


def test_samples_follow_the_models_distribution() -> None:
    """First tokens of many equal prompts; V = 5, four of them draftable, temperature 0.7."""
    size: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target(vocab_size=5, **size)
    vocab, count = tiny.vocab(4, 5), 4000
    drafter = draft_lm(target, vocab, on_policy=1.0, write_tokens=1, write_temperature=0.7)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(15)
    ids, document = torch.tensor([[1, 3, 4]]).repeat(count, 1), torch.arange(count)[:, None]
    answer = torch.tensor([[False, False, True]]).repeat(count, 1)
    text = Batch(ids, answer, document.repeat(1, 3), torch.arange(3).repeat(count, 1))
    torch.manual_seed(0)
    frequencies = on_policy_text(drafter, text).ids[:, 2].bincount(minlength=5) / count
    expected = torch.zeros(5)
    logits = alone(drafter.lm.model, [1, 3])[vocab.target_ids]
    expected[vocab.target_ids] = (logits / 0.7).softmax(0)
    assert expected.max() < 0.9
    sigma = (expected * (1 - expected) / count).sqrt()
    assert (frequencies - expected).abs().le(4 * sigma).all()


@pytest.mark.parametrize("eos", [5, [5, *range(20, 45)]])
def test_an_answer_ends_with_the_first_end_token(
    target: Target, folders: dict[str, str], eos: int | list[int]
) -> None:
    """Against the same samples without end tokens, cut by hand."""
    drafter, ends = on_policy_drafter(target, folders), [eos] if isinstance(eos, int) else eos
    outs = []
    for known in (None, eos):
        drafter.lm.text_config.eos_token_id = known
        torch.manual_seed(1)
        outs.append(on_policy_text(drafter, batch()))
    free, out = outs
    cuts = 0
    for name, (_, length) in enumerate(OPENINGS):
        row, columns, prompt = prompt_of(batch(), name)
        ended = False
        for column in columns[prompt:] if length else []:
            assert out.document[row, column] == (-1 if ended else name)
            assert ended or out.ids[row, column] == free.ids[row, column]
            cuts += ended
            ended = ended or int(free.ids[row, column]) in ends
    assert cuts or isinstance(eos, int)


def test_the_share_of_rewritten_batches_is_on_policy(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, share, count = draft_lm(target, on_policy=0.3), 0.3, 1000
    answers = lambda lm, draw, text, spans, most: [text.ids[0, :1]] * len(spans)  # noqa: E731
    monkeypatch.setattr("outrider.models.drafters.draft_lm.sample_answers", answers)
    torch.manual_seed(0)
    done = sum(drafter.on_policy_batch(batch()) is not None for _ in range(count))
    assert abs(done - share * count) < 4 * math.sqrt(count * share * (1 - share))


def test_a_batch_without_answers_is_unchanged(target: Target, folders: dict[str, str]) -> None:
    unanswered = batch()._replace(answer=torch.zeros(2, WIDE).bool())
    assert on_policy_drafter(target, folders).on_policy_batch(unanswered) is None


def test_sampled_answers_are_supervised(target: Target, folders: dict[str, str]) -> None:
    """All sampled tokens but the second of a document are supervised."""
    drafter = on_policy_drafter(target, folders, write_tokens=3)
    out = on_policy_text(drafter, batch())
    trace = target.trace(*out)
    written = sum(min(3, length) for prompt, length in OPENINGS if prompt)
    assert (
        int(trace.supervised_mask(1).sum()) == written + 2
    )  # and of the one without prompt, two of three
    loss, _ = Objective(drafter, target, weights=[1.0])(trace, torch.ones(1))
    loss.backward()
    assert loss.isfinite()


def test_zero3_refuses_on_policy() -> None:
    """Refused before anything is loaded."""
    words = ["drafter=draft_lm", "drafter.on_policy=0.5"]
    assert parse(compose([*words, "launch=zero2"])).launch.name == "zero2"
    with pytest.raises(ConfigError, match="on_policy"):
        parse(compose([*words, "launch=zero3"]))


def test_the_saved_settings_build_the_same_body(target: Target) -> None:
    """`layers`, `hidden` and `heads` of the configuration are not read then."""
    cfg = draft_lm(target, layers=1, hidden=8).cfg
    again = DraftLm(dataclasses.replace(cfg, layers=5, hidden=32), target, whole(), ())
    assert (again.lm.num_layers, again.lm.shape().hidden) == (1, 8)
