"""Batches: an answer does not depend on the rest of its batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.decode import request as request_module
from outrider.models.decode import sampling as sampling_module
from outrider.models.decode import tree_layout, verifier
from outrider.models.decode.adaptive_confidence import AdaptiveConfidence
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import ActiveRequest, Output, Request, Stops
from outrider.models.decode.round_times import RoundTimes
from outrider.models.decode.rules.rule_table import DRAWN, INDEPENDENT, BoundRule
from outrider.models.decode.sampling import GeneratorSource, inverse_cdf
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree_shapes import parse
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import tiny
from tests.families import FAMILIES as EVERY
from tests.families import small_model
from tests.tiny import TOKENS, Row, ScriptedDrafter, mean_target, random_logits

SHAPE = parse([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])
POLICIES: dict[str, Policy] = {
    "chain": Chain(3),
    "early chain": Chain(4, confidence=0.3),
    "adaptive chain": Chain(4, confidence=AdaptiveConfidence(start=0.3, step=2.0)),
    "static": StaticTree(SHAPE),
    "dynamic": DynamicTree(depth=3, width=3, budget=8),
    "opt-tree": DynamicTree(depth=4, width=3, budget=8, gain=0.3),
}
DRAWING: dict[str, Policy] = {
    **POLICIES,
    "drawn": StaticTree(SHAPE, DRAWN),
    "independent": StaticTree(SHAPE, INDEPENDENT),
}
FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)

# lengths of prompts and budgets, the longest beside the shortest
SIZES = [(3, 12), (40, 5), (1, 20), (9, 0), (17, 1), (2, 2), (60, 9), (5, 14), (1, 3), (28, 11)]


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    return [
        Request(torch.randint(3, tiny.VOCAB, (length,), generator=generator).tolist(), budget, n)
        for n, (length, budget) in enumerate(SIZES)
    ]


@cache
def answers(family: str) -> tuple[list[int], ...]:
    """The model's own answers: one prompt at a time, no cache, no mask."""
    of = tiny.target(family)
    return tuple(tiny.greedy_tokens(of, prompt, budget) for prompt, budget, *_ in requests())


def half_right(family: str) -> Row:
    """Logits that favour the right token at every other place of all answers."""
    noise, known = random_logits(tiny.VOCAB, scale=3.0), {}
    for request, answer in zip(requests(), answers(family), strict=True):
        text = (*request.prompt, *answer)
        known.update({text[:i]: text[i] for i in range(len(request.prompt), len(text))})

    def row(text: tuple[int, ...]) -> Tensor:
        logits = noise(text).clone()
        if text in known and len(text) % 2:
            logits[known[text]] = 20.0
        return logits

    return row


def engine(family: str, policy: Policy, kind: type[Engine] = Engine, **how: Any) -> Engine:
    return kind(tiny.target(family), ScriptedDrafter(half_right(family), tiny.VOCAB), policy, **how)


def token_ids(outs: Sequence[Output]) -> list[list[int]]:
    return [out.ids for out in outs]


# ---- greedy answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 8])
@each_policy
@FAMILIES
def test_greedy_answers_equal_plain_decoding(family: str, policy: Policy, batch: int) -> None:
    outs = engine(family, policy).generate_all(requests(), batch)
    assert token_ids(outs) == list(answers(family))
    assert sum(sum(out.accepted) for out in outs) > 10


@pytest.mark.parametrize("family", sorted(EVERY.keys() - {"llama", "gemma3", "gpt2"}))
def test_greedy_answers_equal_plain_decoding_in_every_family(family: str) -> None:
    """What the slots hold suits every kind of attention: windows, shared keys, experts."""
    for batch in (1, 8):
        outs = engine(family, POLICIES["dynamic"]).generate_all(requests(), batch)
        assert token_ids(outs) == list(answers(family))


@pytest.mark.parametrize("name", ["chain", "static", "dynamic"])
def test_a_prompt_may_end_where_the_targets_positions_do(name: str) -> None:
    """Its neighbour drafts deeper than it has room; learned positions have nothing beyond 127."""
    full, short = Request([7] * 120, 8), Request([5], 40)
    target = tiny.target("gpt2")
    wrong = ScriptedDrafter(random_logits(tiny.VOCAB), tiny.VOCAB)
    outs = Engine(target, wrong, POLICIES[name]).generate_all([full, short], 2)
    assert token_ids(outs) == [
        tiny.greedy_tokens(target, r.prompt, r.budget) for r in (full, short)
    ]


