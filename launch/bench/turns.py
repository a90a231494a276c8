"""`outrider bench turns`: several drafters of one target, beside plain decoding, by turns.

The speed of a machine drifts within minutes, so that two evals, one after the other, cannot show a
difference of a few percent. Here every prompt is decoded by all drafters and by plain decoding
before the next prompt, in an order that changes. They share one target. A prompt of which an answer
ends at its first token is left out.

    plain/s     tokens per second of plain decoding
    a drafter   its speedup over plain decoding of the same prompts: the ratio of seconds per token
    .. of best  tokens per second of the last drafter over those of the fastest other one, with its
                95 % interval (bootstrap over the prompts; too narrow for less than about ten)
    extra       largest share of the time of plain decoding that `decode=auto` spent on speculation
                in an answer, c0 aside, by its ledger: eps is the bound
    same        greedy answers that equal those of plain decoding, of all drafters together

The fastest other drafter is chosen by these answers, which favours it. A drafter keeps what it has
learnt of costs and acceptance from prompt to prompt, as a server does. Each decodes the first
prompt once before, which does not count. Drafters that run the target have no `decode=auto`.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.table import Table

from outrider.conf.compose import choices
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import from_dict, option
from outrider.conf.schema import UntrainedConfig
from outrider.data.conversations import Prompt
from outrider.data.reporter import Reporter
from outrider.data.suite import alternating, load_suite
from outrider.eval.decoder import Decoder
from outrider.eval.metrics import bootstrap
from outrider.eval.open_drafter import published_folder
from outrider.eval.report_tables import narrow_table
from outrider.eval.requests import PLAIN, GenerationSettings
from outrider.launch.bench.batch import ledger_share
from outrider.launch.bench.rounds import LoadedRun, RunOptions
from outrider.models.decode.request import Request
from outrider.models.drafters.parts.part import folder_of
from outrider.train.settings import check_published, drafter_schema, is_untrained

ALL = "all prompts"
LEGEND = (
    "plain/s: tokens per second of plain decoding. of best: the last drafter over the fastest "
    "other one, with the 95 % interval over prompts. extra: most time that decode=auto spent "
    "beyond plain decoding, 10 steps aside. same: greedy answers that are those of plain decoding."
)


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """Options of `outrider bench turns`."""

    drafters: tuple[str, ...] = option(
        ("suffix", "hybrid"),
        "besides the run's own, the one to compare with the others last: names of drafters without "
        "weights (hybrid combines the run's own), or folders or hub ids of others",
    )
    decode: str = option("auto", "draft shape of all drafters, of conf/decode/")
    temperature: float = option(0.0, "of decoding", "[0, 100]")
    prompts: str = option("", "as eval.prompts; empty: the embedded suite that suits the target")
    limit: int = option(48, "prompts, spread evenly over the categories", "[1, inf)")
    repeats: int = option(1, "times that every prompt is decoded", "[1, inf)")
    order: Literal["mixed", "grouped"] = option(
        "mixed", "of the categories; mixed: they alternate, grouped: one follows another"
    )

    def __post_init__(self) -> None:
        if self.decode not in (known := choices("decode")):
            fix = f"Use one of: {', '.join(known)}."
            raise ConfigError("decode", self.decode, "There is no draft shape of this name.", fix)
        if twice := [name for name, count in Counter(self.drafters).items() if count > 1]:
            raise ConfigError("drafters", twice[0], "It is named twice.", "Name it once.")
        if PLAIN in self.drafters:
            why = "Plain decoding is compared in any case."
            raise ConfigError("drafters", PLAIN, why, f"Write ./{PLAIN} for a folder.")


class Answer(NamedTuple):
    """An answer of one drafter.

    Attributes:
        seconds: of the rounds, and of the drafter's reading of the prompt.
        tokens: after the first.
        extra: share of the time of plain decoding that speculation cost, c0 aside; None without
            `decode=auto`.
    """

    seconds: float
    tokens: int
    ids: list[int]
    extra: float | None = None


class Turn(NamedTuple):
    """The answers to a prompt, plain decoding's among them."""

    category: str
    prompt: int
    answers: Mapping[str, Answer]


