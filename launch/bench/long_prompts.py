"""`outrider bench long-prompts`: memory and time of reading a prompt, by its length and drafter.

The decoder reads a prompt of random tokens with the embedded target, its positions extended, and an
untrained drafter absorbs it; "none" is the target alone. Each setting runs in a process of its own.
The peak is of resident memory, above that with the weights and without the caches: the target's
cache and the tensors of the drafter's state. The index of a look-up drafter counts as peak.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.options import parse_words
from outrider.conf.schema import TargetConfig
from outrider.launch.bench import common
from outrider.models import drafters
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import DialogueCache, Request
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.load import load_target
from outrider.models.target.target import Target

MIB = 2**20
NO_DRAFTER = "none"
CHOICES = (NO_DRAFTER, *drafters.complete_names())


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench long-prompts`."""

    lengths: tuple[int, ...] = option((8192, 16384, 32768), "prompt lengths, tokens", "[16, 1e6]")
    drafters: tuple[str, ...] = option(CHOICES, "drafters; none: the target alone")
    threads: int = option(0, "CPU threads; 0: PyTorch's default", "[0, 1024]")
    out: str = option("", "JSON file for the result")

    def __post_init__(self) -> None:
        for name in self.drafters:
            if name not in CHOICES:
                fix = f"Use: {', '.join(CHOICES)}."
                raise ConfigError("drafters", name, "There is no such drafter.", fix)


def long_prompts(words: list[str]) -> int:
    options = parse_words(Options, words)
    common.use_threads(options.threads)
    if common.answer_parent(lambda: _measure(options)):
        return 0
    console, rows = Console(), list[dict[str, Any]]()
    names = [f"{length:,}: {what}" for length in options.lengths for what in ("MiB", "caches", "s")]
    table = common.number_table("reading a prompt", ("drafter", *names), ("drafter",))
    with console.status("") as status:
        for name in options.drafters:
            cells = list[str]()
            for length in options.lengths:
                status.update(f"{name}, {length} tokens")
                row = common.run_in_child("long-prompts", options, lengths=length, drafters=name)
                rows.append({"drafter": name, "tokens": length, **row})
                cells += [f"{row['peak_mb']:.0f}", f"{row['cache_mb']:.0f}", f"{row['s']:.1f}"]
            table.add_row(name, *cells)
    result = {"setting": dataclasses.asdict(options), "rows": rows}
    common.report(console, table, options.out, result, on_gpu=False)
    return 0


def _measure(options: Options) -> dict[str, float]:
    (length,), (name,) = options.lengths, options.drafters
    target = load_target(TargetConfig()).target
    common.allow_positions(target, length + 1)
    drafter = None if name == NO_DRAFTER else common.default_drafter(name, target)
    read_prompt(target, drafter, 16)  # libraries allocate their own memory on the first call
    return read_prompt(target, drafter, length)


def read_prompt(target: Target, drafter: Drafter | None, length: int) -> dict[str, float]:
    """Read a prompt of random tokens; return the peak, the caches' size (MiB) and the seconds."""
    torch.manual_seed(0)
    prompt = torch.randint(target.vocab_size, (length,)).tolist()
    caches = DialogueCache()  # holds the target's cache and the drafter's state afterwards
    engine = Engine(target, drafter, None if drafter is None else Chain(1), timed=False)
    before, start = common.resident_bytes(), time.perf_counter()
    with common.PeakMemory() as peak:
        for _ in engine.run([Request(prompt, 1)], 1, dialogue=caches):
            pass
    seconds, size = time.perf_counter() - start, tensor_bytes(caches)
    return {
        "peak_mb": (peak.highest - before - size) / MIB,
        "cache_mb": size / MIB,
        "s": seconds,
    }


def tensor_bytes(value: object) -> int:
    """Return the memory of all tensors that an object holds, shared memory once."""
    sizes = dict[int, int]()
    _add_storages(value, sizes)
    return sum(sizes.values())


def _add_storages(value: object, sizes: dict[int, int]) -> None:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, list | tuple | set):
        for entry in value:
            _add_storages(entry, sizes)
    elif isinstance(value, Mapping):
        _add_storages([*value.values()], sizes)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        _add_storages([*vars(value).values()], sizes)
