"""`outrider bench replay`: two ways to drop rejected rows from recurrent layers, and the speed.

The model is random, with the proportions of published hybrids: three recurrent layers of four.

    replay   the states before the forward are copied, and the recurrent modules run again on the
             rows that are kept
    rows     the recurrent modules run row by row, and the state after every row is kept

First table, one round of `draft` tokens of which half are accepted, medians in ms:

    plain     one token, nothing is dropped
    all       forward of the round, and all rows are kept: nothing runs again
    half      the same, and half of the rows are kept
    MB        of copies and recorded inputs, or of states after every row

Second table: greedy decoding with a drafter that costs nothing and is right about two tokens of
three; speedup over plain decoding, by turns. All answers must equal those of plain decoding.
"""

import dataclasses
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.options import parse_words
from outrider.launch.bench import common
from outrider.launch.bench.families import TwoOfThree
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.recurrent_states import Undo
from outrider.models.decode.costs.forward_times import interleaved_ms
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Output, Request
from outrider.models.target.layer_kinds import layer_kinds
from outrider.models.target.target import Target

MODES = {"replay": False, "rows": True}  # whether modules run row by row
VOCABULARY, PROMPT = 4096, 64


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench replay`."""

    family: str = option("qwen3_5", "gated delta rules (qwen3_5) or Mamba-2 (bamba)")
    hidden: int = option(512, "hidden size, a multiple of 128", "[128, 8192]")
    layers: int = option(24, "decoder layers, a multiple of 4", "[4, 128]")
    drafts: tuple[int, ...] = option((2, 4, 8), "draft tokens of a round", "[1, 15]")
    batches: tuple[int, ...] = option((1, 4), "prompts", "[1, 64]")
    new_tokens: int = option(96, "tokens of an answer", "[8, 1024]")
    repeats: int = option(5, "repetitions; medians count", "[1, inf)")
    threads: int = option(0, "CPU threads; 0: PyTorch's default", "[0, 1024]")
    out: str = option("", "JSON file for the result")

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            fix = f"Use {' or '.join(FAMILIES)}."
            raise ConfigError("family", self.family, "There is no such model here.", fix)
        for name, size in (("hidden", 128), ("layers", 4)):
            if (value := getattr(self, name)) % size:
                raise ConfigError(name, value, f"It is no multiple of {size}.", "Use one.")


def _qwen3_5(hidden: int, layers: int) -> Any:
    """Qwen3.5-9B, whose hidden size is 4096, in small."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64,
        linear_num_key_heads=hidden // 128, linear_num_value_heads=hidden // 64,
        vocab_size=VOCABULARY,
    )  # fmt: skip


def _bamba(hidden: int, layers: int) -> Any:
    """Bamba-9B, whose hidden size is 4096, with an attention layer in four."""
    from transformers import BambaConfig

    return BambaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128,
        attn_layer_indices=[*range(3, layers, 4)], mamba_n_heads=hidden // 32, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, vocab_size=VOCABULARY,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[int, int], Any]] = {"qwen3_5": _qwen3_5, "bamba": _bamba}


def replay(words: list[str]) -> int:
    """Run the benchmark."""
    options = parse_words(Options, words)
    common.use_threads(options.threads)
    target, console = random_target(options), Console()
    kinds = ", ".join(f"{count} {kind}" for kind, count in layer_kinds(target).items())
    console.print(f"{target.name}: {target.parameter_count() / 1e6:.0f} M parameters, {kinds}")
    rounds, speeds = list[dict[str, Any]](), list[dict[str, Any]]()
    with console.status("rounds") as status:
        for batch in options.batches:
            rounds += measure_rounds(options, target, batch)
        status.update("decoding")
        for batch in options.batches:
            speeds += measure_speed(options, target, batch)
    for title, rows in (("one round", rounds), ("decoding", speeds)):
        table = common.number_table(title, list(rows[0]), ("mode",))
        for row in rows:
            table.add_row(*map(_cell, row.values()))
        console.print(table)
    machine = common.describe_machine(on_gpu=False)
    console.print(machine)
    result = {"setting": dataclasses.asdict(options), "rounds": rounds, "decoding": speeds}
    common.save_result(options.out, {"machine": machine, **result})
    return 0


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def random_target(options: Options) -> Target:
    """Return the model, with weights so large that its greedy text does not repeat a token."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[options.family](options.hidden, options.layers)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2.0)
    return Target(model.float(), name=f"random {options.family}")


def use_mode(target: Target, mode: str) -> None:
    """Let the recurrent modules run as `MODES` says."""
    target._by_rows.update({type(module): MODES[mode] for module in target.recurrent})


@torch.inference_mode()
def measure_rounds(options: Options, target: Target, batch: int) -> Iterator[dict[str, Any]]:
    """Yield a row per draft length and mode."""
    most = max(options.drafts) + 1
    cache = target.new_cache(PROMPT + most, batch)
    assert isinstance(cache, KVCache)
    cache.undo_rows = most
    _forward(target, cache, 0, PROMPT)

    def round_of(count: int, kept: int, mode: str) -> Callable[[], object]:
        def run() -> object:
            use_mode(target, mode)
            logits = _forward(target, cache, PROMPT, count)
            cache.keep_rows([range(kept)] * batch)
            return logits

        return run

    def back() -> None:
        for slot in range(batch):
            cache.restore(slot, PROMPT, states[slot])

    states = [cache.states.copy_of(slot) for slot in range(batch)]
    cases = [(1, 1, "replay")]
    for draft in options.drafts:
        kept = (draft + 2) // 2  # the root and half of the drafts
        cases += [(draft + 1, k, mode) for mode in MODES for k in (draft + 1, kept)]
    runs = [round_of(*case) for case in cases]
    times = interleaved_ms(runs, [back] * len(runs), options.repeats, target.device)
    found = dict(zip(cases, map(median, times), strict=True))
    for draft in options.drafts:
        for mode in MODES:
            back()
            use_mode(target, mode)
            _forward(target, cache, PROMPT, draft + 1)
            yield {
                "batch": batch, "draft": draft, "mode": mode, "plain": found[cases[0]],
                "all": found[draft + 1, draft + 1, mode],
                "half": found[draft + 1, (draft + 2) // 2, mode],
                "MB": _undo_bytes(cache.states._undo) / 1e6,
            }  # fmt: skip
    back()


def _forward(target: Target, cache: KVCache, start: int, count: int) -> Tensor:
    batch = cache.slots
    generator = torch.Generator().manual_seed(start)
    ids = torch.randint(VOCABULARY, (batch, count), generator=generator)
    positions = (start + torch.arange(count)).expand(batch, -1)
    visible = torch.ones(batch, count, start + count, dtype=torch.bool).tril(start)
    return target.logits(target.forward(ids, positions, visible, cache).last)


def _undo_bytes(undo: Undo | None) -> int:
    """Return the bytes that are kept so that rows can be dropped, shared inputs once."""
    assert undo is not None, "the forward may drop rows"
    tensors = [*undo.before.values(), *(t for after in undo.after_rows.values() for t in after)]
    for call in undo.calls:
        values = (*call.args, *call.kwargs.values())
        tensors += [v for v in values if isinstance(v, Tensor) and v.ndim == 3]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def measure_speed(options: Options, target: Target, batch: int) -> Iterator[dict[str, Any]]:
    """Yield a row per draft length and mode: tokens per round and speedup over plain decoding."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, VOCABULARY, (batch, PROMPT), generator=generator).tolist()
    requests = [Request(prompt, options.new_tokens) for prompt in prompts]
    use_mode(target, "replay")
    plain = Engine(target, None, None, timed=False)
    answers = [out.ids for out in plain.generate_all(requests, batch)]
    drafter = TwoOfThree(prompts, answers, VOCABULARY)
    cases = [(draft, mode) for draft in options.drafts for mode in MODES]
    engines = [Engine(target, drafter, Chain(draft), timed=False) for draft, _ in cases]
    outs = dict[tuple[int, str], list[Output]]()

    def decoded(case: tuple[int, str], engine: Engine) -> Callable[[], object]:
        def run() -> object:
            use_mode(target, case[1])
            outs[case] = engine.generate_all(requests, batch)
            return outs

        return run

    runs = [decoded((0, "replay"), plain), *map(decoded, cases, engines)]
    times = interleaved_ms(runs, [lambda: None] * len(runs), options.repeats, target.device)
    for case, mine in zip(cases, times[1:], strict=True):
        ratios = [slow / fast for slow, fast in zip(times[0], mine, strict=True)]
        rounds = sum(out.rounds for out in outs[case])
        yield {
            "batch": batch, "draft": case[0], "mode": case[1],
            "tau": sum(len(out.ids) - 1 for out in outs[case]) / rounds,
            "speedup": median(ratios),
            "exact": [out.ids for out in outs[case]] == answers,
        }  # fmt: skip
