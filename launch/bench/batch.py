"""`outrider bench batch`: draft shapes and `decode=auto` beside plain decoding, by turns.

A setting is a kind of text, a context, a temperature and a batch size. In each repetition all
shapes decode the same requests, one after the other, in an order that rotates, above temperature 0
with new seeds; ratios are taken within a repetition, and medians of the repetitions count. `auto`
is that of `outrider eval`, with the cost table and the measured acceptance of the run, and has seen
the setting once, in a pass that warms up every shape.

    plain/s    tokens per second of plain decoding, all requests of the batch together
    best       the fixed shape with the largest speedup of this table, which is known only
               afterwards and is partly luck where times vary or answers are drawn
    x          speedup over plain decoding
    of best    tokens per second of auto over those of the best fixed shape or plain decoding
    of chosen  the same over the shape (or plain decoding) with the largest speedup in the other
               repetitions: a choice that a user can make before decoding
    extra      largest share of the time of plain decoding that speculation cost in an answer or
               batch, c0 aside: eps is the bound
    same       greedy answers that equal plain decoding of one prompt at a time, of all shapes
               together

Ended requests of a batch are replaced, as a server does, by `per_slot` requests for each of its
places in all. The last ones end in ever smaller batches, which costs drafts more than plain
decoding, whose answers of equal length end together.

With `contexts` an answer has `tokens` tokens, whatever the target says: after many prompts without
an answer some targets end at once.

`weights` selects a drafter whose drafts are rejected, always or in parts of the text
(`impaired_drafters.py`). Drafters that run the target on their drafts have no `auto`.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from rich.progress import track
from rich.table import Table

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.data.suite import load_suite
from outrider.eval.auto_policy import policy_beside
from outrider.eval.calibration_file import attach_calibration
from outrider.eval.plan.interleaved import request_groups
from outrider.eval.rank_tables import tables_for
from outrider.eval.report_tables import narrow_table
from outrider.launch.bench.impaired_drafters import Weights, impaired
from outrider.launch.bench.rounds import LoadedRun, RunOptions, tokens_per_second
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import parse_policy_at_temperature
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Output, Request
from outrider.models.decode.sampling_params import Sampling
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target

PLAIN, AUTO = "plain", "auto"
LEGEND = (
    "x: speed over plain decoding. of best, of chosen: auto over the best fixed shape, and over "
    "the best of the other repetitions. extra: most time that auto spent beyond plain decoding, "
    "10 steps aside. same: greedy answers, of all shapes, that are those of plain decoding."
)
FIXED: dict[str, Chain | DynamicTree] = {
    "chain of 1": Chain(1), "chain of 2": Chain(2), "chain of 3": Chain(3), "chain of 5": Chain(5),
    "tree of 8": DynamicTree(4, 4, 8), "tree of 24": DynamicTree(5, 6, 24),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """Options of `outrider bench batch`."""

    batches: tuple[int, ...] = option((1, 4, 16), "batch sizes", "[1, 65536]")
    temperatures: tuple[float, ...] = option((0.0,), "temperatures", "[0, 100]")
    kinds: tuple[str, ...] = option(
        ("all",), "categories of the prompts (coding, math, ...), all of them, or the suite copying"
    )
    contexts: tuple[int, ...] = option(
        (0,), "tokens before the answer: other prompts come first; 0: the prompt's own", "[0, inf)"
    )
    per_slot: int = option(
        4, "requests for each place of a batch above 1, at least; prompts repeat",
        "[1, 65536]",
    )  # fmt: skip
    shapes: tuple[str, ...] = option(
        tuple(FIXED), "fixed shapes to compare, of those named in the default"
    )
    weights: Weights = option("trained", "of the drafter; the drafts of others are rejected")

    def __post_init__(self) -> None:
        for i, name in enumerate(self.shapes):
            if name not in FIXED:
                fix = f"Known are {', '.join(FIXED)}."
                raise ConfigError(f"shapes[{i}]", name, "No shape has this name.", fix)


class Setting(NamedTuple):
    """What one row of the table is about."""

    kind: str
    context: int
    temperature: float
    batch: int


class Speeds(NamedTuple):
    """Tokens per second and speedup of every shape, per repetition."""

    tokens: Mapping[str, Sequence[float]]

    def ratio(self, shape: str, over: str) -> float:
        """Return the median over the repetitions of one shape's speed over another's."""
        pairs = zip(self.tokens[shape], self.tokens[over], strict=True)
        return statistics.median(speed / base for speed, base in pairs)

    def best(self) -> str:
        """Return the fixed shape, plain decoding among them, with the largest speedup."""
        fixed = (shape for shape in self.tokens if shape != AUTO)
        return max(fixed, key=lambda shape: self.ratio(shape, PLAIN))

    def of_chosen(self, shape: str) -> float:
        """Return the median of one shape's speed over that of the best of the other repetitions."""
        repetitions = range(len(self.tokens[shape]))
        ratios = []
        for left_out in repetitions:
            chosen = self._without(left_out).best() if len(repetitions) > 1 else self.best()
            ratios.append(self.tokens[shape][left_out] / self.tokens[chosen][left_out])
        return statistics.median(ratios)

    def _without(self, left_out: int) -> "Speeds":
        return Speeds({
            shape: [speed for i, speed in enumerate(speeds) if i != left_out]
            for shape, speeds in self.tokens.items()
        })  # fmt: skip


