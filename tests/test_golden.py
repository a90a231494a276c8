"""Speculative sampling has the distribution of plain sampling, over 20,000 answers.

Target, cache, batches and random numbers are those of a real run, on the embedded target. The
distribution of the first three tokens is computed from its logits by the chain rule. The rules are
proved by enumeration in test_token_rules, test_sibling_rules and test_block_rules; this test covers
everything between prompt and token.
"""

from collections import Counter, deque
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import power_divergence
from torch import Tensor

from outrider.conf.schema import TargetConfig
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.rules.rule_table import COUPLED, DRAWN
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.target.load import load_target
from outrider.models.target.target import Target
from tests import tiny
from tests.tiny import ScriptedDrafter, Text

RUNS, CONTROLS, BATCH = 20_000, 4_000, 64
LENGTH = 3
WARM = Sampling(temperature=1.3, top_k=6)
COUPLED_TREE = DynamicTree(3, 3, 8, draft=COUPLED)
SAMPLED = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)), DRAWN)


@cache
def embedded() -> tuple[Target, tuple[int, ...]]:
    """The target that ships with Outrider, and a short prompt."""
    target, tokenizer, _ = load_target(TargetConfig("tiny"), torch.device("cpu"))
    return target, tuple(tokenizer("When should I visit")["input_ids"])


@cache
def logits(text: Text) -> Tensor:
    target, _ = embedded()
    with torch.no_grad():
        last: Tensor = target.model(input_ids=torch.tensor([text])).logits[0, -1]
    return last


@cache
def draft_logits(text: Text) -> Tensor:
    """The target's logits with noise, so that some draft tokens are accepted and some are not."""
    seeded = torch.Generator().manual_seed(hash(text) % 2**31)
    return logits(text) + 1.5 * torch.randn(len(logits(text)), generator=seeded)


def exact_distribution() -> dict[Text, float]:
    """Return the probability of every text of `LENGTH` tokens after the prompt."""
    _, prompt = embedded()
    chances: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Text, float] = {}
        for text, chance in chances.items():
            row = WARM.probs(logits((*prompt, *text))[None].double())[0]
            for token in row.nonzero().flatten().tolist():
                longer[(*text, token)] = chance * float(row[token])
        chances = longer
    return chances


def p_value(kind: type[Engine], policy: Policy, runs: int) -> float:
    """Return the p-value of a G-test; texts expected less than five times form one cell."""
    target, prompt = embedded()
    drafter = ScriptedDrafter(draft_logits, target.vocab_size)
    drafter.handed = deque(maxlen=1)  # type: ignore[assignment]  # keep only the last
    engine = kind(target, drafter, policy, sampling=WARM)
    requests = [Request(prompt, LENGTH + 1, seed) for seed in range(runs)]
    outs = engine.generate_all(requests, BATCH)
    assert sum(sum(out.accepted) for out in outs) > runs / 4, "too few draft tokens were accepted"
    return fit(Counter(tuple(out.ids[:LENGTH]) for out in outs), runs)


def fit(counts: Counter[Text], runs: int) -> float:
    chances = exact_distribution()
    if not counts.keys() <= chances.keys():
        return 0.0
    cells = [(counts[text], runs * chance) for text, chance in chances.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    large = [cell for cell in cells if cell[1] >= 5]
    large.append((sum(observed for observed, _ in rare), sum(expected for _, expected in rare)))
    observed, expected = zip(*large, strict=True)
    return float(power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "policy", [Chain(3), SAMPLED, COUPLED_TREE], ids=["chain", "sampled tree", "coupled tree"]
)
def test_speculative_sampling_matches_plain_sampling(policy: Policy) -> None:
    assert p_value(Engine, policy, RUNS) > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_unwarped_bonus_token_is_detected() -> None:
    """Negative control, with a fifth of the runs: the third token of a chain of one is a bonus."""
    broken: Any = tiny.RawBonus
    assert p_value(broken, Chain(1), CONTROLS) < 1e-6
