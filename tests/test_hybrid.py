"""Hybrid drafts: the choice, exactness, and what the trained drafter reads."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.eval.decoder import Decoder
from outrider.eval.rank_tables import FORMAT, tables_of
from outrider.launch.cli import main
from outrider.models import drafters
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.cost_table import CostSetting
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.measurement import LargestDraft, covers, read_or_measure
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Draft, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.round_times import Stopwatch
from outrider.models.decode.rules.rule_table import BEST, COUPLED, DRAWN, INDEPENDENT, bind_rule
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafters import hybrid
from outrider.models.drafters.hybrid import Config, Hybrid, Record, expected_hits
from outrider.models.drafters.parts.part import Part
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.lookup import Draft as LookupDraft
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.interface import ModelShape, Trace
from outrider.models.target.target import Target
from outrider.train.settings import parse
from tests import tiny
from tests.enumeration import Context, Law, distance, enumerate_law
from tests.test_auto_exact import TARGET, V, law_of_plain, times
from tests.test_lookup import POLICIES, REPEATING

LOOKUPS: list[Any] = ["suffix", {"name": "ngram", "n": 2, "least": 2}]
each_lookup = pytest.mark.parametrize("lookup", LOOKUPS, ids=["suffix", "ngram"])
FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gpt2"))]
LENGTH = 4


class FixedPart(Part):
    """The place of a drafter of the tests."""

    drafter: Drafter
    levels = 2

    def check(self, values: dict[str, Any], shape: ModelShape) -> None:
        return

    def build(self, values: dict[str, Any], target: Target) -> tuple[Drafter, dict[str, Any]]:
        return self.drafter, {"depths": self.levels}


def combine(
    monkeypatch: pytest.MonkeyPatch, of: Target, trained: Any, levels: int = 2, **settings: Any
) -> Hybrid:
    """A hybrid of a look-up and a drafter of the tests."""
    part = FixedPart("drafter.trained", "")
    part.drafter, part.levels = trained, levels
    with monkeypatch.context() as patch:
        patch.setattr(hybrid, "TRAINED", part)
        settings = {"lookup": {"name": "ngram", "n": 1}, "depths": 2, **settings}
        cfg = Config(trained="FOLDER", **settings)
        built = drafters.build(cfg, of, DraftVocab.identity(of.vocab_size))
    assert isinstance(built, Hybrid)
    return built


# ---- the choice ----------------------------------------------------------------------------------


def test_the_expected_length_of_a_draft_is_that_of_its_paths() -> None:
    """Two levels: 1/2 (3/4 + 1/4) + 1/4 (3/4 * 1/2)."""
    draft: LookupDraft = {4: (0.75, {5: (0.5, {})}), 6: (0.25, {})}
    assert expected_hits(draft, 9, 0.5) == 0.5 + 0.25 * 0.375
    assert expected_hits(draft, 1, 0.5) == 0.5
    assert expected_hits({}, 9, 0.5) == 0.0


def test_the_record_counts_up_to_the_first_wrong_token() -> None:
    chain: LookupDraft = {4: (1.0, {5: (0.5, {6: (1.0, {})})})}
    right = Record().after(chain, [4, 5, 6, 9], both=False)
    wrong = Record().after(chain, [4, 8, 6], both=False)
    assert (right.hits, right.guesses, right.rounds) == (3, 2.5, 0)
    assert (wrong.hits, wrong.guesses) == (1, 1.5)
    assert right.reliability == 4 / 4.5
    assert wrong.reliability == 2 / 3.5
    assert Record().after(chain, [4, 5], both=False).hits == 2  # what follows is not known yet


def test_the_mean_of_trained_drafts_is_that_of_their_rounds() -> None:
    """The first estimate, half of the levels, weighs as much as two rounds."""
    record = Record()
    assert record.mean_accepted(4) == 2
    record = record.after({}, [1, 2, 3, 4], both=True)
    assert (record.accepted, record.rounds) == (3, 1)
    assert record.mean_accepted(4) == (3 + 4) / 3
    for _ in range(200):  # forgotten, so that it is tried again
        record = record.after({}, [1], both=False)
    assert record.mean_accepted(4) == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize(("cost", "alone"), [(0.0, False), (0.71, False), (0.72, True)])
def test_the_look_up_drafts_alone_where_it_has_more_tokens_per_time(
    cost: float, alone: bool
) -> None:
    """1/2 + 1/4 expected tokens against two: (1 + 3/4) (1 + cost) >= 1 + 2."""
    draft: LookupDraft = {4: (1.0, {5: (1.0, {})})}
    record = Record(hits=9, guesses=18)  # one half of the tokens come true
    assert record.prefers_lookup(draft, 9, 4, cost) == alone
    assert not record.prefers_lookup({}, 9, 4, 100.0)  # it drafts nothing
    assert Record(hits=98, guesses=98).prefers_lookup(draft, 9, 2, 0.0)  # 2 tokens against 1


def uses(drafter: Hybrid, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that grows by a flag per round and prompt: whether the round uses both."""
    found, step = list[bool](), type(drafter).step_batch

    def recorded(self: Hybrid, states: Any, depth: int, ids: Any, parents: Any) -> Any:
        if depth == 1:
            found.extend(state.both for state in states)
        return step(self, states, depth, ids, parents)

    monkeypatch.setattr(type(drafter), "step_batch", recorded)
    return found


