"""HASS: EAGLE's network, trained on its own states and on the target's top-k tokens.

Source: Zhang et al. 2024, "Learning Harmonized Representations for Speculative Sampling",
arXiv:2408.15766, and its code. Decoding is EAGLE's. Training runs n steps (here depths, 3), each on
the detached states of the one before, and adds a top-K term to the loss. docs/drafters/hass.md
has the equations, and how the authors' column indices map to rows: `tests/test_hass.py` compares
the two.

Differs: a masked softmax, where the released attention multiplies scores by a 0/1 mask; the first n
rows, which have no chain, do not exist here.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from outrider.conf.fields import DEPTHS, option
from outrider.models.drafters import eagle


@dataclass(frozen=True)
class Config(eagle.Config):
    """Settings of a HASS drafter; conf/drafter/hass.yaml describes each."""

    name: str = "hass"
    depths: int = option(3, "", DEPTHS)
    loss: tuple[str, ...] = ("smooth_l1", "0.1*soft_ce", "topk:10")
    depth_weights: str = "geometric:1"
    bias: bool = False
    detach: bool = True


class Hass(eagle.Eagle):
    """EAGLE trained at every depth, with states detached between depths."""

    cfg: Config

    def next_state(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return hidden.detach() if self.cfg.detach else hidden
