"""Batches of prompts, for every drafter.

The reference is the loop of `Drafter`: one prompt after the other. Prompts differ in length, are at
different points of their texts, join while others are decoded, and leave.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.cache.layer_rows import GrowingRows
from outrider.models.drafting.causal_lm import config_to_dict
from outrider.models.drafting.drafter import Drafter, State
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import tiny
from tests.families import small_model

CLOSE = 1e-5
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "eagle3": [{"layers": 2, "qk_norm": True, "feedback": "normed", "window": 3}],
    "mtp": [{"mode": "recurrent"}, {"feed": "raw"}],
    "medusa": [{"own_heads": False}],
    "draft_lm": [
        {"body": config_to_dict(small_model(family).config)}
        for family in ("gemma3", "gpt2", "mistral")
    ],
    "staged": [
        {"inner": {"name": "ngram"}, "inner_width": 4},
        {"inner": {"name": "eagle3"}, "inner_width": 4},
        {"inner": {"name": "staged", "inner": {"name": "suffix"}}},
    ],
}
NAMES = [*tiny.STANDALONE, *tiny.COMPOSITE]
CASES = [(name, changes) for name in NAMES for changes in [{}, *VARIANTS.get(name, [])]]
LABELS = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
# of each document: rows absorbed alone, and rows absorbed together; two join, one has a single row
ROW_COUNTS = ((5, 3), (1, 1), (0, 3), (10, 2), (0, 1))
CHAIN = (1, 1, 1, 1)
TREE = (1, 3, 2, 4)  # nodes at each level


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(params=CASES, ids=LABELS)
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    """Perturbed weights: heads that are still equal would hide a mistake."""
    name, changes = request.param
    perturbed = tiny.drafter(name, target, **changes).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for value in perturbed.parameters():
            value.add_(0.05 * torch.randn_like(value))
    return perturbed


@pytest.fixture
def trace(drafter: Drafter, target: Target) -> Trace:
    target.set_taps(drafter.taps)
    return tiny.packed_trace(target)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def parts(trace: Trace, lengths: Sequence[tuple[int, int]]) -> list[Trace]:
    """Rows first..stop of every document, as the decoder passes them."""
    places = zip(tiny.document_spans(trace), lengths, strict=True)
    return [
        tiny.verified_rows(trace, row, start + a, start + b) for (row, start, _), (a, b) in places
    ]


def begin(drafter: Drafter, trace: Trace) -> list[State | None]:
    """States of the prompts already started; None for new ones."""
    firsts = parts(trace, [(0, before) for before, _ in ROW_COUNTS])
    pairs = zip(firsts, ROW_COUNTS, strict=True)
    return [drafter.absorb(None, first) if before else None for first, (before, _) in pairs]


def new_rows(trace: Trace) -> list[Trace]:
    return parts(trace, [(before, before + more) for before, more in ROW_COUNTS])


def loop(drafter: Drafter, states: Sequence[State | None], traces: Sequence[Trace]) -> list[State]:
    return Drafter.absorb_batch(drafter, states, traces)


def draft_level(depth: int, count: int, above: int, prompts: int) -> tuple[Tensor, Tensor]:
    """Tokens and parents of one level, other ones for every prompt."""
    generator = torch.Generator().manual_seed(depth)
    ids = torch.randint(3, tiny.VOCAB, (prompts, count), generator=generator)
    return ids, torch.randint(above, (prompts, count), generator=generator)


def walk(
    drafter: Drafter, states: Sequence[State], levels: Sequence[int], together: bool
) -> tuple[list[Tensor], list[State]]:
    """Logits [B, N, Vd] of every level, and the states after the last."""
    step = drafter.step_batch if together else lambda *level: Drafter.step_batch(drafter, *level)
    outputs, above, now = [], 1, list(states)
    for depth, count in enumerate(levels[: drafter.max_depth], start=1):
        logits, now = step(now, depth, *draft_level(depth, count, above, len(states)))
        outputs.append(logits)
        above = count
    return outputs, now


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    assert [x.shape for x in a] == [x.shape for x in b]
    pairs = zip(a, b, strict=True)
    return all(torch.allclose(x, y, atol=CLOSE, rtol=CLOSE) for x, y in pairs)


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a state."""
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, GrowingRows):
        return [state.rows]
    if dataclasses.is_dataclass(state):
        state = [getattr(state, field.name) for field in dataclasses.fields(state)]
    return [x for part in state for x in tensors(part)] if isinstance(state, list | tuple) else []


# ---- batches equal separate prompts --------------------------------------------------------------


@pytest.mark.parametrize("levels", [CHAIN, TREE], ids=["chain", "tree"])
def test_batched_prompts_equal_separate_prompts(
    drafter: Drafter, trace: Trace, levels: tuple[int, ...]
) -> None:
    """Old, short and new prompts in one call."""
    states, rows = begin(drafter, trace), new_rows(trace)
    outputs, _ = walk(drafter, drafter.absorb_batch(states, rows), levels, together=True)
    expected, _ = walk(drafter, loop(drafter, states, rows), levels, together=False)
    assert equal(outputs, expected)
    assert len(outputs) == min(len(levels), drafter.max_depth)


