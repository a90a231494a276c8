"""Checks for contradictions between individually valid keys, before a model is loaded.

Every check raises a `ConfigError` with one key, the reason and a fix.
"""

import dataclasses
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from outrider.conf.errors import ConfigError
from outrider.conf.plugins import OWN_PART
from outrider.conf.quantities import format_count
from outrider.conf.schema import Config, DrafterConfig
from outrider.data.columns import check_columns
from outrider.models.decode import from_config
from outrider.models.decode.from_config import decodings
from outrider.models.drafters import drafter_class
from outrider.train.losses import parse_depth_weights, parse_loss
from outrider.train.optimizer import check_optimizer
from outrider.train.schedule import SCHEDULES


def check_length(config: Config) -> None:
    """Check the number of steps, the warm-up and the tokens per step."""
    train, launch = config.train, config.launch
    if train.max_steps is None and train.max_minutes is None:
        why = "train.max_minutes is null too, so training would never end."
        raise ConfigError("train.max_steps", None, why, "Set at least one of the two.")
    if isinstance(train.warmup, float) and train.warmup >= 1:
        why = "A warm-up with a decimal point is a share of all steps and must be below 1."
        raise ConfigError("train.warmup", train.warmup, why, "Write whole steps: train.warmup=30.")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    smallest = config.data.max_length * launch.accumulation * ranks
    if train.batch_tokens < smallest:
        why = (
            f"A step needs at least {smallest} tokens: {format_count(ranks, 'rank')}, "
            f"launch.accumulation={launch.accumulation}, data.max_length={config.data.max_length}."
        )
        fix = f"Use train.batch_tokens={smallest}, shorter rows, or less accumulation."
        raise ConfigError("train.batch_tokens", train.batch_tokens, why, fix)
    rows, forwards = train.batch_tokens // config.data.max_length, launch.accumulation * ranks
    if rows % forwards:
        why = f"{rows} rows per step cannot be shared evenly by {forwards} forward passes."
        fix = f"Use a multiple of {smallest}."
        raise ConfigError("train.batch_tokens", train.batch_tokens, why, fix)
    if train.skip_bad and launch.accumulation > 1 and launch.name.startswith("zero"):
        why = "DeepSpeed cannot discard the gradients of a step's first forward passes."
        raise ConfigError("train.skip_bad", train.skip_bad, why, "Use launch.accumulation=1.")
    if train.max_steps is None and isinstance(train.warmup, int) and train.warmup > 0:
        why = "A run limited in minutes has no known number of steps."
        raise ConfigError("train.warmup", train.warmup, why, "Use a share: train.warmup=0.04.")


def check_training(config: Config) -> None:
    """Check the optimizer, the schedule, the average of the weights and the patience."""
    train = config.train
    check_optimizer(train, config.launch)
    if train.schedule not in SCHEDULES:
        why = "There is no schedule of this name."
        fix = f"Use one of: {', '.join(SCHEDULES)}. {OWN_PART}"
        raise ConfigError("train.schedule", train.schedule, why, fix)
    if train.ema is not None and config.launch.name == "zero3":
        why = "Under launch=zero3 no rank holds whole weights, which a moving average needs."
        raise ConfigError("train.ema", train.ema, why, "Use launch=zero2, or train.ema=null.")
    if not train.patience or train.max_steps is None:
        return
    evaluations = (train.max_steps - 1) // train.eval_every  # after the first, before the end
    if evaluations < train.patience:
        why = f"It cannot end the run: between the first and the last of {train.max_steps} steps "
        why += f"there are {format_count(evaluations, 'evaluation')} (train.eval_every="
        why += f"{train.eval_every})."
        most = (train.max_steps - 1) // train.patience
        fix = f"Use train.eval_every={most} or less." if most else "Train for more steps."
        raise ConfigError("train.patience", train.patience, why, fix)


