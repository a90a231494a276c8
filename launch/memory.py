"""`outrider memory`: what a run takes of every GPU, and where its target can lie so that it fits.

    outrider memory drafter=eagle3 launch=zero2 launch.precision=bf16 memory.model=70b memory.gpus=8

The target and the drafter are built without weights, so every number of theirs is counted; the rest
are the sums below. w is the size of a number in bytes, P the drafter's parameters, n the ranks.

    target      replicated: w x all; sharded: w x (ends + layers / n + two whole layers, one of them
                on its way); tensor: w x (ends + (ends + layers) / n); apart: w x ends; int8, nf4:
                linear maps of layers at 1 and 0.5625 bytes
    drafter     weights, gradients, masters and moments: `states`
    unroll      what waits for the backward pass: rows of a rank x `Drafter.kept`, or with gradient
                checkpointing one depth of it and the states between depths
    judging     logits of a chunk, the target's and the drafter's, and their gradients
    features    taps and last states of a rank's rows, and the guesses and slopes of all depths
    reading     the target's forward: one layer's numbers, masks, and its cache where rows are long
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from outrider.conf.compose import compose
from outrider.eval.plan.roofline import MACHINES
from outrider.launch.cluster import as_ranks
from outrider.models import drafters
from outrider.models.drafter import Drafter, Shape
from outrider.models.load import bare_model
from outrider.models.target import PAIRS, Target, decoder_layers
from outrider.models.vocab import DraftVocab
from outrider.train.distributed import BUCKET
from outrider.train.gpus import read_memory
from outrider.train.objective import CHUNK_GPU
from outrider.train.settings import Config, LaunchConfig, parse

GB = 1e9  # as vendors count
SPARE = 0.08  # share of a GPU that libraries, other streams and gaps take: an assumption
LIVE = 10**9  # weights that ZeRO-3 leaves put together: DeepSpeed's own stage3_max_live_parameters
BITS = {"int8": 1.0, "nf4": 0.5 + 4 / 64}  # bytes of a weight, scales in

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
_QWEN = {"vocab_size": 151936, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {  # as their config.json files say
    "8b": _LLAMA | {  # Llama-3.1-8B
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "32b": _QWEN | {  # Qwen3-32B
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "70b": _LLAMA | {  # Llama-3.1-70B
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "235b": _QWEN | {  # Qwen3-235B-A22B
        "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Numbers of a model: all, its embedding and head, its largest layer, its layers' linear maps
    (of which quantisers know; experts that lie in one block are none).
    """

    whole: int
    ends: int
    largest: int
    maps: int
    width: int = 2  # bytes of each

    @classmethod
    def of(cls, model: Any) -> "Sizes":
        layers = decoder_layers(model)
        ends = {id(p): p for m in (model.get_input_embeddings(), model.get_output_embeddings())
                for p in m.parameters()}  # fmt: skip
        maps = (m.weight for m in layers.modules() if isinstance(m, nn.Linear))
        largest = max(_count(layer.parameters()) for layer in layers)
        width = model.get_input_embeddings().weight.dtype.itemsize
        return cls(_count(model.parameters()), _count(ends.values()), largest, _count(maps), width)

    def held(self, place: str, ranks: int, quantise: str | None = None) -> float:
        """Bytes of one rank."""
        layers, width = self.whole - self.ends, self.width
        if quantise:
            return float(BITS[quantise] * self.maps + width * (self.whole - self.maps))
        here: dict[str, float] = {
            "replicated": self.whole,
            "sharded": self.ends + layers / ranks + 2 * self.largest,
            "tensor": self.ends + self.whole / ranks,
            "apart": self.ends,
            "ends": self.ends,
        }
        return float(width * here[place])


