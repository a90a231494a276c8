"""DFlash: a block of mask tokens, guessed in one pass by layers that read the fused taps.

Source: DFlash, arXiv:2602.06036, and the code of its authors (z-lab). `models/drafting/block/`
has the network: Qwen3's layers, the target's embedding and head, both frozen. At depth d the logits
are those of slot d; slot 0, the anchor, predicts nothing. With `shifted=true`, as DeepSpec trains
it, slot d - 1 predicts depth d.

    depth   slot   predicts
    1       1      x_{t+2}
    2       2      x_{t+3}        independent of x_{t+2}

All nodes of a tree level have the same children: a tree is a product of marginals.

`warm_start` begins with the weights of another block drafter, without a change of its logits: what
the new network has in addition (layers, a head) first adds zero. No weight depends on the block's
length; but a slot of a bidirectional block reads all slots, so that another number of them changes
its guesses, as it does in an engine.

Differs (docs/drafters/dflash.md): the loss is taken against the target's distribution, and a row
counts where its own label does; taps are divided by their typical size.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.conf.errors import RunError
from outrider.models.drafting.block.backbone import BlockDrafter
from outrider.models.drafting.block.config import BlockConfig, spread_taps
from outrider.models.interface import ModelShape, Trace
from outrider.models.target.target import Target

WARM_START = "Give drafter.warm_start a dflash or dspark drafter: of a run, RUN/drafter."
KINDS = ("dflash", "dspark")
SAME = (
    "shifted",
    "causal",
    "taps",
    "window",
    "window_layers",
    "window_from",
    "mask_token_id",
    "activation",
)
SAME_HEAD = ("markov_head", "markov_rank", "confidence_head", "draft_vocab_size")
SAME_SHAPE = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "eps", "rope_theta")


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of the authors' code, or fewer of a shallow target."""
    return spread_taps(layers)


@dataclass(frozen=True)
class Config(BlockConfig):
    """Settings of a DFlash drafter; conf/drafter/dflash.yaml describes each."""

    name: str = "dflash"


class DFlash(BlockDrafter):
    """The backbone alone: every slot's state goes to the target's head."""

    @classmethod
    def check_first_weights(cls, cfg: Any, shape: ModelShape) -> None:
        """Compare what the folder's headers tell; `initialise` compares all."""
        if cfg.warm_start is None:
            return
        from outrider.models.formats.weight_folder import WeightFolder

        opened = WeightFolder(Path(cfg.warm_start).expanduser(), WARM_START)
        fusions = [size for key, size in opened.shapes.items() if key.endswith("fc.weight")]
        own = opened.config.get("drafter", {})  # of Outrider's own format
        stored = own if isinstance(own, dict) else {}
        is_block = stored.get("name", KINDS[0]) in KINDS
        if not is_block or not any(size[0] == shape.hidden for size in fusions):
            why = f"{cfg.warm_start} holds no dflash or dspark drafter of hidden size"
            raise RunError(f"{why} {shape.hidden}.", WARM_START)
        if stored:
            taps = tuple(opened.config.get("taps", ()))
            _require_same({**stored, "taps": taps}, _resolved(cfg, shape), cfg.warm_start)

    @torch.no_grad()
    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        """Load another drafter's weights, or set those of `init`."""
        if self.cfg.warm_start is None:
            return super().initialise(target, traces)
        return self._load_weights(Path(self.cfg.warm_start).expanduser(), target)

    def _load_weights(self, folder: Path, target: Target) -> str:
        """Load another drafter's weights; what it has not first adds zero."""
        from outrider.models import formats

        other, cfg = formats.recognise(folder).read(folder, target)
        if not isinstance(other, DFlash):
            raise RunError(f"{folder} holds a drafter {cfg.name!r}.", WARM_START)
        theirs = {**asdict(cfg), "taps": other.taps, "draft_vocab_size": len(other.vocab)}
        ours = {**asdict(self.cfg), "taps": self.taps, "draft_vocab_size": len(self.vocab)}
        _require_same(theirs, ours, str(folder))
        for name in SAME_SHAPE:
            values = getattr(other.shape, name), getattr(self.shape, name)
            if values[0] != values[1]:
                why = f"{folder}: its layers have {name} = {values[0]}, and the target's"
                raise RunError(f"{why} {values[1]}.", WARM_START)
        if "markov_rank" in theirs and not torch.equal(other.vocab.d2t, self.vocab.d2t):
            why = f"{folder}: its head is over other tokens than this draft vocabulary."
            raise RunError(why, "Train on the same text, or use drafter.draft_vocab_size=null.")
        weights = {k: v for k, v in other.state_dict().items() if not k.startswith("vocab.")}
        self.load_state_dict(weights, strict=False)
        for layer in self.decoder_layers[cfg.layers :]:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        if "markov_rank" not in theirs:
            self.silence_bias()
        return f"the weights of {folder}"


def _resolved(cfg: Any, shape: ModelShape) -> dict[str, Any]:
    """Return the settings with the taps and the mask token that null stands for."""
    mask = shape.vocab - 1 if cfg.mask_token_id is None else cfg.mask_token_id
    taps = default_taps(shape.layers) if cfg.taps is None else cfg.taps
    return asdict(replace(cfg, mask_token_id=mask, taps=taps))


def _require_same(theirs: Mapping[str, Any], ours: Mapping[str, Any], folder: str) -> None:
    """Raise RunError, with the setting, for a network that is not a part of the new one."""
    why = f"{folder} holds a drafter whose weights do not fit {ours['name']}"
    has_head = "markov_rank" in theirs
    if has_head and "markov_rank" not in ours:
        raise RunError(f"{why}, which has no head for the token before.", "Use drafter=dspark.")
    names = (*SAME, *SAME_HEAD) if has_head else SAME
    for name in names:
        unused = name == "confidence_head" and theirs.get(name) == "none"
        unused |= name == "window_from" and theirs.get("window") is None
        if name not in theirs or unused or _plain(theirs[name]) == _plain(ours[name]):
            continue
        raise RunError(
            f"{why}: {name} = {_written(theirs[name])}, here {_written(ours[name])}.",
            f"Set drafter.{name}={_written(theirs[name])}, which it was trained with.",
        )
    if (layers := theirs.get("layers", 1)) > ours["layers"]:
        raise RunError(
            f"{why}: it has {layers} layers, and drafter.layers={ours['layers']}.",
            f"Set drafter.layers={layers} or more.",
        )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _written(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower()
