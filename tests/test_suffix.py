"""The counts of suffix_trie.py against a scan of all texts, and drafts against a full trie's."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Request
from outrider.models.decode.rules.rule_table import bind_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.drafters.suffix import Suffix
from outrider.models.drafting.lookup import Draft
from outrider.models.drafting.suffix_trie import (
    END,
    Appended,
    Candidate,
    Node,
    Place,
    Share,
    SuffixTrie,
)
from tests import tiny

DEPTH, TARGET = 4, tiny.target()
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
    node, index, length = places[-1]
    assert length == len(sequence)
    if node is not None:
        assert node.total == sum(node.counts.values())
        assert node.best == END or node.counts[node.best] == max(node.counts.values())
        return Counter(node.counts)
    following = trie._at(index)
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


def contents(place: Place) -> Any:
    """Return all that the trie holds below a place, in order."""
    if place.node is None:
        return place.at
    node = place.node
    longer = {token: contents(below) for token, below in node.longer.items()}
    return node.total, [*node.counts.items()], node.best, longer


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=30))
def test_undone_appends_leave_nothing(steps: list[tuple[int, int]]) -> None:
    """Equal to a trie of the text alone after each step: some tokens removed, one added."""
    trie, appended = SuffixTrie(DEPTH), list[Appended]()
    for removed, token in steps:
        for _ in range(min(removed, len(appended))):
            trie.undo(appended.pop())
        appended.append(trie.append(token))
        fresh = build([trie.tokens])
        assert contents(trie.root) == contents(fresh.root)
        assert [*map(contents, trie.ends)] == [*map(contents, fresh.ends)]


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


# ---- whole drafts against an uncompressed trie ----


@dataclass
class Full:
    """A node for every sequence that occurred, with the tokens that followed it, in order."""

    followers: list[int] = field(default_factory=list)
    children: dict[int, "Full"] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: list[list[int]]) -> "Full":
        """Insert every text by its tokens: every sequence that ends before one is followed by it.

        No length is limited: quadratic time and memory.
        """
        root = cls()
        for text in texts:
            for stop in range(1, len(text) + 1):
                for start in range(stop):
                    node = root
                    for token in text[start : stop - 1]:
                        node = node.children[token]
                    node.followers.append(text[stop - 1])
                    node.children.setdefault(text[stop - 1], cls())
        return root

    def find(self, sequence: list[int]) -> "Full | None":
        node: Full | None = self
        for token in sequence:
            node = None if node is None else node.children.get(token)
        return node

    def best(self) -> int:
        """The most frequent follower; of several the one that was first to be so frequent."""
        counts = Counter[int]()
        best = self.followers[0]
        for token in self.followers:
            counts[token] += 1
            best = token if counts[token] > counts[best] else best
        return best

    def share(self, token: int) -> Fraction:
        return Fraction(self.followers.count(token), len(self.followers))

    def path(self, most: int, least: Fraction) -> tuple[Fraction, list[int]]:
        node, p, score, out = self, Fraction(1), Fraction(), list[int]()
        while node.followers and len(out) < most:
            token = node.best()
            p *= node.share(token)
            if p < least:
                break
            score, node = score + p, node.children[token]
            out.append(token)
        return score, out

    def tree(self, depth: int, p: Fraction = Fraction(1)) -> Iterator[Fraction]:
        """The probability of every continuation of at most `depth` tokens."""
        for token in set(self.followers) if depth else ():
            yield p * self.share(token)
            yield from self.children[token].tree(depth - 1, p * self.share(token))


def full_draft(
    own: list[int], earlier: list[list[int]], longest: int, depths: int, factor: float,
    least: Fraction, tree: bool,
) -> tuple[Fraction, list[int]]:  # fmt: skip
    """The best draft by its definition: every end of the text, the longest first; own text first.

    A sequence of at most `longest` tokens is followed by a token. Of a tree only the score is
    returned.
    """
    best = Fraction(), list[int]()
    for trie in (Full.of([own]), Full.of(earlier)):
        for length in range(min(len(own), longest), 0, -1):
            node = trie.find(own[len(own) - length :])
            most = min(depths, int(factor * length))
            if node is None:
                continue
            if tree:
                every = node.tree(longest + 1 - length)
                probable = sorted((p for p in every if p >= least), reverse=True)
                candidate = sum(probable[:most], Fraction()), list[int]()
            else:
                candidate = node.path(min(most, longest + 1 - length), least)
            best = candidate if candidate[0] > best[0] else best
    return best


def probabilities(draft: Draft, p: float = 1.0) -> Iterator[float]:
    for share, below in draft.values():
        yield p * share
        yield from probabilities(below, p * share)


def suffix(**changes: Any) -> Suffix:
    size = {"draft_vocab_size": None, "depths": 16, **changes}
    drafter = tiny.drafter("suffix", TARGET, tiny.vocab(tiny.VOCAB), **size)
    assert isinstance(drafter, Suffix)
    return drafter


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
    st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=3),
    st.sampled_from([2, 6]),
    st.sampled_from([1.0, 2.5]),
    st.sampled_from(["0", "0.1", "0.4"]),
    st.sampled_from([2, 4, 64]),
)
def test_whole_drafts_equal_those_of_an_uncompressed_trie(
    own: list[int], earlier: list[list[int]], depths: int, factor: float, least: str, longest: int
) -> None:
    """Of a request, by its own text and earlier answers; as a path and as a tree.

    A path has the same tokens, ties included; a tree the same score, which ties do not change. The
    uncompressed trie computes with fractions.
    """
    for tree in (False, True):
        settings = {"depths": depths, "factor": factor, "least": float(least), "longest": longest}
        drafter = suffix(**settings, tree=tree)
        for answer in earlier:
            drafter.add_answer(answer)
        index = drafter.new_index()
        for token in own:
            index.append(token)
        draft = drafter.look_up(index)
        score, tokens = full_draft(own, earlier, longest, depths, factor, Fraction(least), tree)
        if tree:
            assert sum(probabilities(draft)) == pytest.approx(float(score))
        else:
            assert chain_of(draft) == tokens


def drafted(own: list[int], earlier: list[int], **changes: Any) -> list[int]:
    drafter = suffix(**changes)
    drafter.add_answer(earlier)
    index = drafter.new_index()
    for token in own:
        index.append(token)
    return chain_of(drafter.look_up(index))


def test_ties_go_to_the_own_text_whatever_the_rounding() -> None:
    """Both expect 2 tokens: 2/3 + 2/3 + 1/3 + 1/3, which floats sum to less, and 4 times 1/2."""
    own, earlier = [3, 0, 3, 3, 0, 3, 0, 3, 0, 3, 1, 2, 3], [3, 3, 1, 2, 2, 0, 1, 1, 0, 0]
    p = 4 / 6
    assert p + p + p * 0.5 + p * 0.5 < 2
    assert drafted(own, earlier, factor=4.0, least=0.0, depths=8) == [0, 3, 0, 3]


def test_scores_are_compared_exactly() -> None:
    sixths = tuple(Share(-1, 1, 6) for _ in range(6))
    nearly = Candidate(sum([1 / 6] * 6), {}, sixths)
    whole = Candidate(1.0, {}, (Share(-1, 1, 1),))
    assert nearly.score < whole.score
    assert not whole.exceeds(nearly)
    assert nearly.reaches(1)
    small = Candidate(1.0, {}, (Share(-1, 10**12 - 1, 10**12),))
    assert whole.exceeds(small)
    assert not small.reaches(1)


def test_a_probability_of_least_is_enough_whatever_the_rounding() -> None:
    """10 of 15 and 6 of 10 are 0.4, which floats multiply to less."""
    assert 10 / 15 * (6 / 10) < 0.4
    trie = build([*[[0, 1, 2]] * 6, *[[0, 1, 3]] * 4, *[[0, 4]] * 5])
    place = _place(trie, (0,))
    assert chain_of(trie.path(place, most=9, least=0.4).draft) == [1, 2]
    assert [len(trie.tree(place, most=9, least=p).shares) for p in (0.4, 0.41)] == [2, 1]


@pytest.mark.parametrize("times", [1, 2])
def test_sequences_end_at_the_longest_however_often_they_occurred(times: int) -> None:
    """Of 4 tokens and the one behind them: 3 matched ones are followed by 2."""
    text = [7, 1, 2, 3, 4, 5, 6, 8]
    own = [0, 1, 2, 3]
    drafter = suffix(longest=4, factor=9.0)
    for _ in range(times):
        drafter.add_answer(text)
    index = drafter.new_index()
    for token in own:
        index.append(token)
    places = index.places
    assert chain_of(drafter.earlier.path(places[3], most=9, least=0.0).draft) == [4, 5]
    assert chain_of(drafter.earlier.tree(places[3], most=9, least=0.0).draft) == [4, 5]
    assert chain_of(drafter.look_up(index)) == [4, 5, 6, 8], "after the match of one token"


# ---- operations ----


def test_a_token_takes_one_operation_for_each_counted_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text of one token, whose ends all occurred before: depth + 1 counts each, however long."""
    counts, count = [0], Node.count

    def counted(node: Node, token: int) -> None:
        counts[-1] += 1
        count(node, token)

    monkeypatch.setattr(Node, "count", counted)
    trie = SuffixTrie(8)
    for _ in range(500):
        counts.append(0)
        trie.append(7)
    assert max(counts) <= 8 + 2  # and one for a sequence that gets a node
    assert counts[400:] == [9] * 101


