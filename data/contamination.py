"""Exact and near overlap of training questions with the prompts of the evaluation suite.

Two questions count as the same when the Jaccard similarity of their sets of word 5-grams is at
least 0.8, which a change of a word or two does not hide. A suite is small: its 5-grams are indexed,
and every training question is compared exactly in one pass. Only the first prompt of a dialogue is
compared; "Can you explain that?" identifies none.

Source: the threshold and the 5-grams are those of Lee et al. 2021, arXiv:2107.06499, section 4.
Differs: exact Jaccard instead of MinHash and edit distance; questions only, not documents.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.conf.errors import RunError
from outrider.data.conversations import Message, Prompt, RuleCounts

NGRAM = 5  # words of a gram
NEAR = 0.8  # least Jaccard similarity of two questions that count as the same
MAX_LISTED = 10  # overlaps in a message; the search ends there
SHOWN = 70  # characters of a question in a message
# a character of Chinese, Japanese or Korean is a word; elsewhere a run of letters and digits
CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")


def split_words(text: str) -> list[str]:
    """Return the words of a text, without case and punctuation."""
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


def ngrams(text: str) -> set[tuple[str, ...]]:
    """Return the word n-grams of a text; a shorter text is one n-gram, an empty one has none."""
    words = split_words(text)
    if len(words) < NGRAM:
        return {tuple(words)} - {()}
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def jaccard(one: str, other: str) -> float:
    """Return |common n-grams| / |all n-grams|: the slow reference of `NgramIndex.nearest`."""
    a, b = ngrams(one), ngrams(other)
    return len(a & b) / len(a | b) if a or b else 0.0


class NgramIndex:
    """Inverted index of the n-grams of some texts, for nearest-text queries."""

    def __init__(self, texts: Sequence[str]) -> None:
        sets = [_hashes(text) for text in texts]
        sizes = np.array([len(s) for s in sets], dtype=np.int64)
        keys = np.concatenate([*sets, np.empty(0, dtype=np.int64)])
        order = np.argsort(keys, kind="stable")
        self.sizes, self.keys = sizes, keys[order]
        self.owner = np.repeat(np.arange(len(sets)), sizes)[order]

    def nearest(self, text: str) -> tuple[int, float] | None:
        """Return (number of the most similar text, similarity) if that is at least `NEAR`."""
        hashes = _hashes(text)
        low, high = (np.searchsorted(self.keys, hashes, side) for side in ("left", "right"))
        shared = [self.owner[a:b] for a, b in zip(low, high, strict=True) if a < b]
        if not shared:
            return None
        texts, common = np.unique(np.concatenate(shared), return_counts=True)
        similar = common / (self.sizes[texts] + len(hashes) - common)
        best = int(similar.argmax())
        return (int(texts[best]), float(similar[best])) if similar[best] >= NEAR else None


class NearDuplicateFilter:
    """Filter that passes the first of several near-duplicate texts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.owners: dict[int, list[int]] = {}

    def add(self, text: str) -> bool:
        """Return whether a text is new; add it if so."""
        hashes = {hash(gram) for gram in ngrams(text)}
        common = Counter(number for key in hashes for number in self.owners.get(key, ()))
        for number, shared in common.items():
            if shared >= NEAR * (self.sizes[number] + len(hashes) - shared):
                return False
        for key in hashes:
            self.owners.setdefault(key, []).append(len(self.sizes))
        self.sizes.append(len(hashes))
        return True


def _hashes(text: str) -> np.ndarray:
    return np.array(sorted(hash(gram) for gram in ngrams(text)), dtype=np.int64)


class OverlapError(RunError):
    """Training questions are prompts of the suite, and `data.overlap` is refuse.

    `count` is the number of overlaps before the search ended.
    """

    def __init__(self, message: str, fix: str, count: int) -> None:
        super().__init__(message, fix)
        self.count = count


@dataclass
class OverlapFilter:
    """Filter of training questions that overlap with a suite."""

    suite: Sequence[Prompt]
    mode: str  # `data.overlap`: refuse, drop or keep
    hits: list[tuple[str, float, str]] = field(default_factory=list)  # id, similarity, question

    def __post_init__(self) -> None:
        self.index = NgramIndex([prompt.turns[0] for prompt in self.suite])

    def overlaps(self, questions: Iterable[str]) -> bool:
        """Return whether one of these is nearly a prompt of the suite; record it in `hits`.

        Raises OverlapError if overlaps are refused and there are `MAX_LISTED` of them.
        """
        for question in questions if self.mode != "keep" else ():
            if match := self.index.nearest(question):
                self.hits.append((self.suite[match[0]].id, match[1], question))
                if len(self.hits) >= MAX_LISTED:
                    self.raise_if_refused()
                return True
        return False

    def raise_if_refused(self) -> None:
        """Raise OverlapError if there are overlaps and they are refused."""
        if self.hits and self.mode == "refuse":
            at_least = "at least " if len(self.hits) >= MAX_LISTED else ""
            why = f"{at_least}{len(self.hits)} training questions are prompts of the evaluation "
            why += "suite:"
            for name, similar, question in self.hits[:MAX_LISTED]:
                why += f"\n    {name} ({similar:.0%}): {question[:SHOWN]!r}"
            fix = "Leave them out with data.overlap=drop, or measure on other eval.prompts."
            raise OverlapError(why, fix, len(self.hits))

    def drop_overlaps(
        self, conversations: Iterable[list[Message]], summary: RuleCounts
    ) -> Iterator[list[Message]]:
        """Yield the conversations without overlap; call `raise_if_refused` after the last one."""
        for turns in conversations:
            if self.overlaps(turn["content"] for turn in turns if turn["role"] == "user"):
                summary.add("in the suite")
            else:
                yield turns
