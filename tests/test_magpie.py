"""A target that writes the questions too: what is kept, what is counted, that it can go on."""

import copy
from pathlib import Path

import pytest
from rich.console import Console

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.data.contamination import NEAR, Seen, jaccard
from outrider.data.conversations import Message
from outrider.data.generate import Settings, Writer
from outrider.data.magpie import bare, degenerate, sift, write_prompts
from outrider.data.prepare import material
from outrider.data.tokenise import prompt_ids
from outrider.data.traces import Store, Written
from outrider.models.load import Loaded, load
from outrider.train.settings import parse

END = 1  # <|end|> of the embedded target


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(parse(compose(["target=tiny"])).target)


def writer(loaded: Loaded, batch: int = 8) -> Writer:
    settings = Settings(batch=batch, max_new_tokens=48, temperature=1.0, record=False)
    return Writer(loaded.target, [END], settings)


def test_the_bare_template_is_what_stands_before_any_question(loaded: Loaded) -> None:
    head, ends = bare(loaded.tokenizer)
    for text in ("Why?", "Tell me about Mossgate."):
        ids = prompt_ids(loaded.tokenizer, [Message(role="user", content=text)])
        assert ids[: len(head)] == head
        own = loaded.tokenizer(text)["input_ids"]
        assert ids[len(head) : len(head) + len(own) + 1] == [*own, ends[0]]
    bald = copy.deepcopy(loaded.tokenizer)
    bald.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        bare(bald)


@pytest.mark.slow
def test_more_prompts_begin_with_the_fewer_and_a_killed_writing_goes_on(
    loaded: Loaded, tmp_path: Path
) -> None:
    """Neither the number asked for, the batch nor an interruption shows in the prompts."""
    tokenizer, about = loaded.tokenizer, {"a": 1}
    whole, reasons = write_prompts(
        Store(tmp_path / "a", about, ()), writer(loaded), tokenizer, 70, [END]
    )
    assert len({prompt.turns[0] for prompt in whole}) == 70
    few, _ = write_prompts(Store(tmp_path / "b", about, ()), writer(loaded, 5), tokenizer, 9, [END])
    assert few == whole[:9]
    torn = Store(tmp_path / "b", about, ())
    held = torn.answers()
    torn = Store(tmp_path / "c", about, ())
    torn.add([a for a in held if a.place % 3])  # killed: some are missing in the middle
    again, same = write_prompts(torn, writer(loaded), tokenizer, 70, [END])
    assert again == whole
    assert same == reasons
    questions = [prompt.turns[0] for prompt in whole]
    pairs = [(a, b) for i, a in enumerate(questions) for b in questions[:i]]
    assert max(jaccard(a, b) for a, b in pairs) < NEAR


def test_every_text_that_is_left_out_is_counted_by_its_reason(loaded: Loaded) -> None:
    tokenizer = loaded.tokenizer

    def written(place: int, text: str, end: int = END) -> Written:
        return Written(place, "k", [3, *tokenizer(text)["input_ids"], end], 1)

    story = "Tell me a story about Silas and a blue kite in the garden."
    texts = [
        written(0, story), written(1, "Describe Mossgate."), written(2, story.lower()),
        written(3, story[:20], end=9), written(4, "Hm."), written(5, "Who<|user|> are you?"),
        written(6, "plums and carrots " * 20), written(7, "What is in the garden, Silas?"),
    ]  # fmt: skip
    kept, reasons = sift(tokenizer, texts, [END], 9)
    assert [prompt.id for prompt in kept] == ["own-0", "own-1", "own-7"]
    assert kept[0].turns == [story]
    assert reasons == {
        "nearly as one before": 1, "without end": 1, "too short": 1,
        "with marks of the template": 1, "in circles": 1,
    }  # fmt: skip
    assert degenerate("what \ufffd is") == degenerate("a\x00b c") == "not text"
    assert degenerate("two words\nand\ttabs") == ""


def test_of_two_texts_that_are_nearly_the_same_the_first_stays() -> None:
    seen = Seen()
    long = [f"w{i}" for i in range(60)]
    assert seen.add(" ".join(long))
    assert not seen.add(" ".join(["new", *long[1:]]))
    assert seen.add(" ".join([f"x{i}" for i in range(12)] + long[12:]))  # 44 of 68 grams


def test_a_target_that_writes_no_prompts_is_given_up(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="without end"):
        write_prompts(Store(tmp_path, {}, ()), writer(loaded), loaded.tokenizer, 2, ends=[-1])


def test_a_drafter_has_training_text_with_no_data_at_all(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    words = [
        "target=tiny", "data=self", "data.generate.self_prompted=true",
        "data.generate.samples=24", "data.generate.max_new_tokens=16", "data.holdout=0.3",
    ]  # fmt: skip
    config = parse(compose(words))
    made, again = (
        material(config, loaded, (1, 3, 4), Console(quiet=True), rank=0) for _ in range(2)
    )
    assert 20 < len(made.documents) <= 24
    assert made.recorded is not None
    assert made.documents == again.documents
    starts = {tuple(d.ids[~d.answer].tolist()) for d in made.documents}
    assert len(starts) == len(made.documents)
    for extra in ("data.path=data/tiny/prompts.jsonl", "data.generate.samples=null"):
        with pytest.raises(ConfigError, match="self_prompted"):
            parse(compose([*words, extra]))
