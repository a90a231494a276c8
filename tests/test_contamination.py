"""Prompts of the suite among training questions: exact search, refusal and removal."""

import json
import random
from pathlib import Path

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import RunError
from outrider.data.contamination import NEAR, NgramIndex, OverlapFilter, jaccard, ngrams
from outrider.data.conversations import Message, Prompt, RuleCounts
from outrider.data.corpus import load_training_data
from outrider.data.reporter import Reporter
from outrider.data.training_data import TrainingData
from outrider.eval.run import evaluate
from outrider.launch.train import train
from outrider.models.target.load import LoadedTarget, load_target
from outrider.train.settings import load_run, parse
from tests import runs

LONG = "Explain to a child of ten why the sky is blue at noon and red when the sun goes down."


def test_the_index_equals_a_comparison_of_all_pairs() -> None:
    """Texts over a small vocabulary, so that all similarities occur; equal ones may tie."""
    generator = random.Random(0)
    base = [
        [generator.choice("abcdef") for _ in range(generator.randint(1, 30))] for _ in range(60)
    ]
    texts = [" ".join(words) for words in base]
    index, found = NgramIndex(texts), 0
    for words in base:
        for changes in range(4):
            other = words.copy()
            for _ in range(changes):
                other[generator.randrange(len(other))] = generator.choice("abcdef")
            text = " ".join(other)
            best = max(jaccard(text, known) for known in texts)
            match = index.nearest(text)
            assert (match is not None) == (best >= NEAR)
            if match is not None:
                found += 1
                assert match[1] == pytest.approx(best)
                assert jaccard(text, texts[match[0]]) == pytest.approx(best)
    assert 60 < found < 240


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (LONG, True),
        (LONG.upper().replace(" ", "\n ").replace(".", " !?"), True),
        (f"Please: {LONG}", True),
        (LONG.replace("a child of ten", "my grandmother"), False),
        (LONG[: len(LONG) // 2], False),
        ("Explain.", False),
        ("", False),
    ],
)
def test_what_counts_as_the_same_question(other: str, same: bool) -> None:
    assert (NgramIndex([LONG, "Hello"]).nearest(other) is not None) == same


def test_short_questions_are_compared_whole_and_cjk_characters_are_words() -> None:
    assert NgramIndex(["Who are you?"]).nearest("who are  you") == (0, 1.0)
    assert NgramIndex(["Who are you?"]).nearest("Who are they?") is None
    assert ngrams("...") == set()
    chinese = "\u5929\u7a7a\u4e3a\u4ec0\u4e48\u662f\u84dd\u8272\u7684"
    assert len(ngrams(chinese)) == len(chinese) - 4
    assert NgramIndex([chinese]).nearest(f"{chinese}\uff1f") == (0, 1.0)


def turns(question: str) -> list[Message]:
    return [Message(role="user", content=question), Message(role="assistant", content=LONG)]


def test_overlaps_raise_with_their_prompts_or_are_dropped_and_counted() -> None:
    suite = [Prompt("sky", "all", [LONG, "Go on."]), Prompt("hi", "all", ["Hello there"])]
    text = [turns("Something else."), turns(LONG), [*turns("x y"), *turns("Hello there!")]]
    overlap_filter = OverlapFilter(suite, "refuse")
    assert list(overlap_filter.drop_overlaps(text, RuleCounts())) == text[:1]
    with pytest.raises(RunError, match=r"2 training questions(.|\n)*sky \(100%\): 'Explain"):
        overlap_filter.raise_if_refused()
    summary = RuleCounts()
    assert list(OverlapFilter(suite, "drop").drop_overlaps(text, summary)) == text[:1]
    assert summary.counts == {"in the suite": 2}
    assert list(OverlapFilter(suite, "keep").drop_overlaps(text, RuleCounts())) == text
    follow_up = turns("Go on.")  # not a first question
    assert list(OverlapFilter(suite, "refuse").drop_overlaps([follow_up], RuleCounts())) == [
        follow_up
    ]


def test_the_search_stops_at_the_limit() -> None:
    overlap_filter = OverlapFilter([Prompt("sky", "all", [LONG])], "refuse")
    with pytest.raises(RunError, match="at least 10 training questions"):
        list(overlap_filter.drop_overlaps((turns(LONG) for _ in range(10**9)), RuleCounts()))


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose(["target=tiny"])).target)


def training_data(loaded: LoadedTarget, *words: str) -> TrainingData:
    config = parse(compose(["target=tiny", "data.max_length=64", "data.holdout=0.2", *words]))
    return load_training_data(config, loaded, (1,), Reporter.silent())


def test_training_text_with_prompts_of_the_suite_raises_or_is_filtered(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rule applies to conversations and to prompts that the target answers."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    rows = [{"messages": turns(f"Question number {i}, what is it about?")} for i in range(20)]
    text, suite = tmp_path / "text.jsonl", tmp_path / "suite.jsonl"
    text.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompt = {"id": "seven", "prompt": "question number 7: what is it about"}
    suite.write_text(json.dumps(prompt))
    given = ["data=jsonl", f"data.path={text}", f"eval.prompts={suite}"]
    own = [*given, "data=self", "data.generate.max_new_tokens=4"]
    for words in (given, own):
        with pytest.raises(RunError, match="seven"):
            training_data(loaded, *words)
        assert len(training_data(loaded, *words, "data.overlap=drop").documents) == 19
        assert len(training_data(loaded, *words, "data.overlap=keep").documents) == 20
    mixed = [*own, "data.overlap=drop", f"data.given={text}", "data.given_share=0.5"]
    assert len(training_data(loaded, *mixed).documents) == 19 + 19


@pytest.mark.slow
def test_an_evaluation_on_other_prompts_searches_the_training_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": turns(f"Question number {i}, what is it about?")} for i in range(40)]
    text, suite = tmp_path / "text.jsonl", tmp_path / "suite.jsonl"
    text.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    questions = ["Who are you?", "question number 7: what is it about"]
    suite.write_text("".join(f"{json.dumps({'id': q[:3], 'prompt': q})}\n" for q in questions))
    run = tmp_path / "run"
    train(runs.config(run, "data=jsonl", f"data.path={text}"))
    words = [f"run.dir={run}", f"eval.prompts={suite}", "eval.max_new_tokens=4", "eval.warmup=0"]
    with pytest.raises(RunError, match=r"1 training questions(.|\n)*que \("):
        evaluate(load_run(run, words))
    evaluate(load_run(run, [*words, "data.overlap=drop"]))
    assert "training questions among the prompts, left out: 1" in capsys.readouterr().out
    assert len((run / "eval" / "eval.outputs.jsonl").read_text().splitlines()) == 1
    evaluate(load_run(run, [*words, "data.overlap=keep"]))
    assert len((run / "eval" / "eval.outputs.jsonl").read_text().splitlines()) == 2
    text.unlink()
    evaluate(load_run(run, words))
    assert "not compared with the training text" in capsys.readouterr().out
