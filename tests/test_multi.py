"""Several drafters that draft together: their weights, exactness, settings."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.eval.decoder import Decoder
from outrider.launch.cli import main
from outrider.models import drafters
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Draft, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.rules.rule_table import BEST, COUPLED, DRAWN, INDEPENDENT, bind_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tries.policy import MergedTree
from outrider.models.drafters import multi
from outrider.models.drafters.multi import SHARE, Config, Multi
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.target.target import Target
from outrider.train.settings import parse
from tests import tiny
from tests.enumeration import Law, distance
from tests.test_auto_exact import TARGET, V, law_of_plain
from tests.test_hybrid import FAMILIES, FixedPart, tiny_rows
from tests.test_lookup import POLICIES, REPEATING

MERGED_POLICIES: list[Policy] = [MergedTree(3, 4), MergedTree(3, 3, BEST)]


def combine(
    monkeypatch: pytest.MonkeyPatch, of: Target, parts: Sequence[Drafter], **settings: Any
) -> Multi:
    """Drafters of the tests together."""

    def part_of(number: int) -> Any:
        part = FixedPart(f"drafter.drafters[{number}]", "")
        part.drafter = parts[number]
        return part

    with monkeypatch.context() as patch:
        patch.setattr(multi, "part_of", part_of)
        cfg = Config(drafters=["FOLDER"] * len(parts), **settings)
        built = drafters.build(cfg, of, DraftVocab.identity(of.vocab_size))
    assert isinstance(built, Multi)
    return built


def scripted(seed: int, size: int = V) -> tiny.ScriptedDrafter:
    return tiny.ScriptedDrafter(tiny.random_logits(size, seed, 1.5), size)


# ---- weights -------------------------------------------------------------------------------------


def knows(text: Sequence[int], right: bool) -> tiny.ScriptedDrafter:
    rows = tiny.scripted_logits(text, tiny.VOCAB, lambda _: right)
    return tiny.ScriptedDrafter(rows, tiny.VOCAB)


def round_of(drafter: Multi, state: Any, text: Sequence[int], at: int, levels: int) -> Any:
    """Draft the tokens of a text after position `at` as a chain, and absorb them."""
    drafted, only = state, torch.zeros(1, 1, dtype=torch.long)
    for depth in range(1, levels + 1):
        ids = torch.tensor([[text[at + depth - 1]]])
        _, (drafted,) = drafter.step_batch([drafted], depth, ids, only)
    state = drafter.end_draft(state, drafted, levels)
    (state,) = drafter.absorb_batch([state], [tiny_rows(text, at, at + levels)])
    return state


def test_the_drafter_that_predicts_the_text_gains_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token, gains of 1 and 0: by hand."""
    text = [5, 6, 7, 8, 9, 10, 11]
    parts = [knows(text, True), knows(text, False)]
    drafter = combine(monkeypatch, tiny.target(), parts)
    (state,) = drafter.absorb_batch([None], [tiny_rows(text, 0, 3)])
    assert state.weights == (0.5, 0.5)
    (first, second) = round_of(drafter, state, text, 3, 1).weights
    share = 1 / (1 + math.exp(-0.5))
    assert first == pytest.approx((1 - SHARE) * share + SHARE / 2, abs=1e-4)
    assert first + second == pytest.approx(1)
    longer = round_of(drafter, state, text, 3, 3).weights
    assert longer[0] > first


def test_weights_follow_a_text_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One drafter knows the first 60 tokens, the other the rest."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(3, tiny.VOCAB, (130,), generator=generator).tolist()
    rows = [
        tiny.scripted_logits(text, tiny.VOCAB, lambda n: n < 60),
        tiny.scripted_logits(text, tiny.VOCAB, lambda n: n >= 60),
    ]
    parts = [tiny.ScriptedDrafter(row, tiny.VOCAB) for row in rows]
    drafter = combine(monkeypatch, tiny.target(), parts)
    (state,) = drafter.absorb_batch([None], [tiny_rows(text, 0, 3)])
    weights = dict[int, tuple[float, ...]]()
    for at in range(3, 125, 2):
        state = round_of(drafter, state, text, at, 2)
        weights[at] = state.weights
    assert weights[57][0] > 0.95
    assert weights[81][1] > 0.95
    assert min(map(min, weights.values())) > SHARE / 3


