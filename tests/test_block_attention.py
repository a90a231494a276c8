"""Attention of blocks over their context: the form in pieces against the dense reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafting.block.attention import (
    ATTENTIONS,
    BlockPlan,
    block_attention,
    plan_blocks,
)

DOCUMENT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 2, 2, -1, -1]])
ANCHORS = torch.tensor([0, 1, 4, 6, 8, 11, 13])


def plan(slots: int = 3, **changes: Any) -> BlockPlan:
    return plan_blocks(ANCHORS, DOCUMENT, slots, 4, **changes)


def attended(plan: BlockPlan) -> list[list[int]]:
    """The context rows that each query attends to."""
    pairs = zip(plan.context.document_start.tolist(), plan.context.rows.tolist(), strict=True)
    return [list(range(first, last + 1)) for first, last in pairs]


def leaves(rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, context keys and values, keys and values of the slots."""
    generator, sizes = torch.Generator().manual_seed(0), [(rows, 4), *[(16, 2)] * 2]
    sizes += [(rows, 2)] * 2
    drawn = [torch.randn(*size, 8, generator=generator) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def attend(kind: str, inputs: list[Tensor], of: BlockPlan) -> Tensor:
    q, key, value, own_key, own_value = inputs
    return ATTENTIONS[kind](q, key, value, own_key, own_value, of)


def run(kind: str, of: BlockPlan, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients."""
    out = attend(kind, inputs, of)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return out, list(torch.autograd.grad((out.float() * slope).sum(), inputs))


@pytest.mark.parametrize("budget", [1, 100, None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [{}, {"window": 3}, {"window": 3, "window_from": "anchor"}, {"window": 4}], ids=str
)
def test_pieces_equal_the_dense_mask_with_gradients(
    budget: int | None, causal: bool, window: dict[str, Any]
) -> None:
    of = plan(causal=causal, budget=budget, **window)
    inputs = leaves(len(ANCHORS) * 3)
    out, grads = run("fast", of, inputs)
    expected, expected_grads = run("reference", of, inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-4)


def test_a_block_sees_its_document_up_to_the_row_before_its_anchor() -> None:
    seen = attended(plan(2))[::2]
    assert seen == [
        [0], [0, 1], [0, 1, 2, 3, 4], [5, 6], [8], [8, 9, 10, 11], [8, 9, 10, 11, 12, 13],
    ]  # fmt: skip
    assert attended(plan(2))[1::2] == seen


def test_the_two_windows_by_hand() -> None:
    """The anchor after row 13 is row 14. A window of three: slot k sees rows above 14 + k - 3."""
    assert attended(plan(3, window=3))[-3:] == [[12, 13], [13], []]
    assert attended(plan(3, window=3, window_from="anchor"))[-3:] == [[11, 12, 13]] * 3


def test_a_slot_of_a_causal_block_sees_earlier_slots_only() -> None:
    """A change of the last slot's value reaches the other slots of a bidirectional block only."""
    for causal in (True, False):
        of, inputs = plan(causal=causal), leaves(len(ANCHORS) * 3)
        before = attend("fast", inputs, of)
        other = inputs[4].detach().clone()
        other[5] += 1  # slot 2 of the second block
        changed = (attend("fast", [*inputs[:4], other], of) - before).abs().sum((1, 2)) > 1e-6
        assert torch.nonzero(changed).flatten().tolist() == ([5] if causal else [3, 4, 5])


def test_bfloat16_is_close_to_float32() -> None:
    of = plan(budget=100)
    out = attend("fast", leaves(len(ANCHORS) * 3, torch.bfloat16), of)
    assert out.dtype == torch.bfloat16
    expected = attend("reference", leaves(len(ANCHORS) * 3), of)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


def test_nothing_quadratic_is_saved_for_the_backward_pass() -> None:
    """Doubling the context adds to what is saved only its own keys and values."""

    def saved(rows: int) -> int:
        anchors, document = torch.tensor([rows - 1]), torch.zeros(1, rows, dtype=torch.long)
        of, kept = plan_blocks(anchors, document, 4, 4), dict[int, int]()
        key, value = (torch.randn(rows, 2, 8, requires_grad=True) for _ in range(2))
        q, own = torch.randn(4, 4, 8, requires_grad=True), torch.randn(4, 2, 8)

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            block_attention(q, key, value, own, own, of)
        return sum(kept.values())

    assert saved(2000) - saved(1000) == 2 * 1000 * 2 * 8 * 4


def test_no_anchor_is_an_empty_result() -> None:
    none = torch.zeros(0, dtype=torch.long)
    of = plan_blocks(none, DOCUMENT, 3, 4)
    inputs = [x[: 0 if i in (0, 3, 4) else None] for i, x in enumerate(leaves(3))]
    assert attend("fast", inputs, of).shape == (0, 4, 8)
