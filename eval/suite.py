"""Which prompts are measured: a file of the user, or the embedded one that suits the target."""

from collections import Counter
from pathlib import Path

from outrider.data.sources import SUITE, Prompt, prompts
from outrider.train.config import Config

GENERAL = Path(__file__).parent.parent / "data" / "prompts" / "eval.jsonl"


def suite_file(config: Config) -> Path:
    """The prompts' file; null is the embedded suite that suits the target."""
    if config.eval.prompts is not None:
        return Path(config.eval.prompts)
    return SUITE if config.target.name == "tiny" else GENERAL


def suite_of(config: Config, limit: int | None) -> list[Prompt]:
    """`limit` prompts, the categories in turn, however the file is sorted."""
    suite = prompts(suite_file(config))
    if limit is None or limit >= len(suite):
        return suite
    rank: Counter[str] = Counter()
    places: list[int] = []  # of each prompt within its category
    for prompt in suite:
        places.append(rank[prompt.category])
        rank[prompt.category] += 1
    chosen = sorted(range(len(suite)), key=lambda i: (places[i], i))[:limit]
    return [suite[i] for i in sorted(chosen)]
