"""`Drafter`, the base class of all draft models.

A drafter implements three methods:

    unroll(trace)                      training: one `Guess` per depth
    absorb(state, trace)               decoding: read rows that the target has verified
    step(state, depth, ids, parents)   decoding: draft one level of the tree

For the same tokens, `absorb` and `step` must give the logits of `unroll` at every depth, which
tests/test_drafter_contract.py tests on every drafter. `models/interface.py` defines `Trace`,
`Guess`, the index rule and the shape letters.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.drafting.calibration import Calibration
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Batch, Guess, ModelShape, TargetEnds, Trace

if TYPE_CHECKING:
    from outrider.models.cache.kv_cache import KVCache
    from outrider.models.cache.split_cache import SplitCache
    from outrider.models.decode.tree import Tree
    from outrider.models.target.target import Target, TargetStates

LevelIds = Int[Tensor, "B N"]  # tokens or parents of the nodes of one tree level
State = Any  # decoding state of a drafter: opaque to the engine, never mutated
Absorb = Callable[[Sequence[State | None], Sequence[Trace]], list[State]]


class Absorbed(NamedTuple):
    """What a drafter has read of a prompt: the first rows, and its state after them."""

    rows: int = 0
    state: State | None = None


class Sources(NamedTuple):
    """Rows of drafters that draft together, for the nodes of a tree level.

    Attributes:
        logits: of each of S drafters, over the draft vocabulary.
        weights: the share that each should have in a draft.
    """

    logits: Float[Tensor, "B N S Vd"]
    weights: Float[Tensor, "B S"]


class TargetInput(NamedTuple):
    """New tokens of every prompt for the target: a piece of a prompt, a draft tree, or its level.

    Attributes:
        positions, visible: see `Target.forward`.
        tree: None for a piece of a prompt, and for a level.
        drafted: the drafter's states after the last `step` of the tree, or those of `absorb`.
    """

    ids: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    visible: Bool[Tensor, "B T S"]
    tree: "Tree | None" = None
    drafted: Sequence[State] = ()


def target_head_logits(
    target: TargetEnds, vocab: DraftVocab, hidden: Float[Tensor, "*rows H"]
) -> Float[Tensor, "*rows Vd"]:
    """Apply the target's own frozen head, over the draft vocabulary."""
    return target.logits(hidden) if vocab.is_full else target.logits_of(hidden, vocab.target_ids)


