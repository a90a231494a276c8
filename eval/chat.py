"""A chat in the terminal that shows who wrote what.

An answer appears round by round. In a terminal the colour of a token says who proposed it, and a
line below it counts along; where there are no colours (a pipe, NO_COLOR) brackets stand around
what the drafter wrote:

    > When should I visit Amberton?
    The[ best time to] visit[ is spring.]
    9 tokens in 2 rounds, tau 4.00, 502.3 tokens/s

A token whose bytes are only a part of a character is shown with the token that completes it.
"""

import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outrider.conf.errors import RunError
from outrider.eval.decoder import PLAIN, Decoder, Piece, Result
from outrider.eval.decoder import Chat as Dialogue
from outrider.eval.rank_tables import read_tables
from outrider.eval.report import number
from outrider.models.decode.from_config import policy_of, rule_of, sampling_of, shortfall
from outrider.models.decode.policy import Policy
from outrider.models.decode.request import ACCEPTED, BONUS, CORRECTION, FIRST
from outrider.models.decode.rules import RULES
from outrider.train import distributed as start
from outrider.train.decoding import DecodeConfig
from outrider.train.settings import Config

COLOURS = {ACCEPTED: "green", CORRECTION: "red", BONUS: "cyan", FIRST: "yellow", PLAIN: ""}
LEGEND = {
    ACCEPTED: "the drafter's",
    CORRECTION: "the target's, for a wrong guess",
    BONUS: "the target's, behind right ones",
    FIRST: "the prompt's own",
}
COMMANDS = {
    "/new": "forget the dialogue",
    "/plain": "speculation off, and on again",
    "/quit": "end (so does Ctrl-D; Ctrl-C stops an answer)",
    "/help": "this list",
}


def chat(
    config: Config, console: Console | None = None, ask: Callable[[], str] | None = None
) -> int:
    """`outrider chat`: talk to the target of a run, its drafter guessing ahead.

    Args:
        config: as `load_run` gives it.
        ask: the next line of the user; EOFError ends the chat. None reads the standard input.

    Raises:
        RunError, ConfigError: the run has no drafter, or it cannot draft as `config.decode` says.
    """
    if start.world_size() > 1:
        message = f"chat was started by {start.world_size()} processes; one talks."
        raise RunError(message, "Use: outrider chat run.dir=...")
    console = console or Console()
    policy = policy_of(config.decode, read_tables(Path(config.run.dir)))
    decoder = Decoder.from_config(config, policy)
    how = {**sampling_of(config.decode)._asdict(), "rule": rule_of(config.decode, policy)}
    talk = Talk(
        console, lambda: decoder.chat(seed=config.run.seed, **how), config.eval.max_new_tokens
    )
    _greet(console, decoder, policy, config)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # what there is to say was said in the greeting
        for line in _lines(console, ask or (lambda: _read(console))):
            if line == "/quit":
                break
            talk.take(line)
    return 0


@dataclass
class Speed:
    """What the rounds of all answers so far have brought and taken."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, result: Result) -> None:
        self.tokens += max(0, len(result.output_ids) - 1)
        self.seconds += result.seconds

    def __str__(self) -> str:
        return number(self.tokens / self.seconds if self.seconds > 0 else None, 1)


@dataclass
class Talk:
    """The dialogue under way, with speculation or for a while without."""

    console: Console
    fresh: Callable[[], Dialogue]
    budget: int
    plain: bool = False
    speeds: dict[bool, Speed] = field(default_factory=lambda: {False: Speed(), True: Speed()})

    def __post_init__(self) -> None:
        self.dialogue = self.fresh()

    def take(self, line: str) -> None:
        """A command or a message."""
        if line == "/new":
            self.dialogue = self.fresh()
            _say(self.console, "the dialogue is forgotten")
        elif line == "/plain":
            self.plain = not self.plain
            off = "speculation is off: every token is a forward of the target"
            _say(self.console, off if self.plain else "speculation is on")
        elif line.startswith("/"):
            if line != "/help":
                _say(self.console, f"there is no command {line.split()[0]}")
            for command, meaning in COMMANDS.items():
                _say(self.console, f"{command:<8}{meaning}")
        elif line:
            self.answer(line)

    def answer(self, line: str) -> None:
        """Stream the answer; a line behind it says how it came about, or why there is none."""
        result: Result | None = None
        spelling, why = Spelling(self.dialogue.decoder), ""
        stream = self.dialogue.stream(line, self.budget, policy=PLAIN if self.plain else None)
        try:
            with _page(self.console) as page, closing(stream):
                for piece in stream:
                    page.write(self._parts(piece, spelling), standing(piece.result, self.plain))
                    result = piece.result
        except KeyboardInterrupt:
            why = "stopped"
        except RunError as error:
            why = " ".join(f"{error} /new forgets the dialogue.".split())
        if result is not None:
            self.speeds[self.plain].add(result)
        _say(self.console, ", ".join(part for part in (self._summary(result), why) if part))

    def _parts(self, piece: Piece, spelling: "Spelling") -> list[tuple[str, str]]:
        """Text and origin of each token."""
        origins = [PLAIN] * len(piece.ids) if self.plain else piece.origins
        parts = list(zip(map(spelling.add, piece.ids), origins, strict=True))
        if piece.result.ended and parts:
            parts.append((spelling.rest(piece.result.text), parts[-1][1]))
        return parts

    def _summary(self, result: Result | None) -> str:
        """The answer in numbers; beside them, once there are both, the means of the whole chat."""
        if result is None:
            return ""
        said = standing(result, self.plain)
        if result.ended == "budget":
            said += f", cut at eval.max_new_tokens={self.budget}"
        if all(speed.tokens for speed in self.speeds.values()):
            said += f" (so far {self.speeds[False]} speculative, {self.speeds[True]} plain)"
        return said


def standing(result: Result, plain: bool) -> str:
    """How an answer stands: all tokens; tau and tokens per second are of the rounds."""
    count, rounds = len(result.output_ids), len(result.accepted)
    speed = f"{number(result.tokens_per_second, 1)} tokens/s"
    said = f"{count} token{'s' if count != 1 else ''}"
    if plain:
        return f"{said}, plain, {speed}"
    within = f"{rounds} round{'s' if rounds != 1 else ''}"
    return f"{said} in {within}, tau {number(result.tau)}, {speed}"


class Spelling:
    """Tokens to text, one at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.ids, self.shown = decoder, list[int](), ""

    def add(self, token: int) -> str:
        """The text that this token completes: none, where it ends within a character."""
        self.ids.append(token)
        return self.rest(self.decoder.text(self.ids).rstrip("\N{REPLACEMENT CHARACTER}"))

    def rest(self, text: str) -> str:
        """What of a text is not shown yet; from now on it is."""
        if not text.startswith(self.shown):
            return ""
        fresh, self.shown = text[len(self.shown) :], text
        return _harmless(fresh)


