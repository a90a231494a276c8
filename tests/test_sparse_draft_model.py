"""sparse_kv with a draft model: against `draft_lm` over all rows, and masked attention over few.

Draft models are saved folders of small random models. "near" is the target with changed weights, of
whose draft tokens some are accepted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models import drafters, formats
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.paired_cache import PairedCache
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import DialogueCache, Request
from outrider.models.decode.sampling_params import Sampling
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafters.sparse_kv import SparseKV
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.target.target import Target
from tests import tiny
from tests.enumeration import distance
from tests.families import small_model
from tests.test_drafter_contract import emitted_distribution, plain_distribution
from tests.test_sparse_kv import (
    CHAIN,
    METHODS,
    PROMPT,
    drafted_logits,
    each_method,
    literal_selection,
    masked_logits,
)
from tests.test_target_drafting import POLICIES, PROMPTS, SAMPLED, requests, state_after

DRAFT_MODELS = ["near", "llama", "gpt2", "gemma2"]
EVERYTHING: dict[str, dict[str, Any]] = {
    "streaming": {"budget": 128},
    "snapkv": {"method": "snapkv", "budget": 128},
}


def near(family: str = "llama", **changes: object) -> Any:
    """Return the model of `tiny.target` with changed weights."""
    model = small_model(family, 0, **changes)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.2 * torch.randn_like(weight))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {name: str(tmp_path_factory.mktemp(name)) for name in DRAFT_MODELS}
    for name, folder in found.items():
        model = near() if name == "near" else small_model(name, seed=7)
        model.save_pretrained(folder)
    return found


def sparse(target: Target, path: str | Path, **changes: Any) -> SparseKV:
    cfg = tiny.config("sparse_kv", draft_vocab_size=None, path=str(path), **changes)
    drafter = drafters.build(cfg, target, DraftVocab.identity(target.vocab_size)).eval()
    assert isinstance(drafter, SparseKV)
    return drafter


def draft_model(drafter: SparseKV) -> Target:
    assert drafter.draft is not None
    return drafter.draft.lm


def whole_draft_lm(target: Target, path: str) -> Drafter:
    cfg = tiny.config("draft_lm", draft_vocab_size=None, path=path)
    return drafters.build(cfg, target, DraftVocab.identity(target.vocab_size)).eval()


# ---- exactness ----


@each_method
@pytest.mark.parametrize("name", DRAFT_MODELS)
def test_greedy_output_equals_plain_decoding(
    method: str, name: str, folders: dict[str, str]
) -> None:
    """Every policy, alone and in a batch of prompts of several lengths; draft rows are few."""
    target = tiny.target()
    drafter = sparse(target, folders[name], **METHODS[method])
    plain = [out.ids for out in Engine(target, None, None).generate_all(requests(), 1)]
    for policy in POLICIES:
        for batch in (1, 4):
            outputs = Engine(target, drafter, policy).generate_all(requests(), batch)
            assert [out.ids for out in outputs] == plain
            assert sum(sum(out.drafted) for out in outputs) > 0
            if name == "near":
                assert sum(sum(out.accepted) for out in outputs) > 0


@pytest.mark.slow
@each_method
@pytest.mark.parametrize("case", SAMPLED[:5], ids=[label for label, *_ in SAMPLED[:5]])
def test_sampling_has_exactly_the_distribution_of_plain_sampling(
    method: str, case: Any, tmp_path: Path
) -> None:
    """Four tokens jointly over five; the control draws the bonus from unwarped logits."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"vocab_size": 5, "num_key_value_heads": 1}
    near(**sizes).save_pretrained(tmp_path)
    target, sampling = tiny.target(**sizes), Sampling(0.8, 1.0, 2)
    budget = {"streaming": {"budget": 3, "sinks": 1}, "snapkv": {"budget": 3, "window": 2}}
    drafter = sparse(target, tmp_path, method=method, **budget[method])
    decoder = Engine(target, drafter, case[1], sampling=sampling)
    expected = plain_distribution(target, sampling)
    assert distance(emitted_distribution(decoder), expected) < 1e-5
    wrong = tiny.RawBonus(target, drafter, case[1], sampling=sampling)
    assert distance(emitted_distribution(wrong), expected) > 0.01


