"""The configuration of a run: frozen dataclasses, one per group of `conf/`.

Hydra composes plain yaml (`compose.py`); `train.settings.parse` converts it into these classes.
`--help` prints the text and the interval of each key.
"""

import dataclasses
import re
from typing import Any, ClassVar, Literal, get_type_hints

from omegaconf import OmegaConf

from outrider.conf.automatic import adjust
from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.fields import COUNT, COUNT0, DEPTHS, TOKENS, check_interval, option
from outrider.conf.shown_text import mask_values
from outrider.conf.template_args import parse_template_args

MAX_GRID = 64  # decodings of one evaluation


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Folder and seed of a run."""

    dir: str = option("runs/eagle3-tiny", "folder of the run: checkpoints, drafter, logs, reports")
    seed: int = option(0, "seed of data order, noise, sampling, initialisation", "[0, 4294967295]")
    plugins: tuple[str, ...] = option(
        (), "modules or .py files that register parts of your own: [mine.py]"
    )


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """The frozen target model."""

    name: Literal["tiny", "smollm2", "hf"] = option("tiny", "which target (choose with target=...)")
    path: str | None = option(None, "folder or hub id; null: that of tiny, smollm2; hf needs one")
    revision: str | None = option(None, "branch, tag or commit on the model hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "float32", "precision; auto: as stored"
    )
    trust_remote_code: bool = option(False, "run Python code from the model's repository")
    place: Literal["replicated", "sharded", "tensor", "apart", "ends"] = option(
        "replicated",
        "replicated: a copy per rank; sharded: layers gathered from all ranks when needed; tensor: "
        "tensor parallel over the ranks; apart: on target.devices; ends: embedding and head only, "
        "to train from data.traces",
    )
    devices: tuple[str, ...] = option((), "devices of the target with place=apart: [cuda:1]")
    quantise: Literal["int8", "nf4"] | None = option(
        None, "quantise linear layers: int8 (torchao) or nf4 (bitsandbytes); null: no"
    )
    thinking: bool | None = option(None, "chat template: enable_thinking; null: its default")
    template_args: tuple[str, ...] = option((), "chat template: other arguments, [date_string=...]")

    def __post_init__(self) -> None:
        parse_template_args(self.thinking, self.template_args)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Self-generated training data."""

    minutes: float | None = option(None, "time limit in minutes; null: none", "(0, inf)")
    samples: int | None = option(None, "number of answers; null: one per prompt", COUNT)
    self_prompted: bool = option(False, "the target also generates the `samples` prompts (Magpie)")
    max_new_tokens: int = option(256, "tokens per answer at most", TOKENS)
    temperature: float = option(0.5, "sampling temperature of answers; 0: greedy", "[0, inf)")
    top_p: float = option(1.0, "nucleus sampling of answers: probability mass kept", "(0, 1]")
    batch: int = option(64, "answers generated at once", "[1, 65536]")
    record: bool = option(True, "also store the target's features: training needs no forward")
    endpoint: str | None = option(
        None, "http://HOST:PORT/v1 of an OpenAI-compatible server that generates; stores text only"
    )
    model: str | None = option(None, "name of the target on the server; null: its only model")
    timeout: float = option(600.0, "seconds to wait for an answer of the server", "(0, inf)")
    retries: int = option(8, "retries of a failed request, with growing pauses", "[0, 1000]")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Training text and its held-out part."""

    name: Literal["tiny", "jsonl", "self"] = option("tiny", "which data (choose with data=...)")
    path: str | None = option(
        None, "conversations (data=self: prompts): file, folder, hub id or name (ultrachat, ...)"
    )
    columns: dict[str, str] | None = option(
        None, "columns of data.path with other names: {messages: dialogue, role: speaker}"
    )
    subset: str | None = option(None, "subset of a data set; null: its default")
    split: str | None = option(None, "split of a data set; null: train")
    revision: str | None = option(None, "branch, tag or commit of a data set on the hub")
    skip_bad: int = option(
        0, "rows to skip that are unreadable or that the chat template refuses", COUNT0
    )
    overlap: Literal["refuse", "drop", "keep"] = option(
        "refuse", "training questions that nearly equal one of eval.prompts: refuse, drop or keep"
    )
    max_length: int = option(
        256, "tokens per row; null: 1024 (data=tiny: 256), at most the positions", "[8, 4194304]"
    )
    long: Literal["cut", "drop"] = option("cut", "conversations that are too long: cut or drop")
    shortest: int = option(1, "answer tokens per conversation at least", COUNT)
    supervise: Literal["all", "last", "each"] = option(
        "all", "answers to train on: all, the last one, or each in a row that ends with it"
    )
    holdout: float = option(0.05, "share of conversations held out, chosen by hash", "(0, 0.5]")
    max_samples: int | None = option(None, "conversations to use; null: all", "[2, inf)")
    mode: Literal["auto", "online", "recorded", "hybrid"] = option(
        "auto",
        "target features: recorded, computed online, or hybrid (cached as far as they fit); auto: "
        "recorded if there is a recording, else online",
    )
    traces: str | None = option(None, "folder of recorded features; `record` writes it")
    max_gb: float | None = option(None, "GB per recording at most; null: the free disk", "(0, inf)")
    workers: int = option(1, "threads that prefetch recorded features; 0: none", "[0, 1024]")
    given: str | None = option(None, "existing conversations mixed into data=self; as data.path")
    given_share: float = option(0.5, "share of data.given among all conversations", "(0, 1)")
    generate: GenerateConfig | None = option(None, "self-generated training data (data=self)")


@dataclasses.dataclass(frozen=True)
class RecordConfig:
    """Format of recorded features (data/record/)."""

    name: Literal["full", "small"] = option("full", "which settings (choose with record=...)")
    states: Literal["same", "bf16", "int8", "coded"] = option(
        "bf16", "storage of hidden states; same: the target's precision; coded: entropy-coded"
    )
    step: float = option(0.5, "states=coded: step in column scales (IQR / 1.35)", "(0, 4]")
    top: int = option(
        0, "top-k teacher probabilities per row; 0: the target's last hidden state", "[0, 256]"
    )
    shard: int = option(65536, "tokens per file", "[1, 16777216]")
    check_every: int = option(64, "files between comparisons with a plain forward", COUNT)
    share: str = option("1/1", "files that this machine records: 2/4 is the second quarter")
    damaged: Literal["refuse", "skip", "again"] = option(
        "refuse", "damaged files: refuse, skip, or record again"
    )

    def __post_init__(self) -> None:
        match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", self.share, re.ASCII)
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError(f"share = {self.share}: write 1/4 for the first of four machines")

    @property
    def part(self) -> tuple[int, int]:
        """(index, count) of machines, the index from 0."""
        index, _, count = self.share.partition("/")
        return int(index) - 1, int(count)


@dataclasses.dataclass(frozen=True)
class DrafterSettings:
    """Settings that every drafter has."""

    name: str = ""
    depths: int = option(4, "", DEPTHS)  # of training; held-out text is measured at all of them
    draft_vocab_size: int | None = option(None, "", COUNT)  # most frequent answer tokens; None: all
    confidence: ClassVar[float | Literal["adaptive"]] = 0.0  # of chains: null in decode.confidence
    adjusted: ClassVar[tuple[str, ...]] = ()  # changed by `automatic.adjust`: "depths=3"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            within = field.metadata.get("within", "")
            check_interval(within, getattr(self, field.name), f"drafter.{field.name}")

    @property
    def max_depth(self) -> int:
        """The deepest draft; without an end for a drafter that reads its own output."""
        return 2**31

    def warning(self) -> str:
        """Return what these settings leave untrained, and the setting that trains it; or ""."""
        return ""


@dataclasses.dataclass(frozen=True)
class DrafterConfig(DrafterSettings):
    """Settings that every trained drafter has; the `Config` of each adds its own."""

    loss: tuple[str, ...] = ("soft_ce",)  # sum of terms such as "0.1*soft_ce" (train/losses.py)
    depth_weights: str = "geometric:0.8"  # see losses.parse_depth_weights; 0: only measured
    renormalise: bool = True  # the teacher's probabilities sum to 1 over the draft vocabulary
    normalise: str = "rows"  # mean over supervised "rows", or over all "tokens" of the batch

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("normalise", "rows", "tokens")
        if "/" in self.depth_weights:
            adjust(self, "depths", min(self.depth_weights.count("/") + 1, 1024))

    def check_run(self, launch: "LaunchConfig", target: TargetConfig) -> None:
        """Raise ConfigError if the drafter cannot be trained under this launch or target."""

    def require_choice(self, name: str, *allowed: str) -> None:
        """Raise ValueError unless the field has one of these values."""
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name} = {getattr(self, name)}: use {' or '.join(allowed)}")


@dataclasses.dataclass(frozen=True)
class UntrainedConfig(DrafterSettings):
    """Settings that every drafter without weights has; the `Config` of each adds its own."""

    depths: int = option(10, "", DEPTHS)  # draft tokens per round at most

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is not None:
            raise ValueError(f"draft_vocab_size = {self.draft_vocab_size}: use null, all tokens")


@dataclasses.dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; the JSONL log is always written."""

    mode: Literal["disabled", "online", "offline"] = option("disabled", "Weights & Biases logging")
    project: str = option("outrider", "Weights & Biases project")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer; settings that several share are keys of `train`."""

    name: str = option("adamw", "choose with train.optimizer=adamw, sgd, adafactor or muon")
    rate: float = option(
        1.0,
        "learning rate of its parameters (muon: of matrices), as a factor on train.lr, AdamW's",
        "(0, 10000]",
    )
    momentum: float = option(0.95, "share of the last step's momentum", "[0, 1)")
    nesterov: bool = option(True, "Nesterov's momentum: the step looks ahead by one momentum")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length, optimizer and checkpoints of a training."""

    max_steps: int | None = option(300, "optimizer steps; null: until max_minutes", COUNT)
    max_minutes: float | None = option(None, "minutes; null: until max_steps", "(0, inf)")
    batch_tokens: int = option(
        2048, "tokens per optimizer step, of all ranks together", "[1, 268435456]"
    )
    lr: float = option(3.5e-3, "peak learning rate; null: by hidden size and batch", "(0, 1]")
    warmup: int | float = option(0.04, "warm-up: steps (30) or a share of them (0.04)", "[0, inf)")
    schedule: str = option(
        "cosine",
        "learning rate after the warm-up: constant; cosine or linear, which decay to zero; or wsd, "
        "constant and at the end a decay to zero",
    )
    decay: float = option(0.2, "wsd: share of the steps after the warm-up that decay", "(0, 1]")
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    betas: tuple[float, float] = option((0.9, 0.95), "AdamW: decay of both moments", "[0, 1)")
    weight_decay: float = option(0.0, "weight decay, on matrices only; decoupled", "[0, 1]")
    clip: float = option(1.0, "gradient clipping: largest norm", "(0, inf)")
    ema: float | None = option(
        None, "decay of a moving average of the weights, as 0.99; null: none", "(0, 1)"
    )
    gradient_checkpointing: bool = option(
        False, "recompute activations in the backward pass: less memory, more time"
    )
    skip_bad: int = option(0, "bad steps to skip before the run stops", "[0, inf)")
    spike: float | None = option(
        None, "bad: a loss above this multiple of the last 64's median; null: only NaN", "(1, inf)"
    )
    eval_every: int = option(100, "steps between held-out evaluations", COUNT)
    patience: int | None = option(
        None, "evaluations without a better acceptance that end the run; null: no limit", COUNT
    )
    own_prompts: int = option(
        16,
        "held-out prompts that the target answers before training: acceptance on its answers "
        "chooses the best drafter; 0: acceptance on the held-out text does",
        "[0, 4096]",
    )
    save_every: int = option(100, "steps between checkpoints", COUNT)
    keep_last: int = option(2, "recent checkpoints to keep, besides the best one", COUNT)
    keep_every: int | None = option(None, "also keep the checkpoint of every n-th step", COUNT)
    resume: Literal["auto", "never", "must"] = option(
        "auto", "continue from a checkpoint in run.dir: auto: if there is one; must: else refuse"
    )
    log_every: int = option(10, "steps between log lines", COUNT)
    quick_eval: bool = option(True, "decode with the finished drafter and report its speedup")
    tensorboard: bool = option(False, "write TensorBoard event files to <run.dir>/tensorboard")
    wandb: WandbConfig = dataclasses.field(default_factory=WandbConfig)


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Parallel training."""

    name: Literal["single", "ddp", "zero1", "zero2", "zero3"] = option(
        "single", "kind of parallel training (choose with launch=...)"
    )
    precision: Literal["no", "bf16"] = option("no", "autocast; master weights stay float32")
    accumulation: int = option(1, "forward passes per optimizer step and rank", "[1, 65536]")
    offload: Literal["none", "optimizer", "parameters"] = option(
        "none", "keep in CPU memory: the optimizer (zero2, zero3), or also the parameters (zero3)"
    )
    wait: float = option(30.0, "minutes that a rank waits for other ranks", "(0, 525600]")

    def __post_init__(self) -> None:
        launches = {"optimizer": ("zero2", "zero3"), "parameters": ("zero3",)}.get(self.offload)
        if launches and self.name not in launches:
            raise ValueError(
                f"offload = {self.offload}: launch={self.name} cannot offload; "
                f"use launch={' or '.join(launches)}"
            )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Prompts and reports of an evaluation."""

    drafter: str | None = option(None, "folder, hub id, name; short: drafter=...; null: the run's")
    prompts: str | None = option(
        None, "file, folder, hub id or name (mt_bench, ...) of prompts; null: the embedded suite"
    )
    max_new_tokens: int = option(128, "tokens per answer at most", TOKENS)
    limit: int | None = option(None, "prompts to use; null: all", COUNT)
    out: str = option("eval", "report: <run.dir>/eval/<out>.json; grid: (<out>-)chain-t0.json")
    warmup: int = option(2, "prompts decoded before timing starts", "[0, inf)")
    repeats: int = option(1, "times each prompt is decoded; medians are reported", COUNT)
    baseline: bool = option(True, "also decode without a drafter, for speedup and exactness")
    grid: tuple[str, ...] = option(
        (), "measure several: policy@temperature, as in [chain@0, dynamic_tree@1]"
    )

    def __post_init__(self) -> None:
        if len(self.grid) > MAX_GRID:
            raise ValueError(f"grid = {list(self.grid)}: {MAX_GRID} decodings at most")


@dataclasses.dataclass(frozen=True)
class Config:
    """The validated configuration of a run; `drafter` is its own `Config` in models/drafters/."""

    run: RunConfig
    target: TargetConfig
    data: DataConfig
    record: RecordConfig
    drafter: DrafterSettings
    train: TrainConfig
    launch: LaunchConfig
    eval: EvalConfig
    decode: DecodeConfig
    automatic: tuple[str, ...] = ()  # keys that the user did not set, until models/adapt.py does


GROUPS = {name: kind for name, kind in get_type_hints(Config).items() if name != "drafter"}
del GROUPS["automatic"]


def to_dict(config: Config) -> dict[str, Any]:
    """Return the groups as plain values; keys of `config.automatic` are null."""
    groups = dataclasses.asdict(config)
    for group, _, name in (key.partition(".") for key in groups.pop("automatic")):
        groups[group][name] = None
    return groups


def to_yaml(config: Config) -> str:
    """Return the text of a run's `config.yaml`, which `parse` reads back; secrets are masked."""
    return OmegaConf.to_yaml(OmegaConf.create(mask_values(to_dict(config))))
