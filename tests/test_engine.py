"""The decoder as a whole: the same tokens as plain decoding, exact counts, and a clean cache.

Drafters here are oracles (tests/tiny.py) that know the target's answer and give it, half of it, or
everything but it; they also check what the engine hands over to them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import ge
from typing import Any

import pytest
import torch
from scipy.stats import power_divergence
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.cache.kv_cache import KVCache
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Draft, Policy
from outrider.models.decode.request import Output, Request, Stops
from outrider.models.decode.rules.rule_table import DRAWN, BoundRule, bind_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree_shapes import parse
from outrider.models.decode.verifier import Decision
from outrider.models.drafting.drafter import State
from outrider.models.target.target import Target
from tests import tiny
from tests.tiny import (
    TOKENS,
    RawBonus,
    ScriptedDrafter,
    Text,
    logits_after,
    mean_target,
    random_logits,
    scripted_logits,
)

PROMPTS = {  # whose answers repeat themselves late, for random models; gemma3's window is 6 rows
    "llama": [27, 8, 30, 18, 56, 56, 34, 59],
    "gemma3": [19, 26, 24, 24, 10, 21, 18, 58],
    "gpt2": [20, 26, 60, 21, 39, 37, 10, 32],
}
LONGEST = 14
CHAIN, TREE = Chain(3), DynamicTree(depth=3, width=3, budget=8)
STATIC = StaticTree(parse([(0,), (1,), (4,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 3)]))
POLICIES = pytest.mark.parametrize("policy", [CHAIN, STATIC, TREE], ids=["chain", "static", "tree"])


@dataclass(frozen=True)
class Scene:
    """A target and its answer to a prompt, computed without a cache."""

    target: Target
    prompt: list[int]
    answer: list[int]

    def oracle(self, right: Callable[[int], bool]) -> ScriptedDrafter:
        """Right about the n-th new token iff right(n); the root is number 0."""
        start = len(self.prompt)
        known = scripted_logits(self.prompt + self.answer, tiny.VOCAB, lambda i: right(i - start))
        return ScriptedDrafter(known, tiny.VOCAB)


@cache
def scene(family: str) -> Scene:
    target, prompt = tiny.target(family), PROMPTS[family]
    return Scene(target, prompt, tiny.greedy_tokens(target, prompt, LONGEST + 5))


@pytest.fixture(params=PROMPTS)
def case(request: pytest.FixtureRequest) -> Scene:
    return scene(request.param)


@pytest.fixture(name="llama")
def llama_scene() -> Scene:
    return scene("llama")


def always(_: int) -> bool:
    return True


def never(_: int) -> bool:
    return False


def even(n: int) -> bool:
    return n % 2 == 0


def emitted(out: Output) -> int:
    """One token by the prefill, then one more than was accepted in every round."""
    return 1 + sum(accepted + 1 for accepted in out.accepted)


# ---- greedy answers ------------------------------------------------------------------------------


@POLICIES
@pytest.mark.parametrize("right", [always, even, never], ids=["perfect", "half", "wrong"])
def test_greedy_answers_equal_plain_decoding(
    case: Scene, policy: Policy, right: Callable[[int], bool]
) -> None:
    out = Engine(case.target, case.oracle(right), policy).generate(case.prompt, LONGEST)
    assert out.ids == case.answer[:LONGEST]
    assert emitted(out) == len(out.ids)


@POLICIES
def test_a_random_drafter_does_not_change_the_answer(case: Scene, policy: Policy) -> None:
    for seed in (0, 1):
        drafter = ScriptedDrafter(random_logits(tiny.VOCAB, seed), tiny.VOCAB)
        out = Engine(case.target, drafter, policy).generate(case.prompt, LONGEST)
        assert out.ids == case.answer[:LONGEST]


def test_without_a_drafter_every_round_is_one_token(case: Scene) -> None:
    out = Engine(case.target, None, None).generate(case.prompt, LONGEST)
    assert out.ids == case.answer[:LONGEST]
    assert out.accepted == out.drafted == [0] * (LONGEST - 1)


def test_one_engine_decodes_many_prompts(llama: Scene) -> None:
    """Nothing of an answer is left when the next one begins."""
    decoder = Engine(llama.target, ScriptedDrafter(random_logits(tiny.VOCAB), tiny.VOCAB), TREE)
    for prompt in ([7, 8], llama.prompt, [60], llama.prompt):
        assert decoder.generate(prompt, 6).ids == tiny.greedy_tokens(llama.target, prompt, 6)


# ---- the counts ----------------------------------------------------------------------------------


def test_a_perfect_chain_is_fully_accepted(llama: Scene) -> None:
    """Thirteen tokens: one by the prefill, then three rounds of three drafts and a bonus."""
    out = Engine(llama.target, llama.oracle(always), CHAIN).generate(llama.prompt, 13)
    assert (out.accepted, out.drafted, out.rounds) == ([3, 3, 3], [3, 3, 3], 3)


def test_levels_are_counted_if_they_are_not_verified(llama: Scene) -> None:
    """Of three levels of three nodes each, a tree of three nodes seldom keeps the last one."""
    calls = list[int]()

    class Counted(ScriptedDrafter):
        def step_batch(self, states: Sequence[State], depth: int, *of: Tensor) -> Any:
            calls.append(depth)
            return super().step_batch(states, depth, *of)

    drafter = Counted(random_logits(tiny.VOCAB), tiny.VOCAB)
    for policy in (CHAIN, Chain(4, confidence=0.9), STATIC, TREE, DynamicTree(3, 3, 4)):
        calls.clear()
        outs = Engine(llama.target, drafter, policy).generate_all(
            [Request(llama.prompt, LONGEST), Request([7, 8], 3)], 1
        )
        assert sum(map(len, (out.steps for out in outs))) == sum(out.rounds for out in outs)
        assert [sum(out.steps) for out in outs] == [len(calls) - 1, 1]
        assert all(map(ge, outs[0].steps, outs[0].drafted))
    few = Engine(llama.target, drafter, DynamicTree(3, 3, 3)).generate(llama.prompt, LONGEST)
    assert sum(few.steps) > sum(few.drafted)


def test_the_last_round_drafts_only_what_the_budget_can_take(llama: Scene) -> None:
    """1 + 4 + 4, and of 12 tokens three are left: two drafts and a bonus. Of 10, one: no draft."""
    decoder = Engine(llama.target, llama.oracle(always), CHAIN)
    for budget, accepted in ((12, [3, 3, 2]), (11, [3, 3, 1]), (10, [3, 3, 0])):
        out = decoder.generate(llama.prompt, budget)
        assert (out.accepted, out.drafted) == (accepted, accepted)


@POLICIES
def test_a_perfect_draft_is_accepted_to_its_depth(llama: Scene, policy: Policy) -> None:
    out = Engine(llama.target, llama.oracle(always), policy).generate(llama.prompt, 13)
    assert (out.accepted, out.drafted) == ([3, 3, 3], [3, 3, 3])


@POLICIES
def test_an_always_wrong_drafter_is_never_accepted(llama: Scene, policy: Policy) -> None:
    out = Engine(llama.target, llama.oracle(never), policy).generate(llama.prompt, 12)
    assert out.accepted == [0] * 11


def test_a_drafter_right_at_every_other_token_is_accepted_once_a_round(llama: Scene) -> None:
    """Right at even tokens. From root 0 it misses token 1; from root 1 it gives 2 and misses 3.

    So one token comes out of the first round, and two out of each after it: roots 0, 1, 3, 5, 7.
    """
    out = Engine(llama.target, llama.oracle(even), CHAIN).generate(llama.prompt, 12)
    assert out.accepted == [0, 1, 1, 1, 1, 1]
    assert out.ids == llama.answer[:12]


@POLICIES
@pytest.mark.parametrize("right", [always, even, never], ids=["perfect", "half", "wrong"])
@pytest.mark.parametrize("budget", [0, 1, 2, 7])
def test_the_budget_is_exact(
    llama: Scene, budget: int, right: Callable[[int], bool], policy: Policy
) -> None:
    out = Engine(llama.target, llama.oracle(right), policy).generate(llama.prompt, budget)
    assert out.ids == llama.answer[:budget]
    assert budget == 0 or emitted(out) == budget


# ---- the end token -------------------------------------------------------------------------------


@POLICIES
@pytest.mark.parametrize("right", [always, even, never], ids=["perfect", "half", "wrong"])
def test_the_answer_ends_at_the_first_end_token(
    case: Scene, policy: Policy, right: Callable[[int], bool]
) -> None:
    """Wherever it stands: the root, a drafted token, the bonus; later ones never come."""
    for stop in dict.fromkeys(case.answer[:7]):
        decoder = Engine(case.target, case.oracle(right), policy, stops=Stops([stop, 10**6]))
        out = decoder.generate(case.prompt, LONGEST)
        assert out.ids == case.answer[: case.answer.index(stop) + 1]


def test_an_end_token_inside_the_draft_cuts_what_was_accepted(llama: Scene) -> None:
    """A perfect chain gives tokens 1, 2, 3 and the bonus 4; the end is the drafted token 2."""
    stop = llama.answer[2]
    assert stop not in llama.answer[:2]
    decoder = Engine(llama.target, llama.oracle(always), CHAIN, stops=Stops([stop]))
    out = decoder.generate(llama.prompt, LONGEST)
    assert out.ids == llama.answer[:3]
    assert (out.accepted, out.drafted) == ([2], [3])
    assert decoder.cache.lengths[0] == len(llama.prompt) + 2


# ---- the cache -----------------------------------------------------------------------------------


def prefilled(target: Target, ids: Sequence[int]) -> KVCache:
    cache, count = target.new_cache(len(ids)), len(ids)
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    target.forward(torch.tensor([list(ids)]), torch.arange(count)[None], causal, cache)
    return cache


@POLICIES
@pytest.mark.parametrize("right", [always, even, never], ids=["perfect", "half", "wrong"])
@pytest.mark.parametrize("stopped", [False, True], ids=["budget", "end token"])
def test_the_cache_equals_a_fresh_prefill(
    case: Scene, policy: Policy, right: Callable[[int], bool], stopped: bool
) -> None:
    """Of the prompt and all new tokens but the newest, in every layer."""
    stop = [case.answer[6]] if stopped else []
    decoder = Engine(case.target, case.oracle(right), policy, stops=Stops(stop))
    out = decoder.generate(case.prompt, LONGEST)
    fresh = prefilled(case.target, case.prompt + out.ids[:-1])
    assert decoder.cache.lengths[0] == fresh.lengths[0] == len(case.prompt) + len(out.ids) - 1
    assert torch.equal(decoder.cache.positions(), fresh.positions())
    assert len(decoder.cache) == case.target.num_layers
    for layer in range(case.target.num_layers):
        for mine, theirs in zip(decoder.cache.rows(layer), fresh.rows(layer), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


# ---- what the drafter is handed ------------------------------------------------------------------


@POLICIES
@pytest.mark.parametrize("right", [always, even, never], ids=["perfect", "half", "wrong"])
def test_the_drafter_absorbs_the_states_of_the_committed_rows(
    case: Scene, policy: Policy, right: Callable[[int], bool]
) -> None:
    """Taps and last states are those of one forward over the finished text."""
    drafter = ScriptedDrafter(case.oracle(right).row, tiny.VOCAB, taps=(0, 2))
    out = Engine(case.target, drafter, policy).generate(case.prompt, LONGEST)
    text = torch.tensor([case.prompt + out.ids])
    count = text.shape[1] - 1
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    fresh = case.target.forward(text[:, :-1], torch.arange(count)[None], causal)
    handed = {
        name: torch.cat([getattr(trace, name) for trace in drafter.handed], 1)
        for name in ("ids", "next_ids", "positions", "taps", "last")
    }
    assert torch.equal(handed["ids"], text[:, :-1])
    assert torch.equal(handed["next_ids"], text[:, 1:])
    assert torch.equal(handed["positions"], torch.arange(count)[None])
    torch.testing.assert_close(handed["taps"], fresh.taps, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(handed["last"], fresh.last, atol=1e-4, rtol=1e-4)


# ---- what is measured ----------------------------------------------------------------------------


@POLICIES
def test_gaps_are_the_margins_of_the_emitted_tokens(llama: Scene, policy: Policy) -> None:
    """One per new token: the first logit minus the second, of the model itself."""
    decoder = Engine(llama.target, llama.oracle(even), policy, keep_gaps=True)
    out = decoder.generate(llama.prompt, 12)
    with torch.no_grad():
        ids = torch.tensor([llama.prompt + out.ids[:-1]])
        logits = llama.target.model(input_ids=ids).logits[0, len(llama.prompt) - 1 :]
    top = logits.topk(2).values
    torch.testing.assert_close(torch.tensor(out.gaps), top[:, 0] - top[:, 1], atol=1e-4, rtol=1e-4)


def test_a_negative_seed_is_refused(llama: Scene) -> None:
    with pytest.raises(RunError, match="seed=-5 is negative"):
        Engine(llama.target, None, None).generate_all([Request(llama.prompt, 4, -5)], 1)


def test_round_times_add_up(llama: Scene) -> None:
    clock = Engine(llama.target, llama.oracle(even), CHAIN).generate(llama.prompt, 12).times
    parts = (clock.draft, clock.target, clock.verify, clock.commit)
    assert min(parts) > 0
    assert 0.1 * clock.rounds < sum(parts) <= clock.rounds  # the same stamps: never more


# ---- sampling ------------------------------------------------------------------------------------

WARM, NARROW = Sampling(temperature=0.8, top_k=4), Sampling(temperature=0.8, top_k=2)
SHORT, LENGTH = [1, 3, 4, 2], 3  # the joint law of three tokens; one more leaves room to draft


def exact_law(target: Target, sampling: Sampling) -> dict[Text, float]:
    """Plain sampling of three tokens, by the chain rule."""
    law: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Text, float] = {}
        for text, chance in law.items():
            row = sampling.probs(logits_after(target, [*SHORT, *text])[None])[0].tolist()
            longer.update({(*text, token): chance * p for token, p in enumerate(row) if p > 0})
        law = longer
    total = sum(law.values())  # 1, but for the float32 of the rows
    return {text: chance / total for text, chance in law.items()}


def p_value(decoder: Engine, samples: int) -> float:
    """G-test of the first three tokens; cells expected less than five times are put together.

    A token that plain sampling cannot give is the surest evidence of all: 0.
    """
    law = exact_law(decoder.target, decoder.sampling)
    counts = Counter(
        tuple(decoder.generate(SHORT, LENGTH + 1).ids[:LENGTH]) for _ in range(samples)
    )
    if not counts.keys() <= law.keys():
        return 0.0
    cells = [(counts[text], samples * chance) for text, chance in law.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [cell for cell in cells if cell[1] < 5]
    if rest:
        large.append((sum(seen for seen, _ in rest), sum(wanted for _, wanted in rest)))
    seen, wanted = zip(*large, strict=True)
    return float(power_divergence(seen, wanted, lambda_="log-likelihood").pvalue)


class Redrawn(Engine):
    """Wrong on purpose: the token after the accepted ones is drawn afresh (R4)."""

    def _decide(self, draft: Draft, logits: Tensor) -> Decision:
        decision = super()._decide(draft, logits)
        rounds = decision.outcomes
        last = logits[torch.arange(len(rounds)), [one.path[-1] for one in rounds]]
        rng = self.verifier.random_source()
        tokens = rng.draw_host(self.sampling.probs(last))
        redrawn = [
            one._replace(tokens=[*one.tokens[:-1], token])
            for one, token in zip(rounds, tokens, strict=True)
        ]
        return decision._replace(outcomes=redrawn)


def sampler(kind: type[Engine], policy: Policy, seed: int = 0) -> Engine:
    """The drafter is unlike the target."""
    drafter = ScriptedDrafter(random_logits(TOKENS, seed=3, scale=1.5), TOKENS)
    return kind(mean_target(), drafter, policy, sampling=WARM, seed=seed)


SAMPLED = pytest.mark.parametrize(
    "policy", [Chain(2), DynamicTree(depth=2, width=2, budget=4)], ids=["chain", "tree"]
)


@SAMPLED
@pytest.mark.parametrize("tensors", [False, True])
def test_samples_follow_the_law_of_plain_sampling(policy: Policy, tensors: bool) -> None:
    """With real random numbers; test_drafter_contract.py enumerates them, exactly.

    Args:
        tensors: verified as on a GPU.
    """
    decoder = sampler(Engine, policy)
    assert isinstance(decoder.verifier.rule, BoundRule)
    if tensors:
        decoder.verifier.rule = replace(decoder.verifier.rule, cpu_rule=None)
    assert p_value(decoder, 400) > 1e-3


DRAWS = StaticTree(((0,), (1,), (0, 0)), DRAWN)


@pytest.mark.parametrize(
    ("policy", "name"),
    [(Chain(2), "block"), (Chain(2), "traversal"), (DRAWS, "traversal"), (DRAWS, "sampled")],
)
def test_samples_follow_the_law_under_every_rule(policy: Policy, name: str) -> None:
    decoder = sampler(Engine, policy)
    decoder.verifier.rule = bind_rule(name, DRAWN)
    assert p_value(decoder, 400) > 1e-3


def test_a_fresh_draw_after_a_rejection_is_detected() -> None:
    """The same test, with fewer samples, detects a biased engine."""
    assert p_value(sampler(Redrawn, DynamicTree(2, 2, 4)), 300) < 1e-6


@pytest.mark.parametrize("wrong", [False, True])
def test_a_bonus_from_unwarped_logits_is_detected(wrong: bool) -> None:
    """A drafter that is the target is always accepted: of drafts of one, token 3 is the bonus."""
    deterministic = ScriptedDrafter(cache(lambda text: logits_after(mean_target(), text)), TOKENS)
    kind = RawBonus if wrong else Engine
    p = p_value(kind(mean_target(), deterministic, Chain(1), sampling=NARROW), 60)
    assert p < 1e-6 if wrong else p > 1e-3


@SAMPLED
def test_a_seed_determines_the_samples(policy: Policy) -> None:
    def sample(seed: int) -> list[list[int]]:
        decoder = sampler(Engine, policy, seed=seed)
        return [decoder.generate(SHORT, 8).ids for _ in range(4)]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