# ---- a budget of all rows ----


class Captured(Engine):
    """Keep the logits of every step."""

    def __init__(self, target: Target, drafter: Drafter, policy: Any) -> None:
        super().__init__(target, drafter, policy)
        self.steps = list[Tensor]()
        step = drafter.step_batch

        def captured(*args: Any) -> Any:
            logits, states = step(*args)
            self.steps.append(logits)
            return logits, states

        drafter.step_batch = captured  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("method", EVERYTHING)
@pytest.mark.parametrize("name", DRAFT_MODELS)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_budget_of_the_whole_context_is_draft_lm(
    method: str, name: str, batch: int, folders: dict[str, str]
) -> None:
    """The same accepted tokens in every round, and the logits of every step."""
    target = tiny.target()
    for policy in (POLICIES[0], POLICIES[3]):
        runs = [
            Captured(target, sparse(target, folders[name], **EVERYTHING[method]), policy),
            Captured(target, whole_draft_lm(target, folders[name]), policy),
        ]
        found, expected = (engine.generate_all(requests(), batch) for engine in runs)
        for one, other in zip(found, expected, strict=True):
            assert (one.ids, one.accepted, one.drafted) == (
                other.ids,
                other.accepted,
                other.drafted,
            )
        for step, other_step in zip(runs[0].steps, runs[1].steps, strict=True):
            torch.testing.assert_close(step, other_step, rtol=1e-5, atol=1e-5)
        few = Captured(target, sparse(target, folders[name], budget=4, sinks=1), policy)
        few.generate_all(requests(), batch)  # the control
        assert (few.steps[0] - runs[1].steps[0]).abs().max() > 0.01


class FreshDraftRows(Engine):
    """Compare the draft model's rows with one prefill of the text that it has read."""

    compared = behind = 0

    def _round(self, active: list[Any]) -> list[int]:
        counts = super()._round(active)
        assert isinstance(self.drafter, SparseKV)
        assert isinstance(self.cache, PairedCache)
        model, rows = draft_model(self.drafter), self.cache.draft
        for slot, one in enumerate(active):
            text = [*one.request.prompt, *one.out.ids]
            length = rows.lengths[slot]
            assert len(one.request.prompt) <= length <= self.cache.lengths[slot]
            type(self).behind += self.cache.lengths[slot] - length
            fresh = model.new_cache(length)
            visible = torch.ones(1, length, length, dtype=torch.bool).tril()
            model.forward(torch.tensor([text[:length]]), torch.arange(length)[None], visible, fresh)
            for layer in range(model.num_layers):
                pairs = zip(rows.rows(layer, slot), fresh.rows(layer), strict=True)
                for mine, expected in pairs:
                    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(rows.positions(slot)[0], torch.arange(length))
            type(self).compared += 1
        return counts


def uneven() -> list[Request]:
    """Requests that end in different rounds, so that slots move while others continue."""
    return [Request(prompt, 5 + 4 * (i % 3), i) for i, prompt in enumerate([*PROMPTS, *PROMPTS])]


@pytest.mark.parametrize("name", DRAFT_MODELS)
@pytest.mark.parametrize("method", EVERYTHING)
def test_rows_of_the_draft_model_follow_the_slots(
    method: str, name: str, folders: dict[str, str]
) -> None:
    target = tiny.target()
    drafter = sparse(target, folders[name], **EVERYTHING[method])
    for policy in (POLICIES[0], POLICIES[3]):
        FreshDraftRows.compared = FreshDraftRows.behind = 0
        FreshDraftRows(target, drafter, policy).generate_all(uneven(), 3)
        assert FreshDraftRows.compared > 8
        assert FreshDraftRows.behind > 0  # verified tokens are read with the next draft


