"""Counts of the token sequences of some texts, up to a length, without a node for each of them.

A sequence that occurred several times has a node, which counts what followed it. One that occurred
once needs none: the index of the text behind it is enough. It becomes a node when it occurs again,
and remains one when the oldest text is removed.
The text "a b a c" as an example, with an index written as -> i:

    "" (4) --- a (2) --- b (1) -> 2        "a b" occurred once, and text[2:] followed
            |         `- c (1) -> 4
            |- b (1) -> 2
            `- c (1) -> 4

`append` adds a token in at most `depth` + 1 operations: one for each end of the text that occurred
before. `remove_oldest` takes at most `depth` + 1 operations for each token of the oldest text.

Source: SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975, sections 4.1 and 4.2.
Differs: indices into the text instead of compressed paths, with the same counts; the end of the
text, which nothing follows yet, does not lower the probability of what followed earlier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from outrider.models.drafting.lookup import Draft

END = -1  # behind every text
ROUNDING = 1e-8  # more than the rounding error of a score


@dataclass(slots=True, eq=False)
class Node:
    """A sequence that occurred several times.

    Attributes:
        total: how many tokens followed it so far.
        counts: how often each token followed.
        longer: the sequence with each such token behind it: its node, or an index of the text.
    """

    total: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    longer: dict[int, "Place"] = field(default_factory=dict)
    _best: int | None = END  # None: not known since a token was removed

    def count(self, token: int) -> None:
        self.total += 1
        new = self.counts[token] = self.counts.get(token, 0) + 1
        if self._best == END or (self._best is not None and new > self.counts[self._best]):
            self._best = token

    def remove(self, token: int) -> bool:
        """Count a token once less; return whether it still follows."""
        self.total -= 1
        self.counts[token] -= 1
        if token == self._best:
            self._best = None
        if self.counts[token]:
            return True
        del self.counts[token]
        self.longer.pop(token, None)
        return False

    def undo_count(self, token: int, best: int | None, place: "Place | None") -> None:
        """Undo `count`.

        Args:
            best: `_best` before.
            place: of the sequence with the token behind it, before; None: there was none.
        """
        if self.remove(token) and place is not None:
            self.longer[token] = place
        self._best = best

    @property
    def best(self) -> int:
        """The token that followed most often; END before there is one."""
        if self._best is None:
            self._best = max(self.counts, key=self.counts.__getitem__, default=END)
        return self._best


class Place(NamedTuple):
    """A sequence that occurred.

    Attributes:
        node: of the sequence; None: it occurred once.
        at: the index of the text that follows it, if it occurred once.
        length: its tokens.
    """

    node: Node | None
    at: int = 0
    length: int = 0


class Appended(NamedTuple):
    """What undoes an `append`: the ends before it and, of each, its best token and longer place."""

    ends: list[Place]
    before: list[tuple[int | None, Place | None]]


class Share(NamedTuple):
    """How often a drafted token followed those before it.

    Attributes:
        before: the drafted token before it, by its number; -1 for none.
        times, total: how often it followed, of all tokens that did.
    """

    before: int
    times: int
    total: int


@dataclass(frozen=True)
class Candidate:
    """A draft and the expected number of its tokens that are accepted, by the counts.

    Attributes:
        score: this number, rounded.
        shares: of every drafted token; those of the tokens before it precede it.
    """

    score: float = 0.0
    draft: Draft = field(default_factory=dict)
    shares: tuple[Share, ...] = ()

    @cached_property
    def exact_score(self) -> Fraction:
        paths = list[Fraction]()
        for before, times, total in self.shares:
            share = Fraction(times, total)
            paths.append(share if before < 0 else paths[before] * share)
        return sum(paths, Fraction())

    def exceeds(self, other: "Candidate") -> bool:
        """Return whether its score is higher, exactly."""
        difference = self.score - other.score
        if abs(difference) > ROUNDING:
            return difference > 0
        return self.exact_score > other.exact_score

    def reaches(self, score: int) -> bool:
        """Return whether its score is at least this, exactly."""
        difference = self.score - score
        if abs(difference) > ROUNDING:
            return difference > 0
        return self.exact_score >= score


class SuffixTrie:
    """Counts of the sequences of some texts, of which the last may grow.

    Indices count the tokens of removed texts, too.

    Attributes:
        tokens: the texts, END behind all but the last. Removed ones may precede them.
        ends: places of the last 0, 1, 2, .. tokens of the last text, as far as they have nodes.
    """

    def __init__(self, depth: int) -> None:
        """Sequences of up to `depth` tokens are counted, each with the token behind it."""
        self.depth, self.tokens = depth, list[int]()
        self._offset, self._first = 0, 0  # of `tokens`; where the oldest text begins in it
        self.root = Place(Node())
        self.ends = [self.root]

    def append(self, token: int) -> Appended:
        """Add a token to the last text; return what undoes it."""
        self.tokens.append(token)
        ends, appended = [self.root], Appended(self.ends, [])
        for length, (node, *_) in enumerate(self.ends, start=1):
            assert node is not None, "ends have nodes"
            place = node.longer.get(token)
            appended.before.append((node._best, place))
            node.count(token)
            if length > self.depth:
                break
            if place is None:
                node.longer[token] = Place(None, self._offset + len(self.tokens), length)
            else:
                if place.node is None:
                    place = node.longer[token] = self._node_of(place.at, length)
                ends.append(place)
        self.ends = ends
        return appended

    def undo(self, appended: Appended) -> None:
        """Undo the last `append`."""
        token, self.ends = self.tokens.pop(), appended.ends
        for (node, *_), (best, place) in zip(self.ends, appended.before, strict=True):
            assert node is not None, "ends have nodes"
            node.undo_count(token, best, place)

    def _node_of(self, index: int, length: int) -> Place:
        """Return a node for a sequence that occurred once, before this index of the text."""
        node, following = Node(), self._at(index)
        if following != END:
            node.count(following)
            if length < self.depth:
                node.longer[following] = Place(None, index + 1, length + 1)
        return Place(node, length=length)

    def end_text(self) -> None:
        """End the last text; the next token begins another one."""
        self.tokens.append(END)
        self.ends = [self.root]

    def texts(self) -> Iterator[list[int]]:
        """Yield the texts that have ended, the oldest first."""
        text = list[int]()
        for token in self.tokens[self._first :]:
            if token == END:
                yield text
                text = []
            else:
                text.append(token)

    def remove_oldest(self) -> None:
        """Remove the counts of the oldest text, which has ended."""
        stop = self.tokens.index(END, self._first)
        for start in range(self._first, stop):
            node = self.root.node
            for token in self.tokens[start : min(stop, start + self.depth + 1)]:
                assert node is not None, "a sequence that occurs elsewhere, too, has a node"
                if not node.remove(token):
                    break
                node = node.longer.get(token, self.root).node
        self._first = stop + 1
        if 2 * self._first > len(self.tokens):  # seldom, as this moves all later tokens
            del self.tokens[: self._first]
            self._offset, self._first = self._offset + self._first, 0

    def follow(self, places: Sequence[Place], token: int) -> list[Place]:
        """Return the places of the last 0, 1, 2, .. tokens of a text after one more token.

        Args:
            places: those before it: the text may be another than those of the trie.
        """
        longer = (self._longer(place, token) for place in places[: self.depth])
        return [self.root, *(place for place in longer if place is not None)]

    def _longer(self, place: Place, token: int) -> Place | None:
        if place.node is not None:
            return place.node.longer.get(token)
        if place.length == self.depth or self._at(place.at) != token:
            return None
        return Place(None, place.at + 1, place.length + 1)

    def _at(self, index: int) -> int:
        """Return a token; END where no text is, or none any more."""
        index -= self._offset
        return self.tokens[index] if 0 <= index < len(self.tokens) else END

    def path(self, place: Place, most: int, least: float) -> Candidate:
        """Draft the most frequent continuation: `most` tokens, each path at least so probable.

        Sequences of more than `depth` tokens are not followed, however often they occurred.
        """
        least *= 1 - ROUNDING
        tokens, shares, score, p = list[int](), list[Share](), 0.0, 1.0
        following: Place | None = place
        while following is not None and len(tokens) < most:
            node = following.node
            token = self._at(following.at) if node is None else node.best
            if token == END:
                break
            count, total = (1, 1) if node is None else (node.counts[token], node.total)
            p *= count / total
            if p < least:
                break
            shares.append(Share(len(tokens) - 1, count, total))
            tokens.append(token)
            score += p
            following = self._longer(following, token)
        draft = Draft()
        for token in reversed(tokens):
            draft = {token: (1.0, draft)}
        return Candidate(score, draft, tuple(shares))

    def tree(self, place: Place, most: int, least: float) -> Candidate:
        """Draft the `most` most probable continuations, as a tree."""
        least *= 1 - ROUNDING
        draft, score, shares = Draft(), 0.0, list[Share]()
        heap = list[tuple[float, int, int, Share, Place | None, Draft]]()
        order = 0

        def push(place: Place | None, p: float, into: Draft) -> None:
            nonlocal order
            for token, count, total in self._following(place):
                if p * (count / total) >= least:
                    assert place is not None
                    order += 1
                    share = Share(len(shares) - 1, count, total)
                    longer = self._longer(place, token)
                    heappush(heap, (-p * (count / total), order, token, share, longer, into))

        push(place, 1.0, draft)
        while heap and len(shares) < most:
            negative, _, token, share, longer, into = heappop(heap)
            below = Draft()
            into[token] = (share.times / share.total, below)
            score -= negative
            shares.append(share)
            push(longer, -negative, below)
        return Candidate(score, draft, tuple(shares))

    def _following(self, place: Place | None) -> list[tuple[int, int, int]]:
        """Return the tokens that followed, the count of each, and that of all."""
        if place is None:
            return []
        if place.node is None:
            token = self._at(place.at)
            return [] if token == END else [(token, 1, 1)]
        node = place.node
        return [(token, count, node.total) for token, count in node.counts.items()]
