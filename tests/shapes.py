"""Runtime checks of array shapes and types, limited to the first calls of each function.

Checking a call takes many times what a small function computes. So in each test every function is
checked the first EACH times, and after CALLS calls in all, jaxtyping, which has costs of its own,
is disabled.

The import hook finds the checker by name: `--jaxtyping-packages=outrider,tests.first_checks`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import config

EACH = 5  # checks of a function's arguments, and as many of its results
CALLS = 20_000
PEP_484 = BeartypeConf(is_pep484_tower=True)  # an int is a float, as for mypy

Calls = dict[Callable[..., Any] | None, int]  # of every function; None: of all

_calls: Calls = {None: 0}


def check_again(enabled: bool = True) -> None:
    """Reset the counts, for a test or one of its fixtures; without `enabled`, disable checks."""
    _calls.clear()
    _calls[None] = 0
    config.update("jaxtyping_disable", not enabled)


@contextmanager
def unchecked() -> Iterator[None]:
    """Disable checks, for values that a user can pass against the annotation."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)


def first_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `beartype` to the first EACH calls."""
    checked = beartype(conf=PEP_484)(function)

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[None] += 1
        before = _calls.get(function, 0)
        if _calls[None] > CALLS:
            config.update("jaxtyping_disable", True)
        elif before < EACH:
            _calls[function] = before + 1
            checked(*args, **kwargs)

    return counted
