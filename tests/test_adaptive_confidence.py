"""A chain's adaptive threshold: the rule by hand, per request, and exact by enumeration (R2)."""

from typing import Any

import pytest
import torch

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.models.adapt import adapt
from outrider.models.decode.adaptive_confidence import AdaptiveConfidence, Threshold
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import decodings, policy_of
from outrider.models.decode.policy import Chain, Draft
from outrider.models.decode.request import Request
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.tree import Tree
from outrider.train.settings import parse
from tests import tiny
from tests.enumeration import Context, Law, distance, enumerate_law
from tests.tiny import TOKENS, ScriptedDrafter, logits_after, mean_target, scripted_logits

RULE = AdaptiveConfidence()
QUICK = AdaptiveConfidence(goal=0.6, start=0.35, step=3.0)  # moves by 0.3 per round


def test_the_rule_by_hand() -> None:
    """Averages of 1, 1, 0.5, 1: 0.5, 0.75, 0.625, 0.8125; of the last five below: above 0.9."""
    threshold = RULE.initial()
    assert threshold == Threshold(0.8, 0.0, 0)
    for drafted, accepted, average in ((4, 4, 0.5), (2, 2, 0.75), (2, 1, 0.625), (3, 3, 0.8125)):
        threshold = RULE.update(threshold, drafted, accepted, full=False)
        assert threshold.acceptance == average
    assert threshold.value == pytest.approx(0.8 + 4 * 0.001)  # 0.9 t + 0.1 (t + 0.01)
    threshold = RULE.update(threshold, 5, 5, full=True)  # 0.90625: the goal is reached
    assert threshold.value == pytest.approx(0.804)  # a full draft cannot become longer
    threshold = RULE.update(threshold, 5, 5, full=False)
    assert threshold.value == pytest.approx(0.803)
    assert threshold.rounds == 6


def test_a_full_draft_below_the_goal_raises_the_threshold() -> None:
    assert RULE.update(RULE.initial(), 8, 0, full=True).value == pytest.approx(0.801)


def test_a_round_without_a_draft_changes_only_the_count() -> None:
    before = Threshold(0.5, 0.7, 3)
    assert RULE.update(before, 0, 0, full=False) == Threshold(0.5, 0.7, 4)


def test_the_threshold_stays_a_probability() -> None:
    rule = AdaptiveConfidence(start=0.5, step=100.0)
    assert rule.update(rule.initial(), 2, 0, full=False).value == 1.0
    assert rule.update(Threshold(0.5, 1.0), 2, 2, full=False).value == 0.0


@pytest.mark.parametrize(("name", "value"), [("goal", 1.5), ("step", -1.0), ("memory", -0.1)])
def test_invalid_rules_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        AdaptiveConfidence(**{name: value})


# ---- in the engine -------------------------------------------------------------------------------


class Recorded(Chain):
    """Keep the thresholds of every round."""

    def propose(self, context: DraftContext) -> Draft:
        threshold = self._threshold(context)
        assert isinstance(threshold, torch.Tensor)
        self.__dict__.setdefault("values", []).append(threshold.tolist())
        return super().propose(context)


def engine_with(right: Any, policy: Chain, count: int = 40) -> tuple[Engine, list[int]]:
    """A drafter that is near certain of its tokens; `right`: where they are those of the target."""
    target, prompt = tiny.target(), [5, 40, 17]
    text = [*prompt, *tiny.greedy_tokens(target, prompt, count)]
    row = scripted_logits(text, tiny.VOCAB, right)
    return Engine(target, ScriptedDrafter(row, tiny.VOCAB), policy), prompt


def test_thresholds_follow_the_rounds_of_the_answer() -> None:
    """Replayed from the answer's own lists."""
    policy = Recorded(4, confidence=RULE)
    engine, prompt = engine_with(lambda i: i % 3 != 0, policy)
    out = engine.generate(prompt, 30)
    expected, threshold = list[float](), RULE.initial()
    for drafted, accepted, room in zip(out.drafted, out.accepted, out.room, strict=True):
        expected.append(threshold.value)
        threshold = RULE.update(threshold, drafted, accepted, drafted == min(4, room))
    actual = torch.tensor([value for (value,) in policy.__dict__["values"]])
    torch.testing.assert_close(actual, torch.tensor(expected)[: len(actual)])
    assert len({*expected}) > 3


def test_drafts_get_shorter_while_too_much_is_rejected_and_longer_again() -> None:
    """Wrong for twelve tokens, then right; every token is drafted with about the same chance."""
    target, prompt = tiny.target(), [5, 40, 17]
    answer = tiny.greedy_tokens(target, prompt, 60)
    text = (*prompt, *answer)

    def row(prefix: tiny.Text) -> torch.Tensor:
        index = len(prefix)
        token = text[index] if index < len(text) and prefix == text[:index] else 0
        wrong = (token + 1) % tiny.VOCAB
        chosen = wrong if index < len(prompt) + 12 else token
        logits = torch.zeros(tiny.VOCAB)
        logits[chosen] = 5.0  # probability 0.71
        return logits

    rule = AdaptiveConfidence(start=0.5, step=0.5)
    engine = Engine(target, ScriptedDrafter(row, tiny.VOCAB), Chain(6, confidence=rule))
    out = engine.generate(prompt, 60)
    assert out.ids == answer
    assert out.drafted[0] == 6
    assert out.drafted[11] == 1
    assert out.drafted[-2] == 6


