"""`outrider ranks`: acceptance by rank and depth of a run, and the best tree of each table.

Writes `ranks.json` (`eval/rank_tables.py`) and a tree for `decode.tree` per table.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from jaxtyping import Float
from omegaconf import OmegaConf
from rich.table import Table
from torch import Tensor

from outrider.conf.console import Console
from outrider.conf.schema import Config
from outrider.data.corpus import load_training_data
from outrider.data.reporter import Reporter
from outrider.data.target_fit import load_fitting_target
from outrider.eval.rank_tables import FILE, measure_held_out, read_tables
from outrider.eval.report_tables import draft_search, narrow_table
from outrider.eval.report_tables import explain as print_definitions
from outrider.models.decode import tree_shapes
from outrider.models.decode.from_config import best_tree
from outrider.models.decode.tree_shapes import Paths
from outrider.models.formats import native
from outrider.models.target import process
from outrider.train.settings import read_saved_config

TREE_NODES = 8  # nodes of the trees written for decode.tree
MOST_DEPTHS = 4  # rows of the table that is printed without --explain
DEFINITIONS = {
    "best@0": "top-k draft tokens at temperature 0; accepted if it is the target's top-1 token",
    "best@1": "top-k draft tokens at temperature 1; accepted if the target draws it",
    "drawn@1": "drawn without replacement; accepted by the ratio of the probabilities",
    "coupled@1": "top-k under the noise that the target's draw shares",
    "1st at depth": "probability at each depth that the first candidate is the accepted one, given "
    "that its parent was",
    "chain, tree": "expected tokens per round of the longest chain, and of the best tree of "
    f"{TREE_NODES} nodes, as if depths were independent of each other: the mean acceptances of the "
    "depths are multiplied. The predicted acceptance length of a training counts rows whose draft "
    "tokens are all accepted, and decoding measures other prompts",
}


def ranks(config: Config, explain: bool = False) -> int:
    """Run the verb: measure the tables of a finished run on its held-out text, and print them.

    Args:
        explain: print every table, the trees and the definitions, too.
    """
    process.set_threads()
    console, folder = Console(), Path(config.run.dir)
    config = _with_own_prompts(config)
    loaded = load_fitting_target(config, trains=True)
    drafter, _ = native.load(folder / "drafter", loaded.target)
    data = load_training_data(config, loaded, drafter.taps, Reporter(console, messages=False))
    measure_held_out(folder, drafter, loaded.target, data, config.data.max_length)
    tables = {name: table.ranks for name, table in (read_tables(folder) or {}).items()}
    trees = {name: best_tree(name, table, TREE_NODES) for name, table in tables.items()}
    for name, tree in trees.items():
        tree_shapes.write(tree, folder / f"tree-{name}.json")
    search = draft_search(config.drafter.name, folder)
    print_ranks(console, folder, tables, trees, search, explain)
    return 0


def _with_own_prompts(config: Config) -> Config:
    """Return the settings with the run's own `eval.prompts`, unless others are set.

    Conversations that nearly equal a prompt of the suite were refused or dropped, so with another
    suite the held-out text would be another.
    """
    if config.eval.prompts is not None:
        return config
    own = OmegaConf.select(read_saved_config(Path(config.run.dir)), "eval.prompts")
    return config if own is None else replace(config, eval=replace(config.eval, prompts=str(own)))


def print_ranks(
    console: Console,
    folder: Path,
    tables: Mapping[str, Float[Tensor, "D K"]],
    trees: Mapping[str, Paths],
    search: str,
    in_full: bool = False,
) -> None:
    """Print the best tree, a row per table, and the first table; at most 15 lines.

    Args:
        tables: at least one.
        search: a command that shows whether another draft is faster.
        in_full: every table with its best tree, and the definitions.
    """
    start, first = next(iter(tables.items()))
    tree, chain = (f"{tokens:.2f}" for tokens in _tokens_per_round(first, trees[start]))
    best = f"Best tree of {TREE_NODES}: {tree} tokens per round"
    verdict = f"{best}, chain of {len(first)}: {chain} (greedy, held-out text)"
    console.print(verdict, style="bold")
    for use, command in (
        ("To decode with it", f"outrider eval run.dir={folder} decode=static_tree"),
        ("To see what is faster", search),
    ):
        console.print(f"{use}: {command}", soft_wrap=True)
    console.print(_summary(tables, trees))
    for name, table in tables.items():
        if in_full or (name == start and len(table) <= MOST_DEPTHS):
            console.print(_rank_table(name, table))
        if in_full:
            console.print(f"best tree of {TREE_NODES} nodes:")
            console.print(tree_shapes.picture(trees[name]))
    files = f"written: {folder / FILE} (every number), tree-*.json"
    console.print(files, soft_wrap=True)
    if in_full:
        print_definitions(console, DEFINITIONS)


def _tokens_per_round(table: Float[Tensor, "D K"], tree: Paths) -> tuple[float, float]:
    """Return those of the tree, and of the longest chain."""
    chain = tuple((0,) * depth for depth in range(1, len(table) + 1))
    return tree_shapes.expected(tree, table), tree_shapes.expected(chain, table)


def _summary(tables: Mapping[str, Tensor], trees: Mapping[str, Paths]) -> Table:
    depths = len(next(iter(tables.values())))
    names = [str(depth) for depth in range(1, depths + 1)]
    output = narrow_table(("1st at depth", *names, "chain", "tree"), ("1st at depth",))
    for name, table in tables.items():
        tree, chain = _tokens_per_round(table, trees[name])
        rates = (f"{rate:.3f}" for rate in table[:, 0].tolist())
        output.add_row(name, *rates, f"{chain:.2f}", f"{tree:.2f}")
    return output


def _rank_table(name: str, table: Float[Tensor, "D K"]) -> Table:
    """Return the probability that the k-th candidate at each depth is the accepted one."""
    head = f"{name}, choice"
    output = narrow_table((head, *(str(k + 1) for k in range(table.shape[1]))), (head,))
    for depth, row in enumerate(table.tolist(), start=1):
        output.add_row(f"depth {depth}", *(f"{rate:.3f}" for rate in row))
    return output
