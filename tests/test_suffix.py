"""The counts of suffix_trie.py against a scan of all texts, and the drafts made of them."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.lookup import Draft
from outrider.models.suffix_trie import END, Place, SuffixTrie

DEPTH = 4
texts = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=4)


def scanned(of: list[list[int]], sequence: tuple[int, ...]) -> Counter[int]:
    """Count what followed a sequence, by looking at every position of every text."""
    size = len(sequence)
    return Counter(
        text[i + size]
        for text in of
        for i in range(len(text) - size)
        if tuple(text[i : i + size]) == sequence
    )


def build(of: list[list[int]]) -> SuffixTrie:
    trie = SuffixTrie(DEPTH)
    for number, text in enumerate(of):
        if number:
            trie.end_text()
        for token in text:
            trie.append(token)
    return trie


def counted(trie: SuffixTrie, sequence: tuple[int, ...]) -> Counter[int]:
    """What the trie counts after a sequence."""
    places: list[Place] = [trie.root]
    for token in sequence:
        places = trie.follow(places, token)
    if len(places) <= len(sequence):
        return Counter()
    node, index = places[-1]
    if node is not None:
        assert node.total == sum(node.counts.values())
        assert node.best == END or node.counts[node.best] == max(node.counts.values())
        return Counter(node.counts)
    following = trie.tokens[index] if index < len(trie.tokens) else END
    return Counter() if following == END else Counter([following])


@given(texts)
def test_counts_equal_a_scan_of_all_texts(of: list[list[int]]) -> None:
    trie = build(of)
    sequences = {
        tuple(text[i : i + size])
        for text in of
        for size in range(DEPTH + 1)
        for i in range(len(text) - size + 1)
    }
    for sequence in sequences:
        assert counted(trie, sequence) == scanned(of, sequence), sequence


@given(texts)
def test_ends_are_the_ends_of_the_text_that_occurred_before(of: list[list[int]]) -> None:
    trie, text = build(of), of[-1]
    for size in range(1, DEPTH + 1):
        before = [t[i : i + size] for t in of for i in range(len(t) - size + 1)]
        repeated = len(text) >= size and before.count(text[-size:]) > 1
        assert (len(trie.ends) > size) == repeated


def chain_of(draft: Draft) -> list[int]:
    out = list[int]()
    while draft:
        ((token, (_, draft)),) = draft.items()
        out.append(token)
    return out


def test_a_path_follows_the_counts() -> None:
    """In "a b c" twice and "a b d" once, "b" follows "a" always, and "c" in two of three cases.

    The path ends after four tokens, the longest sequence that is counted.
    """
    trie = build([[0, 1, 2, 0, 1, 2, 0, 1, 3, 0]])
    candidate = trie.path(trie.ends[1], most=5, least=0.1)
    assert chain_of(candidate.draft)[:2] == [1, 2]
    assert candidate.score == pytest.approx(1 + 3 * 2 / 3)
    assert chain_of(trie.path(trie.ends[1], most=5, least=0.9).draft) == [1]
    assert chain_of(trie.path(trie.ends[1], most=1, least=0.1).draft) == [1]


def test_a_tree_takes_the_most_probable_continuations() -> None:
    trie = build([[0, 1, 2, 0, 1, 2, 0, 1, 3, 0]])
    candidate = trie.tree(trie.ends[1], most=3, least=0.1)
    assert chain_of(candidate.draft) == [1, 2, 0]
    assert candidate.score == pytest.approx(1 + 2 / 3 + 2 / 3)
    ((_, below),) = trie.tree(trie.ends[1], most=6, least=0.1).draft.values()
    assert {token: share for token, (share, _) in below.items()} == {2: 2 / 3, 3: 1 / 3}


def test_memory_is_linear_in_text_without_repetitions() -> None:
    draw = random.Random(0)
    trie = SuffixTrie(64)
    for _ in range(20_000):
        trie.append(draw.randrange(50_000))

    def nodes(place: Place) -> int:
        assert place.node is not None
        return 1 + sum(nodes(p) for p in place.node.longer.values() if p.node is not None)

    assert nodes(trie.root) < 20_000


@given(texts, st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_a_draft_is_the_most_frequent_continuation_by_a_scan(
    of: list[list[int]], context: list[int]
) -> None:
    """Of an end of another text, token by token; every score is a sum of path probabilities."""
    trie, places = build(of), list[Place]()
    places = [trie.root]
    for token in context:
        places = trie.follow(places, token)
    for size in range(1, len(places)):
        candidate = trie.path(places[size], most=3, least=0.0)
        known, p, score = context[len(context) - size :], 1.0, 0.0
        for token in chain_of(candidate.draft):
            counts = scanned(of, tuple(known))
            assert counts[token] == max(counts.values())
            p *= counts[token] / counts.total()
            known, score = [*known, token], score + p
        assert candidate.score == pytest.approx(score)
        everything = trie.tree(places[size], most=1000, least=0.0)
        assert everything.score >= candidate.score - 1e-9
        if size == DEPTH:
            assert set(everything.draft) == set(scanned(of, tuple(context[-size:])))