class Drafter(nn.Module):
    """Base class of draft models. Each subclass has a separate file in `models/drafters/`.

    A subclass

    - is constructed as `cls(cfg, target, vocab, taps)` and sets `vocab` and `taps`;
    - implements `head`, `unroll`, `absorb` and `step`;
    - may use the target's embedding and head, and owns none of the target's weights;
    - returns logits over its whole draft vocabulary;
    - never modifies a state or another tensor that it is given;
    - keeps in the state of `absorb` only values computed from true target states: what `step`
      computes from draft tokens is dropped after the round.
    """

    taps: tuple[int, ...]  # the target's decoder layers whose outputs it reads (`Trace.taps`)
    vocab: DraftVocab  # the target tokens that it can propose
    # the states of its guesses approximate the target's last states: losses between states apply
    predicts_target_states: ClassVar[bool] = False
    # of a trace: "taps", "last" (both at every row), "guesses" (`last` at rows that guess), "ids"
    required_features: ClassVar[str] = "taps"
    max_depth: int = 2**31  # deepest tree level it can draft
    is_trained: ClassVar[bool] = True  # False: it has no weights, and `unroll` is not implemented
    is_composite: ClassVar[bool] = False  # made of other drafters, which its settings must name
    # a row of its logits may be -inf everywhere: it drafts no child of that node
    may_abstain: ClassVar[bool] = False
    chains_only: bool = False  # its own layers are recurrent: a state follows one path of a tree
    bends: tuple[int, ...] = ()  # depths after which a level takes another time than before
    extra_rows: int = 0  # rows that `run_target` adds after a tree at most, and drops again
    splits: tuple[int, ...] = ()  # layers of the target that start a range of its cache
    target_loss: Sequence[str] = ("soft_ce",)  # terms of the loss of guesses of depth 0
    gradient_checkpointing: bool = False
    calibration: Calibration | None = None  # of `log_confidence`, as measured in greedy decoding

    @classmethod
    def check_settings(cls, cfg: Any, shape: ModelShape) -> None:
        """Raise ConfigError if settings do not suit a target of this shape; by default nothing.

        Called with the target's configuration alone, before its weights and any text are read, and
        when the drafter is built. Other models and folders that settings name are checked by what
        tells their shape: their config.json and the names of their tensors.
        """

    @classmethod
    def check_first_weights(cls, cfg: Any, shape: ModelShape) -> None:
        """Raise an error if the folder that training starts from has other weights.

        Called before a new training reads its target and its text; by default nothing is done.

        Raises:
            ConfigError, RunError: of the setting, or of the folder.
        """

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        """Return logits over the draft vocabulary.

        A head may read the token before the one that it predicts, the token of the node itself
        (Markov, gated and recurrent heads). `hidden` then holds the slot's state and what the token
        contributes, in one row, and the head joins them. `unroll` takes the text's token,
        `trace.tokens_ahead(depth)`, and `step` its argument `ids`; a recurrent head keeps a memory
        per node in its state, which `parents` index. tests/test_token_before.py has all three.
        """
        raise NotImplementedError

    def heads_by_depth(
        self, hidden: Sequence[Float[Tensor, "_ D"]], depths: Sequence[int]
    ) -> Float[Tensor, "N Vd"]:
        """Return the logits of states of several depths, concatenated; by default by `head`."""
        return self.head(torch.cat(list(hidden)))

    def log_confidence(
        self,
        log_q: Float[Tensor, "*nodes Vd"],
        depth: int,
        hidden: Float[Tensor, "*nodes D"] | None,
    ) -> Float[Tensor, "*nodes"]:
        """Return the log-probability that a draft of this depth is accepted if its parents are.

        By default the largest of the probabilities. A drafter with an output of its own for it
        reads `hidden`. It must not depend on the token that is drawn (rule R2), which is not known
        yet; `calibration` is applied to the result.

        Args:
            log_q: log-probabilities of the children of each node; with noise, if they are coupled.
            hidden: of the nodes, the input of `head`: of a guess, or `node_hidden` in decoding.
        """
        return log_q.amax(-1)

    def node_hidden(self, states: Sequence[State]) -> Float[Tensor, "B N D"] | None:
        """Return the inputs of `head` in the last `step`, which a confidence reads; None: none."""
        return None

    def sources(self, states: Sequence[State]) -> Sources | None:
        """Return the rows of each of its drafters in the last `step`; None: it is one drafter."""
        return None

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        """Yield one guess per depth, starting at depth 1.

        Tokens are those of the text; states are the target's at depth 1, the drafter's own at
        deeper ones. The objective stops after the last depth it needs. A drafter that changes its
        target first yields guesses of depth 0, each with its weight: the changed target's last
        states, then those of other exits.
        """
        raise NotImplementedError

    def trained_mask(self, trace: Trace, depth: int) -> Bool[Tensor, "B T"]:
        """Return True where a training step compares the guess of row t at this depth.

        By default, at every supervised row. A drafter may draw some of them in training mode. What
        counts the rows of a step, before its first forward, must get the rows that `unroll`
        yields: they depend on `begin_step` and on ids, documents and answers alone.
        """
        return trace.supervised_mask(depth)

    def initialise(self, target: "Target", traces: Iterable[Trace]) -> str:
        """Set initial weights from training text (at least one batch), and return a description."""
        return "random weights"

    @property
    def fits_last_states(self) -> bool:
        """Whether `initialise` reads the target's last states (`Trace.last`)."""
        return getattr(getattr(self, "cfg", None), "init", "linear") != "random"

    def lr_factors(self) -> dict[str, float]:
        """Return factors on `train.lr` by prefix of the parameter names they apply to."""
        return {}

    def begin_step(self, step: int, done: float) -> None:
        """Prepare an optimizer step, for losses with a curriculum; by default nothing.

        Args:
            step: optimizer steps taken before.
            done: share of the training that they are, 0 to 1.
        """

    def on_policy_batch(self, batch: Batch) -> Batch | None:
        """Return the batch with text sampled from the drafter; None: train on the original batch.

        Draw from torch's global random generator, which the training loop seeds in every step.
        """
        return None

    def describe_target_change(self) -> str | None:
        """Return what `patch_target` changes; None: nothing."""
        return None

    def patch_target(self, target: TargetEnds) -> str | None:
        """Change the target permanently for decoding (Medusa-2), and return a description, or None.

        Such a drafter is exact for the changed target only.
        """
        return None

    def forward_count(self, depths: int) -> int:
        """Return the number of passes of a row through each weight per step, for FLOPs."""
        return depths

    def activation_count(self, depths: int) -> float:
        """Estimate how many numbers per row are saved for the backward pass.

        By default, the inputs and outputs of every linear map.
        """
        maps = [m for m in self.modules() if isinstance(m, nn.Linear)]
        return float(sum(m.in_features + m.out_features for m in maps) * self.forward_count(depths))

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

    def end_draft(self, state: State, drafted: State, depth: int) -> State:
        """Return the state that the next `absorb` continues; by default the one before the draft.

        A drafter that learns from what becomes of its drafts keeps here what it has drafted.

        Args:
            state: of the last `absorb`.
            drafted: of the last `step` of the round.
            depth: of the prompt's deepest draft token; deeper levels were computed for others.
        """
        return state

    def absorb_batch(self, states: Sequence[State | None], traces: Sequence[Trace]) -> list[State]:
        """Apply `absorb` to several prompts, whose traces (B = 1) may differ in length.

        The default loops over the prompts. It is the reference for batched implementations.
        """
        return list(map(self.absorb, states, traces))

    def absorb_next(
        self,
        before: Sequence[Absorbed],
        traces: Sequence[Trace],
        absorb: Absorb | None = None,
    ) -> list[Absorbed]:
        """Absorb rows that follow those read before, as the decoder does.

        Args:
            absorb: by default `absorb_batch`.

        Raises:
            ValueError: rows are missing, or come again: the drafter would draft from other states
                than those it was trained on, which only lowers acceptance.
        """
        ends = torch.stack([trace.positions[0, [0, -1]] for trace in traces]).tolist()
        read = [one.rows + trace.ids.shape[1] for one, trace in zip(before, traces, strict=True)]
        for one, stop, (first, last) in zip(before, read, ends, strict=True):
            if (first, last) != (one.rows, stop - 1):
                message = f"after {one.rows} rows of a prompt, rows {first} to {last} were given"
                raise ValueError(f"{message} as the next {stop - one.rows}")
        states = (absorb or self.absorb_batch)([one.state for one in before], traces)
        return [Absorbed(*pair) for pair in zip(read, states, strict=True)]

    def new_cache(self, target: "Target", capacity: int, slots: int) -> "KVCache | SplitCache":
        """Return the cache of a decoding run, which `run_target` gets; by default the target's.

        Args:
            capacity: rows of each slot, tree nodes included.
        """
        return target.new_cache(capacity, slots, self.splits)

    def run_target(
        self,
        target: "Target",
        cache: "KVCache | SplitCache",
        states: Sequence[State | None],
        new: TargetInput,
    ) -> tuple["TargetStates", Sequence[State | None]]:
        """Run the target on new tokens; by default without the drafter.

        A drafter that shares the target's cache overrides this: it may have run some layers on
        these tokens already, or add tokens of its own after them.

        Args:
            cache: its selected slots are the prompts'. After the call each holds the new rows.
            states: None at the start of a prompt.

        Returns:
            States of exactly the new tokens, and the drafter's states, which `absorb` continues.
        """
        return target.forward(new.ids, new.positions, new.visible, cache), states

    @classmethod
    def runs_target(cls) -> bool:
        """Return whether `run_target` is overridden: drafts then need the target and its cache."""
        return cls.run_target is not Drafter.run_target

    def use_cost(self, cost: float) -> None:
        """Set the expected time of its draft, in steps of the target; by default unused."""

    def finish(self, answer: Sequence[int]) -> None:
        """Read a finished answer, its new tokens; by default it is not used."""

    def step_batch(
        self, states: Sequence[State], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        """Apply `step` to several prompts, whose trees have equally many nodes at each level."""
        prompts = zip(states, ids, parents, strict=True)
        logits, new = zip(*(self.step(s, depth, *prompt) for s, *prompt in prompts), strict=True)
        return torch.stack(logits), list(new)


class BatchDrafter(Drafter):
    """A drafter that implements `absorb_batch` and `step_batch`; one prompt is a batch of one."""

    def absorb(self, state: State | None, trace: Trace) -> State:
        return self.absorb_batch([state], [trace])[0]

    def step(
        self, state: State, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], State]:
        logits, (state,) = self.step_batch([state], depth, ids[None], parents[None])
        return logits[0], state


class LookingDrafter(BatchDrafter):
    """A drafter that finds out by the text, at next to no cost, whether its weights draft next.

    `absorb_batch` is `look`, then `read_waiting`. decode=auto looks before it plans a round.
    """

    def look(self, states: Sequence[State | None], traces: Sequence[Trace]) -> list[State]:
        """Absorb the tokens of verified rows; the rows wait for `read_waiting`."""
        raise NotImplementedError

    def rows_to_read(self, state: State) -> int | None:
        """Return how many rows the next draft must read first; None: it needs no weights."""
        raise NotImplementedError

    def without_weights(self, state: State) -> tuple[State, bool]:
        """Return the state whose next draft needs no weights, and whether that drafts anything."""
        raise NotImplementedError

    def read_waiting(self, states: Sequence[State]) -> list[State]:
        """Read the rows that the next draft needs."""
        raise NotImplementedError

    def absorb_batch(self, states: Sequence[State | None], traces: Sequence[Trace]) -> list[State]:
        return self.read_waiting(self.look(states, traces))
