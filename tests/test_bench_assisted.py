"""Both libraries output the same tokens in the same rounds, and the table of the measurement.

The draft model is the target with noise on its weights: accepted about half of the time.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.eval.report import Mismatch
from outrider.launch.bench import against_transformers, assisted
from outrider.launch.bench.against_transformers import (
    ASSISTED,
    LOOKUP,
    OURS,
    PLAIN,
    THEIR_PLAIN,
    Answer,
    Case,
    Decoders,
)
from outrider.models import drafters
from outrider.models.drafters import medusa
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.target.load import TINY
from tests import tiny
from tests.families import small_model

SYSTEMS = [OURS, PLAIN, ASSISTED, LOOKUP, THEIR_PLAIN]
PROMPTS = [[5, 40, 17, 23, 9], [11], [27, 8, 30, 18, 56, 56, 34, 59]]
BUDGET = 24
# noise, in spreads of each weight, with which half of the draft tokens are accepted
HALF = {"llama": 0.12, "gpt2": 0.6}


def noisy(family: str, noise: float) -> Any:
    """The target with noise on its weights."""
    model, generator = small_model(family), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                step = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * weight.std() * step)
    return model


def build_decoders(
    folder: Path,
    gamma: int,
    noise: float | None = None,
    family: str = "llama",
    stops: tuple[int, ...] = (),
) -> Decoders:
    target = tiny.target(family)
    noisy(family, HALF[family] if noise is None else noise).save_pretrained(folder)
    drafter, assistant = assisted.draft_models(str(folder), target)
    return Decoders(target, drafter, assistant, stops, gamma, lookup=4)


def answers(decoders: Decoders, prompt: list[int], budget: int = BUDGET) -> dict[str, Answer]:
    with decoders:
        return {name: decoders.answer(name, prompt, budget) for name in decoders.systems}


# ---- tokens and forwards -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_systems_output_the_same_tokens_in_the_same_rounds(
    tmp_path: Path, family: str, gamma: int
) -> None:
    decoders, forwards = build_decoders(tmp_path, gamma, family=family), 0
    for prompt in PROMPTS:
        outputs = answers(decoders, prompt)
        plain = tiny.greedy_tokens(decoders.target, prompt, BUDGET)
        for name in SYSTEMS:
            assert outputs[name].ids == plain, name
        with decoders:
            assert decoders.same_rounds(prompt, BUDGET)
        forwards += outputs[OURS].forwards - 1
        assert outputs[PLAIN].forwards == outputs[THEIR_PLAIN].forwards == BUDGET
    accepted = len(PROMPTS) * (BUDGET - 1) - forwards
    assert 0.2 * gamma * forwards < accepted < 0.8 * gamma * forwards, "about half are accepted"


def test_forward_counts_of_the_worked_example(tmp_path: Path) -> None:
    """Gamma 2, all draft tokens accepted: prompt, 3, 3 in Outrider, and 3, 3, 1 in transformers."""
    decoders = build_decoders(tmp_path, 2, noise=0.0)
    outputs = answers(decoders, PROMPTS[0], 7)
    assert (outputs[OURS].forwards, outputs[ASSISTED].forwards) == (3, 3)
    outputs = answers(decoders, PROMPTS[0], 6)
    assert (outputs[OURS].forwards, outputs[ASSISTED].forwards) == (3, 2)


@pytest.mark.parametrize("position", range(1, 8))
def test_end_token_inside_a_draft_ends_every_answer(tmp_path: Path, position: int) -> None:
    plain = tiny.greedy_tokens(tiny.target(), PROMPTS[0], BUDGET)
    stop = plain[position]
    decoders = build_decoders(tmp_path, 5, noise=0.0, stops=(stop,))
    outputs = answers(decoders, PROMPTS[0])
    for name in SYSTEMS:
        assert outputs[name].ids == plain[: plain.index(stop) + 1], name
    with decoders:
        assert decoders.same_rounds(PROMPTS[0], BUDGET)


@pytest.mark.parametrize("budget", [1, 2])
def test_rounds_are_equal_for_the_smallest_budgets(tmp_path: Path, budget: int) -> None:
    decoders = build_decoders(tmp_path, 3)
    assert all(len(a.ids) == budget for a in answers(decoders, PROMPTS[0], budget).values())
    with decoders:
        assert decoders.same_rounds(PROMPTS[0], budget)


def test_same_rounds_detects_another_gamma(tmp_path: Path) -> None:
    decoders = build_decoders(tmp_path, 3, noise=0.0)
    with decoders:
        assert decoders.same_rounds(PROMPTS[0], BUDGET)
        decoders.assistant.generation_config.num_assistant_tokens = 2
        assert not decoders.same_rounds(PROMPTS[0], BUDGET)


def test_mismatch_reports_the_position_and_the_logit_gap(tmp_path: Path) -> None:
    decoders = build_decoders(tmp_path, 3)
    original = decoders.systems[OURS]
    plain = tiny.greedy_tokens(decoders.target, PROMPTS[0], BUDGET)

    def with_wrong_token(ids: list[int], budget: int) -> list[int]:
        output = original(ids, budget)
        return [*output[:4], (output[4] + 1) % tiny.VOCAB, *output[5:]]

    decoders.systems[OURS] = with_wrong_token
    with decoders:
        case = against_transformers.compare(decoders, "first", PROMPTS[0], BUDGET, repeats=1)
        (miss,) = decoders.mismatches(case)
    assert (miss.id, miss.position) == (f"first: {OURS}", 4)
    assert (miss.token, miss.baseline_token) == ((plain[4] + 1) % tiny.VOCAB, plain[4])
    text = torch.tensor([[*PROMPTS[0], *plain[:4]]])
    top = decoders.target.model(text).logits[0, -1].topk(2).values
    assert miss.gap == pytest.approx(float(top[0] - top[1]), rel=1e-4)
    assert [row["same_answers"] for row in assisted.rows([case])] == [0, 1, 1, 1, 1]


def test_forwards_are_counted_only_inside_the_context(tmp_path: Path) -> None:
    decoders = build_decoders(tmp_path, 2)
    answers(decoders, PROMPTS[1], 3)
    counted = decoders.forwards
    assert decoders.answer(PLAIN, PROMPTS[1], 3).forwards == 0
    assert decoders.forwards == counted > 0


# ---- the numbers ---------------------------------------------------------------------------------


def timed(tokens: int, *seconds: float) -> list[Answer]:
    return [Answer(list(range(tokens)), tokens // 2, second, second / 2) for second in seconds]


def test_rows_are_ratios_of_sums_of_medians() -> None:
    """60 tokens in 1 + 2 s and in 2 + 4 s; the ratio of each prompt is 2 as well."""
    cases = [
        Case("a", [1], {OURS: timed(20, 1.0, 9.0, 0.5), ASSISTED: timed(20, 2.0, 2.0, 8.0)}, True),
        Case("b", [1], {OURS: timed(40, 2.0, 2.0, 7.0), ASSISTED: timed(40, 4.0, 3.0, 5.0)}, False),
    ]
    for case in cases:
        case.answers[THEIR_PLAIN] = case.answers[ASSISTED]
    ours, theirs, _ = assisted.rows(cases)
    assert (ours["tokens"], ours["tokens_per_second"], ours["forwards"]) == (60, 20.0, 30)
    assert (ours["against_assisted"], theirs["against_assisted"]) == (2.0, 1.0)
    assert ours["against_assisted_95"] == pytest.approx((2.0, 2.0))
    assert (ours["tokens_per_forward"], ours["same_rounds"]) == (2.0, 1)
    assert ours["in_models"] == 0.5


def test_interval_covers_the_spread_over_prompts() -> None:
    """Ratio 1 on one prompt and 3 on the other, in equal time: resampled, from 1 to 3."""
    cases = [
        Case("a", [1], {OURS: timed(20, 2.0), ASSISTED: timed(20, 2.0)}, True),
        Case("b", [1], {OURS: timed(20, 2.0), ASSISTED: timed(20, 6.0)}, True),
    ]
    for case in cases:
        case.answers[THEIR_PLAIN] = case.answers[ASSISTED]
    ours = assisted.rows(cases)[0]
    assert ours["against_assisted"] == pytest.approx(2.0)
    assert ours["against_assisted_95"] == pytest.approx((1.0, 3.0))
    assert assisted.rows(cases[:1])[0]["against_assisted_95"] is None


def test_bodies_and_heads_of_both_decoders_are_timed(tmp_path: Path) -> None:
    """All of them run, and each has hooks: the rest of a call is the decoders' own time."""
    decoders, called = build_decoders(tmp_path, 3), list[int]()
    for number, part in enumerate(decoders.model_parts()):
        part.register_forward_hook(lambda *_, number=number: called.append(number))
    outputs = answers(decoders, PROMPTS[0])
    assert isinstance(decoders.drafter, DraftLm)
    # the body does not run, because its fast forward does
    body = decoders.model_parts().index(decoders.drafter.lm.base_model)
    assert set(called) == set(range(8)) - {body}
    assert all(0 < answer.model_seconds < answer.seconds for answer in outputs.values())


