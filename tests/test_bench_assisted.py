"""Both libraries say the same and work equally hard for it, and the table says what was measured.

The draft model is the target with noise on its weights: right now and then.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider.conf.errors import ConfigError
from outrider.eval.report import Mismatch
from outrider.launch.bench import against_transformers as against
from outrider.launch.bench import assisted as bench_assisted
from outrider.launch.bench.against_transformers import (
    ASSISTED,
    LOOKUP,
    OURS,
    PLAIN,
    THEIR_PLAIN,
    Answer,
    Case,
    Sides,
)
from outrider.models import drafters
from outrider.models.drafters import medusa
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.formats import native
from outrider.models.load import TINY
from outrider.models.vocab import DraftVocab
from tests import tiny
from tests.families import small_model

SYSTEMS = [OURS, PLAIN, ASSISTED, LOOKUP, THEIR_PLAIN]
PROMPTS = [[5, 40, 17, 23, 9], [11], [27, 8, 30, 18, 56, 56, 34, 59]]
BUDGET = 24
HALF = {"llama": 0.12, "gpt2": 0.6}  # noise, in spreads of each weight, that leaves it half right


def noisy(family: str, noise: float) -> Any:
    """The target's weights, disturbed."""
    model, generator = small_model(family), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                step = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * weight.std() * step)
    return model


def sides(
    room: Path,
    gamma: int,
    noise: float | None = None,
    family: str = "llama",
    stops: tuple[int, ...] = (),
) -> Sides:
    target = tiny.target(family)
    noisy(family, HALF[family] if noise is None else noise).save_pretrained(room)
    drafter, assistant = bench_assisted.draft_models(str(room), target)
    return Sides(target, drafter, assistant, stops, gamma, lookup=4)


def answers(both: Sides, prompt: list[int], budget: int = BUDGET) -> dict[str, Answer]:
    with both:
        return {name: both.answer(name, prompt, budget) for name in both.systems}


# ---- the words and the work ----------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_systems_say_the_same_in_the_same_rounds(
    tmp_path: Path, family: str, gamma: int
) -> None:
    both, forwards = sides(tmp_path, gamma, family=family), 0
    for prompt in PROMPTS:
        said, plain = answers(both, prompt), tiny.plain(both.target, prompt, BUDGET)
        for name in SYSTEMS:
            assert said[name].ids == plain, name
        with both:
            assert both.same_rounds(prompt, BUDGET)
        forwards += said[OURS].forwards - 1
        assert said[PLAIN].forwards == said[THEIR_PLAIN].forwards == BUDGET
    accepted = len(PROMPTS) * (BUDGET - 1) - forwards
    assert 0.2 * gamma * forwards < accepted < 0.8 * gamma * forwards, "the draft is half right"


def test_forwards_are_those_of_the_worked_example(tmp_path: Path) -> None:
    """Gamma 2, all guesses right: prompt, 3, 3 here, and 3, 3, 1 there."""
    both = sides(tmp_path, 2, noise=0.0)
    said = answers(both, PROMPTS[0], 7)
    assert (said[OURS].forwards, said[ASSISTED].forwards) == (3, 3)
    said = answers(both, PROMPTS[0], 6)
    assert (said[OURS].forwards, said[ASSISTED].forwards) == (3, 2)


@pytest.mark.parametrize("place", range(1, 8))
def test_an_end_token_inside_a_draft_ends_every_answer(tmp_path: Path, place: int) -> None:
    plain = tiny.plain(tiny.target(), PROMPTS[0], BUDGET)
    stop = plain[place]
    both = sides(tmp_path, 5, noise=0.0, stops=(stop,))
    said = answers(both, PROMPTS[0])
    for name in SYSTEMS:
        assert said[name].ids == plain[: plain.index(stop) + 1], name
    with both:
        assert both.same_rounds(PROMPTS[0], BUDGET)


@pytest.mark.parametrize("budget", [1, 2])
def test_the_smallest_budgets_have_equal_rounds(tmp_path: Path, budget: int) -> None:
    both = sides(tmp_path, 3)
    assert all(len(a.ids) == budget for a in answers(both, PROMPTS[0], budget).values())
    with both:
        assert both.same_rounds(PROMPTS[0], budget)


