"""Prompts that are read in pieces: the same rounds, and no mask with the square of the length."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.conf.errors import ConfigError
from outrider.launch.bench import common
from outrider.launch.bench.long_prompts import Options, tensor_bytes
from outrider.models import drafters
from outrider.models.decode import engine
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Request
from outrider.models.target.load import LoadedTarget
from outrider.models.target.target import TargetStates
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


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest tensor has that is computed inside."""

    elements: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def largest_tensor(name: str, length: int) -> int:
    target = tiny.target("llama", max_position_embeddings=4096)
    vocab = tiny.vocab(tiny.VOCAB)
    drafter = tiny.drafter(name, target, vocab, draft_vocab_size=None)
    prompt = [3 + i * i % 50 for i in range(length)]
    decoder = Engine(target, drafter, Chain(1))
    largest = LargestTensor()
    with largest:
        decoder.generate_all([Request(prompt, 1)], 1)
    return largest.elements


@pytest.mark.parametrize("name", drafters.names())
def test_no_tensor_of_a_long_prompt_has_the_square_of_its_length(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the target and of the drafter that absorbs it; read in one piece, some tensor has."""
    monkeypatch.setattr(engine, "PREFILL_MASK", 2**13)
    short, long = (largest_tensor(name, length) for length in (512, 1024))
    assert long <= 2.1 * short
    monkeypatch.setattr(engine, "PREFILL_MASK", 2**24)
    assert largest_tensor(name, 1024) > 3.5 * largest_tensor(name, 512)


@pytest.mark.slow
def test_logits_of_a_long_prompt_are_those_of_one_piece(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded target's, after 2,000 tokens in pieces of 2,000, 333 and 50 rows."""
    prompt = torch.randint(1536, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    logits, compute = list[Tensor](), loaded.target.logits

    def recorded(last: Tensor) -> Tensor:
        logits.append(compute(last))
        return logits[-1]

    monkeypatch.setattr(loaded.target, "logits", recorded)
    for rows in (2000, 333, 50):
        monkeypatch.setattr(engine, "PREFILL_MASK", rows * len(prompt))
        Engine(loaded.target, None, None).generate_all([Request(prompt, 1)], 1)
    whole, *others = logits
    for one in others:
        torch.testing.assert_close(one, whole, atol=1e-4, rtol=1e-4)


def test_shared_memory_is_counted_once() -> None:
    rows = torch.zeros(8, 4)
    assert tensor_bytes({"a": (rows, rows[:2]), "b": [torch.zeros(2, dtype=torch.long), 7]}) == 144


@pytest.mark.slow
def test_32k_tokens_take_less_than_a_gigabyte() -> None:
    """Above the weights and the caches, in a process of its own; one mask alone would have 4."""
    row = common.run_in_child("long-prompts", Options(threads=2), lengths=32768, drafters="none")
    assert row["cache_mb"] > 32768 * 8 * 2 * 2 * 32 * 4 / 2**20  # layers, K and V, heads, size
    assert 0 < row["peak_mb"] < 1000


def test_an_unknown_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="eagle9"):
        Options(drafters=("none", "eagle9"))
