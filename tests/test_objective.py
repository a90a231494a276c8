"""From a trace to sums: against loops over rows, against theory, and the fast path against both."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafter import Drafter
from outrider.models.interface import Guess, Trace
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train import teacher as module
from outrider.train.metric_sums import MetricSums
from outrider.train.objective import Objective
from tests import tiny
from tests.tiny import FixedDrafter

WEIGHTS = [1.0, 0.8, 0.64]
PATHS = ["fused", "kept", "plain"]
FIELDS = ("loss", "agree", "alpha", "rows")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def trace(target: Target) -> Trace:
    tiny.drafter("eagle3", target)
    return tiny.packed_trace(target)


def mirror() -> Target:
    """V = H = 4, and a head that is the identity: what the trace holds as `last` are logits."""
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


def test_a_single_answer_token_is_guessed_once_at_every_depth() -> None:
    """x_5 is the only answer: guessed by row 3 at depth 1, row 2 at depth 2, row 1 at depth 3."""
    trace = one_row([[0.0] * 4] * 7, answer=[5])
    guessed = [
        trace.supervised_mask(depth)[0].nonzero().flatten().tolist() for depth in range(1, 8)
    ]
    assert guessed == [[3], [2], [1], [0], [], [], []]


def test_a_guess_counts_by_the_token_it_is_about() -> None:
    """Documents 0 0 0 0 | 1 1 1 | padding; answers x_2 x_3 | x_4 x_6 | and x_7, which is padding.

    x_4 opens its document: nobody in it reads anything before. x_6 has one row two before.
    """
    trace = one_row([[0.0] * 4] * 8, [2, 3, 4, 6, 7], document=[0, 0, 0, 0, 1, 1, 1, -1])
    guessed = [trace.supervised_mask(depth)[0].nonzero().flatten().tolist() for depth in (1, 2, 3)]
    assert guessed == [[0, 1, 4], [0], []]


def test_padding_never_counts() -> None:
    """Even where it claims to be an answer, and follows itself."""
    trace = one_row([[0.0] * 4] * 6, answer=list(range(6)), document=[-1] * 6)
    assert not any(trace.supervised_mask(depth).any() for depth in range(1, 7))
    drafter = FixedDrafter([torch.randn(1, 6, 4)], DraftVocab.identity(4))
    loss, sums = run(drafter, mirror(), trace)
    assert loss == 0
    assert not sums.flatten().any()


def test_what_is_not_supervised_does_not_matter(target: Target, trace: Trace) -> None:
    """Neither the states of rows that do not count, nor the target's rows that judge nobody."""
    states = [torch.randn_like(trace.last) for _ in WEIGHTS]
    before, sums = run(FixedDrafter(states, tiny.vocab(), target), target, trace)
    judges = torch.zeros_like(trace.answer)
    for depth, state in enumerate(states, start=1):
        counts = trace.supervised_mask(depth)
        state[~counts] = torch.randn_like(state[~counts])
        judges[:, depth:] |= counts[:, :-depth]
    last = torch.where(judges[..., None], trace.last, torch.randn_like(trace.last))
    assert not judges.all()
    changed = dataclasses.replace(trace, last=last)
    after, other = run(FixedDrafter(states, tiny.vocab(), target), target, changed)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(other.flatten(), sums.flatten())


# ---- loops over rows and depths ------------------------------------------------------------------


