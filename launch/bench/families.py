"""`outrider bench families`: what works with the targets of every family, tried on tiny models.

Each row is a random model of `tiny_families.py`, without a download:

    layers   decoder layers by kind
    train    states of a packed row equal those of its documents alone
    chain, tree, batch
             greedy answers equal those of transformers' `generate`, with a drafter that is right
             about two tokens of three; prompts of a batch have different lengths
    export   engines' formats that can hold an untrained eagle3 drafter for it

A reason stands where something is refused.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import option
from outrider.conf.options import parse_words
from outrider.launch.bench import common
from outrider.launch.bench.tiny_families import known_families, small_model
from outrider.models import drafters, formats
from outrider.models.cache.attention_masks import document_mask
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Request
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Trace
from outrider.models.target import target_check
from outrider.models.target.layer_kinds import layer_kinds
from outrider.models.target.target import Target

LENGTHS, BUDGET = (26, 9, 26), 16  # tokens of prompts and answers
DOCUMENTS = (9, 14, 9)  # of a packed row
CLOSE = 1e-4  # of states, relative to their size
COLUMNS = ("family", "layers", "train", "chain", "tree", "batch", "export")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench families`."""

    families: tuple[str, ...] = option((), "families by name; none: all")
    out: str = option("", "JSON file for the result")

    def __post_init__(self) -> None:
        known = known_families()
        for name in self.families:
            if name not in known:
                fix = f"Use: {', '.join(known)}."
                raise ConfigError("families", name, "There is no such family here.", fix)


def families(words: list[str]) -> int:
    options = parse_words(Options, words)
    console, rows = Console(), list[dict[str, str]]()
    with console.status("") as status:
        for name in options.families or known_families():
            status.update(name)
            rows.append(try_family(name))
    table = common.number_table("targets by family", COLUMNS, COLUMNS)
    for row in rows:
        table.add_row(*row.values())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    console.print(f"transformers {transformers.__version__}")
    result = {"setting": dataclasses.asdict(options), "versions": versions, "rows": rows}
    common.report(console, table, options.out, result, on_gpu=False)
    return 0


def try_family(name: str) -> dict[str, str]:
    """Return the cells of a family by column: "yes", or why not."""
    try:
        target = Target(small_model(name), name=name)
        target_check.check_target(target)
    except (ConfigError, RunError) as error:
        return dict.fromkeys(COLUMNS, "") | {"family": name, "layers": _reason(error)}
    prompts, answers = _answers(target)
    drafter = TwoOfThree(prompts, answers, target.vocab_size)

    def decodes(policy: Policy, batch: int) -> bool:
        requests = [Request(prompt, BUDGET) for prompt in prompts]
        outs = Engine(target, drafter, policy).generate_all(requests, batch)
        return [out.ids for out in outs] == answers

    return {
        "family": name,
        "layers": ", ".join(f"{n} {kind}" for kind, n in layer_kinds(target).items()),
        "train": _tried(lambda: _reads_documents_alone(target)),
        "chain": _tried(lambda: decodes(Chain(4), 1)),
        "tree": _tried(lambda: decodes(DynamicTree(depth=4, width=2, budget=8), 1)),
        "batch": _tried(lambda: decodes(Chain(4), 3)),
        "export": _exports(target),
    }


def _tried(attempt: Callable[[], bool]) -> str:
    try:
        return "yes" if attempt() else "DIFFERS"
    except ConfigError:
        return "refused"


def _reason(error: ConfigError | RunError) -> str:
    return " ".join(str(error).split())


def _answers(target: Target) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and the greedy answers of transformers."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generator = torch.Generator().manual_seed(5)
    prompts, answers = list[list[int]](), list[list[int]]()
    for length in LENGTHS:
        prompt = torch.randint(3, target.vocab_size, (1, length), generator=generator)
        ids = target.model.generate(prompt, max_new_tokens=BUDGET, **settings)
        prompts.append(prompt[0].tolist())
        answers.append(ids[0, length:].tolist())
    return prompts, answers


@torch.no_grad()
def _reads_documents_alone(target: Target) -> bool:
    """Return whether the states of a packed row are those of its documents alone."""
    target.set_taps((0, target.num_layers - 1))
    ids = torch.arange(3, 3 + sum(DOCUMENTS))[None]
    number = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))[None]
    positions = torch.cat([*map(torch.arange, DOCUMENTS)])[None]
    packed, start = target.trace(ids, number >= 0, number, positions), 0
    for size in DOCUMENTS:
        rows = slice(start, start + size)
        one = torch.zeros_like(number[:, rows])
        alone = target.forward(ids[:, rows], positions[:, rows], document_mask(one))
        for ours, theirs in ((packed.last, alone.last), (packed.taps, alone.taps)):
            error = (ours[:, rows] - theirs).abs().max()
            if not error <= CLOSE * max(1.0, float(theirs.abs().max())):
                return False
        start += size
    return True


def _exports(target: Target) -> str:
    """Return the formats that can hold an eagle3 drafter for the target."""
    name = "eagle3"
    cfg = drafters.drafter_module(name).Config()
    try:
        drafter = drafters.build(cfg, target, DraftVocab.identity(target.vocab_size))
    except (ConfigError, RunError) as error:
        return _reason(error)
    refusals = formats.export_refusals(drafter, name, target)
    return ", ".join(word for word, why in refusals.items() if not why)


class TwoOfThree(Drafter):
    """A drafter that knows the answers and is wrong about every third token."""

    is_trained = False

    def __init__(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]], vocab: int
    ) -> None:
        super().__init__()
        self.vocab, self.taps = DraftVocab.identity(vocab), ()
        self._texts = [tuple(p + a) for p, a in zip(prompts, answers, strict=True)]

    def absorb(self, state: tuple[int, ...] | None, trace: Trace) -> tuple[int, ...]:
        read = trace.ids[0].tolist()
        return (*(state or ())[: -1 if state else None], *read, int(trace.next_ids[0, -1]))

    def step(
        self, state: Any, depth: int, ids: Tensor, parents: Tensor
    ) -> tuple[Tensor, Any]:  # fmt: skip
        branches = [state] if depth == 1 else [
            (*state[parent], token)
            for parent, token in zip(parents.tolist(), ids.tolist(), strict=True)
        ]  # fmt: skip
        return torch.stack([self._row(text) for text in branches]), branches

    def _row(self, text: tuple[int, ...]) -> Tensor:
        logits, place = torch.zeros(self.vocab.target_ids.numel()), len(text)
        for whole in self._texts:
            if whole[:place] == text and place < len(whole):
                right = 0 if place % 3 else 1
                logits[(whole[place] + right) % len(logits)] = 9.0
        return logits
