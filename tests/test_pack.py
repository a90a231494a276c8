"""Packing puts every document whole into exactly one row; the split depends on the key."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.data.pack import pack, split_holdout
from outrider.data.tokenise import Document


def document(size: int, name: str = "k", first: int = 1) -> Document:
    """Tokens first, first + 1, ...; every second one is an answer."""
    ids = list(range(first, first + size))
    return Document.of(ids, [token % 2 == 0 for token in ids], name)


def test_the_worked_example_of_the_docstring() -> None:
    rows = pack([document(size, first=10 * n) for n, size in enumerate((4, 3, 2, 2), 1)], 6)
    assert rows.ids.tolist() == [[10, 11, 12, 13, 30, 31], [20, 21, 22, 40, 41, 0]]
    assert rows.document.tolist() == [[0, 0, 0, 0, 2, 2], [1, 1, 1, 3, 3, -1]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 0]]
    true, false = True, False
    assert rows.answer.tolist() == [
        [true, false, true, false, true, false],
        [true, false, true, true, false, false],
    ]
    assert rows.fill == 11 / 12
    assert rows.supervised == 6 / 12


@given(st.lists(st.integers(1, 12), max_size=40))
@settings(max_examples=60)
def test_every_document_is_packed_once_whole_and_in_order(sizes: list[int]) -> None:
    documents = [document(size, first=100 * n) for n, size in enumerate(sizes, 1)]
    rows = pack(documents, 12)
    assert rows.ids.shape == rows.answer.shape == (len(rows), 12)
    for number, source in enumerate(documents):
        inside = rows.document == number
        assert rows.ids[inside].tolist() == source.ids.tolist()
        assert rows.answer[inside].tolist() == source.answer.tolist()
        assert rows.positions[inside].tolist() == list(range(len(source.ids)))
        assert int(inside.any(1).sum()) == 1
    padding = rows.document < 0
    assert int((~padding).sum()) == sum(sizes)
    assert not rows.answer[padding].any()
    assert not rows.ids[padding].any()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40))
@settings(max_examples=60)
def test_no_two_rows_fit_into_one(sizes: list[int]) -> None:
    """Best fit opens a row only when nothing fits, so two rows together overflow one."""
    rows = pack([document(size) for size in sizes], 12)
    used = sorted((rows.document >= 0).sum(1).tolist())
    assert len(used) == 1 or used[0] + used[1] > 12


def test_the_fullest_row_that_fits_is_chosen() -> None:
    """Sizes 6, 5, 3, 2 in rows of 9: the 3 fits both and goes to the 6, the 2 to the 5."""
    rows = pack([document(size) for size in (6, 5, 3, 2)], 9)
    assert [set(row) - {-1} for row in rows.document.tolist()] == [{0, 2}, {1, 3}]


def test_a_document_that_fits_no_row_raises() -> None:
    with pytest.raises(ValueError, match="document 1 has 5 tokens, a row 4"):
        pack([document(4), document(5)], 4)
    with pytest.raises(ValueError, match="document 0 has 0 tokens"):
        pack([document(0)], 4)


def test_no_documents_give_no_rows() -> None:
    assert pack([], 4).ids.shape == (0, 4)


def test_the_split_depends_only_on_the_key() -> None:
    documents = [document(1, str(n)) for n in range(2000)]
    train, held = split_holdout(documents, 0.1)
    held_keys = {one.key for one in held}
    assert [one for one in documents if one.key not in held_keys] == train
    assert {one.key for one in split_holdout(documents[::-1], 0.1)[1]} == held_keys
    some = documents[::2]
    assert {one.key for one in split_holdout(some, 0.1)[1]} == held_keys & {one.key for one in some}


def test_the_held_out_share_is_the_configured_one() -> None:
    """Binomial: 2000 draws at 0.1 have a standard deviation of 13.4; 5 of them are 67."""
    held = split_holdout([document(1, str(n)) for n in range(2000)], 0.1)[1]
    assert abs(len(held) - 200) < 67


def test_copies_of_a_conversation_are_on_the_same_side() -> None:
    documents = [document(1, str(n % 50)) for n in range(200)]
    train, held = split_holdout(documents, 0.3)
    assert not {one.key for one in train} & {one.key for one in held}
    assert len(train) + len(held) == 200


@pytest.mark.parametrize("holdout", [1e-9, 0.05, 0.999999])
def test_two_conversations_give_one_on_each_side(holdout: float) -> None:
    for n in range(20):
        train, held = split_holdout([document(1, f"a{n}"), document(1, f"b{n}")], holdout)
        assert len(train) == len(held) == 1


def test_one_conversation_is_not_split_and_zero_holdout_is_empty() -> None:
    alone = [document(1, "same"), document(2, "same")]
    assert sorted(len(side) for side in split_holdout(alone, 0.05)) == [0, 2]
    many = [document(1, str(n)) for n in range(100)]
    assert split_holdout(many, 0.0) == (many, [])
    with pytest.raises(ValueError, match=r"holdout=1\.0"):
        split_holdout(many, 1.0)
