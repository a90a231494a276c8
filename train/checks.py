"""What contradicts itself in a configuration whose keys are all right one by one.

Found before any model is loaded; each raises a `ConfigError` that names one key and a way out.
"""

import dataclasses
import os
from pathlib import Path

from outrider.conf.errors import ConfigError
from outrider.models.drafters import kind
from outrider.train import decoding
from outrider.train.losses import parse_depth_weights, parse_loss
from outrider.train.settings import Config, decodings


def check_length(config: Config) -> None:
    train, launch = config.train, config.launch
    if train.max_steps is None and train.max_minutes is None:
        why = "With train.max_minutes = null too, training would never end."
        raise ConfigError("train.max_steps", None, why, "Set at least one of the two.")
    if isinstance(train.warmup, float) and train.warmup >= 1:
        why = "A warm-up with a decimal point is a share of the steps, below 1."
        raise ConfigError("train.warmup", train.warmup, why, "Write whole steps: train.warmup=30.")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    least = config.data.max_length * launch.accumulation * ranks
    if train.batch_tokens < least:
        why = (
            f"{ranks} rank(s) with launch.accumulation={launch.accumulation} and rows of "
            f"data.max_length={config.data.max_length} tokens take at least {least} per step."
        )
        fix = f"Use train.batch_tokens={least}, shorter rows, or less accumulation."
        raise ConfigError("train.batch_tokens", train.batch_tokens, why, fix)
    rows, pieces = train.batch_tokens // config.data.max_length, launch.accumulation * ranks
    if rows % pieces:
        why = f"{rows} rows of a step cannot be shared evenly by {pieces} forward passes."
        fix = f"Use a multiple of {least}."
        raise ConfigError("train.batch_tokens", train.batch_tokens, why, fix)
    if train.skip_bad and launch.accumulation > 1 and launch.name.startswith("zero"):
        why = "DeepSpeed cannot forget the gradients of a step's first forward passes."
        raise ConfigError("train.skip_bad", train.skip_bad, why, "Use launch.accumulation=1.")
    if train.max_steps is None and isinstance(train.warmup, int) and train.warmup > 0:
        why = "A run in minutes has no number of steps to warm up for."
        raise ConfigError("train.warmup", train.warmup, why, "Give a share: train.warmup=0.04.")


def check_place(config: Config) -> None:
    target = config.target
    if (target.place == "apart") != bool(target.devices):
        why = "target.place=apart and the devices it lies on belong together."
        fix = "Like target.place=apart target.devices=[cuda:1]."
        raise ConfigError("target.devices", list(target.devices), why, fix)
    if target.quantise and target.place in ("sharded", "tensor", "ends"):
        why = f"Quantised weights cannot be {target.place}."
        fix = "Use target.place=replicated or apart: they are small."
        raise ConfigError("target.quantise", target.quantise, why, fix)
    if target.place == "ends" and config.data.traces is None:
        why = "Without its layers the target says nothing of a text."
        fix = "Give what it said before: data.traces=FOLDER, as outrider record wrote it."
        raise ConfigError("target.place", "ends", why, fix)
    if target.place == "ends" and config.train.quick_eval:
        why = "Decoding needs the target's layers."
        fix = "Add train.quick_eval=false, and decode later: outrider eval run.dir=..."
        raise ConfigError("target.place", "ends", why, fix)


def check_data(config: Config) -> None:
    target, data = config.target, config.data
    if target.name == "hf" and not target.path:
        fix = "Add target.path=<folder or model id>, or take target=smollm2."
        raise ConfigError("target.path", target.path, "target=hf needs a model.", fix)
    if data.name == "jsonl" and not data.path:
        fix = "Add data.path=<file or name>, or take data=self."
        raise ConfigError("data.path", data.path, "data=jsonl needs a file.", fix)
    if data.name != "self" and data.given is not None:
        why = f"data={data.name} is given text itself."
        raise ConfigError("data.given", data.given, why, "Take data=self, or set data.path alone.")
    wish = data.generate
    if wish is not None and wish.self_prompted and (data.path is not None or wish.samples is None):
        why = "Prompts are written instead of read, and so many as data.generate.samples says."
        fix = "Drop data.path, and set data.generate.samples=..."
        raise ConfigError("data.generate.self_prompted", True, why, fix)
    if wish is not None and wish.endpoint and not wish.endpoint.startswith(("http://", "https://")):
        why, fix = "This is no address.", "Like http://localhost:8000/v1"
        raise ConfigError("data.generate.endpoint", wish.endpoint, why, fix)
    if data.name != "self" and data.generate is not None:
        why = f"data={data.name} reads text that exists; only data=self generates."
        fix = "Take data=self, or drop the group with ~data.generate."
        raise ConfigError("data.generate", dataclasses.asdict(data.generate), why, fix)


def check_traces(config: Config) -> None:
    data, record = config.data, config.record
    if data.traces is not None and data.mode in ("online", "hybrid"):
        why = "A recording holds what the target said of every row."
        raise ConfigError("data.mode", data.mode, why, "Drop data.traces, or leave mode=auto.")
    if data.mode != "hybrid":
        return
    if record.top or record.states == "coded":
        why = "Rows are kept while the run goes on: nothing is known of the others yet."
        fix = "Set record.top=0 record.states=bf16, or take data.mode=recorded."
        raise ConfigError("data.mode", data.mode, why, fix)
    if config.target.place in ("sharded", "tensor"):
        why = "Ranks that hold shares of the target run it together, and each keeps other rows."
        raise ConfigError("data.mode", data.mode, why, "Take data.mode=recorded, or online.")


def check_drafter(config: Config) -> None:
    """The objective can be read, and its terms make sense for this drafter."""
    cfg = config.drafter
    if why := cfg.refuses(config.launch.name):
        raise ConfigError("launch", config.launch.name, why, "Use launch=zero2 or launch=ddp.")
    parse_depth_weights(cfg.depth_weights, cfg.depths)
    for term in parse_loss(cfg.loss):
        if term.kind.features and not kind(cfg.name).in_target_space:
            why = f"{term.name} compares states; those of {cfg.name} are not the target's kind."
            fix = "Use terms over distributions, such as soft_ce, kl or lk_hybrid."
            raise ConfigError("drafter.loss", list(cfg.loss), why, fix)


def check_names(config: Config) -> None:
    for _, decode in decodings(config):
        decoding.check(decode)
    if not config.run.dir.strip():
        raise ConfigError("run.dir", config.run.dir, "A run needs a folder.", "Use runs/<name>.")
    if config.eval.out in ("", ".", "..") or Path(config.eval.out).name != config.eval.out:
        why = "This is the name of a report inside <run.dir>/eval, not a path."
        raise ConfigError("eval.out", config.eval.out, why, "Use a plain name such as quick.")


CHECKS = (check_length, check_place, check_data, check_traces, check_drafter, check_names)
