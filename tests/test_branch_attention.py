"""Attention of the unroll: the blockwise form against the dense reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.models.drafting.branch_attention import (
    QueryPlan,
    branch_attention,
    dense_attention,
    plan_queries,
)

Attend = Callable[..., Tensor]
both = pytest.mark.parametrize("attend", [dense_attention, branch_attention])


class Case:
    """Random queries, keys and values over packed documents, with gradients."""

    def __init__(
        self,
        lengths: list[list[int]],
        heads: int = 4,
        key_heads: int = 2,
        depths: int = 3,
        budget: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        document = torch.tensor(
            [[name for name, n in enumerate(row) for _ in range(n)] for row in lengths]
        )
        queried = torch.rand(document.shape, generator=generator) < 0.7
        self.plan = plan_queries(queried, document, heads, budget)

        def leaf(rows: int, count: int) -> Tensor:
            x = torch.randn(rows, count, 8, generator=generator)
            return x.to(dtype).requires_grad_()

        total, rows = document.numel(), len(self.plan.rows)
        self.q, self.key, self.value = (
            leaf(rows, heads),
            leaf(total, key_heads),
            leaf(total, key_heads),
        )
        self.own_keys = [leaf(rows, key_heads) for _ in range(depths - 1)]
        self.own_values = [leaf(rows, key_heads) for _ in range(depths - 1)]
        self.slope = torch.randn(rows, heads, 8, generator=generator)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.key, self.value, *self.own_keys, *self.own_values]

    def run(self, attend: Attend) -> tuple[Tensor, list[Tensor]]:
        """Output and gradients."""
        out = attend(self.q, self.key, self.value, self.own_keys, self.own_values, self.plan)
        return out, list(torch.autograd.grad((out.float() * self.slope).sum(), self.leaves))


CASES: dict[str, tuple[dict[str, object], int]] = {  # and the minimum number of blocks
    "one document, one block": ({"lengths": [[40]]}, 1),
    "documents and rows": ({"lengths": [[9, 14, 17], [25, 15]]}, 1),
    "many blocks": ({"lengths": [[9, 14, 17], [25, 15]], "budget": 400}, 6),
    "one row a block": ({"lengths": [[12, 8]], "budget": 1}, 10),
    "a head of keys each": ({"lengths": [[20], [20]], "key_heads": 4, "budget": 300}, 3),
    "one head of keys": ({"lengths": [[20], [20]], "key_heads": 1, "budget": 300}, 3),
    "only depth 1": ({"lengths": [[20], [20]], "depths": 1, "budget": 300}, 3),
    "seven depths": ({"lengths": [[31]], "depths": 7, "budget": 500}, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_branch_attention_equals_the_dense_reference(name: str) -> None:
    """Output and every gradient, float32."""
    fields, blocks = CASES[name]
    case = Case(**fields)  # type: ignore[arg-type]
    assert len(case.plan.blocks) >= blocks
    fast, fast_grads = case.run(branch_attention)
    slow, slow_grads = case.run(dense_attention)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    for mine, reference in zip(fast_grads, slow_grads, strict=True):
        assert reference.abs().max() > 0.01
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_close_to_float32() -> None:
    """bfloat16 carries 8 bits: errors of a few parts in 2^8 of the largest value."""
    lengths = [[9, 14, 17], [25, 15]]
    half = Case(lengths, budget=400, dtype=torch.bfloat16)
    full = Case(lengths, budget=400)
    with torch.no_grad():
        for leaf, rounded in zip(full.leaves, half.leaves, strict=True):
            leaf.copy_(rounded)
    out, grads = half.run(branch_attention)
    reference, reference_grads = full.run(dense_attention)
    assert out.dtype == torch.bfloat16
    for mine, exact in zip([out, *grads], [reference, *reference_grads], strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - exact).abs().max() < 4 * 2**-8 * exact.abs().max()


@both
def test_row_attends_to_the_columns_of_the_diagram(attend: Attend) -> None:
    """The drawing of the module, all four rows at depth 3.

    All scores are 0, so what a row sees weighs the same; values are the names of their keys.
    """
    plan = plan_queries(torch.ones(1, 4).bool(), torch.zeros(1, 4).long(), heads=1, budget=5)
    names = torch.eye(12)[:, None]
    seen = attend(
        torch.zeros(4, 1, 12),
        torch.randn(4, 1, 12),
        names[:4],
        [torch.randn(4, 1, 12)] * 2,
        [names[4:8], names[8:]],
        plan,
    )
    drawing = """
        x . . .   x . . .   x . . .
        x x . .   . x . .   . x . .
        x x x .   . . x .   . . x .
        x x x x   . . . x   . . . x
    """
    rows = [line.split() for line in drawing.strip().splitlines()]
    mask = torch.tensor([[mark == "x" for mark in row] for row in rows])
    torch.testing.assert_close(seen[:, 0], mask / mask.sum(1, keepdim=True))


@both
def test_a_document_does_not_attend_to_the_one_before(attend: Attend) -> None:
    """Documents of 2 and 3 rows; only rows 1, 3 and 4 are queries."""
    queried = torch.tensor([[False, True, False, True, True]])
    plan = plan_queries(queried, torch.tensor([[8, 8, 3, 3, 3]]), heads=1)
    names = torch.eye(5)[:, None]
    seen = attend(torch.zeros(3, 1, 5), torch.randn(5, 1, 5), names, [], [], plan)
    third = 1 / 3
    torch.testing.assert_close(
        seen[:, 0],
        torch.tensor([[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, third, third, third]]),
    )


def test_documents_of_different_batch_rows_are_separate() -> None:
    """Equal ids at the end of one row and the start of the next are two documents."""
    plan = plan_queries(torch.ones(2, 3).bool(), torch.tensor([[1, 2, 2], [2, 2, 5]]), heads=1)
    assert plan.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.document_start.tolist() == [0, 1, 1, 3, 3, 5]


@pytest.mark.parametrize("budget", [40, 200, 1000])
def test_blocks_cover_every_query_row_within_the_budget(budget: int) -> None:
    heads = 4
    plan = Case([[9, 14, 17], [25, 15]], heads=heads, budget=budget).plan
    covered: list[int] = []
    for start, stop, low, high in plan.blocks:
        covered += range(start, stop)
        assert low <= int(plan.document_start[start:stop].min())
        assert high > int(plan.rows[start:stop].max())
        assert stop - start == 1 or (stop - start) * (high - low) * heads <= budget
    assert covered == list(range(len(plan.rows)))


def test_a_plan_without_queries_is_empty() -> None:
    plan = plan_queries(torch.zeros(2, 5).bool(), torch.zeros(2, 5).long(), heads=2)
    assert (len(plan.rows), plan.blocks) == (0, [])


def saved(attend: Attend, case: Case) -> int:
    """Elements of the largest tensor saved for the backward pass."""
    sizes: list[int] = []

    def keep(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attend(case.q, case.key, case.value, case.own_keys, case.own_values, case.plan)
    return max(sizes)


def test_nothing_quadratic_is_saved_for_the_backward_pass() -> None:
    """400 rows of 4 heads: queries are 400 x 4 x 8 numbers, scores would be ~280 x 400 x 4."""
    case = Case([[400]], budget=10_000)
    rows = len(case.plan.rows)
    assert saved(branch_attention, case) == max(case.q.numel(), case.key.numel())
    assert saved(dense_attention, case) >= rows * 400  # the control


# ---- the small parts -----------------------------------------------------------------------------


def test_plans_are_plain_data() -> None:
    """The plan of a batch is computed once and serves every depth."""
    plan = plan_queries(torch.tensor([[True, False, True]]), torch.tensor([[0, 0, 0]]), heads=1)
    assert isinstance(plan, QueryPlan)
    assert (plan.rows.tolist(), plan.document_start.tolist(), plan.blocks) == (
        [0, 2],
        [0, 0],
        [(0, 2, 0, 3)],
    )