def test_copied_text_is_looked_up_and_new_text_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 tokens of the prompt come again, then tokens of which no two came before."""
    generator, odd = torch.Generator().manual_seed(0), [*range(1, tiny.VOCAB, 2)]
    prompt = (2 * torch.randint(2, 30, (70,), generator=generator)).tolist()
    new = [odd[stride * i % 29] for stride in (1, 2) for i in range(29)]
    text, accepted = [*prompt, *prompt[:60], *new], {False: 6, True: 3}
    scripted = tiny.ScriptedDrafter(tiny.random_logits(tiny.VOCAB), tiny.VOCAB)
    lookup = {"name": "ngram", "n": 2, "least": 2}
    drafter = combine(monkeypatch, tiny.target(), scripted, 3, lookup=lookup, depths=6)
    (state,) = drafter.absorb_batch([None], [tiny_rows(text, 0, 70)])
    at, found = 70, dict[int, bool]()
    while at < len(text) - 7:
        found[at] = state.both
        after = at + 1 + accepted[state.both]
        state = drafter.end_draft(state, state, 1)
        (state,) = drafter.absorb_batch([state], [tiny_rows(text, at, after)])
        at = after
    copied = [both for at, both in found.items() if at < 123]
    assert len(copied) > 7
    assert sum(copied) <= 2  # the first bigram has to be found
    assert all(both for at, both in found.items() if at > 131)


def tiny_rows(text: Sequence[int], start: int, stop: int) -> Trace:
    ids = torch.tensor([text[start:stop]])
    next_ids = torch.tensor([text[start + 1 : stop + 1]])
    positions, zeros = torch.arange(start, stop)[None], torch.zeros_like(ids)
    states = torch.zeros(1, stop - start, 0)
    return Trace(ids, next_ids, zeros.bool(), zeros, positions, states, states)


def test_rows_wait_while_the_look_up_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trained drafter reads each row once, in order, and waits for 64 of them at most.

    `ScriptedDrafter` refuses rows that do not continue its text.
    """
    scripted = tiny.ScriptedDrafter(tiny.random_logits(tiny.VOCAB), tiny.VOCAB)
    drafter = combine(monkeypatch, tiny.target(), scripted, depths=8, cost=100.0)
    text, state, waiting = [5, 6, 7] * 60, None, list[int]()
    for start in range(0, 150, 3):
        (state,) = drafter.absorb_batch([state], [tiny_rows(text, start, start + 3)])
        waiting.append(sum(trace.ids.shape[1] for trace in state.waiting))
        assert state.trained is None or len(state.trained.text) + waiting[-1] == start + 4
    assert max(waiting) == 63
    assert len(scripted.handed) <= 4


# ---- greedy answers ------------------------------------------------------------------------------


@each_lookup
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_plain_decoding(lookup: Any, family: str, tmp_path: Path) -> None:
    """Float32, token by token, of a half-trained drafter, alone and in a batch."""
    target, _, trained = tiny.half_trained("eagle3", family)
    native.save(trained, tmp_path, target, trained.cfg, {})
    cfg = Config(lookup=lookup, trained=str(tmp_path), depths=6)
    drafter = drafters.build(cfg, target, DraftVocab.identity(target.vocab_size))
    prompts = [REPEATING, REPEATING[:5], [11], [*tiny.PROMPTS[0]]]
    requests = [Request(prompt, 20, seed) for seed, prompt in enumerate(prompts)]
    tiny.require_plain_output(target, drafter, POLICIES, requests)


