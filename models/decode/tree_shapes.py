"""Shapes of static trees: which favourites to draft in every round, and which shape pays best.

A shape is a tuple of paths, one per drafted node; a path is a tuple of ranks. (0,) is the drafter's
favourite behind the root, (0, 1) its second choice below that one. The root is in no shape. The
canonical order is by depth, then lexicographic: parents first, siblings in rank order.

    paths   (0,) (1,) (0, 0) (0, 1)          root
                                             |-- 0
                                             |   |-- 0
                                             |   `-- 1
                                             `-- 1

What a shape is worth follows from a table: table[d - 1, k] is the chance that the k-th child at
depth d is the accepted one, given that its parent was (`eval/rank_tables.py` measures it). Depths and
contexts are taken as independent, so a node is reached with the product along its path, and

    expected tokens per round = 1 + sum over nodes of that product.

Two searches maximise it: `best_first` where siblings are chosen by rank, so that any ranks may be
left out, and `sequoia` where they are drawn without replacement, so that the third cannot be had
without the second.

Shape letters: D depths, K ranks.

Source: choices as paths and their greedy search, Cai et al. 2024, "Medusa", arXiv:2401.10774; the
dynamic programme, Chen et al. 2024, "Sequoia", arXiv:2402.12374. Its choice by time: eval/plan/surface.py.
Differs: `sequoia` also takes a table per depth; `best_first` has the optimum over all shapes, since
a child is never likelier than its parent.
"""

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from outrider.conf import files
from outrider.conf.errors import RunError

Paths = tuple[tuple[int, ...], ...]

SLACK = 1e-6  # by which the measured chances of siblings may sum to more than 1


def parse(paths: Iterable[Sequence[int]]) -> Paths:
    """A shape in canonical order.

    Raises:
        ValueError: no node, an empty path, a negative rank, a node named twice, or a node without
            its parent.
    """
    found = [tuple(path) for path in paths]
    if not found:
        raise ValueError("a tree needs at least one node besides its root")
    for path in found:
        if not path:
            raise ValueError("an empty path is the root, which every tree has: leave it out")
        if min(path) < 0:
            raise ValueError(f"path {list(path)}: ranks count from 0, the favourite")
    found.sort(key=_canonical)
    _check_connected(found)
    return tuple(found)


def _canonical(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


def _check_connected(paths: Sequence[tuple[int, ...]]) -> None:
    known: set[tuple[int, ...]] = {()}
    for path in paths:
        if path in known:
            raise ValueError(f"path {list(path)} is there twice")
        if path[:-1] not in known:
            raise ValueError(f"path {list(path)} has no parent: {list(path[:-1])} is not there")
        known.add(path)


def contiguous(paths: Paths) -> bool:
    """Whether siblings have the ranks 0, 1, .. without a gap, as drawn siblings must."""
    known = set(paths)
    return all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in known for path in paths)


def read(path: Path) -> Paths:
    """A shape from a json file, a list of paths such as [[0], [1], [0, 0]].

    Raises:
        RunError: missing, not json, or not a shape.
    """
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, list) or not all(map(_ranks_only, found)):
            raise ValueError("not a list of lists of whole numbers")
        return parse(found)
    except (OSError, ValueError) as error:
        fix = "A tree is a json list of paths such as [[0], [1], [0, 0]]."
        raise RunError(f"{path} holds no tree: {error}", fix) from None


def _ranks_only(found: object) -> bool:
    return isinstance(found, list) and all(type(rank) is int for rank in found)


def write(paths: Paths, path: Path) -> None:
    """As json, one node a line.

    Raises:
        ValueError: not a shape.
        RunError: the file cannot be written.
    """
    nodes = ",\n".join(f" {json.dumps(node)}" for node in parse(paths))
    files.write(path, f"[\n{nodes}\n]\n".encode())


def chain(depth: int) -> Paths:
    """The favourite of the favourite of the favourite."""
    return full([1] * depth)


