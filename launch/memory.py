"""`outrider memory`: estimate a run's memory per GPU, its hours and its disk.

    outrider memory drafter=eagle3 launch=zero2 launch.precision=bf16 memory.model=70b memory.gpus=8

The target and the drafter are built without weights and their parameters counted; the rest are the
sums below. w is the size of a number in bytes, n the number of ranks.

    target      replicated: w x all; sharded: w x (ends + layers / n + two layers, one of them
                prefetched); tensor: w x (ends + (ends + layers) / n); apart: w x ends; int8, nf4:
                linear layers at 1 and 0.5625 bytes. ends: embedding and head
    drafter     weights, gradients, masters and states of the optimizer: `training_state_bytes`;
                with train.ema, the averages
    unroll      activations: rows of a rank x `Drafter.activation_count`, or with gradient
                checkpointing one depth of it and the states between depths
    logits      logits of a chunk, the target's and the drafter's, and their gradients
    features    taps and last states of a rank's rows, draft states and their gradients
    forward     the target's forward: a layer's activations, masks, and its cache if rows are long

Hours are the operations of `launch/step_cost.py` at UTILISATION of the GPUs' peak rate.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch import nn

from outrider.conf.command_settings import MemoryConfig
from outrider.conf.compose import compose, verb_group
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.quantities import format_bytes, format_count
from outrider.conf.schema import Config, DrafterConfig, LaunchConfig, TargetConfig
from outrider.data.reporter import Reporter
from outrider.eval.plan.roofline import MACHINES
from outrider.eval.report_tables import explain as print_definitions
from outrider.eval.report_tables import narrow_table
from outrider.launch.cluster import assume_world_size
from outrider.launch.step_cost import checkpoint_bytes, step_flops
from outrider.models import drafters
from outrider.models.adapt import adapt
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape
from outrider.models.target.load import meta_model
from outrider.models.target.target import MASK_ELEMENTS, Target, decoder_layers
from outrider.train.distributed import BUCKET
from outrider.train.optimizer import state_numbers
from outrider.train.settings import parse
from outrider.train.teacher import CHUNK_GPU

MB, GB = 1e6, 1e9
SPARE = 0.08  # share of a GPU for libraries, other streams and fragmentation: an assumption
UTILISATION = 0.4  # of a GPU's peak rate in a step: an assumption (SpecForge reports 0.435)
GATHERED = 10**9  # parameters that ZeRO-3 keeps gathered: DeepSpeed's stage3_max_live_parameters
OPERATIONS = ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)
QUANTISED_WIDTH = {"int8": 1.0, "nf4": 0.5 + 4 / 64}  # bytes per weight, with scales

_EXPERTS = {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, dict[str, Any]] = {
    name: {
        "model_type": kind, "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128,
        **(_EXPERTS if kind == "qwen3_moe" else {}),
    }
    for name, kind, vocab, hidden, intermediate, layers, heads, kv_heads in (
        ("8b", "llama", 128256, 4096, 14336, 32, 32, 8),  # Llama-3.1-8B's config.json
        ("32b", "qwen3", 151936, 5120, 25600, 64, 64, 8),  # Qwen3-32B
        ("70b", "llama", 128256, 8192, 28672, 80, 64, 8),  # Llama-3.1-70B
        ("235b", "qwen3_moe", 151936, 4096, 12288, 94, 64, 4),  # Qwen3-235B-A22B
    )
}  # fmt: skip


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model."""

    whole: int
    ends: int  # embedding and head
    largest: int  # largest decoder layer
    linear: int  # linear layers of the decoder layers, quantisable; fused experts are not
    width: int  # bytes per parameter

    @classmethod
    def of(cls, model: Any) -> "ParameterCounts":
        layers, embedding = decoder_layers(model), model.get_input_embeddings()
        ends = {*embedding.parameters(), *model.get_output_embeddings().parameters()}
        linear = (m.weight for m in layers.modules() if isinstance(m, nn.Linear))
        largest = max(_count(layer.parameters()) for layer in layers)
        width = embedding.weight.dtype.itemsize
        return cls(_count(model.parameters()), _count(ends), largest, _count(linear), width)

    def bytes_per_rank(self, place: str, ranks: int, quantise: str | None = None) -> float:
        if quantise:
            quantised = QUANTISED_WIDTH[quantise] * self.linear
            return float(quantised + self.width * (self.whole - self.linear))
        counts: dict[str, float] = {
            "replicated": self.whole, "apart": self.ends, "ends": self.ends,
            "sharded": self.ends + (self.whole - self.ends) / ranks + 2 * self.largest,
            "tensor": self.ends + self.whole / ranks,
        }  # fmt: skip
        return float(self.width * counts[place])


