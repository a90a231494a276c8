"""`outrider eval`, and the report that training ends with."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from outrider.conf.errors import RunError
from outrider.data.prepare import Material
from outrider.data.suite import suite_of
from outrider.eval.contamination_check import unseen
from outrider.eval.measure import measure
from outrider.eval.open_drafter import find_drafter, open_drafter
from outrider.eval.rank_tables import record_held
from outrider.eval.report import publish
from outrider.eval.token_origins import told_of
from outrider.models.chat_template import change
from outrider.models.drafter import Drafter
from outrider.models.formats import native
from outrider.models.load import Loaded, load
from outrider.models.target import Target
from outrider.train import distributed as start
from outrider.train.settings import Config, decodings
from outrider.train.trackers import Background

QUICK_PROMPTS = 8  # of the report at the end of training


def evaluate(config: Config) -> int:
    """`outrider eval`: measure a run's drafter, or a published one; print and write the report.

    Args:
        config: as `load_run` or `load_alone` gives it.

    Raises:
        ConfigError, RunError: the target, the drafter or the prompts cannot be used.
    """
    folder = Path(config.run.dir)
    place = find_drafter(config)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if start.world_size() > 1:
        message = f"eval was started by {start.world_size()} processes; one measures."
        raise RunError(message, "Use: python eval.py run.dir=...")
    start.use_cores()
    target, tokenizer, source = load(config.target, start.device())
    console.print(f"target: {source}", highlight=False)
    opened = open_drafter(place, config, target)
    drafter, config = opened.drafter, opened.config
    if opened.said:
        console.print(opened.said, highlight=False)
    suite = suite_of(config, config.eval.limit)
    if config.eval.drafter is None:  # of a published one nobody knows the training
        if said := change(folder, config.target, tokenizer):
            console.print(said, style="red")
        suite = unseen(config, suite, console)
    _say_change(drafter, target, console)
    for i, part in enumerate(measurements(config)):
        report = measure(target, tokenizer, drafter, part, console, suite)
        report = replace(report, setting={**report.setting, **opened.about})
        publish(report, folder / "eval", part.eval.out, console, legend=i == 0)
    return 0


def _say_change(drafter: Drafter, target: Target, console: Console) -> None:
    """Plain and speculative decoding both run on the target as the drafter wants it."""
    if said := drafter.change(target):
        console.print(f"{said}: lossless for the changed target only", style="yellow")


def measurements(config: Config) -> list[Config]:
    """One configuration per report: `decode` as it is, or each entry of `eval.grid`."""
    return [
        replace(config, decode=decode, eval=replace(config.eval, out=out, grid=()))
        for out, decode in decodings(config)
    ]


def quick_report(
    config: Config,
    loaded: Loaded,
    made: Material,
    console: Console,
    services: Sequence[Background] = (),
) -> None:
    """What `train` ends with: the published drafter on a few prompts, printed and written.

    Takes `eval.limit` prompts, 8 where that is null. What its choices are worth on held-out text
    is written first (ranks.json).

    Args:
        services: are told of every report once it is written.
    """
    folder = Path(config.run.dir)
    drafter, _ = native.load(folder / "drafter", loaded.target)
    _say_change(drafter, loaded.target, console)
    record_held(folder, drafter, loaded.target, made, config.data.max_length)
    suite = suite_of(config, config.eval.limit or QUICK_PROMPTS)
    for i, part in enumerate(measurements(config)):
        report = measure(loaded.target, loaded.tokenizer, drafter, part, console, suite)
        publish(report, folder / "eval", part.eval.out, console, legend=i == 0)
        for service in services:
            service.report(told_of(report, folder / "eval", part.eval.out, loaded.tokenizer))