def _harmless(text: str) -> str:
    """Without characters that control a terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


# ---- paper and ink ----


class Page(AbstractContextManager["Page"]):
    """Where an answer is written: here as a stream of text, with brackets for colours."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.blank = True

    def write(self, parts: list[tuple[str, str]], standing: str) -> None:
        """A round.

        Args:
            parts: (text, who proposed it) of each token.
            standing: how the answer stands now.
        """
        line, inside, self.blank = "", False, False
        for text, origin in parts:
            if text and (origin == ACCEPTED) != inside:
                line, inside = line + ("]" if inside else "["), not inside
            line += text
        self.console.out(line + ("]" if inside else ""), end="", highlight=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.blank:
            self.console.out("")


class Painted(Page):
    """A terminal: lines that are full are printed, the last one is live with the standing below."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.line = Text()
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.live.start()

    def write(self, parts: list[tuple[str, str]], standing: str) -> None:
        self.blank = False
        for text, origin in parts:
            self.line.append(text, COLOURS[origin])
        while at := full(self.line.plain, self.console.width):
            done, self.line = self.line.divide([at])
            done.rstrip()
            self.console.print(done)
        self.live.update(Group(self.line, Text(standing, "dim")), refresh=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.stop()
        if not self.blank:
            self.console.print(self.line)


def full(text: str, width: int) -> int:
    """How many characters make the first line; 0 while it is not full.

    Lines end behind a newline, and else behind the last blank that fits into `width` cells.
    """
    line, newline, _ = text.partition("\n")
    if cell_len(line) <= width:
        return len(line) + 1 if newline else 0
    fits = chop_cells(line, width)[0]
    blank = len(fits) if line[len(fits)] == " " else fits.rfind(" ")
    return blank + 1 if blank >= 0 else len(fits)


def _coloured(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _page(console: Console) -> Page:
    return Painted(console) if _coloured(console) else Page(console)


# ---- lines ----


def _greet(console: Console, decoder: Decoder, policy: Policy, config: Config) -> None:
    """Who talks, how, and what the colours mean."""
    decode = config.decode
    shape = f"{decode.name} of depth {decode.depth}, temperature {decode.temperature:g}"
    _say(console, f"{decoder.target.name} with {config.drafter.name}, {shape}")
    assert decoder.drafter is not None, "of a run"
    for warning in (decoder.changed, shortfall(policy, decoder.drafter), _loss(decode)):
        if warning:
            console.print(Text(warning, "yellow"), soft_wrap=True)
    if _coloured(console):
        parts = [(f"{name} ({meaning})", COLOURS[name]) for name, meaning in LEGEND.items()]
        console.print(Text("  ").join(Text(*part) for part in parts))
    else:
        _say(console, "[the drafter's tokens, accepted] the target's own")
    _say(console, "  ".join(COMMANDS))


def _loss(decode: DecodeConfig) -> str:
    lossy = decode.verify in RULES and RULES[decode.verify].lossy and decode.temperature > 0
    return f"{decode.verify}: what is said has not the target's own distribution" if lossy else ""


def _say(console: Console, text: str) -> None:
    console.print(Text(text, "dim"), soft_wrap=True)


def _lines(console: Console, ask: Callable[[], str]) -> Iterator[str]:
    """What the user says, until the end of the input."""
    while True:
        try:
            yield ask().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _say(console, "\n/quit or Ctrl-D ends the chat")


def _read(console: Console) -> str:
    """A line of the standard input; one that nobody typed is shown, for the record."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its editing keys and a history
        return input("> ")
    line = input()
    console.out(f"> {line}", highlight=False)
    return line
