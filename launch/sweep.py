"""`train -m`: one run per combination of values, one process each, then one table.

    python train.py -m drafter=eagle,medusa train.lr=1e-3,3e-4

Hydra's grammar for the lists; all runs are validated, and their folders told apart, before the
first one starts. A run that fails does not stop the others.
"""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from rich.console import Console

import outrider
from outrider.train.compose import compose
from outrider.train.config import NEEDED, Config, check_files, parse
from outrider.train.errors import ConfigError

INTERRUPTED = 130


def sweep(overrides: list[str]) -> int:
    """Train every combination and compare the runs.

    Returns:
        0 when all runs ended well, 130 after Ctrl-C, else the first failure's exit code.

    Raises:
        ConfigError: a combination is no valid run, or two of them share a folder.
    """
    combinations = jobs(overrides)
    configs = [parse(compose(job)) for job in combinations]
    for config in configs:
        check_files(config, *NEEDED)
    _tell_apart(configs)
    console, codes = Console(), list[int]()
    if code := _write_texts(combinations, configs):
        return code
    for i, job in enumerate(combinations, start=1):
        console.rule(f"run {i} of {len(combinations)}: {' '.join(job)}")
        codes.append(_run("train", job))
        if codes[-1] == INTERRUPTED:
            return INTERRUPTED
    done = [config.run.dir for config, code in zip(configs, codes, strict=True) if code == 0]
    measured = [folder for folder in done if list((Path(folder) / "eval").glob("*.json"))]
    if measured:
        from outrider.eval.compare import compare

        compare(measured)
    for job, code in zip(combinations, codes, strict=True):
        if code:
            console.print(f"[red]failed with exit code {code}:[/red] {' '.join(job)}")
    return next((code for code in codes if code), 0)


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


def _write_texts(combinations: list[list[str]], configs: list[Config]) -> int:
    """Text that the target writes itself is written first, so that no run pays for another's.

    Returns:
        0, or the exit code of what did not end well.
    """
    seen = set()
    for job, config in zip(combinations, configs, strict=True):
        text = repr((config.target, config.data, config.run.seed))
        if config.data.name == "self" and text not in seen:
            seen.add(text)
            if code := _run("prepare", job):
                return code
    return 0


def _run(verb: str, job: list[str]) -> int:
    """A process of its own, so that memory and settings of one run never touch the next."""
    root = str(Path(outrider.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "outrider.train.cli", verb, *job]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    except KeyboardInterrupt:  # the run was told too, and saves; a second one ends the waiting
        child.wait()
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
