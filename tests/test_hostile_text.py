"""Everything shown is escaped for where it is shown: terminal, Markdown, yaml; chat reads bytes."""

import io
import os
import subprocess
import sys
import unicodedata
from typing import Any

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError, exit_on_error
from outrider.conf.shown_text import escape_controls, for_terminal
from outrider.data.reporter import Reporter
from outrider.eval import chat

ATTACKS = {
    "title": "\x1b]0;owned\x07", "clear": "\x1b[2J", "c1": "\x9b31m", "return": "ok\rno",
    "back": "a\x08b", "null": "a\x00b", "bidi": "a\u202eb", "isolate": "\u2066x\u2069",
    "surrogate": "\udcff", "separator": "a\u2028b", "delete": "\x7f",
}  # fmt: skip
CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # of unicodedata
MARKUP = "[/x] [red]a[/red] [link=http://h]b[/link] :smile: [0]"


def printed(*things: Any, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    console.print(*things, **options)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def assert_harmless(text: str) -> None:
    """Nothing in the text acts on a terminal but newlines: no carriage return either."""
    assert not [c for c in text if c != "\n" and unicodedata.category(c) in CONTROLS]
    assert escape_controls(text) == text
    text.encode()


@pytest.mark.parametrize("name", ATTACKS)
def test_terminal_receives_no_control_characters(name: str) -> None:
    attack = ATTACKS[name]
    table = Table("column", attack, title=attack, caption=attack)
    table.add_row(attack, Text(attack, "red"))
    shown = (attack, Text(attack), table, Panel(attack, title=attack), {attack: [attack]})
    for thing in shown:
        assert_harmless(printed(thing))
    assert printed(attack) == f"{ascii(attack)[1:-1]}\n"  # every one of them shown, also \r
    assert for_terminal(attack) == ascii(attack)[1:-1]


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("kind", [ConfigError, RunError])
def test_errors_are_escaped(name: str, kind: type[Exception], capsys: Any) -> None:
    attack = ATTACKS[name]
    words = [attack] * (4 if kind is ConfigError else 2)
    with pytest.raises(SystemExit), exit_on_error("outrider"):
        raise kind(*words)
    assert_harmless(capsys.readouterr().err)


def test_text_of_files_is_not_markup() -> None:
    assert printed(MARKUP) == f"{MARKUP}\n"
    table = Table()
    table.add_row(MARKUP)
    assert MARKUP in printed(table)
    console = Console(file=io.StringIO(), width=200)
    Reporter(console).note(MARKUP)
    assert console.file.getvalue() == f"note: {MARKUP}\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text", ["plain", "two\nlines\tand a tab", "H\u00f6lder \U0001f600", "\u05d0"]
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert for_terminal(text) == text
    assert escape_controls(text) == text


def test_colours_still_reach_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Text("x", "red"))
    assert "\x1b[31mx" in console.file.getvalue()  # type: ignore[attr-defined]


# ---- warnings, log records and tracebacks ----

LIBRARIES = """
import logging, sys, threading, warnings
from outrider.conf import errors
from outrider.launch import cli
ATTACK = "\\x1b[2J\\u202eX https://me:pass-word@host/?token=abcdef"
class Broken:
    def __del__(self):
        raise ValueError("unraisable " + ATTACK)
def thread():
    raise ValueError("thread " + ATTACK)
def verb(words, program):
    warnings.warn("warning " + ATTACK)
    logging.getLogger("lib").error("record %s", ATTACK)
    print("printed", file=sys.stderr)
    try:
        raise KeyError("logged " + ATTACK)
    except KeyError:
        logging.getLogger("lib").exception("with traceback", stack_info=True)
    Broken()
    other = threading.Thread(target=thread)
    other.start()
    other.join()
    with errors.exit_on_error(program):
        raise errors.ConfigError("uncaught", ATTACK, ATTACK, ATTACK)
cli.main = verb
cli.command([])
"""


@pytest.mark.parametrize("debug", ["0", "1"])
def test_what_libraries_print_is_escaped_and_masked(debug: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=False,
        env={**os.environ, "OUTRIDER_DEBUG": debug},
    )  # fmt: skip
    shown = process.stderr
    for name in ("warning", "record", "printed", "logged", "unraisable", "thread", "uncaught"):
        assert name in shown
    assert ("errors.ConfigError: uncaught" in shown) == (debug == "1")
    assert_harmless(shown)
    assert shown.count("\\x1b[2J\\u202eX https://***@host/?token=***") >= 6
    assert "pass-word" not in shown
    assert "abcdef" not in shown


# ---- bytes that are not UTF-8 ----

READ = """
import sys
from outrider.launch import cli
def verb(words, program):
    from outrider.conf.console import Console
    from outrider.eval.chat import _read_line
    console = Console()
    while True:
        try:
            print(ascii(_read_line(console)))
        except EOFError:
            return 0
def guarded(words, program):
    from outrider.conf.errors import exit_on_error
    with exit_on_error(program):
        return verb(words, program)
cli.main = verb
cli.command([])
"""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_bytes_of_a_pipe_do_not_end_the_chat(encoding: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", READ], input=b"caf\xc3\xa9\n\xff\xfe\nbye\n", capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding}, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert b"Traceback" not in process.stderr
    lines = [line for line in process.stdout.splitlines() if line.startswith(b"'")]
    assert lines[0] == rb"'caf\xe9'"
    assert lines[2] == b"'bye'"


def test_input_in_another_encoding_is_one_message() -> None:
    process = subprocess.run(
        [sys.executable, "-c", READ.replace("main = verb", "main = guarded")], input=b"Hi\n",
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-16"}, check=False,
    )  # fmt: skip
    message = process.stderr.replace(b"\0", b"")
    assert process.returncode == 2, message
    assert b"Standard input is not text in utf-16" in message
    assert b"Traceback" not in message


def test_line_that_is_not_text_is_not_answered() -> None:
    console = Console(file=io.StringIO())
    session = chat.Session(console, lambda: None, 1)  # type: ignore[arg-type, return-value]
    session.handle("a\udcff")
    assert "not text in UTF-8" in console.file.getvalue()  # type: ignore[attr-defined]
