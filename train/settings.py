"""The configuration of a run: one validated, frozen object.

Hydra composes plain yaml (`compose.py`); `parse` turns it into the dataclasses below and
refuses what cannot work before any model is loaded. What is written here once holds
everywhere: the meaning and the interval of a key stand beside it and are what help prints.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from omegaconf import DictConfig, OmegaConf

from outrider.conf.compose import compose, drafter_schema, flat, plain
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import key, read, unknown
from outrider.models.chat_template import read_args
from outrider.train.decoding import DecodeConfig, shaped
from outrider.train.recording import RecordConfig

COUNT = "[1, inf)"
COUNT0 = "[0, inf)"
NEEDED = ("data.path", "data.given", "eval.prompts")  # files that a run cannot do without
# between training and measuring
MAY_CHANGE = (
    "run.seed", "target.path", "target.dtype", "target.trust_remote_code", "target.place",
    "target.devices", "target.thinking", "target.template_args", "data.overlap",
)  # fmt: skip


@runtime_checkable
class DrafterConfig(Protocol):
    """What every drafter's `Config` has; `models.base.Recipe` says what each field means."""

    @property
    def name(self) -> str: ...
    @property
    def depths(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int | None: ...
    @property
    def loss(self) -> tuple[str, ...]: ...
    @property
    def depth_weights(self) -> str: ...
    @property
    def renormalise(self) -> bool: ...
    @property
    def normalise(self) -> str: ...
    def refuses(self, launch: str) -> str: ...


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    dir: str = key("runs/eagle3-tiny", "folder of the run: checkpoints, drafter, logs, reports")
    seed: int = key(0, "fixes data order, noise, sampling and initialisation", "[0, 4294967295]")


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """The frozen model."""

    name: Literal["tiny", "smollm2", "hf"] = key("tiny", "which target (choose with target=...)")
    path: str | None = key(None, "folder or model-hub id; null lets tiny and smollm2 find theirs")
    revision: str | None = key(None, "branch, tag or commit on the model hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "float32", "precision the target runs in; auto: as stored"
    )
    trust_remote_code: bool = key(False, "run code that comes with the model")
    place: Literal["replicated", "sharded", "tensor", "apart", "ends"] = key(
        "replicated",
        "whole on every rank, in shares over the ranks, on devices of its own, or only its "
        "embedding and head (to train from data.traces)",
    )
    devices: tuple[str, ...] = key((), "its own, with place=apart: [cuda:1]")
    quantise: Literal["int8", "nf4"] | None = key(
        None, "read its linear maps in 8 bits (torchao) or 4 (bitsandbytes)"
    )
    thinking: bool | None = key(
        None, "the template's enable_thinking; null: as the template has it"
    )
    template_args: tuple[str, ...] = key((), "what else the template asks for: [date_string=...]")

    def __post_init__(self) -> None:
        read_args(self.thinking, self.template_args)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """How the target writes its own training text."""

    minutes: float | None = key(None, "minutes of writing; null: no limit", "(0, inf)")
    samples: int | None = key(None, "answers to write; null: one per prompt", COUNT)
    self_prompted: bool = key(False, "the target writes `samples` prompts too, from nothing")
    max_new_tokens: int = key(256, "longest answer, tokens", COUNT)
    temperature: float = key(0.5, "of the answers; 0 is greedy", "[0, inf)")
    top_p: float = key(1.0, "of the answers: nucleus share", "(0, 1]")
    batch: int = key(64, "answers written at once", COUNT)
    record: bool = key(True, "keep the target's features with the text; else it runs again")
    endpoint: str | None = key(
        None, "http://HOST:PORT/v1 of a server with the target, which writes then; records nothing"
    )
    model: str | None = key(None, "the target's name there; null: the only one it lists")
    timeout: float = key(600.0, "seconds that the server may take for an answer", "(0, inf)")
    retries: int = key(
        8, "further attempts where the server fails, further and further apart", COUNT0
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text that is learned from."""

    name: Literal["tiny", "jsonl", "self"] = key("tiny", "which data (choose with data=...)")
    path: str | None = key(
        None, "conversations (data=self: prompts): file, folder, hub id or name (ultrachat, ...)"
    )
    subset: str | None = key(None, "of a data set that has several; null: its default")
    split: str | None = key(None, "part of a data set; null: train")
    revision: str | None = key(None, "of a data set on the hub: branch, tag or commit")
    skip_bad: int = key(0, "rows that cannot be read to leave out before a file is refused", COUNT0)
    overlap: Literal["refuse", "drop", "keep"] = key(
        "refuse", "training questions that are eval.prompts, nearly: refused, left out, or kept"
    )
    max_length: int = key(256, "longest row, tokens; conversations are cut there", "[8, inf)")
    long: Literal["cut", "drop"] = key(
        "cut", "longer conversations: keep their head, or none of it"
    )
    shortest: int = key(1, "answer tokens that a conversation must have", COUNT)
    supervise: Literal["all", "last", "each"] = key(
        "all", "all answers, the last one alone, or each in a row that ends with it"
    )
    holdout: float = key(0.05, "share of conversations held out, by hash", "(0, 0.5]")
    max_samples: int | None = key(None, "conversations to use; null: all", "[2, inf)")
    mode: Literal["auto", "online", "recorded", "hybrid"] = key(
        "auto", "traces: what was recorded with the text, else online; never; all; what fits"
    )
    traces: str | None = key(None, "folder of a recording: read in training, written by record")
    max_gb: float | None = key(None, "largest recording, 1e9 bytes; null: what is free", "(0, inf)")
    workers: int = key(1, "threads that read recorded traces ahead of the step; 0: none", COUNT0)
    given: str | None = key(None, "conversations mixed into data=self as they are: as data.path")
    given_share: float = key(0.5, "their share of all conversations", "(0, 1)")
    generate: GenerateConfig | None = key(None, "how the target writes its own text (data=self)")


@dataclasses.dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; the jsonl log is always written."""

    mode: Literal["disabled", "online", "offline"] = key("disabled", "Weights & Biases logging")
    project: str = key("outrider", "Weights & Biases project")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The recipe: how long, how fast, how often."""

    max_steps: int | None = key(300, "optimizer steps; null: until max_minutes", COUNT)
    max_minutes: float | None = key(None, "minutes of training; null: until max_steps", "(0, inf)")
    batch_tokens: int = key(2048, "tokens per optimizer step, over ranks and accumulation", COUNT)
    lr: float = key(3.5e-3, "peak learning rate", "(0, 1]")
    warmup: int | float = key(0.04, "steps (30) or a share of them (0.04)", "[0, inf)")
    schedule: Literal["cosine", "linear", "constant"] = key(
        "cosine", "learning rate after the warm-up; cosine and linear end at zero"
    )
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW: decay of both moments", "[0, 1)")
    weight_decay: float = key(0.0, "AdamW: decoupled, on matrices only", "[0, 1]")
    clip: float = key(1.0, "largest norm of the gradient", "(0, inf)")
    gradient_checkpointing: bool = key(
        False, "compute the unroll twice instead of remembering it: less memory, more time"
    )
    skip_bad: int = key(0, "bad steps to leave out before the run stops", "[0, inf)")
    spike: float | None = key(
        None, "a loss so many times the median of the last 64 is bad; null: only NaN is", "(1, inf)"
    )
    eval_every: int = key(100, "steps between held-out evaluations", COUNT)
    save_every: int = key(100, "steps between checkpoints", COUNT)
    keep_last: int = key(2, "checkpoints kept beside the best one", COUNT)
    keep_every: int | None = key(None, "checkpoints of every so many steps stay too", COUNT)
    resume: Literal["auto", "never", "must"] = key(
        "auto", "continue from run.dir: if it has a checkpoint, never, or refuse to start afresh"
    )
    log_every: int = key(10, "steps between log lines", COUNT)
    quick_eval: bool = key(True, "decode with the finished drafter and report its speed")
    tensorboard: bool = key(False, "event files for TensorBoard in <run.dir>/tensorboard")
    wandb: WandbConfig = dataclasses.field(default_factory=WandbConfig)


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How the ranks share one optimizer step."""

    name: Literal["single", "ddp", "zero1", "zero2", "zero3"] = key(
        "single", "how ranks share the work (choose with launch=...)"
    )
    precision: Literal["no", "bf16"] = key("no", "autocast of the drafter; its masters stay fp32")
    accumulation: int = key(1, "forward passes per optimizer step and rank", COUNT)
    offload: Literal["none", "optimizer", "parameters"] = key(
        "none", "what waits in the CPU's memory: AdamW's part (zero2, zero3), all (zero3)"
    )
    wait: float = key(30.0, "minutes that a rank waits for another before it gives up", "(0, inf)")

    def __post_init__(self) -> None:
        needed = {"optimizer": ("zero2", "zero3"), "parameters": ("zero3",)}.get(self.offload)
        if needed and self.name not in needed:
            raise ValueError(
                f"offload = {self.offload}: launch={self.name} keeps them where they are; "
                f"use launch={' or '.join(needed)}"
            )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What is measured, and on how much."""

    drafter: str | None = key(
        None, "a published drafter, folder or hub id, instead of a run's; drafter=... for short"
    )
    prompts: str | None = key(
        None, "file, folder, hub id or name (mt_bench, ...) of prompts; null: the embedded suite"
    )
    max_new_tokens: int = key(128, "answer budget per prompt, tokens", COUNT)
    limit: int | None = key(None, "prompts to use; null: all", COUNT)
    out: str = key("eval", "reports are <run.dir>/eval/<out>.json and <out>.outputs.jsonl")
    warmup: int = key(2, "prompts decoded before the clock starts", "[0, inf)")
    repeats: int = key(1, "times each prompt is decoded; medians are reported", COUNT)
    baseline: bool = key(True, "also decode without a drafter: speedup and exactness")
    grid: tuple[str, ...] = key(
        (), "measure these instead of decode: [chain@0, dynamic_tree@1], policy@temperature"
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run, checked. `drafter` is the `Config` of models/drafters/<drafter.name>.py."""

    run: RunConfig
    target: TargetConfig
    data: DataConfig
    record: RecordConfig
    drafter: DrafterConfig
    train: TrainConfig
    launch: LaunchConfig
    eval: EvalConfig
    decode: DecodeConfig


GROUPS: dict[str, type] = {
    "run": RunConfig,
    "target": TargetConfig,
    "data": DataConfig,
    "record": RecordConfig,
    "train": TrainConfig,
    "launch": LaunchConfig,
    "eval": EvalConfig,
    "decode": DecodeConfig,
}


def parse(node: DictConfig) -> Config:
    """Validate a composed configuration; loads no model.

    Args:
        node: what `compose` returns, or the `config.yaml` of a run folder.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or keys that contradict
            each other. The first one found is raised.
    """
    from outrider.train.checks import CHECKS

    values = plain(node)
    schemas = {**GROUPS, "drafter": drafter_schema(values.get("drafter"))}
    for group, content in values.items():
        if group not in schemas:
            raise unknown(group, content, schemas)
        if not isinstance(content, dict):
            raise ConfigError(group, content, "This is a group of keys.", f"Set {group}.<key>=...")
    parts: dict[str, Any] = {
        name: read(schema, values.get(name, {}), name) for name, schema in schemas.items()
    }
    config = Config(**parts)
    for check in CHECKS:
        check(config)
    return config


def resolved(config: Config) -> dict[str, Any]:
    """The configuration as plain nested dicts, ready for yaml or json."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The configuration as the text of a run folder's `config.yaml`; `parse` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(resolved(config)))


def load_run(folder: str | Path, overrides: list[str]) -> Config:
    """The configuration to measure a finished run with.

    What was trained (target, data, drafter, train, launch) comes from `<folder>/config.yaml`;
    how it is measured (eval, decode) comes from conf/eval.yaml and `overrides`. Of the run's
    own keys only those of MAY_CHANGE may be overridden.

    Raises:
        RunError: the folder holds no readable config.yaml.
        ConfigError: an override that does not exist or that would change what was trained.
    """
    asked = compose(overrides, "eval")
    only_measures(asked)
    saved = saved_config(Path(folder))
    saved.eval, saved.decode = asked.eval, asked.decode
    saved.run.dir = str(folder)
    for name in MAY_CHANGE:
        if OmegaConf.select(asked, name) is not None:
            OmegaConf.update(saved, name, OmegaConf.select(asked, name))
    return parse(saved)


def check_files(config: Config, *names: str) -> None:
    """Refuse now what would fail after minutes: the files that keys like data.path name.

    Raises:
        ConfigError: the key is set and nothing lies at its path.
    """
    from outrider.data.sources import data_source, suite_source

    values = resolved(config)
    kinds = {"data.path": data_source, "data.given": data_source, "eval.prompts": suite_source}
    for name in names:
        group, _, field = name.partition(".")
        path = values[group].get(field)
        if path is not None and name in kinds:
            kinds[name](path, name)
        elif path is not None and not Path(path).expanduser().exists():
            fix = f"Paths start at the current folder, {Path.cwd()}."
            raise ConfigError(name, path, "There is no such file or folder.", fix)


def saved_config(folder: Path) -> DictConfig:
    path = folder / "config.yaml"
    if not path.is_file():
        raise RunError(
            f"{folder} is not a run folder: it has no config.yaml.",
            "Give the run.dir of a finished training run: python eval.py run.dir=runs/...",
        )
    try:
        saved = OmegaConf.load(path)
    except Exception as error:  # yaml and OmegaConf raise many kinds
        raise RunError(f"{path} cannot be read: {error}", "Restore it, or train again.") from None
    if not isinstance(saved, DictConfig) or not {"run", "target", "drafter"} <= set(saved):
        raise RunError(f"{path} is not the configuration of a run.", "Restore it, or train again.")
    return saved


def only_measures(asked: DictConfig) -> None:
    """Refuse `+train.lr=1` and its like: eval would have to ignore it silently."""
    for name, value in flat(plain(asked)):
        free = name.startswith(("eval.", "decode.")) or name in ("run.dir", *MAY_CHANGE)
        if not free:
            why = "The run folder fixes what was trained; eval only measures it."
            fix = "outrider eval --help lists what may be set here."
            raise ConfigError(name, value, why, fix)


def decodings(config: Config) -> list[tuple[str, DecodeConfig]]:
    """What is to be measured: names of reports, and how each decodes.

    That is `decode` alone, or every entry of `eval.grid` in the shape of its group's file:
    "chain@1" -> ("chain-t1", conf/decode/chain.yaml at temperature 1).

    Raises:
        ConfigError: an entry of the grid that is no policy@temperature.
    """
    if not config.eval.grid:
        return [(config.eval.out, config.decode)]
    return [shaped(entry) for entry in config.eval.grid]
