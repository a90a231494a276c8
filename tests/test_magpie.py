"""Prompts that the target generates: which are kept, counts of the others, continuation."""

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
from outrider.models.load import LoadedTarget, load_target
from outrider.train.settings import parse

END = 1  # <|end|> of the embedded target


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose(["target=tiny"])).target)


def backend(loaded: LoadedTarget, batch: int = 8) -> SelfGenerator:
    options = GenerateConfig(batch=batch, max_new_tokens=48, temperature=1.0)
    return SelfGenerator(loaded.target, [END], options)


def test_the_bare_template_is_what_stands_before_any_question(loaded: LoadedTarget) -> None:
    head, ends = user_turn_prefix(loaded.tokenizer)
    for text in ("Why?", "Tell me about Mossgate."):
        ids = prompt_ids(loaded.tokenizer, [Message(role="user", content=text)])
        assert ids[: len(head)] == head
        own = loaded.tokenizer(text)["input_ids"]
        assert ids[len(head) : len(head) + len(own) + 1] == [*own, ends[0]]
    bald = copy.deepcopy(loaded.tokenizer)
    bald.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        user_turn_prefix(bald)


@pytest.mark.slow
def test_more_prompts_begin_with_the_fewer_and_a_killed_writing_goes_on(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    """Neither the number asked for, the batch nor an interruption shows in the prompts."""
    tokenizer, about = loaded.tokenizer, {"a": 1}
    whole, reasons = generate_prompts(
        GeneratedStore(tmp_path / "a", about), backend(loaded), tokenizer, 70, [END]
    )
    assert len({prompt.turns[0] for prompt in whole}) == 70
    few, _ = generate_prompts(
        GeneratedStore(tmp_path / "b", about), backend(loaded, 5), tokenizer, 9, [END]
    )
    assert few == whole[:9]
    torn = GeneratedStore(tmp_path / "b", about)
    fewer = torn.answers()
    torn = GeneratedStore(tmp_path / "c", about)
    torn.add([a for a in fewer if a.index % 3])  # killed: some are missing in the middle
    again, same = generate_prompts(torn, backend(loaded), tokenizer, 70, [END])
    assert again == whole
    assert same == reasons
    questions = [prompt.turns[0] for prompt in whole]
    pairs = [(a, b) for i, a in enumerate(questions) for b in questions[:i]]
    assert max(jaccard(a, b) for a, b in pairs) < NEAR


def test_every_text_that_is_left_out_is_counted_by_its_reason(loaded: LoadedTarget) -> None:
    tokenizer = loaded.tokenizer

    def answer(index: int, text: str, end: int = END) -> GeneratedAnswer:
        return GeneratedAnswer(index, "k", [3, *tokenizer(text)["input_ids"], end], 1)

    story = "Tell me a story about Silas and a blue kite in the garden."
    texts = [
        answer(0, story), answer(1, "Describe Mossgate."), answer(2, story.lower()),
        answer(3, story[:20], end=9), answer(4, "Hm."), answer(5, "Who<|user|> are you?"),
        answer(6, "plums and carrots " * 20), answer(7, "What is in the garden, Silas?"),
    ]  # fmt: skip
    kept, reasons = filter_prompts(tokenizer, texts, [END], 9)
    assert [prompt.id for prompt in kept] == ["own-0", "own-1", "own-7"]
    assert kept[0].turns == [story]
    assert reasons == {
        "near duplicates": 1, "without end": 1, "too short": 1,
        "with special tokens": 1, "repetitive": 1,
    }  # fmt: skip
    assert rejection_reason("what \ufffd is") == rejection_reason("a\x00b c") == "not text"
    assert rejection_reason("two words\nand\ttabs") == ""


def test_of_two_texts_that_are_nearly_the_same_the_first_stays() -> None:
    seen = NearDuplicateFilter()
    long = [f"w{i}" for i in range(60)]
    assert seen.add(" ".join(long))
    assert not seen.add(" ".join(["new", *long[1:]]))
    assert seen.add(" ".join([f"x{i}" for i in range(12)] + long[12:]))  # 44 of 68 grams


def test_a_target_that_writes_no_prompts_is_given_up(loaded: LoadedTarget, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="without end"):
        generate_prompts(
            GeneratedStore(tmp_path, {}), backend(loaded), loaded.tokenizer, 2, ends=[-1]
        )


def test_a_drafter_has_training_text_with_no_data_at_all(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    words = [
        "target=tiny", "data=self", "data.generate.self_prompted=true",
        "data.generate.samples=24", "data.generate.max_new_tokens=16", "data.holdout=0.3",
    ]  # fmt: skip
    config = parse(compose(words))
    made, again = (
        load_training_data(config, loaded, (1, 3, 4), Reporter.silent()) for _ in range(2)
    )
    assert 20 < len(made.documents) <= 24
    assert made.recorded is not None
    assert made.documents == again.documents
    starts = {tuple(d.ids[~d.answer].tolist()) for d in made.documents}
    assert len(starts) == len(made.documents)
    for extra in ("data.path=data/tiny/prompts.jsonl", "data.generate.samples=null"):
        with pytest.raises(ConfigError, match="self_prompted"):
            parse(compose([*words, extra]))
