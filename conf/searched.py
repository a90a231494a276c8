"""Settings of drafters without weights: the target without sublayers that `train` searches."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from outrider.conf.fields import TOKENS, option
from outrider.conf.schema import UntrainedConfig

COUNT = "[1, 65536]"
Searched = TypeVar("Searched", bound="SearchedConfig")


@dataclass(frozen=True)
class SearchConfig:
    """What a search measures, and how long."""

    trials: int = option(200, "candidates to measure", COUNT)
    minutes: float | None = option(None, "start no candidate after this time", "(0, inf)")
    contexts: tuple[int, ...] = option((64, 512), "tokens of a prompt, at least", TOKENS)
    prompts: int = option(3, "prompts of each context length", COUNT)
    tokens: int = option(32, "new tokens per prompt at most", "[2, 4194304]")

    def __post_init__(self) -> None:
        if not self.contexts:
            raise ValueError("contexts = []: give at least one length, like [64,512]")


class Skipped(NamedTuple):
    """A candidate of the search: decoder layers whose sublayers a draft skips, ascending."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = ("attention", self.attention), ("MLP", self.mlp)
        return "; ".join(f"{name} {', '.join(map(str, which)) or '-'}" for name, which in parts)

    def settings(self) -> dict[str, list[int]]:
        """Return the settings of a drafter that skips these sublayers, as plain values."""
        return {"skip_attention": [*self.attention], "skip_mlp": [*self.mlp]}


@dataclass(frozen=True)
class SearchedConfig(UntrainedConfig):
    """Settings of a drafter that is the target without some sublayers; `train` searches which.

    Any drafter whose `Config` has this base is searched. `train` writes the sublayers that it finds
    to FOUND in the run folder, and every command that decodes with the run reads them from there.
    """

    search: SearchConfig = field(default_factory=SearchConfig)
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()

    @property
    def skipped(self) -> Skipped:
        """What these settings skip, each layer once."""
        parts = self.skip_attention, self.skip_mlp
        return Skipped(*(tuple(sorted({*part})) for part in parts))

    def skipping(self: Searched, skipped: Skipped) -> Searched:
        """Return these settings with other sublayers skipped."""
        return replace(self, skip_attention=skipped.attention, skip_mlp=skipped.mlp)

    def found_settings(self) -> dict[str, Any]:
        """Return the settings that a search finds, as plain values."""
        return Skipped(self.skip_attention, self.skip_mlp).settings()
