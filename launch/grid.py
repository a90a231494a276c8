"""A grid: one run per combination of a sweep's values."""

import itertools
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.text import Text

from outrider.conf.compose import compose
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.schema import Config
from outrider.conf.sweeps import RANGE_FIX, SweepConfig, to_override
from outrider.launch.combinations import expand_overrides, require_few
from outrider.launch.compare import compare
from outrider.launch.job_pool import JobPool
from outrider.launch.processes import INTERRUPTED
from outrider.train.settings import INPUT_FILES, check_files, parse


def run_grid(overrides: list[str], settings: SweepConfig) -> int:
    """Run every combination of the lists on the command line and in `sweep.over`."""
    jobs, lists = expand_overrides(overrides), _expand_over(settings)
    require_few(overrides, [len(jobs), *map(len, lists)])
    combinations = [[*job, *more] for job in jobs for more in itertools.product(*lists)]
    configs = [parse(compose(job)) for job in combinations]
    for config in configs:
        check_files(config, *INPUT_FILES)
    counts = Counter(config.run.dir for config in configs)
    if shared := [folder for folder, count in counts.items() if count > 1]:
        fix = "Use the varied keys in its name: run.dir='runs/lr-${train.lr}'."
        raise ConfigError("run.dir", shared[0], "Several runs of the sweep would write there.", fix)
    console = Console()
    with JobPool(settings) as pool:
        if code := generate_texts(pool, combinations, configs):
            return code
        codes = _run_all(pool, combinations, configs, console)
    if INTERRUPTED in codes:
        return INTERRUPTED
    done = [config.run.dir for config, code in zip(configs, codes, strict=True) if code == 0]
    measured = [folder for folder in done if list((Path(folder) / "eval").glob("*.json"))]
    if measured:
        compare(measured)
    for job, config, code in zip(combinations, configs, codes, strict=True):
        if code:
            log = "" if pool.prints else f" ({config.run.dir}/output.txt)"
            failed = (f"failed with exit code {code}:", "red")
            console.print(Text.assemble(failed, f" {' '.join(job)}{log}"))
    return next((code for code in codes if code), 0)


def _run_all(
    pool: JobPool, combinations: list[list[str]], configs: list[Config], console: Console
) -> list[int]:
    """Return exit codes. A single run prints to the terminal, parallel ones to `output.txt`."""

    def run(number: int) -> int:
        job, config = combinations[number], configs[number]
        if pool.stopped:
            return INTERRUPTED
        title = f"run {number + 1} of {len(combinations)}: {' '.join(job)}"
        if pool.prints:
            console.rule(title)
            return pool.run("train", job)
        output = (f"{config.run.dir}/output.txt", "dim")
        console.print(Text.assemble(f"{title}  ", output))
        code = pool.run("train", job, Path(config.run.dir) / "output.txt")
        result = ("done", "") if code == 0 else (f"exit code {code}", "red")
        console.print(Text.assemble(f"run {number + 1}: ", result))
        return code

    if pool.sweep.jobs == 1:
        codes = list[int]()
        while len(codes) < len(combinations) and INTERRUPTED not in codes:
            codes.append(run(len(codes)))
        return codes
    with ThreadPoolExecutor(pool.sweep.jobs) as threads:
        try:
            return list(threads.map(run, range(len(combinations))))
        except KeyboardInterrupt:
            pool.stop()
            return [INTERRUPTED]


def _expand_over(settings: SweepConfig) -> list[list[str]]:
    """Return the overrides of `sweep.over`, a list per key."""
    lists = []
    for name, values in (settings.over or {}).items():
        if isinstance(values, Mapping):
            why = "A grid needs lists of values; only a search (sweep.trials) takes a range."
            raise ConfigError(f"sweep.over.{name}", dict(values), why, RANGE_FIX)
        lists.append([to_override(name, value) for value in values])
    return lists


def generate_texts(pool: JobPool, combinations: list[list[str]], configs: list[Config]) -> int:
    """Generate self-generated text before the runs, so that its time counts for none of them.

    Returns the exit code of a failed generation, else 0.
    """
    seen = set()
    for job, config in zip(combinations, configs, strict=True):
        text = repr((config.target, config.data, config.run.seed))
        if config.data.name == "self" and text not in seen:
            seen.add(text)
            if code := pool.run("prepare", job):
                return code
    return 0
