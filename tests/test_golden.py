"""Speculation at a temperature says what plain sampling says: 20,000 answers of the real thing.

Target, cache, batches and random numbers are those of a real run, on the embedded target; the law
of the first three tokens is computed from its logits by the chain rule. The rules themselves are
proved by enumeration in test_verify, test_sibling_rules and test_block_rules; here a mistake
anywhere between prompt and token would show.
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
from outrider.models.decode.rules import COUPLED, DRAWN
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.load import load_target
from outrider.models.target import Target
from tests import tiny
from tests.tiny import ScriptedDrafter, Text

RUNS, CONTROLS, BATCH = 20_000, 4_000, 64
SAID = 3
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
        found: Tensor = target.model(input_ids=torch.tensor([text])).logits[0, -1]
    return found


@cache
def guess(text: Text) -> Tensor:
    """Nearly what the target thinks, so that some guesses are right and some are not."""
    seeded = torch.Generator().manual_seed(hash(text) % 2**31)
    return logits(text) + 1.5 * torch.randn(len(logits(text)), generator=seeded)


def law() -> dict[Text, float]:
    """Chance of every beginning."""
    _, prompt = embedded()
    chances: dict[Text, float] = {(): 1.0}
    for _ in range(SAID):
        longer: dict[Text, float] = {}
        for said, chance in chances.items():
            row = WARM.probs(logits((*prompt, *said))[None].double())[0]
            for token in row.nonzero().flatten().tolist():
                longer[(*said, token)] = chance * float(row[token])
        chances = longer
    return chances


def p_value(kind: type[Engine], policy: Policy, runs: int) -> float:
    """G-test; beginnings expected less than five times are put together."""
    target, prompt = embedded()
    drafter = ScriptedDrafter(guess, target.vocab_size)
    drafter.handed = deque(maxlen=1)  # type: ignore[assignment]  # not all of them
    engine = kind(target, drafter, policy, sampling=WARM)
    requests = [Request(prompt, SAID + 1, seed) for seed in range(runs)]
    outs = engine.generate_all(requests, BATCH)
    assert sum(sum(out.accepted) for out in outs) > runs / 4, "hardly a guess was accepted"
    return fit(Counter(tuple(out.ids[:SAID]) for out in outs), runs)


def fit(counts: Counter[Text], runs: int) -> float:
    chances = law()
    if not counts.keys() <= chances.keys():
        return 0.0
    cells = [(counts[said], runs * chance) for said, chance in chances.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    large = [cell for cell in cells if cell[1] >= 5]
    large.append((sum(seen for seen, _ in rare), sum(wanted for _, wanted in rare)))
    seen, wanted = zip(*large, strict=True)
    return float(power_divergence(seen, wanted, lambda_="log-likelihood").pvalue)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "policy", [Chain(3), SAMPLED, COUPLED_TREE], ids=["chain", "sampled tree", "coupled tree"]
)
def test_three_tokens_have_the_law_of_plain_sampling(policy: Policy) -> None:
    assert p_value(Engine, policy, RUNS) > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_unwarped_bonus_token_is_noticed() -> None:
    """Control: one mistake, a fifth of the runs; a chain of one says the bonus as third token."""
    broken: Any = tiny.RawBonus
    assert p_value(broken, Chain(1), CONTROLS) < 1e-6