def turns(words: list[str]) -> int:
    """Run the benchmark."""
    run = LoadedRun(words, Options)
    options, reporter = run.options, Reporter(Console(stderr=True))
    decoders, prompts = decoders_of(run, reporter), prompts_of(run)
    requests, done = run.requests(prompts), list[Turn]()
    total, greedy = options.repeats * len(prompts), options.temperature == 0
    reporter.print("decoding the first prompt once")
    answers_to(requests[0], decoders, 0, options.temperature)
    with reporter.progress("decoding", total, "prompts") as progress:
        for number in range(total):
            at = number % len(prompts)
            request = requests[at]._replace(seed=number)
            answers = answers_to(request, decoders, number, options.temperature)
            done.append(Turn(prompts[at].category, at, answers))
            run.save(rows_of(done, greedy))
            progress.advance(1)
    if not (rows := rows_of(done, greedy)):
        raise RunError("Every prompt has an answer that ends at once.", "Use a larger tokens.")
    run.show(table_of(rows), rows)
    Console().print(LEGEND, style="dim")
    return 0


def decoders_of(run: LoadedRun[Options], reporter: Reporter) -> dict[str, Decoder]:
    """Load the drafters of the table, by their names in it, for the run's target.

    Raises:
        ConfigError: there is no such drafter, it changes the target, or the draft shape does not
            suit it.
    """
    options, own = run.options, run.config.drafter.name
    require_unchanged("run.dir", str(run.folder), run.drafter.describe_target_change())
    found: dict[str, UntrainedConfig | Path] = {own: run.folder / "drafter"}
    for word in options.drafters:
        name = word if word != own else f"{word} (other)"
        found[name] = untrained(word, run.folder) if is_untrained(word) else folder(word)
    decoders = dict[str, Decoder]()
    for name, drafter in found.items():
        decoder = Decoder.with_target(run.target, run.tokenizer, drafter, options.decode)
        require_unchanged("drafters", name, decoder.changed)
        decoder.announce = partial(_print_named, reporter, name)
        decoder.engine(GenerationSettings(temperature=options.temperature))
        decoders[name] = decoder
    return decoders


def _print_named(reporter: Reporter, name: str, text: str) -> None:
    reporter.print(f"{name}: {text}")


def require_unchanged(key: str, name: str, change: str | None) -> None:
    """Raise a ConfigError for a drafter that changes the target."""
    if change is not None:
        why = f"The drafters of this benchmark share a target, and {change}."
        raise ConfigError(key, name, why, "Measure it with: outrider eval")


def untrained(name: str, run: Path) -> UntrainedConfig:
    """Return the default settings of a drafter without weights.

    Args:
        run: of the trained part, if the drafter has one.
    """
    schema = drafter_schema({"name": name})
    fields = [field.name for field in dataclasses.fields(schema)]
    parts = {"trained": str(run)} if "trained" in fields else {}
    settings: UntrainedConfig = from_dict(schema, {"name": name, **parts}, "drafter")
    return settings


def folder(name: str) -> Path:
    """Return the folder of a run's drafter, or of a published one."""
    check_published(name)
    return published_folder(str(folder_of(name)) if Path(name).expanduser().is_dir() else name)


def prompts_of(run: LoadedRun[Options]) -> list[Prompt]:
    """Return the prompts in their order."""
    config, options = run.config, run.options
    if options.prompts:
        config = dataclasses.replace(
            config, eval=dataclasses.replace(config.eval, prompts=options.prompts)
        )
    prompts = load_suite(config, options.limit)
    grouped = sorted(prompts, key=lambda prompt: prompt.category)
    return grouped if options.order == "grouped" else alternating(prompts)


def answers_to(
    request: Request, decoders: Mapping[str, Decoder], number: int, temperature: float
) -> dict[str, Answer]:
    """Decode a request with every drafter and without, in an order that `number` selects."""
    names = [PLAIN, *decoders]
    order = Random(number).sample(names, len(names))
    found = {name: _answer(request, decoders, name, temperature) for name in order}
    return {name: found[name] for name in names}


