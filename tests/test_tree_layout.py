"""Between trees and tensors: cached and sliced results against ones computed anew."""

import pytest
import torch

from outrider.models.decode.tree import Tree
from outrider.models.decode.tree_layout import (
    MASK_STEP,
    KeptRows,
    kept_traces,
    positions_and_mask,
    send_rows,
)
from outrider.models.target.target import TargetStates

EDGES = [0, 1, 2, 17, MASK_STEP - 1, MASK_STEP, MASK_STEP + 1, 2 * MASK_STEP, 2 * MASK_STEP + 3]


def line(batch: int, guesses: int) -> tuple[Tree, Tree]:
    """One and the same tree, once known to be a chain and once not."""
    ids = torch.arange(batch * (guesses + 1)).view(batch, -1)
    depths = torch.arange(guesses + 1).expand(batch, -1)
    return Tree.chain(ids), Tree.from_parents(ids, depths - 1, depths, guesses)


@pytest.mark.parametrize("start", EDGES)
@pytest.mark.parametrize("guesses", [0, 1, 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_chain_layout_equals_tree_layout(batch: int, guesses: int, start: int) -> None:
    for tree in line(batch, guesses):
        positions, visible = positions_and_mask(tree, [start] * batch)
        columns = torch.arange(start + guesses + 1)
        for i in range(guesses + 1):
            assert positions[:, i].tolist() == [start + i] * batch
            assert torch.equal(visible[:, i], (columns <= start + i).expand(batch, -1))


@pytest.mark.parametrize(
    "paths",
    [
        [[0]],
        [[0, 1, 2, 3]],
        [[0, 2, 3, 6]],
        [[0, 2, 3, 6], [0, 1, 4], [0]],
        [[0, 1], [0], [0, 1, 2]],
    ],
)
def test_kept_traces_are_the_rows_of_the_paths(paths: list[list[int]]) -> None:
    """Each prompt its own path's, token by token; the longest sets the width of the table."""
    generator = torch.Generator().manual_seed(7)
    taps, last = (torch.randn(len(paths), 7, size, generator=generator) for size in (6, 2))
    texts = [torch.randint(100, (len(path) + 1,), generator=generator).tolist() for path in paths]
    starts = [9 + slot for slot in range(len(paths))]
    rows = send_rows(texts, starts, paths, taps.device)
    handed = kept_traces([len(path) for path in paths], rows, TargetStates(taps, last))
    for slot, (path, trace) in enumerate(zip(paths, handed, strict=True)):
        count = len(path)
        assert trace.ids.tolist() == [texts[slot][:-1]]
        assert trace.next_ids.tolist() == [texts[slot][1:]]
        assert trace.positions.tolist() == [list(range(9 + slot, 9 + slot + count))]
        assert torch.equal(trace.taps, taps[slot : slot + 1, path])
        assert torch.equal(trace.last, last[slot : slot + 1, path])
        assert trace.document.tolist() == [[0] * count]
        assert trace.answer.tolist() == [[False] * count]


@pytest.mark.parametrize("counts", [[4], [1], [2, 4, 1]])
def test_prefix_rows_equal_those_sent_from_the_host(counts: list[int]) -> None:
    """A greedy chain's, whose guesses agree with the target's choices as far as they are kept."""
    generator = torch.Generator().manual_seed(7)
    ids, choice = torch.randint(100, (2, len(counts), 4), generator=generator)
    starts = [9 + slot for slot in range(len(counts))]
    for row, following, count in zip(ids, choice, counts, strict=True):
        following[: count - 1] = row[1:count]
    positions = torch.tensor(starts)[:, None] + torch.arange(4)
    taps, last = (torch.randn(len(counts), 4, size, generator=generator) for size in (6, 2))
    texts = [
        [*row[:count].tolist(), int(following[count - 1])]
        for row, following, count in zip(ids, choice, counts, strict=True)
    ]
    there = send_rows(texts, starts, [list(range(count)) for count in counts], ids.device)
    known = kept_traces(counts, KeptRows(ids, choice, positions), TargetStates(taps, last))
    others = kept_traces(counts, there, TargetStates(taps, last))
    for mine, theirs in zip(known, others, strict=True):
        for name, part in vars(theirs).items():
            own = getattr(mine, name)
            assert own is part if part is None else torch.equal(own, part), name


@pytest.mark.parametrize(("paths", "wide"), [([[0, 1], [0]], None), ([[0, 1, 2], [0, 3]], 3)])
def test_only_rows_that_move_need_a_path(paths: list[list[int]], wide: int | None) -> None:
    texts = [[5] * (len(path) + 1) for path in paths]
    there = send_rows(texts, [0] * len(paths), paths, torch.device("cpu")).paths
    assert (None if there is None else there.shape[1]) == wide