def batch(words: list[str]) -> int:
    """Run the benchmark: tokens per second of every shape, and what auto reaches of the best."""
    run = LoadedRun(words, Options)
    options = run.options
    if options.weights == "random":
        impaired(run.drafter, "random")
    elif options.weights == "trained":
        attach_calibration(run.drafter, run.folder / "drafter")
    texts = {kind: _requests(run, kind) for kind in options.kinds}
    lists = texts, options.contexts, options.temperatures, options.batches
    settings = [Setting(*values) for values in product(*lists)]
    console = Console(stderr=True)
    rows = list[dict[str, Any]]()
    for setting in track(settings, "decoding", console=console, transient=True):
        rows.append(_measure(run, setting, with_context(texts, setting, options.per_slot)))
        run.save(rows)
    rows.sort(key=lambda row: (row.get("auto of best", 1.0), row["batch"]))  # the worst first
    run.show(table_of(rows), rows)
    if any("auto x" in row for row in rows):
        Console().print(LEGEND, style="dim")
    return 0


def _requests(run: LoadedRun[Options], kind: str) -> list[Request]:
    """Return the requests of a kind."""
    config, options = run.config, run.options
    if kind == "copying":
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, prompts=kind))
    suite = load_suite(config, None if kind not in ("all", "copying") else options.limit)
    found = [prompt for prompt in suite if kind in ("all", "copying", prompt.category)]
    if not found:
        known = ", ".join(sorted({prompt.category for prompt in suite}))
        why = "No prompt has this category."
        raise ConfigError("kinds", kind, why, f"Use all, copying, or one of {known}.")
    return run.requests(found[: options.limit])


def with_context(
    texts: Mapping[str, Sequence[Request]], setting: Setting, per_slot: int = 1
) -> list[Request]:
    """Return the requests of a setting; other prompts come first, up to its context.

    Args:
        per_slot: requests for each place of a batch, at least: prompts repeat, with other seeds.
    """
    found = texts[setting.kind]
    count = max(len(found), per_slot * setting.batch if setting.batch > 1 else 1)
    requests = [found[i % len(found)]._replace(seed=i) for i in range(count)]
    others = [token for request in requests for token in request.prompt]
    others *= 1 + setting.context // len(others)
    return [
        request._replace(
            prompt=[*others[: max(0, setting.context - len(request.prompt))], *request.prompt]
        )
        for request in requests
    ]


def _measure(run: LoadedRun[Options], setting: Setting, requests: list[Request]) -> dict[str, Any]:
    """Decode by turns, and return the row of a setting."""
    sampling, size = Sampling(setting.temperature), setting.batch
    auto = None if run.drafter.runs_target() else automatic_drafts(run, setting.temperature)
    weights: Weights = "trained" if run.options.weights == "random" else run.options.weights
    engines = {
        name: run.engine(policy, sampling, impaired(run.drafter, weights), setting.context > 0)
        for name, policy in shapes_of(run.target, run.drafter, auto, run.options.shapes).items()
    }
    turns = range(1 + run.options.repeats)
    _, *repetitions = [_by_turns(engines, requests, size, turn) for turn in turns]
    names = list(engines)
    speeds = Speeds({
        name: [tokens_per_second(outputs[name]) for outputs in repetitions] for name in names
    })  # fmt: skip
    best = speeds.best()
    automatic = {
        "auto x": speeds.ratio(AUTO, PLAIN),
        "auto of best": speeds.ratio(AUTO, best),
        "auto of chosen": speeds.of_chosen(AUTO),
        "ledger": max(ledger_share(out) for outputs in repetitions for out in outputs[AUTO]),
    } if AUTO in engines else {}  # fmt: skip
    return {
        **setting._asdict(),
        "plain/s": statistics.median(speeds.tokens[PLAIN]),
        "tokens/s": speeds.tokens,
        "best": best,
        "best x": speeds.ratio(best, PLAIN),
        **automatic,
        "tau": {name: _tau(repetitions[0][name]) for name in names if name != PLAIN},
        "speedup": {name: speeds.ratio(name, PLAIN) for name in names if name != PLAIN},
        **_equal_answers(run, requests, repetitions[0], setting),
    }


