"""Which training questions are prompts of the suite: word for word, or nearly.

Two questions are the same when the sets of their 5-grams of words agree to four fifths (Jaccard),
which rewording by a word or two does not hide. A suite is small, so its 5-grams are indexed and
every training question is compared exactly, in one pass, without the approximation of MinHash.
The openings of dialogues are what is looked for; "Can you explain that?" is nobody's prompt.

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
from outrider.data.conversations import Message, Prompt, Summary

SIZE = 5  # words of a gram
NEAR = 0.8  # Jaccard similarity from which two questions are the same
NAMED = 10  # overlaps after which the search ends, and how many are named
SHOWN = 70  # characters of a question in a message
# a sign of Chinese, Japanese or Korean is a word; elsewhere a run of letters and digits is
EAST = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{EAST}]|[^\W_{EAST}]+")


def words(text: str) -> list[str]:
    """The text without case, punctuation and spacing."""
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """Its runs of SIZE words; a shorter text is one gram, one without words none."""
    said = words(text)
    if len(said) < SIZE:
        return {tuple(said)} - {()}
    return {tuple(said[i : i + SIZE]) for i in range(len(said) - SIZE + 1)}


def jaccard(one: str, other: str) -> float:
    """|common grams| / |all grams|: the slow reference of `Index.twin`."""
    a, b = grams(one), grams(other)
    return len(a & b) / len(a | b) if a or b else 0.0


class Index:
    """Texts that another text can be compared with, all at once."""

    def __init__(self, texts: Sequence[str]) -> None:
        sets = [_hashes(text) for text in texts]
        sizes = np.array([len(s) for s in sets], dtype=np.int64)
        keys = np.concatenate([*sets, np.empty(0, dtype=np.int64)])
        order = np.argsort(keys, kind="stable")
        self.sizes, self.keys = sizes, keys[order]
        self.owner = np.repeat(np.arange(len(sets)), sizes)[order]

    def twin(self, text: str) -> tuple[int, float] | None:
        """(number of the most similar text, similarity), if that is at least NEAR."""
        own = _hashes(text)
        low, high = (np.searchsorted(self.keys, own, side) for side in ("left", "right"))
        shared = [self.owner[a:b] for a, b in zip(low, high, strict=True) if a < b]
        if not shared:
            return None
        found, common = np.unique(np.concatenate(shared), return_counts=True)
        similar = common / (self.sizes[found] + len(own) - common)
        best = int(similar.argmax())
        return (int(found[best]), float(similar[best])) if similar[best] >= NEAR else None


class Seen:
    """Texts that were met so far; of two that are the same, nearly, the first stays."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.where: dict[int, list[int]] = {}

    def add(self, text: str) -> bool:
        """Whether it is new; only then it is remembered."""
        own = {hash(gram) for gram in grams(text)}
        common = Counter(number for key in own for number in self.where.get(key, ()))
        for number, shared in common.items():
            if shared >= NEAR * (self.sizes[number] + len(own) - shared):
                return False
        for key in own:
            self.where.setdefault(key, []).append(len(self.sizes))
        self.sizes.append(len(own))
        return True


def _hashes(text: str) -> np.ndarray:
    return np.array(sorted(hash(gram) for gram in grams(text)), dtype=np.int64)


class Overlap(RunError):
    """Training questions are prompts of the suite, and that is refused.

    Attributes:
        met: how many were found before the search ended.
    """

    def __init__(self, message: str, fix: str, met: int) -> None:
        super().__init__(message, fix)
        self.met = met


@dataclass
class Guard:
    """Training questions are held against a suite, and what is found is refused or left out.

    Attributes:
        wish: refuse, drop or keep, as `data.overlap` says.
        hits: of a question found, the prompt's name, the similarity and the question.
    """

    suite: Sequence[Prompt]
    wish: str
    hits: list[tuple[str, float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index = Index([prompt.turns[0] for prompt in self.suite])

    def meets(self, questions: Iterable[str]) -> bool:
        """Whether one of these is a prompt of the suite, nearly; it is noted.

        Raises:
            Overlap: it is, for the NAMEDth time, and overlaps are refused.
        """
        for question in questions if self.wish != "keep" else ():
            if found := self.index.twin(question):
                self.hits.append((self.suite[found[0]].id, found[1], question))
                if len(self.hits) >= NAMED:
                    self.settle()
                return True
        return False

    def settle(self) -> None:
        """
        Raises:
            Overlap: something was found, and overlaps are refused.
        """
        if self.hits and self.wish == "refuse":
            more = "at least " if len(self.hits) >= NAMED else ""
            listed = "\n".join(
                f"    {name} ({similar:.0%}): {question[:SHOWN]!r}"
                for name, similar, question in self.hits[:NAMED]
            )
            raise Overlap(
                f"{more}{len(self.hits)} training questions are prompts of the suite that the "
                f"drafter will be measured on:\n{listed}",
                "Leave them out with data.overlap=drop, or measure on other eval.prompts.",
                len(self.hits),
            )

    def apart(
        self, conversations: Iterable[list[Message]], summary: Summary
    ) -> Iterator[list[Message]]:
        """The conversations that share no question with the suite; `settle` has the last word."""
        for turns in conversations:
            if self.meets(turn["content"] for turn in turns if turn["role"] == "user"):
                summary.add("in the suite")
            else:
                yield turns
