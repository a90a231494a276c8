"""Input of a draft policy: the drafter's logits, computed one tree level at a time.

Logits come with penalties and bans, and with the verifier's changes; drafting time is recorded.

Shape letters: B prompts, N nodes of a level, P tokens from the root to a node, Vd draft tokens.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.decode.request import ActiveRequest
from outrider.models.decode.round_times import RoundTimes, Stopwatch
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling, TokenHistory
from outrider.models.drafting.drafter import Drafter, Sources

NOT_FINITE = "The drafter's logits are not finite (NaN or infinite)."
DRAFTER_FIX = "Check that its training converged, its precision, and that its files match."
DraftScores = Callable[[Tensor, int, Tensor | None], Tensor]  # logits, depth, target ids


class DraftContext:
    """State of one round of a batch, passed to the draft policy.

    Attributes:
        requests: those of the batch.
        roots: the newest tokens.
        depth_limits: per request, the deepest useful draft token.
        max_depth: the deepest level the drafter supports.
        rng: random numbers for sampled drafts.
        abstains: nodes of the last step that the drafter drafts no child of; None: there are none.
        steps: of the drafter so far.
    """

    def __init__(
        self,
        drafter: Drafter,
        requests: Sequence[ActiveRequest],
        sampling: Sampling,
        rng: RandomSource,
        history: TokenHistory | None,
        draft_scores: DraftScores,
        watch: Stopwatch,
        times: RoundTimes,
    ) -> None:
        """
        Args:
            history: the texts so far; required where `sampling` has a penalty or bans.
        """
        self.drafter, self.vocab, self.max_depth = drafter, drafter.vocab, drafter.max_depth
        self.requests, self.states = requests, [one.state for one in requests]
        self.depth_limits = [one.room for one in requests]
        roots = [one.root for one in requests]
        self.may_abstain = drafter.may_abstain
        self.roots: Int[Tensor, " B"] = roots[0] if len(roots) == 1 else torch.cat(roots)
        self.sampling, self.rng, self.history = sampling, rng, history
        self.draft_scores, self.watch, self.times = draft_scores, watch, times
        self._first_rounds = [slot for slot, one in enumerate(requests) if not one.out.accepted]
        self._target_ids = None if self.vocab.is_full else self.vocab.target_ids
        self.abstains: Bool[Tensor, "B N"] | None = None
        self._paths: Int[Tensor, "B N P"] | None = None
        self._depth, self._has_noise = 0, False  # of the last step
        self.steps = 0

    def step(
        self, depth: int, ids: Int[Tensor, "B N"], parents: Int[Tensor, "B N"]
    ) -> Float[Tensor, "B N Vd"]:
        """Return logits for the children of the nodes of level depth - 1.

        Args:
            ids: tokens of that level; at depth 1 the roots.
            parents: the index of each one's parent in the previous step (ignored at depth 1).

        Raises:
            RunError: the first logits of an answer are NaN or infinite; the target rejects later
                ones.
        """
        self.watch.lap()
        logits, self.states = self.drafter.step_batch(self.states, depth, ids, parents)
        self.times.draft += self.watch.lap()
        self.steps += 1
        if self.drafter.may_abstain:
            self.abstains = logits.amax(-1).isneginf()
            logits = logits.masked_fill(self.abstains[..., None], 0.0)
        first = logits[self._first_rounds] if self._first_rounds and depth == 1 else None
        if first is not None and not bool(first.amax().isfinite()):
            raise RunError(NOT_FINITE, DRAFTER_FIX)
        if self.history is not None:
            logits = self._adjusted(logits, self.history, ids, parents)
        scores = self.draft_scores(logits, depth, self._target_ids)
        self._depth, self._has_noise = depth, scores is not logits
        return scores

    def sources(self, logits: Float[Tensor, "B N Vd"]) -> Sources:
        """Return the rows of the last step by drafter, with penalties and bans.

        Args:
            logits: what `step` returned, the rows of a single drafter.
        """
        found = self.drafter.sources(self.states)
        if found is None:
            return Sources(logits[:, :, None], torch.ones_like(logits[:, 0, :1]))
        if self.history is None:
            return found
        rows = [self._with_penalties(one, self.history) for one in found.logits.unbind(2)]
        return Sources(torch.stack(rows, 2), found.weights)

    def log_confidence(self, log_q: Float[Tensor, "B N Vd"]) -> Float[Tensor, "B N"]:
        """Return the log-probability that a child of each node of the last step is accepted.

        It does not depend on which child is drafted (rule R2). The drafter's calibration is applied
        in greedy decoding, where it was measured.

        Args:
            log_q: the log-softmax of what `step` returned.
        """
        hidden = self.drafter.node_hidden(self.states)
        confidence = self.drafter.log_confidence(log_q, self._depth, hidden)
        calibration = self.drafter.calibration
        if calibration is None or self._has_noise or not self.sampling.greedy:
            return confidence
        return calibration.log_accuracy(confidence, self._depth)

    def _adjusted(
        self,
        logits: Float[Tensor, "B N Vd"],
        history: TokenHistory,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> Float[Tensor, "B N Vd"]:
        """Apply penalties and bans, each node with its own text."""
        above = self._paths
        self._paths = ids[..., None]  # each node's tokens from the root down, itself included
        if above is not None:
            prefix = above.gather(1, parents[..., None].expand(*parents.shape, above.shape[2]))
            self._paths = torch.cat([prefix, self._paths], dim=2)
        return self._with_penalties(logits, history)

    def _with_penalties(
        self, logits: Float[Tensor, "B N Vd"], history: TokenHistory
    ) -> Float[Tensor, "B N Vd"]:
        """Apply penalties and bans along the paths of the last step."""
        assert self._paths is not None, "set by the step"
        adjusted = self.sampling.adjust(logits, history.along(self._paths), self._target_ids)
        some_allowed = (adjusted > float("-inf")).any(-1, keepdim=True)
        return torch.where(some_allowed, adjusted, logits.float())  # else the target rejects it