def test_rows_that_do_not_move_with_their_slot_are_found(folders: dict[str, str]) -> None:
    """The control of the test above."""
    target = tiny.target()
    drafter = sparse(target, folders["near"], budget=128)

    def move(self: PairedCache, source: int, slot: int) -> None:
        KVCache.move_slot(self, source, slot)
        self.draft.lengths[slot] = self.draft.lengths[source]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairedCache, "move_slot", move)
        with pytest.raises(AssertionError, match="not close"):
            FreshDraftRows(target, drafter, Chain(3)).generate_all(uneven(), 3)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("method", EVERYTHING)
def test_a_dialogue_continues_the_draft_models_rows(
    method: str, pieces: int, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns after a whole answer, an interrupted one, and a changed text, read in pieces."""
    monkeypatch.setattr("outrider.models.decode.engine.PREFILL_MASK", 40 if pieces > 1 else 2**24)
    target, dialogue = tiny.target(), DialogueCache()
    drafter = sparse(target, folders["near"], **EVERYTHING[method])
    engine = FreshDraftRows(target, drafter, Chain(3))
    text, lengths = PROMPT[:9], list[int]()
    for rounds, follow in ((99, [7, 8, 9]), (2, [5] * 4), (1, []), (99, [8])):
        events = engine.run([Request(text, 12)], 1, dialogue=dialogue)
        answer = [event.out for event, _ in zip(events, range(rounds + 1), strict=False)][-1].ids
        expected = Engine(target, None, None).generate(text, 12).ids
        assert answer == expected[: len(answer)]
        text = [*(text if rounds == 1 else [*text, *answer]), *follow]
        lengths.append(len(answer))
    assert lengths[0] == 12
    assert min(lengths) < 12


# ---- few rows ----


@each_method
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_drafts_equal_masked_attention_over_all_rows(
    method: str, family: str, tmp_path: Path
) -> None:
    """Of 24 rows of the prompt a draft token reads nine; they come from full attention."""
    small_model(family, seed=7).save_pretrained(tmp_path)
    target = tiny.target()
    drafter = sparse(target, tmp_path, **METHODS[method])
    model, rows = draft_model(drafter), torch.arange(len(PROMPT))
    mask = ((rows < 3) | (rows >= 18)).expand(2, -1)
    visible = dict.fromkeys(range(model.num_layers), mask)
    if method == "snapkv":
        for layer, chosen in enumerate(literal_selection(Target(small_model(family, 7)), 4, 5, 3)):
            mask = torch.zeros(2, len(PROMPT), dtype=torch.bool).scatter_(1, chosen, True)
            mask[:, -4:] = True
            visible[layer] = mask
    expected = masked_logits(model, visible, CHAIN)
    found = drafted_logits(drafter, state_after(target, drafter, PROMPT), CHAIN)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    visible = dict.fromkeys(visible, (rows >= 0).expand(2, -1))
    assert (found - masked_logits(model, visible, CHAIN)).abs().max() > 0.01  # the control


def after_one_round(target: Target, drafter: SparseKV) -> tuple[Any, list[int]]:
    """Return the state after PROMPT and a round, and the tokens so far; the last is the root."""
    states = list[Any]()

    class AfterOneRound(Engine):
        def _round(self, active: list[Any]) -> list[int]:
            counts = super()._round(active)
            states.append(active[0].state)
            return counts

    events = AfterOneRound(target, drafter, Chain(3)).run([Request(PROMPT, 12)], 1)
    _, (_, event) = zip(range(2), events, strict=False)
    assert len(event.out.ids) > 2
    return states[0], event.out.ids


def test_verified_tokens_are_read_over_few_rows(folders: dict[str, str]) -> None:
    """The first draft of round 2: the tokens of round 1 attend to rows 0..2 and from 18 on."""
    target, rows = tiny.target(), torch.arange(len(PROMPT))
    drafter = sparse(target, folders["near"], **METHODS["streaming"])
    state, ids = after_one_round(target, drafter)
    mask = ((rows < 3) | (rows >= 18)).expand(2, -1)
    model = draft_model(drafter)
    expected = masked_logits(model, dict.fromkeys(range(model.num_layers), mask), ids)
    with torch.inference_mode():
        found, _ = drafter.step(state, 1, torch.tensor(ids[-1:]), torch.zeros(1).long())
    torch.testing.assert_close(found[0], expected[-1], rtol=1e-5, atol=1e-5)
    whole = dict.fromkeys(range(model.num_layers), (rows >= 0).expand(2, -1))
    assert (found[0] - masked_logits(model, whole, ids)[-1]).abs().max() > 0.01  # the control


@torch.inference_mode()
def test_unread_tokens_do_not_select(folders: dict[str, str]) -> None:
    """A selection after round 1 is that of the prompt, which the draft model has read."""
    target = tiny.target()
    drafter = sparse(target, folders["near"], **METHODS["snapkv"])
    state, _ = after_one_round(target, drafter)
    assert sum(state.cache.unread_counts) > 0
    again = drafter.with_selection(0, replace(state, selection=None)).selection
    assert again is not None
    assert again.tail == state.selection.tail == len(PROMPT) - 4
    for found, expected in zip(again.rows, state.selection.rows, strict=True):
        assert all(map(torch.equal, found, expected))


@each_method
def test_a_draft_step_reads_as_many_rows_at_every_context(
    method: str, folders: dict[str, str]
) -> None:
    """Rows of the prompt and the draft; a later round also reads the verified tokens."""
    target, reads = tiny.target(), list[int]()
    for length in (40, 64, 100):
        drafter = sparse(target, folders["near"], **METHODS[method])
        prompt = [3, 4, 5, 6, 7] * (length // 5)
        drafted_logits(drafter, state_after(target, drafter, prompt), CHAIN)
        assert drafter.reads == 9 + len(CHAIN)
        Engine(target, drafter, Chain(3)).generate(prompt, 12)
        reads.append(drafter.reads)
    answer = 12 if method == "snapkv" else 0
    assert max(reads) <= 9 + 2 * (3 + 1) + answer


@each_method
def test_prompts_of_any_lengths_draft_as_alone(method: str, folders: dict[str, str]) -> None:
    """The drafts of every round, with slices far apart, and a number of unread tokens each."""
    target = tiny.target()
    drafter = sparse(target, folders["near"], **METHODS[method])
    many = [Request((PROMPT * 4)[:length], 12) for length in (96, 12, 7, 24)]
    alone = Engine(target, drafter, Chain(3)).generate_all(many, 1)
    together = Engine(target, drafter, Chain(3)).generate_all(many, 4)
    accepted = [out.accepted for out in together]
    assert accepted == [out.accepted for out in alone]
    assert [out.rejected for out in together] == [out.rejected for out in alone]
    assert len({tuple(each) for each in accepted}) > 1


def test_a_round_runs_the_draft_model_as_often_as_draft_lm(folders: dict[str, str]) -> None:
    """Once per draft token: unread tokens and the root are one forward."""
    target = tiny.target()
    drafter = sparse(target, folders["near"], budget=9)
    model, widths = draft_model(drafter), list[int]()
    forward = model.forward

    def counted(ids: Tensor, *rest: Any, **named: Any) -> Any:
        widths.append(ids.shape[1])
        return forward(ids, *rest, **named)

    model.forward = counted  # type: ignore[method-assign]
    out = Engine(target, drafter, Chain(3)).generate(PROMPT, 12)
    assert widths[0] == len(PROMPT)
    assert len(widths) == 1 + sum(out.drafted)
    drafting = [i for i, depth in enumerate(out.drafted) if depth]
    firsts = [widths[1 + sum(out.drafted[:i])] for i in drafting]
    assert firsts == [1, *(out.accepted[i - 1] + 2 for i in drafting[1:])]
    assert max(firsts) > 2


@each_method
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_draft_model_may_have_fewer_positions_than_the_target(
    method: str, family: str, tmp_path: Path
) -> None:
    model = small_model(family, seed=7)
    if family == "gpt2":
        model.config.n_positions = 16
        model.transformer.wpe.weight.data = model.transformer.wpe.weight.data[:16].clone()
    else:
        model.config.max_position_embeddings = 16
    model.save_pretrained(tmp_path)
    target = tiny.target()
    drafter = sparse(target, tmp_path, **METHODS[method])
    assert draft_model(drafter).shape().max_positions == 16
    plain = Engine(target, None, None).generate(PROMPT, 12).ids
    assert Engine(target, drafter, Chain(3)).generate(PROMPT, 12).ids == plain


# ---- what `path` may be ----


def trained(target: Target, kept: int) -> DraftLm:
    drafter = tiny.drafter("draft_lm", target, tiny.vocab(kept), layers=2)
    assert isinstance(drafter, DraftLm)
    return drafter.eval()


def same_drafts(target: Target, drafter: SparseKV, student: DraftLm) -> None:
    """Compare the logits of every step of an answer with those of the drafter itself."""
    runs = [Captured(target, each, Chain(3)) for each in (drafter, student)]
    answers = [engine.generate(PROMPT, 12).ids for engine in runs]
    assert answers[0] == answers[1]
    for found, expected in zip(runs[0].steps, runs[1].steps, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert runs[0].steps[0].shape[-1] == len(student.vocab)


@pytest.mark.parametrize("place", ["drafter", "run"])
def test_the_folder_of_a_trained_drafter_with_a_reduced_vocabulary(
    place: str, tmp_path: Path
) -> None:
    target = tiny.target()
    student = trained(target, tiny.DRAFTED)
    native.save(student, tmp_path / "run" / "drafter", target, None, {})
    path = tmp_path / "run" / ("drafter" if place == "drafter" else "")
    drafter = sparse(target, path, budget=128)
    assert torch.equal(drafter.vocab.target_ids, student.vocab.target_ids)
    same_drafts(target, drafter, student)
    plain = [out.ids for out in Engine(target, None, None).generate_all(requests(), 4)]
    few = sparse(target, path, budget=5, sinks=1)
    assert [out.ids for out in Engine(target, few, Chain(3)).generate_all(requests(), 4)] == plain


def test_a_published_draft_model(tmp_path: Path) -> None:
    target = tiny.target()
    student = trained(target, target.vocab_size)
    formats.find("transformers", "draft_lm").write(student, target, None, tmp_path / "out")
    same_drafts(target, sparse(target, tmp_path / "out", budget=128), student)


def test_the_draft_model_is_no_part_of_the_drafter(folders: dict[str, str]) -> None:
    """A drafter without weights stores none."""
    drafter = sparse(tiny.target(), folders["near"])
    assert [*drafter.parameters()] == []
    assert not draft_model(drafter).model.training
    dtypes = {weight.dtype for weight in draft_model(drafter).model.parameters()}
    assert dtypes == {torch.float32}
    half = Target(small_model("llama").to(torch.bfloat16))
    weights = draft_model(sparse(half, folders["near"])).model.parameters()
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no such folder") as error:
        sparse(tiny.target(), tmp_path / "nowhere")
    assert error.value.key == "drafter.path"


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    small_model("llama", vocab_size=60).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="60 tokens and the target 61") as error:
        sparse(tiny.target(), tmp_path)
    assert error.value.key == "drafter.path"


def test_a_drafter_of_another_kind_is_refused(tmp_path: Path) -> None:
    target = tiny.target()
    native.save(tiny.drafter("eagle3", target).eval(), tmp_path / "drafter", target, None, {})
    with pytest.raises(ConfigError, match="It holds a drafter eagle3") as error:
        sparse(target, tmp_path)
    assert error.value.key == "drafter.path"