def test_another_gamma_is_noticed(tmp_path: Path) -> None:
    both = sides(tmp_path, 3, noise=0.0)
    with both:
        assert both.same_rounds(PROMPTS[0], BUDGET)
        both.assistant.generation_config.num_assistant_tokens = 2
        assert not both.same_rounds(PROMPTS[0], BUDGET)


def test_a_wrong_word_is_found_and_the_targets_lead_is_told(tmp_path: Path) -> None:
    both = sides(tmp_path, 3)
    right = both.systems[OURS]
    plain = tiny.plain(both.target, PROMPTS[0], BUDGET)

    def liar(ids: list[int], budget: int) -> list[int]:
        said = right(ids, budget)
        return [*said[:4], (said[4] + 1) % tiny.VOCAB, *said[5:]]

    both.systems[OURS] = liar
    with both:
        case = against.compare(both, "first", PROMPTS[0], BUDGET, repeats=1)
        (miss,) = both.mismatches(case)
    assert (miss.id, miss.position) == (f"first: {OURS}", 4)
    assert (miss.token, miss.baseline_token) == ((plain[4] + 1) % tiny.VOCAB, plain[4])
    text = torch.tensor([[*PROMPTS[0], *plain[:4]]])
    top = both.target.model(text).logits[0, -1].topk(2).values
    assert miss.gap == pytest.approx(float(top[0] - top[1]), rel=1e-4)
    assert [row["same_answers"] for row in bench_assisted.rows([case])] == [0, 1, 1, 1, 1]


def test_forwards_are_counted_inside_the_context_alone(tmp_path: Path) -> None:
    both = sides(tmp_path, 2)
    answers(both, PROMPTS[1], 3)
    counted = both.forwards
    assert both.answer(PLAIN, PROMPTS[1], 3).forwards == 0
    assert both.forwards == counted > 0


# ---- the numbers ---------------------------------------------------------------------------------


