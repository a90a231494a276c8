"""Which rows a step trains on: a pure function of seed and step, the same for every cluster.

Legend: N rows, T tokens per row, B rows per micro-batch.

Rows are counted through: step s takes samples s*b .. s*b+b-1, where b rows make a step over all
ranks; sample i is row i mod N of epoch i // N, and each epoch is a permutation of its own. No row
is dropped or repeated at an epoch's end, and a resumed run needs to know only its step.

With N = 5 and b = 2, step 2 takes the last row of epoch 0 and the first of epoch 1:

    sample    0 1 | 2 3 | 4 5 | 6 7 | 8 9
    epoch     0 0 | 0 0 | 0 1 | 1 1 | 1 1
"""

import hashlib
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.data.pack import Rows


class Batch(NamedTuple):
    """Rows on their way to the target; the columns of `pack.Rows`, indices as int64."""

    ids: Int64[Tensor, "B T"]
    answer: Bool[Tensor, "B T"]
    document: Int64[Tensor, "B T"]
    positions: Int64[Tensor, "B T"]


class Batches:
    """The training rows in the order of one seed.

    Args:
        rows: packed training documents, at least one row.
        batch_rows: rows per optimizer step, over all ranks and micro-batches.
        seed: of the order; the same seed gives the same order on any number of ranks.

    Raises:
        ValueError: no rows, or batch_rows < 1.
    """

    def __init__(self, rows: Rows, batch_rows: int, seed: int) -> None:
        if len(rows) < 1 or batch_rows < 1:
            raise ValueError(
                f"{len(rows)} rows in batches of {batch_rows}: both must be at least 1"
            )
        self.rows = rows
        self.batch_rows = batch_rows
        self.seed = seed

    def indices(self, step: int) -> Int64[Tensor, " b"]:
        """The rows of step 0, 1, ...; a batch that ends an epoch goes on into the next."""
        first = step * self.batch_rows
        samples = range(first, first + self.batch_rows)
        total = len(self.rows)
        return torch.stack([permutation(self.seed, i // total, total)[i % total] for i in samples])

    def micro(self, step: int, rank: int, world: int, accumulation: int) -> list[Batch]:
        """What one rank trains on in one step: `accumulation` batches of equal size.

        The step's rows are cut into world * accumulation equal pieces. Micro-batch a of rank r is
        piece a*world + r: what one rank alone would take as its (a*world + r)-th micro-batch if
        it accumulated over all pieces. With 8 rows, 2 ranks and accumulation 2:

            rows       0 1   2 3   4 5   6 7
            rank       0     1     0     1
            a          0     0     1     1

        Raises:
            ConfigError: the rows of a step do not divide evenly.
        """
        pieces = world * accumulation
        if self.batch_rows % pieces:
            raise self._uneven(world, accumulation)
        cut = self.indices(step).view(pieces, -1)
        return [gather(self.rows, cut[a * world + rank]) for a in range(accumulation)]

    def _uneven(self, world: int, accumulation: int) -> ConfigError:
        length, pieces = self.rows.length, world * accumulation
        below = self.batch_rows // pieces * pieces * length
        above = below + pieces * length
        return ConfigError(
            "train.batch_tokens",
            self.batch_rows * length,
            f"{self.batch_rows} rows of {length} tokens cannot be shared evenly by {world} ranks"
            f" with accumulation {accumulation}.",
            f"Use {above}" + (f" or {below}." if below else "."),
        )


def gather(rows: Rows, index: Int64[Tensor, " B"]) -> Batch:
    """The rows with these numbers, in this order."""
    ids, document, positions = (
        column[index].long() for column in (rows.ids, rows.document, rows.positions)
    )
    return Batch(ids, rows.answer[index], document, positions)


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, total: int) -> Int64[Tensor, " N"]:
    """The order of an epoch, from a generator of its own: neither steps nor ranks disturb it."""
    mixed = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))
    return torch.randperm(total, generator=generator)
