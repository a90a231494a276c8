"""The key-value cache: append, keep rows, crop and refuse."""

import pytest
import torch
from torch import Tensor

from outrider.models.kv_cache import KVCache

LAYERS, HEADS, SIZE = 3, 2, 4


def named(rows: list[int], layer: int, kind: int = 0, batch: int = 1) -> Tensor:
    """[B, A, T, C]: every number tells row, layer and kind."""
    row = torch.tensor(rows, dtype=torch.float32)[None, None, :, None]
    return (row + 1000 * layer + 5000 * kind).expand(batch, HEADS, -1, SIZE).clone()


def write(cache: KVCache, rows: list[int], batch: int = 1) -> None:
    """One forward: every layer appends, then the rows are committed; the row is its position."""
    cache.reserve(len(rows))
    for layer in range(LAYERS):
        keys, values = cache.update(
            named(rows, layer, 0, batch), named(rows, layer, 1, batch), layer
        )
        assert keys.shape == values.shape == (batch, HEADS, cache.length + len(rows), SIZE)
        assert torch.equal(keys[:, :, -len(rows) :], named(rows, layer, 0, batch))
    cache.commit(torch.tensor([rows] * batch))


def check(cache: KVCache, rows: list[int], batch: int = 1) -> None:
    assert cache.length == cache.get_seq_length() == len(rows)
    assert cache.positions.tolist() == [rows] * batch
    for layer in range(LAYERS):
        keys, values = cache.rows(layer)
        assert torch.equal(keys, named(rows, layer, 0, batch))
        assert torch.equal(values, named(rows, layer, 1, batch))


def filled(*rows: int, capacity: int = 12) -> KVCache:
    cache = KVCache(capacity)
    write(cache, list(rows))
    return cache


def test_rows_are_appended() -> None:
    cache = KVCache(12)
    for part in ([0, 1, 2], [3], [4, 5]):
        write(cache, part)
    check(cache, [0, 1, 2, 3, 4, 5])
    assert cache.layers_written == len(cache) == LAYERS


def test_every_row_of_a_batch_is_kept() -> None:
    cache = KVCache(4)
    write(cache, [0, 1], batch=3)
    write(cache, [2, 3], batch=3)
    check(cache, [0, 1, 2, 3], batch=3)


@pytest.mark.parametrize(
    ("start", "rows", "left"),
    [
        (3, [3, 5, 7], [0, 1, 2, 3, 5, 7]),  # a path through a tree
        (3, [6], [0, 1, 2, 6]),
        (3, [3, 4, 5], [0, 1, 2, 3, 4, 5]),  # nothing has to move
        (3, [], [0, 1, 2]),
        (0, [2, 6], [2, 6]),
        (3, [4, 5, 6, 7], [0, 1, 2, 4, 5, 6, 7]),  # source and place overlap
    ],
)
def test_keep_rows_moves_rows_after_the_prefix(
    start: int, rows: list[int], left: list[int]
) -> None:
    cache = filled(*range(8))
    cache.keep_rows(start, torch.tensor(rows, dtype=torch.long))
    check(cache, left)
    write(cache, [50, 51])
    check(cache, [*left, 50, 51])


def test_crop_drops_only_later_rows() -> None:
    cache = filled(*range(6))
    cache.crop(6)
    check(cache, [0, 1, 2, 3, 4, 5])
    cache.crop(2)
    write(cache, [7])
    check(cache, [0, 1, 7])
    cache.crop(0)
    check(cache, [])


@pytest.mark.parametrize("length", [-1, 4])
def test_crop_to_a_longer_length_is_refused(length: int) -> None:
    cache = filled(0, 1, 2)
    with pytest.raises(ValueError, match=f"cannot crop 3 rows to {length}"):
        cache.crop(length)
    check(cache, [0, 1, 2])


def test_a_forward_that_does_not_fit_is_refused_before_it_runs() -> None:
    cache = filled(0, 1, 2, capacity=5)
    cache.reserve(2)
    with pytest.raises(ValueError, match="5 rows holds 3; 3 more do not fit"):
        cache.reserve(3)
    check(cache, [0, 1, 2])


def test_nothing_is_allocated_after_the_first_rows() -> None:
    """Appending writes into the same memory: no copy of the prefix."""
    cache = filled(0, 1)
    before = cache.rows(0)[0].data_ptr()
    write(cache, [2, 3])
    cache.keep_rows(2, torch.tensor([3]))
    write(cache, [4])
    check(cache, [0, 1, 3, 4])
    assert cache.rows(0)[0].data_ptr() == before


def test_sizes_for_the_masks_of_transformers() -> None:
    """Between forwards: rows held, and rows held plus rows asked for, without an offset."""
    cache = filled(0, 1, 2)
    assert cache.get_mask_sizes(4) == (7, 0)
    assert (cache.get_query_offset(), cache.get_max_length()) == (3, 12)
