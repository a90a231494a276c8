"""DSpark: a block in one pass, then one token after another through a small head.

Source: DSpark, arXiv:2607.05147, and its reference code (DeepSpec). The backbone is DFlash's
(`models/drafting/block/`), shifted: slot d - 1 predicts depth d. A head of rank r adds to a
slot's logits a function of the token before, x_{t+d} at depth d, so that the nodes of a tree level
differ by their own tokens:

    vanilla   W2 e                                             e = W1[x_{t+d}], h = norm(slot)
    gated     W2 (sigmoid(G [h; e]) * e)
    rnn       W2 tanh(o);  [g, c, o] = J [s; e; h],  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)

A confidence head, sigmoid(w [h; e]) or sigmoid(w h), estimates the probability that the guess is
accepted. It reads the token before, never the one that is drawn.

Differs (docs/drafters/dspark.md): losses are divided per depth; a row counts where its own label
does; the confidence head is an option.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.conf.automatic import adjust
from outrider.conf.fields import option
from outrider.models.drafters.dflash import DFlash
from outrider.models.drafting.block.config import BlockConfig, spread_taps
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import TargetEnds

LOSS = ("0.1*ce", "1.8*tv")  # of the paper: its L1 distance is twice the total variation


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of the authors' code, or fewer of a shallow target."""
    return spread_taps(layers)


@dataclass(frozen=True)
class Config(BlockConfig):
    """Settings of a DSpark drafter; conf/drafter/dspark.yaml describes each."""

    name: str = "dspark"
    loss: tuple[str, ...] = LOSS
    depth_weights: str = "exponential:4"
    block_size: int = option(7, "", "[1, 1024]")
    shifted: bool = True
    markov_head: str = "vanilla"
    markov_rank: int = option(256, "", "[1, 65536]")
    confidence_head: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("markov_head", "vanilla", "gated", "rnn")
        self.require_choice("confidence_head", "none", "slot", "markov")
        trained = any("confidence" in term for term in self.loss)
        wanted = self.confidence_head != "none"
        if wanted and not trained and not adjust(self, "loss", (*LOSS, "confidence")):
            why = "no term trains the confidence head; add confidence to the loss"
            raise ValueError(f"confidence_head = {self.confidence_head}: {why}")
        if trained and not wanted:
            why = "confidence trains a head that confidence_head=none leaves out"
            raise ValueError(f"loss = {list(self.loss)}: {why}; use markov, or another loss")


class MarkovHead(nn.Module):
    """What the token before adds to the logits of a slot."""

    def __init__(self, kind: str, rank: int, hidden: int, vocab: int, drafted: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.1)
        nn.init.normal_(self.markov_w2.weight, std=rank**-0.5)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self,
        slot: Float[Tensor, "*rows D"],
        token: Float[Tensor, "*rows r"],
        state: Float[Tensor, "*rows r"] | None,
    ) -> tuple[Float[Tensor, "*rows r"], Float[Tensor, "*rows r"] | None]:
        """Return the input of W2, and the state behind this token."""
        if self.kind == "vanilla":
            return token, None
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([slot, token], dim=-1))
            return gate.sigmoid() * token, None
        state = torch.zeros_like(token) if state is None else state
        parts = self.joint_proj(torch.cat([state, token, slot], dim=-1)).chunk(3, dim=-1)
        gate, candidate, out = parts[0].sigmoid(), parts[1].tanh(), parts[2].tanh()
        return out, gate * state + (1 - gate) * candidate


class ConfidenceHead(nn.Module):
    """One logit per node: whether its guess is accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSpark(DFlash):
    """The shifted backbone, the head of the token before, and an optional confidence head.

    The input of `head` is [slot; input of W2; W1[token before]].
    """

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__(cfg, target, vocab, taps)
        hidden, rank = self.shape.hidden, cfg.markov_rank
        sizes = (rank, hidden, self.shape.vocab, len(vocab))
        self.markov_head = MarkovHead(cfg.markov_head, *sizes)
        width = hidden + (rank if cfg.confidence_head == "markov" else 0)
        self.confidence_head = None
        if cfg.confidence_head != "none":
            self.confidence_head = ConfidenceHead(width)

    def silence_bias(self) -> None:
        torch.nn.init.zeros_(self.markov_head.markov_w2.weight)

    def join(
        self, slots: Float[Tensor, "*rows D"], ids: Int[Tensor, "*rows"], memory: Tensor | None
    ) -> tuple[Float[Tensor, "*rows X"], Tensor | None]:
        token = self.markov_head.markov_w1(ids).to(slots.dtype)
        added, memory = self.markov_head(self.norm(slots), token, memory)
        return torch.cat([slots, added, token], dim=-1), memory

    def add_bias(
        self, logits: Float[Tensor, "*rows Vd"], hidden: Float[Tensor, "*rows X"]
    ) -> Float[Tensor, "*rows Vd"]:
        width = self.shape.hidden
        added = hidden[..., width : width + self.cfg.markov_rank]
        out: Tensor = logits + self.markov_head.markov_w2(added)
        return out

    def log_confidence(
        self,
        log_q: Float[Tensor, "*nodes Vd"],
        depth: int,
        hidden: Float[Tensor, "*nodes X"] | None,
    ) -> Float[Tensor, "*nodes"]:
        if self.confidence_head is None or hidden is None:
            return super().log_confidence(log_q, depth, hidden)
        width = self.shape.hidden
        read = self.norm(hidden[..., :width])
        if self.cfg.confidence_head == "markov":
            read = torch.cat([read, hidden[..., width + self.cfg.markov_rank :]], dim=-1)
        return F.logsigmoid(self.confidence_head.proj(read)[..., 0].float())
