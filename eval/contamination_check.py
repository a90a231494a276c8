"""Prompts that the drafter was trained on: an evaluation on other prompts than training's looks.

Training has compared its text with the suite of its own `eval.prompts` already (`data.overlap`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from outrider.conf.errors import ConfigError, RunError
from outrider.data.contamination import Guard
from outrider.data.conversations import Prompt, Summary, conversations, prompts
from outrider.data.self_generated import CONVERSATIONS, source_of, usual_prompts
from outrider.data.sources import data_source
from outrider.train.settings import Config, saved_config


def unseen(config: Config, suite: Sequence[Prompt], console: Console) -> list[Prompt]:
    """The suite, without the prompts that were training questions where these are dropped.

    Args:
        config: as it is measured; its data are those of training.

    Raises:
        RunError: there are such prompts, and overlaps are refused.
    """
    trained = saved_config(Path(config.run.dir))
    same = trained.get("eval", {}).get("prompts") == config.eval.prompts
    if same or config.data.overlap == "keep":
        return list(suite)
    if (traces := config.data.traces) is not None:
        console.print(f"not compared with the training text: it is in {traces}", style="yellow")
        return list(suite)
    guard = Guard(suite, config.data.overlap)
    try:
        for asked in questions(config):
            guard.meets(asked)
    except ConfigError as error:
        console.print(f"not compared with the training text: {error.why}", style="yellow")
        return list(suite)
    guard.settle()
    known = {name for name, _, _ in guard.hits}
    if known:
        console.print(f"{len(known)} prompts were training questions and are left out")
    if len(known) == len(suite):
        raise RunError(
            "The drafter was trained on all of these prompts.", "Use other eval.prompts."
        )
    return [prompt for prompt in suite if prompt.id not in known]


def questions(config: Config) -> Iterator[list[str]]:
    """What was asked in every conversation of the training text, as far as it can be read again."""
    data = config.data
    own = data.generate
    if data.name == "self" and own is not None and not own.self_prompted:
        for prompt in prompts(source_of(data, usual_prompts(config)), own.samples):
            yield prompt.turns[:1]
    given = [] if data.given is None else [data_source(data.given, skip_bad=data.skip_bad)]
    if data.name != "self":
        given.append(source_of(data, str(CONVERSATIONS)))
    for source in given:
        for turns in conversations(source, Summary()):
            yield [turn["content"] for turn in turns if turn["role"] == "user"]
