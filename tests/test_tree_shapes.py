"""Shapes of static trees: their order, their errors, and searches against all trees there are."""

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.decode import tree_shapes
from outrider.models.decode.tree_shapes import Paths
from tests.trees import chain, full

# Small enough to do by hand: two depths, three ranks.
TABLE = torch.tensor([[0.5, 0.25, 0.125], [0.5, 0.0, 0.25]], dtype=torch.float64)


def random_table(seed: int, depths: int, ranks: int, ordered: bool = False) -> Tensor:
    """Chances of siblings, which sum to less than 1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(depths, ranks + 1, dtype=torch.float64, generator=generator)
    table = (drawn / drawn.sum(-1, keepdim=True))[:, :ranks]
    return table.sort(descending=True).values if ordered else table


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Any tree, in any order: each node hangs below the root or a node before it."""
    found: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 12))):
        above = draw(st.sampled_from([(), *found]))
        found.append((*above, draw(st.integers(0, 5))))
    return draw(st.permutations(sorted(set(found))))


# ---- one way to write a tree ---------------------------------------------------------------------


def test_parents_come_first_and_siblings_in_rank_order() -> None:
    given_order = [[1, 0], [0, 2], [2], [0, 0, 1], [0], [0, 0], [1]]
    found = tree_shapes.parse(given_order)
    assert found == ((0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 0, 1))


