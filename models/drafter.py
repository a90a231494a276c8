"""The whole interface between a drafter and the rest: Trace, Guess, Drafter.

The index rule (the only shift convention in this project):

    A guess at depth d, row t, is about token x_{t+1+d}; its teacher is the target's row t+d.
    Depths start at 1. Row t is where the target has read x_0..x_t and x_{t+1} is already decided.

Worked example, six tokens, depth 2, row 1 (o = read by the target, * = given, ? = guessed):

    token      x0  x1  x2  x3  x4  x5
    row t=1     o   o   *   *   ?          x2 is decided; x3 is the depth-1 guess taken as true

Legend of shape letters, used in every file:
    B rows of a batch    T tokens of a row     H hidden size of the target    K tapped layers
    V target vocabulary  Vd draft vocabulary   N nodes of one tree level      D drafter width
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.data.batches import Batch
from outrider.models.vocab import DraftVocab

if TYPE_CHECKING:
    from outrider.models.target import Target


class Top(NamedTuple):
    """A teacher's distribution in few numbers: its likely tokens of the draft vocabulary.

    Attributes:
        ids: places in the draft vocabulary, most probable first.
        p: their probabilities, of the draft vocabulary's 1.
        rest: what all other tokens of the draft vocabulary have together, of the same 1.
        share: of the whole vocabulary's 1, what the draft vocabulary has. Apart from the others,
            for it may be too small for 16 bits, where the favourite cannot be drafted.
    """

    ids: Int[Tensor, "*rows k"]
    p: Float[Tensor, "*rows k"]
    rest: Float[Tensor, "*rows"]
    share: Float[Tensor, "*rows"]

    def spread(self, size: int) -> Float[Tensor, "*rows Vd"]:
        """Over the draft vocabulary; the rest is shared equally by the tokens it is of."""
        each = self.rest / max(1, size - self.p.shape[-1])
        whole = each[..., None].expand(*each.shape, size).contiguous()
        return whole.scatter(-1, self.ids, self.p)


@dataclass(frozen=True)
class Trace:
    """What the target said about a batch of packed rows.

    Attributes:
        ids: x_t, the token of each row.
        next_ids: x_{t+1}, the token already decided at each row (0 behind the last one).
        answer: x_t is an answer token, the kind that is supervised.
        document: which document x_t belongs to; -1 is padding.
        positions: rotary position of x_t, from 0 in every document.
        taps: outputs of the tapped decoder layers, before any norm, side by side.
        last: the target's state after its final norm, the input of its head.
        favourite: the target's most probable next token at each row, -1 where nobody noted it;
            recorded text has it where it is judged, which spares training the whole head.
        top: the teacher's distribution, where it was recorded in few numbers; `last` need not
            have columns then.
    """

    ids: Int[Tensor, "B T"]
    next_ids: Int[Tensor, "B T"]
    answer: Bool[Tensor, "B T"]
    document: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    taps: Float[Tensor, "B T KH"]
    last: Float[Tensor, "B T H"]
    favourite: Int[Tensor, "B T"] | None = None
    top: Top | None = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        taps: Float[Tensor, "B T KH"],
        last: Float[Tensor, "B T H"],
        favourite: Int[Tensor, "B T"] | None = None,
        top: Top | None = None,
    ) -> "Trace":
        """Of packed rows: what is decided behind a row is the next token of the row."""
        following = torch.zeros_like(batch.ids)
        following[:, :-1] = batch.ids[:, 1:]
        ids, answer, document, positions = batch
        return cls(ids, following, answer, document, positions, taps, last, favourite, top)

    def to(self, device: torch.device | str) -> "Trace":
        """The same on another device."""
        top = None if self.top is None else Top(*(part.to(device) for part in self.top))
        fields = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return Trace(**fields, top=top)

    def ahead(self, depth: int) -> Int[Tensor, "B T"]:
        """x_{t+depth} at row t; 0 where the row's text has ended.

        ids = [7 8 9], depth 1 -> [8 9 0] (when next_ids ends in 0), depth 2 -> [9 0 0].
        """
        out = torch.zeros_like(self.next_ids)
        length = self.next_ids.shape[1]
        if depth - 1 < length:
            out[:, : length - depth + 1] = self.next_ids[:, depth - 1 :]
        return out

    def counts(self, depth: int) -> Bool[Tensor, "B T"]:
        """True where the guess of row t at this depth is supervised; depth 0 is the target's own.

        That is: x_{t+1+depth} is an answer token of the same document. The mask belongs to the
        predicted token, so the first token of an answer is guessed from inside the prompt.
        """
        shift, length = depth + 1, self.ids.shape[1]
        out = torch.zeros_like(self.answer)
        if shift < length:
            same = self.document[:, shift:] == self.document[:, :-shift]
            out[:, :-shift] = self.answer[:, shift:] & same & (self.document[:, shift:] >= 0)
        return out


class Guess(NamedTuple):
    """States whose logits at row t are about token x_{t+1+depth}.

    States and not logits, so that the objective applies `Drafter.head` in chunks. Rows that do
    not count at this depth (`Trace.counts`) may hold anything.
    """

    depth: int
    hidden: Float[Tensor, "B T D"]


class Shape(NamedTuple):
    """What a drafter must know of its target."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope_theta: float
    activation: str
    max_positions: int


