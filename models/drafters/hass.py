"""HASS: EAGLE's network, trained in the contexts and on the tokens that decoding will bring.

Source: Zhang et al. 2024, "Learning Harmonized Representations for Speculative Sampling",
arXiv:2408.15766, and its code. Two changes to EAGLE's training, none to its decoding:

    context alignment    n steps (here depths, 3); each feeds on the states of the one before,
                         which are detached; losses of the steps are added
    top-K distillation   the target's K = 10 favourites once more, renormalised on neither side:
                         -sum p(v) log q(v), added to EAGLE's loss with weight w

The authors' code has a frame of positions: forward n + 1 reads column r from version n of the
features, column r - 1 from version n - 1, .., and all columns up to r - n from the true ones. Seen
from row t = r - n, where the draft began, that is the unroll of `models/self_feeding.py` cut between its
depths; `tests/test_hass.py` holds the two together, masks as literal matrices.

Differs: a proper masked softmax (the released attention multiplies scores by a 0/1 mask, so that
hidden entries take part with score 0); the first n rows, which lack a chain, do not exist here.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from outrider.models.drafters import eagle


@dataclass(frozen=True)
class Config(eagle.Config):
    """Settings of a HASS drafter; conf/drafter/hass.yaml says what each means."""

    name: str = "hass"
    depths: int = 3
    loss: tuple[str, ...] = ("smooth_l1", "0.1*soft_ce", "topk:10")
    depth_weights: str = "geometric:1"
    detach: bool = True


class Hass(eagle.Eagle):
    """EAGLE that is trained at every depth, each behind a cut."""

    cfg: Config

    def feed(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return hidden.detach() if self.cfg.detach else hidden
