"""What a round would take on a machine that is not here: a roofline of two models.

A forward costs the longer of its memory traffic and its arithmetic at the machine's peak rates
(`theory.Load`), and a fixed time. A model is known by what a forward of it reads; of a drafter that
is watched on the real module, step by step, since some steps read the head alone and others a
decoder layer too. All that this leaves out is in `ASSUMPTIONS`, which is printed with every figure.

Source: the roofline model, Williams et al. 2009, "Roofline", CACM 52(4); its use for speculative
decoding, Chen et al. 2024, "MagicDec", section 3, arXiv:2408.11049.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outrider.eval.plan.forward_times import rehearsal
from outrider.eval.plan.round_costs import Parts, Shape
from outrider.eval.theory import Load
from outrider.models.drafter import Drafter
from outrider.models.target import Target

FIXED = 5e-5
PROBE = 8  # rows that a drafter has read when its next forwards are watched


@dataclass(frozen=True)
class Machine:
    """Peak rates of one accelerator.

    Attributes:
        bandwidth: of its memory, bytes per second.
        flops: dense bfloat16 operations per second, sums in float32.
        fixed: seconds that any forward takes besides: launching, sampling. An assumption.
        memory: bytes.
    """

    name: str
    bandwidth: float
    flops: float
    fixed: float = FIXED
    memory: float = math.inf


# Vendors' data sheets. Where only a rate "with sparsity" is printed, this is half of it.
MACHINES = {
    "h100": Machine("H100 SXM 80GB", 3.35e12, 989.4e12, memory=80e9),  # NVIDIA H100 data sheet
    "h200": Machine("H200 SXM 141GB", 4.8e12, 989.4e12, memory=141e9),  # NVIDIA H200 data sheet
    "a100": Machine("A100 SXM 80GB", 2.039e12, 312e12, memory=80e9),  # NVIDIA A100 80GB data sheet
    "b200": Machine(
        "B200", 8e12, 2250e12, memory=180e9
    ),  # NVIDIA DGX B200 data sheet, an eighth of it
    "rtx4090": Machine(
        "RTX 4090", 1.008e12, 165.2e12, memory=24e9
    ),  # NVIDIA Ada architecture white paper
    "mi300x": Machine("MI300X", 5.3e12, 1307.4e12, memory=192e9),  # AMD Instinct MI300X data sheet
}

ASSUMPTIONS = (
    "Reading and arithmetic run at the vendor's peak rates and overlap completely; kernels reach "
    "a part of both, most of all in small drafters.",
    "All weights and caches lie on one device, in one number format; nothing travels between "
    "devices.",
    "Every forward, of the target or of the drafter, takes the machine's fixed time besides, "
    "which is no vendor's figure; choosing a tree and verifying it take none.",
    "Every layer reads the whole context: sliding windows are not known here, and of a mixture of "
    "experts all experts are read and calculated.",
    "A drafter reads its whole cache in every forward and attends with as many query heads per "
    "key head as the target; what it knows of a round's verified rows costs one forward of one "
    "row per prompt.",
    "Activations, norms and the lookup of embeddings cost nothing.",
)


@dataclass(frozen=True)
class ModelSize:
    """What one forward of a model reads and calculates.

    Attributes:
        parameters: numbers that it multiplies with; looked-up embeddings are none of them.
        weights: their bytes.
        kv: bytes of keys and values per cached token, all layers.
        hidden: width of a layer's queries, heads x head size.
        layers: those with attention.
    """

    parameters: int | float
    weights: int | float
    kv: int | float
    hidden: int
    layers: int | float

    @classmethod
    def of(cls, target: Target) -> "ModelSize":
        """Of the real model in its own number format; `stored(2)` is the same in bfloat16."""
        shape, size = target.shape(), target.dtype.itemsize
        looked_up = sum(
            module.weight.numel()
            for module in target.model.modules()
            if isinstance(module, nn.Embedding) and module.weight is not target.head_weight
        )
        numbers = target.parameters() - looked_up
        kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * size
        return cls(numbers, numbers * size, kv, shape.heads * shape.head_dim, shape.layers)

    def stored(self, size: int) -> "ModelSize":
        """The same model in a number format of `size` bytes."""
        factor = size * self.parameters / self.weights if self.weights else 1.0
        return ModelSize(
            self.parameters, size * self.parameters, factor * self.kv, self.hidden, self.layers
        )

    @property
    def load(self) -> Load:
        """Two operations per parameter; per row, two for its score and two for its value."""
        return Load(self.weights, self.kv, 2 * self.parameters, 4 * self.hidden * self.layers)


def forward_seconds(
    machine: Machine, model: ModelSize, batch: int, tokens: int, context: int
) -> float:
    """One forward of `tokens` new tokens per prompt behind `context` cached ones.

    A model without weights is no forward at all, and takes no time (Medusa's later levels).
    """
    if not model.weights:
        return 0.0
    load, rates = model.load, (machine.bandwidth, machine.flops)
    return load.seconds(batch, tokens, context, *rates) + machine.fixed


def no_room(
    machine: Machine, target: ModelSize, drafter: Sequence[ModelSize], batch: int, context: int
) -> str:
    """A sentence where weights and caches are more than the machine's memory; "" where they fit.

    Args:
        drafter: its forwards; the largest one stands for its weights.
    """
    held = sum(
        model.weights + batch * context * model.kv
        for model in (target, max(drafter, key=lambda one: one.weights))
    )
    if held <= machine.memory:
        return ""
    return (
        f"Batch {batch} with {context} tokens each does not fit: weights and caches are about "
        f"{held / 1e9:.3g} GB, and {machine.name} has {machine.memory / 1e9:g} GB."
    )


# ---- the real drafter ----


def drafter_sizes(drafter: Drafter, target: Target, depth: int) -> tuple[ModelSize, ...]:
    """What a round's forwards of a drafter read: `absorb`, then the steps at depths 1, 2, ...

    Args:
        depth: how many steps are watched, at most as deep as the drafter reaches.
    """
    shape, play = target.shape(), rehearsal(drafter, target)
    with torch.no_grad():
        state = drafter.absorb(None, play.rows(0, PROBE))
        with _watched() as used:
            longer = drafter.absorb_all([state], [play.rows(PROBE, 2 * PROBE)])
            seen = [_weights(used)]
            for now in range(1, min(depth, drafter.reach) + 1):
                used.clear()
                longer = play.step(drafter, longer, now, 1)
                seen.append(_weights(used))
        grown = drafter.absorb(state, play.rows(PROBE, 2 * PROBE))
    rows, before = _numbers(grown), _numbers(state)
    kv = (rows[1] - before[1]) / PROBE
    layers = (rows[0] - before[0]) / PROBE / (2 * shape.kv_heads * shape.head_dim)
    width = shape.heads * shape.head_dim
    return tuple(ModelSize(count, size, kv, width, layers) for count, size in seen)


class _Watch(TorchFunctionMode):
    """Notes every matrix that something is multiplied with, once."""

    PLACE: ClassVar[dict[Any, int]] = {
        torch.nn.functional.linear: 1,
        torch.addmm: 2,
        torch.mm: 0,
    }

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[tuple[int, int], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (place := self.PLACE.get(func)) is not None:
            weight = args[place]
            self.used[weight.data_ptr(), weight.numel()] = weight
        return func(*args, **(kwargs or {}))


@contextmanager
def _watched() -> Iterator[dict[tuple[int, int], Tensor]]:
    with _Watch() as watch:
        yield watch.used


def _weights(used: dict[tuple[int, int], Tensor]) -> tuple[int, int]:
    """How many numbers, and their bytes."""
    count = sum(weight.numel() for weight in used.values())
    return count, sum(weight.numel() * weight.dtype.itemsize for weight in used.values())


def _numbers(state: object) -> tuple[int, int]:
    """Floating point numbers in a drafter's memory, and their bytes, whatever holds them."""
    if isinstance(state, Tensor):
        count = state.numel() if state.is_floating_point() else 0
        return count, count * state.dtype.itemsize
    parts: Sequence[object] = ()
    if is_dataclass(state):
        parts = [getattr(state, field.name) for field in fields(state)]
    elif isinstance(state, dict):
        parts = list(state.values())
    elif isinstance(state, list | tuple):
        parts = state
    found = [_numbers(part) for part in parts]
    return sum(count for count, _ in found), sum(size for _, size in found)


# ---- the clock of a plan ----


@dataclass(frozen=True)
class Foreseen:
    """Times of another machine, as `plan.make_plan` asks for them.

    Attributes:
        drafter: what a round's forwards read (`drafter_sizes`); one size stands for all of
            them, and the last one for all deeper steps.
        budget: cached tokens that the drafter reads at most (MagicDec); None: all.
    """

    machine: Machine
    target: ModelSize
    drafter: Sequence[ModelSize]
    budget: int | None = None

    @property
    def name(self) -> str:
        return f"{self.machine.name}, foreseen"

    @property
    def assumptions(self) -> tuple[str, ...]:
        m = self.machine
        rates = f"{m.bandwidth / 1e12:g} TB/s, {m.flops / 1e12:g} TFLOP/s"
        first = f"{m.name}: {rates}, {m.fixed * 1e6:g} microseconds fixed per forward."
        return (first, *ASSUMPTIONS)

    def fields(self) -> dict[str, Any]:
        """For json."""
        return {
            "machine": asdict(self.machine),
            "target": asdict(self.target),
            "drafter": [asdict(size) for size in self.drafter],
            "budget": self.budget,
        }

    def parts(self, shape: Shape, batch: int, context: int) -> Parts:
        """The target over root and tree; `absorb`, and a step per level; nothing besides."""
        target = self._seconds(self.target, batch, shape.nodes + 1, context)
        if not shape.depth:
            return Parts(0.0, 1000 * target, 0.0)
        rows = context if self.budget is None else min(self.budget, context)
        last = len(self.drafter) - 1
        draft = self._seconds(self.drafter[0], batch, 1, rows)
        for step, nodes in enumerate(shape.asked, start=1):
            draft += self._seconds(self.drafter[min(step, last)], batch, nodes, rows)
        return Parts(1000 * draft, 1000 * target, 0.0)

    def _seconds(self, model: ModelSize, batch: int, tokens: int, context: int) -> float:
        return forward_seconds(self.machine, model, batch, tokens, context)
