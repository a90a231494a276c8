"""Section of a report page on the search for skipped sublayers (eval/sublayer_search.py)."""

import math
from collections.abc import Iterator

from outrider.eval.page.elements import Note, Part, text_table
from outrider.eval.page.figures import draw, points
from outrider.eval.page.run_files import RunFiles
from outrider.eval.sublayer_results import best_so_far
from outrider.eval.sublayer_search import LOG, read_log
from outrider.train.settings import FOUND, read_found

MEASURED = "The speedup over plain decoding on the prompts of the search"
CANDIDATES = (
    f"{MEASURED} of each candidate, in the order of the search. Pruned: on its first prompts, "
    "where it was clearly slower than the best one before. The line is the best so far."
)
FINALISTS = f"{MEASURED}: medians of repetitions, measured in turns. The first row was chosen."


def search_parts(run: RunFiles) -> Iterator[Part]:
    """Yield the speed of all candidates, and the best ones; nothing without a search."""
    _, trials = read_log(run.folder / LOG)
    if not trials:
        return
    groups = {
        name: [(float(i), trial.value) for i, trial in enumerate(trials) if trial.pruned == pruned]
        for name, pruned in (("measured", False), ("pruned", True))
    }
    groups = {name: places for name, places in groups.items() if places}
    line = [(float(i), best) for i, best in enumerate(best_so_far(trials)) if not math.isnan(best)]
    paint = points(groups, "candidate", "speedup", front=line)
    yield draw("speed of the candidates", CANDIDATES, paint)
    if not (run.folder / FOUND).is_file():
        yield Note("The search has not finished; the same command continues it.")
        return
    rows = [
        [
            _layers(one["skip_attention"]), _layers(one["skip_mlp"]), f"{one['speedup']:.2f}x",
            f"{one['tau']:.2f}", f"{one['accepted']:.0%}",
        ]
        for one in read_found(run.folder)["finalists"]
    ]  # fmt: skip
    head = ["skipped attention", "skipped MLP", "speedup", "tau", "accepted"]
    yield text_table("the best candidates", head, rows, FINALISTS)


def _layers(layers: list[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
