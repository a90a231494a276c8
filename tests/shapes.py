"""Shapes and types of arrays, checked while tests run: as often as a mistake needs to be seen.

Checking a call takes many times what a small function computes, and a test that draws ten thousand
times would spend its minutes on the same few calls. So in each test every function is checked the
first EACH times; behind CALLS calls there is hardly one left, and jaxtyping, whose own part of the
work goes on, is switched off.

The import hook takes a checker by name: `--jaxtyping-packages=outrider,tests.first_checks`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from beartype import beartype
from jaxtyping import config

EACH = 5  # of what comes in, and as many of what goes out
CALLS = 20_000

Calls = dict[Callable[..., Any] | None, int]  # of every function; None: of all

_calls: Calls = {None: 0}


def check_again() -> None:
    """Begin anew, for a test or one of its fixtures."""
    _calls.clear()
    _calls[None] = 0
    config.update("jaxtyping_disable", False)


@contextmanager
def unchecked() -> Iterator[None]:
    """For what a user may hand over although its type forbids it."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)


def first_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype`, the first times."""
    checked = beartype(function)

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
