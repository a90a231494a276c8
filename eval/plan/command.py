"""`outrider plan`: predicted decoding speed of a checkpoint over draft shapes and settings.

The prediction combines three measurements: the acceptance of drafts on answers that the target
generates to a few prompts, the times of forwards of target and drafter, and the cost of whole
rounds of a few shapes within decoding. Some of the other shapes are decoded, interleaved with
these, and printed beside their prediction. For another machine, times come from its bandwidth and
arithmetic instead, and nothing is decoded.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from outrider.conf.command_settings import PlanConfig
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.garbage import exempt_objects
from outrider.conf.schema import Config
from outrider.data.reporter import Reporter
from outrider.data.suite import load_suite
from outrider.data.tokenise import prompt_ids
from outrider.eval.measure import answered_trace
from outrider.eval.open_drafter import load_run_models
from outrider.eval.plan.interleaved import InterleavedRuns, calibration_shapes, decode
from outrider.eval.plan.replay import rank_paths, tau
from outrider.eval.plan.roofline import MACHINES, Machine, ModelSize, RooflineTimes, drafter_sizes
from outrider.eval.plan.show import Check, print_plan, write_plan
from outrider.eval.plan.surface import Plan, draft_trees, make_plan
from outrider.eval.rank_tables import rank_table
from outrider.models import drafters
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.cost_table import FILE, CostSetting
from outrider.models.decode.costs.forward_times import measure_forwards
from outrider.models.decode.costs.measurement import LargestDraft, covers, keep_costs, most_rows
from outrider.models.decode.costs.round_costs import DecodedRound, DraftShape, Grid, MeasuredTimes
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import sampling_of
from outrider.models.decode.policy import Policy
from outrider.models.decode.request import Request, Stops
from outrider.models.decode.tree_shapes import Paths
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.load import LoadedTarget, stop_ids

RANKS = 10
OTHER_MODELS = (
    "Acceptance is that of this checkpoint with its own target; models of the given sizes, trained "
    "like these, may do better or worse."
)
PROMPTS_PER_SLOT = 2  # of a batch, so that it is full most of the time


def plan(config: Config, options: PlanConfig, explain: bool = False) -> int:
    """Run the verb.

    Args:
        explain: print every draft, check, definition and assumption, too.

    Raises:
        ConfigError, RunError: the run, target or prompts cannot be used, or nothing of the grid.
    """
    console, folder = Console(), Path(config.run.dir)
    _require_separate_times(config)
    study = PlanStudy(config, options, *load_run_models(config))
    exempt_objects()
    with console.status("measuring acceptance on the target's answers"):
        study.measure_acceptance()
    checks: list[Check] = []
    if study.machine is None:
        result, checks = study.measure_plan(Reporter(console))
    else:
        result = study.predict_machine(study.machine)
    words = f"run.dir={folder}"
    if temperature := config.decode.temperature:
        words += f" decode.temperature={temperature:g} decode.draft=best"
    print_plan(console, result, checks, words, explain, study.shared)
    deepest = max(row.depth for row in result.rows)
    if left_out := [depth for depth in options.depths if depth > deepest]:
        message = f"depths {left_out} left out: the maximum depth of this checkpoint is {deepest}"
        console.print(message, style="yellow")
    if not checks and study.machine is None and options.check:
        message = "No check: all these shapes were used to calibrate the prediction."
        console.print(message, style="yellow")
    write_plan(folder / "plan", result, options.out, [check.fields() for check in checks])
    files = f"plan: {folder / 'plan' / options.out}.json (every draft), .png"
    console.print(files, soft_wrap=True)
    return 0


def _require_separate_times(config: Config) -> None:
    """Raise RunError for a drafter that cannot be timed without the target."""
    name = config.drafter.name
    if drafters.drafter_class(name).runs_target():
        message = f"{name} drafts in the target's cache; a plan times drafts without the target."
        fix = f"Measure draft shapes: outrider eval run.dir={config.run.dir} decode.depth=2"
        raise RunError(message, fix)


class PlanStudy:
    """Measurements of one checkpoint on some prompts.

    Attributes:
        shared: the longest text in which decode=auto, by default, decides with the times of the
            plan; 0: it measures its own.
    """

    shared = 0

    def __init__(
        self, config: Config, options: PlanConfig, loaded: LoadedTarget, drafter: Drafter
    ) -> None:
        for name in ("depths", "batches", "contexts"):
            if not getattr(options, name):
                raise ConfigError(f"plan.{name}", [], "The list is empty.", "Give some.")
        self.config, self.options, self.drafter = config, options, drafter
        self.target, self.tokenizer = loaded.target, loaded.tokenizer
        self.machine = machine_of(options)  # the machine to predict; None measures this one
        if self.machine is None and (other_sizes(options) or options.budget):
            why = "Other models and budgets can be predicted only for a given machine."
            fix = "Add plan.machine=h100, or plan.bandwidth and plan.flops."
            raise ConfigError("plan.machine", None, why, fix)
        self.sampling = sampling_of(config.decode, self.target.vocab_size)
        self.stops = Stops(stop_ids(self.tokenizer, self.target))
        suite = load_suite(config, options.prompts)
        self.prompts = [prompt_ids(self.tokenizer, prompt.first_messages()) for prompt in suite]

    def measure_acceptance(self) -> None:
        """Generate the target's answers and measure how often each rank is accepted on them."""
        temperature, cfg = self.config.decode.temperature, self.config.drafter
        outputs = self._engine(None).generate_all(self._requests(1), 1)
        pairs = [(ids, out.ids) for ids, out in zip(self.prompts, outputs, strict=True)]
        self.target.set_taps(self.drafter.taps)
        traces = [answered_trace(self.target, *pair) for pair in pairs if len(pair[1]) > 1]
        ranks = min(RANKS, len(self.drafter.vocab))
        depths = min(cfg.depths, self.drafter.max_depth)
        try:
            self.table = rank_table(
                self.drafter, self.target, traces, depths, ranks, float(temperature), "best"
            ).table
        except ValueError as error:
            fix = f"Use more plan.prompts or plan.new_tokens than {self.options.new_tokens}."
            raise RunError(f"The target's answers are too short: {error}.", fix) from error
        answers = [rank_paths(self.drafter, trace, depths, ranks) for trace in traces]
        self.tau = partial(tau, answers)

    def predict_machine(self, machine: Machine) -> Plan:
        grid, size = self._grid(), self.options.bytes
        note: tuple[str, ...] = (OTHER_MODELS,)
        if (sizes := other_sizes(self.options)) is None:
            parts = drafter_sizes(self.drafter, self.target, max(grid.depths))
            sizes = ModelSize.of(self.target).stored(size), [part.stored(size) for part in parts]
            note = ()
        times = RooflineTimes(machine, *sizes, self.options.budget)
        plan = make_plan(self.table, self.tau, times, grid)
        return replace(plan, assumptions=(*note, *plan.assumptions))

    def measure_plan(self, reporter: Reporter) -> tuple[Plan, list[Check]]:
        """Return the plan of this machine, and the checks of some settings by decoding."""
        grid = self._grid()
        trees = draft_trees(self.table, grid)
        calibration = calibration_shapes(list(trees.values()))
        shapes = {batch: list(calibration) for batch in sorted(set(grid.batches))}
        free = [paths for paths in trees.values() if paths not in calibration]
        settings = self._settings_to_check(list(product(shapes, free)))
        for batch, paths in settings:
            shapes[batch].append(paths)
        runs = decode(shapes, self._engine, self._requests, reporter)
        alone = self._forwards([DraftShape.of(paths) for paths in trees.values()], grid, reporter)
        times = replace(alone, decoded=self._decoded_rounds(alone, runs, calibration, grid))
        self._keep(times)
        plan = make_plan(self.table, self.tau, times, grid)
        near = min(grid.contexts, key=lambda context: abs(context - self._mean_context()))
        rows = {(row.batch, row.key): row for row in plan.rows if row.context == near}
        keys = {paths: key for key, paths in trees.items()}
        return plan, [
            Check(rows[batch, keys[paths]], runs.tau(batch, paths), runs.speedup(batch, paths))
            for batch, paths in settings
        ]

    def _keep(self, times: MeasuredTimes) -> None:
        """Keep the times in the run's cost tables, if they can be written."""
        file, setting = Path(self.config.run.dir) / FILE, CostSetting.of(self.target, self.drafter)
        keep_costs(file, times, setting)
        if covers(times, *self._need_of_auto(), self.drafter.bends):
            self.shared = min(most_rows(times), self.target.shape().max_positions)

    def _need_of_auto(self) -> tuple[int, int, LargestDraft]:
        auto = Auto()
        auto.wrap(self.drafter, self.target)
        return auto.need(self.target)

    def _settings_to_check(self, settings: list[tuple[int, Paths]]) -> list[tuple[int, Paths]]:
        """Return `options.check` of the settings, from much work per token to little."""
        settings.sort(key=lambda s: s[0] * (len(s[1]) + 1) / self.tau(s[1]), reverse=True)
        count, last = min(self.options.check, len(settings)), len(settings) - 1
        steps = (round(i * last / max(1, count - 1)) for i in range(count))
        return [settings[i] for i in dict.fromkeys(steps)]

    def _forwards(
        self, shapes: Sequence[DraftShape], grid: Grid, reporter: Reporter
    ) -> MeasuredTimes:
        """Time target and drafter forwards outside decoding, those of decode=auto too."""
        name, (*_, largest) = CostSetting.of(self.target, self.drafter).name, self._need_of_auto()
        also = largest.points(self.drafter.bends, max(grid.batches))
        room = self.target.shape().max_positions - max(grid.contexts)
        tokens = [n for n in also.tokens if n <= room] + [1 + shape.nodes for shape in shapes]
        widest = math.ceil(max(shape.width for shape in shapes))
        widths, depths = [*grid.widths, *also.widths, widest], [*grid.depths, *also.depths]
        grid = grid._replace(widths=widths, depths=depths)
        models, repeats = (self.target, self.drafter), self.options.repeats
        settings = len({*grid.batches}) * len({*grid.contexts})
        with reporter.progress("timing forwards", settings, "batches and contexts") as progress:
            advance = partial(progress.advance, 1)
            return measure_forwards(*models, name, tokens, grid, repeats, advance)

    def _decoded_rounds(
        self, times: MeasuredTimes, runs: InterleavedRuns, calibration: Sequence[Paths], grid: Grid
    ) -> dict[int, list[DecodedRound]]:
        """Return the rounds of the calibration shapes, relative to their forwards alone."""
        context = min(max(round(self._mean_context()), min(grid.contexts)), max(grid.contexts))
        decoded: dict[int, list[DecodedRound]] = {batch: [] for batch in runs.repetitions}
        for batch, paths in product(runs.repetitions, calibration):
            shape, cost = DraftShape.of(paths), runs.parts(batch, paths)
            alone = times.forwards_only(shape, batch, context)
            draft = cost.draft / alone.draft if shape.depth else 1.0
            rounds = DecodedRound(shape, draft, cost.target / alone.target, max(0.0, cost.rest))
            decoded[batch].append(rounds)
        return decoded

    def _engine(self, policy: Policy | None) -> Engine:
        drafter = None if policy is None else self.drafter
        return Engine(self.target, drafter, policy, sampling=self.sampling, stops=self.stops)

    def _requests(self, batch: int) -> list[Request]:
        """Return the prompts, repeated so that the batch is full most of the time."""
        needed = PROMPTS_PER_SLOT * batch if batch > 1 else 1
        prompts = self.prompts * -(-needed // len(self.prompts))
        count, seed = self.options.new_tokens, self.config.run.seed
        return [Request(ids, count, seed + n) for n, ids in enumerate(prompts)]

    def _mean_context(self) -> float:
        """Return the mean number of tokens before a round."""
        return mean(map(len, self.prompts)) + self.options.new_tokens / 2

    def _grid(self) -> Grid:
        """Return the configured grid, limited to what the checkpoint and the target support.

        Recurrent layers leave chains.
        """
        options, (depths, ranks) = self.options, self.table.shape
        chains = bool(self.target.recurrent) or self.drafter.chains_only
        limit = self.target.shape().max_positions - max((*options.nodes, *options.depths)) - 8
        grid = Grid(
            [d for d in options.depths if d <= depths],
            [1] if chains else [n for n in options.widths if n <= ranks],
            () if chains else options.nodes,
            options.batches,
            [c for c in options.contexts if self.machine is not None or c <= limit],
        )
        for name in ("depths", "contexts"):
            if not getattr(grid, name):
                values, why = list(getattr(options, name)), "This checkpoint supports none of them."
                raise ConfigError(f"plan.{name}", values, why, "Try smaller ones.")
        return grid


def machine_of(options: PlanConfig) -> Machine | None:
    """Return the machine to predict; None measures this one."""
    machine = None if options.machine is None else MACHINES[options.machine]
    own_rates = options.bandwidth is not None or options.flops is not None
    if machine is None and not own_rates:
        if options.fixed is not None:
            fix = "Give it for plan.machine=h100, for instance."
            raise ConfigError("plan.fixed", options.fixed, "It is measured here.", fix)
        return None
    if machine is None and (options.bandwidth is None or options.flops is None):
        why, fix = "A machine needs both.", "Set plan.bandwidth (TB/s) and plan.flops (TFLOP/s)."
        raise ConfigError("plan.bandwidth", options.bandwidth, why, fix)
    changes: dict[str, Any] = {"name": "a machine of your own"} if own_rates else {}
    for name, unit in (("bandwidth", 1e12), ("flops", 1e12), ("fixed", 1e-6)):
        if (value := getattr(options, name)) is not None:
            changes[name] = unit * value
    return replace(machine or Machine("", 0.0, 0.0), **changes)


def other_sizes(options: PlanConfig) -> tuple[ModelSize, list[ModelSize]] | None:
    """Return sizes of a target and a drafter given by the options; None: those of the run."""
    params, layers = options.target_params, options.target_layers
    width, kv, drafter = options.target_width, options.target_kv_width, options.drafter_params
    if {params, layers, width, kv, drafter} == {None}:
        return None
    if params is None or layers is None or width is None or kv is None or drafter is None:
        why = "Other models need all of target_params, _layers, _width, _kv_width, drafter_params."
        raise ConfigError("plan.target_params", params, why, "Give all five, or none.")

    def size(billions: float, depth: int) -> ModelSize:
        rows = 2 * kv * depth * options.bytes
        return ModelSize(1e9 * billions, 1e9 * billions * options.bytes, rows, width, depth)

    return size(params, layers), [size(drafter, options.drafter_layers)]
