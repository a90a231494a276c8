"""Files of earlier answers: written, read, refused; an evaluation's outputs fill the drafter."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import CorruptFile, DiskFull, RunError
from outrider.eval.decoder import Decoder
from outrider.launch.cli import main
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.drafters.suffix import Suffix
from outrider.models.drafting.answer_file import FORMAT, read_answers, write_answers
from tests import tiny
from tests.mutations import fuzz, mutated_bytes, mutated_value, replace_file

TARGET = tiny.target()
ANSWERS = [[5, 40, 17], [], [60, 0]]


def suffix(**changes: Any) -> Suffix:
    drafter = tiny.drafter(
        "suffix", TARGET, tiny.vocab(tiny.VOCAB), draft_vocab_size=None, depths=8, **changes
    )
    assert isinstance(drafter, Suffix)
    return drafter


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_answers(tmp_path / "new" / "a.jsonl", ANSWERS, TARGET)
    assert read_answers(tmp_path / "new" / "a.jsonl", TARGET) == ANSWERS
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.jsonl"]


def test_a_file_fills_the_drafter_and_the_drafter_writes_it(tmp_path: Path) -> None:
    """The second drafter accepts what the first one learned, in fewer rounds for the same text."""
    first = suffix(learn=True)
    learned = Engine(TARGET, first, Chain(8)).generate([5, 40, 17, 23, 9], 24)
    first.save_answers(tmp_path / "a.jsonl")
    second = suffix(answers=str(tmp_path / "a.jsonl"))
    assert list(second.earlier.texts()) == [learned.ids]
    out = Engine(TARGET, second, Chain(8)).generate([5, 40, 17, 23, 9], 24)
    assert out.ids == learned.ids
    assert out.rounds < learned.rounds
    second.load_answers(tmp_path / "a.jsonl")
    assert list(second.earlier.texts()) == [learned.ids] * 2


def test_only_the_newest_answers_of_a_file_are_kept(tmp_path: Path) -> None:
    write_answers(tmp_path / "a.jsonl", ANSWERS, TARGET)
    drafter = suffix(answers=str(tmp_path / "a.jsonl"), most_answers=2)
    assert list(drafter.earlier.texts()) == ANSWERS[1:]


def test_files_can_be_concatenated(tmp_path: Path) -> None:
    write_answers(tmp_path / "a.jsonl", ANSWERS, TARGET)
    twice = (tmp_path / "a.jsonl").read_bytes() * 2
    (tmp_path / "b.jsonl").write_bytes(twice + b'{"id": 7, "output_ids": [1, 2], "rest": null}')
    assert read_answers(tmp_path / "b.jsonl", TARGET) == [*ANSWERS, *ANSWERS, [1, 2]]


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    """Without the line that names the target they are read, if the ids are in range."""
    file, other = tmp_path / "a.jsonl", tiny.target(seed=1)
    write_answers(file, ANSWERS, TARGET)
    with pytest.raises(RunError, match="line 1: answers of another target"):
        read_answers(file, other)
    file.write_bytes(b"".join(file.read_bytes().splitlines(True)[1:]))
    assert read_answers(file, other) == ANSWERS
    with pytest.raises(CorruptFile, match="line 3: token 60 is none of the target's 50"):
        read_answers(file, tiny.target(vocab_size=50))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no answers"),
        (b'{"format": "outrider-answers-2", "embedding": ""}', "line 1: format is"),
        (b'{"text": "a"}', "line 1: output_ids is missing"),
        (b'{"output_ids": [1]}\n{"output_ids": [1, -1]}', r"line 2: output_ids\[1\] is -1"),
        (b'{"output_ids": [1]}\n{"output_ids": [1', "line 2 is not a JSON object"),
    ],
)
def test_a_damaged_file_is_one_message(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=message):
        suffix(answers=str(tmp_path / "a.jsonl"))


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A FIFO would wait for a writer for ever."""
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "missing", "."):
        with pytest.raises(CorruptFile, match="cannot be read"):
            read_answers(tmp_path / name, TARGET)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    write_answers(file, ANSWERS, TARGET)
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull):
        write_answers(file, ANSWERS * 2, TARGET)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


ROWS = [{"format": FORMAT, "embedding": "0" * 16}, *({"output_ids": ids} for ids in ANSWERS)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@pytest.mark.untyped
@fuzz(data=mutated_bytes(LINES[1:]) | mutated_value(ROWS[1:]).map(
    lambda rows: "\n".join(json.dumps(row) for row in rows or [None]).encode()
    if isinstance(rows, list) else json.dumps(rows).encode()
))  # fmt: skip
def test_fuzz(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """A mutated file is refused, or its answers can be drafted from."""
    file = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    replace_file(file, data)
    try:
        answers = read_answers(file, TARGET)
    except RunError as error:
        str(error).encode(errors="backslashreplace")
        return
    drafter = suffix()
    for answer in answers:
        assert all(type(token) is int and 0 <= token < tiny.VOCAB for token in answer)
        drafter.add_answer(answer)


def test_outputs_of_an_evaluation_are_such_a_file(tmp_path: Path) -> None:
    """The next evaluation of the same prompts drafts their answers, and writes the same ones."""
    words = ["drafter=suffix", "target=tiny", f"run.dir={tmp_path}", "eval.limit=2"]
    words += ["eval.max_new_tokens=24", "eval.warmup=0"]
    assert main(["eval", *words, "eval.out=first"]) == 0
    outputs = tmp_path / "eval" / "first.outputs.jsonl"
    assert main(["eval", *words, "eval.out=second", f"drafter.answers={outputs}"]) == 0
    first, second = (
        json.loads((tmp_path / "eval" / f"{name}.json").read_text()) for name in ("first", "second")
    )
    assert second["exact"] is True
    assert second["tau"] > first["tau"]


@pytest.mark.parametrize("verb", ["eval", "chat"])
def test_a_missing_file_is_one_message(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["drafter=suffix", "target=tiny", f"run.dir={tmp_path}", "drafter.answers=no.jsonl"]
    with pytest.raises(SystemExit, match="2"):
        main([verb, *words])
    assert "drafter.answers = 'no.jsonl'" in capsys.readouterr().err


def test_answers_of_a_decoder_are_saved(tmp_path: Path) -> None:
    decoder = Decoder.from_pretrained("tiny", drafter="suffix")
    assert isinstance(decoder.drafter, Suffix)
    decoder.drafter.add_answer(decoder.generate([11, 12, 13], 8).output_ids)
    decoder.drafter.save_answers(tmp_path / "a.jsonl")
    again = Decoder.from_pretrained("tiny", drafter="suffix")
    assert isinstance(again.drafter, Suffix)
    again.drafter.load_answers(tmp_path / "a.jsonl")
    assert [*again.drafter.earlier.texts()] == [*decoder.drafter.earlier.texts()] != []
