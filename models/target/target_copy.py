"""Trainable copies of a target's decoder layers and norms; embedding and head stay the target's.

For drafters that change their target. The copies are trained in float32 beside the original, whose
distributions are the teacher, and are written into the target for decoding.

Legend: L decoder layers, B rows of a batch.
"""

import copy
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from outrider.conf.errors import ConfigError
from outrider.models.interface import Trace
from outrider.models.target.target import Target, TargetStates


class TargetCopy(nn.Module):
    """The layers and norms of a target, which its own code runs.

    Attributes:
        layers: the decoder layers.
        norms: all other modules with weights but the embeddings; the final norm is the last one.
        kept_rows: layer dropout: where False, a layer returns its input for this row of the batch;
            None: no layer is dropped. It must not change between a forward and its backward pass,
            which runs the layers again with gradient checkpointing.
    """

    def __init__(self, target: Target) -> None:
        """
        Raises:
            ConfigError: the layers are quantised, sharded, on other devices or not loaded.
        """
        super().__init__()
        _require_plain_layers(target)
        trained = [p for part in trained_parts(target) for p in part.parameters()]
        copies: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=torch.float32)) for p in trained
        }
        frozen = [p for p in target.model.parameters() if id(p) not in copies]
        copies |= {id(p): nn.Parameter(p.data, requires_grad=False) for p in frozen}
        self._embeddings = [(copies[id(p)], p.data) for p in frozen]
        self.lm = Target(copy.deepcopy(target.model, copies), name=target.name, fuse=False)
        self.layers, *norms = trained_parts(self.lm)
        self.norms = nn.ModuleList(norms)
        self.requires_grad_(True).train()
        self.read_from(target)
        self._match_embeddings()
        self.kept_rows: Bool[Tensor, "L B"] | None = None
        for index, layer in enumerate(self.lm.layers):
            layer.register_forward_hook(partial(self._drop_rows, index))

    def forward(self, trace: Trace) -> tuple[list[Float[Tensor, "B T H"]], Float[Tensor, "B T H"]]:
        """Run packed rows; return the output of every layer, and of the final norm."""
        self.lm.set_taps(range(self.lm.num_layers))
        rows, grad = (trace.ids, trace.positions, trace.document), torch.is_grad_enabled()
        states: TargetStates = self.lm.read_packed(*rows, grad)
        return list(states.taps.chunk(self.lm.num_layers, dim=-1)), states.last

    def final_norm(self, hidden: Float[Tensor, "B T H"]) -> Float[Tensor, "B T H"]:
        """Apply the norm before the head to the output of any layer."""
        out: Tensor = self.norms[-1](hidden)
        return out

    @torch.no_grad()
    def read_from(self, target: Target) -> None:
        """Copy the weights of a target."""
        for part, theirs in zip([self.layers, *self.norms], trained_parts(target), strict=True):
            for parameter, value in zip(part.parameters(), theirs.parameters(), strict=True):
                parameter.copy_(value)

    @torch.no_grad()
    def write_to(self, target: Target) -> None:
        """Copy the weights into a target, whose layout for decoding does not change."""
        for part, theirs in zip([self.layers, *self.norms], trained_parts(target), strict=True):
            for parameter, value in zip(part.parameters(), theirs.parameters(), strict=True):
                value.copy_(parameter)

    def enable_gradient_checkpointing(self) -> None:
        # newer transformers rename it
        new = getattr(self.lm.model, "activation_checkpointing_enable", None)
        (new or self.lm.model.gradient_checkpointing_enable)({"use_reentrant": False})

    def _drop_rows(self, index: int, _layer: nn.Module, inputs: Any, output: Any) -> Any:
        if self.kept_rows is None:
            return output
        keep = self.kept_rows[index][:, None, None]
        if isinstance(output, tuple):
            return torch.where(keep, output[0], inputs[0]), *output[1:]
        return torch.where(keep, output, inputs[0])

    def _apply(self, fn: Any, recurse: bool = True) -> "TargetCopy":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._match_embeddings()
        return self

    def _match_embeddings(self) -> None:
        """Convert the embeddings to the dtype and device of the layers, if they differ."""
        like = next(self.layers.parameters())
        for parameter, original in self._embeddings if not like.is_meta else ():
            parameter.data = original.to(like.device, like.dtype)


def trained_parts(target: Target) -> list[nn.Module]:
    """Return the decoder layers, then the norms outside of them, in the order of the model."""
    inside = set(target.layers.modules())
    outside = [m for m in target.base_model.modules() if m not in inside]
    norms = [m for m in outside if m._parameters and not isinstance(m, nn.Embedding)]
    return [target.layers, *norms]


def _require_plain_layers(target: Target) -> None:
    """Raise ConfigError for layers whose weights cannot be copied and trained."""
    weights = [p.data for p in target.layers.parameters()]
    plain = all(type(w) is Tensor and w.is_floating_point() for w in weights)
    # a model without any weights is planned with, and not trained
    not_loaded = target.ends_only and not target.embedding.weight.is_meta
    if target.is_remote or not_loaded or not plain:
        why = f"The layers of {target.name} are quantised, sharded, elsewhere or not loaded, and "
        why += "this drafter trains copies of them."
        fix = "Use target.place=replicated without target.quantise."
        raise ConfigError("target", target.name, why, fix)
