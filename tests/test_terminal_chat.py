"""The terminal chat: answers, their display, and interruptions."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

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
from outrider.models.decode.request import ACCEPTED, BONUS, CORRECTION, FIRST
from outrider.models.load import load_target
from outrider.models.target import Target, TargetStates
from outrider.train.settings import load_run
from tests.test_decoder import oracle, target
from tests.test_decoder_folders import untrained
from tests.test_tokenise import PLAIN, octets

ASKED = "When should I visit Amberton?"
PARTS = [("The", FIRST), (" best", ACCEPTED), (" time", ACCEPTED), (" to", CORRECTION)]


@pytest.fixture(name="run", scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("chat"))


def configured(run: Path, *words: str) -> Config:
    return load_run(run, [f"run.dir={run}", *words])


def saying(*lines: str | type[BaseException]) -> Callable[[], str]:
    """A user who types these lines and then ends the input; a class is raised instead."""
    left = iter(lines)

    def ask() -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return ask


def shown(config: Config, *lines: str | type[BaseException], **how: Any) -> list[str]:
    """The lines of a chat, without the greeting."""
    console = Console(file=StringIO(), record=True, width=100, **how)
    assert chat(config, console, saying(*lines)) == 0
    return console.export_text().splitlines()[3:]


def bare(text: str) -> str:
    return re.sub(r"[\[\]]", "", text)


@pytest.fixture(name="own", scope="module")
def plain_answer(run: Path) -> Result:
    return Decoder.from_run(run).generate([Message(role="user", content=ASKED)], 128)


# ---- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["chain", "dynamic_tree"])
def test_the_answer_and_its_numbers_are_shown(run: Path, own: Result, policy: str) -> None:
    said, numbers = shown(configured(run, f"decode={policy}"), ASKED)
    assert bare(said) == own.text
    found = re.fullmatch(r"(\d+) tokens in (\d+) rounds, tau (\d\.\d\d), \d+\.\d tokens/s", numbers)
    assert found is not None
    tokens, rounds, tau = int(found[1]), int(found[2]), float(found[3])
    assert tokens == len(own.output_ids)
    assert tau == pytest.approx((tokens - 1) / rounds, abs=0.02)


def test_the_dialogue_goes_on_until_a_new_one(run: Path, own: Result) -> None:
    """The same question twice is another dialogue; behind /new it is the first one again."""
    decoder = Decoder.from_run(run)
    dialogue = decoder.chat()
    turns = [dialogue.say(ASKED, 128).text, dialogue.say("And then?", 128).text]
    lines = shown(configured(run), ASKED, "And then?", "/new", ASKED, "/quit", "never read")
    answers = [bare(line) for line in lines if "tokens" not in line]
    assert answers == [*turns, "a new dialogue", own.text]
    assert turns[0] == own.text != turns[1]


def test_speculation_is_switched_off_and_on(run: Path, own: Result) -> None:
    """The words stay; plain answers have no tau, and means are shown once there are both."""
    lines = shown(configured(run), ASKED, "/new", "/plain", ASKED, "/new", "/plain", ASKED)
    answers = [line for line in lines if bare(line) == own.text]
    numbers = [line for line in lines if re.match(r"\d+ tokens", line)]
    assert len(answers) == len(numbers) == 3
    assert ["tau" in line for line in numbers] == [True, False, True]
    assert ["so far" in line for line in numbers] == [False, True, True]
    assert f"{len(own.output_ids)} tokens, plain, " in numbers[1]
    assert "speculation is off: one target forward per token" in lines
    assert "speculation is on" in lines
    means = re.search(r"so far (\S+) speculative, (\S+) plain", numbers[1])
    assert means is not None
    assert means[2] in numbers[1].split("(")[0]  # one plain answer is its own mean
    assert means[1] in numbers[0]


def test_settings_of_the_run_are_used(run: Path) -> None:
    """Sampling, its seed, the budget; an answer that was cut says so."""
    words = ["decode.temperature=1", "eval.max_new_tokens=6", "decode.banned=[5]"]
    decoder = Decoder.from_run(run)
    for seed in (0, 1):
        lines = shown(configured(run, *words, f"run.seed={seed}"), ASKED)
        dialogue = decoder.chat(temperature=1.0, seed=seed, banned=[5])
        said = dialogue.say(ASKED, 6)
        assert bare("\n".join(lines[:-1])) == said.text
        assert ("cut at eval.max_new_tokens=6" in lines[-1]) == (said.ended == "budget")


def test_blank_lines_are_nothing_and_unknown_commands_are_named(run: Path) -> None:
    lines = shown(configured(run), "", "  ", "/what now", "/help")
    assert lines[0] == "unknown command /what"
    assert lines[1:5] == lines[5:]
    assert [line.split()[0] for line in lines[1:5]] == ["/new", "/plain", "/quit", "/help"]


# ---- what keeps it alive -------------------------------------------------------------------------


def test_a_message_that_does_not_fit_is_one_line_and_the_chat_goes_on(
    run: Path, own: Result
) -> None:
    lines = shown(configured(run), "word " * 3000, ASKED)
    assert re.fullmatch(
        r"A prompt of \d+ tokens .* do not fit .* starts a new dialogue\.", lines[0]
    )
    assert bare(lines[1]) == own.text


@pytest.mark.parametrize("forwards", [0, 1, 3])
def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    run: Path, monkeypatch: pytest.MonkeyPatch, forwards: int
) -> None:
    """Stopped while the prompt is read, there is no answer, and the question is taken back."""
    seen: list[list[int]] = []
    left = [-1]  # forwards until the key is pressed
    forward = Target.forward

    def pressed(self: Target, ids: Tensor, *rest: Any, **more: Any) -> TargetStates:
        seen.append(ids[0].tolist())
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return forward(self, ids, *rest, **more)

    def ask() -> Iterator[str]:
        left[0] = forwards
        yield ASKED
        seen.clear()
        yield "And then?"

    monkeypatch.setattr(Target, "forward", pressed)
    asked = ask()
    console = Console(file=StringIO(), record=True, width=100)
    assert chat(configured(run), console, lambda: next(asked, "/quit")) == 0
    lines = console.export_text().splitlines()[3:]
    stopped = next(i for i, line in enumerate(lines) if line.endswith("stopped"))
    partial = bare("\n".join(lines[:stopped]))
    assert (partial == "") == (forwards == 0)
    coder = load_target(configured(run).target).tokenizer
    history = [ASKED, partial] if forwards else []
    prompt = prompt_ids(coder, [*history, "And then?"])
    assert prompt[-len(seen[0]) :] == seen[0]
    assert len(lines) == stopped + 3


def test_ctrl_c_at_the_prompt_prints_how_to_end(run: Path, own: Result) -> None:
    lines = shown(configured(run), KeyboardInterrupt, ASKED)
    assert lines[:2] == ["", "/quit or Ctrl-D ends the chat"]
    assert bare(lines[2]) == own.text


def test_a_run_that_cannot_chat_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ranks\.json"):
        chat(configured(run, "decode=static_tree"), Console(quiet=True), saying())
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    with pytest.raises(RunError, match="has not finished"):
        chat(configured(tmp_path), Console(quiet=True), saying())


def test_what_is_not_lossless_is_printed(run: Path) -> None:
    def warned(*words: str) -> bool:
        console = Console(file=StringIO(), record=True, width=100)
        chat(configured(run, *words), console, saying())
        return "lossy, not the target's distribution" in console.export_text()

    lossy = "decode.verify=lossy_typical"
    assert warned(lossy, "decode.temperature=1")
    assert not warned("decode.temperature=1")
    assert not warned(lossy)  # greedily the rule has no say


# ---- what is shown -------------------------------------------------------------------------------


def test_brackets_stand_for_colours_in_a_pipe() -> None:
    file = StringIO()
    with closing(AnswerView(Console(file=file))) as page:
        page.write([("The", FIRST)], "")
        page.write(PARTS[1:], "")
        page.write([(" see\n", ACCEPTED), ("[it]", ACCEPTED), ("", BONUS)], "")
        page.write([("!", CORRECTION)], "")
    assert file.getvalue() == "The[ best time] to[ see\n[it]]!\n"


def test_nothing_written_is_no_line() -> None:
    file = StringIO()
    for page in (AnswerView(Console(file=file)), ColourView(terminal(file))):
        page.close()
    assert screen(file.getvalue()) == []


def terminal(file: StringIO, width: int = 30) -> Console:
    return Console(
        file=file, force_terminal=True, color_system="standard", width=width, no_color=False
    )


def screen(text: str) -> list[str]:
    """What a terminal would show: it knows returns, "line up" and "erase line", and no more."""
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


def inks(text: str, word: str) -> set[str]:
    """Colours in which a word is printed last of all."""
    codes = {f"\x1b[{code}m": name for code, name in zip((31, 32, 33, 36), NAMES, strict=True)}
    return {name for code, name in codes.items() if f"{code}{word}" in text}


NAMES = ("red", "green", "yellow", "cyan")


def test_in_a_terminal_colours_show_the_origin_of_a_token() -> None:
    file = StringIO()
    with closing(ColourView(terminal(file))) as page:
        page.write(PARTS[:1], "1 token")
        page.write([*PARTS[1:], (" see", BONUS)], "5 tokens")
        live = screen(file.getvalue())
    assert live == ["The best time to see", "5 tokens"]
    assert screen(file.getvalue()) == ["The best time to see"]
    for text, origin in [*PARTS, (" see", BONUS)]:
        assert inks(file.getvalue(), text) == {COLOURS[origin]}
    assert LEGEND.keys() == {FIRST, ACCEPTED, CORRECTION, BONUS}


def test_a_long_answer_is_shown_whole_and_once() -> None:
    """Many lines, words longer than one, wide characters, blank lines, all in pieces of three."""
    words = "\n\n".join(
        ["the quick brown fox jumps over the lazy dog " * 3, "x" * 70, "\u6f22\u5b57" * 20, "end"]
    )
    file = StringIO()
    with closing(ColourView(terminal(file))) as page:
        for at in range(0, len(words), 3):
            page.write([(words[at : at + 3], ACCEPTED)], "how it stands")
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
def test_a_line_is_full_where_the_next_word_does_not_fit(text: str, width: int, first: int) -> None:
    assert first_line_length(text, width) == first


def test_a_token_is_shown_once_its_characters_are_complete() -> None:
    coder = octets(PLAIN)
    decoder = Decoder(target(), coder, None, "plain")
    text = "n\u00e9\U0001f600 ok"
    spelling = StreamDecoder(decoder)
    parts = [spelling.add(token) for token in coder(text)["input_ids"]]
    assert parts == ["n", "", "\u00e9", "", "", "", "\U0001f600", " ", "o", "k"]


def test_what_is_left_of_a_broken_character_comes_at_the_end() -> None:
    coder = octets(PLAIN)
    spelling = StreamDecoder(Decoder(target(), coder, None, "plain"))
    ids: Sequence[int] = coder("a\u00e9")["input_ids"][:-1]
    assert [spelling.add(token) for token in ids] == ["a", ""]
    assert spelling.advance("a\N{REPLACEMENT CHARACTER}") == "\N{REPLACEMENT CHARACTER}"


def test_control_characters_of_the_model_do_not_reach_the_terminal() -> None:
    spelling = StreamDecoder(Decoder(target(), octets(PLAIN), None, "plain"))
    assert spelling.advance("a\x1b[2Jb\r\nc\td\x9be") == "a[2Jb\nc\tde"


def test_the_colours_of_an_answer_are_its_origins() -> None:
    """From the decoder to the page: every token with the origin that the engine gave it."""
    decoder = Decoder(target(), octets(PLAIN), oracle(lambda n: n % 3 > 0), "chain")
    spelling, parts = StreamDecoder(decoder), list[tuple[str, str]]()
    pieces = list(decoder.stream("why?", 24))
    for piece in pieces:
        parts += zip(map(spelling.add, piece.ids), piece.origins, strict=True)
    text = "".join(text for text, _ in parts) + spelling.advance(pieces[-1].result.text)
    assert text == "".join(c for c in pieces[-1].result.text if c.isprintable() or c in "\n\t")
    assert [origin for _, origin in parts] == pieces[-1].result.origins
    assert {origin for _, origin in parts} >= {FIRST, ACCEPTED, CORRECTION}
