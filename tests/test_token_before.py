"""A head that reads the token before: Markov, gated and recurrent ones, in training and decoding.

The drafter of this file computes all depths from one state of the target, as block drafters do, and
adds to the logits of a slot a function of the token before it. Its guesses and nodes carry both in
one row of `hidden`, which `head` joins. Source: the heads of DSpark, arXiv:2607.05147.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafting.drafter import Drafter, State, target_head_logits
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, Trace
from outrider.models.target.target import Target
from outrider.train import teacher as module
from outrider.train.objective import Objective
from tests import test_drafter_contract as contract
from tests import tiny
from tests.enumeration import distance

KINDS = ["markov", "gated", "gru"]
RANK = 4
each_kind = pytest.mark.parametrize("kind", KINDS)


class Slots(Drafter):
    """One slot per depth, and a bias of low rank that depends on the token before the slot's."""

    required_features = "last"
    taps = ()
    max_depth = tiny.DEPTHS

    def __init__(self, kind: str, target: Target, vocab: DraftVocab) -> None:
        super().__init__()
        self.kind, self.target, self.vocab = kind, target, vocab
        size = target.shape().hidden
        self.slots = nn.ModuleList(nn.Linear(size, size) for _ in range(tiny.DEPTHS))
        self.embed = nn.Embedding(target.vocab_size, RANK)
        self.bias = nn.Linear(RANK, len(vocab), bias=False)
        self.gate = nn.Linear(size + RANK, RANK) if kind == "gated" else None
        self.cell = nn.GRUCell(size + RANK, RANK) if kind == "gru" else None

    def rows(
        self, depth: int, last: Tensor, ids: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return [slot; what the tokens before contribute], and the memory of these tokens."""
        slot, token = self.slots[depth - 1](last), self.embed(ids)
        if self.cell is not None:
            memory = self.cell(torch.cat([slot, token], dim=-1), memory)
            token = memory
        return torch.cat([slot, token], dim=-1), token

    def head(self, hidden: Tensor) -> Tensor:
        slot, token = hidden[..., :-RANK], hidden[..., -RANK:]
        if self.gate is not None:
            token = self.gate(hidden).sigmoid() * token
        bias: Tensor = self.bias(token)
        return target_head_logits(self.target, self.vocab, slot) + bias

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        masks = [trace.supervised_mask(depth) for depth in range(1, tiny.DEPTHS + 1)]
        rows = torch.stack(masks).any(0).flatten().nonzero().flatten()
        last, memory = trace.last.flatten(0, 1)[rows], None
        for depth in range(1, tiny.DEPTHS + 1):
            ids = trace.tokens_ahead(depth).flatten()[rows]  # x_{t+d}; the guess is x_{t+d+1}
            hidden, memory = self.rows(depth, last, ids, memory)
            yield Guess(depth, rows, hidden)

    def absorb(self, state: State | None, trace: Trace) -> State:
        return trace.last[0, -1:], None

    def step(self, state: State, depth: int, ids: Tensor, parents: Tensor) -> tuple[Tensor, State]:
        last, memory = state
        memory = None if depth == 1 else memory[parents]
        hidden, memory = self.rows(depth, last.expand(len(ids), -1), ids, memory)
        return self.head(hidden), (last, memory)


class Siblings(Slots):
    """Wrong on purpose: a node reads the token of another node of its level."""

    def step(self, state: State, depth: int, ids: Tensor, parents: Tensor) -> tuple[Tensor, State]:
        return super().step(state, depth, ids.roll(1), parents)


def built(
    kind: str, target: Target, vocab: DraftVocab | None = None, of: type[Slots] = Slots
) -> Slots:
    torch.manual_seed(3)
    return of(kind, target, vocab or tiny.vocab()).eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(params=KINDS)
def drafter(request: pytest.FixtureRequest, target: Target) -> Slots:
    return built(request.param, target)


@pytest.fixture
def trace(target: Target) -> Trace:
    target.set_taps(())
    return tiny.packed_trace(target)


# ---- the contract of all drafters ----------------------------------------------------------------

PATHS: list[list[tuple[int, ...]]] = [[(4, 8), (9, 6)], [(4, 8), (9, 6), (9, 4)]]


def test_decoding_computes_what_training_computed(drafter: Slots, trace: Trace) -> None:
    contract.test_steps_repeat_the_unroll_at_every_row_and_depth(drafter, trace)
    contract.test_absorbing_in_chunks_of_any_size_is_equal(drafter, trace, 3)
    contract.test_a_used_state_can_be_used_again(drafter, trace)
    for paths in PATHS:
        contract.test_every_branch_of_a_tree_repeats_the_unroll_of_its_own_text(
            drafter, trace, paths
        )


def test_a_guess_depends_on_the_token_before_and_on_no_later_one(
    drafter: Slots, trace: Trace
) -> None:
    contract.test_training_and_decoding_depend_on_the_newest_token_alike(drafter, trace)
    contract.test_a_guess_ignores_later_states_and_later_tokens(drafter, trace)
    contract.test_packed_documents_do_not_leak_into_each_other(drafter, trace)
    trained = contract.unrolled(drafter, trace)
    for row, _, t, depth in contract.supervised(trace, list(trained)):
        changed = tiny.with_tokens(
            trace, row, t + depth, [(int(trace.ids[row, t + depth]) + 7) % 9]
        )
        found = contract.unrolled(drafter, changed)[depth][row, t]
        assert not contract.same(found, trained[depth][row, t])


@each_kind
def test_the_token_of_another_node_is_found(kind: str, target: Target, trace: Trace) -> None:
    """The control: trees fail, and chains, which have no other node, do not."""
    drafter = built(kind, target, of=Siblings)
    contract.test_steps_repeat_the_unroll_at_every_row_and_depth(drafter, trace)
    with pytest.raises(AssertionError):
        contract.test_every_branch_of_a_tree_repeats_the_unroll_of_its_own_text(
            drafter, trace, PATHS[0]
        )


@each_kind
def test_greedy_output_equals_plain_decoding(kind: str, target: Target) -> None:
    """Half trained, so that some drafts are right."""
    answers = [tiny.greedy_tokens(target, prompt) for prompt in tiny.PROMPTS]
    drafter = built(kind, target, tiny.vocab(tiny.VOCAB)).train()
    tiny.train_drafter(drafter, target, tiny.answered_trace(target, answers), steps=12)
    for policy in (Chain(3), DynamicTree(3, 3, 7), StaticTree(((0,), (1,), (0, 0), (1, 0)))):
        engine, accepted, drafted = Engine(target, drafter.eval(), policy), 0, 0
        for prompt, answer in zip(tiny.PROMPTS, answers, strict=True):
            out = engine.generate(prompt, tiny.ANSWER)
            assert out.ids == answer
            accepted, drafted = accepted + sum(out.accepted), drafted + sum(out.drafted)
        assert 0 < accepted < drafted


@each_kind
@pytest.mark.slow
def test_sampling_has_exactly_the_distribution_of_plain_sampling(kind: str) -> None:
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    target = tiny.target(vocab_size=5, num_attention_heads=2, num_key_value_heads=1, **size)
    sampling = Sampling(0.8, 1.0, 2)
    for policy in (Chain(2), StaticTree(((0,), (1,), (0, 0)), "drawn")):
        engine = Engine(target, built(kind, target, tiny.vocab(4, 5)), policy, sampling=sampling)
        found = contract.emitted_distribution(engine)
        assert distance(found, contract.plain_distribution(target, sampling)) < 1e-5


# ---- training ------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("path", ["fused", "stored"])
def test_the_loss_in_chunks_has_the_gradients_of_the_whole(
    kind: str, path: Any, target: Target, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or two target rows per chunk; every weight of slots, tokens, gates and cells."""
    monkeypatch.setattr(module, "CHUNK", 100)
    results = []
    for current in ("plain", path):
        drafter = built(kind, target).train()
        objective = Objective(drafter, target, weights=[1.0, 0.8, 0.64], path=current)
        loss, _ = objective(trace, torch.tensor([31.0, 26.0, 21.0]))
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in drafter.named_parameters()}))
    (slow, expected), (fast, found) = results
    torch.testing.assert_close(fast, slow)
    for name, grad in expected.items():
        assert grad is not None, name
        assert grad.any(), name
        torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=1e-4, msg=name)
