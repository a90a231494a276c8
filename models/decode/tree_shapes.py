"""Shapes of static trees, and the searches for the best one.

A shape is a tuple of paths, one per draft node; a path is a tuple of ranks. (0,) is the drafter's
top-1 after the root, (0, 1) its second choice after that token. The root is in no shape. The
canonical order is by depth, then lexicographic: parents first, siblings in rank order.

    paths   (0,) (1,) (0, 0) (0, 1)          root
                                             |-- 0
                                             |   |-- 0
                                             |   `-- 1
                                             `-- 1

The value of a shape follows from a table: table[d - 1, k] is the probability that the k-th child at
depth d is accepted, given that its parent was (`eval/rank_tables.py` measures it). Depths and
contexts are assumed independent, so a node is reached with the product along its path, and

    expected tokens per round = 1 + sum over nodes of that product.

Two searches maximise it: `best_first` where siblings are chosen by rank, so that ranks may be left
out, and `sequoia` where they are drawn without replacement, so that ranks are contiguous.

Shape letters: D depths, K ranks.

Source: choices as paths and their greedy search, Cai et al. 2024, "Medusa", arXiv:2401.10774; the
dynamic programme, Chen et al. 2024, "Sequoia", arXiv:2402.12374.
Differs: `sequoia` also takes a table per depth; `best_first` has the optimum over all shapes, since
no child is more probable than its parent.
"""

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from outrider.conf import files
from outrider.conf.errors import RunError

Paths = tuple[tuple[int, ...], ...]

NODES, RANKS, DEPTH = 4096, 65536, 512  # largest of a file
SLACK = 1e-6  # by which the measured probabilities of siblings may exceed 1 in sum


def parse(paths: Iterable[Sequence[int]]) -> Paths:
    """Return a shape in canonical order.

    Raises:
        ValueError: no node, an empty path, a negative rank, a repeated node, or a node without its
            parent.
    """
    shape = sorted(map(tuple, paths), key=lambda path: (len(path), path))
    if not shape:
        raise ValueError("a tree needs at least one node in addition to its root")
    nodes: set[tuple[int, ...]] = {()}
    for path in shape:
        if not path:
            raise ValueError("an empty path is the root, which every tree has: leave it out")
        if min(path) < 0:
            raise ValueError(f"path {list(path)}: ranks count from 0, the top-1")
        if path in nodes:
            raise ValueError(f"path {list(path)} is repeated")
        if path[:-1] not in nodes:
            raise ValueError(f"path {list(path)} has no parent: {list(path[:-1])} is missing")
        nodes.add(path)
    return tuple(shape)


def contiguous(paths: Paths) -> bool:
    """Return whether siblings have the ranks 0, 1, .. without a gap, as drawn siblings must."""
    nodes = set(paths)
    return all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in nodes for path in paths)


def read(path: Path) -> Paths:
    """Read a shape from a json file, a list of paths such as [[0], [1]]; RunError if it is none."""
    try:
        content = files.parse_json(files.read_bytes(path))
        lists = isinstance(content, list) and all(isinstance(path, list) for path in content)
        if not lists or not all(type(rank) is int for path in content for rank in path):
            raise ValueError("not a list of lists of integers")
        deepest, ranks = max(map(len, content), default=0), [n for path in content for n in path]
        if len(content) > NODES or deepest > DEPTH or max(ranks, default=0) > RANKS:
            raise ValueError(f"at most {NODES} nodes, {RANKS} ranks and {DEPTH} levels")
        return parse(content)
    except (OSError, ValueError) as error:
        fix = "A tree is a json list of paths such as [[0], [1], [0, 0]]."
        raise RunError(f"{path} holds no tree: {error}", fix) from None


def write(paths: Paths, path: Path) -> None:
    """Write a shape as json, one node a line."""
    nodes = ",\n".join(f" {json.dumps(node)}" for node in parse(paths))
    files.write(path, f"[\n{nodes}\n]\n".encode())


def picture(paths: Paths) -> str:
    """Return the tree as text, a line per node."""
    return "\n".join(["root", *_branches(parse(paths), (), "")])


def _branches(paths: Paths, above: tuple[int, ...], margin: str) -> Iterator[str]:
    below = [path for path in paths if path[:-1] == above]
    for path in below:
        last = path == below[-1]
        yield f"{margin}{'`' if last else '|'}-- {path[-1]}"
        yield from _branches(paths, path, margin + ("    " if last else "|   "))


# ---- expected tokens ----------------------------------------------------------------------------


