"""Runtime checks of array shapes and types, limited to the first calls of each function.

Checking a call takes many times what a small function computes, and so does jaxtyping's wrapper
alone. So in each test every function is checked the first EACH times, and is then called directly.
Functions that are defined in another cannot be: after CALLS calls of these, jaxtyping is disabled.

The import hook finds the checker by name: `--jaxtyping-packages=outrider,tests.first_checks`.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import config

EACH = 5  # checks of a function's arguments, and as many of its results
CALLS = 20_000
PEP_484 = BeartypeConf(is_pep484_tower=True)  # an int is a float, as for mypy
DIRECT = "__no_type_check__"  # jaxtyping's mark of a function that it calls without checks

_checks = Counter[object]()  # of every function; None: of all
_direct = list[Callable[..., Any]]()


def check_again(enabled: bool = True) -> None:
    """Begin again, for a test or one of its fixtures; without `enabled`, disable checks."""
    _checks.clear()
    while _direct:
        delattr(_direct.pop(), DIRECT)
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
    """Apply `beartype` to the first EACH calls; jaxtyping checks arguments and results by one."""
    checked, name = beartype(conf=PEP_484)(function), (function.__module__, function.__qualname__)
    is_inner = "<locals>" in function.__qualname__
    key, limit = (function, EACH) if is_inner else (name, 2 * EACH)

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _checks.update((key, None))
        if _checks[key] <= limit:
            checked(*args, **kwargs)
        if _checks[key] == limit and (original := find_function(*name)):
            setattr(original, DIRECT, True)
            _direct.append(original)
        if _checks[None] > CALLS:
            config.update("jaxtyping_disable", True)

    return counted


def find_function(module: str, qualname: str) -> Callable[..., Any] | None:
    """Return a function below its decorators; None for one that is defined in another."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = inspect.getattr_static(found, part, None)
    found = getattr(found, "fget", found)  # of a property
    found = getattr(found, "func", found)  # of a cached property
    found = inspect.unwrap(getattr(found, "__func__", found)) if found else None
    return found if inspect.isfunction(found) else None
