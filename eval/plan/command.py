"""`outrider plan`: how fast this checkpoint will be, before it is decoded with.

Three measurements make the prediction: what a draft would have kept of answers that the target
writes itself to a few prompts, what forwards of target and drafter cost, and what decoding makes of
that in rounds of a few shapes. Some of the other shapes are decoded in the same turns, and stand
beside their prediction. For another machine the times come from its bandwidth and arithmetic
instead, and nothing is decoded.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outrider.conf.errors import ConfigError, RunError
from outrider.data.suite import suite_of
from outrider.data.tokenise import prompt_ids
from outrider.eval.console_tables import add_numbers, narrow
from outrider.eval.measure import told
from outrider.eval.plan.forward_times import measure
from outrider.eval.plan.interleaved import Turns, corners, decode
from outrider.eval.plan.replay import tau, ways
from outrider.eval.plan.roofline import FIXED, MACHINES, Machine, ModelSize, drafter_sizes
from outrider.eval.plan.round_costs import Decoded, Shape, Timing
from outrider.eval.plan.show import print_plan, write_plan
from outrider.eval.plan.surface import (
    Grid,
    Key,
    Plan,
    Row,
    drafts,
    make_plan,
    predicted,
)
from outrider.eval.rank_tables import rank_table
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import sampling_of
from outrider.models.decode.policy import Policy
from outrider.models.decode.request import Request, Stops
from outrider.models.decode.tree_shapes import Paths
from outrider.models.drafter import Drafter
from outrider.models.formats import native
from outrider.models.load import Loaded, load, stop_ids
from outrider.train import distributed as start
from outrider.train.planning import PlanConfig
from outrider.train.settings import Config

CLOSE = 0.10  # how near a prediction should be
RANKS = 10
OTHER = (
    "Acceptance is that of this checkpoint with its own target; models of the sizes given, trained "
    "like these, may do better or worse."
)
FULL = 3  # prompts per place of a batch

T = TypeVar("T")


def plan(config: Config, wanted: PlanConfig) -> int:
    """The verb.

    Raises:
        ConfigError, RunError: the run, its target or the prompts cannot be used, or the grid goes
            beyond what the checkpoint can draft.
    """
    start.use_cores()
    console, folder = Console(), Path(config.run.dir)
    if not (folder / "drafter").is_dir():
        message = f"{folder} holds no drafter/: its training has not finished."
        raise RunError(message, "Finish it (train.resume=auto continues), or give another run.dir.")
    loaded = load(config.target, start.device())
    drafter, _ = native.load(folder / "drafter", loaded.target)
    drafter.change(loaded.target)
    study = Study(config, wanted, loaded, drafter)
    with console.status("the target answers, and the drafter is judged by its words"):
        study.answer()
    if study.machine is None:
        made, checks = study.plan(console)
    else:
        with console.status("counting bytes"):
            made, checks = study.foresee(study.machine), []
    print_plan(console, made)
    deepest = max(row.depth for row in made.rows)
    if left_out := [depth for depth in wanted.depths if depth > deepest]:
        said = f"depths {left_out} left out: this checkpoint drafts {deepest} deep"
        console.print(said, style="yellow", highlight=False)
    if checks:
        console.print(shown(checks))
    elif study.machine is None and wanted.check:
        said = "The times were brought in line with all these shapes; none is left to be decoded."
        console.print(said, style="yellow", highlight=False)
    write_plan(folder / "plan", made, wanted.out, [check.fields() for check in checks])
    console.print(f"plan: {folder / 'plan' / wanted.out}.json, .png", highlight=False)
    return 0


@dataclass(frozen=True)
class Check:
    """A prediction and what decoding made of it."""

    row: Row
    tau: float
    speedup: float

    @property
    def off(self) -> float:
        """Relative error of the predicted speedup."""
        return self.row.speedup / self.speedup - 1

    def fields(self) -> dict[str, float | str | int]:
        """For json."""
        row = self.row
        return {
            "shape": row.shape, "batch": row.batch, "context": row.context,
            "tau_foreseen": row.tau, "tau": self.tau,
            "speedup_foreseen": row.speedup, "speedup": self.speedup, "off": self.off,
        }  # fmt: skip


class Study:
    """One checkpoint, some prompts, and what is found out about them."""

    def __init__(
        self, config: Config, wanted: PlanConfig, loaded: Loaded, drafter: Drafter
    ) -> None:
        for name in ("depths", "batches", "contexts"):
            if not getattr(wanted, name):
                raise ConfigError(f"plan.{name}", [], "It names nothing to try.", "Give some.")
        self.config, self.wanted, self.drafter = config, wanted, drafter
        self.target, self.tokenizer = loaded.target, loaded.tokenizer
        self.machine = _machine(wanted)
        if self.machine is None and (_sizes(wanted) or wanted.budget):
            why = "Models that are not here are foreseen for a machine that is not here."
            fix = "Add plan.machine=h100, or plan.bandwidth and plan.flops."
            raise ConfigError("plan.machine", None, why, fix)
        self.sampling = sampling_of(config.decode)
        self.stops = Stops(stop_ids(self.tokenizer, self.target))
        suite = suite_of(config, wanted.prompts)
        self.prompts = [prompt_ids(self.tokenizer, prompt.opening()) for prompt in suite]

    def answer(self) -> None:
        """The target's own words to the prompts, and how often each guess is among them."""
        temperature, cfg = self.config.decode.temperature, self.config.drafter
        outputs = self._engine(None).generate_all(self._requests(1), 1)
        self.target.set_taps(self.drafter.taps)
        pairs = zip(self.prompts, outputs, strict=True)
        traces = [told(self.target, prompt, out.ids) for prompt, out in pairs if len(out.ids) > 1]
        ranks = min(RANKS, len(self.drafter.vocab))
        depths = min(cfg.depths, self.drafter.reach)
        try:
            self.table = rank_table(
                self.drafter, self.target, traces, depths, ranks, float(temperature), "best"
            ).table
        except ValueError as error:
            fix = f"Use more plan.prompts or plan.new_tokens than {self.wanted.new_tokens}."
            raise RunError(f"The target's answers tell too little: {error}.", fix) from error
        self.tau = partial(tau, ways(self.drafter, traces, depths, ranks))

    def foresee(self, machine: Machine) -> Plan:
        """The surface of another machine."""
        grid = self._grid()
        other = _sizes(self.wanted)
        found = other or self._own_sizes(max(grid.depths))
        made = predicted(self.table, self.tau, machine, *found, grid, self.wanted.budget)
        return replace(made, assumptions=(OTHER, *made.assumptions)) if other else made

    def plan(self, console: Console) -> tuple[Plan, list[Check]]:
        """The surface of this machine, and some of it held against decoding."""
        grid = self._grid()
        found = drafts(self.table, grid)
        fitted = corners(list(found.values()))
        shapes = {batch: list(fitted) for batch in sorted(set(grid.batches))}
        chosen = self._chosen(found, grid)
        for batch, key in chosen:
            shapes[batch].append(found[key])
        bar = partial(track, description="decoding", console=console, transient=True)
        turns = decode(shapes, self._engine, self._requests, bar)
        with console.status("timing forwards"):
            alone = self._alone([Shape.of(paths) for paths in found.values()], grid)
        timing = replace(alone, decoded=self._in_decoding(alone, turns, fitted, grid))
        made = make_plan(self.table, self.tau, timing, grid)
        near = min(grid.contexts, key=lambda context: abs(context - self._context()))
        rows = {(row.batch, row.key): row for row in made.rows if row.context == near}
        checks = [
            Check(rows[batch, key], turns.tau(batch, found[key]), turns.speedup(batch, found[key]))
            for batch, key in chosen
        ]
        return made, checks

    def _chosen(self, found: Mapping[Key, Paths], grid: Grid) -> list[tuple[int, Key]]:
        """Settings to check, from much work per token to little; corners would prove nothing."""
        fitted = corners(list(found.values()))
        free = [key for key, paths in found.items() if paths not in fitted]

        def work(setting: tuple[int, Key]) -> float:
            batch, paths = setting[0], found[setting[1]]
            return batch * (len(paths) + 1) / self.tau(paths)

        settings = sorted(product(sorted(set(grid.batches)), free), key=work, reverse=True)
        return _spread(settings, self.wanted.check)

    def _alone(self, shapes: Sequence[Shape], grid: Grid) -> Timing:
        """Forwards by themselves."""
        return measure(
            self.target,
            self.drafter,
            name=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            tokens=sorted({1 + shape.nodes for shape in shapes}),
            widths=sorted({*grid.widths, math.ceil(max(shape.width for shape in shapes))}),
            depths=grid.depths,
            batches=grid.batches,
            contexts=grid.contexts,
            repeats=self.wanted.repeats,
        )

    def _in_decoding(
        self, timing: Timing, turns: Turns, fitted: Sequence[Paths], grid: Grid
    ) -> dict[int, list[Decoded]]:
        """What decoding made of those times."""
        context = min(max(round(self._context()), min(grid.contexts)), max(grid.contexts))
        decoded: dict[int, list[Decoded]] = {batch: [] for batch in turns.seen}
        for batch, paths in product(turns.seen, fitted):
            shape, parts = Shape.of(paths), turns.parts(batch, paths)
            alone = timing.alone(shape, batch, context)
            draft = parts.draft / alone.draft if shape.depth else 1.0
            decoded[batch].append(Decoded(shape, draft, parts.target / alone.target, parts.rest))
        return decoded

    def _own_sizes(self, depth: int) -> tuple[ModelSize, list[ModelSize]]:
        """Of the models at hand."""
        size = self.wanted.bytes
        parts = drafter_sizes(self.drafter, self.target, depth)
        return ModelSize.of(self.target).stored(size), [part.stored(size) for part in parts]

    def _engine(self, policy: Policy | None) -> Engine:
        drafter = None if policy is None else self.drafter
        return Engine(self.target, drafter, policy, sampling=self.sampling, stops=self.stops)

    def _requests(self, batch: int) -> list[Request]:
        """Enough of them that the batch is full most of the time."""
        wanted = FULL * batch if batch > 1 else 1
        prompts = self.prompts * -(-wanted // len(self.prompts))
        count, seed = self.wanted.new_tokens, self.config.run.seed
        return [Request(ids, count, seed + n) for n, ids in enumerate(prompts)]

    def _context(self) -> float:
        """Tokens in front of a round, on average."""
        mean = sum(map(len, self.prompts)) / len(self.prompts)
        return mean + self.wanted.new_tokens / 2

    def _grid(self) -> Grid:
        """What is wanted, as far as the checkpoint and the target go."""
        w, (depths, ranks) = self.wanted, self.table.shape
        room = self.target.shape().max_positions - max((*w.nodes, *w.depths)) - 8
        found = Grid(
            [d for d in w.depths if d <= depths],
            [n for n in w.widths if n <= ranks],
            w.nodes,
            w.batches,
            [c for c in w.contexts if self.machine is not None or c <= room],
        )
        for name, kept in (("depths", found.depths), ("contexts", found.contexts)):
            if not kept:
                why = "This checkpoint can do none of them."
                raise ConfigError(f"plan.{name}", list(getattr(w, name)), why, "Try smaller ones.")
        return found


def _machine(wanted: PlanConfig) -> Machine | None:
    """The machine to foresee; None is this one."""
    known = None if wanted.machine is None else MACHINES[wanted.machine]
    if known is not None and wanted.fixed is not None:
        known = replace(known, fixed=1e-6 * wanted.fixed)
    if wanted.bandwidth is None and wanted.flops is None:
        if known is None and wanted.fixed is not None:
            why, fix = "It is measured here.", "Give it for plan.machine=h100, for instance."
            raise ConfigError("plan.fixed", wanted.fixed, why, fix)
        return known
    if known is None and (wanted.bandwidth is None or wanted.flops is None):
        why, fix = "A machine needs both.", "Set plan.bandwidth (TB/s) and plan.flops (TFLOP/s)."
        raise ConfigError("plan.bandwidth", wanted.bandwidth, why, fix)
    bandwidth = known.bandwidth if wanted.bandwidth is None and known else 0.0
    flops = known.flops if wanted.flops is None and known else 0.0
    return Machine(
        "a machine of your own",
        1e12 * wanted.bandwidth if wanted.bandwidth else bandwidth,
        1e12 * wanted.flops if wanted.flops else flops,
        FIXED if wanted.fixed is None else 1e-6 * wanted.fixed,
        known.memory if known else math.inf,
    )


def _sizes(wanted: PlanConfig) -> tuple[ModelSize, list[ModelSize]] | None:
    """Target and drafter that are not here either; None: those of the run."""
    params, layers = wanted.target_params, wanted.target_layers
    width, kv, drafter = wanted.target_width, wanted.target_kv_width, wanted.drafter_params
    given = (params, layers, width, kv, drafter)
    if all(value is None for value in given):
        return None
    if params is None or layers is None or width is None or kv is None or drafter is None:
        why = "Other models need all of target_params, _layers, _width, _kv_width, drafter_params."
        raise ConfigError("plan.target_params", params, why, "Give all five, or none.")

    def size(billions: float, depth: int) -> ModelSize:
        rows = 2 * kv * depth * wanted.bytes
        return ModelSize(1e9 * billions, 1e9 * billions * wanted.bytes, rows, width, depth)

    return size(params, layers), [size(drafter, wanted.drafter_layers)]


def _spread(settings: Sequence[T], count: int) -> list[T]:
    """Some of them: the first, the last, and between."""
    if len(settings) <= count:
        return list(settings)
    steps = [round(i * (len(settings) - 1) / max(1, count - 1)) for i in range(count)]
    return [settings[i] for i in dict.fromkeys(steps)]


def shown(checks: Sequence[Check]) -> Table:
    """Predicted beside measured."""
    table = narrow("\nthe plan held against decoding, same prompts")
    table.add_column("draft", no_wrap=True)
    add_numbers(table, "batch", "tau\nforeseen", " tau", "speedup\nforeseen", " speedup", " off")
    for check in checks:
        colour = "green" if abs(check.off) <= CLOSE else "red"
        row = check.row
        table.add_row(
            row.shape,
            str(row.batch),
            f"{row.tau:.2f}",
            f"{check.tau:.2f}",
            f"{row.speedup:.2f}x",
            f"{check.speedup:.2f}x",
            f"[{colour}]{100 * check.off:+.1f} %[/{colour}]",
        )
    return table
