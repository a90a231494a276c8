"""`outrider chat`: a terminal chat that shows the origin of every token.

In a terminal the colour of a token is its origin, and a status line counts along; without colours
(a pipe, NO_COLOR) brackets enclose accepted draft tokens:

    > When should I visit Amberton?
    The[ best time to] visit[ is spring.]
    9 tokens in 2 rounds, tau 4.00, 502.3 tokens/s

A token that ends within a character is shown with the token that completes the character.
"""

import sys
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len, chop_cells
from rich.console import Group
from rich.live import Live
from rich.text import Text

from outrider.conf.console import Console
from outrider.conf.errors import RunError
from outrider.conf.garbage import exempt_objects
from outrider.conf.schema import Config
from outrider.data.reporter import Reporter
from outrider.eval.auto_policy import policy_beside
from outrider.eval.decoder import Chat as Dialogue
from outrider.eval.decoder import Decoder, Piece, Result
from outrider.eval.metrics import ratio
from outrider.eval.open_drafter import find_drafter, require_single_process
from outrider.eval.rank_tables import tables_of
from outrider.eval.report import format_number
from outrider.eval.report_auto import choice_shares
from outrider.eval.requests import PLAIN, GenerationSettings
from outrider.models.adapt import adapt
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.from_config import (
    depth_warning,
    greedy_warning,
    rule_of,
    sampling_of,
)
from outrider.models.decode.policy import Policy
from outrider.models.decode.request import ACCEPTED, BONUS, CORRECTION, FIRST
from outrider.models.decode.rules.rule_table import RULES

COLOURS = {ACCEPTED: "green", CORRECTION: "red", BONUS: "cyan", FIRST: "yellow", PLAIN: ""}
LEGEND = {
    ACCEPTED: "by the drafter",
    CORRECTION: "by the target, after a rejection",
    BONUS: "by the target, after accepted tokens",
    FIRST: "by the prompt's forward",
}
COMMANDS = {
    "/new": "start a new dialogue",
    "/plain": "turn speculation off, and on again",
    "/quit": "end (also Ctrl-D; Ctrl-C stops an answer)",
    "/help": "list the commands",
}