# ---- forgotten answers ----


@given(texts, st.lists(st.integers(0, 2), max_size=14), st.integers(0, 4))
def test_forgotten_texts_are_not_counted(
    of: list[list[int]], later: list[int], forgotten: int
) -> None:
    """Counts, ends and drafts are those of the texts that are left, also while one grows."""
    trie = SuffixTrie(DEPTH)
    for text in of:
        for token in text:
            trie.append(token)
        trie.end_text()
    for number in range(min(forgotten, len(of))):
        trie.remove_oldest()
        assert list(trie.texts()) == of[number + 1 :]
    for token in later:
        trie.append(token)
    left = [*of[forgotten:], later]
    sequences = {
        tuple(text[i : i + size])
        for text in [*of, later]
        for size in range(DEPTH + 1)
        for i in range(len(text) - size + 1)
    }
    for sequence in sequences:
        assert counted(trie, sequence) == scanned(left, sequence), sequence
        if sequence and len(sequence) <= DEPTH and scanned(left, sequence):
            place = _place(trie, sequence)
            score, _ = Full.of(left).find(list(sequence)).path(1, Fraction())  # type: ignore[union-attr]
            assert trie.path(place, most=1, least=0.0).score == pytest.approx(score)


def _place(trie: SuffixTrie, sequence: tuple[int, ...]) -> Place:
    places = [trie.root]
    for token in sequence:
        places = trie.follow(places, token)
    return places[-1]


