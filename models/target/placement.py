"""Placement of the frozen target over the ranks and devices of a training run.

    replicated   a full copy on every rank: the fastest, if it fits
    sharded      a shard of every decoder layer on every rank, gathered while the layer runs, as in
                 ZeRO-3 and FSDP (arXiv:1910.02054)
    tensor       tensor parallel, by transformers' plan for the family (arXiv:1909.08053)
    apart        on separate devices, not those of the ranks

The drafter uses embedding and head, so every rank has complete copies. With `tensor`, one forward
runs the rows of all ranks, and each rank gets its own rows of the result. With `sharded`, only rank
0 reads the weights from the disk and sends the shards.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models.target.target import Target, TargetStates, decoder_layers

QUANTISERS = {"int8": "torchao", "nf4": "bitsandbytes"}  # package of each kind


class TensorParallelTarget(Target):
    """A tensor-parallel target: all ranks run all rows."""

    def read_packed(
        self, ids: Tensor, positions: Tensor, document: Tensor, grad: bool = False
    ) -> TargetStates:
        rows = (_all_gather(ids), _all_gather(positions), _all_gather(document))
        states = super().read_packed(*rows, grad)
        own = slice(dist.get_rank() * len(ids), (dist.get_rank() + 1) * len(ids))
        return TargetStates(states.taps[own], states.last[own])


def _all_gather(part: Tensor) -> Tensor:
    """[B, ...] of this rank -> [ranks * B, ...]."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def require_sharded_layers(model: Any) -> Any:
    """Return the model, or raise ConfigError if transformers did not shard its decoder layers."""
    from torch.distributed.tensor import DTensor

    if not any(isinstance(p.data, DTensor) for p in decoder_layers(model).parameters()):
        family = model.config.model_type
        why = f"transformers has no tensor-parallel plan for the layers of {family}."
        raise ConfigError("target.place", "tensor", why, "Use target.place=sharded.")
    return model


def shard_layers(model: Any, empty: Any, device: torch.device) -> Any:
    """Shard every decoder layer over the ranks, and load the weights.

    `model` has the weights on rank 0 and is None elsewhere; `empty`, the same model on the meta
    device, is filled and returned.
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
    buffers = {} if model is None else dict(model.named_buffers())
    for name, buffer in empty.named_buffers():  # no checkpoint has rotary frequencies
        if name in buffers:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, 0)
    return empty


def check_devices(devices: Sequence[str]) -> None:
    """Raise ConfigError for a name in target.devices that is no device of this machine."""
    for name in devices:
        try:
            torch.zeros(1, device=name).item()
            if len(devices) > 1 and torch.device(name).index is None:
                raise RuntimeError("several devices need numbers")
        except (RuntimeError, AssertionError) as error:
            found = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
            why = f"{name!r} is no device here: {(str(error) or repr(error)).splitlines()[0]}"
            raise ConfigError("target.devices", list(devices), why, f"Use: {found}.") from None


def on_own_devices(model: Any, devices: Sequence[str]) -> Any:
    """Move the model to one device, or distribute its layers over several, in order."""
    if len(devices) == 1:
        return model.to(torch.device(devices[0]))
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    no_split = [type(layer).__name__ for layer in decoder_layers(model)]
    memory: Any = {torch.device(name).index: 2**60 for name in devices}
    memory = get_balanced_memory(model, max_memory=memory, no_split_module_classes=no_split)
    table = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=no_split)
    return dispatch_model(model, device_map=table)


def quantization_config(kind: str) -> Any:
    """Return transformers' configuration for quantised linear maps.

    Embedding and head keep their precision. int8: torchao, scaled per row, multiplied in the
    model's precision (arXiv:2208.07339 without outliers). nf4: bitsandbytes (arXiv:2305.14314).
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