def chat(
    config: Config, console: Console | None = None, read_line: Callable[[], str] | None = None
) -> int:
    """Run `outrider chat`.

    Args:
        read_line: returns the next line of the user; EOFError ends the chat. None: standard input.

    Raises:
        RunError, ConfigError: the run has no drafter, or it does not support `config.decode`.
    """
    require_single_process("chat")
    console = console or Console()
    if config.eval.drafter is None:  # a published one may end drafts earlier: `depth_warning`
        config = adapt(config, Reporter(console).note)
    folder = find_drafter(config)
    tables, announce = tables_of(folder, config.drafter), partial(_print_dim, console)
    policy = policy_beside(config.decode, folder, tables, announce)
    decoder = Decoder.from_config(config, policy)
    exempt_objects()
    sampling = sampling_of(config.decode, decoder.target.vocab_size)
    how = {**sampling._asdict(), "rule": rule_of(config.decode, policy)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the greeting prints them
        if isinstance(policy, Auto):  # measures its costs now, not within the first answer
            decoder.engine(GenerationSettings(**how)).start([], 1)
        session = Session(
            console, lambda: decoder.chat(seed=config.run.seed, **how), config.eval.max_new_tokens
        )
        _print_greeting(console, decoder, policy, config)
        for line in _lines(console, read_line or (lambda: _read_line(console))):
            if line == "/quit":
                break
            session.handle(line)
    return 0


@dataclass
class Session:
    """The current dialogue, with or without speculation."""

    console: Console
    new_dialogue: Callable[[], Dialogue]
    budget: int
    plain: bool = False

    def __post_init__(self) -> None:
        self.dialogue = self.new_dialogue()
        self.tokens, self.seconds = Counter[bool](), defaultdict[bool, float](float)  # by `plain`

    def handle(self, line: str) -> None:
        """Execute a command or answer a message."""
        if line == "/new":
            self.dialogue = self.new_dialogue()
            _print_dim(self.console, "a new dialogue")
        elif line == "/plain":
            self.plain = not self.plain
            off = "speculation is off: one target forward per token"
            _print_dim(self.console, off if self.plain else "speculation is on")
        elif line.startswith("/"):
            if line != "/help":
                _print_dim(self.console, f"unknown command {line.split()[0]}")
            for command, meaning in COMMANDS.items():
                _print_dim(self.console, f"{command:<8}{meaning}")
        elif any("\ud800" <= c <= "\udfff" for c in line):  # bytes that are not UTF-8
            _print_dim(self.console, "not answered: the line is not text in UTF-8")
        elif line:
            self.answer(line)

    def answer(self, line: str) -> None:
        """Stream the answer; a line after it has its numbers, or why there is none."""
        result: Result | None = None
        text_stream, why = StreamDecoder(self.dialogue.decoder), ""
        stream = self.dialogue.stream(line, self.budget, policy=PLAIN if self.plain else None)
        try:
            view_class = ColourView if _has_colour(self.console) else AnswerView
            with closing(view_class(self.console)) as view, closing(stream):
                for piece in stream:
                    result = piece.result
                    spans = self._spans(piece, text_stream)
                    view.write(spans, progress_text(result, self.plain))
        except KeyboardInterrupt:
            why = "stopped"
        except RunError as error:
            why = " ".join(f"{error} /new starts a new dialogue.".split())
        if result is not None:
            self.tokens[self.plain] += max(0, len(result.output_ids) - 1)
            self.seconds[self.plain] += result.seconds
        _print_dim(self.console, ", ".join(part for part in (self._summary(result), why) if part))

    def _spans(self, piece: Piece, text_stream: "StreamDecoder") -> list[tuple[str, str]]:
        origins = [PLAIN] * len(piece.ids) if self.plain else piece.origins
        spans = list(zip(map(text_stream.add, piece.ids), origins, strict=True))
        if piece.result.stop_reason and spans:
            spans.append((text_stream.advance(piece.result.text), spans[-1][1]))
        return spans

    def _summary(self, result: Result | None) -> str:
        """Return the numbers of the answer and, once there are both, the speeds of the chat."""
        if result is None:
            return ""
        text = progress_text(result, self.plain)
        if result.stop_reason == "budget":
            text += f", cut at eval.max_new_tokens={self.budget}"
        if self.tokens[False] and self.tokens[True]:
            rates = (ratio(self.tokens[plain], self.seconds[plain]) for plain in (False, True))
            fast, plain = (format_number(rate, 1) for rate in rates)
            text += f" (so far {fast} speculative, {plain} plain)"
        return text


def progress_text(result: Result, plain: bool) -> str:
    """Return the token count of an answer, and tau and tokens per second of its rounds."""
    count, rounds = len(result.output_ids), len(result.accepted)
    speed = f"{format_number(result.tokens_per_second, 1)} tokens/s"
    tokens = f"{count} token{'s' if count != 1 else ''}"
    if plain:
        return f"{tokens}, plain, {speed}"
    in_rounds = f"{rounds} round{'s' if rounds != 1 else ''}"
    text = f"{tokens} in {in_rounds}, tau {format_number(result.tau)}, {speed}"
    if not result.choices:
        return text
    shape = choice_shares(result.choices) if result.stop_reason else result.choices[-1]
    return f"{text}, {shape}"


class StreamDecoder:
    """Decodes tokens to text, one at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.ids, self.text = decoder, list[int](), ""

    def add(self, token: int) -> str:
        """Return the text completed by this token; empty if it ends within a character."""
        self.ids.append(token)
        return self.advance(self.decoder.text(self.ids).rstrip("\N{REPLACEMENT CHARACTER}"))

    def advance(self, text: str) -> str:
        """Return the part of a text that was not returned before."""
        if not text.startswith(self.text):
            return ""
        new, self.text = text[len(self.text) :], text
        return "".join(c for c in new if c in "\n\t" or unicodedata.category(c) != "Cc")


# ---- output ----


class AnswerView:
    """Output of an answer as a stream of text, with brackets instead of colours."""

    def __init__(self, console: Console) -> None:
        self.console, self.blank = console, True

    def write(self, spans: list[tuple[str, str]], status: str) -> None:
        """Write text and origin of each token of a round; `status` is of the answer so far."""
        line, inside, self.blank = "", False, False
        for text, origin in spans:
            if text and (origin == ACCEPTED) != inside:
                line, inside = line + ("]" if inside else "["), not inside
            line += text
        self.console.out(line + ("]" if inside else ""), end="")

    def close(self) -> None:
        if not self.blank:
            self.console.out("")


class ColourView(AnswerView):
    """Output to a colour terminal: full lines are printed, the last one stays live."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.line = Text()
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.live.start()

    def write(self, spans: list[tuple[str, str]], status: str) -> None:
        self.blank = False
        for text, origin in spans:
            self.line.append(text, COLOURS[origin])
        while at := first_line_length(self.line.plain, self.console.width):
            done, self.line = self.line.divide([at])
            done.rstrip()
            self.console.print(done)
        self.live.update(Group(self.line, Text(status, "dim")), refresh=True)

    def close(self) -> None:
        self.live.stop()
        if not self.blank:
            self.console.print(self.line)


def first_line_length(text: str, width: int) -> int:
    """Return the number of characters of the first line; 0 while it is not full.

    A line ends after a newline, or after the last blank that fits into `width` cells.
    """
    line, newline, _ = text.partition("\n")
    if cell_len(line) <= width:
        return len(line) + 1 if newline else 0
    fits = chop_cells(line, width)[0]
    blank = len(fits) if line[len(fits)] == " " else fits.rfind(" ")
    return blank + 1 if blank >= 0 else len(fits)


def _has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


# ---- input ----


def _print_greeting(console: Console, decoder: Decoder, policy: Policy, config: Config) -> None:
    """Print the models, the policy and the meaning of the colours."""
    decode = config.decode
    shape = f"{decode.name} of depth {decode.depth}, temperature {decode.temperature:g}"
    if isinstance(policy, Auto):
        shape = f"auto, at most depth {policy.depth}, temperature {decode.temperature:g}"
    _print_dim(
        console, f"{decoder.target.name} with {config.eval.drafter or config.drafter.name}, {shape}"
    )
    assert decoder.drafter is not None, "from_config loads one"
    for note in policy.notes if isinstance(policy, Auto) else ():
        _print_dim(console, note)
    lossy = ""
    if decode.temperature > 0 and decode.verify in RULES and RULES[decode.verify].lossy:
        lossy = f"{decode.verify}: lossy, not the target's distribution"
    depth = depth_warning(policy, decoder.drafter)
    for warning in (decoder.changed, depth, greedy_warning([decode]), lossy):
        if warning:
            console.print(Text(warning, "yellow"), soft_wrap=True)
    if _has_colour(console):
        parts = [(f"{name} ({meaning})", COLOURS[name]) for name, meaning in LEGEND.items()]
        console.print(Text("  ").join(Text(*part) for part in parts))
    else:
        _print_dim(console, "[by the drafter, accepted] by the target")
    _print_dim(console, "  ".join(COMMANDS))


def _print_dim(console: Console, text: str) -> None:
    console.print(Text(text, "dim"), soft_wrap=True)


def _lines(console: Console, read_line: Callable[[], str]) -> Iterator[str]:
    """Yield the lines of the user until the end of the input."""
    while True:
        try:
            yield read_line().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _print_dim(console, "\n/quit or Ctrl-D ends the chat")


def _read_line(console: Console) -> str:
    """Read a line of standard input; echo it if it is not typed in a terminal."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its editing keys and a history
        return input("> ")
    try:
        line = input()
    except UnicodeError as error:  # of an encoding such as UTF-16
        message = f"Standard input is not text in {sys.stdin.encoding}: {error}."
        raise RunError(message, "Set PYTHONIOENCODING=utf-8.") from None
    with suppress(UnicodeError):  # of a locale that is not UTF-8
        line = line.encode(sys.stdin.encoding, "surrogateescape").decode()
    console.out(f"> {line}")
    return line
