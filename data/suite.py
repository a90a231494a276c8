"""Which prompts are measured: those that `eval.prompts` names, or the embedded ones."""

from collections import Counter

from outrider.data.conversations import Prompt, prompts
from outrider.data.sources import Source, suite_source
from outrider.train.settings import Config


def suite_place(config: Config) -> Source:
    """Where the prompts are; null is the embedded suite that suits the target."""
    usual = "tiny" if config.target.name == "tiny" else "outrider"
    return suite_source(config.eval.prompts or usual)


def suite_of(config: Config, limit: int | None) -> list[Prompt]:
    """`limit` prompts, the categories in turn, however the rows are sorted."""
    place = suite_place(config)
    suite = prompts(place, limit if place.uniform else None)
    if limit is None or limit >= len(suite):
        return suite
    rank: Counter[str] = Counter()
    places: list[int] = []  # of each prompt within its category
    for prompt in suite:
        places.append(rank[prompt.category])
        rank[prompt.category] += 1
    chosen = sorted(range(len(suite)), key=lambda i: (places[i], i))[:limit]
    return [suite[i] for i in sorted(chosen)]