def literally(
    drafter: Drafter, target: Target, trace: Trace, divide: Tensor, renormalise: bool
) -> tuple[float, dict[str, list[float]]]:
    """Row by row: the guess of row t at depth d is judged by the target's row t + d."""
    guesses = {guess.depth: guess.hidden for guess in drafter.unroll(trace)}
    sums = {name: [0.0] * len(guesses) for name in FIELDS}
    kept, total = drafter.vocab.target_ids, 0.0
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
                teacher = p[kept] / p[kept].sum() if renormalise else p[kept]
                agrees = int(kept[q.argmax()]) == int(p.argmax())
                nats = -float((teacher * q.log()).sum()) if int(p.argmax()) in kept else 0.0
                total += WEIGHTS[depth - 1] * nats / float(divide[depth - 1])
                found = (nats, agrees, float(torch.minimum(p[kept], q).sum()), 1)
                for name, value in zip(FIELDS, found, strict=True):
                    sums[name][depth - 1] += value
    return total, sums


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [20, tiny.DRAFTED, tiny.VOCAB])
def test_the_objective_equals_loops_over_rows_and_depths(
    target: Target, trace: Trace, size: int, path: str, renormalise: bool
) -> None:
    """A drafter that is right now and then: its states are the target's own, disturbed."""
    generator = torch.Generator().manual_seed(6)
    states = []
    for depth in (1, 2, 3):
        noise = torch.randn(trace.last.shape, generator=generator)
        states.append(trace.last.roll(-depth, 1) + noise * 0.2 * depth)
    drafter = FixedDrafter(states, tiny.vocab(size), target)
    divide = torch.tensor([7.0, 5.0, 3.0])
    loss, sums = run(drafter, target, trace, divide, path=path, renormalise=renormalise)
    expected, by_hand = literally(drafter, target, trace, divide, renormalise)
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
@pytest.mark.parametrize("path", ["fused", "kept"])
def test_in_chunks_it_equals_plain(
    target: Target,
    trace: Trace,
    path: str,
    renormalise: bool,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss, sums and every gradient; from one target row per chunk to all at once."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    divide, found = torch.tensor([31.0, 26.0, 21.0]), []
    for way in ("plain", path):
        drafter = tiny.drafter("eagle3", target)
        loss, sums = run(drafter, target, trace, divide, path=way, renormalise=renormalise)
        (3 * loss).backward()  # accumulation scales the loss
        grads = {name: p.grad for name, p in drafter.named_parameters()}
        found.append((loss.detach(), sums.flatten(), grads))
    slow, fast = found
    torch.testing.assert_close(fast[0], slow[0])
    torch.testing.assert_close(fast[1], slow[1], atol=1e-5, rtol=1e-6)  # floats, summed anew
    for name, grad in slow[2].items():
        torch.testing.assert_close(fast[2][name], grad, atol=1e-5, rtol=1e-4, msg=name)


def test_chunks_hold_no_more_logits_than_allowed(
    target: Target, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target's and drafter's logits are both counted; every judging row comes once."""
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
    judging = torch.zeros_like(trace.answer)
    for depth in (1, 2, 3):
        judging[:, depth:] |= trace.supervised_mask(depth)[:, :-depth]
    assert rows == int(judging.sum())


def test_ranks_with_unequal_text_compute_as_many_chunks(
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
        run(drafter, target, text, path="kept")[0].backward()
        calls.append(count)
    assert calls[0] == calls[1] == calls[2] > 4


@pytest.mark.parametrize("path", PATHS)
def test_without_gradients_the_numbers_are_the_same(
    target: Target, trace: Trace, path: str
) -> None:
    drafter = tiny.drafter("eagle3", target)
    loss, sums = run(drafter, target, trace, path=path)
    with torch.no_grad():
        quiet, quiet_sums = run(drafter, target, trace, path=path)
    assert not quiet.requires_grad
    torch.testing.assert_close(quiet, loss.detach())
    torch.testing.assert_close(quiet_sums.flatten(), sums.flatten())


class Narrow:
    """A teacher that owns up to the draft vocabulary's part of its head only."""

    def __init__(self, target: Target) -> None:
        self.vocab_size, self.logits_of = target.vocab_size, target.logits_of

    def logits(self, last: Tensor) -> Tensor:
        raise AssertionError("the whole head is not needed")


@pytest.mark.parametrize("path", PATHS)
def test_noted_favourites_change_nothing_and_spare_the_head(
    target: Target, trace: Trace, path: Any
) -> None:
    noted = dataclasses.replace(trace, top1_ids=target.logits(trace.last).argmax(-1))
    drafter = tiny.drafter("eagle3", target)
    results = []
    for teacher, text in ((target, trace), (Narrow(target), noted)):
        drafter.zero_grad()
        objective = Objective(drafter, teacher, weights=WEIGHTS, path=path)
        loss, sums = objective(text, torch.ones(3))
        loss.backward()
        grads = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        results.append([loss.detach(), sums.flatten(), *grads])
    torch.testing.assert_close(results[0], results[1])
    assert results[0][1][:3].gt(0).all()


def test_favourites_noted_in_part_or_not_enough_are_found_anew(
    target: Target, trace: Trace
) -> None:
    """One judged row without a note, or alpha asked for: then the whole head is needed."""
    favourite = target.logits(trace.last).argmax(-1)
    drafter = tiny.drafter("eagle3", target)
    expected = run(drafter, target, trace)[1].flatten()
    for noted in (favourite, torch.where(trace.positions == 4, -1, favourite)):
        text = dataclasses.replace(trace, top1_ids=noted)
        torch.testing.assert_close(run(drafter, target, text)[1].flatten(), expected)
        with pytest.raises(AssertionError, match="whole head"):
            run(drafter, Narrow(target), text)  # type: ignore[arg-type]


def test_frozen_parameters_are_left_alone(target: Target, trace: Trace) -> None:
    drafter = tiny.drafter("eagle3", target)
    frozen = drafter.get_parameter("lm_head.weight").requires_grad_(False)
    run(drafter, target, trace)[0].backward()
    assert frozen.grad is None
    assert drafter.get_parameter("fc.weight").grad is not None


# ---- theory --------------------------------------------------------------------------------------


def psychic(target: Target, trace: Trace, vocab: DraftVocab) -> FixedDrafter:
    """Row t already holds the state the target will have at row t + d."""
    return FixedDrafter([trace.last.roll(-depth, 1) for depth in (1, 2, 3)], vocab, target)


@pytest.mark.parametrize("size", [tiny.DRAFTED, tiny.VOCAB])
def test_a_perfect_drafter_costs_the_targets_entropy(
    target: Target, trace: Trace, size: int
) -> None:
    """Of the target restricted to the draft vocabulary, where its favourite can be drafted.

    It agrees exactly there, and what sampling accepts is the mass of the draft vocabulary.
    """
    vocab = tiny.vocab(size)
    loss, sums = run(psychic(target, trace, vocab), target, trace)
    total = 0.0
    for i, depth in enumerate((1, 2, 3)):
        logits = target.logits(trace.last[:, depth:][trace.supervised_mask(depth)[:, :-depth]])
        fair = vocab.t2d[logits.argmax(-1)]
        entropy = (
            torch.distributions.Categorical(logits=logits[:, vocab.target_ids])
            .entropy()[fair]
            .sum()
        )
        assert sums.rows[i] == len(logits)
        assert sums.agree[i] == fair.sum()
        assert fair.all() == (size == tiny.VOCAB)
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
def test_the_teacher_is_renormalised_or_not(renormalise: bool, bits: float) -> None:
    """With p = (1/2, 1/4, 1/8, 1/8), q = (1/2, 1/4, 1/4) over 0, 2, 3; alpha knows all of p."""
    p = [-1 * LOG2, -2 * LOG2, -3 * LOG2, -3 * LOG2]
    q = torch.tensor([-1.0, -2.0, -2.0]) * LOG2
    trace = one_row([[0.0] * 4, p, [0.0] * 4], answer=[2])
    drafter = FixedDrafter([q.expand(1, 3, 3)], DraftVocab(torch.tensor([0, 2, 3]), 4))
    _, sums = run(drafter, mirror(), trace, renormalise=renormalise)
    torch.testing.assert_close(sums.loss.tolist(), [bits * LOG2], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sums.alpha.tolist(), [0.75], atol=1e-6, rtol=1e-6)
    assert sums.agree.tolist() == [1]


def test_a_favourite_that_cannot_be_drafted_costs_nothing_but_counts() -> None:
    """The target wants token 1, the drafter knows 0, 2 and 3."""
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


def test_rounds_are_counted_from_the_drafters_agreement() -> None:
    """Five answers; the target always says 2. The drafter is wrong where marked.

    depth 1, rows 0..2:  right wrong right      depth 2, rows 0..1:  right right

    x_1 comes from the prefill. The round at row 0 accepts both guesses and brings x_4 besides.
    """
    say = [[0.0, 0.0, 3.0, 0.0]] * 5
    right, wrong = [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]
    states = [torch.tensor([[right, wrong, right, wrong, wrong]]), torch.tensor([[right] * 5])]
    _, sums = run(
        FixedDrafter(states, DraftVocab.identity(4)), mirror(), one_row(say, [1, 2, 3, 4])
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
def test_terms_add_up_with_their_weights(target: Target, trace: Trace, path: str) -> None:
    """Loss and gradients of a sum are those of its parts, and each part is summed on its own."""
    divide, found = torch.tensor([31.0, 26.0, 21.0]), []
    for loss in (["soft_ce"], ["topk:3"], ["0.1*soft_ce", "2*topk:3"]):
        drafter = tiny.drafter("eagle3", target)
        value, sums = run(drafter, target, trace, divide, path=path, loss=loss)
        value.backward()
        found.append((value.detach(), sums, [gradient(p) for p in drafter.parameters()]))
    (soft, soft_sums, g), (topk, topk_sums, h), (both, sums, k) = found
    torch.testing.assert_close(both, 0.1 * soft + 2 * topk)
    torch.testing.assert_close(sums.terms[0], soft_sums.terms[0])
    torch.testing.assert_close(sums.terms[1], topk_sums.terms[0])
    torch.testing.assert_close(sums.loss, 0.1 * soft_sums.loss + 2 * topk_sums.loss)
    for a, b, c in zip(g, h, k, strict=True):
        torch.testing.assert_close(c, 0.1 * a + 2 * b, atol=1e-5, rtol=1e-4)


def test_a_depth_of_weight_zero_is_measured_but_not_trained(target: Target, trace: Trace) -> None:
    """In training its states are not even asked for."""
    asked = []

    class Counting(FixedDrafter):
        def unroll(self, trace: Trace) -> Iterator[Guess]:
            for guess in super().unroll(trace):
                asked.append(guess.depth)
                yield guess

    states = [torch.randn_like(trace.last).requires_grad_() for _ in WEIGHTS]
    objective = Objective(Counting(states, tiny.vocab(), target), target, weights=[1.0, 0.0, 0.0])
    loss, sums = objective(trace, torch.ones(3))
    loss.backward()
    assert (asked, sums.rows.tolist()) == ([1], [31, 0, 0])
    _, sums = objective(trace, torch.ones(3), measure=True)
    assert (asked, sums.rows.tolist()) == ([1, 1, 2, 3], [31, 26, 21])
    assert sums.alpha.gt(0).all()
    assert states[0].grad is not None
    assert states[1].grad is None


def test_features_are_compared_with_the_targets_next_state(target: Target, trace: Trace) -> None:
    """Row t at depth d with row t + d: a psychic pays nothing, and one off by 3 pays 2.5."""
    vocab = tiny.vocab()
    _, sums = run(psychic(target, trace, vocab), target, trace, loss=["smooth_l1"])
    assert not sums.loss.any()
    off = FixedDrafter(
        [state + 3.0 for state in psychic(target, trace, vocab).states], vocab, target
    )
    _, sums = run(off, target, trace, loss=["smooth_l1"])
    torch.testing.assert_close(sums.loss, 2.5 * sums.rows, atol=1e-4, rtol=1e-5)


class Changing(FixedDrafter):
    """A drafter that says what it has made of the target itself."""

    target_loss_weight = 0.5

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        yield Guess(0, self.states[0])
        for depth, state in enumerate(self.states[1:], start=1):
            yield Guess(depth, state)


@pytest.mark.parametrize("path", PATHS)
def test_a_changed_target_pays_for_what_it_no_longer_says(
    target: Target, trace: Trace, path: str
) -> None:
    """Depth 0: token t+1, judged by the target's row t; unchanged, it costs its own entropy."""
    divide = torch.tensor([10.0, 10.0])
    states = [trace.last.clone().requires_grad_(), *psychic(target, trace, tiny.vocab()).states[:2]]
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


def test_two_halves_of_a_batch_add_up_to_the_whole(target: Target, trace: Trace) -> None:
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