@pytest.mark.parametrize("name", ["medusa", "draft_lm", "dflash", "mtp"])
def test_any_trained_drafter_can_be_combined(name: str) -> None:
    """Heads of fixed depth, a model of its own, a block, modules: over a reduced vocabulary."""
    target, part = tiny.target(), {"name": name, "draft_vocab_size": tiny.DRAFTED}
    drafter = tiny.drafter("hybrid", target, trained=part, levels=None)
    requests = [Request(prompt, 16) for prompt in (REPEATING, [11])]
    plain = [out.ids for out in Engine(target, None, None).generate_all(requests, 1)]
    for policy in POLICIES:
        outputs = Engine(target, drafter, policy).generate_all(requests, 2)
        assert [out.ids for out in outputs] == plain


# ---- sampled answers -----------------------------------------------------------------------------

WARM = Sampling(temperature=1.0)
PROMPT = [2, 0, 1, 2, 0]
TREE = ((0,), (1,), (0, 0))
SAMPLED: dict[str, Policy] = {
    "drawn chain": Chain(2, DRAWN),
    "best chain": Chain(2, BEST),
    "dynamic tree": DynamicTree(2, 2, 3),
    "drawn tree": StaticTree(TREE, DRAWN),
    "independent tree": StaticTree(TREE, INDEPENDENT),
    "coupled chain": Chain(2, COUPLED),
}


