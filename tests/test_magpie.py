"""Prompts that the target generates: selection, counts of rejected ones, continuation."""

import copy
from pathlib import Path

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import GenerateConfig
from outrider.data.contamination import NEAR, NearDuplicateFilter, jaccard
from outrider.data.conversations import Message
from outrider.data.corpus import load_training_data
from outrider.data.generate import SelfGenerator
from outrider.data.generated_store import GeneratedAnswer, GeneratedStore
from outrider.data.magpie import (
    filter_prompts,
    generate_prompts,
    rejection_reason,
    user_turn_prefix,
)
from outrider.data.reporter import Reporter
from outrider.data.tokenise import prompt_ids
from outrider.models.target.load import LoadedTarget, load_target
from outrider.train.settings import parse

END = 1  # <|end|> of the embedded target


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose(["target=tiny"])).target)


def backend(loaded: LoadedTarget, batch: int = 8) -> SelfGenerator:
    options = GenerateConfig(batch=batch, max_new_tokens=48, temperature=1.0)
    return SelfGenerator(loaded.target, [END], options)


def test_user_turn_prefix_precedes_every_question(loaded: LoadedTarget) -> None:
    head, ends = user_turn_prefix(loaded.tokenizer)
    for text in ("Why?", "Tell me about Mossgate."):
        ids = prompt_ids(loaded.tokenizer, [Message(role="user", content=text)])
        assert ids[: len(head)] == head
        own = loaded.tokenizer(text)["input_ids"]
        assert ids[len(head) : len(head) + len(own) + 1] == [*own, ends[0]]
    untemplated = copy.deepcopy(loaded.tokenizer)
    untemplated.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        user_turn_prefix(untemplated)


@pytest.mark.slow
def test_prompts_do_not_depend_on_count_batch_or_interruption(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    """More prompts begin with the fewer ones, also after a kill."""
    tokenizer, about = loaded.tokenizer, {"a": 1}
    reference, reasons = generate_prompts(
        GeneratedStore(tmp_path / "a", about), backend(loaded), tokenizer, 70, [END]
    )
    assert len({prompt.turns[0] for prompt in reference}) == 70
    few, _ = generate_prompts(
        GeneratedStore(tmp_path / "b", about), backend(loaded, 5), tokenizer, 9, [END]
    )
    assert few == reference[:9]
    interrupted = GeneratedStore(tmp_path / "b", about)
    fewer = interrupted.answers()
    interrupted = GeneratedStore(tmp_path / "c", about)
    interrupted.add([a for a in fewer if a.index % 3])  # as after a kill in the middle
    again, same = generate_prompts(interrupted, backend(loaded), tokenizer, 70, [END])
    assert again == reference
    assert same == reasons
    questions = [prompt.turns[0] for prompt in reference]
    pairs = [(a, b) for i, a in enumerate(questions) for b in questions[:i]]
    assert max(jaccard(a, b) for a, b in pairs) < NEAR


def test_rejected_texts_are_counted_by_reason(loaded: LoadedTarget) -> None:
    tokenizer = loaded.tokenizer

    def answer(index: int, text: str, end: int = END) -> GeneratedAnswer:
        return GeneratedAnswer(index, "k", [3, *tokenizer(text)["input_ids"], end], 1)

    story = "Tell me a story about Silas and a blue kite in the garden."
    texts = [
        answer(0, story), answer(1, "Describe Mossgate."), answer(2, story.lower()),
        answer(3, story[:20], end=9), answer(4, "Hm."), answer(5, "Who<|user|> are you?"),
        answer(6, "plums and carrots " * 20), answer(7, "What is in the garden, Silas?"),
    ]  # fmt: skip
    selected, reasons = filter_prompts(tokenizer, texts, [END], 9)
    assert [prompt.id for prompt in selected] == ["own-0", "own-1", "own-7"]
    assert selected[0].turns == [story]
    assert reasons == {
        "near duplicates": 1, "without end": 1, "too short": 1,
        "with special tokens": 1, "repetitive": 1,
    }  # fmt: skip
    assert rejection_reason("what \ufffd is") == rejection_reason("a\x00b c") == "not text"
    assert rejection_reason("two words\nand\ttabs") == ""


def test_the_first_of_two_near_duplicates_is_selected() -> None:
    seen = NearDuplicateFilter()
    long = [f"w{i}" for i in range(60)]
    assert seen.add(" ".join(long))
    assert not seen.add(" ".join(["new", *long[1:]]))
    assert seen.add(" ".join([f"x{i}" for i in range(12)] + long[12:]))  # 44 of 68 grams


def test_a_target_that_generates_no_prompts_raises(loaded: LoadedTarget, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="without end"):
        generate_prompts(
            GeneratedStore(tmp_path, {}), backend(loaded), loaded.tokenizer, 2, ends=[-1]
        )


def test_self_prompted_training_text_needs_no_data_set(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    words = [
        "target=tiny", "data=self", "data.generate.self_prompted=true",
        "data.generate.samples=24", "data.generate.max_new_tokens=16", "data.holdout=0.3",
    ]  # fmt: skip
    config = parse(compose(words))
    first, again = (
        load_training_data(config, loaded, (1, 3, 4), Reporter.silent()) for _ in range(2)
    )
    assert 20 < len(first.documents) <= 24
    assert first.recorded is not None
    assert first.documents == again.documents
    starts = {tuple(d.ids[~d.answer].tolist()) for d in first.documents}
    assert len(starts) == len(first.documents)
    for extra in ("data.path=data/tiny/prompts.jsonl", "data.generate.samples=null"):
        with pytest.raises(ConfigError, match="self_prompted"):
            parse(compose([*words, extra]))
