"""Rows that states share, against plain lists; attention to two groups of rows against one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.cache.layer_rows import SPARE_ROWS, GrowingRows, LayerRows
from outrider.models.drafting.layers import attend_rows


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=12))
def test_every_state_keeps_its_own_rows(steps: list[tuple[int, int]]) -> None:
    """Each step appends some rows to one of the states so far; all states are compared."""
    states = [GrowingRows.empty_like(torch.zeros(0, 2))]
    lists: list[list[float]] = [[]]
    number = 0.0
    for chosen, count in steps:
        index = chosen % len(states)
        new = [number + i for i in range(count)]
        number += count
        states.append(states[index].append(torch.tensor([[x, -x] for x in new]).view(count, 2)))
        lists.append([*lists[index], *new])
        for state, expected in zip(states, lists, strict=True):
            assert state.rows[:, 0].tolist() == expected
            assert state.rows[:, 1].tolist() == [-x for x in expected]


def test_the_newest_rows_are_appended_in_place() -> None:
    first = GrowingRows.empty_like(torch.zeros(0, 2)).append(torch.ones(5, 2))
    second = first.append(torch.ones(SPARE_ROWS, 2))
    assert second.rows.data_ptr() == first.rows.data_ptr()
    assert first.append(torch.ones(1, 2)).rows.data_ptr() != first.rows.data_ptr()
    assert second.append(torch.ones(1, 2)).rows.data_ptr() != first.rows.data_ptr()  # full


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_branch_is_attended_to_as_if_it_were_appended(masked: bool, dtype: torch.dtype) -> None:
    """Seven verified rows, five drafted in two steps, three queries; six heads share two."""
    torch.manual_seed(0)
    q = torch.randn(3, 6, 4, dtype=dtype)
    key, value = (torch.randn(12, 2, 4, dtype=dtype) for _ in range(2))
    empty = LayerRows.empty_like(key, value)
    apart = empty.append(key[:7], value[:7])
    apart = apart.append_draft(key[7:9], value[7:9]).append_draft(key[9:], value[9:])
    mask = torch.rand(3, 5) > 0.5 if masked else None
    close = 1e-5 if dtype == torch.float32 else 0.02
    expected = attend_rows(q, empty.append(key, value), mask)
    torch.testing.assert_close(attend_rows(q, apart, mask), expected, atol=close, rtol=close)


def test_verified_rows_replace_a_branch() -> None:
    rows = torch.randn(4, 1, 2)
    start = LayerRows.empty_like(rows, rows).append(rows[:2], rows[:2])
    drafted = start.append_draft(rows[2:], rows[2:])
    after = drafted.append(rows[3:], rows[3:])
    assert after.branch is None
    assert torch.equal(after.keys.rows, rows[[0, 1, 3]])
