"""`outrider bench train-step`: seconds and peak memory of one training step on this machine.

A step is unroll, losses and backward of an EAGLE-3 drafter; the target's features are given. Paths
are timed alternately in one process; the peak memory of each is measured in a process of its own.

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
from outrider.conf.fields import option
from outrider.conf.options import parse_words
from outrider.launch.bench import common
from outrider.models.argmax import first_argmax
from outrider.models.decode.costs.forward_times import interleaved_ms
from outrider.models.drafters.eagle3 import Config as Eagle3Config
from outrider.models.drafters.eagle3 import Eagle3
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, Trace
from outrider.train.objective import Objective

Path = Literal["recorded", "fast", "reference"]
Precision = Literal["fp32", "bf16"]


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
    depths: tuple[int, ...] = option((3, 7), "draft depths", "[1, 1024]")
    precision: tuple[Precision, ...] = option(("fp32", "bf16"), "precisions of a step")
    paths: tuple[Path, ...] = option(("recorded", "fast", "reference"), "paths to compare")


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
        depths = range(1, len(self.objective.weights) + 1)
        denominators = torch.stack([self.trace.supervised_mask(d).sum() for d in depths]).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16"):
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


def build_case(options: Options, depths: int, precision: Precision, path: Path) -> Case:
    """Return a drafter of these sizes on a random trace, half of the rows supervised."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape = ModelShape(
        hidden=options.hidden, intermediate=options.intermediate, layers=30, heads=options.heads,
        kv_heads=options.kv_heads, head_dim=options.hidden // options.heads, vocab=options.vocab,
        eps=1e-5, rope_theta=1e4, activation="silu", max_positions=8192,
    )  # fmt: skip
    ends = _Ends(shape, dtype)
    draft_ids = torch.randperm(options.vocab)[: options.draft_vocab].sort().values
    reference = path == "reference"
    cfg = Eagle3Config(depths=depths, attention="reference" if reference else "fast")
    drafter = Eagle3(cfg, ends, DraftVocab(draft_ids, options.vocab), (1, 14, 26))
    objective = Objective(
        drafter, ends, weights=[0.8**d for d in range(depths)],
        path="plain" if reference else "fused",
        loss=["soft_ce_reference" if reference else "soft_ce"],
    )  # fmt: skip
    trace = _random_trace(options, dtype)
    if path == "recorded":
        best = first_argmax(ends.logits(trace.last.flatten(0, 1)))
        trace = replace(trace, top1_ids=best.view_as(trace.ids))
    return Case(objective, trace, precision)


def _random_trace(options: Options, dtype: torch.dtype) -> Trace:
    size = (options.rows, options.length)
    ids = torch.randint(options.vocab, size)
    positions = torch.arange(options.length).expand(size)
    answer = positions >= options.length // 2
    next_ids = F.pad(ids[:, 1:], (0, 1))
    taps = torch.randn(*size, 3 * options.hidden).to(dtype)
    last = torch.randn(*size, options.hidden).to(dtype)
    return Trace(ids, next_ids, answer, torch.zeros_like(ids), positions, taps, last)


def compare_paths(options: Options, console: Console) -> int:
    """Print the table, and write it to `out`."""
    table = Table("step", "path", "s (median)", "spread", "peak MiB", "against reference")
    results: list[dict[str, Any]] = []
    for precision in options.precision:
        for depths in options.depths:
            rows = _rows(options, depths, precision)
            slow = next((row["seconds"] for row in rows if row["path"] == "reference"), None)
            for row in rows:
                table.add_row(
                    f"{depths} depths {precision}", row["path"], f"{row['seconds']:.2f}",
                    f"{row['spread']:.0%}", f"{row['peak_mb']:.0f}",
                    "-" if slow is None else f"{row['seconds'] / slow:.2f}",
                )  # fmt: skip
            results += rows
    result = {"options": dataclasses.asdict(options), "results": results}
    common.report(console, table, options.out, result)
    return 0


def _rows(options: Options, depths: int, precision: Precision) -> list[dict[str, Any]]:
    """A row per path; seconds are medians of alternated steps."""
    steps = {path: build_case(options, depths, precision, path).step for path in options.paths}
    nothing, cpu = [lambda: None] * len(steps), torch.device("cpu")
    times = interleaved_ms([*steps.values()], nothing, options.repeats, cpu)
    rows = []
    for path, ms in zip(steps, times, strict=True):
        seconds, setting = [t / 1000 for t in ms], {"depths": depths, "precision": precision}
        peak_mb = common.run_in_child("train-step", options, **setting, paths=path)
        median = statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / median
        rows.append(
            {**setting, "path": path, "seconds": median, "spread": spread, "peak_mb": peak_mb,
             "all": seconds}
        )  # fmt: skip
    return rows


def _peak_mb(options: Options) -> float:
    """Peak resident memory of one step above its start, in MiB."""
    (depths,), (precision,), (path,) = options.depths, options.precision, options.paths
    step = build_case(options, depths, precision, path).step
    build_case(replace(options, length=16), depths, precision, path).step()  # libraries allocate
    before = common.resident_bytes()
    with common.PeakMemory() as peak:
        step()
    return (peak.highest - before) / 2**20
