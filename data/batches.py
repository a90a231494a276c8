"""Row indices of each step: a pure function of seed and step, on any number of ranks.

Legend: N rows, T tokens per row, B rows per micro-batch.

Step s takes samples s*b .. s*b+b-1, where b is the rows of a step over
all ranks; sample i is row i mod N of epoch i // N, and every epoch has its own permutation. No
row is dropped or repeated at the end of an epoch, and a resumed run needs only its step.

With N = 5 and b = 2, step 2 takes the last row of epoch 0 and the first of epoch 1:

    sample    0 1 | 2 3 | 4 5 | 6 7 | 8 9
    epoch     0 0 | 0 0 | 0 1 | 1 1 | 1 1
"""

import hashlib
from functools import lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.data.pack import Rows
from outrider.models.interface import Batch


class Batches:
    """Packed training rows in the order of a seed, `batch_rows` per step over all ranks."""

    def __init__(self, rows: Rows, batch_rows: int, seed: int) -> None:
        if len(rows) < 1 or batch_rows < 1:
            raise ValueError(f"{len(rows)} rows in batches of {batch_rows}: both must be positive")
        self.rows, self.batch_rows, self.seed = rows, batch_rows, seed

    def indices(self, step: int) -> Int64[Tensor, " b"]:
        """Return the rows of a step; a step at the end of an epoch continues in the next one."""
        first = step * self.batch_rows
        samples = range(first, first + self.batch_rows)
        total = len(self.rows)
        return torch.stack([permutation(self.seed, i // total, total)[i % total] for i in samples])

    def micro(self, step: int, rank: int, world: int, accumulation: int) -> list[Batch]:
        """Return the `accumulation` micro-batches of one rank in one step.

        The rows of the step are split into world * accumulation equal parts. Micro-batch a of rank
        r is part a*world + r: the one that a single rank accumulating over all parts would take as
        its (a*world + r)-th. With 8 rows, 2 ranks and accumulation 2:

            rows       0 1   2 3   4 5   6 7
            rank       0     1     0     1
            a          0     0     1     1

        Raises:
            ConfigError: the rows of a step do not divide evenly.
        """
        parts, length = world * accumulation, self.rows.length
        if self.batch_rows % parts:
            below = self.batch_rows // parts * parts * length
            raise ConfigError(
                "train.batch_tokens", self.batch_rows * length,
                f"{self.batch_rows} rows of {length} tokens cannot be shared evenly by {world} "
                f"ranks with accumulation {accumulation}.",
                f"Use {below + parts * length}" + (f" or {below}." if below else "."),
            )  # fmt: skip
        parts_of_step = self.indices(step).view(parts, -1)
        return [
            select_rows(self.rows, parts_of_step[a * world + rank]) for a in range(accumulation)
        ]


def select_rows(rows: Rows, index: Int64[Tensor, " B"]) -> Batch:
    """Return the rows with these indices, in this order."""
    columns = rows.ids, rows.document, rows.positions
    ids, document, positions = (column[index].long() for column in columns)
    return Batch(ids, rows.answer[index], document, positions)


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, total: int) -> Int64[Tensor, " N"]:
    """Return the permutation of an epoch, from a generator seeded by seed and epoch."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(total, generator=generator)
