"""SuffixDecoding: draft what most often followed the end of the text, by counts.

Source: Oliaro et al. 2024, "SuffixDecoding", arXiv:2411.04975, sections 4.1 to 4.3.

Counts are of two kinds: of the request's own text, prompt and answer, and of earlier answers, read
from a file (`answers`) or counted when they end (`learn`). Every end of the text that occurred
before, of m = 1, 2, .. tokens, gives a draft of at most `factor` * m tokens. The one with the
highest score is taken, the sum of the probabilities of its tokens by the counts: the expected
number of accepted tokens.

Differs (docs/drafters/suffix.md): the end of the text itself is not counted; a draft of the
request's own text wins ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.conf.fields import PROBABILITY, option
from outrider.conf.schema import UntrainedConfig
from outrider.models.drafting.answer_file import read_answers, write_answers
from outrider.models.drafting.lookup import Draft, LookupDrafter, TextIndex
from outrider.models.drafting.suffix_trie import Appended, Candidate, Place, SuffixTrie
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.target.target import Target


@dataclass(frozen=True)
class Config(UntrainedConfig):
    """Settings of SuffixDecoding; conf/drafter/suffix.yaml describes each."""

    name: str = "suffix"
    depths: int = option(16, "", "[1, 1024]")
    longest: int = option(64, "", "[1, 1024]")
    factor: float = option(1.0, "", "(0, 1024]")
    least: float = option(0.1, "", PROBABILITY)
    tree: bool = False
    learn: bool = False
    answers: str | None = None
    most_answers: int = option(100_000, "", "[1, inf)")


class SuffixIndex(TextIndex):
    """The text of a request, its counts, and where it continues earlier answers.

    Attributes:
        places: of the last 0, 1, 2, .. tokens in the earlier answers.
    """

    def __init__(self, own: SuffixTrie, earlier: SuffixTrie) -> None:
        super().__init__()
        self.own, self.earlier = own, earlier
        self.tokens, self.places = own.tokens, [earlier.root]
        self._appended: list[tuple[Appended, list[Place]]] = []  # and the places before

    def append(self, token: int) -> None:
        self._appended.append((self.own.append(token), self.places))
        self.places = self.earlier.follow(self.places, token)

    def remove_last(self) -> None:
        appended, self.places = self._appended.pop()
        self.own.undo(appended)


class Suffix(LookupDrafter):
    """SuffixDecoding.

    Attributes:
        earlier: counts of the newest `most_answers` earlier answers.
    """

    cfg: Config

    def __init__(
        self, cfg: Config, target: Target, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__(cfg, target, vocab, taps)
        self.target, self.earlier, self._count = target, SuffixTrie(cfg.longest), 0
        if cfg.answers is not None:
            self.load_answers(cfg.answers)

    def add_answer(self, tokens: Sequence[int]) -> None:
        """Count an earlier answer, and forget the oldest one if there are more than the most."""
        for token in tokens:
            self.earlier.append(token)
        self.earlier.end_text()
        self._count += 1
        if self._count > self.cfg.most_answers:
            self.earlier.remove_oldest()
            self._count -= 1

    def load_answers(self, file: str | Path) -> None:
        """Count the answers of a file, the oldest first; those counted already stay.

        Raises:
            RunError: it cannot be read, has no answers, or has answers of another target.
        """
        for tokens in read_answers(file, self.target):
            self.add_answer(tokens)

    def save_answers(self, file: str | Path) -> None:
        """Write the earlier answers to a file, which `load_answers` and `answers` read."""
        write_answers(file, self.earlier.texts(), self.target)

    def finish(self, answer: Sequence[int]) -> None:
        if self.cfg.learn:
            self.add_answer(answer)

    def new_index(self) -> SuffixIndex:
        return SuffixIndex(SuffixTrie(self.cfg.longest), self.earlier)

    def look_up(self, index: TextIndex) -> Draft:
        assert isinstance(index, SuffixIndex)
        best = Candidate()
        for trie, places in ((index.own, index.own.ends), (index.earlier, index.places)):
            draft = trie.tree if self.cfg.tree else trie.path
            for length in range(len(places) - 1, 0, -1):
                most = min(self.cfg.depths, int(self.cfg.factor * length))
                if best.reaches(most):  # no shorter end can have a higher score
                    break
                candidate = draft(places[length], most, self.cfg.least)
                best = candidate if candidate.exceeds(best) else best
        return best.draft
