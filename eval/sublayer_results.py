"""Result of a search for skipped sublayers: `found.json`, a plot, and what the console shows."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from outrider.conf.errors import RunError
from outrider.conf.files import write, write_json
from outrider.conf.searched import SearchConfig, Skipped
from outrider.eval.report import png
from outrider.eval.report_tables import narrow_table
from outrider.eval.sublayer_search import LOG, REPEATS, Finalist, Trial
from outrider.train.settings import FOUND, FOUND_FORMAT, read_found

PLOT = "search.png"
TOP = 0.25  # share of the complete candidates whose sublayers the plot counts


def save(
    folder: Path, layers: int, trials: Sequence[Trial], finalists: Sequence[Finalist],
    settings: dict[str, Any], search: SearchConfig,
) -> None:  # fmt: skip
    """Write the plot and `found.json`, which every command that decodes with the run reads."""
    best = finalists[0]
    write(folder / PLOT, plot(layers, trials, best.candidate))
    content = {
        "format": FOUND_FORMAT, "drafter": best.candidate.settings(), **_numbers(best),
        "candidates": len(trials), "pruned": sum(trial.pruned for trial in trials),
        "finalists": [one.candidate.settings() | _numbers(one) for one in finalists],
        "settings": settings, "limits": _limits(search),
    }  # fmt: skip
    write_json(folder / FOUND, content)


def is_finished(folder: Path, search: SearchConfig) -> bool:
    """Return whether a search with these limits has ended; False if its result is damaged."""
    try:
        return read_found(folder).get("limits") == _limits(search)
    except RunError:
        return False


def _limits(search: SearchConfig) -> dict[str, Any]:
    return {"trials": search.trials, "minutes": search.minutes}


def _numbers(one: Finalist) -> dict[str, Any]:
    speed = one.speed._asdict()
    return {**speed, "speedup": one.value, "speedups": one.speedups}


def show(folder: Path, trials: Sequence[Trial], finalists: Sequence[Finalist], to: Console) -> None:
    """Print the verdict, the skipped sublayers and the candidates that were measured again."""
    best = finalists[0]
    low, high = min(best.speedups), max(best.speedups)
    verdict = (
        f"{best.value:.2f}x the speed of plain decoding ({low:.2f}-{high:.2f} in {REPEATS} "
        f"repetitions) on the prompts of the search, tau {best.speed.tau:.2f}"
    )
    to.print(Text(verdict, style="bold"))
    to.print(f"a draft skips: {best.candidate}", highlight=False, soft_wrap=True)
    if best.value < 1:
        why = "No candidate is faster than plain decoding: drafting costs more than it saves."
        to.print(Text.assemble(("note:", "yellow"), f" {why}"))
    pruned = sum(trial.pruned for trial in trials)
    to.print(f"{len(trials)} candidates, {pruned} pruned; the best, measured again:")
    heads = ("attention", "MLP", "speedup", "tokens/s", "tau", "accepted")
    table = narrow_table(heads)
    for one in finalists:
        speed = one.speed
        table.add_row(
            str(len(one.candidate.attention)), str(len(one.candidate.mlp)), f"{one.value:.2f}x",
            f"{speed.tokens_per_second:.1f}", f"{speed.tau:.2f}", f"{speed.accepted:.0%}",
        )  # fmt: skip
    to.print(table)
    files = f"written: {folder / FOUND}, {LOG}, {PLOT}"
    to.print(files, highlight=False, soft_wrap=True)


def plot(layers: int, trials: Sequence[Trial], found: Skipped) -> bytes:
    """Plot, left, the speedup of every candidate; right, how often the best skip a sublayer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for pruned, name, color in ((True, "pruned", "tab:gray"), (False, "measured", "tab:blue")):
        at = [i for i, trial in enumerate(trials) if trial.pruned == pruned]
        left.scatter(at, [trials[i].value for i in at], s=12, color=color, label=name)
    left.plot(best_so_far(trials), color="tab:orange", label="best so far")
    left.axhline(1.0, color="black", linestyle=":", label="plain decoding")
    left.set(xlabel="candidate", ylabel="speedup", title="speedup on the prompts of the search")
    left.legend(fontsize=8)
    shares = skip_shares(layers, trials)
    for offset, kind, color in ((-0.2, "attention", "tab:blue"), (0.2, "mlp", "tab:green")):
        places = [layer + offset for layer in range(layers)]
        right.bar(places, shares[kind], width=0.4, color=color, label=f"{kind} skipped")
        chosen = [layer + offset for layer in getattr(found, kind)]
        right.scatter(chosen, [1.04] * len(chosen), marker="v", color=color, s=16)
    title = f"share of the best {TOP:.0%} that skip a sublayer (v: found)"
    right.set(xlabel="decoder layer", ylim=(0, 1.35), title=title)
    right.legend(fontsize=8, loc="upper left", ncols=2)
    return png(figure)


def skip_shares(layers: int, trials: Sequence[Trial]) -> dict[str, list[float]]:
    """Return how often the best quarter of the complete candidates skips each sublayer."""
    complete = sorted((t for t in trials if not t.pruned), key=lambda trial: -trial.value)
    best = complete[: math.ceil(TOP * len(complete))]
    return {
        kind: [
            sum(layer in getattr(trial.candidate, kind) for trial in best) / max(1, len(best))
            for layer in range(layers)
        ]
        for kind in Skipped._fields
    }


def best_so_far(trials: Sequence[Trial]) -> list[float]:
    """Return the best complete value after each candidate; NaN before there is one."""
    best, values = math.nan, list[float]()
    for trial in trials:
        if not trial.pruned and not trial.value <= best:
            best = trial.value
        values.append(best)
    return values