def full(widths: Sequence[int]) -> Paths:
    """Every node above depth d has widths[d - 1] children there.

    Raises:
        ValueError: no depth, or a width < 1.
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"widths {list(widths)}: a tree has a depth, and a node at each of them")
    depths = range(1, len(widths) + 1)
    return parse(path for depth in depths for path in product(*map(range, widths[:depth])))


def picture(paths: Paths) -> str:
    """The tree as text, a line per node, for people."""
    return "\n".join(["root", *_branches(parse(paths), (), "")])


def _branches(paths: Paths, above: tuple[int, ...], margin: str) -> Iterator[str]:
    below = [path for path in paths if path[:-1] == above]
    for path in below:
        last = path == below[-1]
        yield f"{margin}{'`' if last else '|'}-- {path[-1]}"
        yield from _branches(paths, path, margin + ("    " if last else "|   "))


# EAGLE-1's 25 drafted nodes (arXiv:2401.15077), "not rigorously optimised" by its authors.
_WIDTHS = {"": 4, "0": 3, "1": 2, "2": 2, "3": 1, "00": 3, "01": 2, "02": 2, "10": 1}
_WIDTHS |= {"000": 3, "0000": 2}  # children of each path that has any
EAGLE1 = parse(
    [*map(int, above), rank] for above, width in _WIDTHS.items() for rank in range(width)
)


# ---- what a shape is worth ----


def expected(paths: Paths, table: Float[Tensor, "D K"]) -> float:
    """Tokens per round, the one that the target says itself included: >= 1.

    Raises:
        ValueError: no table of chances, or one that does not know a node's depth or rank.
    """
    rates = _rates(table)
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for path in parse(paths):
        if len(path) > len(rates) or path[-1] >= len(rates[0]):
            raise ValueError(
                f"path {list(path)}: the table has {len(rates)} depths and {len(rates[0])} ranks"
            )
        reached[path] = reached[path[:-1]] * rates[len(path) - 1][path[-1]]
    return sum(reached.values())


def _rates(table: Float[Tensor, "D K"]) -> list[list[float]]:
    """
    Raises:
        ValueError: empty, a chance outside 0..1, or siblings that exceed 1 together.
    """
    if table.numel() == 0 or not bool(((table >= 0) & (table <= 1)).all()):
        raise ValueError("a table holds chances from 0 to 1, a row per depth, a column per rank")
    most = float(table.double().sum(-1).max())
    if most > 1 + SLACK:
        raise ValueError(
            f"the ranks of a depth sum to {most:.6g}, and one child at most is accepted "
            "(are these the rates of being among the first k?)"
        )
    rates: list[list[float]] = table.tolist()
    return rates


def best_first(
    table: Float[Tensor, "D K"], nodes: int, widest: int | None = None, deepest: int | None = None
) -> Paths:
    """The shape of that many nodes with the most expected tokens: the likeliest nodes.

    Takes node after node the likeliest below those it has; ties to the shallower, then to the
    lower ranks. The result is contiguous wherever the rows of the table do not increase.

    Args:
        nodes: drafted nodes; fewer if there are no more.
        widest: ranks below it are used; None: all that the table has.
        deepest: the last depth used; None: all that the table has.

    Raises:
        ValueError: a bad table, or a limit below 1 or beyond it.
    """
    rates = _rates(table)
    width = len(rates[0]) if widest is None else widest
    depth = len(rates) if deepest is None else deepest
    _check_limits(rates, nodes, width, depth)
    found: list[tuple[int, ...]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while heap and len(found) <= nodes:
        chance, level, path = heapq.heappop(heap)
        found.append(path)
        for rank, rate in enumerate(rates[level][:width] if level < depth else ()):
            heapq.heappush(heap, (chance * rate, level + 1, (*path, rank)))
    return parse(found[1:])


def _check_limits(rates: list[list[float]], nodes: int, width: int, depth: int) -> None:
    known = {
        "nodes": (nodes, None),
        "widest": (width, len(rates[0])),
        "deepest": (depth, len(rates)),
    }
    for name, (value, most) in known.items():
        if value < 1 or (most is not None and value > most):
            limit = "at least 1" if most is None else f"1 to {most}, which the table knows"
            raise ValueError(f"{name} = {value}: use {limit}")


def sequoia(
    table: Float[Tensor, "D K"] | Float[Tensor, " K"], nodes: int, deepest: int
) -> tuple[Paths, float]:
    """The contiguous shape of that many nodes with the most expected tokens, and how many.

    Args:
        table: chances per depth and rank, or a vector that holds at every depth.
        nodes: drafted nodes; fewer if there are no more.
        deepest: the last depth used.

    Raises:
        ValueError: a bad table, or a limit below 1 or beyond it.
    """
    rates = _rates(table if table.ndim == 2 else table.expand(max(deepest, 1), -1))
    width = len(rates[0])
    _check_limits(rates, nodes, width, deepest)
    nodes = min(nodes, sum(width**depth for depth in range(1, deepest + 1)))
    value, taken = _plan(np.array(rates[:deepest]), nodes)
    return parse(_grown(taken, (), nodes)), 1 + value


def _plan(rates: NDArray[np.float64], nodes: int) -> tuple[float, NDArray[np.int64]]:
    """The dynamic programme, deepest level and last rank first.

    Returns:
        The most tokens expected below the root; and taken[d, k, m]: if m nodes are left for the
        k-th child at depth d + 1 and its later siblings, how many it and its descendants get.
    """
    sizes = np.arange(nodes + 1)
    left = sizes[:, None] - sizes  # of m nodes, once a child has taken s
    nothing = np.where(sizes == 0, 0.0, -np.inf)  # worth of m nodes where there is room for none
    taken = np.zeros((*rates.shape, nodes + 1), dtype=np.int64)
    below = nothing
    for depth in reversed(range(len(rates))):
        child = 1 + np.concatenate([[-np.inf], below[:-1]])  # itself, and what hangs below it
        possible, child = np.isfinite(child), np.maximum(child, 0.0)
        below = nothing
        for rank in reversed(range(rates.shape[1])):
            gain = np.where(possible, rates[depth, rank] * child, -np.inf)
            options = np.where(left >= 0, gain + below[left], -np.inf)
            taken[depth, rank] = options.argmax(1)
            below = np.maximum(nothing, options.max(1))
    return float(below[nodes]), taken


def _grown(
    taken: NDArray[np.int64], above: tuple[int, ...], nodes: int
) -> Iterator[tuple[int, ...]]:
    rank = 0
    while nodes:
        part, path = int(taken[len(above), rank, nodes]), (*above, rank)
        yield path
        yield from _grown(taken, path, part - 1)
        nodes, rank = nodes - part, rank + 1