def _answer(
    request: Request, decoders: Mapping[str, Decoder], name: str, temperature: float
) -> Answer:
    decoder = decoders[name] if name != PLAIN else next(iter(decoders.values()))
    policy = PLAIN if name == PLAIN else None
    engine = decoder.engine(GenerationSettings(temperature=temperature, policy=policy))
    (out,) = engine.generate_all([request], 1)
    seconds = out.times.rounds + out.times.prompt
    extra = ledger_share(out) if out.ledger else None
    return Answer(seconds, max(0, len(out.ids) - 1), out.ids, extra)


# ---- the table -----------------------------------------------------------------------------------


def rows_of(done: Sequence[Turn], greedy: bool) -> list[dict[str, Any]]:
    """Return a row per category and, if there are several, one of all prompts."""
    counted = [turn for turn in done if all(one.tokens for one in turn.answers.values())]
    groups = {
        category: [turn for turn in counted if turn.category == category]
        for category in dict.fromkeys(turn.category for turn in counted)
    }
    rows = [
        {"category": name, **_row(turns, greedy), "turns": [*map(_plain_values, turns)]}
        for name, turns in groups.items()
    ]
    if len(groups) > 1:
        rows.append({"category": ALL, **_row(counted, greedy)})
    return rows


def _plain_values(turn: Turn) -> dict[str, Any]:
    """Return seconds and tokens of every answer."""
    answers = {name: [one.seconds, one.tokens] for name, one in turn.answers.items()}
    return {"prompt": turn.prompt, **answers}


def _row(turns: Sequence[Turn], greedy: bool) -> dict[str, Any]:
    groups, (_, *names) = [turn.prompt for turn in turns], turns[0].answers
    pairs = [(turn.answers[PLAIN], turn.answers[name]) for turn in turns for name in names]
    extras = [one.extra for _, one in pairs if one.extra is not None]

    def terms(name: str, over: str) -> list[tuple[float, float, float, float]]:
        """Seconds and tokens of both, for the ratio of the tokens per second."""
        both = [(turn.answers[over], turn.answers[name]) for turn in turns]
        return [(a.seconds, a.tokens, b.seconds, b.tokens) for a, b in both]

    def ratio(name: str, over: str) -> float:
        a, b, c, d = np.array(terms(name, over)).sum(0)
        return float((a / b) / (c / d))

    speedup = {name: ratio(name, PLAIN) for name in names}
    *others, last = names
    best = max(others, key=speedup.__getitem__)
    plain = [turn.answers[PLAIN] for turn in turns]
    return {
        "prompts": len({*groups}), "answers": len(turns),
        "plain/s": sum(one.tokens for one in plain) / sum(one.seconds for one in plain),
        "speedup": speedup,
        "speedup_95": {name: bootstrap(terms(name, PLAIN), groups, 0) for name in names},
        "best": best, "last": last,
        "last of best": ratio(last, best),
        "last of best_95": bootstrap(terms(last, best), groups, 0),
        "extra": max(extras, default=None),
        "same": sum(plain.ids == one.ids for plain, one in pairs) if greedy else None,
        "compared": len(pairs),
    }  # fmt: skip


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(rows[0]["speedup"])
    head = ("text", "prompts", "plain/s", *names, f"{names[-1]} of best", "extra", "same")
    table = narrow_table(head, ("text",))
    table.title = "speedup over plain decoding, by turns"
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield row["category"]
    yield str(row["prompts"])
    yield f"{row['plain/s']:.1f}"
    for speedup in row["speedup"].values():
        yield f"{speedup:.2f}x"
    interval = "" if row["last of best_95"] is None else " ({:.2f}-{:.2f})"
    yield f"{row['last of best']:.2f}" + interval.format(*row["last of best_95"] or ())
    yield "-" if row["extra"] is None else f"{100 * row['extra']:+.1f}%"
    yield "-" if row["same"] is None else f"{row['same']}/{row['compared']}"
