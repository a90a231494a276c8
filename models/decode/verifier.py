"""Verifiers: what the engine calls in every round to score draft tokens and to accept them.

    GreedyVerifier    temperature 0: accept the tokens that are the target's argmax
    SampledVerifier   a rule of rule_table.py with fresh random numbers in every round
    CoupledVerifier   noise shared by drafter and target (gumbel_coupling.py)

Shape letters: B prompts, N nodes, n nodes of a level, V tokens, Vd draft tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.argmax import first_max
from outrider.models.decode.policy import Draft, Policy
from outrider.models.decode.request import ActiveRequest
from outrider.models.decode.rules import token_rules_cpu
from outrider.models.decode.rules.gumbel_coupling import GumbelNoise, NoiseDraws, RoundNoise
from outrider.models.decode.rules.round_outcome import RoundOutcome, greedy_outcomes, outcomes
from outrider.models.decode.rules.rule_table import COUPLED, BoundRule, VerifyFn
from outrider.models.decode.rules.token_rules import Rows
from outrider.models.decode.sampling import GeneratorSource, RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.target.target import Target

TARGET_FIX = "Check the target's files, its precision and its cache (outrider doctor)."
NO_RANDOMNESS: RandomSource = GeneratorSource([], 0)


class Decision(NamedTuple):
    """The result of a round.

    Attributes:
        outcomes: one per prompt.
        scores: the logits that decided: with penalties and bans, and with noise where it decides.
        choice: the target's token after every node; None where a rule has drawn.
    """

    outcomes: list[RoundOutcome]
    scores: Rows
    choice: Int[Tensor, "B N"] | None = None


class Verifier(ABC):
    """The interface of all verifiers.

    Attributes:
        requests: those of the current round.
        all_scores: compute the scores of all nodes, where fewer would do.
    """

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        rule: VerifyFn,
        policy: Policy | None,
        all_scores: bool = False,
    ) -> None:
        self.target, self.sampling, self.rule = target, sampling, rule
        self.policy, self.all_scores = policy, all_scores
        self.requests: Sequence[ActiveRequest] = ()

    def start_request(self, request: ActiveRequest) -> None:
        """Prepare the state of a request, once; by default there is none."""
        return

    def start_round(self, requests: Sequence[ActiveRequest], levels: int) -> None:
        """Start a round whose drafts have at most `levels` levels."""
        self.requests = requests

    def random_source(self, check_mass: bool = True) -> RandomSource:
        """Return random numbers for drafting or verification."""
        return NO_RANDOMNESS

    def draft_scores(
        self, logits: Float[Tensor, "B n Vd"], depth: int, target_ids: Int[Tensor, " Vd"] | None
    ) -> Float[Tensor, "B n Vd"]:
        """Return the scores by which the draft tokens at a depth are chosen.

        Args:
            target_ids: of a reduced draft vocabulary; None: it is the target's.
        """
        return logits

    @abstractmethod
    def decide(self, draft: Draft, logits: Rows) -> Decision:
        """Decide what is accepted.

        Args:
            logits: of the target after every node, with penalties and bans.

        Raises:
            FloatingPointError: logits are not finite.
            ValueError: the draft cannot be verified by the rule.
        """

    def decide_or_explain(self, draft: Draft, logits: Rows) -> Decision:
        """`decide`, with a RunError where the target's logits or the draft cannot be used."""
        try:
            return self.decide(draft, logits)
        except FloatingPointError:
            message = "The target's logits are not finite (NaN or infinite)."
            raise RunError(message, TARGET_FIX) from None
        except ValueError as error:
            raise RunError(f"A round could not be verified: {error}", TARGET_FIX) from error


class GreedyVerifier(Verifier):
    """Verifier that accepts the longest path of the target's argmax tokens."""

    def decide(self, draft: Draft, logits: Rows) -> Decision:
        choice, max_logits = first_max(logits)
        return Decision(greedy_outcomes(draft.tree, choice, max_logits), logits, choice)


class SampledVerifier(Verifier):
    """Verifier that applies a rule with random numbers; coupled drafts are chosen with noise."""

    noise: RoundNoise

    @property
    def couples_drafts(self) -> bool:
        return self.policy is not None and self.policy.draft == COUPLED

    uses_noise = couples_drafts

    def start_request(self, request: ActiveRequest) -> None:
        if self.uses_noise:
            seed = request.generator.getrandbits(64)
            request.noise = GumbelNoise(seed, self.target.vocab_size, self.target.device)

    def start_round(self, requests: Sequence[ActiveRequest], levels: int) -> None:
        super().start_round(requests, levels)
        if self.uses_noise:
            noises = [one.noise for one in requests if one.noise is not None]
            positions = [len(one.out.ids) for one in requests]
            self.noise = RoundNoise(noises, positions, levels + 1, self.sampling.temperature)

    def random_source(self, check_mass: bool = True) -> RandomSource:
        """Return a random source with a separate stream for every prompt.

        However many numbers are used, the next stream is the same: an answer must not depend on how
        deep the other prompts of the batch are drafted.
        """
        generators = [Random(one.generator.getrandbits(64)) for one in self.requests]
        max_count = 1 if self.policy is None else self.policy.nodes + 1
        return GeneratorSource(generators, max_count, check_mass)

    def draft_scores(
        self, logits: Float[Tensor, "B n Vd"], depth: int, target_ids: Int[Tensor, " Vd"] | None
    ) -> Float[Tensor, "B n Vd"]:
        if not self.couples_drafts:
            return logits
        return self.noise.draft_scores(self.sampling.drafter_scores(logits), depth, target_ids)

    def decide(self, draft: Draft, logits: Rows) -> Decision:
        (tree, q_rows), rng = draft, self.random_source()
        cpu_rule = self.rule.cpu_rule if isinstance(self.rule, BoundRule) else None
        if cpu_rule is not None and logits.device.type == "cpu":
            return Decision(cpu_rule(tree, logits, self.sampling.probs, q_rows, rng), logits)
        p_rows = self.sampling.probs(logits)
        if q_rows is None and tree.size == 1:  # there is no draft token, and no row is read
            q_rows = torch.zeros_like(p_rows)
        accepted = self.rule(tree, p_rows, q_rows, rng)
        return Decision(outcomes(tree, accepted, logits.amax(2)), logits)


class CoupledVerifier(SampledVerifier):
    """Verifier that accepts the longest path of the argmax of target logits plus noise.

    On a CPU a tree is descended level by level, so that only visited rows are computed.
    """

    uses_noise = True

    def decide(self, draft: Draft, logits: Rows) -> Decision:
        tree, scores_of = draft.tree, self.sampling.scores
        if not tree.is_chain and tree.ids.device.type == "cpu" and not self.all_scores:
            draws = NoiseDraws(self.noise)
            return Decision(token_rules_cpu.match(tree, logits, scores_of, None, draws), logits)
        scores = self.noise.target_scores(scores_of(logits), tree)
        choice, max_scores = first_max(scores)
        return Decision(greedy_outcomes(tree, choice, max_scores), scores, choice)


def verifier_class(sampling: Sampling, rule: VerifyFn) -> type[Verifier]:
    if sampling.greedy:
        return GreedyVerifier
    if isinstance(rule, BoundRule) and rule.coupled:
        return CoupledVerifier
    return SampledVerifier