@runtime_checkable
class Lender(Protocol):
    """The part of a target that a drafter may use without owning it: its ends."""

    def shape(self) -> Shape: ...

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows H"]: ...

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]: ...

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]: ...


State = Any  # a drafter's memory while decoding: opaque to the engine, never mutated


@dataclass(frozen=True)
class Recipe:
    """What the settings of every drafter begin with; each has a `Config` that adds its own.

    Attributes:
        depths: guesses per row in training; held-out text is always measured at all of them.
        draft_vocab_size: answer tokens it may propose, most frequent first; None: all.
        loss: what a guess costs, a sum of terms such as "0.1*soft_ce" (train/losses.py).
        depth_weights: of the losses of depths 1, 2, ..: "first", "geometric:0.8", "normalised:0.6",
            "mean:0.3" or a list "1/0.5/0.25" (train/losses.py); depths of weight 0 are measured,
            not trained.
        renormalise: the teacher's probabilities sum to 1 over the draft vocabulary.
        normalise: a loss is a mean over supervised "rows", or over all "tokens" of the batch.
    """

    name: str = ""
    depths: int = 4
    draft_vocab_size: int | None = None
    loss: tuple[str, ...] = ("soft_ce",)
    depth_weights: str = "geometric:0.8"
    renormalise: bool = True
    normalise: str = "rows"

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise ValueError(f"depths = {self.depths}: needs at least one depth")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(
                f"draft_vocab_size = {self.draft_vocab_size}: needs at least one token"
            )
        self.choose("normalise", "rows", "tokens")

    def refuses(self, launch: str) -> str:
        """Why it cannot be trained under this launch; "" where it can."""
        return ""

    def choose(self, name: str, *allowed: str) -> None:
        """Refuse any other value of a field."""
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name} = {getattr(self, name)}: use {' or '.join(allowed)}")


def borrowed_head(
    target: Lender, vocab: DraftVocab, hidden: Float[Tensor, "*rows H"]
) -> Float[Tensor, "*rows Vd"]:
    """The target's own head, over the draft vocabulary: frozen, and in no checkpoint."""
    return target.logits(hidden) if vocab.full else target.logits_of(hidden, vocab.kept)


