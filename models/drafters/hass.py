"""HASS: EAGLE's network, trained on its own states and on the target's top-k tokens.

Source: Zhang et al. 2024, "Learning Harmonized Representations for Speculative Sampling",
arXiv:2408.15766, and its code. It changes EAGLE's training in two ways, but not its decoding:

    context alignment    n steps (here depths, 3); each reads the detached states of the one
                         before; the losses of the steps are added
    top-K distillation   -sum p(v) log q(v) over the target's K = 10 most probable tokens, p and q
                         not renormalised, added to EAGLE's loss with weight w

The authors' code indexes by column: forward n + 1 reads column r from version n of the features,
column r - 1 from version n - 1, .., and all columns up to r - n from the true ones. From row
t = r - n, where the draft began, that is the unroll of `models/self_feeding.py`, detached between
depths; `tests/test_hass.py` compares the two, with masks as literal matrices.

Differs: a masked softmax (the released attention multiplies scores by a 0/1 mask, so that masked
entries take part with score 0); the first n rows, which have no chain, do not exist here.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from outrider.conf.fields import option
from outrider.conf.schema import DEPTHS
from outrider.models.drafters import eagle


@dataclass(frozen=True)
class Config(eagle.Config):
    """Settings of a HASS drafter; conf/drafter/hass.yaml describes each."""

    name: str = "hass"
    depths: int = option(3, "", DEPTHS)
    loss: tuple[str, ...] = ("smooth_l1", "0.1*soft_ce", "topk:10")
    depth_weights: str = "geometric:1"
    detach: bool = True


class Hass(eagle.Eagle):
    """EAGLE trained at every depth, with states detached between depths."""

    cfg: Config

    def next_state(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return hidden.detach() if self.cfg.detach else hidden