def _count(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def states(launch: LaunchConfig, ranks: int, count: int) -> float:
    """Bytes of weights, gradients, masters and AdamW's moments of `count` parameters, one rank.

    Plain training and DDP keep float32 masters only and autocast from them; DDP's buckets are a
    second copy of the gradients. DeepSpeed keeps masters beside the weights, bfloat16 or not; what
    is offloaded lies in the machine's own memory.
    """
    if not launch.name.startswith("zero"):
        return float((16 if ranks == 1 else 20) * count)
    width, stage = 2 if launch.precision == "bf16" else 4, int(launch.name[-1])
    weights = 0.0 if launch.offload == "parameters" else width / (ranks if stage == 3 else 1)
    gradients = width / (ranks if stage > 1 else 1)
    moments = 0.0 if launch.offload != "none" else 12 / ranks
    together = min(LIVE, count) + min(BUCKET, count) if stage == 3 else 0
    return (weights + gradients + moments) * count + width * together


def parts(
    config: Config,
    sizes: Sizes,
    shape: Shape,
    drafter: Drafter,
    ranks: int,
    chunk: int,
    supervised: float = 1.0,
) -> dict[str, float]:
    """Bytes of one rank, by part; for the place and the precision of the configuration.

    Args:
        chunk: logits that may be held at once.
        supervised: share of the rows that are learned from.
    """
    launch, train = config.launch, config.train
    width, number = sizes.width, 2 if launch.precision == "bf16" else 4
    rows, length = train.batch_tokens / (ranks * launch.accumulation), config.data.max_length
    depths, vocab = config.drafter.depths, len(drafter.vocab)
    kept = waiting(drafter, shape, depths, train.gradient_checkpointing)
    judging = min(chunk, rows * max(shape.vocab, vocab * depths))
    if launch.name == "zero3":  # the slope of every logit waits for the backward pass
        judging += rows * supervised * depths * vocab / 4
    together = rows * (ranks if config.target.place == "tensor" else 1)  # read by one forward
    long = together * length > PAIRS
    piece = PAIRS / length if long else together
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    reading = piece * (3 * shape.intermediate + heads) * rows / together
    reading += together * (len(drafter.taps) + 2) * shape.hidden
    if long:
        reading += 2 * rows * shape.layers * shape.kv_heads * shape.head_dim
    said = (len(drafter.taps) + 1) * width + depths * (number + 4)
    reads = config.target.place != "ends"  # or what was recorded says it all
    return {
        "target": sizes.held(config.target.place, ranks, config.target.quantise),
        "drafter": states(launch, ranks, _count(drafter.parameters())),
        "unroll": number * rows * supervised * kept,
        "judging": 4.0 * 4 * judging,
        "features": rows * shape.hidden * said,
        "reading": reads * (width * reading + (width + 1) * min(together * length, PAIRS)),
    }


def waiting(drafter: Drafter, shape: Shape, depths: int, recompute: bool) -> float:
    """Numbers per row that wait for the backward pass; of parts that run again, the largest is
    there as well as the states between them.
    """
    if not recompute:
        return drafter.kept(depths)
    between = shape.hidden + 2 * shape.kv_heads * shape.head_dim
    return drafter.kept(depths) / depths + depths * between


# ---- the verb ----

PLACES = (  # the fastest first
    ("replicated", None), ("tensor", None), ("sharded", None), ("apart", None),
    ("replicated", "int8"), ("replicated", "nf4"), ("ends", None),
)  # fmt: skip
PARTS = ("target", "drafter", "unroll", "judging", "features", "reading")


def memory(overrides: list[str]) -> int:
    """The verb: a table of places, by part.

    Raises:
        ConfigError: the run is wrong for so many ranks, or its target is not found.
    """
    wanted, words = read_memory(overrides)
    with as_ranks(wanted.gpus):
        config = parse(compose(words))
    model = bare_model(config.target, MODELS.get(wanted.model or ""))
    machine = MACHINES[wanted.gpu]
    room = (1 - SPARE) * (GB * wanted.room if wanted.room else machine.memory)
    sizes, target, drafter = Sizes.of(model), *untrained(model, config)
    console = Console()
    name = wanted.model or config.target.path or config.target.name
    console.print(
        f"{name}: {sizes.whole / 1e9:.2f} billion numbers of {sizes.width} bytes; "
        f"{config.drafter.name}: {_count(drafter.parameters()) / 1e6:.0f} million, "
        f"launch={config.launch.name}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    table = Table(title=f"GB of each of {wanted.gpus} x {machine.name}, about")
    table.add_column("")
    found = {}
    for place, quantise in PLACES:
        setting = replace(config.target, place=place, quantise=quantise)  # type: ignore[arg-type]
        name = quantise or place
        table.add_column(name, justify="right")
        here = replace(config, target=setting)
        found[name] = parts(here, sizes, target.shape(), drafter, wanted.gpus, CHUNK_GPU)
    for part in PARTS:
        table.add_row(part, *(f"{these[part] / GB:.1f}" for these in found.values()))
    totals = [sum(these.values()) for these in found.values()]
    table.add_section()
    table.add_row("together", *(f"{total / GB:.1f}" for total in totals))
    table.add_row(f"of {room / GB:.1f}", *("fits" if total <= room else "no" for total in totals))
    console.print(table)
    console.print(
        f"{config.train.batch_tokens:,} tokens per step, all supervised; {SPARE:.0%} of each GPU "
        f"left to libraries and gaps. apart: {math.ceil(sizes.width * sizes.whole / room)} more "
        "GPU(s) for the target. int8, nf4: target.quantise, replicated. ends: for training from "
        "data.traces. For less: "
        "train.gradient_checkpointing=true, fewer train.batch_tokens, more launch.accumulation, "
        "launch=zero3.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def untrained(model: Any, config: Config) -> tuple[Target, Drafter]:
    """The run's target and drafter, without weights."""
    target = Target(model, fuse=False)
    size = min(config.drafter.draft_vocab_size or target.vocab, target.vocab)
    vocab = DraftVocab(torch.arange(size), target.vocab)
    with torch.device("meta"):
        return target, drafters.build(config.drafter, target, vocab)
