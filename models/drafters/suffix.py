"""SuffixDecoding: draft what most often followed the end of the text, by counts.

Source: Oliaro et al. 2024, "SuffixDecoding", arXiv:2411.04975, sections 4.1 to 4.3.

Counts are of two kinds: of the request's own text, prompt and answer, and of earlier answers
(`drafter.answers`). Every end of the text that occurred before, of m = 1, 2, .. tokens, gives a
draft of at most `factor` * m tokens. The one with the highest score is taken, the sum of the
probabilities of its tokens by the counts: the expected number of accepted tokens.

Differs (docs/drafters/suffix.md): the end of the text itself is not counted; a draft of the
request's own text wins ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.conf.fields import option
from outrider.conf.schema import PROBABILITY, UntrainedConfig
from outrider.models.interface import TargetEnds
from outrider.models.lookup import Draft, LookupDrafter, TextIndex
from outrider.models.suffix_trie import Candidate, SuffixTrie
from outrider.models.vocab import DraftVocab


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


class SuffixIndex(TextIndex):
    """The text of a request, its counts, and where it continues earlier answers.

    Attributes:
        places: of the last 0, 1, 2, .. tokens in the earlier answers.
    """

    def __init__(self, own: SuffixTrie, earlier: SuffixTrie) -> None:
        self.own, self.earlier = own, earlier
        self.tokens, self.places = own.tokens, [earlier.root]

    def append(self, token: int) -> None:
        self.own.append(token)
        self.places = self.earlier.follow(self.places, token)


class Suffix(LookupDrafter):
    """SuffixDecoding.

    Attributes:
        earlier: counts of earlier answers.
    """

    cfg: Config

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__(cfg, target, vocab, taps)
        self.earlier = SuffixTrie(cfg.longest)

    def add_answer(self, tokens: Sequence[int]) -> None:
        """Count an earlier answer."""
        for token in tokens:
            self.earlier.append(token)
        self.earlier.end_text()

    def finish(self, answer: Sequence[int]) -> None:
        if self.cfg.learn:
            self.add_answer(answer)

    def new_index(self) -> SuffixIndex:
        return SuffixIndex(SuffixTrie(self.cfg.longest), self.earlier)

    def look_up(self, index: TextIndex) -> Draft:
        assert isinstance(index, SuffixIndex)
        best = Candidate(0.0, {})
        for trie, places in ((index.own, index.own.ends), (index.earlier, index.places)):
            draft = trie.tree if self.cfg.tree else trie.path
            for length in range(len(places) - 1, 0, -1):
                most = min(self.cfg.depths, int(self.cfg.factor * length))
                if most <= best.score:  # no shorter end can have a higher one
                    break
                candidate = draft(places[length], most, self.cfg.least)
                best = candidate if candidate.score > best.score else best
        return best.draft
