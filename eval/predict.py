"""`outrider plan`: how fast this checkpoint will be, before it is decoded with.

Three measurements make the prediction: how often the drafter's k-th choice is what the target says
(on answers that the target writes itself to a few prompts), what forwards of target and drafter
cost, and what a round costs besides. Then some of the predicted settings are decoded on the same
prompts, and the two stand side by side. For another machine the times come from its bandwidth and
arithmetic instead, and nothing is decoded.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from outrider.data.chat import prompt_ids
from outrider.eval.decode import shapes
from outrider.eval.decode.answer import Output, Request, Stops
from outrider.eval.decode.choose import sampling_of
from outrider.eval.decode.engine import Engine
from outrider.eval.decode.policy import Chain, Policy
from outrider.eval.decode.rules import BEST
from outrider.eval.decode.static import StaticTree
from outrider.eval.machines import MACHINES, Machine, ModelSize, drafter_sizes
from outrider.eval.plan import Grid, Plan, Row, make_plan, predicted, print_plan, write_plan
from outrider.eval.ranks import rank_table
from outrider.eval.run import suite_of, told
from outrider.eval.timing import measure
from outrider.launch import start
from outrider.models.base import Drafter
from outrider.models.formats import native
from outrider.models.load import Loaded, load, stop_ids
from outrider.train.config import Config
from outrider.train.errors import ConfigError, RunError
from outrider.train.planning import PlanConfig

CLOSE = 0.10  # how near a prediction should be
RANKS = 10


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
    with console.status("timing forwards" if study.machine is None else "counting bytes"):
        made = study.plan()
    print_plan(console, made)
    write_plan(folder / "eval", made, wanted.out)
    if study.machine is None and wanted.check:
        checks = study.check(made, console)
        console.print(shown(checks))
    console.print(f"plan: {folder / 'eval' / wanted.out}.json, .png", highlight=False)
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


class Study:
    """One checkpoint, some prompts, and what is found out about them."""

    def __init__(
        self, config: Config, wanted: PlanConfig, loaded: Loaded, drafter: Drafter
    ) -> None:
        self.config, self.wanted, self.drafter = config, wanted, drafter
        self.target, self.tokenizer = loaded.target, loaded.tokenizer
        self.machine = _machine(wanted)
        self.sampling = sampling_of(config.decode)
        self.stops = Stops(stop_ids(self.tokenizer, self.target))
        suite = suite_of(config, wanted.prompts)
        self.prompts = [prompt_ids(self.tokenizer, prompt.opening()) for prompt in suite]
        self.overhead_ms = 0.0

    def answer(self) -> None:
        """The target's own words to the prompts, and how often each guess is among them."""
        temperature, cfg = self.config.decode.temperature, self.config.drafter
        outputs = self._decode(None, 1)
        self.target.set_taps(self.drafter.taps)
        pairs = zip(self.prompts, outputs, strict=True)
        traces = [told(self.target, prompt, out.ids) for prompt, out in pairs if len(out.ids) > 1]
        ranks = min(RANKS, len(self.drafter.vocab))
        depths = min(cfg.depths, self.drafter.reach)
        self.table = rank_table(
            self.drafter, self.target, traces, depths, ranks, float(temperature), "best"
        ).table

    def plan(self) -> Plan:
        """The surface, for this machine or the other one."""
        grid = self._grid()
        if self.machine is not None:
            size = self.wanted.bytes
            target = ModelSize.of(self.target).stored(size)
            sizes = [
                part.stored(size)
                for part in drafter_sizes(self.drafter, self.target, max(grid.depths))
            ]
            return predicted(self.table, self.machine, target, sizes, grid)
        self.overhead_ms = self._overhead()
        timing = measure(
            self.target,
            self.drafter,
            name=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            tokens=sorted({1 + n for n in (*grid.nodes, *grid.depths)}),
            widths=grid.widths,
            depths=grid.depths,
            batches=grid.batches,
            contexts=grid.contexts,
            repeats=self.wanted.repeats,
            overhead_ms=self.overhead_ms,
        )
        return make_plan(self.table, timing, grid)

    def check(self, made: Plan, console: Console) -> list[Check]:
        """Decode some of the settings, each beside plain decoding in the same minutes."""
        near = min(made.rows, key=lambda row: abs(row.context - self._context())).context
        rows = [row for row in made.rows if row.context == near and row.depth]
        checks = []
        for row in _spread(rows, self.wanted.check):
            with console.status(f"decoding: {row.shape}, batch {row.batch}"):
                checks.append(self._checked(row))
        return checks

    def _checked(self, row: Row) -> Check:
        taus, ratios = [], []
        for _ in range(3):
            plain, fast = (_pace(self._decode(how, row.batch)) for how in (None, self._policy(row)))
            taus.append(fast[1])
            ratios.append(plain[0] / fast[0])
        return Check(row, sorted(taus)[1], sorted(ratios)[1])

    def _policy(self, row: Row) -> Policy:
        if row.width == 1:
            return Chain(row.depth, BEST)
        table = self.table[: row.depth, : row.width]
        return StaticTree(shapes.best_first(table, row.nodes))

    def _decode(self, policy: Policy | None, batch: int) -> list[Output]:
        drafter = None if policy is None else self.drafter
        engine = Engine(self.target, drafter, policy, sampling=self.sampling, stops=self.stops)
        prompts = self.prompts * -(-batch // len(self.prompts))
        count, seed = self.wanted.new_tokens, self.config.run.seed
        requests = [Request(ids, count, seed + n) for n, ids in enumerate(prompts)]
        return engine.generate_all(requests, batch)

    def _overhead(self) -> float:
        """Milliseconds of a round besides the two models."""
        outputs = self._decode(Chain(max(self._grid().depths), BEST), 1)
        clocks = [out.clock for out in outputs]
        models = sum(clock.draft + clock.target for clock in clocks)
        rounds = sum(out.rounds for out in outputs)
        return 1000 * (sum(clock.rounds for clock in clocks) - models) / max(1, rounds)

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
    if wanted.bandwidth is None and wanted.flops is None:
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
    )


def _pace(outputs: Sequence[Output]) -> tuple[float, float]:
    """Seconds per token behind the first one, and tau."""
    tokens = sum(len(out.ids) - 1 for out in outputs)
    rounds = sum(out.rounds for out in outputs)
    return sum(out.clock.rounds for out in outputs) / max(1, tokens), tokens / max(1, rounds)


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Some rows, as different as they can be: the fastest, the slowest, and between."""
    ranked = sorted(rows, key=lambda row: row.speedup)
    if len(ranked) <= count:
        return ranked
    steps = [round(i * (len(ranked) - 1) / max(1, count - 1)) for i in range(count)]
    return [ranked[i] for i in dict.fromkeys(steps)]


def shown(checks: Sequence[Check]) -> Table:
    """Predicted beside measured."""
    table = Table(title="the plan held against decoding, same prompts")
    for name in ("draft", "batch", "tau foreseen", "tau", "speedup foreseen", "speedup", "off"):
        table.add_column(name, justify="left" if name == "draft" else "right")
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
