"""`outrider plan`: how fast this checkpoint will be, before it is decoded with.

Three measurements make the prediction: how often the drafter's k-th choice is what the target says
(on answers that the target writes itself to a few prompts), what forwards of target and drafter
cost, and what a round costs besides. Then some of the predicted settings are decoded on the same
prompts, and the two stand side by side. For another machine the times come from its bandwidth and
arithmetic instead, and nothing is decoded.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from outrider.data.chat import prompt_ids
from outrider.eval.decode import shapes
from outrider.eval.decode.answer import Request, Stops
from outrider.eval.decode.choose import sampling_of
from outrider.eval.decode.engine import Engine
from outrider.eval.decode.policy import Chain, Policy
from outrider.eval.decode.rules import BEST
from outrider.eval.decode.static import StaticTree
from outrider.eval.machines import MACHINES, Machine, ModelSize, drafter_sizes
from outrider.eval.plan import Grid, Plan, Row, make_plan, predicted, print_plan, write_plan
from outrider.eval.ranks import rank_table
from outrider.eval.run import told
from outrider.eval.suite import suite_of
from outrider.eval.timing import CHAIN, PLAIN, TREE, Measured, Timing, measure
from outrider.launch import start
from outrider.models.base import Drafter
from outrider.models.formats import native
from outrider.models.load import Loaded, load, stop_ids
from outrider.train.config import Config
from outrider.train.errors import ConfigError, RunError
from outrider.train.planning import PlanConfig

CLOSE = 0.10  # how near a prediction should be
RANKS = 10
FULL = 3  # prompts per place of a batch
TURNS = 5  # of both engines, where a prediction is held against decoding


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
    deepest = max(row.depth for row in made.rows)
    if left_out := [depth for depth in wanted.depths if depth > deepest]:
        said = f"depths {left_out} left out: this checkpoint drafts {deepest} deep"
        console.print(said, style="yellow", highlight=False)
    checks = study.check(made, console) if study.machine is None and wanted.check else []
    if checks:
        console.print(shown(checks))
    write_plan(folder / "plan", made, wanted.out, [check.fields() for check in checks])
    console.print(f"plan: {folder / 'plan' / wanted.out}.json, .png", highlight=False)
    return 0


class Parts(NamedTuple):
    """Milliseconds of a round of the batch, and tokens per prompt."""

    draft: float
    target: float
    rest: float
    tau: float

    @property
    def whole(self) -> float:
        return self.draft + self.target + self.rest

    def times(self, factor: float) -> "Parts":
        """On a machine that is so much slower."""
        return Parts(factor * self.draft, factor * self.target, factor * self.rest, self.tau)


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
        self.table = rank_table(
            self.drafter, self.target, traces, depths, ranks, float(temperature), "best"
        ).table

    def plan(self) -> Plan:
        """The surface, for this machine or the other one."""
        grid = self._grid()
        if self.machine is not None:
            found = _sizes(self.wanted) or self._own_sizes(max(grid.depths))
            return predicted(self.table, self.machine, *found, grid, self.wanted.budget)
        kinds = self._kinds(grid)
        rounds: dict[tuple[int, int], Parts] = {}
        for batch in sorted(set(grid.batches)):
            rounds |= {(kind, batch): parts for kind, parts in self._rounds(kinds, batch).items()}
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
        )
        return make_plan(self.table, self._in_decoding(timing, kinds, rounds, grid), grid)

    def _in_decoding(
        self,
        timing: Timing,
        kinds: dict[int, Policy | None],
        rounds: dict[tuple[int, int], Parts],
        grid: Grid,
    ) -> Timing:
        """Times of forwards alone, brought to what they were in some rounds of decoding."""
        batches = tuple(sorted(set(grid.batches)))
        context = min(max(round(self._context()), min(grid.contexts)), max(grid.contexts))
        width, depth = max(grid.widths), max(grid.depths)
        target: dict[tuple[int, ...], float] = {}
        draft: dict[tuple[int, ...], float] = {}
        for (kind, batch), parts in rounds.items():
            policy = kinds[kind]
            tokens = 1 if policy is None else 1 + policy.nodes
            target[tokens, batch] = parts.target / timing.verify_ms(tokens, batch, context)
            if policy is not None:
                size = width if kind == TREE else 1
                alone = timing.draft_ms(size, min(depth, policy.levels), batch, context)
                draft[size, batch] = parts.draft / alone
        return replace(
            timing,
            overhead=Measured(
                {"kind": tuple(kinds), "batch": batches}, {at: p.rest for at, p in rounds.items()}
            ),
            target_factor=_factors(target),
            draft_factor=_factors(draft),
        )

    def _own_sizes(self, depth: int) -> tuple[ModelSize, list[ModelSize]]:
        """Of the models at hand."""
        size = self.wanted.bytes
        parts = drafter_sizes(self.drafter, self.target, depth)
        return ModelSize.of(self.target).stored(size), [part.stored(size) for part in parts]

    def check(self, made: Plan, console: Console) -> list[Check]:
        """Decode some of the settings, each beside plain decoding in the same minutes."""
        near = min(made.rows, key=lambda row: abs(row.context - self._context())).context
        rows = [r for r in made.rows if r.context == near and r.depth and not self._fitted(r)]
        checks = []
        for row in _spread(rows, self.wanted.check):
            with console.status(f"decoding: {row.shape}, batch {row.batch}"):
                checks.append(self._checked(row))
        return checks

    def _fitted(self, row: Row) -> bool:
        """Whether this is what the times were brought in line with: it would prove nothing."""
        grid = self._grid()
        if row.depth != max(grid.depths):
            return False
        return row.width == 1 or (row.width, row.nodes) == (max(grid.widths), _usual(grid.nodes))

    def _checked(self, row: Row) -> Check:
        taus, ratios = [], []
        for _ in range(TURNS):
            plain, fast = (self._round(how, row.batch) for how in (None, self._policy(row)))
            taus.append(fast.tau)
            ratios.append(fast.tau * plain.whole / fast.whole)  # of a batch that stays full
        return Check(row, median(taus), median(ratios))

    def _policy(self, row: Row) -> Policy:
        if row.width == 1:
            return Chain(row.depth, BEST)
        table = self.table[: row.depth, : row.width]
        return StaticTree(shapes.best_first(table, row.nodes))

    def _engine(self, policy: Policy | None) -> Engine:
        drafter = None if policy is None else self.drafter
        return Engine(self.target, drafter, policy, sampling=self.sampling, stops=self.stops)

    def _requests(self, batch: int) -> list[Request]:
        """Enough of them that the batch is full most of the time."""
        wanted = FULL * batch if batch > 1 else 1
        prompts = self.prompts * -(-wanted // len(self.prompts))
        count, seed = self.wanted.new_tokens, self.config.run.seed
        return [Request(ids, count, seed + n) for n, ids in enumerate(prompts)]

    def _kinds(self, grid: Grid) -> dict[int, Policy | None]:
        """Some rounds of every kind."""
        table = self.table[: max(grid.depths), : max(grid.widths)]
        tree = StaticTree(shapes.best_first(table, _usual(grid.nodes)))
        return {PLAIN: None, CHAIN: Chain(max(grid.depths), BEST), TREE: tree}

    def _rounds(self, kinds: dict[int, Policy | None], batch: int) -> dict[int, Parts]:
        """Medians over turns, each beside the plain rounds of its turn, so that drift cancels."""
        turns = [
            {kind: self._round(policy, batch) for kind, policy in kinds.items()}
            for _ in range(TURNS)
        ]
        usual = median(turn[PLAIN].whole for turn in turns)
        level = [
            {kind: parts.times(usual / turn[PLAIN].whole) for kind, parts in turn.items()}
            for turn in turns
        ]
        return {
            kind: Parts(*map(median, zip(*(turn[kind] for turn in level), strict=True)))
            for kind in kinds
        }

    def _round(self, policy: Policy | None, batch: int) -> Parts:
        """The parts of a round, decoded."""
        engine = self._engine(policy)
        outputs = engine.generate_all(self._requests(batch), batch)
        draft, target, whole = (
            1000 * sum(getattr(out.clock, part) for out in outputs) / max(1, engine.rounds)
            for part in ("draft", "target", "rounds")
        )
        tokens = sum(len(out.ids) - 1 for out in outputs)
        tau = tokens / max(1, sum(out.rounds for out in outputs))
        return Parts(draft, target, whole - draft - target, tau)

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


def _usual(nodes: Sequence[int]) -> int:
    """A tree in the middle of those that are tried."""
    return sorted(nodes)[len(nodes) // 2] if nodes else 1


def _factors(found: dict[tuple[int, ...], float]) -> Measured:
    sizes, batches = (tuple(sorted(set(axis))) for axis in zip(*found, strict=True))
    return Measured({"size": sizes, "batch": batches}, found)


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
