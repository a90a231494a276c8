"""Removal of evaluation prompts that the drafter was trained on.

Training compares its text with its own `eval.prompts` (`data/contamination.py`); this check is
for an evaluation on other prompts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import Config
from outrider.data.contamination import OverlapFilter
from outrider.data.conversations import Prompt, RuleCounts, read_conversations, read_prompts
from outrider.data.self_generated import conversation_source, prompt_source
from outrider.data.sources import data_source
from outrider.train.settings import read_saved_config


def drop_contaminated(config: Config, suite: Sequence[Prompt], console: Console) -> list[Prompt]:
    """Return the suite without prompts that are questions of the training text, `config.data`.

    Raises:
        RunError: there are such prompts and data.overlap=refuse, or no prompt is left.
    """
    saved = read_saved_config(Path(config.run.dir))
    if saved.get("eval", {}).get("prompts") == config.eval.prompts or config.data.overlap == "keep":
        return list(suite)
    if (traces := config.data.traces) is not None:
        console.print(f"not compared with the training text: it is in {traces}", style="yellow")
        return list(suite)
    overlap = OverlapFilter(suite, config.data.overlap)
    try:
        for questions in training_questions(config):
            overlap.overlaps(questions)
    except ConfigError as error:
        console.print(f"not compared with the training text: {error.why}", style="yellow")
        return list(suite)
    overlap.raise_if_refused()
    trained_on = {name for name, _, _ in overlap.hits}
    if trained_on:
        console.print(f"training questions among the prompts, left out: {len(trained_on)}")
    if len(trained_on) == len(suite):
        message = "The drafter was trained on all of these prompts."
        raise RunError(message, "Use other eval.prompts.")
    return [prompt for prompt in suite if prompt.id not in trained_on]


def training_questions(config: Config) -> Iterator[list[str]]:
    """Yield the user turns of every conversation of the training text that can be read."""
    data, own = config.data, config.data.generate
    if data.name == "self" and own is not None and not own.self_prompted:
        for prompt in read_prompts(prompt_source(config), own.samples):
            yield prompt.turns[:1]
    sources = [] if data.given is None else [data_source(data.given, skip_bad=data.skip_bad)]
    if data.name != "self":
        sources.append(conversation_source(data))
    for source in sources:
        for turns in read_conversations(source, RuleCounts()):
            yield [turn["content"] for turn in turns if turn["role"] == "user"]
