"""Rows that a drafter absorbs: none is missing, however a text reaches it.

The logits of every round are compared with those after a fresh prompt that is read at once: for a
prompt in pieces, a chat of several turns, and requests that move to another slot of the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.models import drafters
from outrider.models.decode import engine as module
from outrider.models.decode.draft_context import DraftContext
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import DialogueCache, Request
from outrider.models.drafting.drafter import Absorbed, Drafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import tiny

Seen = dict[tuple[int, ...], Tensor]  # text so far -> logits of depth 1
CLOSE = 1e-4

each_drafter = pytest.mark.parametrize("name", drafters.trained_names())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The logits of depth 1 of every round, by the text in front of it."""
    found, step = Seen(), DraftContext.step

    def record(self: DraftContext, depth: int, ids: Tensor, parents: Tensor) -> Tensor:
        logits = step(self, depth, ids, parents)
        if depth == 1:
            for one, row in zip(self.requests, logits[:, 0], strict=True):
                found[(*one.request.prompt, *one.out.ids)] = row.clone()
        return logits

    monkeypatch.setattr(DraftContext, "step", record)
    return found


def engine_of(name: str) -> Engine:
    target, _, drafter = tiny.half_trained(name, "llama")
    return Engine(target, drafter, Chain(2))


def taken(seen: Seen) -> Seen:
    out = dict(seen)
    seen.clear()
    return out


def assert_same(found: Seen, expected: Seen) -> None:
    """Compare; in a batch, a request without room for a draft has logits too."""
    assert len(expected) > 1
    assert found.keys() >= expected.keys()
    for text, logits in expected.items():
        assert torch.allclose(found[text], logits, atol=CLOSE, rtol=CLOSE), len(text)


def fresh(engine: Engine, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> None:
    """Decode every prompt alone, in one piece."""
    for prompt, budget in zip(prompts, budgets, strict=True):
        engine.generate(prompt, budget)


@pytest.mark.parametrize("piece", [1, 3])
@each_drafter
def test_a_prompt_in_pieces(
    name: str, piece: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = engine_of(name), [1, 3, 4, 2, 9, 5, 7, 7, 3, 1, 8]
    engine.generate(prompt, 8)
    expected = taken(seen)
    monkeypatch.setattr(module, "PREFILL_MASK", piece * len(prompt))
    engine.generate(prompt, 8)
    assert_same(seen, expected)


@each_drafter
def test_a_chat_of_several_turns(name: str, seen: Seen) -> None:
    """The third turn takes back the second; the fourth goes on from the third."""
    engine, dialogue, prompts = engine_of(name), DialogueCache(), list[list[int]]()
    prompt = [1, 3, 4, 2]
    for said, answer_kept in ([9, 5, 7], True), ([8, 8], False), ([6, 2, 2], True), ([4], True):
        prompts.append([*prompt, *said])
        *_, event = engine.run([Request(prompts[-1], 7)], 1, dialogue=dialogue)
        if answer_kept:
            prompt = [*prompts[-1], *event.out.ids]
    assert dialogue.cache is not None
    found = taken(seen)
    fresh(engine, prompts, [7] * len(prompts))
    assert_same(found, seen)


@each_drafter
def test_requests_that_move_to_another_slot(
    name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones end early, and the last ones move into their slots."""
    engine = engine_of(name)
    prompts, budgets = [[1, 3, 4], [2, 9], [7, 7, 3, 1], [5], [6, 4]], [4, 9, 6, 12, 10]
    moved = list[tuple[int, int]]()
    target, drafter = engine.target, engine.drafter
    assert drafter is not None
    kind = type(drafter.new_cache(target, 8, 2))
    move = kind.move_slot

    def record(self: object, source: int, destination: int) -> None:
        moved.append((source, destination))
        move(self, source, destination)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "move_slot", record)
    requests = [Request(prompt, budget) for prompt, budget in zip(prompts, budgets, strict=True)]
    engine.generate_all(requests, 3)
    assert moved
    found = taken(seen)
    fresh(engine, prompts, budgets)
    assert_same(found, seen)


# ---- gaps ----------------------------------------------------------------------------------------


def given(target: Target, drafter: Drafter) -> Callable[[int, int], Trace]:
    target.set_taps(drafter.taps)
    trace = tiny.packed_trace(target)
    return lambda first, stop: tiny.verified_rows(trace, 1, first, stop)


@pytest.mark.parametrize("name", tiny.STANDALONE)
@torch.no_grad()
def test_rows_that_are_missing_or_come_again_are_refused(name: str) -> None:
    target = tiny.target()
    drafter = tiny.drafter(name, target).eval()
    rows = given(target, drafter)
    (start,) = drafter.absorb_next([Absorbed()], [rows(0, 4)])
    assert start.rows == 4
    (after,) = drafter.absorb_next([start], [rows(4, 7)])
    assert after.rows == 7
    for first, stop in ((5, 7), (3, 7), (0, 4)):
        with pytest.raises(ValueError, match=f"after 4 rows of a prompt, rows {first} to"):
            drafter.absorb_next([start], [rows(first, stop)])
    with pytest.raises(ValueError, match="after 0 rows"):
        drafter.absorb_next([Absorbed()], [rows(2, 4)])
    hole = rows(4, 8)
    hole = replace(hole, positions=hole.positions + torch.tensor([0, 0, 1, 1]))
    with pytest.raises(ValueError, match="rows 4 to 8 were given as the next 4"):
        drafter.absorb_next([start], [hole])
    with pytest.raises(ValueError, match="after 4 rows"):  # the second of two prompts
        drafter.absorb_next([after, start], [rows(7, 8), rows(7, 8)])


def test_a_lost_piece_of_a_prompt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the first test: an engine that passes the last piece only."""
    engine = engine_of("eagle3")
    monkeypatch.setattr(module, "PREFILL_MASK", 12)
    absorb, calls = Engine._absorb_rows, list[int]()

    def lose_first(self: Engine, *args: object) -> float:
        calls.append(0)
        return absorb(self, *args) if len(calls) > 1 else 0.0  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "_absorb_rows", lose_first)
    with pytest.raises(ValueError, match="after 0 rows of a prompt"):
        engine.generate([1, 3, 4, 2, 9, 5], 4)
