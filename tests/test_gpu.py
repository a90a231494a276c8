"""On a GPU: the answers, laws, losses and gradients of the CPU. Skipped where there is no GPU."""

import dataclasses
from copy import deepcopy
from typing import Any

import pytest
import torch

from outrider.launch.bench.common import default_drafter
from outrider.models import drafters
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.rules.rule_table import (
    BEST,
    COUPLED,
    DRAWN,
    INDEPENDENT,
    bind_rule,
)
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tries.policy import MergedTree
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.losses import LOSSES
from outrider.train.objective import Objective
from tests import tiny
from tests.enumeration import distance
from tests.test_drafter_contract import BUDGET, PROMPT, five_token_pair, plain_distribution
from tests.tiny import law_of_answers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no GPU")
SHAPE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
WARM, CUT = Sampling(1.0), Sampling(0.8, top_k=20, top_p=0.95)
PENALISED = Sampling(1.0, repetition_penalty=1.3, presence_penalty=0.5)
CHAIN, TREE = Chain(3), DynamicTree(3, 3, 7)
GREEDY: list[Policy] = [CHAIN, TREE]
SAMPLED: dict[str, tuple[Policy, str, Sampling]] = {  # shape, rule
    "chain of the likeliest": (Chain(3, BEST), "match", WARM),
    "drawn chain": (Chain(3, DRAWN), "ratio", WARM),
    "drawn chain by blocks": (Chain(3, DRAWN), "block", CUT),
    "dynamic tree": (TREE, "match", PENALISED),
    "drawn tree": (StaticTree(SHAPE, DRAWN), "without_replacement", CUT),
    "independent tree": (StaticTree(SHAPE, INDEPENDENT), "independent", WARM),
    "independent tree by traversal": (StaticTree(SHAPE, INDEPENDENT), "traversal", WARM),
    "merged tree": (MergedTree(3, 4), "multi_step", WARM),
    "lossy chain": (Chain(3, BEST), "lossy_typical", WARM),
    "chain verified by plain draws": (Chain(3, BEST), "sampled", WARM),
    "lenient chain": (Chain(3, DRAWN), "lossy_lenience", WARM),
}
MERGING = ("merged tree", "drawn tree", "dynamic tree")
REQUESTS = [
    Request([5, 40, 17, 23, 9], 18, 0), Request([11], 12, 1), Request([7, 8] * 9, 15, 2),
    Request([7, 8] * 9, 0, 3), Request([3, 1, 4, 1, 5, 9, 2, 6], 20, 4),
]  # fmt: skip


def pair(name: str, family: str = "llama") -> tuple[Target, Drafter]:
    """A target and a drafter that is sometimes right, on the CPU."""
    if name in drafters.trained_names():
        trained = tiny.half_trained(name, family)
        return trained.target, trained.drafter
    target = tiny.target(family)
    if name in tiny.COMPOSITE:
        return target, tiny.drafter(name, target).eval()
    return target, default_drafter(name, target)


def on_gpu(target: Target, drafter: Drafter | None) -> tuple[Target, Any]:
    """Copies on the GPU; what the two share stays shared."""
    target, drafter = deepcopy((target, drafter))
    taps = target.taps
    Target.__init__(target, target.model.to(DEVICE), name=target.name)
    target.set_taps(taps)
    return target, None if drafter is None else drafter.to(DEVICE)


def answers(target: Target, drafter: Drafter | None, policy: Policy | None, **how: Any) -> Any:
    engine = Engine(target, drafter, policy, **how)
    return [[out.ids for out in engine.generate_all(REQUESTS, batch)] for batch in (1, 3)]


@pytest.mark.parametrize("name", drafters.names())
def test_greedy_answers_are_those_of_the_cpu(name: str) -> None:
    target, drafter = pair(name)
    plain = answers(target, None, None)
    target, drafter = on_gpu(target, drafter)
    assert answers(target, None, None) == plain
    policies = GREEDY if not drafter.chains_only else [CHAIN]
    automatic = [] if drafter.runs_target() else [Auto(depth=3, budget=8)]
    for policy in (*policies, *automatic):
        assert answers(target, drafter, policy) == plain


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_greedy_answers_of_other_families(family: str) -> None:
    target, drafter = pair("eagle3", family)
    plain = answers(target, None, None)
    target, drafter = on_gpu(target, drafter)
    for policy in GREEDY:
        assert answers(target, drafter, policy) == plain