@given(trees())
def test_the_order_given_does_not_matter(tree: list[tuple[int, ...]]) -> None:
    found = tree_shapes.parse(tree)
    assert set(found) == set(tree)
    assert tree_shapes.parse(found) == found == tree_shapes.parse(sorted(tree))
    for i, path in enumerate(found):
        assert path[:-1] in {(), *found[:i]}
        if i:
            assert (len(found[i - 1]), found[i - 1]) < (len(path), path)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one node"),
        ([[0], []], "an empty path is the root"),
        ([[0], [0, -1]], r"path \[0, -1\]: ranks count from 0"),
        ([[0], [1], [0]], r"path \[0\] is repeated"),
        ([[0], [1, 2]], r"path \[1, 2\] has no parent: \[1\] is missing"),
        ([[0], [0, 0, 0]], r"path \[0, 0, 0\] has no parent: \[0, 0\] is missing"),
    ],
)
def test_invalid_trees_are_refused(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_shapes.parse(paths)


@given(trees())
def test_contiguous_siblings_have_the_ranks_from_zero(tree: list[tuple[int, ...]]) -> None:
    found = tree_shapes.parse(tree)
    below: dict[tuple[int, ...], list[int]] = {}
    for path in found:
        below.setdefault(path[:-1], []).append(path[-1])
    whole = all(sorted(ranks) == list(range(len(ranks))) for ranks in below.values())
    assert tree_shapes.contiguous(found) == whole


def test_gaps_at_any_depth_are_detected() -> None:
    assert tree_shapes.contiguous(((0,), (1,), (1, 0)))
    assert not tree_shapes.contiguous(((1,),))
    assert not tree_shapes.contiguous(((0,), (1,), (1, 0), (1, 2)))


# ---- files ---------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(trees())
def test_write_and_read_round_trip(
    tmp_path_factory: pytest.TempPathFactory, tree: list[tuple[int, ...]]
) -> None:
    file = tmp_path_factory.mktemp("tree") / "tree.json"
    tree_shapes.write(tree_shapes.parse(tree), file)
    assert tree_shapes.read(file) == tree_shapes.parse(tree)


def test_files_have_one_node_per_line(tmp_path: Path) -> None:
    tree_shapes.write(((0,), (1,), (0, 0)), tmp_path / "tree.json")
    assert (tmp_path / "tree.json").read_text() == "[\n [0],\n [1],\n [0, 0]\n]\n"
    (tmp_path / "other.json").write_text("[[0, 0], [1], [0]]")  # as published by others
    assert tree_shapes.read(tmp_path / "other.json") == ((0,), (1,), (0, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [0", "delimiter"),
        ("{}", "not a list of lists"),
        ("[0, 1]", "not a list of lists"),
        ('["00"]', "not a list of lists"),
        ("[[0], [1.0]]", "not a list of lists of integers"),
        ("[[false]]", "not a list of lists of integers"),
        ("[]", "at least one node"),
        ("[[0], [1, 2]]", "has no parent"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(RunError, match=rf"tree\.json holds no tree: .*{message}"):
        tree_shapes.read(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere\.json holds no tree"):
        tree_shapes.read(tmp_path / "nowhere.json")


def test_invalid_trees_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no parent"):
        tree_shapes.write(((0, 0),), tmp_path / "tree.json")
    assert not list(tmp_path.iterdir())


# ---- well-known shapes ---------------------------------------------------------------------------


def test_a_picture() -> None:
    drawn = tree_shapes.picture(((0,), (0, 0), (0, 2), (1,), (0, 0, 0)))
    assert drawn.splitlines() == [
        "root",
        "|-- 0",
        "|   |-- 0",
        "|   |   `-- 0",
        "|   `-- 2",
        "`-- 1",
    ]


# ---- what a shape is worth -----------------------------------------------------------------------


def test_expected_tokens_by_hand() -> None:
    assert tree_shapes.expected(((0,),), TABLE) == 1.5
    assert (
        tree_shapes.expected(((0,), (1,), (0, 0), (1, 2)), TABLE) == 1 + 0.5 + 0.25 + 0.25 + 0.0625
    )
    assert tree_shapes.expected(full([3, 3]), TABLE) == 1 + 0.875 * 1.75


def test_expected_tokens_of_a_chain() -> None:
    table = torch.full((6, 1), 0.8, dtype=torch.float64)
    assert tree_shapes.expected(chain(6), table) == pytest.approx((1 - 0.8**7) / 0.2, abs=1e-12)


def test_tables_without_a_node_are_refused() -> None:
    for paths in (((3,),), chain(3)):
        with pytest.raises(ValueError, match="the table has 2 depths and 3 ranks"):
            tree_shapes.expected(paths, TABLE)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0.5, 1.5]], "probabilities from 0 to 1"),
        ([[0.5, float("nan")]], "probabilities from 0 to 1"),
        ([[]], "probabilities from 0 to 1"),
        ([[0.5, 0.2], [0.6, 0.7]], "sum to 1.3"),
    ],
)
def test_invalid_tables_are_refused(table: list[list[float]], message: str) -> None:
    for search in (tree_shapes.best_first, tree_shapes.sequoia):
        with pytest.raises(ValueError, match=message):
            search(torch.tensor(table), 1, deepest=1)


@cache
def every_tree(nodes: int, depths: int, ranks: int) -> tuple[Paths, ...]:
    """All trees of exactly so many nodes: choose which ranks a node has, then share the rest."""
    return tuple(tree_shapes.parse(tree) for tree in forests((), nodes, depths, ranks) if tree)


def forests(
    above: tuple[int, ...], nodes: int, depths: int, ranks: int
) -> Iterator[list[tuple[int, ...]]]:
    if nodes == 0:
        yield []
    if nodes == 0 or depths == 0:
        return
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(range(ranks), count) for count in range(1, ranks + 1)
    ):
        for shares in itertools.product(range(nodes), repeat=len(chosen)):
            if sum(shares) + len(chosen) == nodes:
                below = [
                    list(forests((*above, rank), share, depths - 1, ranks))
                    for rank, share in zip(chosen, shares, strict=True)
                ]
                for parts in itertools.product(*below):
                    own = [(*above, rank) for rank in chosen]
                    yield own + [path for part in parts for path in part]


def test_the_enumeration_of_trees_is_complete() -> None:
    """Two ranks, any depth: binary trees, counted by Catalan numbers (root included: n + 1)."""
    assert [len(every_tree(n, n, 2)) for n in (1, 2, 3, 4)] == [2, 5, 14, 42]
    assert len(set(every_tree(5, 3, 3))) == len(every_tree(5, 3, 3))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("nodes", "depths", "ranks"), [(1, 2, 2), (4, 3, 3), (6, 3, 2), (5, 2, 3)])
