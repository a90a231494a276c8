"""Where the frozen target lies while ranks train a drafter beside it.

    replicated   every rank holds all of it: the fastest, if it fits
    sharded      every rank holds a share of every decoder layer; a layer is put together while it
                 runs, as ZeRO-3 and FSDP do with weights that are trained (arXiv:1910.02054)
    tensor       every rank holds a share of every matrix and multiplies with that, by the plan that
                 transformers has for the family (arXiv:1909.08053)
    apart        on devices of its own, beside those of the ranks

Embedding and head are lent to the drafter and so are whole on every rank, wherever the layers lie.
The ranks of `tensor` read each other's rows together, since one forward needs them all: each rank
is handed its own rows of the result. For `sharded`, rank 0 alone reads the weights from the disk;
the others are sent their shares.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.target import Seen, Target, decoder_layers

QUANTISERS = {"int8": "torchao", "nf4": "bitsandbytes"}  # and the packages that do it


class Shared(Target):
    """A target of which every rank computes a part: all ranks read all rows."""

    def _read(self, ids: Tensor, positions: Tensor, document: Tensor) -> Seen:
        rows = len(ids)
        every = (_of_all_ranks(part) for part in (ids, positions, document))
        seen = super()._read(*every)
        mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        return Seen(seen.taps[mine], seen.last[mine])


def _of_all_ranks(part: Tensor) -> Tensor:
    """[B, ...] of this rank -> [ranks * B, ...]."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def check_shares(model: Any) -> Any:
    """The model, if transformers has dealt its decoder layers out.

    Raises:
        ConfigError: it has not, and every rank holds them whole.
    """
    from torch.distributed.tensor import DTensor

    if not any(isinstance(p.data, DTensor) for p in decoder_layers(model).parameters()):
        why = f"transformers has no plan for {model.config.model_type} that deals out its layers."
        raise ConfigError("target.place", "tensor", why, "Use target.place=sharded.")
    return model


def sharded(model: Any, empty: Any, device: torch.device) -> Any:
    """The model with a share of every decoder layer on this rank.

    Args:
        model: with its weights, on rank 0; None elsewhere.
        empty: the same model on the meta device, which is filled.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in decoder_layers(empty):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    empty.to_empty(device=device)
    empty.tie_weights()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, {} if model is None else model.state_dict(), options=options)
    _send_buffers(model, empty)
    return empty


def _send_buffers(model: Any, filled: Any) -> None:
    """Rotary frequencies and their like, which no checkpoint holds."""
    names = dict(model.named_buffers()) if model is not None else {}
    for name, buffer in filled.named_buffers():
        if name in names:
            buffer.copy_(names[name])
        dist.broadcast(buffer, 0)


def apart(model: Any, devices: Sequence[str]) -> Any:
    """The model on one device, or its layers dealt out over several, in order."""
    places = [torch.device(name) for name in devices]
    if len(places) == 1:
        return model.to(places[0])
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = [type(layer).__name__ for layer in decoder_layers(model)]  # no layer is cut in two
    room: Any = {place.index: 2**60 for place in places}
    room = get_balanced_memory(model, max_memory=room, no_split_module_classes=whole)
    table = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    return dispatch_model(model, device_map=table)


def quantised(kind: str) -> Any:
    """What transformers is told, to read the weights of linear maps in fewer bits.

    Embedding and head stay as they are. int8: by torchao, scaled per row, multiplied in the
    model's own precision (arXiv:2208.07339 without outliers). nf4: by bitsandbytes
    (arXiv:2305.14314).

    Raises:
        ConfigError: the package that does it is not there.
    """
    package = QUANTISERS[kind]
    if importlib.util.find_spec(package) is None:
        fix = f"pip install {package}"
        raise ConfigError("target.quantise", kind, f"It needs the package {package}.", fix)
    import transformers

    if kind == "nf4":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    torchao = importlib.import_module("torchao.quantization")
    return transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