def test_memory_of_forgotten_texts_is_freed() -> None:
    draw = random.Random(0)
    trie = SuffixTrie(8)
    for number in range(400):
        for _ in range(50):
            trie.append(draw.randrange(40))
        trie.end_text()
        if number >= 10:
            trie.remove_oldest()
    assert len(trie.tokens) <= 2 * 51 * 11
    assert trie.root.node is not None
    assert trie.root.node.total == 10 * 50


def test_the_newest_answers_are_kept() -> None:
    drafter = suffix(most_answers=2)
    for answer in ([1, 2, 3], [1, 2, 4], [], [1, 2, 5]):
        drafter.add_answer(answer)
    assert list(drafter.earlier.texts()) == [[], [1, 2, 5]]
    index = drafter.new_index()
    for token in (9, 1, 2):
        index.append(token)
    assert chain_of(drafter.look_up(index)) == [5]


def test_an_answer_that_is_forgotten_while_another_request_follows_it() -> None:
    """Its places stay valid: what is drafted after it is a draft, or nothing."""
    drafter = suffix(most_answers=1, factor=4.0)
    drafter.add_answer([1, 2, 3, 4, 5, 6])
    index = drafter.new_index()
    for token in (1, 2, 3):
        index.append(token)
    assert chain_of(drafter.look_up(index)) == [4, 5, 6]
    for answer in ([7, 8], [9, 10, 11, 12, 13, 14, 15]):
        drafter.add_answer(answer)
    assert chain_of(drafter.look_up(index)) in ([], [4, 5, 6])
    index.append(4)
    assert chain_of(drafter.look_up(index)) in ([], [5, 6])


def answers(case: str, order: list[int]) -> dict[int, list[int]]:
    """Decode requests one after the other with a drafter that learns; return answers by number."""
    sampling, rule = Sampling(0.0 if case == "greedy" else 0.3), None
    draft = {"greedy": "best", "sampled": "drawn", "coupled": "coupled"}[case]
    if case == "coupled":
        rule = bind_rule("coupled", draft)
    prompts = [[5, 9, 7, 5], [9, 7, 5, 9], [7, 5, 9, 7], [5, 9, 7, 5]]
    requests = [Request(prompts[number], 24, number) for number in order]
    engine = Engine(
        TARGET, suffix(learn=True, factor=4.0), Chain(4, draft), sampling=sampling, rule=rule
    )
    outputs = engine.generate_all(requests, 1)
    return {number: out.ids for number, out in zip(order, outputs, strict=True)}


@pytest.mark.parametrize("case", ["greedy", "coupled", "sampled"])
def test_what_is_learned_changes_sampled_answers_of_a_seed_alone(case: str) -> None:
    """The other requests come first, or not at all."""
    order = [0, 1, 2, 3]
    together = answers(case, order)
    alone = {number: answers(case, [number])[number] for number in order}
    assert together[0] == alone[0]
    assert (together == alone) == (case != "sampled")
