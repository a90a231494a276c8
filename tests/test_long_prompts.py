"""Prompts that are read in pieces: the same rounds, and no mask with the square of the length."""

from typing import Any

import pytest
from torch import Tensor

from outrider.models import drafters
from outrider.models.decode import engine
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Request
from outrider.models.target import TargetStates
from tests import tiny


@pytest.mark.parametrize("name", drafters.trained_names())
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_prompt_read_in_pieces_gives_the_same_rounds(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter absorbs every piece, so that its drafts are the same, too; alone and in batches.

    gemma3 mixes sliding and full attention, gpt2 has learned positions.
    """
    half = tiny.half_trained(name, family)
    requests = [Request(prompt, tiny.ANSWER) for prompt in tiny.PROMPTS]
    depth = min(3, half.drafter.max_depth)
    decoder = Engine(half.target, half.drafter, Chain(depth))
    whole = decoder.generate_all(requests, 1)
    longest = max(len(request.prompt) for request in requests)
    for rows, batch in ((1, 1), (2, 1), (3, len(requests))):
        monkeypatch.setattr(engine, "PREFILL_MASK", rows * longest * batch)
        for expected, out in zip(whole, decoder.generate_all(requests, batch), strict=True):
            assert out.ids == expected.ids
            assert out.accepted == expected.accepted
    assert any(sum(out.accepted) for out in whole)


def test_no_mask_of_a_long_prompt_has_the_square_of_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "PREFILL_MASK", 200)
    target, sizes = tiny.target("llama"), list[int]()
    forward = target.forward

    def counted(ids: Tensor, positions: Tensor, mask: Tensor, *rest: Any) -> TargetStates:
        sizes.append(mask.numel())
        return forward(ids, positions, mask, *rest)

    monkeypatch.setattr(target, "forward", counted)
    prompt = [3 + i % 9 for i in range(60)]
    out = Engine(target, None, None).generate_all([Request(prompt, 1)], 1)[0]
    assert len(out.ids) == 1
    assert len(sizes) == 20
    assert max(sizes) <= 200