def toy(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Hybrid:
    scripted = tiny.ScriptedDrafter(tiny.random_logits(V, 1, 1.5), V)
    return combine(monkeypatch, TARGET, scripted, **settings)


def law_of(drafter: Hybrid, policy: Policy) -> Law:
    """The exact law of sampled answers, by every path through their random numbers."""
    rule = bind_rule("coupled", COUPLED) if policy.draft == COUPLED else None
    engine = Engine(TARGET, drafter, policy, sampling=WARM, rule=rule)
    return tiny.law_of_answers(engine, PROMPT, LENGTH)


@pytest.mark.parametrize("case", [name for name in SAMPLED if name != "coupled chain"])
def test_sampled_answers_have_the_law_of_the_target(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of the look-up alone and of both occur among the outcomes."""
    drafter = toy(monkeypatch, cost=0.3)
    found = uses(drafter, monkeypatch)
    law = law_of(drafter, SAMPLED[case])
    assert distance(law, law_of_plain(PROMPT)) < 1e-6
    assert {*found} == {True, False}


class KeepsTheLikely(Chain):
    """A mistake: both drafters draw, and that of the look-up replaces an unlikely token."""

    def propose(self, context: DraftContext) -> Draft:
        start: Any = context.states[0]
        draft = super().propose(context)
        if not start.both or draft.q_rows is None or draft.tree.size < 2:
            return draft
        if float(draft.q_rows[0, 0, draft.tree.ids[0, 1]]) > 0.4:
            return draft
        context.states = [replace(start, both=False)]
        return super().propose(context)


class OtherRows(Chain):
    """A mistake: tokens are drawn from the mixture, and verified with the trained row."""

    def propose(self, context: DraftContext) -> Draft:
        draft = super().propose(context)
        if draft.q_rows is None:
            return draft
        uniform = torch.full_like(draft.q_rows, 1 / V)
        return Draft(draft.tree, 0.5 * draft.q_rows + 0.5 * uniform)


@pytest.mark.parametrize("mistake", [KeepsTheLikely, OtherRows])
def test_mistakes_have_another_law(mistake: type[Chain], monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls of the test above."""
    drafter = toy(monkeypatch, cost=0.0, lookup={"name": "ngram", "n": 2})
    assert distance(law_of(drafter, Chain(1, DRAWN)), law_of_plain(PROMPT)) < 1e-6
    assert distance(law_of(drafter, mistake(1, DRAWN)), law_of_plain(PROMPT)) > 1e-2


@pytest.mark.parametrize("case", SAMPLED)
def test_sampled_answers_do_not_depend_on_their_batch(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, policy = toy(monkeypatch, cost=0.3), SAMPLED[case]
    rule = bind_rule("coupled", COUPLED) if policy.draft == COUPLED else None
    engine = Engine(TARGET, drafter, policy, sampling=WARM, rule=rule)
    prompts = [PROMPT, [1], [0, 0, 1, 0, 0], [2, 1]]
    requests = [Request(prompt, 9 + n, n) for n, prompt in enumerate(prompts)]
    alone, together = (engine.generate_all(requests, batch) for batch in (1, 4))
    assert [out.ids for out in alone] == [out.ids for out in together]


def test_automatic_drafts_have_the_law_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by 0.1 ms whenever it is read: equal choices in every enumeration."""
    shapes, readings = set[str](), count()
    monkeypatch.setattr(Stopwatch, "clock", staticmethod(lambda: 1e-4 * next(readings)))
    drafter = toy(monkeypatch, cost=0.3)

    def process(rng: RandomSource) -> Context:
        auto = Auto(depth=2, budget=2, width=2, draft=DRAWN, first_plain=0, eps=1.0)
        engine = Engine(TARGET, drafter, auto, sampling=WARM)
        auto.use_costs(LiveCosts(times(0.01, 0.01)))
        monkeypatch.setattr(auto, "prepare", lambda *_: None)
        tiny.inject_random_source(engine, rng)
        out = engine.generate(PROMPT, LENGTH)
        shapes.update(out.choices)
        return tuple(out.ids)

    assert distance(enumerate_law(process), law_of_plain(PROMPT)) < 1e-6
    assert any(shape.startswith("chain") for shape in shapes)


def test_automatic_drafts_measure_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a level of 0.05 steps each, two of them; a cost that is given stays."""
    measured = times(0.01, 0.05)
    module = "outrider.models.decode.auto.policy"
    monkeypatch.setattr(f"{module}.read_or_measure", lambda *_: (measured, ""))
    for given, cost in ((None, 0.1), (0.3, 0.3)):
        drafter = toy(monkeypatch, cost=given)
        assert drafter.cost == (hybrid.COST if given is None else given)
        auto = Auto(depth=2, budget=2, width=2, draft=DRAWN)
        auto.wrap(drafter, TARGET)
        auto.prepare(TARGET, 1, 64)
        assert drafter.cost == pytest.approx(cost, abs=1e-3)


def test_costs_are_measured_where_the_trained_drafter_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Deeper levels cost next to nothing: a line to the deepest would be too low at the third."""
    target, _, trained = tiny.half_trained("eagle3", "llama")
    drafter = combine(monkeypatch, target, trained, levels=3, depths=8)
    largest = LargestDraft(8, 1, 8)
    setting, file = CostSetting.of(target, drafter), tmp_path / "costs.json"
    times, _ = read_or_measure(target, drafter, setting, file, 1, 64, largest)
    assert times.draft.axes["depth"] == (1, 2, 3, 8)
    assert covers(times, 1, 64, largest, drafter.bends)
    assert not covers(times, 1, 64, largest, (4,))


def test_the_text_of_a_user_is_no_accepted_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat: the rows of the last draft and those of the next prompt are absorbed together."""
    scripted = tiny.ScriptedDrafter(tiny.random_logits(tiny.VOCAB), tiny.VOCAB)
    drafter = combine(monkeypatch, tiny.target(), scripted, depths=4, cost=0.0)
    text = list(range(3, 90))
    (state,) = drafter.absorb_batch([None], [tiny_rows(text, 0, 5)])
    state = replace(drafter.end_draft(state, state, 2), both=True)
    (state,) = drafter.absorb_batch([state], [tiny_rows(text, 5, 80)])
    assert state.record.accepted == 4


def test_first_estimates_are_those_of_the_trained_part(tmp_path: Path) -> None:
    table = [[0.4, 0.1], [0.3, 0.1]]
    tables = dict.fromkeys(("best@0", "best@1", "drawn@1", "coupled@1"), table)
    content: dict[str, Any] = {"format": FORMAT, "rows": [9, 9], **tables}
    (tmp_path / "drafter").mkdir()
    (tmp_path / "ranks.json").write_text(json.dumps(content))
    for trained in (str(tmp_path), {"path": str(tmp_path / "drafter")}):
        found = tables_of(None, Config(trained=trained))
        assert found is not None
        assert found["best@0"].ranks.tolist() == table
    assert tables_of(None, None) is None


# ---- rows ----------------------------------------------------------------------------------------


def test_a_row_of_both_is_the_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first the look-up counts one half, and so does a trained drafter of two levels."""
    drafter = toy(monkeypatch, cost=0.0)
    (state,) = drafter.absorb_batch([None], [tiny_rows([1, 2, 1], 0, 2)])
    logits, (after,) = drafter.step_batch([state], 1, torch.tensor([[1]]), torch.zeros(1, 1).long())
    row = tiny.random_logits(V, 1, 1.5)((1, 2, 1)).softmax(-1)
    expected = 0.5 * row + 0.5 * torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(logits[0, 0].exp(), expected)
    assert state.both
    assert after.record.lookup_share(2) == 0.5


def test_a_row_of_the_look_up_alone_says_how_reliable_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = toy(monkeypatch, cost=100.0)
    (state,) = drafter.absorb_batch([None], [tiny_rows([1, 2, 1], 0, 2)])
    logits, after = drafter.step_batch([state], 1, torch.tensor([[1]]), torch.zeros(1, 1).long())
    log_q = logits.log_softmax(-1)
    confidence = drafter.log_confidence(log_q, 1, drafter.node_hidden(after))
    assert logits[0, 0].tolist() == [-torch.inf, -torch.inf, 0.0]
    assert confidence.exp().tolist() == [[0.5]]


def test_the_confidence_of_the_trained_drafter_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output of its own, as DSpark's."""

    class Sure(tiny.ScriptedDrafter):
        def node_hidden(self, states: Sequence[Any]) -> Tensor:
            return torch.full((len(states), 1, 1), -0.25)

        def log_confidence(self, log_q: Tensor, depth: int, hidden: Tensor | None) -> Tensor:
            assert hidden is not None
            return hidden[..., 0]

    trained = Sure(tiny.random_logits(V), V)
    drafter = combine(monkeypatch, TARGET, trained)
    (state,) = drafter.absorb_batch([None], [tiny_rows([0, 1, 2], 0, 2)])
    logits, after = drafter.step_batch([state], 1, torch.tensor([[2]]), torch.zeros(1, 1).long())
    log_q, hidden = logits.log_softmax(-1), drafter.node_hidden(after)
    torch.testing.assert_close(drafter.log_confidence(log_q, 1, hidden), torch.tensor([[-0.25]]))


# ---- settings and commands -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "key", "why"),
    [
        ("depths=4", "drafter.trained", "combines a look-up and a trained drafter"),
        ("trained=ngram", "drafter.trained", "has no weights"),
        ("trained=hybrid", "drafter.trained", "has no weights"),
        ("trained=eagle3", "drafter.trained", "in the folder of its run"),
        ("trained={name:suffix}", "drafter.trained.name", "has no weights"),
        ("trained={name:kangaroo}", "drafter.trained.name", "runs its target itself"),
        ("trained=nowhere", "drafter.trained.path", "no such folder"),
        ("trained={name:eagle3,taps:[99]}", "drafter.trained.taps[0]", "layers"),
        ("trained=3", "drafter.trained", "neither a folder nor"),
        ("lookup=eagle3", "drafter.lookup.name", "does not look tokens up"),
        ("lookup=lookahead", "drafter.lookup.name", "runs its target itself"),
        ("lookup=runs/suffix", "drafter.lookup", "no such drafter"),
        ("lookup={name:ngram,m:3}", "drafter.lookup.m", "no such key"),
        ("lookup={n:3}", "drafter.lookup", "use suffix"),
    ],
)
def test_wrong_settings_are_explained(word: str, key: str, why: str) -> None:
    shape = tiny.target().shape()

    def check() -> None:
        config = parse(compose(["drafter=hybrid", f"drafter.{word}"]), to_train=False)
        drafters.check(config.drafter, shape)

    with pytest.raises(ConfigError) as caught:
        check()
    assert caught.value.key == key
    assert why in str(caught.value)


def test_a_drafter_of_another_target_or_vocabulary_is_refused(tmp_path: Path) -> None:
    of, smaller = tiny.target(), tiny.target(vocab_size=50)
    trained = tiny.drafter("eagle3", of)
    native.save(trained, tmp_path, of, tiny.config("eagle3"), {})
    for other in (tiny.target(seed=1), smaller):
        with pytest.raises(RunError, match="target"):
            tiny.drafter("hybrid", other, trained=str(tmp_path))


def test_eval_and_a_decoder_take_the_folder_of_a_run(tmp_path: Path) -> None:
    decoder = Decoder.from_pretrained("tiny", dtype="float32")
    trained = tiny.drafter("eagle3", decoder.target, DraftVocab.identity(decoder.target.vocab_size))
    native.save(trained, tmp_path / "run" / "drafter", decoder.target, tiny.config("eagle3"), {})
    prompt = [11, 12, 13] * 4
    settings = {"trained": str(tmp_path / "run")}
    both = Decoder.from_pretrained("tiny", "hybrid", settings=settings, dtype="float32")
    assert both.generate(prompt, 24).output_ids == decoder.generate(prompt, 24).output_ids
    words = ["drafter=hybrid", f"drafter.trained={tmp_path / 'run'}", "target=tiny"]
    few = ["eval.limit=2", "eval.max_new_tokens=24", "eval.warmup=0", "target.dtype=float32"]
    assert main(["eval", *words, *few, f"run.dir={tmp_path / 'eval'}", "drafter.depths=5"]) == 0
    report = json.loads((tmp_path / "eval" / "eval" / "eval.json").read_text())
    assert (report["exact"], report["drafter"], report["depth"]) == (True, "hybrid", 5)