def shapes_of(
    target: Target, drafter: Drafter, auto: Policy | None, names: Sequence[str] = tuple(FIXED)
) -> dict[str, Policy | None]:
    """Return the shapes to compare."""
    chains_only = target.recurrent or drafter.chains_only
    fixed = {
        name: FIXED[name] for name in names if not (chains_only and FIXED[name].branches)
    }  # fmt: skip
    shapes: dict[str, Policy | None] = {PLAIN: None, **fixed}
    if auto is not None:
        shapes[AUTO] = auto
    return shapes


def automatic_drafts(run: LoadedRun[Options], temperature: float) -> Policy:
    """Return what `outrider eval decode=auto` decodes with.

    The costs and the acceptance beside the run are those of its trained weights.
    """
    _, greedy = parse_policy_at_temperature("auto@0")
    decode = dataclasses.replace(greedy, temperature=temperature)
    if run.options.weights != "trained":
        return policy_beside(decode, None)
    return policy_beside(decode, run.folder / "drafter", tables_for(run.config))


def _by_turns(
    engines: Mapping[str, Engine], requests: list[Request], size: int, turn: int
) -> dict[str, list[Output]]:
    """Decode all requests with every engine, a group at a time; each turn starts with another."""
    names = [*engines]
    names = names[turn % len(names) :] + names[: turn % len(names)]
    outputs: dict[str, list[Output]] = {name: [] for name in names}
    seeded = [one._replace(seed=one.seed + turn * len(requests)) for one in requests]
    for group in request_groups(seeded, size):
        for name in names:
            outputs[name] += engines[name].generate_all(group, size)
    return outputs


def _tau(outputs: Sequence[Output]) -> float:
    """Return tokens per round and prompt."""
    return sum(len(out.ids) - 1 for out in outputs) / max(1, sum(out.rounds for out in outputs))


def ledger_share(out: Output) -> float:
    """Return (T_real - c0) / T_plain - 1, which eps bounds."""
    ledger = out.ledger
    return (ledger.real - ledger.slack) / ledger.plain - 1 if ledger and ledger.plain else 0.0


def _equal_answers(
    run: LoadedRun[Options],
    requests: list[Request],
    outputs: Mapping[str, Sequence[Output]],
    setting: Setting,
) -> dict[str, int]:
    """Return how many greedy answers equal those of one prompt at a time; {} if they are drawn."""
    if setting.temperature:
        return {}
    prompts = {tuple(one.prompt): one for one in requests}
    engine = run.engine(None, Sampling(), endless=setting.context > 0)
    alone = engine.generate_all([*prompts.values()], 1)
    answers_of = dict(zip(prompts, (out.ids for out in alone), strict=True))
    expected = [answers_of[tuple(one.prompt)] for one in requests]
    drafted = [answers for name, answers in outputs.items() if name != PLAIN]
    same = sum(
        out.ids == ids for answers in drafted for out, ids in zip(answers, expected, strict=True)
    )
    return {"same": same, "answers": len(drafted) * len(expected)}


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    head = (
        "text", "T", "batch", "plain/s", "best", "x", "auto x", "of best", "of chosen", "extra",
        "same",
    )  # fmt: skip
    table = narrow_table(head, ("text", "best"))
    table.title = "auto beside fixed shapes, its worst setting first"
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    context = f", {row['context']}" if row["context"] else ""
    yield f"{row['kind']}{context}"
    yield f"{row['temperature']:g}"
    yield str(row["batch"])
    yield f"{row['plain/s']:.0f}"
    yield row["best"]
    for name in ("best x", "auto x", "auto of best", "auto of chosen"):
        yield f"{row[name]:.2f}" if name in row else "-"
    yield f"{100 * row['ledger']:+.1f}%" if "ledger" in row else "-"
    yield f"{row['same']}/{row['answers']}" if "same" in row else "-"