def timed(tokens: int, *seconds: float) -> list[Answer]:
    return [Answer(list(range(tokens)), tokens // 2, second, second / 2) for second in seconds]


def test_rows_are_ratios_of_sums_of_medians() -> None:
    """60 tokens in 1 + 2 s here, and there in 2 + 4 s; every prompt alone says 2 as well."""
    cases = [
        Case("a", [1], {OURS: timed(20, 1.0, 9.0, 0.5), ASSISTED: timed(20, 2.0, 2.0, 8.0)}, True),
        Case("b", [1], {OURS: timed(40, 2.0, 2.0, 7.0), ASSISTED: timed(40, 4.0, 3.0, 5.0)}, False),
    ]
    for case in cases:
        case.answers[THEIR_PLAIN] = case.answers[ASSISTED]
    ours, theirs, _ = bench_assisted.rows(cases)
    assert (ours["tokens"], ours["tokens_per_second"], ours["forwards"]) == (60, 20.0, 30)
    assert (ours["against_assisted"], theirs["against_assisted"]) == (2.0, 1.0)
    assert ours["against_assisted_95"] == pytest.approx((2.0, 2.0))
    assert (ours["tokens_per_forward"], ours["same_rounds"]) == (2.0, 1)
    assert ours["in_models"] == 0.5


def test_the_interval_covers_what_prompts_differ_by() -> None:
    """One prompt says 1, the other 3, in equal time: drawn anew, from 1 to 3."""
    cases = [
        Case("a", [1], {OURS: timed(20, 2.0), ASSISTED: timed(20, 2.0)}, True),
        Case("b", [1], {OURS: timed(20, 2.0), ASSISTED: timed(20, 6.0)}, True),
    ]
    for case in cases:
        case.answers[THEIR_PLAIN] = case.answers[ASSISTED]
    ours = bench_assisted.rows(cases)[0]
    assert ours["against_assisted"] == pytest.approx(2.0)
    assert ours["against_assisted_95"] == pytest.approx((1.0, 3.0))
    assert bench_assisted.rows(cases[:1])[0]["against_assisted_95"] is None


def test_bodies_and_heads_of_both_sides_are_watched(tmp_path: Path) -> None:
    """All of them run, and each is seen: what is left is the decoders' own time."""
    both, called = sides(tmp_path, 3), list[int]()
    for number, part in enumerate(both.parts()):
        part.register_forward_hook(lambda *_, number=number: called.append(number))
    said = answers(both, PROMPTS[0])
    assert isinstance(both.drafter, DraftLm)
    body = both.parts().index(both.drafter.lm.body)  # does not run where the lean one does
    assert set(called) == set(range(8)) - {body}
    assert all(0 < answer.inside < answer.seconds for answer in said.values())


# ---- the verb ------------------------------------------------------------------------------------


def shallow(room: Path, layers: int = 2) -> Path:
    """The embedded target without its upper layers: a draft model with the same tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.config.layer_types = None
    model.save_pretrained(room)
    return room


def test_the_verb_prints_and_writes_a_row_per_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, out = shallow(tmp_path / "draft"), tmp_path / "out.json"
    words = [f"draft={draft}", "prompts=2", "new_tokens=8", "repeats=2", "gamma=2", f"out={out}"]
    assert bench_assisted.assisted(words) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    assert [row["system"] for row in written["results"]] == SYSTEMS
    assert all(name in printed for name in SYSTEMS)
    assert all(row["same_answers"] == 2 for row in written["results"])
    assert all(row["tokens_per_second"] > 0 for row in written["results"])
    assert written["results"][0]["same_rounds"] == 2
    assert [len(case["output_ids"]) for case in written["prompts"]] == [8, 8]
    assert written["mismatches"] == written["left_out"] == []
    assert all(0.1 < row["in_models"] < 1 for row in written["results"])
    assert "same rounds on both sides: 2 of 2 prompts" in printed


def test_mismatches_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case("a", [1], {name: timed(4, 1.0) for name in SYSTEMS}, True)]
    result = {
        "machine": "a machine", "options": bench_assisted.OPTIONS,
        "results": bench_assisted.rows(cases),
        "mismatches": [Mismatch("a: outrider", 3, 7, None, 0.25)._asdict()],
        "left_out": ["z"],
    }  # fmt: skip
    bench_assisted.show(result, Console(width=120))
    printed = capsys.readouterr().out
    assert "a: outrider: 7 for None at 3, lead 0.25" in printed
    assert "too long, left out: z" in printed


def test_a_trained_draft_model_is_the_same_on_both_sides(tmp_path: Path) -> None:
    """With a reduced draft vocabulary in the run, both sides propose the whole one."""
    target = tiny.target()
    trained = tiny.drafter("draft_lm", target)
    native.save(trained, tmp_path / "drafter", target, None, {})
    drafter, assistant = bench_assisted.draft_models(str(tmp_path), target)
    assert drafter.vocab.full
    text = torch.tensor([PROMPTS[0]])
    places = torch.arange(text.shape[1])[None]
    causal = torch.ones(1, text.shape[1], text.shape[1]).bool().tril()
    ours = drafter.head(drafter.lm.forward(text, places, causal).last)
    torch.testing.assert_close(ours, assistant(text).logits)
    was = trained.head(drafter.lm.forward(text, places, causal).last)
    torch.testing.assert_close(ours[..., trained.vocab.kept], was)


def test_a_draft_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    small_model("llama", vocab_size=59).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^draft = .*\n.*59 tokens and the target 61"):
        bench_assisted.draft_models(str(tmp_path), tiny.target())


def test_a_drafter_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    target = tiny.target()
    heads = drafters.build(medusa.Config(), target, DraftVocab.whole(target.vocab))
    native.save(heads, tmp_path / "drafter", target, medusa.Config(), {})
    with pytest.raises(ConfigError, match=r"^draft = .*\n.*kind medusa"):
        bench_assisted.draft_models(str(tmp_path), target)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^draft = .*\n.*could not be loaded"):
        bench_assisted.draft_models(str(tmp_path), tiny.target())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["coffee=1"], "no such option"),
        (["gamma=four"], "whole number from 1 on"),
        (["repeats=0"], "whole number from 1 on"),
        ([], "none was named"),
    ],
)
def test_options_that_mean_nothing_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        bench_assisted.assisted(words)


def test_prompts_that_do_not_fit_are_said(tmp_path: Path) -> None:
    draft = shallow(tmp_path / "draft")
    with pytest.raises(ConfigError, match="No prompt fits"):
        bench_assisted.assisted([f"draft={draft}", "new_tokens=2048", "prompts=1"])