class Drafter(nn.Module):
    """A draft model. Subclasses live one per file in `models/drafters/`.

    A subclass is built as `cls(cfg, target, vocab, taps)`. It may ask the target for its embedding
    and its head, owns none of the target's weights, never changes a state or any other tensor it
    was given (some are kept and given again), returns rows over its whole draft vocabulary, and
    keeps in its lasting state only what was computed from true target states.
    """

    taps: tuple[int, ...]  # which decoder layers of the target it reads (output of layer k)
    vocab: DraftVocab  # which target tokens it can propose
    in_target_space: ClassVar[bool] = False  # its states stand where the target's last ones stand
    # what of a trace it reads: "taps" or "last" states of every row, "last" ones of the rows that
    # guess ("guesses"), or "ids" alone
    reads: ClassVar[str] = "taps"
    reach: int = 2**31  # deepest level it can draft
    keep: float = 0.0  # price of changing the target, for one that does (`change`)
    recompute: bool = False  # training: unroll with less memory and more time (recompute.py)

    def initialise(self, target: "Target", traces: Iterable[Trace]) -> str:
        """Better first weights than chance, where there are any; says what was done.

        Args:
            traces: training text, at least one batch; take as much of it as is of use.
        """
        return "random weights"

    def rates(self) -> dict[str, float]:
        """Learning rates other than `train.lr`: prefix of parameter names -> factor on it."""
        return {}

    def passes(self, depths: int) -> int:
        """How often a row meets every weight when so many depths are trained; for estimates."""
        return depths

    def kept(self, depths: int) -> float:
        """Numbers per row that wait for the backward pass when so many depths are trained; for
        estimates. This one takes every linear map to keep what it reads and what it says.
        """
        maps = [m for m in self.modules() if isinstance(m, nn.Linear)]
        return float(sum(m.in_features + m.out_features for m in maps) * self.passes(depths))

    def rewrite(self, batch: Batch) -> Batch | None:
        """Training text of the drafter's own for these rows, which the target then judges.

        None: learn from the text as it is. Random numbers come from torch's global generator,
        which the loop seeds anew in every step.
        """
        return None

    def change(self, target: Lender) -> str | None:
        """What decoding needs done to the target, for good; says what it was (Medusa-2).

        A drafter that changes its target is exact for the changed target only.
        """
        return None

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        """Logits over the draft vocabulary."""
        raise NotImplementedError

    def heads(
        self, hidden: Sequence[Float[Tensor, "_ D"]], depths: Sequence[int]
    ) -> Float[Tensor, "N Vd"]:
        """Logits of the states of several depths, one below the other: one head speaks for all."""
        return self.head(torch.cat(list(hidden)))

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        """Training: one guess per depth, shallow first, tokens of the text, own states.

        The objective stops asking behind the last depth it needs. A drafter that changes its
        target says first, as a guess of depth 0, what the changed target thinks itself.
        """
        raise NotImplementedError

    def absorb(self, state: State | None, trace: Trace) -> State:
        """Decoding: take in rows (B = 1) that the target has just verified.

        The rows continue those absorbed before; `next_ids` of the last one is the newest token.
        """
        raise NotImplementedError

    def step(
        self, state: State, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], State]:
        """Decoding: one level of the tree.

        Args:
            state: from `absorb` (depth 1) or from the step before.
            depth: the guesses returned are about tokens at this tree level; the root is level 0.
            ids: tokens of level depth - 1; at depth 1 the newest token, already absorbed.
            parents: for each of them, its row in the step before (ignored at depth 1).

        Returns:
            Logits for the children of each node, and the state for the next level.
        """
        raise NotImplementedError

    def absorb_all(self, states: Sequence[State | None], traces: Sequence[Trace]) -> list[State]:
        """`absorb` for several prompts, each with a state and a trace (B = 1) of its own length.

        This one asks prompt by prompt. It is right for every drafter, and what a faster one
        must equal.
        """
        pairs = zip(states, traces, strict=True)
        return [self.absorb(state, trace) for state, trace in pairs]

    def step_all(
        self,
        states: Sequence[State],
        depth: int,
        ids: Int[Tensor, "B N"],
        parents: Int[Tensor, "B N"],
    ) -> tuple[Float[Tensor, "B N Vd"], list[State]]:
        """`step` for several prompts, whose trees have equally many nodes at each level."""
        prompts = zip(states, ids, parents, strict=True)
        steps = [self.step(state, depth, tokens, above) for state, tokens, above in prompts]
        return torch.stack([logits for logits, _ in steps]), [state for _, state in steps]


class BatchDrafter(Drafter):
    """A drafter that is written for a batch of prompts; one prompt is the batch of one.

    A subclass says `absorb_all` and `step_all`. It reads every weight once for all prompts.
    """

    def absorb(self, state: State | None, trace: Trace) -> State:
        return self.absorb_all([state], [trace])[0]

    def step(
        self, state: State, depth: int, ids: Int[Tensor, " N"], parents: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N Vd"], State]:
        logits, (state,) = self.step_all([state], depth, ids[None], parents[None])
        return logits[0], state
