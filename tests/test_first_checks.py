"""The runtime checks of shapes that `make test` uses: they find a wrong shape, and they end."""

from collections.abc import Callable, Iterator

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
