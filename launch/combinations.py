"""Combinations of the lists of values on the command line of a sweep."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from outrider.conf.errors import ConfigError

MAX_RUNS = 1024


def expand_overrides(overrides: list[str]) -> list[list[str]]:
    """Expand ["drafter=a,b", "run.seed=1"] to [["drafter=a", "run.seed=1"], ["drafter=b", ..]]."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException as error:
        why = "This is not an override."
        raise ConfigError("overrides", error.override, why, "Write key=value,value.") from None
    ranges: list[Any] = [one.value() for one in parsed if one.is_range_sweep()]
    steps = [(each.stop - each.start) / (each.step or math.nan) for each in ranges]
    require_few(overrides, steps)  # hydra lists shuffled ones
    choices = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [str(one.input_line)]
        for one in parsed
    ]
    require_few(overrides, map(len, choices))
    return [list(job) for job in itertools.product(*choices)]


def require_few(overrides: list[str], counts: Iterable[float]) -> None:
    """Raise a `ConfigError` if there are more than MAX_RUNS combinations of so many values."""
    if not math.prod(counts) <= MAX_RUNS:  # nan: a range without a step
        why = f"That is more than {MAX_RUNS:,} runs."
        raise ConfigError("overrides", " ".join(overrides), why, "Use fewer values, or a search.")
