"""What a policy asks of the drafter: level after level of every prompt's tree, in one round.

The drafter's states go in and stay as they are; logits come out with penalties and bans applied
to every node's own text; and the time is booked as drafting. A policy sees nothing else.

Shape letters: B prompts, N nodes of a level, P tokens from the root to a node, Vd draft tokens.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.decode.gumbel_coupling import Race
from outrider.models.decode.round_times import Clock, Stopwatch
from outrider.models.decode.sampling_params import History, Sampling
from outrider.models.drafter import Drafter, State

NOT_FINITE = "The drafter's logits are not finite (NaN or infinite)."
BROKEN = "Has its training diverged, is its precision wide enough, do its files belong together?"


class Ask:
    """One round of a batch.

    Attributes:
        vocab: the tokens that can be drafted.
        reach: deepest level the drafter can draft.
    """

    def __init__(
        self,
        drafter: Drafter,
        states: Sequence[State],
        sampling: Sampling,
        history: History | None,
        watch: Stopwatch,
        clock: Clock,
        fresh: Sequence[int] = (),
        race: Race | None = None,
    ) -> None:
        """
        Args:
            states: what the drafter has absorbed, one per prompt.
            history: the texts so far; needed where `sampling` has penalties or bans.
            fresh: prompts whose answers begin: look whether the drafter's logits for them are
                numbers. Later ones that are not make bad guesses, which the target refuses; to draw
                from them is refused.
            race: the noise that the target's tokens are chosen with; None where they are not.
        """
        self.drafter, self.states = drafter, list(states)
        self.vocab, self.reach = drafter.vocab, drafter.reach
        self.sampling, self.history = sampling, history
        self.watch, self.clock, self.fresh, self.race = watch, clock, list(fresh), race
        self._paths: Int[Tensor, "B N P"] | None = None

    def step(
        self, depth: int, ids: Int[Tensor, "B N"], parents: Int[Tensor, "B N"]
    ) -> Float[Tensor, "B N Vd"]:
        """Logits for the children of the nodes of level depth - 1.

        Args:
            ids: tokens of that level; at depth 1 the roots.
            parents: for each of them, its place in the step before (ignored at depth 1).

        Raises:
            RunError: an answer begins with logits that are NaN or infinite.
        """
        self.watch.lap()
        logits, self.states = self.drafter.step_all(self.states, depth, ids, parents)
        self.clock.draft += self.watch.lap()
        if self.fresh and depth == 1 and not bool(logits[self.fresh].amax().isfinite()):
            raise RunError(NOT_FINITE, BROKEN)
        if self.history is not None:
            logits = self._adjusted(logits, self.history, ids, parents)
        if self.race is None:
            return logits
        kept = None if self.vocab.full else self.vocab.kept
        return self.race.guesses(self.sampling.hopes(logits), depth, kept)

    def _adjusted(
        self,
        logits: Float[Tensor, "B N Vd"],
        history: History,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> Float[Tensor, "B N Vd"]:
        """Penalties and bans, each node under its own text."""
        self._paths = _longer(self._paths, ids, parents)
        kept = None if self.vocab.full else self.vocab.kept
        allowed = self.sampling.adjust(logits, history.along(self._paths), kept)
        some = (allowed > float("-inf")).any(-1, keepdim=True)
        return torch.where(some, allowed, logits.float())  # all is banned: the target refuses it


def _longer(
    paths: Int[Tensor, "B M P"] | None, ids: Int[Tensor, "B N"], parents: Int[Tensor, "B N"]
) -> Int[Tensor, "B N P1"]:
    """Each node's tokens from the root down, itself included."""
    if paths is None:
        return ids[..., None]
    above = paths.gather(1, parents[..., None].expand(*parents.shape, paths.shape[2]))
    return torch.cat([above, ids[..., None]], dim=2)