def test_best_first_is_the_best_of_all_trees(
    seed: int, nodes: int, depths: int, ranks: int, ordered: bool
) -> None:
    table = random_table(seed, depths, ranks, ordered)
    found = tree_shapes.best_first(table, nodes)
    every = every_tree(nodes, depths, ranks)
    worths = sorted(tree_shapes.expected(tree, table) for tree in every)
    assert len(found) == nodes
    assert tree_shapes.expected(found, table) == pytest.approx(worths[-1], abs=1e-12)
    assert len(worths) == 1 or worths[0] < worths[-1] - 1e-3  # the search could have failed
    assert tree_shapes.contiguous(found) or not ordered


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("nodes", "depths", "ranks"), [(1, 2, 2), (4, 3, 3), (6, 3, 2), (5, 2, 3)])
def test_sequoia_is_the_best_of_all_contiguous_trees(
    seed: int, nodes: int, depths: int, ranks: int
) -> None:
    """Also where a later sibling is likelier than an earlier one, which then comes along."""
    table = random_table(seed, depths, ranks)
    shape = tree_shapes.sequoia(table, nodes, depths)
    every = [tree for tree in every_tree(nodes, depths, ranks) if tree_shapes.contiguous(tree)]
    best = max(tree_shapes.expected(tree, table) for tree in every)
    assert len(shape) == nodes
    assert tree_shapes.contiguous(shape)
    assert tree_shapes.expected(shape, table) == pytest.approx(best, abs=1e-12)


def test_best_first_uses_gaps_and_sequoia_does_not() -> None:
    table = torch.tensor([[0.1, 0.8]], dtype=torch.float64)
    assert tree_shapes.best_first(table, 1) == ((1,),)
    for nodes, worth in ((1, 1.1), (2, 1.9)):
        shape = tree_shapes.sequoia(table, nodes, 1)
        assert shape == full([nodes])
        assert tree_shapes.expected(shape, table) == pytest.approx(worth, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_searches_agree_where_ranks_are_in_order(seed: int) -> None:
    """On a size that no list of all trees reaches."""
    table = random_table(seed, 6, 8, ordered=True)
    shape = tree_shapes.sequoia(table, 60, 6)
    assert tree_shapes.expected(shape, table) == pytest.approx(
        tree_shapes.expected(tree_shapes.best_first(table, 60), table), abs=1e-12
    )
    assert len(shape) == 60


@pytest.mark.parametrize("seed", range(3))
def test_more_nodes_and_more_depth_are_never_worse(seed: int) -> None:
    table = random_table(seed, 6, 3)
    values = torch.tensor(
        [
            [
                tree_shapes.expected(tree_shapes.sequoia(table, n, d), table)
                for n in (1, 2, 3, 5, 9, 17, 33)
            ]
            for d in range(1, 7)
        ]
    )
    assert (values.diff(dim=0) >= -1e-12).all()
    assert (values.diff(dim=1) >= -1e-12).all()
    assert values[-1, -1] > values[0, -1] > values[0, 0]


def test_searches_with_a_large_budget_return_all_nodes() -> None:
    table = random_table(0, 2, 3)
    assert tree_shapes.best_first(table, 100) == full([3, 3])
    assert tree_shapes.sequoia(table, 100, 2) == full([3, 3])
    assert tree_shapes.best_first(table, 100, widest=2, deepest=1) == full([2])
    assert tree_shapes.sequoia(table, 100, 1) == full([3])


def test_nodes_of_probability_zero_fill_the_budget() -> None:
    """And of equal nodes the shallower, then the lower rank comes first."""
    table = torch.tensor([[0.5, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert tree_shapes.best_first(table, 1) == ((0,),)
    assert tree_shapes.best_first(table, 3) == ((0,), (1,), (0, 0))
    shape = tree_shapes.sequoia(table, 4, 2)
    assert (len(shape), tree_shapes.expected(shape, table)) == (4, 2.0)


@pytest.mark.parametrize("changes", [{"nodes": 0}, {"deepest": 0}, {"deepest": 3}])
def test_limits_beyond_the_table_are_refused(changes: dict[str, int]) -> None:
    limits = {"nodes": 3, "deepest": 2, **changes}
    for search in (tree_shapes.best_first, tree_shapes.sequoia):
        with pytest.raises(ValueError, match=next(iter(changes))):
            search(TABLE, **limits)
    for widest in (0, 4):
        with pytest.raises(ValueError, match="widest"):
            tree_shapes.best_first(TABLE, 3, widest=widest)
