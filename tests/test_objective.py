"""The objective: against loops over rows, closed forms, and the paths against each other."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Guess, Trace
from outrider.models.target.target import Target
from outrider.train import teacher as module
from outrider.train.metric_sums import MetricSums
from outrider.train.objective import Objective
from tests import tiny
from tests.tiny import FixedDrafter

WEIGHTS = [1.0, 0.8, 0.64]
PATHS = ["fused", "stored", "plain"]
FIELDS = ("loss", "agree", "alpha", "rows")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def trace(target: Target) -> Trace:
    tiny.drafter("eagle3", target)
    return tiny.packed_trace(target)


def mirror() -> Target:
    """V = H = 4 and an identity head, so that `last` of a trace holds logits."""
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target(vocab_size=4, hidden_size=4, pad_token_id=0, **heads)
    target.model.lm_head.weight.data = torch.eye(4)
    return target


def one_row(last: list[list[float]], answer: list[int], document: list[int] | None = None) -> Trace:
    """A trace of which only logits, answers and documents matter."""
    ids = torch.zeros(1, len(last), dtype=torch.long)
    mask = ids.bool()
    mask[0, answer] = True
    places = ids if document is None else torch.tensor([document])
    logits = torch.tensor(last)[None]
    return Trace(ids, ids, mask, places, ids, logits[..., :0], logits)


def run(
    drafter: Drafter, target: Target, trace: Trace, divide: Tensor | None = None, **changes: Any
) -> tuple[Tensor, MetricSums]:
    depths = len(list(drafter.unroll(trace)))
    objective = Objective(drafter, target, weights=WEIGHTS[:depths], **changes)
    divide = torch.ones(depths) if divide is None else divide
    loss, sums = objective(trace, divide, measure=True)
    return loss, sums


# ---- which guesses are supervised ----------------------------------------------------------------


def test_one_answer_token_is_supervised_once_per_depth() -> None:
    """x_5 is the only answer: guessed by row 3 at depth 1, row 2 at depth 2, row 1 at depth 3."""
    trace = one_row([[0.0] * 4] * 7, answer=[5])
    guessed = [
        trace.supervised_mask(depth)[0].nonzero().flatten().tolist() for depth in range(1, 8)
    ]
    assert guessed == [[3], [2], [1], [0], [], [], []]


def test_supervision_depends_on_the_predicted_token() -> None:
    """Documents 0 0 0 0 | 1 1 1 | padding; answers x_2 x_3 | x_4 x_6 | and x_7, which is padding.

    x_4 opens its document, so no row predicts it. x_6 has one row two before.
    """
    trace = one_row([[0.0] * 4] * 8, [2, 3, 4, 6, 7], document=[0, 0, 0, 0, 1, 1, 1, -1])
    guessed = [trace.supervised_mask(depth)[0].nonzero().flatten().tolist() for depth in (1, 2, 3)]
    assert guessed == [[0, 1, 4], [0], []]


def test_padding_is_not_supervised() -> None:
    """Even if its answer mask is set."""
    trace = one_row([[0.0] * 4] * 6, answer=list(range(6)), document=[-1] * 6)
    assert not any(trace.supervised_mask(depth).any() for depth in range(1, 7))
    drafter = FixedDrafter([torch.randn(1, 6, 4)], DraftVocab.identity(4))
    loss, sums = run(drafter, mirror(), trace)
    assert loss == 0
    assert not sums.flatten().any()


def test_unsupervised_rows_do_not_affect_the_loss(target: Target, trace: Trace) -> None:
    """Neither their own states, nor target rows that no supervised guess is compared with."""
    states = [torch.randn_like(trace.last) for _ in WEIGHTS]
    before, sums = run(FixedDrafter(states, tiny.vocab(), target), target, trace)
    target_rows = torch.zeros_like(trace.answer)
    for depth, state in enumerate(states, start=1):
        counts = trace.supervised_mask(depth)
        state[~counts] = torch.randn_like(state[~counts])
        target_rows[:, depth:] |= counts[:, :-depth]
    last = torch.where(target_rows[..., None], trace.last, torch.randn_like(trace.last))
    assert not target_rows.all()
    changed = dataclasses.replace(trace, last=last)
    after, other = run(FixedDrafter(states, tiny.vocab(), target), target, changed)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(other.flatten(), sums.flatten())


# ---- loops over rows and depths ------------------------------------------------------------------


def reference(
    drafter: Drafter, target: Target, trace: Trace, divide: Tensor, renormalise: bool
) -> tuple[float, dict[str, list[float]]]:
    """Row by row: the guess of row t at depth d is compared with the target's row t + d."""
    guesses = {guess.depth: tiny.spread(guess, trace) for guess in drafter.unroll(trace)}
    sums = {name: [0.0] * len(guesses) for name in FIELDS}
    ids, total = drafter.vocab.target_ids, 0.0
    for row in range(len(trace.ids)):
        for t in range(trace.ids.shape[1]):
            for depth, hidden in guesses.items():
                about = t + 1 + depth
                if about >= trace.ids.shape[1] or not trace.answer[row, about]:
                    continue
                if (
                    trace.document[row, about] != trace.document[row, t]
                    or trace.document[row, t] < 0
                ):
                    continue
                p = target.logits(trace.last[row, t + depth]).softmax(-1)
                q = drafter.head(hidden[row, t]).softmax(-1)
                teacher = p[ids] / p[ids].sum() if renormalise else p[ids]
                agrees = int(ids[q.argmax()]) == int(p.argmax())
                nats = -float((teacher * q.log()).sum()) if int(p.argmax()) in ids else 0.0
                total += WEIGHTS[depth - 1] * nats / float(divide[depth - 1])
                results = (nats, agrees, float(torch.minimum(p[ids], q).sum()), 1)
                for name, value in zip(FIELDS, results, strict=True):
                    sums[name][depth - 1] += value
    return total, sums


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [20, tiny.DRAFTED, tiny.VOCAB])
def test_objective_matches_reference(
    target: Target, trace: Trace, size: int, path: str, renormalise: bool
) -> None:
    """The drafter's states are the target's with noise."""
    generator = torch.Generator().manual_seed(6)
    states = []
    for depth in (1, 2, 3):
        noise = torch.randn(trace.last.shape, generator=generator)
        states.append(trace.last.roll(-depth, 1) + noise * 0.2 * depth)
    drafter = FixedDrafter(states, tiny.vocab(size), target)
    divide = torch.tensor([7.0, 5.0, 3.0])
    loss, sums = run(drafter, target, trace, divide, path=path, renormalise=renormalise)
    expected, by_hand = reference(drafter, target, trace, divide, renormalise)
    assert by_hand["rows"] == [31.0, 26.0, 21.0]
    assert 0 < by_hand["agree"][2] < 21
    torch.testing.assert_close(loss.item(), expected, atol=1e-3, rtol=1e-5)
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(sums, name).tolist(), by_hand[name], atol=1e-3, rtol=1e-5
        )


