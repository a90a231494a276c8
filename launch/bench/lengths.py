"""`outrider bench lengths`: memory and time of one training step by row length.

The embedded target, its positions extended, reads one row of random tokens, and an untrained
drafter takes one step on it. Each length runs in a process of its own, without and with gradient
checkpointing. A peak is of resident memory above that before the pass.
"""

import dataclasses
import time
from typing import Any, Literal

import torch

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.options import parse_words
from outrider.conf.schema import TargetConfig
from outrider.launch.bench import common
from outrider.models import drafters
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.target.load import load_target
from outrider.models.target.target import Target
from outrider.train.losses import parse_depth_weights
from outrider.train.objective import Objective

MIB = 2**20
COLUMNS = {"target_mb": 0, "target_s": 1, "step_mb": 0, "step_s": 1}  # with their digits


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench lengths`."""

    lengths: tuple[int, ...] = option(
        (1024, 2048, 4096, 8192, 16384, 32768), "row lengths, tokens", "[16, 4194304]"
    )
    drafter: str = option("eagle3", "which drafter takes the step")
    depths: int = option(4, "its draft depths", "[1, 1024]")
    recompute: tuple[Literal["no", "yes"], ...] = option(("no", "yes"), "gradient checkpointing")
    threads: int = option(0, "CPU threads; 0: PyTorch's default", "[0, 1024]")
    out: str = option("", "JSON file for the result")

    def __post_init__(self) -> None:
        if self.drafter not in drafters.trained_names():
            fix = f"Use: {', '.join(drafters.trained_names())}."
            raise ConfigError("drafter", self.drafter, "It has no training step.", fix)


def lengths(words: list[str]) -> int:
    options = parse_words(Options, words)
    common.use_threads(options.threads)
    if common.answer_parent(lambda: _measure(options)):
        return 0
    console, rows = Console(), list[dict[str, Any]]()
    head = ("tokens", "checkpointing", "target: peak MiB", "s", "step: peak MiB", "s")
    table = common.number_table(f"one step of {options.drafter}, one row", head)
    with console.status("") as status:
        for length in options.lengths:
            for recompute in options.recompute:
                status.update(f"{length} tokens, gradient checkpointing: {recompute}")
                row = common.run_in_child("lengths", options, lengths=length, recompute=recompute)
                rows.append({"tokens": length, "recompute": recompute == "yes", **row})
                cells = (f"{row[key]:.{digits}f}" for key, digits in COLUMNS.items())
                table.add_row(str(length), recompute, *cells)
    result = {"setting": dataclasses.asdict(options), "rows": rows}
    common.report(console, table, options.out, result, on_gpu=False)
    return 0


def _measure(options: Options) -> dict[str, float]:
    """Return peaks and seconds of the target's pass and of the drafter's step."""
    (length,), (recompute,) = options.lengths, options.recompute
    target = load_target(TargetConfig()).target
    common.allow_positions(target, length)
    name = options.drafter
    cfg: Any = drafters.config_class(name)(name=name, depths=options.depths)
    target.set_taps(drafters.resolve_taps(cfg, target.num_layers))
    drafter = drafters.build(cfg, target, DraftVocab.identity(target.vocab_size))
    drafter.gradient_checkpointing = recompute == "yes"
    weights = parse_depth_weights(cfg.depth_weights, cfg.depths)
    objective = Objective(drafter, target, weights=weights, loss=cfg.loss)
    _step(objective, target, 16)  # libraries allocate their own memory on the first call
    return _step(objective, target, length)


def _step(objective: Objective, target: Target, length: int) -> dict[str, float]:
    torch.manual_seed(0)
    ids = torch.randint(target.vocab_size, (1, length))
    answer = torch.ones(1, length, dtype=torch.bool)
    before, start = common.resident_bytes(), time.perf_counter()
    with common.PeakMemory() as target_peak:
        trace = target.trace(ids, answer, torch.zeros_like(ids), torch.arange(length)[None])
    traced, between = time.perf_counter(), common.resident_bytes()
    with common.PeakMemory() as step_peak:
        loss, _ = objective(trace, torch.full((len(objective.weights),), float(length)))
        loss.backward()
    return {
        "target_mb": (target_peak.highest - before) / MIB,
        "target_s": traced - start,
        "step_mb": (step_peak.highest - between) / MIB,
        "step_s": time.perf_counter() - traced,
    }
