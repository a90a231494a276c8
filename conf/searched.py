"""Settings of drafters without weights whose settings `outrider train` searches."""

from dataclasses import dataclass, field
from typing import Any

from outrider.conf.fields import TOKENS, option
from outrider.conf.schema import UntrainedConfig

COUNT = "[1, 65536]"


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


@dataclass(frozen=True)
class SearchedConfig(UntrainedConfig):
    """Settings of a drafter that is searched: the `Config` of the drafter adds what is found.

    `train` writes the settings it finds to FOUND in the run folder, and every command that decodes
    with the run reads them from there.
    """

    search: SearchConfig = field(default_factory=SearchConfig)

    def found_settings(self) -> dict[str, Any]:
        """Return the settings that a search finds, as plain values."""
        raise NotImplementedError