# ---- the command ---------------------------------------------------------------------------------


def shallow(folder: Path, layers: int = 2) -> Path:
    """The embedded target without its upper layers: a draft model with the same tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.config.layer_types = None
    model.save_pretrained(folder)
    return folder


def test_command_prints_and_writes_a_row_per_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, out = shallow(tmp_path / "draft"), tmp_path / "out.json"
    words = [f"draft={draft}", "prompts=2", "new_tokens=8", "repeats=2", "gamma=2", f"out={out}"]
    assert assisted.assisted(words) == 0
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


def test_mismatches_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case("a", [1], {name: timed(4, 1.0) for name in SYSTEMS}, True)]
    result = {
        "machine": "a machine", "options": dataclasses.asdict(assisted.Options()),
        "results": assisted.rows(cases),
        "mismatches": [Mismatch("a: outrider", 3, 7, None, 0.25)._asdict()],
        "left_out": ["z"],
    }  # fmt: skip
    assisted.show(result, Console(width=120))
    printed = capsys.readouterr().out
    assert "a: outrider: 7 for None at 3, lead 0.25" in printed
    assert "too long, left out: z" in printed


def test_trained_draft_model_is_identical_in_both_decoders(tmp_path: Path) -> None:
    """With a reduced draft vocabulary in the run, both decoders propose the whole vocabulary."""
    target = tiny.target()
    trained = tiny.drafter("draft_lm", target)
    native.save(trained, tmp_path / "drafter", target, None, {})
    drafter, assistant = assisted.draft_models(str(tmp_path), target)
    assert drafter.vocab.is_full
    text = torch.tensor([PROMPTS[0]])
    positions = torch.arange(text.shape[1])[None]
    causal = torch.ones(1, text.shape[1], text.shape[1]).bool().tril()
    ours = drafter.head(drafter.lm.forward(text, positions, causal).last)
    torch.testing.assert_close(ours, assistant(text).logits)
    expected = trained.head(drafter.lm.forward(text, positions, causal).last)
    torch.testing.assert_close(ours[..., trained.vocab.target_ids], expected)


def test_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    small_model("llama", vocab_size=59).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^draft = .*\n.*59 tokens and the target 61"):
        assisted.draft_models(str(tmp_path), tiny.target())


def test_drafter_that_is_not_a_language_model_is_refused(tmp_path: Path) -> None:
    target = tiny.target()
    heads = drafters.build(medusa.Config(), target, DraftVocab.identity(target.vocab_size))
    native.save(heads, tmp_path / "drafter", target, medusa.Config(), {})
    with pytest.raises(ConfigError, match=r"^draft = .*\n.*kind medusa"):
        assisted.draft_models(str(tmp_path), target)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^draft = .*\n.*could not be loaded"):
        assisted.draft_models(str(tmp_path), tiny.target())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["coffee=1"], "no such key"),
        (["gamma=four"], "whole number"),
        (["repeats=0"], ">= 1"),
        ([], "Both decoders use"),
    ],
)
def test_invalid_options_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        assisted.assisted(words)


def test_prompts_that_are_too_long_are_refused(tmp_path: Path) -> None:
    draft = shallow(tmp_path / "draft")
    with pytest.raises(ConfigError, match="No prompt fits"):
        assisted.assisted([f"draft={draft}", "new_tokens=2048", "prompts=1"])