def test_swapped_states_fail_the_comparison(drafter: Drafter, trace: Trace) -> None:
    """The control of the test above: at every level, for every prompt."""
    states = drafter.absorb_batch(begin(drafter, trace), new_rows(trace))
    outputs, _ = walk(drafter, states, TREE, together=True)
    wrong, _ = walk(drafter, [states[-1], *states[:-1]], TREE, together=True)
    for a, b in zip(outputs, wrong, strict=True):
        assert not any(torch.allclose(x, y, atol=100 * CLOSE) for x, y in zip(a, b, strict=True))


def test_a_prompt_does_not_depend_on_others_in_the_batch(drafter: Drafter, trace: Trace) -> None:
    """Other states and other text of all but the first."""
    other = tiny.with_other_states(tiny.with_tokens(trace, 0, 9, [5] * 15), 0, 9, tiny.LENGTH)
    other = tiny.with_other_states(
        tiny.with_tokens(other, 1, 0, [6] * tiny.LENGTH), 1, 0, tiny.LENGTH
    )
    outputs = []
    for text in (trace, other):
        states = drafter.absorb_batch(begin(drafter, text), new_rows(text))
        outputs.append(walk(drafter, states, TREE, together=True)[0])
    assert equal([x[:1] for x in outputs[0]], [x[:1] for x in outputs[1]])
    assert not equal([x[1:] for x in outputs[0]], [x[1:] for x in outputs[1]])


def test_prompts_join_and_leave_the_batch(drafter: Drafter, trace: Trace) -> None:
    """Four rounds with different prompts, each with its own number of rows."""
    rounds = [[0, 3], [0, 1, 3], [1, 2, 3, 4], [3]]
    states: list[State | None] = [None] * 5
    alone: list[State | None] = [None] * 5
    read = [0] * 5
    for number, served in enumerate(rounds):
        counts = [1 + (number + i) % 3 for i in range(5)]
        rows = parts(trace, [(a, a + n) for a, n in zip(read, counts, strict=True)])
        chosen = [rows[i] for i in served]
        after = drafter.absorb_batch([states[i] for i in served], chosen)
        expected = loop(drafter, [alone[i] for i in served], chosen)
        for i, ours, theirs in zip(served, after, expected, strict=True):
            states[i], alone[i], read[i] = ours, theirs, read[i] + counts[i]
        assert equal(
            walk(drafter, after, TREE, together=True)[0],
            walk(drafter, expected, TREE, together=False)[0],
        )


def test_a_batch_of_one_is_the_prompt_itself(drafter: Drafter, trace: Trace) -> None:
    """A prompt absorbed in a batch continues alone."""
    states = drafter.absorb_batch(begin(drafter, trace), new_rows(trace))
    together, _ = walk(drafter, states, TREE, together=True)
    for i, state in enumerate(states):
        above, now = 1, state
        for depth, logits in enumerate(together, start=1):
            ids, parents = draft_level(depth, logits.shape[1], above, len(states))
            alone, now = drafter.step(now, depth, ids[i], parents[i])
            assert equal([logits[i]], [alone])
            above = logits.shape[1]


# ---- states --------------------------------------------------------------------------------------


def test_no_state_is_modified(drafter: Drafter, trace: Trace) -> None:
    """Neither by absorbing nor by drafting, at any level."""
    states, rows = begin(drafter, trace), new_rows(trace)
    after = drafter.absorb_batch(states, rows)
    _, middle = walk(drafter, after, TREE[:2], together=True)
    all_states = [state for state in (*states, *after, *middle) if state is not None]
    before = [copy.deepcopy(tensors(state)) for state in all_states]
    first, _ = walk(drafter, after, TREE, together=True)
    walk(drafter, list(reversed(after)), CHAIN, together=True)
    drafter.absorb_batch(states, rows)
    drafter.absorb_batch(list(after), parts(trace, [(a + b, a + b + 1) for a, b in ROW_COUNTS]))
    drafter.step_batch(
        middle[::-1], min(3, drafter.max_depth), *draft_level(3, 4, TREE[1], len(middle))
    )
    again, _ = walk(drafter, after, TREE, together=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for state, saved in zip(all_states, before, strict=True):
        now = tensors(state)
        assert now
        assert all(torch.equal(a, b) for a, b in zip(now, saved, strict=True))


def test_a_single_prompt_drafter_runs_a_batch() -> None:
    """The loop itself, by a drafter that checks what it is given."""
    scripted = tiny.ScriptedDrafter(tiny.random_logits(tiny.VOCAB), tiny.VOCAB)
    trace = tiny.packed_trace(tiny.target())
    states = scripted.absorb_batch(
        scripted.absorb_batch(
            [None] * 2, parts(trace, [(0, 4), (0, 2), (0, 0), (0, 0), (0, 0)])[:2]
        ),
        parts(trace, [(4, 5), (2, 6), (0, 0), (0, 0), (0, 0)])[:2],
    )
    texts = [trace.ids[0, :6], trace.ids[0, 9:16]]
    assert [state.text for state in states] == [tuple(text.tolist()) for text in texts]
    newest = torch.stack([text[-1:] for text in texts])
    logits, _ = scripted.step_batch(states, 1, newest, torch.zeros_like(newest))
    rows = [scripted.row(tuple(text.tolist())) for text in texts]
    assert torch.equal(logits, torch.stack(rows)[:, None])
