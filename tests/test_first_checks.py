"""The runtime checks of shapes that `make test` uses: they find a wrong shape, and they end."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import pytest
import torch
from jaxtyping import Float, TypeCheckError, config, jaxtyped
from torch import Tensor

from tests import shapes

Twice = Callable[[Tensor], Tensor]


@pytest.fixture
def twice() -> Iterator[Twice]:
    def doubled(x: Float[Tensor, "A B"]) -> Float[Tensor, "A B"]:
        return torch.cat([x, x]) if len(x) == 2 else 2 * x

    yield jaxtyped(doubled, typechecker=shapes.first_checks)
    shapes.check_again()


def test_arguments_and_results_are_checked(twice: Twice) -> None:
    twice(torch.ones(3, 3))
    with pytest.raises(TypeCheckError, match="parameters"):
        twice(torch.ones(3))
    with pytest.raises(TypeCheckError, match="return value"):
        twice(torch.ones(2, 3))


def test_calls_are_counted_per_function(twice: Twice) -> None:
    def same(x: Tensor) -> Tensor:
        return x

    other = jaxtyped(same, typechecker=shapes.first_checks)
    for _ in range(10 * shapes.EACH):
        other(torch.ones(1))
    with pytest.raises(TypeCheckError):
        twice(torch.ones(2, 3))


def test_checks_end_and_can_be_reset(twice: Twice) -> None:
    for _ in range(shapes.EACH):
        twice(torch.ones(3, 3))
    twice(torch.ones(2, 3))
    shapes.check_again()
    with pytest.raises(TypeCheckError):
        twice(torch.ones(2, 3))


def test_jaxtyping_is_disabled_after_many_calls(twice: Twice) -> None:
    for _ in range(shapes.CALLS):
        twice(torch.ones(1, 1))
    assert config.jaxtyping_disable
    shapes.check_again()
    assert not config.jaxtyping_disable


def tripled(x: Float[Tensor, "A B"]) -> Float[Tensor, "A B"]:
    """A function of a module; its results of two rows have a wrong shape."""
    return torch.cat([x, x, x]) if len(x) == 2 else 3 * x


class Kinds:
    """Every kind of function of a class."""

    def method(self) -> int:
        return 1

    @staticmethod
    def static() -> int:
        return 2

    @classmethod
    def of_class(cls) -> int:
        return 3

    @property
    def read(self) -> int:
        return 4

    @cached_property
    def kept(self) -> int:
        return 5

    @contextmanager
    def held(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize("name", ["method", "static", "of_class", "read", "kept", "held"])
def test_functions_are_found_below_their_decorators(name: str) -> None:
    found = shapes.find_function(__name__, f"Kinds.{name}")
    assert found is not None
    assert (found.__qualname__, found.__code__.co_name) == (f"Kinds.{name}", name)


def test_functions_inside_others_are_not_found() -> None:
    assert shapes.find_function(__name__, "twice.<locals>.doubled") is None
    assert shapes.find_function("no_such_module", "f") is None


def test_a_checked_function_is_called_directly_until_the_next_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = jaxtyped(tripled, typechecker=shapes.first_checks)
    monkeypatch.setattr(sys.modules[__name__], "tripled", checked)
    for _ in range(shapes.EACH):
        checked(torch.ones(3, 3))
    assert getattr(shapes.find_function(__name__, "tripled"), shapes.DIRECT)
    checked(torch.ones(2, 3))
    shapes.check_again()
    with pytest.raises(TypeCheckError, match="return value"):
        checked(torch.ones(2, 3))