@pytest.mark.parametrize(
    ("name", "case"),
    [*(("eagle3", case) for case in SAMPLED), *(("multi", case) for case in MERGING),
     *((name, "drawn chain") for name in ("hybrid", "dspark", "mtp", "suffix", "sparse_kv"))],
)  # fmt: skip
def test_sampled_answers_are_those_of_the_cpu(name: str, case: str) -> None:
    """The same seeds; on the CPU too by the rule for any device."""
    policy, rule_name, sampling = SAMPLED[case]
    parameters = {"factor": 0.5} if rule_name == "lossy_lenience" else {}
    rule = dataclasses.replace(bind_rule(rule_name, policy.draft, **parameters), cpu_rule=None)
    target, drafter = pair(name)
    cpu = answers(target, drafter, policy, rule=rule, sampling=sampling)
    target, drafter = on_gpu(target, drafter)
    assert answers(target, drafter, policy, rule=rule, sampling=sampling) == cpu


@pytest.mark.parametrize("policy", [Chain(3, COUPLED), DynamicTree(3, 3, 7, draft=COUPLED)])
def test_coupled_answers_are_those_of_plain_decoding(policy: Policy) -> None:
    target, drafter = on_gpu(*pair("eagle3"))
    how: dict[str, Any] = {"rule": bind_rule(COUPLED, COUPLED), "sampling": WARM}
    plain = answers(target, None, None, **how)
    assert answers(target, drafter, policy, **how) == plain


@pytest.mark.parametrize("policy", [Chain(2, DRAWN), StaticTree(((0,), (1,), (0, 0)), DRAWN)])
def test_sampled_answers_have_the_law_of_the_target(policy: Policy) -> None:
    """Four tokens jointly, by every path through their random numbers; a lossy rule fails."""
    sampling = Sampling(0.8, 1.0, 2)
    target, drafter = five_token_pair("eagle3")
    law = plain_distribution(target, sampling)
    target, drafter = on_gpu(target, drafter)
    engine = Engine(target, drafter, policy, sampling=sampling)
    assert distance(law_of_answers(engine, PROMPT, BUDGET), law) < 1e-5
    if isinstance(policy, Chain):
        lossy = bind_rule("lossy_lenience", DRAWN, factor=0.3)
        engine = Engine(target, drafter, policy, sampling=sampling, rule=lossy)
        assert distance(law_of_answers(engine, PROMPT, BUDGET), law) > 0.01


# ---- training ------------------------------------------------------------------------------------


def loss_and_gradients(
    drafter: Drafter, target: Target, trace: Trace, loss: list[str] | None
) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    depths = len([guess for guess in drafter.unroll(trace) if guess.depth])
    terms = ["soft_ce"] if loss is None else loss
    objective = Objective(drafter, target, loss=terms, weights=[1.0] * depths)
    torch.manual_seed(7)  # of the CPU, from which layers to skip are drawn
    value, _ = objective(trace, torch.ones(depths))
    value.backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **found}


@pytest.mark.parametrize("name", drafters.trained_names())
def test_losses_and_gradients_are_those_of_the_cpu(name: str) -> None:
    target = tiny.target()
    require_equal_steps(tiny.drafter(name, target, noise=0.0), target)


@pytest.mark.parametrize("term", sorted(LOSSES))
def test_every_loss_is_that_of_the_cpu(term: str) -> None:
    target = tiny.target()
    name = "eagle" if LOSSES[term].needs_states else "eagle3"
    require_equal_steps(tiny.drafter(name, target, noise=0.0), target, [term])


def require_equal_steps(drafter: Drafter, target: Target, loss: list[str] | None = None) -> None:
    target.set_taps(drafter.taps)
    trace = tiny.packed_trace(target)
    cpu = loss_and_gradients(drafter, target, trace, loss)
    target, drafter = on_gpu(target, drafter)
    gpu = loss_and_gradients(drafter, target, trace.to(DEVICE), loss)
    assert gpu.keys() == cpu.keys()
    for key, value in cpu.items():
        assert torch.allclose(gpu[key].cpu(), value, rtol=1e-3, atol=1e-4), key
