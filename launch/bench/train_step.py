"""`outrider bench train-step`: seconds and peak memory of one training step on this machine.

A step is unroll, losses and backward of a drafter; the target's features are given. Drafters and
paths are timed alternately in one process; the peak memory of each is measured in a process of its
own. All drafters train the same rows: block drafters with an anchor at every supervised row, and
p_eagle without dropping depths.

    recorded    fast, with the target's top-1 tokens given, as recorded features have them
    fast        from the target's last hidden states only
    reference   dense mask, all rows at once, unfused losses

Shape letters: B rows, T tokens of a row, V the target's vocabulary, H its hidden size.
"""

import dataclasses
import statistics
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from rich.table import Table
from torch import Tensor

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import COUNT0, option
from outrider.conf.options import parse_words
from outrider.launch.bench import common
from outrider.models import drafters
from outrider.models.argmax import first_argmax
from outrider.models.decode.costs.forward_times import interleaved_ms
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Batch, ModelShape, Trace
from outrider.models.target import process
from outrider.train.losses import parse_depth_weights
from outrider.train.objective import Objective
from outrider.train.step_data import trained_counts

Path = Literal["recorded", "fast", "reference"]
Precision = Literal["fp32", "bf16"]
EVERY_ROW = {"anchors": 1.0, "keep": 1.0}  # settings with which all supervised rows are trained


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench train-step`; the defaults are the sizes of SmolLM2-135M."""

    hidden: int = option(576, "hidden size of the target", "[1, 65536]")
    intermediate: int = option(1536, "size of its feed-forward layers", "[1, 65536]")
    heads: int = option(9, "attention heads", "[1, 65536]")
    kv_heads: int = option(3, "key-value heads", "[1, 65536]")
    vocab: int = option(49152, "vocabulary of the target", "[1, 4194304]")
    draft_vocab: int = option(8192, "vocabulary of the drafter", "[1, 4194304]")
    rows: int = option(4, "rows of a batch", "[1, 65536]")
    length: int = option(512, "tokens of a row", "[1, 4194304]")
    repeats: int = option(5, "timed steps of each path", "[1, inf)")
    threads: int = option(0, "CPU threads; 0: PyTorch's default", "[0, 1024]")
    out: str = option("", "JSON file for the result")
    drafters: tuple[str, ...] = option(("eagle3",), "drafters to compare")
    depths: tuple[int, ...] = option((3, 7), "draft depths", "[1, 1024]")
    precision: tuple[Precision, ...] = option(("fp32", "bf16"), "precisions of a step")
    layers: int = option(0, "of drafters that have this setting; 0: their own default", COUNT0)
    paths: tuple[Path, ...] = option(("recorded", "fast", "reference"), "paths to compare")

    def __post_init__(self) -> None:
        for i, name in enumerate(self.drafters):
            if name not in drafters.trained_names():
                fix = f"Use: {', '.join(drafters.trained_names())}."
                why = "There is no such drafter with a training step."
                raise ConfigError(f"drafters[{i}]", name, why, fix)


def train_step(words: list[str]) -> int:
    options = parse_words(Options, words)
    common.use_threads(options.threads)
    if common.answer_parent(lambda: _peak_mb(options)):
        return 0
    return compare_paths(options, Console())


class Case(NamedTuple):
    """A drafter step ready to run."""

    objective: Objective
    trace: Trace
    precision: Precision

    def step(self) -> None:
        depths, trace = len(self.objective.weights), self.trace
        batch = Batch(trace.ids, trace.answer, trace.document, trace.positions)
        denominators = trained_counts(self.objective.drafter, batch, depths)
        kind, reduced = trace.ids.device.type, self.precision == "bf16"
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=reduced):
            loss, _ = self.objective(self.trace, denominators)
        loss.backward()
        self.objective.zero_grad()


class _Ends:
    """Stand-in target with only an embedding and a head."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self.weight = torch.randn(shape.vocab, shape.hidden, dtype=dtype) * shape.hidden**-0.5
        self.vocab_size, self._shape = shape.vocab, shape

    def shape(self) -> ModelShape:
        return self._shape

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        return F.linear(last, self.weight)

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]:
        return F.linear(last, self.weight[ids])

    embedding_scale = 1.0

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows H"]:
        return F.embedding(ids, self.weight)


def build_case(
    options: Options, depths: int, precision: Precision, path: Path, name: str = "eagle3"
) -> Case:
    """Return a drafter of these sizes on a random trace, half of the rows supervised.

    Everything is on the GPU where there is one.
    """
    with process.device():
        return _build_case(options, depths, precision, path, name)


def _build_case(options: Options, depths: int, precision: Precision, path: Path, name: str) -> Case:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape = ModelShape(
        hidden=options.hidden, intermediate=options.intermediate, layers=30, heads=options.heads,
        kv_heads=options.kv_heads, head_dim=options.hidden // options.heads, vocab=options.vocab,
        eps=1e-5, rope_theta=1e4, activation="silu", max_positions=8192,
    )  # fmt: skip
    ends = _Ends(shape, dtype)
    draft_ids = torch.randperm(options.vocab)[: options.draft_vocab].sort().values
    cfg, slow = _settings(options, name, depths, path), path == "reference"
    taps = drafters.check(cfg, shape)
    vocab = DraftVocab(draft_ids, options.vocab)
    drafter = drafters.drafter_class(name)(cfg, ends, vocab, taps)
    loss = [term.replace("soft_ce", "soft_ce_reference") if slow else term for term in cfg.loss]
    weights = parse_depth_weights(cfg.depth_weights, depths)
    objective = Objective(
        drafter, ends, loss=loss, weights=weights, path="plain" if slow else "fused"
    )
    trace = _random_trace(options, dtype, len(taps))
    if path == "recorded":
        best = first_argmax(ends.logits(trace.last.flatten(0, 1)))
        trace = replace(trace, top1_ids=best.view_as(trace.ids))
    return Case(objective, trace, precision)


def _settings(options: Options, name: str, depths: int, path: Path) -> Any:
    """Return a drafter's settings, with this depth and every supervised row trained."""
    kind: Any = drafters.config_class(name)
    known = {field.name for field in dataclasses.fields(kind)}
    attention = "reference" if path == "reference" else "fast"
    wanted = {"depths": depths, "attention": attention, **EVERY_ROW}
    wanted |= {"layers": options.layers} if options.layers else {}
    return kind(name=name, **{key: value for key, value in wanted.items() if key in known})


def _random_trace(options: Options, dtype: torch.dtype, tap_count: int) -> Trace:
    size = (options.rows, options.length)
    ids = torch.randint(options.vocab, size)
    positions = torch.arange(options.length).expand(size)
    answer = positions >= options.length // 2
    next_ids = F.pad(ids[:, 1:], (0, 1))
    taps = torch.randn(*size, tap_count * options.hidden).to(dtype)
    last = torch.randn(*size, options.hidden).to(dtype)
    return Trace(ids, next_ids, answer, torch.zeros_like(ids), positions, taps, last)


def compare_paths(options: Options, console: Console) -> int:
    """Print the table, and write it to `out`."""
    head = ("step", "drafter", "path", "s (median)", "spread", "peak MiB", "against reference")
    table = Table(*head)
    results: list[dict[str, Any]] = []
    for precision in options.precision:
        for depths in options.depths:
            rows = _rows(options, depths, precision)
            slow = {row["drafter"]: row["seconds"] for row in rows if row["path"] == "reference"}
            for row in rows:
                reference = slow.get(row["drafter"])
                table.add_row(
                    f"{depths} depths {precision}", row["drafter"], row["path"],
                    f"{row['seconds']:.2f}", f"{row['spread']:.0%}", f"{row['peak_mb']:.0f}",
                    "-" if reference is None else f"{row['seconds'] / reference:.2f}",
                )  # fmt: skip
            results += rows
    result = {"options": dataclasses.asdict(options), "results": results}
    common.report(console, table, options.out, result)
    return 0


def _rows(options: Options, depths: int, precision: Precision) -> list[dict[str, Any]]:
    """A row per drafter and path; seconds are medians of alternated steps."""
    keys = [(name, path) for name in options.drafters for path in options.paths]
    steps = [build_case(options, depths, precision, path, name).step for name, path in keys]
    nothing = [lambda: None] * len(steps)
    times = interleaved_ms(steps, nothing, options.repeats, process.device())
    rows = []
    for (name, path), ms in zip(keys, times, strict=True):
        seconds, setting = [t / 1000 for t in ms], {"depths": depths, "precision": precision}
        peak_mb = common.run_in_child("train-step", options, **setting, paths=path, drafters=name)
        median = statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / median
        rows.append(
            {"drafter": name, **setting, "path": path, "seconds": median, "spread": spread,
             "peak_mb": peak_mb, "all": seconds}
        )  # fmt: skip
    return rows


def _peak_mb(options: Options) -> float:
    """Return the peak memory of one step above its start, in MiB: resident, or of the GPU."""
    (depths,), (precision,), (path,) = options.depths, options.precision, options.paths
    (name,) = options.drafters
    step = build_case(options, depths, precision, path, name).step
    small = replace(options, length=16)
    build_case(small, depths, precision, path, name).step()  # libraries allocate
    return common.peak_bytes(step, process.device()) / 2**20
