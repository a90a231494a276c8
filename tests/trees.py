"""Small shapes of static trees, and the invariants of draft trees."""

from collections.abc import Sequence
from itertools import product

from torch import Tensor

from outrider.models.decode.rules.token_rules import Accepted, deepest_path
from outrider.models.decode.tree import Tree
from outrider.models.decode.tree_shapes import Paths, parse


def chain(depth: int) -> Paths:
    return full([1] * depth)


def full(widths: Sequence[int]) -> Paths:
    """The shape in which every node above depth d has widths[d - 1] children."""
    depths = range(1, len(widths) + 1)
    return parse(path for depth in depths for path in product(*map(range, widths[:depth])))


def checked(tree: Tree) -> Tree:
    """Assert that parents are stored first, and that depths and levels follow from the parents."""
    for parents, depths in zip(tree.parents.tolist(), tree.depths.tolist(), strict=True):
        assert (parents[0], depths[0]) == (-1, 0)
        assert max(depths) <= tree.levels
        for node, parent in enumerate(parents[1:], start=1):
            assert 0 <= parent < node
            assert depths[node] == depths[parent] + 1
    return tree


def greedy(tree: Tree, choice: Tensor) -> Accepted:
    """Reference of `greedy_outcomes` in tensors: the longest path of the target's choices."""
    passed = tree.ids == choice.gather(1, tree.parents.clamp(min=0))
    path, length = deepest_path(tree, passed)
    return Accepted(path, length, choice.gather(1, path[:, -1:])[:, 0])