def test_hedge_loses_little_to_the_best_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freund and Schapire's bound for losses in [0, 1]: (ln S + rate L) / (1 - exp(-rate))."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(3, tiny.VOCAB, (120,), generator=generator).tolist()
    rows = [
        tiny.scripted_logits(text, tiny.VOCAB, lambda n: n % 2 > 0),
        tiny.scripted_logits(text, tiny.VOCAB, lambda n: n % 3 > 0),
        tiny.scripted_logits(text, tiny.VOCAB, lambda n: n % 5 > 0),
    ]
    parts = [tiny.ScriptedDrafter(row, tiny.VOCAB) for row in rows]
    monkeypatch.setattr(multi, "SHARE", 0.0)
    drafter = combine(monkeypatch, tiny.target(), parts)
    (state,) = drafter.absorb_batch([None], [tiny_rows(text, 0, 3)])
    own, best = 0.0, [0.0, 0.0, 0.0]
    for at in range(3, 115):
        losses = [
            1 - float(part.row(tuple(text[: at + 1])).softmax(-1)[text[at + 1]]) for part in parts
        ]
        own += sum(w * loss for w, loss in zip(state.weights, losses, strict=True))
        best = [total + loss for total, loss in zip(best, losses, strict=True)]
        state = round_of(drafter, state, text, at, 1)
    assert own <= (math.log(3) + 0.5 * min(best)) / (1 - math.exp(-0.5))
    assert own < sorted(best)[1]  # better than the second of them


def test_a_row_is_the_mixture_by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [scripted(1), scripted(2)]
    drafter = combine(monkeypatch, TARGET, parts)
    (state,) = drafter.absorb_batch([None], [tiny_rows([1, 2, 0], 0, 2)])
    state = replace(state, weights=(0.8, 0.2))
    logits, after = drafter.step_batch([state], 1, torch.tensor([[0]]), torch.zeros(1, 1).long())
    rows = [part.row((1, 2, 0)).softmax(-1) for part in parts]
    torch.testing.assert_close(logits[0, 0].exp(), 0.8 * rows[0] + 0.2 * rows[1])
    sources = drafter.sources(after)
    torch.testing.assert_close(sources.logits[0, 0].softmax(-1), torch.stack(rows))
    torch.testing.assert_close(sources.weights, torch.tensor([[0.8, 0.2]]))


def test_every_drafter_reads_its_own_taps() -> None:
    """Layers 2, 0, 1 of one, none of the other; together 0, 1, 2. A copy alone drafts the same."""
    target, trace_of = tiny.target(), tiny.packed_trace
    drafter = tiny.drafter("multi", target)
    assert isinstance(drafter, Multi)
    first, second = drafter.drafters
    assert (drafter.taps, first.taps, second.taps) == ((0, 1, 2), (2, 0, 1), ())
    target.set_taps(drafter.taps)
    both = drafter.absorb(None, tiny.verified_rows(trace_of(target), 1, 0, 8))
    target.set_taps(first.taps)
    alone = first.absorb(None, tiny.verified_rows(trace_of(target), 1, 0, 8))
    newest, only = trace_of(target).ids[1, 8:9], torch.zeros(1, dtype=torch.long)
    _, after = drafter.step(both, 1, newest, only)
    expected, _ = first.step(alone, 1, newest, only)
    torch.testing.assert_close(after.levels[0].logits[0], expected)


# ---- greedy answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_plain_decoding(family: str, tmp_path: Path) -> None:
    """Float32, token by token, of half-trained drafters, alone and in a batch."""
    folders = list[str]()
    for name in ("eagle3", "medusa"):
        target, _, trained = tiny.half_trained(name, family)
        native.save(trained, tmp_path / name, target, trained.cfg, {})
        folders.append(str(tmp_path / name))
    drafter = tiny.drafter("multi", target, drafters=folders)
    prompts = [REPEATING, REPEATING[:5], [11], [*tiny.PROMPTS[0]]]
    requests = [Request(prompt, 16, seed) for seed, prompt in enumerate(prompts)]
    tiny.require_plain_output(target, drafter, [*POLICIES, *MERGED_POLICIES], requests)


# ---- sampled answers -----------------------------------------------------------------------------

WARM = Sampling(temperature=1.0)
PROMPT, LENGTH = [2, 0, 1], 3  # room for a draft of one token, with another one after it
TREE = ((0,), (1,))
SAMPLED: dict[str, Policy] = {
    "drawn chain": Chain(1, DRAWN),
    "best chain": Chain(1, BEST),
    "dynamic tree": DynamicTree(1, 2, 2),
    "drawn tree": StaticTree(TREE, DRAWN),
    "independent tree": StaticTree(TREE, INDEPENDENT),
    "merged tree": MergedTree(1, 2),
    "merged best tree": MergedTree(1, 3, BEST),
    "coupled chain": Chain(1, COUPLED),
}