def _count(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def training_state_bytes(
    launch: LaunchConfig, ranks: int, count: int, states: int | None = None
) -> float:
    """Return the bytes per rank of weights, gradients, masters and the optimizer's states.

    Plain training and DDP have float32 masters only and autocast from them; DDP's buckets are a
    second copy of the gradients. DeepSpeed has masters beside the weights, whatever the precision;
    what is offloaded is in CPU memory.

    Args:
        count: trained parameters.
        states: float32 numbers of the optimizer; None: AdamW's two moments.
    """
    kept = 4.0 * (2 * count if states is None else states)
    if not launch.name.startswith("zero"):
        return (8 if ranks == 1 else 12) * count + kept
    width, stage = 2 if launch.precision == "bf16" else 4, int(launch.name[-1])
    weights = 0.0 if launch.offload == "parameters" else width / (ranks if stage == 3 else 1)
    gradients = width / (ranks if stage > 1 else 1)
    masters = 0.0 if launch.offload != "none" else (4 * count + kept) / ranks
    gathered = min(GATHERED, count) + min(BUCKET, count) if stage == 3 else 0
    return (weights + gradients) * count + masters + width * gathered


def memory_by_part(
    config: Config, sizes: ParameterCounts, shape: ModelShape, drafter: Drafter, ranks: int,
    chunk: int, supervised: float = 1.0,
) -> dict[str, float]:  # fmt: skip
    """Return the bytes per rank of each of PARTS.

    Args:
        chunk: largest number of logits that exist at once.
        supervised: share of the rows that are trained on.
    """
    launch, train, place = config.launch, config.train, config.target.place
    width, number = sizes.width, 2 if launch.precision == "bf16" else 4
    rows = train.batch_tokens / (ranks * launch.accumulation)
    depths, vocab = config.drafter.depths, len(drafter.vocab)
    activations = activations_per_row(drafter, shape, depths, train.gradient_checkpointing)
    logits = min(chunk, rows * max(shape.vocab, vocab * depths))
    if launch.name == "zero3":  # the gradient of every logit is stored for the backward pass
        logits += rows * supervised * depths * vocab / 4
    features = (len(drafter.taps) + 1) * width + supervised * depths * (number + 4)
    forward = width * _forward_numbers(config, shape, drafter, rows, ranks)
    forward_rows = rows * (ranks if place == "tensor" else 1)
    masks = (width + 1) * min(forward_rows * config.data.max_length, MASK_ELEMENTS)
    return {
        "target": sizes.bytes_per_rank(place, ranks, config.target.quantise),
        "drafter": training_state_bytes(
            launch, ranks, _count(drafter.parameters()), state_numbers(drafter, train)
        )
        + (4 * _count(drafter.parameters()) if train.ema else 0),
        "unroll": number * rows * supervised * activations,
        "logits": 4.0 * 4 * logits,
        "features": rows * shape.hidden * features,
        "forward": 0.0 if place == "ends" else forward + masks,  # ends: features are recorded
    }


def _forward_numbers(
    config: Config, shape: ModelShape, drafter: Drafter, rows: float, ranks: int
) -> float:
    """Return the numbers of a rank in the target's forward, without masks."""
    length = config.data.max_length
    forward_rows = rows * (ranks if config.target.place == "tensor" else 1)
    is_long = forward_rows * length > MASK_ELEMENTS
    piece = MASK_ELEMENTS / length if is_long else forward_rows
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    numbers = piece * (3 * shape.intermediate + heads) * rows / forward_rows
    numbers += forward_rows * (len(drafter.taps) + 2) * shape.hidden
    if is_long:
        numbers += 2 * rows * shape.layers * shape.kv_heads * shape.head_dim
    return numbers


def activations_per_row(drafter: Drafter, shape: ModelShape, depths: int, recompute: bool) -> float:
    """Return the numbers per row stored for the backward pass.

    With recomputation these are one depth's activations and the states between depths.
    """
    if not recompute:
        return drafter.activation_count(depths)
    between = shape.hidden + 2 * shape.kv_heads * shape.head_dim
    return drafter.activation_count(depths) / depths + depths * between


# ---- the verb ------------------------------------------------------------------------------------

PLACES = (  # the fastest first
    ("replicated", None), ("tensor", None), ("sharded", None), ("apart", None),
    ("replicated", "int8"), ("replicated", "nf4"), ("ends", None),
)  # fmt: skip
PARTS = ("target", "drafter", "unroll", "logits", "features", "forward")
LESS_MEMORY = (
    "To use less: train.gradient_checkpointing=true, fewer train.batch_tokens, more "
    "launch.accumulation, launch=zero3."
)
DEFINITIONS = {
    "target": "the frozen model's weights",
    "drafter": "weights, gradients, masters and states of the optimizer",
    "unroll": "activations of the drafter, kept for the backward pass",
    "logits": "logits of a chunk of rows, the target's and the drafter's, and their gradients",
    "features": "taps and last states of a rank's rows, draft states and their gradients",
    "forward": "the target's forward: activations of a layer, masks, its cache if rows are long",
    "of": f"a GPU's memory without {SPARE:.0%} for libraries and fragmentation (an assumption)",
    "replicated, tensor, sharded": "target.place: the whole target on every GPU, every matrix "
    "split over the GPUs, or every layer split and gathered",
    "int8, nf4": "target.quantise, replicated",
    "ends": "only embedding and head: trains from data.traces",
    "time": f"at {UTILISATION:.0%} of the vendor's rate (an assumption), without generating text "
    "and without communication; all tokens are supervised",
    "less memory": LESS_MEMORY,
}


def memory(overrides: list[str], explain: bool = False) -> int:
    """Print where the target fits, and memory by placement and part. Returns the exit code.

    Args:
        explain: print the definitions, too.
    """
    settings, words = verb_group(MemoryConfig, "memory", overrides)
    with assume_world_size(settings.gpus):
        config = parse(compose(words))
    model = meta_model(config.target, MODELS.get(settings.model or ""))
    machine, console = MACHINES[settings.gpu], Console()
    available = (1 - SPARE) * (GB * settings.room if settings.room else machine.memory)
    sizes, target, drafter = ParameterCounts.of(model), *meta_models(model, config)
    notes = list[str]()
    config = adapt(config, notes.append, target.shape())
    by_place = {}
    for place, quantise in PLACES:
        setting = replace(config.target, place=place, quantise=quantise)  # type: ignore[arg-type]
        if not _is_trainable(config, setting):
            continue
        by_place[quantise or place] = memory_by_part(
            replace(config, target=setting), sizes, target.shape(), drafter, settings.gpus,
            CHUNK_GPU,
        )  # fmt: skip
    console.print(verdict(by_place, available), style="bold")
    name = settings.model or config.target.path or config.target.name
    machines = f"{settings.gpus} x {machine.name}"
    for line in (
        f"{name}: {format_parameters(sizes.whole)} parameters of {sizes.width} bytes; "
        f"{config.drafter.name}: {format_parameters(_count(drafter.parameters()))}",
        f"{config.train.batch_tokens:,} tokens per step in rows of {config.data.max_length:,}, "
        f"launch={config.launch.name}, {machines}",
        *_time_and_disk(config, target, drafter, settings.gpus * machine.flops),
    ):
        console.print(line, soft_wrap=True)
    console.print(_table(by_place, available))
    if explain:
        for note in notes:
            Reporter(console).note(note)
        more = math.ceil(sizes.width * sizes.whole / available)
        print_definitions(console, DEFINITIONS | {"apart": f"on {format_count(more, 'more GPU')}"})
    return 0


def _is_trainable(config: Config, target: TargetConfig) -> bool:
    """Return whether the drafter can be trained with the target in this placement."""
    assert isinstance(config.drafter, DrafterConfig), "drafters without weights are refused before"
    try:
        config.drafter.check_run(config.launch, target)
    except ConfigError:
        return False
    return True


def verdict(by_place: dict[str, dict[str, float]], available: float) -> str:
    """Return which placements of the target fit, or how to use less memory."""
    totals = {place: sum(parts.values()) for place, parts in by_place.items()}
    fitting = [place for place, total in totals.items() if total <= available]
    if not fitting:
        return f"No placement fits. {LESS_MEMORY}"
    keys = {name: "quantise" if name in QUANTISED_WIDTH else "place" for name in fitting}
    others = ", ".join(fitting[1:])
    return f"Fits with target.{keys[fitting[0]]}={fitting[0]}" + f"; also {others}" * bool(others)


def format_parameters(count: int) -> str:
    """Return a number of parameters: 70.55 billion, 3.43 million, 863,616."""
    if count < 1e6:
        return f"{count:,}"
    millions = f"{count / 1e6:.2f}"
    return f"{millions} million" if float(millions) < 1000 else f"{count / 1e9:.2f} billion"


def format_operations(flops: float) -> str:
    """Return a number of operations with its unit, three digits."""
    flops = float(f"{flops:.3g}")
    unit, factor = next((one for one in OPERATIONS if flops >= one[1]), OPERATIONS[-1])
    return f"{flops / factor:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """Return hours with a digit; below half an hour, whole minutes."""
    if seconds >= 1800:
        return f"About {seconds / 3600:.1f} hours"
    if seconds < 60:
        return "Less than a minute"
    return f"About {format_count(round(seconds / 60), 'minute')}"


def _time_and_disk(config: Config, target: Target, drafter: Drafter, rate: float) -> list[str]:
    """Return a line on the time of `train.max_steps`, if set, and one on disk.

    Args:
        rate: operations per second of all GPUs.
    """
    size, train = _count(drafter.parameters()), config.train
    saved = checkpoint_bytes(train, size, state_numbers(drafter, train))
    disk = f"{format_bytes(saved)} of checkpoints and drafters"
    if train.max_steps is None:
        return [disk]
    flops = step_flops(
        target, drafter, size=size, depths=config.drafter.depths, rows=train.batch_tokens,
        tokens=train.batch_tokens, online=config.data.traces is None,
    )  # fmt: skip
    time = format_duration(train.max_steps * flops / (UTILISATION * rate))
    steps = f"{train.max_steps:,} steps of {format_operations(flops)}"
    return [f"{time}: {steps} at {UTILISATION:.0%} of the vendor's rate", disk]


def _table(by_place: dict[str, dict[str, float]], available: float) -> Table:
    totals = [sum(parts.values()) for parts in by_place.values()]
    unit, size = ("GB", GB) if max(totals, default=0.0) >= GB else ("MB", MB)
    table = narrow_table((f"{unit} per GPU", *by_place), (f"{unit} per GPU",))
    for part in PARTS:
        table.add_row(part, *(f"{parts[part] / size:.1f}" for parts in by_place.values()))
    table.add_row("total", *(f"{total / size:.1f}" for total in totals), style="bold")
    fits = ("fits" if total <= available else "no" for total in totals)
    table.add_row(f"of {format_bytes(available)}", *fits, style="bold")
    return table


def meta_models(model: Any, config: Config) -> tuple[Target, Drafter]:
    """Return the run's target and drafter, without weights."""
    target = Target(model, fuse=False)
    size = min(config.drafter.draft_vocab_size or target.vocab_size, target.vocab_size)
    vocab = DraftVocab(torch.arange(size), target.vocab_size)
    with torch.device("meta"):
        return target, drafters.build(config.drafter, target, vocab)
