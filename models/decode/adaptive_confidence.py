"""A confidence threshold that adapts to the acceptance of a request (Draft & Verify).

A chain stops after a token if the drafter's confidence at its place is below a threshold. Here the
threshold follows the share of draft tokens that were accepted, with a goal for that share:

    a <- 0.5 a + 0.5 accepted / drafted         moving average, 0 before the first round
    t' = t + 0.01   if a < goal                 too much was rejected: stop earlier
         t          else if the draft had its full length
         t - 0.01   else                        enough was accepted: draft longer
    t <- 0.9 t + 0.1 t'                         0.8 before the first round

The threshold of a round depends on earlier rounds of the same request only, never on a token of
this round, so that the output keeps the target's distribution (rule R2), and an answer does not
depend on the other requests of its batch.

Source: Zhang et al. 2023, "Draft & Verify", arXiv:2309.08168, section 3.3, with the constants of
its reference code. Differs: a draft has its full length, too, if the budget of the answer ends it.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Threshold(NamedTuple):
    """The threshold of a request after some rounds.

    Attributes:
        value: confidence below which a draft ends.
        acceptance: moving average of accepted / drafted.
        rounds: how many rounds of the answer are included.
    """

    value: float
    acceptance: float = 0.0
    rounds: int = 0


@dataclass(frozen=True)
class AdaptiveConfidence:
    """The rule of a threshold.

    Attributes:
        goal: share of draft tokens that should be accepted.
        start: threshold of the first round.
        step: change of the threshold before smoothing.
        memory: weight of earlier rounds in the moving average.
        smoothing: weight of the old threshold in the new one.
    """

    goal: float = 0.9
    start: float = 0.8
    step: float = 0.01
    memory: float = 0.5
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        shares = (self.goal, self.start, self.memory, self.smoothing)
        if not all(0 <= share <= 1 for share in shares) or self.step < 0:
            raise ValueError(f"{self}: all but step are between 0 and 1, step is at least 0")

    def initial(self) -> Threshold:
        """Return the threshold of the first round."""
        return Threshold(self.start)

    def update(self, old: Threshold, drafted: int, accepted: int, full: bool) -> Threshold:
        """Return the threshold after one more round.

        Args:
            drafted: draft tokens of the round; without any, the threshold stays.
            full: the draft could not have been longer.
        """
        if drafted == 0:
            return old._replace(rounds=old.rounds + 1)
        acceptance = self.memory * old.acceptance + (1 - self.memory) * accepted / drafted
        change = self.step if acceptance < self.goal else 0.0 if full else -self.step
        value = old.value + (1 - self.smoothing) * change
        return Threshold(min(max(value, 0.0), 1.0), acceptance, old.rounds + 1)
