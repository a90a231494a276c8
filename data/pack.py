"""Packing of documents into rows of equal length, and the training/held-out split.

Legend: N rows, T tokens per row.

Best-fit decreasing: documents from the longest to the shortest, each into the row with the least
free space that it fits. With T = 6 and documents of 4, 3, 2, 2 tokens:

    ids        a a a a c c      document   0 0 0 0 2 2      positions  0 1 2 3 0 1
               b b b d d .                 1 1 1 3 3 -1                0 1 2 0 1 0

Every document stays whole, so attention and shifted comparisons need only compare the document
numbers of two columns.
"""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int32
from torch import Tensor

from outrider.data.tokenise import Document

COLUMNS: dict[str, tuple[int, Any]] = {  # padding and type
    "ids": (0, np.int32), "answer": (0, np.bool_), "document": (-1, np.int32),
    "positions": (0, np.int32),
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Packed documents."""

    ids: Int32[Tensor, "N T"]  # 0 where padded
    answer: Bool[Tensor, "N T"]  # the token belongs to an answer
    document: Int32[Tensor, "N T"]  # index of the token's document; -1 where padded
    positions: Int32[Tensor, "N T"]  # from 0 in every document; 0 where padded

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def fill(self) -> float:
        """Return the share of tokens that are not padding, 0..1."""
        return int((self.document >= 0).sum()) / max(1, self.ids.numel())

    @property
    def supervised(self) -> float:
        """Return the share of tokens that belong to an answer, 0..1."""
        return int(self.answer.sum()) / max(1, self.ids.numel())


def pack(documents: Sequence[Document], length: int) -> Rows:
    """Pack whole documents into rows of `length` tokens; ValueError if one is empty or longer.

    Ties go to the earlier document and to the older row.
    """
    for number, document in enumerate(documents):
        if not 1 <= len(document.ids) <= length:
            raise ValueError(f"document {number} has {len(document.ids)} tokens, a row {length}")
    plan = _best_fit([len(document.ids) for document in documents], length)
    shape = (len(plan), length)
    columns = {name: np.full(shape, blank, dtype) for name, (blank, dtype) in COLUMNS.items()}
    for row, numbers in enumerate(plan):
        start = 0
        for number in numbers:
            document = documents[number]
            part = slice(start, start + len(document.ids))
            columns["ids"][row, part] = document.ids
            columns["answer"][row, part] = document.answer
            columns["document"][row, part] = number
            columns["positions"][row, part] = np.arange(len(document.ids))
            start = part.stop
    return Rows(**{name: torch.from_numpy(values) for name, values in columns.items()})


def _best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return the documents of each row, in O(n log n + n * distinct gaps)."""
    rows: list[list[int]] = []
    waiting: dict[int, list[int]] = defaultdict(list)  # gap -> heap of the rows that have it
    gaps: list[int] = []  # the keys of `waiting` that have rows, ascending
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        index = bisect_left(gaps, sizes[number])
        if index == len(gaps):
            row, gap = len(rows), length
            rows.append([])
        else:
            gap = gaps[index]
            row = heappop(waiting[gap])
            if not waiting[gap]:
                gaps.pop(index)
        rows[row].append(number)
        gap -= sizes[number]
        if gap and not waiting[gap]:
            insort(gaps, gap)
        if gap:
            heappush(waiting[gap], row)
    return rows


def split_holdout(
    documents: Sequence[Document], holdout: float
) -> tuple[list[Document], list[Document]]:
    """Return (training, held-out) documents; the side of each depends only on its key.

    sha256 of the key gives a number u in [0, 1); the document is held out iff u < holdout. So a
    conversation stays on its side when others are added or removed, and copies of it are never on
    both sides. Only when a side would be empty, the document nearest to the border changes sides
    (with its copies): two different conversations always give a document on each side.

    Args:
        holdout: expected share, 0 <= holdout < 1; at 0 nothing is held out.
    """
    if not 0 <= holdout < 1:
        raise ValueError(f"holdout={holdout} is not in 0 <= holdout < 1")
    position = {document.key: _uniform(document.key) for document in documents}
    held = {key for key, u in position.items() if u < holdout}
    if holdout and len(position) > 1 and not held:
        held = {min(position, key=lambda key: (position[key], key))}
    elif holdout and len(position) > 1 and len(held) == len(position):
        held.remove(max(position, key=lambda key: (position[key], key)))
    return (
        [document for document in documents if document.key not in held],
        [document for document in documents if document.key in held],
    )


def _uniform(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48
