"""The public Python API: training, evaluation, publishing, decoding, own loops and own parts.

    from outrider.api import Decoder, configure, train

    train(configure(["drafter=eagle3", "run.dir=runs/mine"]))
    print(Decoder.from_run("runs/mine").generate("Once upon a time").text)

docs/python.md describes it. Names that are not here may change between versions.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from outrider.conf.command_settings import PublishConfig
from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.errors import ConfigError, RunError, RunStopped
from outrider.conf.fields import option
from outrider.conf.plugins import load_plugins, named_plugins
from outrider.conf.schema import Config, DrafterConfig, TrainConfig, UntrainedConfig
from outrider.data.dataset_registry import DATASETS, SUITES, DatasetSpec
from outrider.data.readers import READERS, BadRowPolicy
from outrider.eval.decoder import Chat, Decoder, Piece, Result
from outrider.eval.publish.run import published
from outrider.eval.report import Report
from outrider.eval.requests import GenerationOptions
from outrider.eval.run import evaluated
from outrider.launch.cli import command_config
from outrider.launch.train import train as run_train
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.from_config import POLICIES, draft_of
from outrider.models.decode.policy import Chain, Draft, Policy
from outrider.models.decode.rules.rule_table import bind_rule
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree import Tree
from outrider.models.drafters import DRAFTERS, DrafterKind
from outrider.models.drafting.drafter import Drafter, target_head_logits
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, TargetEnds, Trace
from outrider.train.callbacks import Callback
from outrider.train.losses import LOSSES, LossInputs, TermSpec
from outrider.train.optimizer import OPTIMIZERS, OptimizerKind
from outrider.train.own_loop import TrainingRun
from outrider.train.schedule import SCHEDULES
from outrider.train.settings import check_places
from outrider.train.trainer import Trainer

__all__ = [
    # train, measure, publish, decode
    "Callback", "Chat", "Config", "Decoder", "GenerationOptions", "Piece", "PublishConfig",
    "Report", "Result", "bind_rule", "configure", "evaluate", "load_plugins", "publish", "train",
    "ConfigError", "RunError", "RunStopped",
    # a loop of one's own
    "Trainer", "TrainingRun",
    # parts of one's own
    "LOSSES", "LossInputs", "TermSpec",
    "OPTIMIZERS", "OptimizerKind", "SCHEDULES", "TrainConfig",
    "DATASETS", "READERS", "SUITES", "BadRowPolicy", "DatasetSpec",
    "POLICIES", "Chain", "DecodeConfig", "Draft", "DraftContext", "DynamicTree", "Policy",
    "StaticTree", "Tree", "draft_of",
    "DRAFTERS", "DraftVocab", "Drafter", "DrafterConfig", "DrafterKind", "Guess", "TargetEnds",
    "Trace", "UntrainedConfig", "option", "target_head_logits",
]  # fmt: skip

Command = Literal[
    "train", "prepare", "record", "doctor", "eval", "chat", "serve", "plan", "publish", "ranks"
]


def configure(words: Sequence[str] = (), command: Command = "train") -> Config:
    """Return the validated configuration of a command, from the words of its command line.

    Args:
        words: ["drafter=eagle3", "train.lr=1e-4", "run.dir=runs/mine"]. The modules of
            `run.plugins=[...]` are imported.
        command: which keys there are. All but those of training read the run of `run.dir`, or
            `drafter=` and `target=` of a published drafter.

    Raises:
        ConfigError: a key or value is wrong, or a plugin cannot be imported.
        RunError: the run folder cannot be read.
    """
    load_plugins(named_plugins(words))
    config: Config = command_config(command, list(words))
    check_places(config, trains=command in ("train", "prepare", "record", "doctor"))
    return config


def train(
    config: Config, *, rows: Iterable[Mapping[str, Any]] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:  # fmt: skip
    """Train and measure a drafter; return the run folder. The same call continues a stopped run.

    Args:
        rows: training text as dicts, such as {"messages": [...]}, instead of `data.path`.
        callbacks: objects whose methods are called at the start, every step, log line and
            evaluation, and at the end; the same on every rank.

    Raises:
        RunStopped: Ctrl-C or SIGTERM stopped the run, which is saved.
        ConfigError, RunError: settings or files do not allow the run, or a callback raised an
            exception.
    """
    run_train(config, rows=rows, callbacks=callbacks)
    return Path(config.run.dir)


def evaluate(config: Config, *, explain: bool = False) -> dict[str, Report]:
    """Measure a drafter as `outrider eval` does; print, write and return its reports by name.

    Args:
        config: of `configure(words, "eval")`.
        explain: also print every table and the definitions of the metrics.

    Raises:
        ConfigError, RunError: the target, the drafter or the prompts cannot be used.
    """
    return evaluated(config, explain)


def publish(config: Config, settings: PublishConfig) -> list[Path]:
    """Export the drafter of a run as `outrider publish` does; return the written folders.

    Args:
        config: of `configure(words, "publish")`, or that of the training.

    Raises:
        ConfigError: the format cannot hold the drafter.
        RunError: the run, its target or its prompts cannot be used, the exported drafter differs
            from the run's, or the hub refuses.
    """
    return published(config, settings)
