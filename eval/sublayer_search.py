"""The search of Draft & Verify: which sublayers of the target a draft skips.

A candidate is a subset of the 2L attention and MLP sublayers, and its value the measured speed of
decoding with it (sublayer_speed.py). The first candidates are chosen by hand and at random. Then
TPE and a recombination of two of the best candidates propose in turn. A candidate that is clearly
slower than the best so far on the same prompts is pruned. The best few are measured again, in
turns, and the median decides: the largest of many noisy values is too large.

Every finished candidate is a line of `search.jsonl`. A proposal depends only on the seed and on the
lines before it, so a search that continues after a stop makes the proposals that it would have made
without one.

Source: Zhang et al. 2023, "Draft & Verify", arXiv:2309.08168, section 3.2; TPE, Bergstra et al.
2011, as implemented in Optuna (Akiba et al. 2019, arXiv:1907.10902). Differs: TPE over binary
variables and recombination instead of a Gaussian process over [0, 1], pruning, and the repeated
measurement.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from outrider.conf.errors import ConfigError
from outrider.conf.files import append, read_lines, write
from outrider.conf.json_shapes import require_shape, token
from outrider.conf.searched import SearchConfig, Skipped
from outrider.data.reporter import Reporter
from outrider.eval.sublayer_speed import Speed, Timing

LOG = "search.jsonl"
RANDOM = 8  # random candidates, of growing size, among the first ones
PARENTS, FLIPS = 8, 3  # best candidates that are recombined; sublayers flipped at most
PRUNE = 0.85  # a candidate is stopped below this share of the best speedup on the same prompts
FINALISTS, REPEATS = 4, 3  # candidates measured again, and how often
SEED_STRIDE = 1_000_003
HASHED = {  # settings of which the log has hashes
    "target": "another target",
    "prompts": "other prompts (data.*, drafter.search.contexts or .prompts)",
}
TRIAL = {
    "number": int, "skip_attention, skip_mlp": [token], "pruned": bool,
    "speedups": [float], "speedup, tokens_per_second, tau, accepted": float,
}  # fmt: skip

Measure = Callable[[Skipped], Iterator[Timing]]


class Trial(NamedTuple):
    """A measured candidate.

    Attributes:
        speedups: over the first 1, 2, .. prompts.
        speed: over all that were decoded.
        pruned: not all prompts were decoded.
    """

    candidate: Skipped
    speedups: list[float]
    speed: Speed
    pruned: bool

    @property
    def value(self) -> float:
        return self.speed.speedup

    def to_line(self, index: int) -> dict[str, Any]:
        return {
            "number": index, **self.candidate.settings(), "pruned": self.pruned,
            "speedups": self.speedups, **self.speed._asdict(),
        }  # fmt: skip

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> "Trial":
        candidate = Skipped(tuple(line["skip_attention"]), tuple(line["skip_mlp"]))
        speed = Speed(*(line[name] for name in Speed._fields))
        return cls(candidate, line["speedups"], speed, line["pruned"])


class Finalist(NamedTuple):
    """A candidate that was measured again; `speedups` has one value per repetition."""

    candidate: Skipped
    speedups: list[float]
    speed: Speed  # of all repetitions

    @property
    def value(self) -> float:
        return median(self.speedups)


def read_log(file: Path) -> tuple[dict[str, Any] | None, list[Trial]]:
    """Return the settings of a search and its candidates; None and [] without a log.

    Raises:
        CorruptFile: the log cannot be read.
    """
    fix = "Search again, with another run.dir."
    lines = read_lines(file, fix, torn=True) if file.is_file() else []
    for row, line in enumerate(lines[1:], start=2):
        require_shape(line, TRIAL, f"{file}: line {row}", fix)
    return (lines[0] if lines else None), [Trial.from_line(line) for line in lines[1:]]


def probes(layers: int, seed: int, given: Skipped) -> list[Skipped]:
    """Return the first candidates: given ones, some chosen by hand, and random ones.

    Middle layers are the half of all layers in the middle. A random candidate skips a sublayer with
    probability 0.06, 0.12, .. 0.5.
    """
    every, middle = range(layers), range(layers // 4, layers - layers // 4)
    second = tuple(middle[::2])
    chosen = [
        given, Skipped(), Skipped(second, ()), Skipped((), second), Skipped(second, second),
        Skipped(tuple(middle), ()), Skipped(tuple(middle), tuple(middle[::4])),
    ]  # fmt: skip
    random = Random(seed)
    for i in range(RANDOM):
        share = 0.5 * (i + 1) / RANDOM
        parts = (tuple(k for k in every if random.random() < share) for _ in range(2))
        chosen.append(Skipped(*parts))
    return [one for one in dict.fromkeys(chosen) if not skips_all(one, layers)]


def skips_all(candidate: Skipped, layers: int) -> bool:
    """Return whether no sublayer is left, so that a draft would not depend on its context."""
    return len(candidate.attention) == len(candidate.mlp) == layers


class SublayerSearch:
    """Candidates of one target, measured and logged one after the other."""

    def __init__(
        self, folder: Path, layers: int, search: SearchConfig, seed: int, measure: Measure,
        reporter: Reporter, given: Skipped = Skipped(),  # noqa: B008 - an immutable value
    ) -> None:  # fmt: skip
        """
        Args:
            seed: of the proposals.
            measure: yields the times of one prompt after the other.
            given: the first candidate.
        """
        import optuna  # not to read a log

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.folder, self.layers, self.search, self.seed = folder, layers, search, seed
        self.measure, self.reporter = measure, reporter
        self.probes = probes(layers, seed, given)
        self.trials = list[Trial]()
        self.space = {
            f"{kind}.{layer}": optuna.distributions.CategoricalDistribution((False, True))
            for kind in Skipped._fields for layer in range(layers)
        }  # fmt: skip
        self.study = optuna.create_study(direction="maximize")

    def resume(self, settings: dict[str, Any]) -> int:
        """Read the log of an earlier start, or begin one; return the number of its candidates.

        Args:
            settings: what the values depend on.

        Raises:
            ConfigError: the folder has a search with other settings.
            CorruptFile: the log cannot be read.
        """
        file = self.folder / LOG
        before, trials = read_log(file)
        if before is not None:
            _require_equal(before, json.loads(json.dumps(settings)), self.folder)
        for trial in trials:
            self._add(trial)
        rows = [settings, *(trial.to_line(i) for i, trial in enumerate(self.trials))]
        write(file, "".join(json.dumps(row) + "\n" for row in rows).encode())  # without a torn line
        return len(self.trials)

    def run(self) -> list[Trial]:
        """Measure candidates, one at least, until there are `search.trials` or the time is over."""
        start, before, total = time.monotonic(), len(self.trials), self.search.trials
        limit = None if self.search.minutes is None else 60 * self.search.minutes
        report = self.reporter.progress
        with report("searching", total, "candidates", before=before, seconds=limit) as bar:
            while len(self.trials) < total:
                late = limit is not None and time.monotonic() - start > limit
                if late and self.best is not None:
                    break
                index, best = len(self.trials), self.best
                self._add(trial := self._measured(self._propose(index)))
                append(self.folder / LOG, json.dumps(trial.to_line(index)) + "\n")
                if self.best is not best:
                    self.reporter.print(_describe(index, trial))
                bar.advance(1)
        return self.trials

    @property
    def best(self) -> Trial | None:
        """The fastest candidate that was measured to the end; the earliest of equal ones."""
        return max(self._complete(), key=lambda trial: trial.value, default=None)

    def finalists(self) -> list[Finalist]:
        """Measure the best candidates again, in turns; return them, the fastest first."""
        values = {trial.candidate: trial.value for trial in self._complete()}
        best = sorted(values, key=lambda one: -values[one])[:FINALISTS]
        timings = {one: list[list[Timing]]() for one in best}
        for _ in range(REPEATS):
            for one in best:
                timings[one].append(list(self.measure(one)))
        found = [
            Finalist(one, [Speed.of(run).speedup for run in runs], Speed.of(chain(*runs)))
            for one, runs in timings.items()
        ]
        return sorted(found, key=lambda one: -one.value)

    def _complete(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.pruned]

    def _propose(self, index: int) -> Skipped:
        """Return the candidate of a trial, by the seed and the trials before it alone.

        A proposal that was measured before is changed: it would add little.
        """
        if index < len(self.probes):
            return self.probes[index]
        seed = (self.seed * SEED_STRIDE + index) % 2**32
        random = Random(seed)
        skipped = self._recombined(random) if index % 2 else self._sampled(seed)
        return self._unmeasured(skipped, random)

    def _recombined(self, random: Random) -> set[str]:
        """Return each sublayer as in one of two of the best candidates, some of them flipped."""
        ranked = sorted(self._complete(), key=lambda trial: -trial.value)[:PARENTS]
        one, other = (_names(random.choice(ranked).candidate) for _ in range(2))
        mixed = {name for name in self.space if name in random.choice((one, other))}
        return mixed ^ {*random.sample([*self.space], random.randint(1, FLIPS))}

    def _sampled(self, seed: int) -> set[str]:
        """Return the sublayers that TPE proposes to skip."""
        import optuna

        self.study.sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, n_startup_trials=1
        )
        trial = self.study.ask(self.space)
        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)  # `_add` adds what was measured
        return {name for name, value in trial.params.items() if value}

    def _unmeasured(self, skipped: set[str], random: Random) -> Skipped:
        """Flip sublayers at random, one after the other, until the candidate is a new one."""
        known, names = {trial.candidate for trial in self.trials}, [*self.space]
        for name in ["", *random.sample(names, len(names))]:
            skipped = skipped ^ {name} if name else skipped
            split = [part.split(".") for part in skipped]
            layers = ([int(k) for kind, k in split if kind == part] for part in Skipped._fields)
            candidate = Skipped(*(tuple(sorted(part)) for part in layers))
            if candidate not in known:
                break
        return candidate

    def _measured(self, candidate: Skipped) -> Trial:
        """Measure a candidate, and stop as soon as it is clearly slower than the best."""
        if skips_all(candidate, self.layers):
            return Trial(candidate, [0.0], Speed(0.0, 0.0, 0.0, 0.0), pruned=True)
        timings, speedups, best = list[Timing](), list[float](), self.best
        pruned = False
        for timing in self.measure(candidate):
            timings.append(timing)
            speedups.append(Speed.of(timings).speedup)
            done = len(speedups)
            if best is not None and len(self.search.contexts) <= done < len(best.speedups):
                pruned = speedups[-1] < PRUNE * best.speedups[done - 1]
            if pruned:
                break
        return Trial(candidate, speedups, Speed.of(timings), pruned)

    def _add(self, trial: Trial) -> None:
        from optuna.trial import TrialState, create_trial

        self.trials.append(trial)
        skipped = _names(trial.candidate)
        params = {name: name in skipped for name in self.space}
        state = TrialState.PRUNED if trial.pruned else TrialState.COMPLETE
        self.study.add_trial(
            create_trial(
                state=state, params=params, distributions=self.space,
                value=None if trial.pruned else trial.value,
                intermediate_values=dict(enumerate(trial.speedups)),
            )
        )  # fmt: skip


def _names(candidate: Skipped) -> set[str]:
    """Return the skipped sublayers as names: {"attention.3", "mlp.0"}."""
    parts = candidate._asdict().items()
    return {f"{kind}.{layer}" for kind, layers in parts for layer in layers}


def _describe(index: int, trial: Trial) -> str:
    speed = trial.speed
    numbers = f"{speed.tokens_per_second:.1f} tokens/s, {speed.speedup:.2f}x, tau {speed.tau:.2f}"
    return f"candidate {index}: {numbers}, the best so far; skips {trial.candidate}"


def _require_equal(known: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError if the log of a folder was written with other settings."""
    for name, value in settings.items():
        if known.get(name) != value:
            other = HASHED.get(name, f"{name} = {known.get(name)}, not {value}")
            fix = "Repeat its settings to continue it, or choose another run.dir."
            raise ConfigError("run.dir", str(folder), f"{folder} has a search with {other}.", fix)