# ---- the other paths -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 500, 2**23])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("path", ["fused", "stored"])
def test_chunked_paths_match_plain(
    target: Target,
    trace: Trace,
    path: str,
    renormalise: bool,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss, sums and every gradient; from one target row per chunk to all at once."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    divide, results = torch.tensor([31.0, 26.0, 21.0]), []
    for current_path in ("plain", path):
        drafter = tiny.drafter("eagle3", target)
        loss, sums = run(drafter, target, trace, divide, path=current_path, renormalise=renormalise)
        (3 * loss).backward()  # accumulation scales the loss
        grads = {name: p.grad for name, p in drafter.named_parameters()}
        results.append((loss.detach(), sums.flatten(), grads))
    slow, fast = results
    torch.testing.assert_close(fast[0], slow[0])
    torch.testing.assert_close(fast[1], slow[1], atol=1e-5, rtol=1e-6)  # floats, summed anew
    for name, grad in slow[2].items():
        torch.testing.assert_close(fast[2][name], grad, atol=1e-5, rtol=1e-4, msg=name)


def test_chunks_respect_max_logits(
    target: Target, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target's and drafter's logits are both limited; every target row is computed once."""
    monkeypatch.setattr(module, "CHUNK", 500)
    drafter, rows = tiny.drafter("eagle3", target), 0
    compute, head = module.Teacher.compute, drafter.head

    def counted(
        self: module.Teacher, last: Tensor, argmax: Tensor | None, full: bool
    ) -> module.TeacherRows:
        nonlocal rows
        rows += len(last)
        assert len(last) * tiny.VOCAB <= 500
        return compute(self, last, argmax, full)

    def bounded(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        assert logits.numel() <= 500
        return logits

    monkeypatch.setattr(module.Teacher, "compute", counted)
    monkeypatch.setattr(drafter, "head", bounded)
    run(drafter, target, trace)
    target_rows = torch.zeros_like(trace.answer)
    for depth in (1, 2, 3):
        target_rows[:, depth:] |= trace.supervised_mask(depth)[:, :-depth]
    assert rows == int(target_rows.sum())


def test_kept_path_has_equal_chunk_counts_on_all_ranks(
    target: Target, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-3 gathers the head's weights once per chunk, on all ranks together."""
    monkeypatch.setattr(module, "CHUNK", 500)
    calls = []
    for answer in (trace.answer, trace.answer & (trace.positions > 6), trace.answer & False):
        drafter, count = tiny.drafter("eagle3", target), 0
        head = drafter.head

        def counted(hidden: Tensor, head: Any = head) -> Tensor:
            nonlocal count
            count += 1
            logits: Tensor = head(hidden)
            return logits

        monkeypatch.setattr(drafter, "head", counted)
        text = dataclasses.replace(trace, answer=answer)
        run(drafter, target, text, path="stored")[0].backward()
        calls.append(count)
    assert calls[0] == calls[1] == calls[2] > 4


@pytest.mark.parametrize("path", PATHS)
def test_no_grad_gives_the_same_numbers(target: Target, trace: Trace, path: str) -> None:
    drafter = tiny.drafter("eagle3", target)
    loss, sums = run(drafter, target, trace, path=path)
    with torch.no_grad():
        no_grad_loss, no_grad_sums = run(drafter, target, trace, path=path)
    assert not no_grad_loss.requires_grad
    torch.testing.assert_close(no_grad_loss, loss.detach())
    torch.testing.assert_close(no_grad_sums.flatten(), sums.flatten())


class DraftHeadOnly:
    """A teacher that refuses to run its whole head."""

    def __init__(self, target: Target) -> None:
        self.vocab_size, self.logits_of = target.vocab_size, target.logits_of

    def logits(self, last: Tensor) -> Tensor:
        raise AssertionError("the whole head is not needed")


@pytest.mark.parametrize("path", PATHS)
def test_recorded_top1_skips_the_full_head(target: Target, trace: Trace, path: Any) -> None:
    recorded = dataclasses.replace(trace, top1_ids=target.logits(trace.last).argmax(-1))
    drafter = tiny.drafter("eagle3", target)
    results = []
    for teacher, text in ((target, trace), (DraftHeadOnly(target), recorded)):
        drafter.zero_grad()
        objective = Objective(drafter, teacher, weights=WEIGHTS, path=path)
        loss, sums = objective(text, torch.ones(3))
        loss.backward()
        grads = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        results.append([loss.detach(), sums.flatten(), *grads])
    torch.testing.assert_close(results[0], results[1])
    assert results[0][1][:3].gt(0).all()


def test_full_head_runs_if_top1_is_missing_or_alpha_is_measured(
    target: Target, trace: Trace
) -> None:
    """One target row without a recorded token, or alpha, needs the whole head."""
    top1 = target.logits(trace.last).argmax(-1)
    drafter = tiny.drafter("eagle3", target)
    expected = run(drafter, target, trace)[1].flatten()
    for recorded in (top1, torch.where(trace.positions == 4, -1, top1)):
        text = dataclasses.replace(trace, top1_ids=recorded)
        torch.testing.assert_close(run(drafter, target, text)[1].flatten(), expected)
        with pytest.raises(AssertionError, match="whole head"):
            run(drafter, DraftHeadOnly(target), text)  # type: ignore[arg-type]


def test_frozen_parameters_get_no_gradient(target: Target, trace: Trace) -> None:
    drafter = tiny.drafter("eagle3", target)
    frozen = drafter.get_parameter("lm_head.weight").requires_grad_(False)
    run(drafter, target, trace)[0].backward()
    assert frozen.grad is None
    assert drafter.get_parameter("fc.weight").grad is not None


# ---- closed forms --------------------------------------------------------------------------------


def oracle(target: Target, trace: Trace, vocab: DraftVocab) -> FixedDrafter:
    """Return a drafter whose row t has the target's state of row t + d."""
    return FixedDrafter([trace.last.roll(-depth, 1) for depth in (1, 2, 3)], vocab, target)


@pytest.mark.parametrize("size", [tiny.DRAFTED, tiny.VOCAB])
def test_perfect_drafter_has_the_targets_entropy(target: Target, trace: Trace, size: int) -> None:
    """Of the target restricted to the draft vocabulary, where its top-1 token can be drafted.

    It agrees exactly there, and what sampling accepts is the mass of the draft vocabulary.
    """
    vocab = tiny.vocab(size)
    loss, sums = run(oracle(target, trace, vocab), target, trace)
    total = 0.0
    for i, depth in enumerate((1, 2, 3)):
        logits = target.logits(trace.last[:, depth:][trace.supervised_mask(depth)[:, :-depth]])
        in_vocab = vocab.t2d[logits.argmax(-1)]
        entropy = (
            torch.distributions.Categorical(logits=logits[:, vocab.target_ids])
            .entropy()[in_vocab]
            .sum()
        )
        assert sums.rows[i] == len(logits)
        assert sums.agree[i] == in_vocab.sum()
        assert in_vocab.all() == (size == tiny.VOCAB)
        torch.testing.assert_close(sums.loss[i].float(), entropy)
        mass = logits.softmax(-1)[:, vocab.target_ids].sum()
        torch.testing.assert_close(sums.alpha[i].float(), mass)
        total += WEIGHTS[i] * float(entropy)
    torch.testing.assert_close(loss.item(), total)


LOG2 = math.log(2)


def test_alpha_agreement_and_loss_by_hand() -> None:
    """With p = (1/2, 1/4, 1/8, 1/8), q = (1/8, 1/8, 1/4, 1/2): min is 1/8 + 1/8 + 1/8 + 1/8.

    Cross-entropy: 1/2 * 3 + 1/4 * 3 + 1/8 * 2 + 1/8 * 1 = 2.625 bits.
    """
    p = [-1 * LOG2, -2 * LOG2, -3 * LOG2, -3 * LOG2]
    q = torch.tensor([-3.0, -3.0, -2.0, -1.0]) * LOG2
    trace = one_row([[0.0] * 4, p, [0.0] * 4], answer=[2])
    drafter = FixedDrafter([q.expand(1, 3, 4)], DraftVocab.identity(4))
    loss, sums = run(drafter, mirror(), trace)
    torch.testing.assert_close(sums.alpha.tolist(), [0.5])
    torch.testing.assert_close(sums.loss.tolist(), [2.625 * LOG2], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(loss.item(), 2.625 * LOG2)
    assert (sums.agree.tolist(), sums.rows.tolist()) == ([0], [1])


@pytest.mark.parametrize(
    ("renormalise", "bits"),
    [
        (True, (4 * 1 + 1 * 2 + 1 * 2) / 6),  # teacher (2/3, 1/6, 1/6)
        (False, (4 * 1 + 1 * 2 + 1 * 2) / 8),  # teacher (1/2, 1/8, 1/8)
    ],
)
def test_renormalise(renormalise: bool, bits: float) -> None:
    """With p = (1/2, 1/4, 1/8, 1/8), q = (1/2, 1/4, 1/4) over 0, 2, 3; alpha uses all of p."""
    p = [-1 * LOG2, -2 * LOG2, -3 * LOG2, -3 * LOG2]
    q = torch.tensor([-1.0, -2.0, -2.0]) * LOG2
    trace = one_row([[0.0] * 4, p, [0.0] * 4], answer=[2])
    drafter = FixedDrafter([q.expand(1, 3, 3)], DraftVocab(torch.tensor([0, 2, 3]), 4))
    _, sums = run(drafter, mirror(), trace, renormalise=renormalise)
    torch.testing.assert_close(sums.loss.tolist(), [bits * LOG2], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sums.alpha.tolist(), [0.75], atol=1e-6, rtol=1e-6)
    assert sums.agree.tolist() == [1]


def test_top1_outside_draft_vocabulary_has_no_loss_but_counts() -> None:
    """The target's top-1 token is 1; the draft vocabulary is 0, 2, 3."""
    trace = one_row([[0.0] * 4, [0.0, 5.0, 1.0, 0.0], [0.0] * 4], answer=[2])
    state = torch.randn(1, 3, 3, requires_grad=True)
    drafter = FixedDrafter([state], DraftVocab(torch.tensor([0, 2, 3]), 4))
    loss, sums = run(drafter, mirror(), trace)
    loss.backward()
    assert state.grad is not None
    assert not state.grad.any()
    assert (loss.item(), sums.loss.tolist(), sums.agree.tolist()) == (0.0, [0], [0])
    assert sums.rows.tolist() == [1]
    assert sums.alpha[0] > 0


def test_rounds_follow_agreement() -> None:
    """The target's top-1 token is always 2. The drafter is wrong where marked.

    depth 1, rows 0..2:  right wrong right      depth 2, rows 0..1:  right right

    x_1 comes from the prefill. The round at row 0 accepts both guesses and brings x_4 besides.
    """
    logits = [[0.0, 0.0, 3.0, 0.0]] * 5
    right, wrong = [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]
    states = [torch.tensor([[right, wrong, right, wrong, wrong]]), torch.tensor([[right] * 5])]
    _, sums = run(
        FixedDrafter(states, DraftVocab.identity(4)), mirror(), one_row(logits, [1, 2, 3, 4])
    )
    assert sums.rows.tolist() == [3, 2]
    assert sums.agree.tolist() == [2, 2]
    assert sums.rounds[:2].tolist() == [3, 1]
    means = sums.means()
    assert means["agree@1"] == 2 / 3
    assert means["accept_length"] == 3


def gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


# ---- more than one term, and depths that are only measured ---------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_loss_is_weighted_sum_of_terms(target: Target, trace: Trace, path: str) -> None:
    """Loss and gradients of a sum are those of its parts, and each part is summed on its own."""
    divide, results = torch.tensor([31.0, 26.0, 21.0]), []
    for loss in (["soft_ce"], ["topk:3"], ["0.1*soft_ce", "2*topk:3"]):
        drafter = tiny.drafter("eagle3", target)
        value, sums = run(drafter, target, trace, divide, path=path, loss=loss)
        value.backward()
        results.append((value.detach(), sums, [gradient(p) for p in drafter.parameters()]))
    (soft, soft_sums, g), (topk, topk_sums, h), (both, sums, k) = results
    torch.testing.assert_close(both, 0.1 * soft + 2 * topk)
    torch.testing.assert_close(sums.terms[0], soft_sums.terms[0])
    torch.testing.assert_close(sums.terms[1], topk_sums.terms[0])
    torch.testing.assert_close(sums.loss, 0.1 * soft_sums.loss + 2 * topk_sums.loss)
    for a, b, c in zip(g, h, k, strict=True):
        torch.testing.assert_close(c, 0.1 * a + 2 * b, atol=1e-5, rtol=1e-4)


def test_a_depth_of_weight_zero_is_measured_but_not_trained(target: Target, trace: Trace) -> None:
    """In training it is not unrolled."""
    unrolled = []

    class Counting(FixedDrafter):
        def unroll(self, trace: Trace) -> Iterator[Guess]:
            for guess in super().unroll(trace):
                unrolled.append(guess.depth)
                yield guess

    states = [torch.randn_like(trace.last).requires_grad_() for _ in WEIGHTS]
    objective = Objective(Counting(states, tiny.vocab(), target), target, weights=[1.0, 0.0, 0.0])
    loss, sums = objective(trace, torch.ones(3))
    loss.backward()
    assert (unrolled, sums.rows.tolist()) == ([1], [31, 0, 0])
    _, sums = objective(trace, torch.ones(3), measure=True)
    assert (unrolled, sums.rows.tolist()) == ([1, 1, 2, 3], [31, 26, 21])
    assert sums.alpha.gt(0).all()
    assert states[0].grad is not None
    assert states[1].grad is None


def test_smooth_l1_compares_states_with_next_target_state(target: Target, trace: Trace) -> None:
    """Row t at depth d with row t + d: equal states cost 0, states off by 3 cost 2.5."""
    vocab = tiny.vocab()
    _, sums = run(oracle(target, trace, vocab), target, trace, loss=["smooth_l1"])
    assert not sums.loss.any()
    off = FixedDrafter(
        [state + 3.0 for state in oracle(target, trace, vocab).states], vocab, target
    )
    _, sums = run(off, target, trace, loss=["smooth_l1"])
    torch.testing.assert_close(sums.loss, 2.5 * sums.rows, atol=1e-4, rtol=1e-5)


class Changing(FixedDrafter):
    """A drafter that also yields the changed target's states, at depth 0."""

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        yield Guess.everywhere(0, self.states[0], 0.5)
        for depth, state in enumerate(self.states[1:], start=1):
            yield Guess.everywhere(depth, state)


@pytest.mark.parametrize("path", PATHS)
def test_target_loss_of_a_changed_target(target: Target, trace: Trace, path: str) -> None:
    """Depth 0 is compared with the target's row t; unchanged, the loss is its entropy."""
    divide = torch.tensor([10.0, 10.0])
    states = [trace.last.clone().requires_grad_(), *oracle(target, trace, tiny.vocab()).states[:2]]
    drafter = Changing(states, DraftVocab.identity(tiny.VOCAB), target)
    objective = Objective(drafter, target, weights=[1.0, 0.8], path=path)  # type: ignore[arg-type]
    loss, sums = objective(trace, divide, measure=True)
    plain = FixedDrafter(states[1:], DraftVocab.identity(tiny.VOCAB), target)
    without, other = Objective(plain, target, weights=[1.0, 0.8])(trace, divide, measure=True)
    rows = trace.supervised_mask(0)
    logits = target.logits(trace.last[rows])
    entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
    torch.testing.assert_close(loss - without, 0.5 * entropy / 10, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sums.target_loss[0].float(), entropy.detach(), atol=1e-3, rtol=1e-5)
    assert sums.target_loss[1] == rows.sum()
    torch.testing.assert_close(sums.alpha, other.alpha)
    loss.backward()
    assert states[0].grad is not None
    torch.testing.assert_close(states[0].grad, torch.zeros_like(states[0]), atol=1e-6, rtol=0)


# ---- sums add up ---------------------------------------------------------------------------------


def test_sums_of_half_batches_add_up(target: Target, trace: Trace) -> None:
    """Loss, sums and gradients, when all are divided by the counts of the whole."""
    divide = torch.stack([trace.supervised_mask(d).sum() for d in (1, 2, 3)]).float()
    whole = tiny.drafter("eagle3", target)
    loss, sums = run(whole, target, trace, divide)
    loss.backward()
    parts, added, total = tiny.drafter("eagle3", target), MetricSums.zero(3, "cpu"), 0.0
    for row in (0, 1):
        half = tiny.slice_trace(trace, slice(row, row + 1))
        part, part_sums = run(parts, target, half, divide)
        part.backward()
        added.add(part_sums)
        total += part.item()
    torch.testing.assert_close(total, loss.item())
    torch.testing.assert_close(added.flatten(), sums.flatten())
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-5, rtol=1e-4, msg=name)