def test_drafts_do_not_depend_on_the_batch() -> None:
    target = tiny.target()
    prompts = [[5, 40, 17, 23, 9], [11], [7, 8, 9, 5], [3] * 11]
    requests = [Request(prompt, 16 + 3 * i, i) for i, prompt in enumerate(prompts)]
    noise = tiny.random_logits(tiny.VOCAB, scale=6.0)
    for sampling in (Sampling(), Sampling(1.0)):
        drafter = ScriptedDrafter(noise, tiny.VOCAB)
        rule = AdaptiveConfidence(start=0.5, step=1.0)
        engine = Engine(target, drafter, Chain(4, confidence=rule), sampling=sampling)
        alone, together = (engine.generate_all(requests, batch) for batch in (1, 4))
        assert [out.ids for out in together] == [out.ids for out in alone]
        assert [out.drafted for out in together] == [out.drafted for out in alone]
        assert len({tuple(out.drafted) for out in alone}) > 1


# ---- exactness -----------------------------------------------------------------------------------


class Dropped(Chain):
    """Wrong on purpose: a token below the threshold is not verified (R2)."""

    def propose(self, context: DraftContext) -> Draft:
        draft = super().propose(context)
        assert draft.q_rows is not None
        rows, ids = draft.q_rows[:, :-1], draft.tree.ids[:, 1:]
        least = self._threshold(context)
        assert isinstance(least, torch.Tensor)
        likely = (rows.gather(2, ids[..., None])[..., 0] >= least).cumprod(-1)
        return Draft(Tree.chain(draft.tree.ids, likely.sum(-1)), draft.q_rows)


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(Chain, 0.0, 1e-12), (Dropped, 0.005, 1.0)], ids=["kept", "dropped"]
)
def test_the_output_has_exactly_the_targets_distribution(
    kind: type[Chain], least: float, most: float
) -> None:
    """Five tokens jointly, in float64, over every random outcome; the threshold changes."""
    sampling, prompt, count = Sampling(1.0, 1.0, 2), [1, 3, 4, 2], 5
    noise, target = tiny.random_logits(TOKENS, seed=3, scale=1.5), mean_target(torch.float64)
    drafter = ScriptedDrafter(lambda text: noise(text).double(), TOKENS)
    decoder = Engine(target, drafter, kind(2, confidence=QUICK), sampling=sampling)
    drafts = set[tuple[int, ...]]()

    def run(rng: RandomSource) -> Context:
        tiny.inject_random_source(decoder, rng)
        out = decoder.generate(prompt, count)
        drafts.add(tuple(out.drafted))
        return tuple(out.ids)

    law: Law = {(): 1.0}
    for _ in range(count):
        longer: Law = {}
        for prefix, chance in law.items():
            row = sampling.probs(logits_after(target, [*prompt, *prefix])[None])[0]
            longer.update({(*prefix, t): chance * p for t, p in enumerate(row.tolist()) if p > 0})
        law = longer
    assert least <= distance(enumerate_law(run), law) < most
    assert len(drafts) > 3


# ---- configuration -------------------------------------------------------------------------------


def decode_with(*words: str) -> Any:
    return parse(compose(["decode=chain", *words])).decode


def test_the_setting_builds_the_rule() -> None:
    policy = policy_of(decode_with("decode.confidence=adaptive", "decode.acceptance_goal=0.7"))
    assert policy == Chain(3, "best", AdaptiveConfidence(goal=0.7))
    assert policy_of(decode_with("decode.confidence=0.4")) == Chain(3, "best", 0.4)


@pytest.mark.parametrize(
    ("word", "key", "text"),
    [
        ("decode.confidence=sometimes", "decode.confidence", "a number or adaptive"),
        ("decode.confidence=1.5", "decode.confidence", "in [0, 1]"),
        ("decode.acceptance_goal=2", "decode.acceptance_goal", "in [0, 1]"),
        ("decode.acceptance_goal=0.5", "decode.acceptance_goal", "adaptive confidence"),
    ],
)
def test_wrong_settings_are_named(word: str, key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_with(word)
    assert caught.value.key == key
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["drafter=draft_verify"], "adaptive"),
        (["drafter=draft_verify", "decode.confidence=0.3"], 0.3),
        (["drafter=draft_verify", "decode.confidence=0"], 0.0),
        (["drafter=draft_verify", "decode=dynamic_tree"], 0.0),
        (["drafter=ngram"], 0.0),
        (["drafter=eagle3"], 0.0),
    ],
)
def test_the_drafter_chooses_a_confidence_that_is_not_set(words: list[str], chosen: Any) -> None:
    notes = list[str]()
    config = adapt(parse(compose(words), to_train=False), notes.append)
    assert config.decode.confidence == chosen
    assert any("decode.confidence" in note for note in notes) == (chosen == "adaptive")


def test_the_grid_has_the_confidence_of_the_drafter() -> None:
    words = ["drafter=draft_verify", "eval.grid=[chain@0,dynamic_tree@0]"]
    config = parse(compose(words), to_train=False)
    assert [decode.confidence for _, decode in decodings(config)] == ["adaptive", 0.0]
