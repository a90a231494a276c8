"""The window and the n-gram pool of lookahead decoding, as immutable values.

The window holds draft tokens after the newest token, the root, in n - 1 levels: level l + 1 was
chosen by the target after level l (Jacobi iteration). The token of level l in column i has the
position of the root + l + i, and the root itself is column 0 of level 0.

Worked example, n = 4 and a full window of width 3, with the root r:

    column      0  1  2        d attends to the prefix, r, a, d
    level 0     r  a  b        g attends to the prefix, r, a, d, g
    level 1     c  d  e        h attends to the prefix, r, a, b, e, h
    level 2     f  g  h

If the target's argmax after f, g, h is x, y, z, the n-grams r c f x, a d g y and b e h z are added
to the pool, and the next levels are [. d e], [f g h], [x y z], with the next root in column 0.

Shape letters: B prompts, M window rows, C columns of a level, R rows of a forward, H hidden size.

Source: Fu et al. 2024, "Lookahead decoding", sections 3.1 and 3.2, arXiv:2402.02057.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.models.drafting.drafter import TargetInput
from outrider.models.drafting.lookup import Draft

NGram: TypeAlias = tuple[int, ...]
Pool: TypeAlias = Mapping[int, tuple[NGram, ...]]  # token -> what followed it, oldest first


class Window(NamedTuple):
    """The levels of the window; level 0 without the root, all others from column 0 on."""

    levels: tuple[tuple[int, ...], ...]

    @classmethod
    def start(cls, prompt: Sequence[int], n: int, width: int, seed: int) -> "Window":
        """Return level 0, of random tokens of the prompt: a column more for each missing level."""
        draw = Random(seed)
        return cls((tuple(draw.choice(prompt) for _ in range(width + n - 3)),))

    def is_full(self, n: int) -> bool:
        return len(self.levels) == n - 1

    @property
    def columns(self) -> int:
        """Number of columns, the root's included."""
        return len(self.levels[0]) + 1

    def ngrams(self, root: int, chosen: Sequence[int]) -> list[NGram]:
        """Return the n-gram of every column of a full window.

        Args:
            chosen: the target's argmax after each token of the last level.
        """
        return list(zip((root, *self.levels[0]), *self.levels[1:], chosen, strict=True))

    def advance(self, chosen: Sequence[int], n: int) -> "Window":
        """Return the window one position further, with the tokens chosen after its last level.

        A full window drops level 0; one that is not yet full gains a level and loses a column.
        """
        if self.is_full(n):
            first, *others = (*self.levels[1:], tuple(chosen))
            return Window((first[1:], *others))
        return Window((*(level[1:] for level in self.levels), tuple(chosen[1:])))


def most_rows(n: int, width: int) -> int:
    """Return the largest number of tokens that a window holds, the root not counted."""
    return max((k + 1) * (width + n - 2 - k) - 1 for k in range(n - 1))


# ---- the pool ----


def add_ngrams(pool: Pool, ngrams: Iterable[NGram], most: int) -> Pool:
    """Return the pool with these n-grams; of each first token it keeps the `most` newest.

    One that is added again becomes the newest.
    """
    new = dict(pool)
    for first, *following in ngrams:
        guess = tuple(following)
        others = (one for one in new.get(first, ()) if one != guess)
        new[first] = (*others, guess)[-most:]
    return new


def merge_guesses(guesses: Sequence[NGram]) -> Draft:
    """Merge the n-grams after a token, oldest first, into a draft.

    The latest has a share of 1, the one before it 1/2, then 1/4 and so on; the probability of a
    token is its share of those that continue the same tokens. So a chain of the most probable
    tokens is the latest n-gram, and a tree adds the others, newer ones first.
    """
    return _merge([(0.5**age, guess) for age, guess in enumerate(reversed(guesses))])


def _merge(weighted: Sequence[tuple[float, NGram]]) -> Draft:
    total, groups = sum(weight for weight, _ in weighted), dict[int, list[tuple[float, NGram]]]()
    for weight, guess in weighted:
        if guess:
            groups.setdefault(guess[0], []).append((weight, guess[1:]))
    return {
        token: (sum(weight for weight, _ in group) / total, _merge(group))
        for token, group in groups.items()
    }


# ---- rows of the target's forward ----


class WindowRows(NamedTuple):
    """The tokens of a batch of windows, level by level, without roots; short ones are padded.

    Attributes:
        offsets: positions, counted from the root's; 0 for padding.
        visible: which rows a row attends to, besides the prefix and the root; padding: itself.
        newest: rows of the last level, of 1..M, and 0 for the root and for padding.
    """

    ids: Int[Tensor, "B M"]
    offsets: Int[Tensor, "B M"]
    visible: Bool[Tensor, "B M M"]
    newest: Int[Tensor, "B C"]

    @classmethod
    def of(cls, windows: Sequence[Window], device: torch.device) -> "WindowRows":
        ids = [torch.tensor(sum(one.levels, ()), dtype=torch.long) for one in windows]
        layouts = [_layout(len(one.levels), one.columns) for one in windows]
        offsets, masks, newest = map(list, zip(*layouts, strict=True))
        size = max(map(len, ids))
        visible = [F.pad(mask, (0, size - len(mask)) * 2) for mask in masks]
        parts = (
            pad_sequence(ids, batch_first=True),
            pad_sequence(offsets, batch_first=True),
            torch.stack(visible) | torch.eye(size, dtype=torch.bool),
            pad_sequence(newest, batch_first=True),
        )
        return cls(*(part.to(device) for part in parts))

    def after(self, new: TargetInput, prefix: Sequence[int], last: int) -> TargetInput:
        """Return the target's input with these rows after those of the trees.

        A row attends to what the root attends to and to its own rows. No tree node attends to it.

        Args:
            prefix: rows of each prompt in the cache, before this forward.
            last: the target's last position, which rows beyond it take.
        """
        nodes, size = new.ids.shape[1], self.ids.shape[1]
        trees = F.pad(new.visible, (0, size))
        starts = torch.tensor(prefix, device=trees.device)[:, None] + nodes
        columns = (starts + torch.arange(size, device=trees.device))[:, None]
        windows = trees[:, :1].repeat(1, size, 1)
        windows = windows.scatter(2, columns.expand_as(self.visible), self.visible)
        positions = (new.positions[:, :1] + self.offsets).clamp(max=last)
        return TargetInput(
            torch.cat([new.ids, self.ids], dim=1),
            torch.cat([new.positions, positions], dim=1),
            torch.cat([trees, windows], dim=1),
        )

    def newest_states(self, states: Float[Tensor, "B R H"], nodes: int) -> Float[Tensor, "B C H"]:
        """Return the states of the last level, of a forward of `nodes` tree nodes and these."""
        rows = torch.where(self.newest > 0, self.newest + nodes - 1, 0)
        return states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # shared by all callers
def _layout(
    levels: int, columns: int
) -> tuple[Int[Tensor, " M"], Bool[Tensor, "M M"], Int[Tensor, " C"]]:
    """Return offsets, mask and newest rows of a window (see `WindowRows`)."""
    level = torch.arange(levels).repeat_interleave(columns)
    column = torch.arange(columns).repeat(levels)
    in_level_0 = (level == 0) & (column <= column[:, None])
    above = (level >= 1) & (level <= level[:, None]) & (column == column[:, None])
    newest = torch.arange(columns) + (levels - 1) * columns
    return (level + column)[1:], (in_level_0 | above)[1:, 1:], newest  # without the root's row
