"""DFlash: a block of mask tokens, guessed in one pass by layers that read the fused taps.

Source: DFlash, arXiv:2602.06036, and the code of its authors (z-lab). `models/drafting/block.py`
has the network: Qwen3's layers, the target's embedding and head, both frozen. At depth d the logits
are those of slot d; slot 0, the anchor, predicts nothing. With `shifted=true`, as DeepSpec trains
it, slot d - 1 predicts depth d.

    depth   slot   predicts
    1       1      x_{t+2}
    2       2      x_{t+3}        independent of x_{t+2}

All nodes of a tree level have the same children: a tree is a product of marginals.

Differs (docs/drafters/dflash.md): the loss is taken against the target's distribution, and a row
counts where its own label does; taps are divided by their typical size.
"""

from dataclasses import dataclass

from outrider.models.drafting.block import BlockConfig, BlockDrafter, spread_taps


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of the authors' code, or fewer of a shallow target."""
    return spread_taps(layers)


@dataclass(frozen=True)
class Config(BlockConfig):
    """Settings of a DFlash drafter; conf/drafter/dflash.yaml describes each."""

    name: str = "dflash"


class DFlash(BlockDrafter):
    """The backbone alone: every slot's state goes to the target's head."""