def law_of(drafter: Multi, policy: Policy, length: int = LENGTH, sampling: Sampling = WARM) -> Law:
    """The exact law of sampled answers, by every path through their random numbers."""
    return tiny.law_of_answers(Engine(TARGET, drafter, policy, sampling=sampling), PROMPT, length)


@pytest.mark.parametrize("case", [name for name in SAMPLED if name != "coupled chain"])
def test_sampled_answers_have_the_law_of_the_target(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = combine(monkeypatch, TARGET, [scripted(1), scripted(2)], rate=2.0)
    assert distance(law_of(drafter, SAMPLED[case]), law_of_plain(PROMPT, LENGTH)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Chain(2, DRAWN), MergedTree(2, 2)], ids=["chain", "merged"])
def test_longer_drafts_have_the_law_of_the_target(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change between the rounds, and chains share nodes at two levels."""
    drafter = combine(monkeypatch, TARGET, [scripted(1), scripted(2)], rate=2.0)
    two = Sampling(temperature=1.2, top_k=2)
    plain: Law = {(): 1.0}
    for _ in range(4):
        rows = {text: two.probs(tiny.logits_after(TARGET, [*PROMPT, *text])) for text in plain}
        plain = {
            (*text, token): chance * float(rows[text][token])
            for text, chance in plain.items()
            for token in range(V)
        }
    assert distance(law_of(drafter, policy, 4, two), plain) < 1e-6


class WithoutMultiplicity(MergedTree):
    """A mistake: a node is tested once, with the row that it was first drawn from."""

    def propose(self, context: DraftContext) -> Draft:
        draft = super().propose(context)
        if draft.tree.draws is None:
            return draft
        draws = draft.tree.draws.clone()
        draws[:, 1] = draws[:, 1].masked_fill(draws[:, 1] == draws[:, 0], -1)
        return Draft(draft.tree.with_draws(draws), draft.q_rows)


class LikelierDrafter(Chain):
    """A mistake: both drafters draw, and the likelier of the two tokens is verified."""

    def propose(self, context: DraftContext) -> Draft:
        start: list[Any] = [*context.states]
        drafts = list[Draft]()
        for weights in ((1.0, 0.0), (0.0, 1.0)):
            context.states = [replace(state, weights=weights) for state in start]
            drafts.append(super().propose(context))
        return max(drafts, key=_probability)


def _probability(draft: Draft) -> float:
    if draft.q_rows is None or draft.tree.size < 2:
        return 0.0
    return float(draft.q_rows[0, 0, draft.tree.ids[0, 1]])


@pytest.mark.parametrize(
    "mistake", [WithoutMultiplicity(1, 2), LikelierDrafter(1, DRAWN)], ids=["merged", "chain"]
)
def test_mistakes_have_another_law(mistake: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls of the tests above; two equal drafters often draw a token twice."""
    parts = [tiny.ScriptedDrafter(tiny.random_logits(V, 2), V) for _ in range(2)]
    if isinstance(mistake, LikelierDrafter):
        parts = [scripted(1), scripted(2)]
    drafter = combine(monkeypatch, TARGET, parts)
    exact = Chain(1, DRAWN) if isinstance(mistake, LikelierDrafter) else MergedTree(1, 2)
    assert distance(law_of(drafter, exact), law_of_plain(PROMPT, LENGTH)) < 1e-6
    assert distance(law_of(drafter, mistake), law_of_plain(PROMPT, LENGTH)) > 1e-2


@pytest.mark.parametrize("case", SAMPLED)
def test_sampled_answers_do_not_depend_on_their_batch(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets differ, so that some are drafted deeper than others have room for."""
    drafter = combine(monkeypatch, TARGET, [scripted(1), scripted(2)], rate=2.0)
    deeper: dict[str, Policy] = {
        "drawn chain": Chain(3, DRAWN, 0.45), "merged tree": MergedTree(3, 4),
        "merged best tree": MergedTree(3, 4, BEST), "dynamic tree": DynamicTree(3, 2, 4),
    }  # fmt: skip
    policy = deeper.get(case, SAMPLED[case])
    rule = bind_rule("coupled", COUPLED) if policy.draft == COUPLED else None
    engine = Engine(TARGET, drafter, policy, sampling=WARM, rule=rule)
    prompts = [PROMPT, [1], [0, 0, 1, 0, 0], [2, 1]]
    requests = [Request(prompt, 9 + 2 * n, n) for n, prompt in enumerate(prompts)]
    alone, together = (engine.generate_all(requests, batch) for batch in (1, 4))
    assert [out.ids for out in alone] == [out.ids for out in together]


# ---- settings and commands -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        ([], "drafter.drafters", "2 to 8"),
        (["drafters=[FOLDER]"], "drafter.drafters", "2 to 8"),
        (["drafters=FOLDER"], "drafter.drafters", "2 to 8"),
        (["drafters=[FOLDER,FOLDER,nowhere]"], "drafter.drafters[2].path", "no such folder"),
        (["drafters=[FOLDER,ngram]"], "drafter.drafters[1]", "has no weights"),
        (["drafters=[FOLDER,eagle3]"], "drafter.drafters[1]", "in the folder of its run"),
        (["drafters=[FOLDER,{name:kangaroo}]"], "drafter.drafters[1].name", "runs its target"),
        (["drafters=[FOLDER,3]"], "drafter.drafters[1]", "neither a folder nor"),
    ],
)
def test_wrong_settings_are_explained(words: list[str], key: str, why: str, tmp_path: Path) -> None:
    target = tiny.target()
    native.save(tiny.drafter("eagle3", target), tmp_path / "a", target, tiny.config("eagle3"), {})
    given = [f"drafter.{word}".replace("FOLDER", str(tmp_path / "a")) for word in words]

    def check() -> None:
        config = parse(compose(["drafter=multi", *given]), to_train=False)
        drafters.check(config.drafter, target.shape())

    with pytest.raises(ConfigError) as caught:
        check()
    assert caught.value.key == key
    assert why in str(caught.value)


def test_a_drafter_of_another_target_or_vocabulary_is_refused(tmp_path: Path) -> None:
    """Named by its folder; the first one is of this target."""
    of = tiny.target()
    for number, other in enumerate((of, tiny.target(seed=1), tiny.target(vocab_size=50))):
        trained = tiny.drafter("eagle3", other, tiny.vocab(40, other.vocab_size))
        native.save(trained, tmp_path / str(number), other, tiny.config("eagle3"), {})
    for number in (1, 2):
        folders = [str(tmp_path / "0"), str(tmp_path / str(number))]
        with pytest.raises(RunError, match="target") as caught:
            tiny.drafter("multi", of, drafters=folders)
        assert str(tmp_path / str(number)) in str(caught.value)


def test_eval_and_a_decoder_take_the_folders_of_runs(tmp_path: Path) -> None:
    decoder = Decoder.from_pretrained("tiny", dtype="float32")
    full = DraftVocab.identity(decoder.target.vocab_size)
    for name in ("eagle3", "medusa"):
        trained = tiny.drafter(name, decoder.target, full)
        native.save(trained, tmp_path / name / "drafter", decoder.target, tiny.config(name), {})
    folders = [str(tmp_path / name) for name in ("eagle3", "medusa")]
    both = Decoder.from_pretrained("tiny", "multi", settings={"drafters": folders}, dtype="float32")
    prompt = [11, 12, 13] * 4
    assert both.generate(prompt, 24).output_ids == decoder.generate(prompt, 24).output_ids
    words = ["drafter=multi", f"drafter.drafters=[{','.join(folders)}]", "target=tiny"]
    few = ["eval.limit=2", "eval.max_new_tokens=16", "eval.warmup=0", "target.dtype=float32"]
    assert main(["eval", *words, *few, f"run.dir={tmp_path / 'eval'}", "decode=merged_tree"]) == 0


def test_a_drafter_that_changes_the_target_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changing(tiny.ScriptedDrafter):
        def describe_target_change(self) -> str | None:
            return "adapters"

    parts = [scripted(1), Changing(tiny.random_logits(V), V)]
    with pytest.raises(ConfigError, match="changes the target") as caught:
        combine(monkeypatch, TARGET, parts)
    assert caught.value.key == "drafter.drafters[1]"


def test_a_row_that_is_no_number_reaches_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: tuple[int, ...]) -> Tensor:
        return torch.full((V,), torch.nan)

    parts = [scripted(1), tiny.ScriptedDrafter(broken, V)]
    engine = Engine(TARGET, combine(monkeypatch, TARGET, parts), Chain(2))
    with pytest.raises(RunError, match="logits are not finite"):
        engine.generate(PROMPT, 6)
