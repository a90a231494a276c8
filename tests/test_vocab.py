"""The draft vocabulary: selection of tokens, and the maps between ids."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.drafting.vocab import DraftVocab


def draft_ids(counts: list[int], size: int) -> list[int]:
    return [int(token) for token in DraftVocab.from_counts(torch.tensor(counts), size).target_ids]


def test_the_most_frequent_tokens_are_selected_in_id_order() -> None:
    assert draft_ids([5, 0, 9, 1, 7], 3) == [0, 2, 4]


def test_ties_go_to_the_lower_id() -> None:
    assert draft_ids([1, 3, 1, 3, 3, 1], 2) == [1, 3]
    assert draft_ids([1, 3, 1, 3, 3, 1], 4) == [0, 1, 3, 4]


def test_unseen_tokens_fill_the_rest_from_the_lowest_id() -> None:
    assert draft_ids([0, 0, 0, 6, 0, 2], 4) == [0, 1, 3, 5]


def test_ties_among_many_are_stable() -> None:
    """More tokens than a sort handles in one insertion run; all counts equal."""
    assert draft_ids([4] * 5000, 1000) == list(range(1000))


@pytest.mark.parametrize("size", [3, 4, 100])
def test_a_size_of_all_tokens_keeps_all(size: int) -> None:
    vocab = DraftVocab.from_counts(torch.tensor([0, 2, 1]), size)
    assert vocab.is_full
    assert (len(vocab), vocab.d2t.tolist(), vocab.t2d.tolist()) == (3, [0, 0, 0], [True] * 3)


def test_the_maps_have_the_layout_that_engines_read() -> None:
    """d2t is an offset: target id minus draft id; t2d is a mask over the target's tokens."""
    vocab = DraftVocab(torch.tensor([1, 2, 5]), 7)
    assert vocab.d2t.tolist() == [1, 1, 3]
    assert vocab.t2d.tolist() == [False, True, True, False, False, True, False]
    assert (vocab.d2t.dtype, vocab.t2d.dtype) == (torch.int64, torch.bool)
    assert sorted(vocab.state_dict()) == ["d2t", "t2d"]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.data())
def test_the_maps_are_inverse_to_each_other(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    vocab = DraftVocab.from_counts(torch.tensor(counts), size)
    vocab.validate()
    draft = torch.arange(size)
    assert len(vocab) == int(vocab.t2d.sum()) == size
    assert bool(vocab.t2d[vocab.to_target(draft)].all())
    assert torch.equal(vocab.to_target(draft), vocab.target_ids)
    worst = min(counts[int(token)] for token in vocab.target_ids)
    left = [count for token, count in enumerate(counts) if not vocab.t2d[token]]
    assert not left or worst >= max(left)


def test_rows_expand_to_the_target_with_zeros_elsewhere() -> None:
    vocab = DraftVocab(torch.tensor([1, 3]), 5)
    rows = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert vocab.expand(rows).tolist() == [[0, 0.25, 0, 0.75, 0], [0, 1, 0, 0, 0]]
    whole = DraftVocab.identity(2)
    assert torch.equal(whole.expand(rows), rows)


def test_coverage_is_the_share_of_counted_tokens_that_can_be_proposed() -> None:
    vocab = DraftVocab(torch.tensor([0, 2]), 4)
    assert vocab.coverage(torch.tensor([3, 1, 2, 2])) == 5 / 8
    assert vocab.coverage(torch.zeros(4).long()) == 0.0


@pytest.mark.parametrize(
    "ids", [[], [2, 1], [1, 1], [-1, 2], [0, 4]], ids=["none", "falls", "repeats", "below", "above"]
)
def test_ids_that_are_no_ascending_set_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ascend without repeats in 0\.\.3"):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), 4)


def test_maps_load_from_a_state_dict() -> None:
    saved = DraftVocab(torch.tensor([1, 2, 5]), 7).state_dict()
    vocab = DraftVocab(torch.tensor([0, 1, 2]), 7)
    vocab.load_state_dict(saved)
    assert vocab.target_ids.tolist() == [1, 2, 5]
    whole = DraftVocab(torch.tensor([0, 1]), 2)
    assert whole.is_full


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("d2t", [1, 1, 4]),  # names a token that t2d does not
        ("d2t", [1, 2, 3]),
        ("d2t", [1, 0, 3]),  # repeats a token
        ("d2t", [2, 0, 3]),  # descends, the same set
        ("d2t", [1, 1, 300]),  # out of range
        ("t2d", [True, True, True, False, False, True, False]),  # one too many
        ("t2d", [False, True, False, False, False, True, False]),  # one missing
    ],
)
def test_damaged_maps_are_refused_on_load(name: str, damaged: list[int]) -> None:
    vocab = DraftVocab(torch.tensor([1, 2, 5]), 7)
    saved = vocab.state_dict()
    saved[name] = torch.tensor(damaged)
    with pytest.raises(ValueError, match="d2t and t2d disagree"):
        DraftVocab(torch.tensor([0, 1, 2]), 7).load_state_dict(saved)
