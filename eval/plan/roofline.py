"""Roofline model of a decoding round on another machine.

A forward takes the longer of its memory traffic and its arithmetic at the machine's peak rates,
plus a fixed time. What a drafter's forward reads is recorded on the real module, step by step,
since some steps read only the head and others a decoder layer too.

Source: the roofline model, Williams et al. 2009, "Roofline", CACM 52(4); its use for speculative
decoding over batches and contexts, Chen et al. 2024, "MagicDec", section 3, arXiv:2408.11049.
Differs from MagicDec: traffic counts the drafter's reads and the rows of the draft tree.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import chain, product, repeat
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outrider.models.decode.costs.forward_times import SyntheticRounds
from outrider.models.decode.costs.round_costs import DraftShape, Grid, RoundCost
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target

FIXED_SECONDS = 5e-5
PROBE_ROWS = 8  # absorbed before the recorded forwards, and again by the recorded `absorb`


@dataclass(frozen=True)
class Machine:
    """Peak rates of one accelerator."""

    name: str
    bandwidth: float  # of its memory, in bytes per second
    flops: float  # dense bfloat16 operations per second, accumulated in float32
    fixed: float = FIXED_SECONDS  # per forward, for launches and sampling; an assumption
    memory: float = math.inf


# Vendors' data sheets. Where only a rate "with sparsity" is printed, this is half of it.
MACHINES = {
    "h100": Machine("H100 SXM 80GB", 3.35e12, 989.4e12, memory=80e9),  # NVIDIA H100 data sheet
    "h200": Machine("H200 SXM 141GB", 4.8e12, 989.4e12, memory=141e9),  # NVIDIA H200 data sheet
    "a100": Machine("A100 SXM 80GB", 2.039e12, 312e12, memory=80e9),  # NVIDIA A100 80GB data sheet
    "b200": Machine("B200", 8e12, 2250e12, memory=180e9),  # 1/8 of NVIDIA's DGX B200 data sheet
    "rtx4090": Machine("RTX 4090", 1.008e12, 165.2e12, memory=24e9),  # NVIDIA Ada white paper
    "mi300x": Machine("MI300X", 5.3e12, 1307.4e12, memory=192e9),  # AMD Instinct MI300X data sheet
}

ASSUMPTIONS = (
    "Memory traffic and arithmetic run at the vendor's peak rates and overlap completely; real "
    "kernels reach a part of both, most of all in small drafters.",
    "All weights and caches are on one device, in one number format, without communication.",
    "Every forward of the target or the drafter takes the machine's fixed time, which is no "
    "vendor's figure; building and verifying a tree take no time.",
    "Every layer reads the whole context: sliding windows are ignored, and all experts of a "
    "mixture of experts are read and computed.",
    "A drafter reads its whole cache in every forward and attends with as many query heads per "
    "key head as the target; absorbing a round's verified rows costs one forward of one row per "
    "prompt.",
    "Activations, norms and embedding lookups cost nothing.",
)


@dataclass(frozen=True)
class ModelSize:
    """What one forward of a model reads and computes."""

    parameters: float  # of all multiplied matrices; embeddings only looked up do not count
    weights: float  # their bytes
    kv: float  # bytes of keys and values per cached token, over all layers
    hidden: int  # width of a layer's queries, heads x head size
    layers: float  # those with attention

    @classmethod
    def of(cls, target: Target) -> "ModelSize":
        """Return the size of a model in its own number format; `stored(2)` is bfloat16."""
        shape, size = target.shape(), target.dtype.itemsize
        lookup_only = sum(
            module.weight.numel()
            for module in target.model.modules()
            if isinstance(module, nn.Embedding) and module.weight is not target.head_weight
        )
        parameters = target.parameter_count() - lookup_only
        kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * size
        return cls(parameters, parameters * size, kv, shape.heads * shape.head_dim, shape.layers)

    def stored(self, size: int) -> "ModelSize":
        """Return the same model in a number format of `size` bytes."""
        factor = size * self.parameters / self.weights if self.weights else 1.0
        return ModelSize(
            self.parameters, size * self.parameters, factor * self.kv, self.hidden, self.layers
        )


def forward_seconds(
    machine: Machine, model: ModelSize, batch: int, tokens: int, context: int
) -> float:
    """Return the time of one forward of `tokens` new tokens per prompt after `context` cached ones.

    A plain step reads what is cached, a tree also reads itself. Two operations per parameter and
    token; per row, two for the score and two for the value. A model without weights takes no time
    (Medusa's later levels).
    """
    if not model.weights:
        return 0.0
    rows = context + tokens - 1
    traffic = model.weights + batch * rows * model.kv
    per_token = 2 * model.parameters + rows * 4 * model.hidden * model.layers
    arithmetic = batch * tokens * per_token
    return max(traffic / machine.bandwidth, arithmetic / machine.flops) + machine.fixed


# ---- sizes of a real drafter ----


def drafter_sizes(drafter: Drafter, target: Target, depth: int) -> tuple[ModelSize, ...]:
    """Return the sizes of a round's drafter forwards: `absorb`, then `depth` steps."""
    shape, rounds = target.shape(), SyntheticRounds(drafter, target)
    with torch.no_grad():
        state = drafter.absorb(None, rounds.rows(0, PROBE_ROWS))
        with _MatrixRecorder() as recorder:
            states = drafter.absorb_batch([state], [rounds.rows(PROBE_ROWS, 2 * PROBE_ROWS)])
            sizes = [recorder.take_total()]
            for level in range(1, min(depth, drafter.max_depth) + 1):
                states = rounds.step(states, level, 1)
                sizes.append(recorder.take_total())
        longer = drafter.absorb(state, rounds.rows(PROBE_ROWS, 2 * PROBE_ROWS))
    grown = [(b - a) / PROBE_ROWS for a, b in zip(_elements(state), _elements(longer), strict=True)]
    layers = grown[0] / (2 * shape.kv_heads * shape.head_dim)
    width = shape.heads * shape.head_dim
    return tuple(ModelSize(count, size, grown[1], width, layers) for count, size in sizes)


class _MatrixRecorder(TorchFunctionMode):
    """Records every matrix that is multiplied with, once."""

    WEIGHT_ARGUMENT: ClassVar[dict[Any, int]] = {F.linear: 1, torch.addmm: 2, torch.mm: 0}

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[tuple[int, int], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (position := self.WEIGHT_ARGUMENT.get(func)) is not None:
            weight = args[position]
            self.weights[weight.data_ptr(), weight.numel()] = weight
        return func(*args, **(kwargs or {}))

    def take_total(self) -> tuple[int, int]:
        """Return elements and bytes of the recorded matrices, and forget them."""
        weights = list(self.weights.values())
        self.weights.clear()
        return sum(w.numel() for w in weights), sum(w.numel() * w.dtype.itemsize for w in weights)


def _elements(state: object) -> tuple[int, int]:
    """Return the floating-point elements in a drafter's state, and their bytes."""
    if isinstance(state, Tensor):
        count = state.numel() if state.is_floating_point() else 0
        return count, count * state.dtype.itemsize
    if is_dataclass(state):
        state = [getattr(state, field.name) for field in fields(state)]
    elif isinstance(state, dict):
        state = list(state.values())
    totals = [_elements(part) for part in state] if isinstance(state, list | tuple) else []
    return sum(count for count, _ in totals), sum(size for _, size in totals)


# ---- the times of a plan ----


@dataclass(frozen=True)
class RooflineTimes:
    """Predicted round times of another machine, for `surface.make_plan`.

    Attributes:
        drafter: sizes of a round's forwards; the last one is used for all deeper steps.
        budget: cached tokens that the drafter reads at most (MagicDec); None: all.
    """

    machine: Machine
    target: ModelSize
    drafter: Sequence[ModelSize]
    budget: int | None = None

    @property
    def name(self) -> str:
        return f"{self.machine.name}, predicted"

    @property
    def assumptions(self) -> tuple[str, ...]:
        m = self.machine
        rates = f"{m.bandwidth / 1e12:g} TB/s, {m.flops / 1e12:g} TFLOP/s"
        first = f"{m.name}: {rates}, {m.fixed * 1e6:g} microseconds fixed per forward."
        return (first, *ASSUMPTIONS)

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    def memory_warnings(self, grid: Grid) -> tuple[str, ...]:
        """Return a sentence per context on the smallest batch that exceeds the machine's memory."""
        machine, models = self.machine, (self.target, max(self.drafter, key=lambda m: m.weights))
        warnings = dict[int, str]()
        for context, batch in product(sorted(set(grid.contexts)), sorted(set(grid.batches))):
            needed = sum(model.weights + batch * context * model.kv for model in models)
            if needed > machine.memory and context not in warnings:
                warnings[context] = (
                    f"Batch {batch} with {context} tokens each does not fit: weights and caches "
                    f"need about {needed / 1e9:.3g} GB, and {machine.name} has "
                    f"{machine.memory / 1e9:g} GB."
                )
        return tuple(warnings.values())

    def parts(self, shape: DraftShape, batch: int, context: int) -> RoundCost:
        """Return the target over root and tree, and `absorb` plus one step per level."""
        target = forward_seconds(self.machine, self.target, batch, shape.nodes + 1, context)
        rows = context if self.budget is None else min(self.budget, context)
        sizes = chain(self.drafter, repeat(self.drafter[-1]))
        draft = sum(
            forward_seconds(self.machine, size, batch, nodes, rows)
            for size, nodes in zip(sizes, (1, *shape.parents), strict=False)
        )
        return RoundCost(1000 * draft if shape.depth else 0.0, 1000 * target, 0.0)
