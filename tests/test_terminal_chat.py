"""The terminal chat: answers, their display, and interruptions."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import Config
from outrider.data.conversations import Message
from outrider.data.tokenise import prompt_ids
from outrider.eval.chat import (
    COLOURS,
    LEGEND,
    AnswerView,
    ColourView,
    StreamDecoder,
    chat,
    first_line_length,
)
from outrider.eval.decoder import Decoder, Result
from outrider.launch.cli import main
from outrider.models.decode.request import ACCEPTED, BONUS, CORRECTION, FIRST
from outrider.models.target.load import load_target
from outrider.models.target.target import Target, TargetStates
from outrider.train.settings import load_run
from tests.test_decoder import oracle, target
from tests.test_decoder_folders import untrained
from tests.test_tokenise import PLAIN, byte_tokenizer

QUESTION = "When should I visit Amberton?"
PARTS = [("The", FIRST), (" best", ACCEPTED), (" time", ACCEPTED), (" to", CORRECTION)]


@pytest.fixture(name="run", scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("chat"))


def configured(run: Path, *words: str) -> Config:
    return load_run(run, [f"run.dir={run}", *words])


def user_input(*lines: str | type[BaseException]) -> Callable[[], str]:
    """Input of these lines and then its end; an exception class is raised instead."""
    remaining = iter(lines)

    def ask() -> str:
        line = next(remaining, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return ask


def chat_lines(config: Config, *lines: str | type[BaseException], **how: Any) -> list[str]:
    """The lines of a chat, without the greeting."""
    console = Console(file=StringIO(), record=True, width=100, **how)
    assert chat(config, console, user_input(*lines)) == 0
    return console.export_text().splitlines()[3:]


def without_brackets(text: str) -> str:
    return re.sub(r"[\[\]]", "", text)


@pytest.fixture(name="answer", scope="module")
def plain_answer(run: Path) -> Result:
    return Decoder.from_run(run).generate([Message(role="user", content=QUESTION)], 128)


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["chain", "dynamic_tree"])
def test_answer_and_numbers_are_printed(run: Path, answer: Result, policy: str) -> None:
    text, numbers = chat_lines(configured(run, f"decode={policy}"), QUESTION)
    assert without_brackets(text) == answer.text
    found = re.fullmatch(r"(\d+) tokens in (\d+) rounds, tau (\d\.\d\d), \d+\.\d tokens/s", numbers)
    assert found is not None
    tokens, rounds, tau = int(found[1]), int(found[2]), float(found[3])
    assert tokens == len(answer.output_ids)
    assert tau == pytest.approx((tokens - 1) / rounds, abs=0.02)


def test_dialogue_continues_until_new(run: Path, answer: Result) -> None:
    """After /new the same question has the first answer again."""
    decoder = Decoder.from_run(run)
    dialogue = decoder.chat()
    turns = [dialogue.say(QUESTION, 128).text, dialogue.say("And then?", 128).text]
    lines = chat_lines(
        configured(run), QUESTION, "And then?", "/new", QUESTION, "/quit", "never read"
    )
    answers = [without_brackets(line) for line in lines if "tokens" not in line]
    assert answers == [*turns, "a new dialogue", answer.text]
    assert turns[0] == answer.text != turns[1]


def test_plain_switches_speculation_off_and_on(run: Path, answer: Result) -> None:
    """The text is the same; plain answers have no tau; means are printed once there are both."""
    lines = chat_lines(
        configured(run), QUESTION, "/new", "/plain", QUESTION, "/new", "/plain", QUESTION
    )
    answers = [line for line in lines if without_brackets(line) == answer.text]
    numbers = [line for line in lines if re.match(r"\d+ tokens", line)]
    assert len(answers) == len(numbers) == 3
    assert ["tau" in line for line in numbers] == [True, False, True]
    assert ["so far" in line for line in numbers] == [False, True, True]
    assert f"{len(answer.output_ids)} tokens, plain, " in numbers[1]
    assert "speculation is off: one target forward per token" in lines
    assert "speculation is on" in lines
    means = re.search(r"so far (\S+) speculative, (\S+) plain", numbers[1])
    assert means is not None
    assert means[2] in numbers[1].split("(")[0]  # the mean of one plain answer
    assert means[1] in numbers[0]


def test_chat_with_a_published_drafter_needs_no_run(
    run: Path, answer: Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(QUESTION.encode())))
    assert main(["chat", f"drafter={run / 'drafter'}", "target=tiny"]) == 0
    greeting, *_, text, _ = capsys.readouterr().out.splitlines()
    assert str(run / "drafter") in greeting
    assert without_brackets(text).removeprefix("> ") == answer.text
    with pytest.raises(SystemExit):
        main(["chat", f"drafter={run}", "target=tiny"])
    assert "is a run, not a drafter" in capsys.readouterr().err


def test_settings_of_the_run_are_used(run: Path) -> None:
    """Sampling, its seed, the budget; a cut answer is marked."""
    words = ["decode.temperature=1", "eval.max_new_tokens=6", "decode.banned=[5]"]
    decoder = Decoder.from_run(run)
    for seed in (0, 1):
        lines = chat_lines(configured(run, *words, f"run.seed={seed}"), QUESTION)
        dialogue = decoder.chat(temperature=1.0, seed=seed, banned=[5])
        result = dialogue.say(QUESTION, 6)
        assert without_brackets("\n".join(lines[:-1])) == result.text
        assert ("cut at eval.max_new_tokens=6" in lines[-1]) == (result.stop_reason == "budget")


def test_blank_lines_and_unknown_commands(run: Path) -> None:
    lines = chat_lines(configured(run), "", "  ", "/what now", "/help")
    assert lines[0] == "unknown command /what"
    assert lines[1:5] == lines[5:]
    assert [line.split()[0] for line in lines[1:5]] == ["/new", "/plain", "/quit", "/help"]


# ---- errors and interruptions --------------------------------------------------------------------


def test_message_that_exceeds_the_context(run: Path, answer: Result) -> None:
    lines = chat_lines(configured(run), "word " * 3000, QUESTION)
    assert re.fullmatch(
        r"A prompt of \d+ tokens .* do not fit .* starts a new dialogue\.", lines[0]
    )
    assert without_brackets(lines[1]) == answer.text


@pytest.mark.parametrize("forwards", [0, 1, 3])
def test_ctrl_c_stops_the_answer_only(
    run: Path, monkeypatch: pytest.MonkeyPatch, forwards: int
) -> None:
    """If the prefill is interrupted there is no answer, and the question is removed."""
    forwarded_ids: list[list[int]] = []
    remaining = [-1]  # forwards until the interrupt
    forward = Target.forward

    def interrupted(self: Target, ids: Tensor, *rest: Any, **more: Any) -> TargetStates:
        forwarded_ids.append(ids[0].tolist())
        remaining[0] -= 1
        if remaining[0] == -1:
            raise KeyboardInterrupt
        return forward(self, ids, *rest, **more)

    def ask() -> Iterator[str]:
        remaining[0] = forwards
        yield QUESTION
        forwarded_ids.clear()
        yield "And then?"

    monkeypatch.setattr(Target, "forward", interrupted)
    lines_of_user = ask()
    console = Console(file=StringIO(), record=True, width=100)
    assert chat(configured(run), console, lambda: next(lines_of_user, "/quit")) == 0
    lines = console.export_text().splitlines()[3:]
    stopped = next(i for i, line in enumerate(lines) if line.endswith("stopped"))
    partial = without_brackets("\n".join(lines[:stopped]))
    assert (partial == "") == (forwards == 0)
    tokenizer = load_target(configured(run).target).tokenizer
    history = [QUESTION, partial] if forwards else []
    prompt = prompt_ids(tokenizer, [*history, "And then?"])
    assert prompt[-len(forwarded_ids[0]) :] == forwarded_ids[0]
    assert len(lines) == stopped + 3


def test_ctrl_c_at_the_prompt_prints_how_to_end(run: Path, answer: Result) -> None:
    lines = chat_lines(configured(run), KeyboardInterrupt, QUESTION)
    assert lines[:2] == ["", "/quit or Ctrl-D ends the chat"]
    assert without_brackets(lines[2]) == answer.text


def test_run_without_drafter_or_tables_raises(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ranks\.json"):
        chat(configured(run, "decode=static_tree"), Console(quiet=True), user_input())
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    with pytest.raises(RunError, match="has not finished"):
        chat(configured(tmp_path), Console(quiet=True), user_input())


def test_lossy_rule_is_printed(run: Path) -> None:
    def prints_warning(*words: str) -> bool:
        console = Console(file=StringIO(), record=True, width=100)
        chat(configured(run, *words), console, user_input())
        return "lossy, not the target's distribution" in console.export_text()

    lossy = "decode.verify=lossy_typical"
    assert prints_warning(lossy, "decode.temperature=1")
    assert not prints_warning("decode.temperature=1")
    assert not prints_warning(lossy)  # greedy decoding uses no rule


# ---- display -------------------------------------------------------------------------------------


def test_brackets_without_colours() -> None:
    file = StringIO()
    with closing(AnswerView(Console(file=file))) as view:
        view.write([("The", FIRST)], "")
        view.write(PARTS[1:], "")
        view.write([(" see\n", ACCEPTED), ("[it]", ACCEPTED), ("", BONUS)], "")
        view.write([("!", CORRECTION)], "")
    assert file.getvalue() == "The[ best time] to[ see\n[it]]!\n"


def test_empty_answer_prints_no_line() -> None:
    file = StringIO()
    for view in (AnswerView(Console(file=file)), ColourView(terminal(file))):
        view.close()
    assert screen(file.getvalue()) == []


def terminal(file: StringIO, width: int = 30) -> Console:
    return Console(
        file=file, force_terminal=True, color_system="standard", width=width, no_color=False
    )


def screen(text: str) -> list[str]:
    """The lines of a terminal that supports returns, "line up" and "erase line"."""
    lines, row, column = [""], 0, 0
    for code, letter in re.findall(r"\x1b\[([?\d;]*[A-Za-z])|([\s\S])", text):
        if code.endswith("A"):
            row -= int(code[:-1])
        elif code == "2K":
            lines[row] = ""
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif letter:
            lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
            column += 1
    while lines and not lines[-1]:
        lines.pop()
    return lines


def last_colours(text: str, word: str) -> set[str]:
    """Colours in which a word is printed."""
    codes = {f"\x1b[{code}m": name for code, name in zip((31, 32, 33, 36), NAMES, strict=True)}
    return {name for code, name in codes.items() if f"{code}{word}" in text}


NAMES = ("red", "green", "yellow", "cyan")


def test_colours_show_the_origin_of_a_token() -> None:
    file = StringIO()
    with closing(ColourView(terminal(file))) as view:
        view.write(PARTS[:1], "1 token")
        view.write([*PARTS[1:], (" see", BONUS)], "5 tokens")
        live = screen(file.getvalue())
    assert live == ["The best time to see", "5 tokens"]
    assert screen(file.getvalue()) == ["The best time to see"]
    for text, origin in [*PARTS, (" see", BONUS)]:
        assert last_colours(file.getvalue(), text) == {COLOURS[origin]}
    assert LEGEND.keys() == {FIRST, ACCEPTED, CORRECTION, BONUS}


def test_long_answer_is_printed_completely_and_once() -> None:
    """Many lines, words longer than one, wide characters, blank lines, all in pieces of three."""
    words = "\n\n".join(
        ["the quick brown fox jumps over the lazy dog " * 3, "x" * 70, "\u6f22\u5b57" * 20, "end"]
    )
    file = StringIO()
    with closing(ColourView(terminal(file))) as view:
        for at in range(0, len(words), 3):
            view.write([(words[at : at + 3], ACCEPTED)], "how it stands")
    rows = screen(file.getvalue())
    assert "".join("".join(rows).split()) == "".join(words.split())
    assert max(map(len, rows)) <= 30
    assert rows[:2] == ["the quick brown fox jumps over", "the lazy dog the quick brown"]


@pytest.mark.parametrize(
    ("text", "width", "first"),
    [
        ("one two", 7, 0),
        ("one two ", 7, 8),
        ("one twos", 7, 4),
        ("one\ntwo", 7, 4),
        ("\none", 7, 1),
        ("onetwothree", 7, 7),
        ("\u6f22\u5b57\u6f22\u5b57", 7, 3),
        ("", 7, 0),
    ],
)
def test_first_line_length(text: str, width: int, first: int) -> None:
    assert first_line_length(text, width) == first


def test_text_of_incomplete_characters_is_delayed() -> None:
    tokenizer = byte_tokenizer(PLAIN)
    decoder = Decoder(target(), tokenizer, None, "plain")
    text = "n\u00e9\U0001f600 ok"
    stream = StreamDecoder(decoder)
    parts = [stream.add(token) for token in tokenizer(text)["input_ids"]]
    assert parts == ["n", "", "\u00e9", "", "", "", "\U0001f600", " ", "o", "k"]


def test_incomplete_character_at_the_end() -> None:
    tokenizer = byte_tokenizer(PLAIN)
    stream = StreamDecoder(Decoder(target(), tokenizer, None, "plain"))
    ids: Sequence[int] = tokenizer("a\u00e9")["input_ids"][:-1]
    assert [stream.add(token) for token in ids] == ["a", ""]
    assert stream.advance("a\N{REPLACEMENT CHARACTER}") == "\N{REPLACEMENT CHARACTER}"


def test_control_characters_are_removed() -> None:
    stream = StreamDecoder(Decoder(target(), byte_tokenizer(PLAIN), None, "plain"))
    assert stream.advance("a\x1b[2Jb\r\nc\td\x9be") == "a[2Jb\nc\tde"


def test_origins_of_a_streamed_answer() -> None:
    """Every token has the origin that the engine gave it."""
    decoder = Decoder(target(), byte_tokenizer(PLAIN), oracle(lambda n: n % 3 > 0), "chain")
    stream, parts = StreamDecoder(decoder), list[tuple[str, str]]()
    pieces = list(decoder.stream("why?", 24))
    for piece in pieces:
        parts += zip(map(stream.add, piece.ids), piece.origins, strict=True)
    text = "".join(text for text, _ in parts) + stream.advance(pieces[-1].result.text)
    assert text == "".join(c for c in pieces[-1].result.text if c.isprintable() or c in "\n\t")
    assert [origin for _, origin in parts] == pieces[-1].result.origins
    assert {origin for _, origin in parts} >= {FIRST, ACCEPTED, CORRECTION}
