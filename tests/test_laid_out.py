"""Between trees and tensors: what is kept and sliced against what is made anew."""

import pytest
import torch

from outrider.eval.decode.layout import RULER, laid_out, traces_along, traces_known
from outrider.eval.decode.tree import Tree
from outrider.models.target import Seen

EDGES = [0, 1, 2, 17, RULER - 1, RULER, RULER + 1, 2 * RULER, 2 * RULER + 3]


def line(batch: int, guesses: int) -> tuple[Tree, Tree]:
    """One and the same tree, once known to be a chain and once not."""
    ids = torch.arange(batch * (guesses + 1)).view(batch, -1)
    depths = torch.arange(guesses + 1).expand(batch, -1)
    return Tree.chain(ids), Tree.grown(ids, depths - 1, depths, guesses)


@pytest.mark.parametrize("start", EDGES)
@pytest.mark.parametrize("guesses", [0, 1, 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_chain_is_laid_out_like_any_tree(batch: int, guesses: int, start: int) -> None:
    for tree in line(batch, guesses):
        positions, visible = laid_out(tree, [start] * batch)
        columns = torch.arange(start + guesses + 1)
        for i in range(guesses + 1):
            assert positions[:, i].tolist() == [start + i] * batch
            assert torch.equal(visible[:, i], (columns <= start + i).expand(batch, -1))


@pytest.mark.parametrize("counts", [[1], [4], [2, 4, 1]])
@pytest.mark.parametrize("branching", [False, True], ids=["in front", "along a path"])
def test_rows_that_the_device_knows_are_those_of_the_text(
    branching: bool, counts: list[int]
) -> None:
    """A path of four among seven nodes; the target's choices agree with as many as are kept."""
    batch, dice = len(counts), torch.Generator().manual_seed(7)
    ids, choice = torch.randint(100, (2, batch, 7), generator=dice)
    path = torch.tensor([0, 2, 3, 6] if branching else [0, 1, 2, 3]).expand(batch, -1)
    choice[:, path[0, :3]] = ids[:, path[0, 1:]]
    taps, last = (torch.randn(batch, 7, size, generator=dice) for size in (6, 2))
    seen, starts = Seen(taps, last), [9 + slot for slot in range(batch)]
    depths = torch.tensor([0, 1, 1, 2, 2, 2, 3] if branching else list(range(7)))
    positions = torch.tensor(starts)[:, None] + depths
    texts = [
        [*row[path[0, :count]].tolist(), int(following[path[0, count - 1]])]
        for row, following, count in zip(ids, choice, counts, strict=True)
    ]
    where = path if branching else None
    known = traces_known(counts, ids, choice, positions, seen, where)
    for mine, theirs in zip(known, traces_along(texts, starts, seen, where), strict=True):
        for name, part in vars(theirs).items():
            own = getattr(mine, name)
            assert own is part if part is None else torch.equal(own, part), name