def check_place(config: Config) -> None:
    """Check the placement of the target."""
    target = config.target
    if (target.place == "apart") != bool(target.devices):
        why = "target.place=apart needs target.devices, and only apart uses them."
        fix = "Like target.place=apart target.devices=[cuda:1]."
        raise ConfigError("target.devices", list(target.devices), why, fix)
    if target.quantise and target.place in ("sharded", "tensor", "ends"):
        why = f"Quantised weights cannot be placed as {target.place}."
        fix = "Use target.place=replicated or apart."
        raise ConfigError("target.quantise", target.quantise, why, fix)
    if target.place == "ends" and config.data.traces is None:
        why = "Without its layers the target computes no features."
        fix = "Add recorded features: data.traces=FOLDER, written by outrider record."
        raise ConfigError("target.place", "ends", why, fix)
    if target.place == "ends" and config.train.quick_eval:
        why = "Decoding needs the target's layers."
        fix = "Add train.quick_eval=false, and measure later: outrider eval run.dir=..."
        raise ConfigError("target.place", "ends", why, fix)


def check_data(config: Config) -> None:
    """Check the keys of the training text."""
    target, data = config.target, config.data
    if target.name == "hf" and not target.path:
        fix = "Add target.path=<folder or model id>, or use target=smollm2."
        raise ConfigError("target.path", target.path, "target=hf needs a model.", fix)
    check_columns(data.columns or {})
    if data.name != "self" and data.given is not None:
        why = f"data={data.name} already reads existing text."
        raise ConfigError("data.given", data.given, why, "Use data=self, or set data.path only.")
    generate = data.generate
    if generate and generate.self_prompted and (data.path is not None or generate.samples is None):
        why = "Prompts are generated, not read; data.generate.samples sets their number."
        fix = "Drop data.path, and set data.generate.samples=..."
        raise ConfigError("data.generate.self_prompted", True, why, fix)
    endpoint = generate.endpoint if generate else None
    if endpoint and not _is_address(endpoint):
        why, fix = "This is not a URL.", "Like http://localhost:8000/v1"
        raise ConfigError("data.generate.endpoint", endpoint, why, fix)
    if generate and data.name != "self":
        why = f"data={data.name} reads existing text; only data=self generates."
        fix = "Use data=self, or drop the group with ~data.generate."
        raise ConfigError("data.generate", dataclasses.asdict(generate), why, fix)


def _is_address(text: str) -> bool:
    """Return whether this is an http address that every HTTP library accepts."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return False
    return bool(valid) and re.fullmatch(r"[!-~]+", text) is not None


def check_traces(config: Config) -> None:
    """Check the keys of recorded features."""
    data, record = config.data, config.record
    if data.traces is not None and data.mode in ("online", "hybrid"):
        why = "data.traces holds the features of every row."
        raise ConfigError("data.mode", data.mode, why, "Drop data.traces, or use data.mode=auto.")
    if data.mode != "hybrid":
        return
    if record.top or record.states == "coded":
        why = "Hybrid mode stores rows during training; these formats need statistics of all rows."
        fix = "Set record.top=0 record.states=bf16, or use data.mode=recorded."
        raise ConfigError("data.mode", data.mode, why, fix)
    if config.target.place in ("sharded", "tensor"):
        why = "Ranks run a sharded target together, but each caches other rows."
        raise ConfigError("data.mode", data.mode, why, "Use data.mode=recorded or online.")


def check_drafter(config: Config) -> None:
    """Check that the launch, the target and the loss suit the drafter."""
    cfg = config.drafter
    if not isinstance(cfg, DrafterConfig):
        return
    cfg.check_run(config.launch, config.target)
    parse_depth_weights(cfg.depth_weights, cfg.depths)
    for term in parse_loss(cfg.loss):
        if term.spec.needs_states and not drafter_class(cfg.name).predicts_target_states:
            why = f"{term.name} compares hidden states; {cfg.name} does not predict the target's."
            fix = "Use terms over distributions, such as soft_ce, kl or lk_hybrid."
            raise ConfigError("drafter.loss", list(cfg.loss), why, fix)


def check_names(config: Config) -> None:
    """Check the decoding settings, `run.dir` and `eval.out`."""
    for _, decode in decodings(config):
        from_config.check_decode(decode)
    if not config.run.dir.strip():
        raise ConfigError("run.dir", config.run.dir, "A run needs a folder.", "Use runs/<name>.")
    if config.eval.out in ("", ".", "..") or Path(config.eval.out).name != config.eval.out:
        why = "This is the name of a report in <run.dir>/eval, not a path."
        raise ConfigError("eval.out", config.eval.out, why, "Use a plain name such as quick.")


CHECKS = (
    check_length, check_training, check_place, check_data, check_traces, check_drafter, check_names,
)  # fmt: skip
