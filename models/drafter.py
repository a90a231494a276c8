"""`Drafter`, the base class of all draft models, and the settings they share.

A drafter implements three methods:

    unroll(trace)                      training: one `Guess` per depth
    absorb(state, trace)               decoding: read rows that the target has verified
    step(state, depth, ids, parents)   decoding: draft one level of the tree

`absorb` and `step` must compute what `unroll` computes: for the same tokens, the logits of a depth
are equal. `models/interface.py` defines `Trace`, `Guess`, the index rule and the shape letters;
tests/test_drafter_contract.py tests the contract on every drafter.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.models.interface import Batch, Guess, TargetEnds, Trace
from outrider.models.vocab import DraftVocab

if TYPE_CHECKING:
    from outrider.models.target import Target

State = Any  # decoding state of a drafter: opaque to the engine, never mutated


def target_head_logits(
    target: TargetEnds, vocab: DraftVocab, hidden: Float[Tensor, "*rows H"]
) -> Float[Tensor, "*rows Vd"]:
    """Apply the target's own frozen head, over the draft vocabulary."""
    return target.logits(hidden) if vocab.is_full else target.logits_of(hidden, vocab.target_ids)


class Drafter(nn.Module):
    """Base class of draft models. Each subclass has a file of its own in `models/drafters/`.

    A subclass

    - is constructed as `cls(cfg, target, vocab, taps)` and sets `vocab` and `taps`;
    - implements `head`, `unroll`, `absorb` and `step`;
    - may use the target's embedding and head, and owns none of the target's weights;
    - returns logits over its whole draft vocabulary;
    - never modifies a state or another tensor that it is given: the engine keeps states and passes
      them again;
    - keeps in the state of `absorb` only values computed from true target states. What `step`
      computes from draft tokens is dropped after the round.

    Attributes:
        taps: indices of the target's decoder layers whose outputs it reads (`Trace.taps`).
        vocab: the target tokens that it can propose.
        predicts_target_states: the states of its guesses approximate the target's last states, so
            that losses between states apply.
        required_features: the part of a trace that it reads: "taps", "last" (both at every row),
            "guesses" (`last` at the rows that guess) or "ids" (tokens only).
        max_depth: deepest tree level it can draft.
        target_loss_weight: for a drafter that changes its target (`patch_target`): weight of the
            loss that keeps the target's distribution.
        gradient_checkpointing: whether `unroll` recomputes activations in the backward pass.
    """

    taps: tuple[int, ...]
    vocab: DraftVocab
    predicts_target_states: ClassVar[bool] = False
    required_features: ClassVar[str] = "taps"
    max_depth: int = 2**31
    target_loss_weight: float = 0.0
    gradient_checkpointing: bool = False

    # ---- training ----

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        """Return logits over the draft vocabulary."""
        raise NotImplementedError

    def heads_by_depth(
        self, hidden: Sequence[Float[Tensor, "_ D"]], depths: Sequence[int]
    ) -> Float[Tensor, "N Vd"]:
        """Return the logits of states of several depths, concatenated.

        Override it if depths have heads of their own; by default all use `head`.
        """
        return self.head(torch.cat(list(hidden)))

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        """Yield one guess per depth, starting at depth 1.

        The token inputs are those of the text; the state inputs are the target's at depth 1 and
        the drafter's own at deeper ones. The objective stops after the last depth it needs. A
        drafter that changes its target first yields a guess of depth 0: the changed target's
        states.
        """
        raise NotImplementedError

    def initialise(self, target: "Target", traces: Iterable[Trace]) -> str:
        """Set initial weights from data, and return a description of what was done.

        Args:
            traces: training text, at least one batch; iterate only as far as needed.
        """
        return "random weights"

    def lr_factors(self) -> dict[str, float]:
        """Return factors on `train.lr` by prefix of the parameter names they apply to."""
        return {}

    def on_policy_batch(self, batch: Batch) -> Batch | None:
        """Return a batch with text of the drafter's own, which the target then evaluates.

        None: train on the batch as it is. Use torch's global random generator, which the training
        loop seeds in every step.
        """
        return None

    def patch_target(self, target: TargetEnds) -> str | None:
        """Change the target permanently for decoding (Medusa-2), and return a description.

        Such a drafter is exact for the changed target only. None: nothing is changed.
        """
        return None

    def forward_count(self, depths: int) -> int:
        """Return how often a row passes through each weight in a training step of this many depths.

        Used to estimate FLOPs.
        """
        return depths

    def activation_count(self, depths: int) -> float:
        """Return about how many numbers per row are saved for the backward pass.

        Used to estimate memory. By default, the inputs and outputs of every linear map.
        """
        maps = [m for m in self.modules() if isinstance(m, nn.Linear)]
        return float(sum(m.in_features + m.out_features for m in maps) * self.forward_count(depths))

    # ---- decoding ----

    def absorb(self, state: State | None, trace: Trace) -> State:
        """Read rows that the target has just verified, and return the state after them.

        Args:
            state: the state of the previous `absorb`; None at the start of a prompt.
            trace: B = 1; its rows continue those absorbed before. `next_ids` of the last row is
                the newest token.
        """
        raise NotImplementedError

    def step(
        self, state: State, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], State]:
        """Draft one level of the tree.

        Args:
            state: from `absorb` at depth 1, else from the previous step.
            depth: tree level of the tokens whose logits are returned; the root is level 0.
            ids: the tokens of level depth - 1. At depth 1: the newest token, already absorbed.
            parents: the row of each token's parent in the previous step; ignored at depth 1.

        Returns:
            Logits for the children of each node, and the state for the next level.
        """
        raise NotImplementedError

    def absorb_batch(self, states: Sequence[State | None], traces: Sequence[Trace]) -> list[State]:
        """Apply `absorb` to several prompts, whose traces (B = 1) may differ in length.

        The default loops over the prompts. It is the reference for batched implementations.
        """
        pairs = zip(states, traces, strict=True)
        return [self.absorb(state, trace) for state, trace in pairs]

    def step_batch(
        self,
        states: Sequence[State],
        depth: int,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        """Apply `step` to several prompts, whose trees have equally many nodes at each level."""
        prompts = zip(states, ids, parents, strict=True)
        steps = [self.step(state, depth, tokens, above) for state, tokens, above in prompts]
        return torch.stack([logits for logits, _ in steps]), [state for _, state in steps]


class BatchDrafter(Drafter):
    """A drafter that reads every weight once for all prompts of a batch.

    A subclass implements `absorb_batch` and `step_batch`; a single prompt is a batch of one.
    """

    def absorb(self, state: State | None, trace: Trace) -> State:
        return self.absorb_batch([state], [trace])[0]

    def step(
        self, state: State, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], State]:
        logits, (state,) = self.step_batch([state], depth, ids[None], parents[None])
        return logits[0], state
