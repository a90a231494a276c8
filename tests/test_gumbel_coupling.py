"""Coupled sampling: every token a draw from p, and the plain sampler's answer whatever is drafted.

The noise determines the answer: it must equal plain sampling with that noise token for token, and
the winners of plain noise must follow p.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import power_divergence
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.eval import rank_tables
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Output, Request
from outrider.models.decode.rules.gumbel_coupling import GumbelNoise, RoundNoise, log_exponential
from outrider.models.decode.rules.rule_table import COUPLED, bind_rule
from outrider.models.decode.sampling_params import OFFSET, SLOPE, Sampling, TextTokens
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree import Tree
from outrider.models.decode.tree_shapes import parse
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target
from tests import tiny
from tests.enumeration import coupled_acceptance
from tests.tiny import Row, ScriptedDrafter, random_logits

CPU = torch.device("cpu")
SHAPE = parse([(0,), (1,), (4,), (0, 0), (0, 2), (1, 0), (0, 0, 0)])
POLICIES: dict[str, Policy] = {
    "chain": Chain(3, COUPLED),
    "early chain": Chain(4, COUPLED, confidence=0.5),
    "static": StaticTree(SHAPE, COUPLED),
    "dynamic": DynamicTree(3, 3, 8, draft=COUPLED),
    "opt-tree": DynamicTree(4, 3, 8, gain=0.3, draft=COUPLED),
    "best chain": Chain(3, "best"),
    "drawn chain": Chain(3),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
HEATS = {
    "warm": Sampling(1.0),
    "warped": Sampling(0.7, top_p=0.9, top_k=20, min_p=0.01),
    "penalised": Sampling(1.3, repetition_penalty=1.4, banned=(5, 17)),
}
each_heat = pytest.mark.parametrize("how", HEATS.values(), ids=HEATS)
SIZES = [(3, 12), (20, 5), (1, 15), (9, 0), (7, 1), (2, 2), (5, 14), (14, 9)]


# ---- the noise -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), max_size=12))
def test_noise_of_a_position_does_not_depend_on_the_requests(steps: list[tuple[int, int]]) -> None:
    noise, at_once = GumbelNoise(3, 7000, CPU), first_rows()
    place = 0
    for ahead, count in steps:
        place += ahead
        assert noise.rows(place, count).equal(at_once[place : place + count])


@cache
def first_rows() -> Tensor:
    return GumbelNoise(3, 7000, CPU).rows(0, 60)


def test_noise_of_earlier_positions_is_discarded() -> None:
    noise = GumbelNoise(0, 2**15, CPU)
    for place in range(50):
        noise.rows(place, 4)
    assert len(noise.table) <= 5


def test_other_seeds_and_positions_have_other_noise() -> None:
    rows = torch.cat([GumbelNoise(0, 50, CPU).rows(0, 20), GumbelNoise(1, 50, CPU).rows(0, 20)])
    assert len({tuple(row) for row in rows.tolist()}) == 40


def test_extreme_uniforms_give_finite_scores() -> None:
    ends = torch.tensor([[0.0, 2.0**-53, 0.5, 1 - 2.0**-53]], dtype=torch.float64)
    made = log_exponential(ends)
    assert made[0, 0] == torch.inf  # off a logit it never wins
    assert made[0, 1:].isfinite().all()
    assert made[0, 3] == pytest.approx(-53 * torch.tensor(2.0).log().item())


def winners(p: Tensor, runs: int, seed: int = 0) -> list[int]:
    noise = GumbelNoise(seed, len(p), CPU)
    tokens = [(p.log() - noise.rows(place, 1000)).argmax(-1) for place in range(0, runs, 1000)]
    return [int(token) for token in torch.cat(tokens)]


def fit(counts: Counter[Any], law: dict[Any, float]) -> float:
    runs = sum(counts.values())
    cells = [(counts[key], runs * chance) for key, chance in law.items()]
    return float(power_divergence(*zip(*cells, strict=True), lambda_="log-likelihood").pvalue)


P = torch.tensor([0.4, 0.02, 0.25, 0.3, 0.03], dtype=torch.float64)
PAIRS = {(a, b): float(P[a] * P[b]) for a in range(5) for b in range(5)}


def test_argmax_tokens_follow_p_independently_per_position() -> None:
    tokens = winners(P, 40_000)
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    assert fit(pairs, PAIRS) > 1e-4


def test_noise_shared_by_two_positions_is_detected() -> None:
    """Control: reused randomness."""
    tokens = winners(P, 20_000)
    assert fit(Counter(zip(tokens, tokens, strict=True)), PAIRS) < 1e-6


def test_the_smallest_exponential_variates_keep_their_precision() -> None:
    """Rare tokens win by them alone; from float32 uniforms, of 24 bits, there would be few or 0."""
    fine = torch.rand(2000, 1000, dtype=torch.float64, generator=seeded(1))
    least = fine.amax(1).log().neg()
    ours = log_exponential(fine.clone()).amin(1).double().exp()
    torch.testing.assert_close(ours, least, rtol=1e-5, atol=0)
    coarse = fine.float().amax(1).log().neg().double()
    assert not torch.allclose(coarse, least, rtol=1e-3, atol=0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- how often two winners are one ---------------------------------------------------------------


def rows(count: int, vocab: int, seed: int, scale: float = 2.0) -> Tensor:
    made = scale * torch.randn(count, vocab, generator=seeded(seed), dtype=torch.float64)
    return made.softmax(-1)


def test_coupled_tokens_agree_at_the_theoretical_rate() -> None:
    """For five pairs of rows; with dropped tokens too."""
    p, q = rows(5, 12, 1), rows(5, 12, 2)
    p[0, :6], q[1, 3:8] = 0, 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    for a, b in zip(p, q, strict=True):
        runs = 40_000
        met = rank_tables.coupled_hits(
            a.expand(runs, -1), b.expand(runs, -1), torch.arange(12), 1, seeded(7)
        )
        chance = float(coupled_acceptance(a, b))
        spread = (chance * (1 - chance) / runs) ** 0.5
        assert float(met.mean()) == pytest.approx(chance, abs=4.5 * spread)


def test_acceptance_is_between_its_bounds() -> None:
    p, q = rows(200, 9, 3, scale=3.0), rows(200, 9, 4, scale=3.0)
    overlap, met = torch.minimum(p, q).sum(-1), coupled_acceptance(p, q)
    assert (met <= overlap + 1e-12).all()
    assert (met >= overlap / (2 - overlap) - 1e-12).all()  # (1 - TV) / (1 + TV)
    assert (met < overlap - 0.01).any()
    torch.testing.assert_close(coupled_acceptance(p, p), torch.ones(200).double())
    one, other = torch.eye(2, dtype=torch.float64)
    assert float(coupled_acceptance(one, other)) == 0


def test_top_k_tokens_are_draws_without_replacement() -> None:
    """Chances of ranks add up to at most 1, and to 1 where every token has a rank."""
    p, q, ids = rows(50, 8, 5), rows(50, 5, 6), torch.tensor([0, 2, 3, 6, 7])
    met = rank_tables.coupled_hits(p, q, ids, 3, seeded(1))
    assert met.shape == (50, 3)
    assert set(met.sum(1).tolist()) == {0.0, 1.0}
    whole = rank_tables.coupled_hits(p, rows(50, 8, 6), torch.arange(8), 8, seeded(1))
    assert whole.sum(1).eq(1).all()


def test_residual_with_the_noise_of_the_rejected_token_is_biased() -> None:
    """Why this noise must not meet `ratio`: its residual needs fresh noise."""
    runs, p, q = 60_000, P, torch.tensor([0.3, 0.3, 0.05, 0.05, 0.3], dtype=torch.float64)
    guess_noise, fresh = (log_exponential(uniforms(runs, seed)) for seed in (1, 2))
    guess = (q.log() - guess_noise).argmax(1)
    accepted = torch.rand(runs, dtype=torch.float64, generator=seeded(3)) < (p / q)[guess]
    rest = (p - q).clamp(min=0).log()

    def p_value_of(noise: Tensor) -> float:
        token = torch.where(accepted, guess, (rest - noise).argmax(1))
        return fit(Counter(token.tolist()), dict(enumerate(p.tolist())))

    assert p_value_of(fresh) > 1e-4
    assert p_value_of(guess_noise) < 1e-6


def uniforms(count: int, seed: int) -> Tensor:
    return torch.rand(count, len(P), dtype=torch.float64, generator=seeded(seed))


# ---- answers -------------------------------------------------------------------------------------


def requests() -> list[Request]:
    made = seeded(5)
    return [
        Request(torch.randint(3, tiny.VOCAB, (length,), generator=made).tolist(), budget, n)
        for n, (length, budget) in enumerate(SIZES)
    ]


def plain_answer(of: Target, how: Sampling, request: Request) -> list[int]:
    """One token after the other by the model itself: no cache, no engine."""
    noise = GumbelNoise(Random(request.seed).getrandbits(64), of.vocab_size, CPU)
    text, occurs = list(request.prompt), torch.zeros(1, 1, of.vocab_size, dtype=torch.bool)
    for place in range(request.budget):
        occurs[0, 0, text] = True
        logits = tiny.logits_after(of, text)[None, None]
        chances = how.probs(
            how.adjust(logits, TextTokens(occurs)) if not how.has_no_processors else logits
        )
        text.append(int((chances.log() - noise.rows(place, 1)).argmax()))
    return text[len(request.prompt) :]


@cache
def answers(family: str, how: Sampling) -> list[list[int]]:
    return [plain_answer(tiny.target(family), how, request) for request in requests()]


@cache
def thought(family: str) -> Row:
    """Nearly what the target thinks."""
    of, error = tiny.target(family), random_logits(tiny.VOCAB)
    return cache(lambda text: tiny.logits_after(of, text) + error(text) / 2)


def decode(family: str, policy: Policy | None, how: Sampling, batch: int) -> list[Output]:
    rule = bind_rule(COUPLED, COUPLED if policy is None else policy.draft)
    drafter: Drafter | None = (
        None if policy is None else ScriptedDrafter(thought(family), tiny.VOCAB)
    )
    of = tiny.target(family)
    return Engine(of, drafter, policy, sampling=how, rule=rule).generate_all(requests(), batch)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_plain_coupled_answers_match_the_model(family: str) -> None:
    how = HEATS["penalised"]
    for batch in (1, 8):
        assert [out.ids for out in decode(family, None, how, batch)] == answers(family, how)


@each_heat
@each_policy
def test_drafts_do_not_change_the_answers(policy: Policy, how: Sampling) -> None:
    """Whatever is drafted, and in any batch."""
    for batch in (1, 3):
        outs = decode("llama", policy, how, batch)
        assert [out.ids for out in outs] == answers("llama", how)
        assert policy.draft != COUPLED or sum(sum(out.accepted) for out in outs) > 10


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_all_nodes_at_once_equal_level_by_level(name: str) -> None:
    """As a GPU decides; here with the leads that are measured so."""
    how, policy, of = HEATS["penalised"], POLICIES[name], tiny.target()
    drafter = ScriptedDrafter(thought("llama"), tiny.VOCAB)
    outs = Engine(of, drafter, policy, sampling=how, keep_gaps=True).generate_all(requests(), 3)
    assert [out.ids for out in outs] == answers("llama", how)
    assert all(len(out.gaps) == len(out.ids) for out in outs)


@pytest.mark.parametrize("name", ["chain", "static", "dynamic"])
def test_reduced_draft_vocabulary_does_not_change_the_answers(name: str) -> None:
    of, how, policy = tiny.target(), HEATS["warm"], POLICIES[name]
    drafter = tiny.drafter("eagle3", of, tiny.vocab()).eval()
    engine = Engine(of, drafter, policy, sampling=how)
    outs = engine.generate_all(requests(), 3)
    assert [out.ids for out in outs] == answers("llama", how)


@pytest.mark.parametrize("name", ["chain", "static"])
def test_a_drafter_equal_to_the_target_is_always_accepted(name: str) -> None:
    """A drafter equal to the target is never wrong at any temperature."""
    of = tiny.target()
    drafter = ScriptedDrafter(lambda text: tiny.logits_after(of, text), tiny.VOCAB)
    out = Engine(of, drafter, POLICIES[name], sampling=Sampling(2.0)).generate([3, 9, 4], 17)
    assert out.accepted == [3, 3, 3, 3]


@pytest.mark.parametrize("name", ["static", "dynamic", "opt-tree"])
def test_near_temperature_0_drafts_are_the_greedy_ones(name: str) -> None:
    """Second choices count there too, though no draw would be one."""
    of, cold = tiny.target(), Sampling(1e-6)
    outs = [
        Engine(
            of, ScriptedDrafter(thought("llama"), tiny.VOCAB), POLICIES[name], sampling=how
        ).generate_all(requests(), 1)
        for how in (Sampling(), cold)
    ]
    greedy, nearly = ([(out.ids, out.accepted) for out in some] for some in outs)
    assert greedy == nearly


def test_tokens_below_the_cutoff_rank_after_those_above() -> None:
    logits = torch.tensor([[2.0, 5.0, 4.0, 1.0, -torch.inf]])
    assert Sampling(0.5).drafter_scores(logits).equal(logits)
    step = OFFSET * 0.5
    expected = torch.tensor([[2 - step - SLOPE * 2, 5, 4, 1 - step - SLOPE * 3, -torch.inf]])
    assert Sampling(0.5, top_k=2).drafter_scores(logits).equal(expected)


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_top_k_leaves_a_tree_its_siblings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of every target row is left; it may be the drafter's second."""
    how = Sampling(1.0, top_k=1)

    def accepted_tokens() -> int:
        outs = decode("llama", POLICIES[name], how, 3)
        assert [out.ids for out in outs] == answers("llama", how)
        return sum(sum(out.accepted) for out in outs)

    with_drafter_scores = accepted_tokens()
    monkeypatch.setattr(Sampling, "drafter_scores", Sampling.scores)
    assert accepted_tokens() < with_drafter_scores