def expected(paths: Paths, table: Float[Tensor, "D K"]) -> float:
    """Return the expected tokens per round, the target's own token included: >= 1.

    Raises:
        ValueError: the table is not one of probabilities, or lacks a node's depth or rank.
    """
    rates = rates_of(table)
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for path in parse(paths):
        if len(path) > len(rates) or path[-1] >= len(rates[0]):
            raise ValueError(
                f"path {list(path)}: the table has {len(rates)} depths and {len(rates[0])} ranks"
            )
        reached[path] = reached[path[:-1]] * rates[len(path) - 1][path[-1]]
    return sum(reached.values())


def rates_of(table: Float[Tensor, "D K"]) -> list[list[float]]:
    """Return the rows of a table of probabilities; those of siblings sum to at most 1."""
    if table.numel() == 0 or not bool(((table >= 0) & (table <= 1)).all()):
        raise ValueError(
            "a table holds probabilities from 0 to 1, a row per depth, a column per rank"
        )
    most = float(table.double().sum(-1).max())
    if most > 1 + SLACK:
        raise ValueError(
            f"the ranks of a depth sum to {most:.6g}, and at most one child is accepted "
            "(are these top-k rates?)"
        )
    rates: list[list[float]] = table.tolist()
    return rates


def best_first(
    table: Float[Tensor, "D K"], nodes: int, widest: int | None = None, deepest: int | None = None
) -> Paths:
    """Return the shape of that many nodes with the most expected tokens: the most probable nodes.

    Ties go to the shallower, then to the lower ranks. The result is contiguous wherever the rows of
    the table do not increase.

    Args:
        nodes: draft nodes; fewer if there are no more.
        widest: ranks below it are used; None: all of the table.
        deepest: the last depth used; None: all of the table.

    Raises:
        ValueError: an invalid table, or a limit below 1 or beyond it.
    """
    rates = rates_of(table)
    width = len(rates[0]) if widest is None else widest
    depth = len(rates) if deepest is None else deepest
    _check_limits(rates, nodes, width, depth)
    shape: list[tuple[int, ...]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while heap and len(shape) <= nodes:
        negated, level, path = heapq.heappop(heap)
        shape.append(path)
        for rank, rate in enumerate(rates[level][:width] if level < depth else ()):
            heapq.heappush(heap, (negated * rate, level + 1, (*path, rank)))
    return parse(shape[1:])


def _check_limits(rates: list[list[float]], nodes: int, width: int, depth: int) -> None:
    if nodes < 1:
        raise ValueError(f"nodes = {nodes}: use at least 1")
    for name, value, most in (("widest", width, len(rates[0])), ("deepest", depth, len(rates))):
        if not 1 <= value <= most:
            raise ValueError(f"{name} = {value}: use 1 to {most}, the size of the table")


def sequoia(table: Float[Tensor, "D K"], nodes: int, deepest: int) -> Paths:
    """Return the contiguous shape of that many nodes with the most expected tokens.

    Args:
        nodes: draft nodes; fewer if there are no more.
        deepest: the last depth used.

    Raises:
        ValueError: an invalid table, or a limit below 1 or beyond it.
    """
    rates = rates_of(table)
    width = len(rates[0])
    _check_limits(rates, nodes, width, deepest)
    nodes = min(nodes, sum(width**depth for depth in range(1, deepest + 1)))
    return parse(_paths(_subtree_sizes(np.array(rates[:deepest]), nodes), (), nodes))


def _subtree_sizes(rates: NDArray[np.float64], nodes: int) -> NDArray[np.int64]:
    """Solve the dynamic programme, deepest level and last rank first.

    Returns:
        sizes[d, k, m]: of m nodes for the k-th child at depth d + 1 and its later siblings, the
        number in the child's own subtree.
    """
    counts = np.arange(nodes + 1)
    rest = counts[:, None] - counts  # of m nodes, after a subtree of s
    no_node = np.where(counts == 0, 0.0, -np.inf)  # value of m nodes where no node is allowed
    sizes = np.zeros((*rates.shape, nodes + 1), dtype=np.int64)
    below = no_node
    for depth in reversed(range(len(rates))):
        child = 1 + np.concatenate([[-np.inf], below[:-1]])  # itself and its descendants
        possible, child = np.isfinite(child), np.maximum(child, 0.0)
        below = no_node
        for rank in reversed(range(rates.shape[1])):
            gain = np.where(possible, rates[depth, rank] * child, -np.inf)
            options = np.where(rest >= 0, gain + below[rest], -np.inf)
            sizes[depth, rank] = options.argmax(1)
            below = np.maximum(no_node, options.max(1))
    return sizes


def _paths(
    sizes: NDArray[np.int64], parent: tuple[int, ...], nodes: int
) -> Iterator[tuple[int, ...]]:
    rank = 0
    while nodes:
        size, path = int(sizes[len(parent), rank, nodes]), (*parent, rank)
        yield path
        yield from _paths(sizes, path, size - 1)
        nodes, rank = nodes - size, rank + 1
