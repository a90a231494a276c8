"""Prompt look-up: draft the tokens that followed an earlier occurrence of the last ones.

Source: prompt look-up decoding, Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding), also
in transformers (`prompt_lookup_num_tokens`) and vLLM ("ngram").

The longest of the last n, n - 1, .., `least` tokens that occurred before decides; its continuation
is drafted. With n = 2, the text "a b c d a b" drafts "c d a b".

Differs: the latest earlier occurrence can be taken instead of the first; a short continuation is
drafted as it is; where nothing is found nothing is drafted.
"""

from dataclasses import dataclass

from outrider.conf.automatic import adjust
from outrider.conf.fields import option
from outrider.conf.schema import UntrainedConfig
from outrider.models.drafting.lookup import Draft, LookupDrafter, TextIndex


@dataclass(frozen=True)
class Config(UntrainedConfig):
    """Settings of prompt look-up; conf/drafter/ngram.yaml describes each."""

    name: str = "ngram"
    n: int = option(3, "", "[1, 64]")
    least: int = option(1, "", "[1, 64]")
    latest: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.n and not adjust(self, "n", self.least):
            raise ValueError(f"least = {self.least}: it is at most n = {self.n}")


class NGramIndex(TextIndex):
    """A text, and where the continuation of each of its n-grams begins."""

    def __init__(self, sizes: range, latest: bool) -> None:
        super().__init__()
        self.sizes, self.latest = sizes, latest
        self._continuations: dict[tuple[int, ...], int] = {}
        self._replaced: list[list[tuple[tuple[int, ...], int | None]]] = []  # by each token

    def append(self, token: int) -> None:
        # the n-grams that end the text become earlier ones now
        replaced = list[tuple[tuple[int, ...], int | None]]()
        for size in self.sizes:
            if size <= len(self.tokens):
                ngram = tuple(self.tokens[-size:])
                if self.latest or ngram not in self._continuations:
                    replaced.append((ngram, self._continuations.get(ngram)))
                    self._continuations[ngram] = len(self.tokens)
        self.tokens.append(token)
        self._replaced.append(replaced)

    def remove_last(self) -> None:
        self.tokens.pop()
        for ngram, start in self._replaced.pop():
            if start is None:
                del self._continuations[ngram]
            else:
                self._continuations[ngram] = start

    def find(self) -> int | None:
        """Return where an earlier continuation of the longest known n-gram begins."""
        for size in reversed(self.sizes):
            if size <= len(self.tokens):
                start = self._continuations.get(tuple(self.tokens[-size:]))
                if start is not None:
                    return start
        return None


class NGram(LookupDrafter):
    """Prompt look-up."""

    cfg: Config

    def new_index(self) -> NGramIndex:
        return NGramIndex(range(self.cfg.least, self.cfg.n + 1), self.cfg.latest)

    def look_up(self, index: TextIndex) -> Draft:
        assert isinstance(index, NGramIndex)
        start, draft = index.find(), Draft()
        if start is not None:
            for token in reversed(index.tokens[start : start + self.cfg.depths]):
                draft = {token: (1.0, draft)}
        return draft