def test_reduced_draft_vocabulary_uses_the_noise_of_target_ids() -> None:
    scores, ids = torch.zeros(1, 2, 3), torch.tensor([1, 4, 6])
    noise = RoundNoise([GumbelNoise(4, 11, CPU)], [6], 4, 0.5)
    expected = -0.5 * GumbelNoise(4, 11, CPU).rows(7, 1)[0, ids]
    assert noise.draft_scores(scores, 2, ids).equal(expected.expand(1, 2, 3))


def test_noise_per_round_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: with rows that are counted by rounds the answers depend on what was drafted."""
    init = RoundNoise.__init__

    def by_round(
        self: RoundNoise, noises: Sequence[GumbelNoise], places: Sequence[int], *rest: Any
    ) -> None:
        numbers = [noise.__dict__.setdefault("rounds", -1) + 1 for noise in noises]
        for noise, number in zip(noises, numbers, strict=True):
            noise.__dict__["rounds"] = number
        init(self, noises, [5 * number for number in numbers], *rest)

    monkeypatch.setattr(RoundNoise, "__init__", by_round)
    outs = decode("llama", POLICIES["chain"], HEATS["warm"], 3)
    assert [out.ids for out in outs] != answers("llama", HEATS["warm"])


def test_chain_scores_equal_tree_scores() -> None:
    ids, parents = torch.tensor([[7, 3, 9]]), torch.tensor([[-1, 0, 1]])
    chain, tree = Tree.chain(ids), Tree.from_parents(ids, parents, torch.tensor([[0, 1, 2]]), 2)
    scores = torch.randn(1, 3, 11, generator=seeded(2))
    noise = RoundNoise([GumbelNoise(4, 11, CPU)], [6], 4, 0.5)
    assert noise.target_scores(scores, chain).equal(noise.target_scores(scores, tree))
    assert noise.target_scores(scores, chain).equal(
        scores - 0.5 * GumbelNoise(4, 11, CPU).rows(6, 3)
    )


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain", "dynamic"])
def test_logits_that_become_nan_are_refused(name: str) -> None:
    class Breaking(Engine):
        def _draft(self, *args: Any) -> Any:
            drafted = super()._draft(*args)
            self.target.model.get_output_embeddings().weight.data[3] = torch.nan
            return drafted

    of, drafter = tiny.target(), ScriptedDrafter(random_logits(tiny.VOCAB), tiny.VOCAB)
    engine = Breaking(of, drafter, POLICIES[name], sampling=Sampling(1.0))
    with pytest.raises(RunError, match="logits are not finite"):
        engine.generate([4, 5], 3)


def test_a_pruned_tree_takes_no_sampled_drafts() -> None:
    with pytest.raises(ValueError, match="best or coupled"):
        DynamicTree(2, 2, 4, draft="drawn")


@pytest.mark.parametrize("rule", ["ratio", "without_replacement", "block", "traversal"])
def test_rules_that_read_rows_refuse_coupled_drafts(rule: str) -> None:
    with pytest.raises(ValueError, match="use one of match, sampled, coupled"):
        bind_rule(rule, COUPLED)
