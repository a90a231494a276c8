"""Batches: every row once per epoch for all sizes; ranks and accumulation are interchangeable."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.conf.errors import ConfigError
from outrider.data.batches import Batches
from outrider.data.pack import Rows, pack
from outrider.data.tokenise import Document
from outrider.models.interface import Batch

T = 4
sizes = st.integers(1, 12)


def rows(count: int) -> Rows:
    """Row n holds the tokens 4n .. 4n+3, one document each."""
    tokens = torch.arange(count * T).view(count, T).tolist()
    return pack(
        [Document.of(ids, [False, True, True, True], str(n)) for n, ids in enumerate(tokens)], T
    )


def token_rows(batches: list[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.ids.tolist()]


@given(count=sizes, batch=sizes, seed=st.integers(0, 2**40))
@settings(max_examples=40)
def test_every_row_is_seen_once_per_epoch(count: int, batch: int, seed: int) -> None:
    """`count` steps are `batch` epochs; the stream consists of whole permutations."""
    batches = Batches(rows(count), batch, seed)
    stream = list(chain.from_iterable(batches.indices(step).tolist() for step in range(count)))
    assert len(stream) == count * batch
    for epoch in range(batch):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_order_depends_only_on_seed_and_step() -> None:
    """No earlier call is needed or changes the order, so a resumed run reads the same rows."""
    first = Batches(rows(7), 3, seed=5)
    uninterrupted = [first.indices(step).tolist() for step in range(20)]
    torch.manual_seed(1)
    resumed = Batches(rows(7), 3, seed=5)
    assert [resumed.indices(step).tolist() for step in range(19, 9, -1)] == uninterrupted[19:9:-1]


def test_seeds_and_epochs_have_different_orders() -> None:
    """Four of 20! orders coincide with a probability below 1e-17."""
    orders = {
        tuple(Batches(rows(20), 20, seed).indices(epoch).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_changing_the_returned_indices_does_not_change_the_order() -> None:
    batches = Batches(rows(6), 6, seed=0)
    before = batches.indices(0).tolist()
    batches.indices(0).zero_()
    assert batches.indices(0).tolist() == before


@given(world=st.integers(1, 4), accumulation=st.integers(1, 4), size=st.integers(1, 3), count=sizes)
@settings(max_examples=40)
def test_micro_batches_equal_those_of_one_rank_with_accumulation(
    world: int, accumulation: int, size: int, count: int
) -> None:
    batches = Batches(rows(count), world * accumulation * size, seed=3)
    alone = batches.micro(2, rank=0, world=1, accumulation=world * accumulation)
    for rank in range(world):
        own = batches.micro(2, rank, world, accumulation)
        assert len(own) == accumulation
        for a, batch in enumerate(own):
            assert batch.ids.shape == (size, T)
            assert torch.equal(batch.ids, alone[a * world + rank].ids)
    assert token_rows(alone) == rows(count).ids[batches.indices(2)].tolist()


def test_two_ranks_equal_one_rank_with_accumulation_two() -> None:
    batches = Batches(rows(9), 4, seed=0)
    two = batches.micro(1, 0, 2, 1) + batches.micro(1, 1, 2, 1)
    assert token_rows(two) == token_rows(batches.micro(1, 0, 1, 2))


def test_batch_holds_all_columns_of_its_rows() -> None:
    packed = rows(3)
    batches = Batches(packed, 3, seed=1)
    (batch,) = batches.micro(0, rank=0, world=1, accumulation=1)
    order = batches.indices(0)
    assert torch.equal(batch.ids, packed.ids[order].long())
    assert torch.equal(batch.answer, packed.answer[order])
    assert batch.document.tolist() == [[n] * T for n in order.tolist()]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 3
    assert [column.dtype for column in batch] == [torch.int64, torch.bool, torch.int64, torch.int64]


def test_uneven_division_error_names_valid_sizes() -> None:
    """6 rows of 4 tokens for 4 micro-batches: 4 or 8 rows are valid, 16 or 32 tokens."""
    with pytest.raises(ConfigError, match=r"train\.batch_tokens = 24\n(.|\n)*Use 32 or 16\."):
        Batches(rows(9), 6, seed=0).micro(0, rank=0, world=2, accumulation=2)


def test_zero_rows_and_zero_batch_size_raise() -> None:
    with pytest.raises(ValueError, match="0 rows"):
        Batches(rows(0), 1, seed=0)
    with pytest.raises(ValueError, match="batches of 0"):
        Batches(rows(1), 0, seed=0)
