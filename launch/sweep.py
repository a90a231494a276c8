"""`train -m`: one run per combination of values, one process each, then one table; or a search.

    python train.py -m drafter=eagle,medusa train.lr=1e-3,3e-4
    python train.py -m sweep=search drafter=eagle3
    python train.py -m drafter=eagle,medusa sweep.by=slurm sweep.jobs=8

Hydra's grammar for the lists; all runs are validated, and their folders told apart, before the
first one starts. A run that fails does not stop the others. The same command goes on where a sweep
was stopped: runs that are finished say so and end, the others continue.
"""

import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from rich.console import Console

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.conf.sweeps import RANGE, SweepConfig, read_sweep, word
from outrider.launch.job_pool import INTERRUPTED, Crew
from outrider.train.settings import NEEDED, Config, check_files, parse


def sweep(overrides: list[str]) -> int:
    """Train every combination and compare the runs, or search.

    Returns:
        0 when all runs ended well, 130 after Ctrl-C, else the first failure's exit code.

    Raises:
        ConfigError: a combination is no valid run, two of them share a folder, or there is no
            Slurm to start them.
    """
    settings, rest = read_sweep(overrides)
    if settings.by == "slurm":
        from outrider.launch import slurm

        slurm.check(settings)
    if settings.trials is not None:
        from outrider.launch.search import search

        return search(rest, settings)
    return every(rest, settings)


def every(overrides: list[str], settings: SweepConfig) -> int:
    """Every combination of the lists on the command line and under `sweep.over`."""
    combinations = [
        [*job, *more] for job in jobs(overrides) for more in itertools.product(*_over(settings))
    ]
    configs = [parse(compose(job)) for job in combinations]
    for config in configs:
        check_files(config, *NEEDED)
    _tell_apart(configs)
    console = Console()
    with Crew(settings) as crew:
        if code := write_texts(crew, combinations, configs):
            return code
        codes = _run_all(crew, combinations, configs, console)
    if INTERRUPTED in codes:
        return INTERRUPTED
    done = [config.run.dir for config, code in zip(configs, codes, strict=True) if code == 0]
    measured = [folder for folder in done if list((Path(folder) / "eval").glob("*.json"))]
    if measured:
        from outrider.eval.compare import compare

        compare(measured)
    for job, config, code in zip(combinations, configs, codes, strict=True):
        if code:
            where = "" if crew.alone else f" ({config.run.dir}/output.txt)"
            console.print(f"[red]failed with exit code {code}:[/red] {' '.join(job)}{where}")
    return next((code for code in codes if code), 0)


def _run_all(
    crew: Crew, combinations: list[list[str]], configs: list[Config], console: Console
) -> list[int]:
    """Exit codes. A run alone speaks to the terminal, others into `output.txt` each."""

    def one(number: int) -> int:
        job, config = combinations[number], configs[number]
        if crew.stopped:
            return INTERRUPTED
        head = f"run {number + 1} of {len(combinations)}: {' '.join(job)}"
        if crew.alone:
            console.rule(head)
            return crew.run("train", job)
        console.print(f"{head}  [dim]{config.run.dir}/output.txt[/dim]", highlight=False)
        code = crew.run("train", job, Path(config.run.dir) / "output.txt")
        ended = "done" if code == 0 else f"[red]exit code {code}[/red]"
        console.print(f"run {number + 1}: {ended}", highlight=False)
        return code

    if crew.sweep.jobs == 1:
        codes = list[int]()
        while len(codes) < len(combinations) and INTERRUPTED not in codes:
            codes.append(one(len(codes)))
        return codes
    with ThreadPoolExecutor(crew.sweep.jobs) as threads:
        try:
            return list(threads.map(one, range(len(combinations))))
        except KeyboardInterrupt:
            crew.stop()
            return [INTERRUPTED]


def _over(settings: SweepConfig) -> list[list[str]]:
    """`sweep.over` as overrides, a list per key."""
    lists = []
    for name, values in (settings.over or {}).items():
        if isinstance(values, Mapping):
            why = "A range has no end of values; without sweep.trials every value is tried."
            raise ConfigError(f"sweep.over.{name}", dict(values), why, RANGE)
        lists.append([word(name, value) for value in values])
    return lists


def jobs(overrides: list[str]) -> list[list[str]]:
    """["drafter=a,b", "run.seed=1"] -> [["drafter=a", "run.seed=1"], ["drafter=b", ..]]."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException as error:
        why = "This is not an override."
        raise ConfigError("overrides", error.override, why, "Write key=value,value.") from None
    choices = []
    for override in parsed:
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    return [list(job) for job in itertools.product(*choices)]


def _tell_apart(configs: list[Config]) -> None:
    folders = [config.run.dir for config in configs]
    twice = next((folder for folder in folders if folders.count(folder) > 1), None)
    if twice is not None:
        fix = "Name the folder after what differs: run.dir='runs/lr-${train.lr}'."
        raise ConfigError("run.dir", twice, "Several runs of the sweep would write there.", fix)


def write_texts(crew: Crew, combinations: list[list[str]], configs: list[Config]) -> int:
    """Text that the target writes itself is written first, so that no run pays for another's.

    Returns:
        0, or the exit code of what did not end well.
    """
    seen = set()
    for job, config in zip(combinations, configs, strict=True):
        text = repr((config.target, config.data, config.run.seed))
        if config.data.name == "self" and text not in seen:
            seen.add(text)
            if code := crew.run("prepare", job):
                return code
    return 0
