"""The prompts of an evaluation: those of `eval.prompts`, or the embedded ones."""

from collections import Counter
from collections.abc import Sequence

from outrider.conf.schema import Config
from outrider.data.conversations import Prompt, read_prompts
from outrider.data.sources import Source, suite_source


def eval_source(config: Config) -> Source:
    """Return the source of `eval.prompts`; null: the embedded suite that suits the target."""
    default = "tiny" if config.target.name == "tiny" else "outrider"
    return suite_source(config.eval.prompts or default)


def load_suite(config: Config, limit: int | None) -> list[Prompt]:
    """Return `limit` prompts, spread evenly over the categories; None: all."""
    source = eval_source(config)
    suite = read_prompts(source, limit if source.single_category else None)
    if limit is None or limit >= len(suite):
        return suite
    return [suite[i] for i in sorted(_alternating(suite)[:limit])]


def alternating(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first prompt of every category, then the second of each, and so on."""
    return [prompts[i] for i in _alternating(prompts)]


def _alternating(prompts: Sequence[Prompt]) -> list[int]:
    found, ranks = Counter[str](), list[int]()  # rank of each prompt within its category
    for prompt in prompts:
        ranks.append(found[prompt.category])
        found[prompt.category] += 1
    return sorted(range(len(prompts)), key=ranks.__getitem__)