def test_plain_decoding_in_batches() -> None:
    outs = Engine(tiny.target("gemma3"), None, None).generate_all(requests(), 4)
    assert token_ids(outs) == list(answers("gemma3"))
    assert all(set(out.accepted) <= {0} for out in outs)


@pytest.mark.parametrize("name", ["eagle3", "medusa", "draft_lm", "mtp"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_trained_drafters_do_not_change_greedy_answers(name: str, family: str) -> None:
    """Half trained: sometimes right. Some batch their states, others do not."""
    target, trained_answers, drafter = tiny.half_trained(name, family)
    known = [Request(p, len(a)) for p, a in zip(tiny.PROMPTS, trained_answers, strict=True)]
    for policy in (POLICIES["chain"], POLICIES["static"], POLICIES["dynamic"]):
        outs = Engine(target, drafter, policy).generate_all([*known, *requests()], 8)
        assert token_ids(outs) == [*trained_answers, *answers(family)]
        assert sum(sum(out.accepted) for out in outs) > 0


def sampled(policy: Policy) -> Engine:
    """A drafter that is right now and then, at temperature 1."""
    drafter = ScriptedDrafter(random_logits(TOKENS, seed=3, scale=1.5), TOKENS)
    return Engine(mean_target(), drafter, policy, sampling=Sampling(1.0))


def few_tokens() -> list[Request]:
    return [request._replace(prompt=[t % TOKENS for t in request.prompt]) for request in requests()]


@pytest.mark.parametrize("policy", DRAWING.values(), ids=DRAWING)
@pytest.mark.parametrize("batch", [3, 8])
def test_samples_do_not_depend_on_the_batch(policy: Policy, batch: int) -> None:
    """The same seeds, the same tokens: also near the ends of budgets, and beside longer ones."""
    decoder = sampled(policy)
    alone = decoder.generate_all(few_tokens(), 1)
    together = decoder.generate_all(few_tokens(), batch)
    assert token_ids(together) == token_ids(alone)
    assert [out.accepted for out in together] == [out.accepted for out in alone]
    assert sum(sum(out.accepted) for out in alone) > 10
    other = [request._replace(seed=request.seed + 100) for request in few_tokens()]
    assert token_ids(decoder.generate_all(other, batch)) != token_ids(alone)


@pytest.mark.parametrize("policy", DRAWING.values(), ids=DRAWING)
def test_long_samples_do_not_depend_on_the_batch(policy: Policy) -> None:
    long = [request._replace(budget=30) for request in few_tokens()]
    alone, together = (sampled(policy).generate_all(long, batch) for batch in (1, 8))
    assert [ids[:20] for ids in token_ids(together)] == [ids[:20] for ids in token_ids(alone)]


@FAMILIES
def test_samples_of_real_targets_do_not_depend_on_the_batch(family: str) -> None:
    """Without drafts, and with a top-k tree: one draw of every node a round."""
    for decoder in (
        Engine(tiny.target(family), None, None, sampling=Sampling(1.0)),
        engine(family, POLICIES["static"], sampling=Sampling(1.0)),
    ):
        alone, together = (decoder.generate_all(requests(), batch) for batch in (1, 4))
        assert token_ids(together) == token_ids(alone) != list(answers(family))


def test_counts_do_not_depend_on_the_batch() -> None:
    for policy in POLICIES.values():
        decoder = engine("llama", policy)
        alone, together = (decoder.generate_all(requests(), batch) for batch in (1, 8))
        for mine, theirs in zip(alone, together, strict=True):
            assert (mine.accepted, mine.origins) == (theirs.accepted, theirs.origins)
            assert (mine.drafted, mine.stop_reason) == (theirs.drafted, theirs.stop_reason)


# ---- ends ----------------------------------------------------------------------------------------


@each_policy
def test_every_prompt_ends_at_its_own_end_token(policy: Policy) -> None:
    """Inside drafts or after them, while the others go on."""
    for stop in sorted({ids[len(ids) // 2] for ids in answers("llama") if ids}):
        outs = engine("llama", policy, stops=Stops([stop])).generate_all(requests(), 4)
        for out, whole in zip(outs, answers("llama"), strict=True):
            cut = whole.index(stop) + 1 if stop in whole else len(whole)
            assert out.ids == whole[:cut]
            assert out.stop_reason == ("end token" if stop in whole else "budget" if whole else "")


class Watched(Engine):
    """Notes who is decoded in each round, and checks the slots after it."""

    who: list[list[int]]

    def _round(self, live: list[ActiveRequest]) -> list[int]:
        self.who.append([one.number for one in live])
        return super()._round(live)

    def release(self) -> None:
        self._look(self.active)
        super().release()
        self._look(self.active)

    def _look(self, live: list[ActiveRequest]) -> None:
        """A slot holds what a fresh prefill of its text would, but for the newest token."""
        for slot, one in enumerate(live):
            text = [*one.request.prompt, *one.out.ids[:-1]]
            fresh, count = self.target.new_cache(len(text)), len(text)
            causal = torch.ones(1, count, count, dtype=torch.bool).tril()
            self.target.forward(torch.tensor([text]), torch.arange(count)[None], causal, fresh)
            assert self.cache.lengths[slot] == count
            assert torch.equal(self.cache.positions(slot), fresh.positions())
            for layer in range(self.target.num_layers):
                actual, expected = self.cache.rows(layer, slot), fresh.rows(layer)
                for mine, theirs in zip(actual, expected, strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@FAMILIES
@pytest.mark.parametrize("name", ["chain", "static", "dynamic"])
def test_every_slot_equals_a_fresh_prefill_after_every_round(family: str, name: str) -> None:
    decoder = engine(family, POLICIES[name], Watched)
    assert isinstance(decoder, Watched)
    decoder.who = []
    assert token_ids(decoder.generate_all(requests(), 3)) == list(answers(family))


class Handing(Engine):
    """Holds what every prompt's drafter is handed against the prompt's own text."""

    def _absorb(
        self, drafter: Drafter, live: list[ActiveRequest], traces: list[Trace], clock: RoundTimes
    ) -> None:
        super()._absorb(drafter, live, traces, clock)
        for one, trace in zip(live, traces, strict=True):
            text = [*one.request.prompt, *one.out.ids]
            start, stop = len(text) - 1 - trace.ids.shape[1], len(text) - 1
            assert trace.ids[0].tolist() == text[start:stop]
            assert trace.next_ids[0].tolist() == text[start + 1 :]
            assert trace.positions[0].tolist() == list(range(start, stop))
            assert one.root.tolist() == text[-1:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("policy", DRAWING.values(), ids=DRAWING)
def test_every_drafter_state_absorbs_the_text_of_its_own_prompt(
    policy: Policy, batch: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that come and go and end in the middle of rounds; kept masks are grown often."""
    monkeypatch.setattr(tree_layout, "MASK_STEP", 4)
    (stop, *_) = {ids[len(ids) // 2] for ids in answers("llama") if ids}
    how = {"sampling": Sampling(temperature), "stops": Stops([stop])}
    decoder = engine("llama", policy, Handing, **how)
    assert sum(out.rounds for out in decoder.generate_all(requests(), batch)) > 10


def schedule(rounds: list[int], batch: int) -> list[set[int]]:
    """Who is decoded in each round, if a slot is given on as soon as it is free."""
    waiting, left, found = list(range(len(rounds))), dict[int, int](), list[set[int]]()
    while waiting or left:
        while waiting and len(left) < batch:
            if rounds[waiting[0]]:
                left[waiting[0]] = rounds[waiting[0]]
            waiting.pop(0)
        if left:
            found.append(set(left))
        left = {number: count - 1 for number, count in left.items() if count > 1}
    return found


@pytest.mark.parametrize("batch", [1, 2, 4, 20])
def test_a_waiting_prompt_starts_after_another_has_ended(batch: int) -> None:
    decoder = engine("llama", Chain(3), Watched)
    assert isinstance(decoder, Watched)
    decoder.who = []
    outs = decoder.generate_all(requests(), batch)
    wanted = schedule([out.rounds for out in outs], batch)
    assert [set(live) for live in decoder.who] == wanted
    assert max(map(len, wanted)) == min(batch, sum(out.rounds > 0 for out in outs))


@pytest.mark.parametrize(("most", "wanted"), [(2048, [3, 1, 2]), (12, [2, 1, 1, 2]), (1, [1] * 6)])
@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0, repetition_penalty=1.2)])
def test_prompts_of_one_length_are_read_in_one_forward(
    how: Sampling, most: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tokens each, seven, five, in slots for four; the answers equal those of single prompts.

    By chance of the seeds, too, two of the first four end together, and make room for the last two.
    """
    generator = torch.Generator().manual_seed(6)
    drawn = [torch.randint(3, tiny.VOCAB, (n,), generator=generator) for n in (5, 5, 5, 7, 5, 5)]
    inputs = [Request(text.tolist(), 4, 40 + number) for number, text in enumerate(drawn)]
    decoder = engine("llama", Chain(2), Handing, sampling=how, keep_gaps=True)
    alone = [decoder.generate_all([one], 1)[0] for one in inputs]
    real, read = decoder.target.forward, list[int]()

    def forward(ids: Tensor, positions: Tensor, *rest: Any) -> Any:
        read.extend([len(ids)] if not positions.any(0)[0] else [])
        return real(ids, positions, *rest)

    monkeypatch.setattr(request_module, "PREFILL_TOKENS", most)
    monkeypatch.setattr(decoder.target, "forward", forward)
    together = decoder.generate_all(inputs, 4)
    assert sorted(read) == sorted(wanted)
    assert token_ids(together) == token_ids(alone)
    for mine, own in zip(together, alone, strict=True):
        assert mine.gaps == pytest.approx(own.gaps, abs=1e-4)


def test_events_concatenate_to_the_answers() -> None:
    pieces: dict[int, list[int]] = {}
    for event in engine("llama", Chain(3)).run(requests(), 3):
        pieces.setdefault(event.number, []).extend(event.tokens)
        assert event.out.ids == pieces[event.number]
    assert [pieces[n] for n in range(len(SIZES))] == list(answers("llama"))


# ---- what is refused -----------------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RunError, match="prompt is empty"):
        engine("llama", Chain(3)).generate_all([Request([5], 4), Request([], 4)], 2)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_decoded() -> None:
    decoder = engine("llama", Chain(3))
    fits = Request([7] * 120, 8)
    assert len(decoder.generate_all([fits], 1)[0].ids) == 8
    with pytest.raises(RunError, match=r"121 tokens and 8 new ones do not fit .* 128 positions"):
        next(decoder.run([Request([5], 4), Request([7] * 121, 8)], 2))


def test_batch_size_0_is_refused() -> None:
    with pytest.raises(ValueError, match="batch=0"):
        engine("llama", Chain(3)).generate_all(requests(), 0)


class Broken(Target):
    """A target whose head outputs NaN from the n-th call on, for the last prompt of the batch."""

    calls: int

    def logits(self, last: Tensor) -> Tensor:
        out = super().logits(last).clone()
        self.calls -= 1
        if self.calls < 0:
            out[-1] = float("nan")
        return out


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "warm"])
@pytest.mark.parametrize("policy", [None, *DRAWING.values()], ids=["plain", *DRAWING])
@pytest.mark.parametrize("after", [0, 5])
def test_nan_target_logits_end_the_run(
    policy: Policy | None, sampling: Sampling, after: int
) -> None:
    """In the prompt's forward, or in a round; with a message, not with a token."""
    target = Broken(small_model("llama"))
    target.calls = after
    drafter: Drafter | None = (
        ScriptedDrafter(random_logits(tiny.VOCAB), tiny.VOCAB) if policy else None
    )
    decoder = Engine(target, drafter, policy, sampling=sampling)
    inputs = [Request([9, 4, 5], 12), Request([8, 2], 12), Request([7], 12)]
    with pytest.raises(RunError, match=r"(?i)\bnan\b"):
        decoder.generate_all(inputs, 3)
    assert target.calls == -1  # at once


def going_wrong(value: float, length: int, node: int | None) -> Row:
    """`half_right`, and after more than `length` tokens `value`, everywhere or for one token."""
    good = half_right("llama")

    def row(text: tuple[int, ...]) -> Tensor:
        logits = good(text).clone()
        if len(text) > length:
            logits[slice(None) if node is None else node] = value
        return logits

    return row


BAD = pytest.mark.parametrize("value", [float("nan"), float("inf")])
NODE = pytest.mark.parametrize("node", [None, 7], ids=["all", "one"])


@BAD
@NODE
@pytest.mark.parametrize("policy", DRAWING.values(), ids=DRAWING)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "warm"])
def test_nan_drafter_logits_are_refused(
    value: float, node: int | None, policy: Policy, sampling: Sampling
) -> None:
    drafter = ScriptedDrafter(going_wrong(value, 0, node), tiny.VOCAB)
    decoder = Engine(tiny.target("llama"), drafter, policy, sampling=sampling)
    with pytest.raises(RunError, match="drafter's logits are not finite"):
        decoder.generate_all(requests(), 3)


@BAD
@NODE
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("policy", DRAWING.values(), ids=DRAWING)
def test_later_nan_drafter_logits_do_not_change_the_answer(
    value: float, node: int | None, policy: Policy, batch: int
) -> None:
    """Its guesses are bad ones: a node whose score is no number must not push out the root.

    Nor does an answer that begins beside it, in a batch of two, end it.
    """
    drafter = ScriptedDrafter(going_wrong(value, 4, node), tiny.VOCAB)
    inputs = [Request([9, 4], 6, 1), Request([5], 20, 2), Request([8, 2, 7], 8, 3)]
    outs = Engine(tiny.target("llama"), drafter, policy).generate_all(inputs, batch)
    of = tiny.target("llama")
    assert token_ids(outs) == [tiny.greedy_tokens(of, one.prompt, one.budget) for one in inputs]


@BAD
@pytest.mark.parametrize("name", ["drawn", "independent"])
def test_no_token_is_drawn_from_nan_rows(value: float, name: str) -> None:
    drafter = ScriptedDrafter(going_wrong(value, 4, 7), tiny.VOCAB)
    decoder = Engine(tiny.target("llama"), drafter, DRAWING[name], sampling=Sampling(1.0))
    with pytest.raises(RunError, match=r"could not be drafted: (?s:.*)NaN"):
        decoder.generate_all([Request([9, 4], 14, 1)], 1)


class UncheckedSource(GeneratorSource):
    """As on a GPU: draws do not check whether a draft row has mass."""

    def draw(self, rows: Tensor) -> Tensor:
        return inverse_cdf(rows, self.uniforms(rows.shape[1], rows.device), self.check_mass)


@BAD
@pytest.mark.parametrize("name", ["chain", "drawn", "independent"])
def test_tokens_of_nan_rows_are_refused_by_verification(
    value: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "GeneratorSource", UncheckedSource)
    monkeypatch.setattr(sampling_module, "LONG", 1)  # by blocks
    inputs = [Request([9, 4], 14, 1), Request([8, 2, 7], 14, 2)]
    how: dict[str, Any] = {"sampling": Sampling(1.0)}
    drafter = ScriptedDrafter(going_wrong(value, 4, 7), tiny.VOCAB)
    decoder = Engine(tiny.target("llama"), drafter, DRAWING[name], **how)
    with pytest.raises(RunError, match="could not be verified"):
        by_tensors(decoder).generate_all(inputs, 2)
    target = Broken(small_model("llama"))
    target.calls = 3
    sound = ScriptedDrafter(random_logits(tiny.VOCAB), tiny.VOCAB)
    with pytest.raises(RunError, match=r"(?i)\bnan\b"):
        by_tensors(Engine(target, sound, DRAWING[name], **how)).generate_all(inputs, 2)


def by_tensors(decoder: Engine) -> Engine:
    """The same, verified as on a GPU."""
    assert isinstance(decoder.verifier.rule, BoundRule)
    decoder.verifier.rule = replace(decoder.verifier.rule, cpu_rule=None)
    return decoder


# ---- the control ---------------------------------------------------------------------------------


def see_all(tree: Any, prefix: list[int]) -> tuple[Tensor, Tensor]:
    """Wrong on purpose: every slot looks at as many columns as the longest one."""
    at, size = torch.tensor(prefix)[:, None], tree.size
    columns = torch.arange(max(prefix) + size)
    visible = (columns < max(prefix)).repeat(len(prefix), size, 1)
    own = (at + columns[:size])[:, None].expand(-1, size, -1)
    return tree.depths + at, visible.scatter(2, own, tree.ancestor_mask)


@pytest.mark.parametrize("build", [lambda: Chain(3), lambda: StaticTree(SHAPE)])
def test_attending_to_stale_rows_is_detected(
    build: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_layout, "positions_and_mask", see_all)
    decoder = engine("llama", build())
    assert token_ids(decoder.generate_all(requests(), 1)) == list(answers("llama"))  # one length
    assert token_ids(decoder.generate_all(requests(), 4)) != list(answers("llama"))
