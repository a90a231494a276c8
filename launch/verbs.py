"""The verbs of the command line and the benchmarks, as two tables."""

import importlib
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """A command."""

    target: str  # its function, "module:name"
    line: str  # what it does, for --help
    root: str = "train"  # of conf/, where its keys come from; "": it takes words instead of keys
    group: str = ""  # group of conf/ that only this verb has
    shorthand: tuple[str, ...] = ()  # keys of the group that need not name it
    takes: str = "config"  # arguments: "config" (and the group's settings), "words" or "report"
    files: tuple[str, ...] = ("data.path", "data.given", "eval.prompts")  # keys; files must exist
    uses: tuple[str, ...] | None = None  # beginnings of its keys of eval and decode; None: all
    explains: bool = False  # takes --explain: every table, and the definitions

    def uses_key(self, key: str) -> bool:
        """Return whether the verb would not ignore this key of its root."""
        of_decoding = key.partition(".")[0] in ("eval", "decode")
        return self.uses is None or not of_decoding or key.startswith(self.uses)

    def load(self) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


PROMPTS = ("eval.prompts",)
INPUTS = (*PROMPTS, "drafter.answers")
DECODING = ("eval", "chat", "serve")  # verbs that take any drafter, with or without a run
SAMPLING = tuple(
    f"decode.{name}"
    for name in (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "banned",
        "presence_penalty", "frequency_penalty",
    )
)  # fmt: skip
VERBS = {
    "train": Verb(
        "outrider.launch.train:train", "train a drafter against a frozen target, then measure it"),
    "eval": Verb(
        "outrider.eval.run:evaluate", "measure a trained drafter: acceptance, speedup, exactness",
        root="eval", files=INPUTS, explains=True),
    "launch": Verb(
        "outrider.launch.cluster:launch",
        "check a run for a cluster and print the command of each machine",
        group="cluster", takes="words"),
    "memory": Verb(
        "outrider.launch.memory:memory",
        "estimate the memory per GPU for each placement of the target",
        group="memory", takes="words", explains=True),
    "prepare": Verb(
        "outrider.data.prepare:prepare",
        "generate the training text with the target (data=self), without training"),
    "record": Verb(
        "outrider.data.prepare:record",
        "store the target's features of the training text, to train from (data.traces)"),
    "doctor": Verb(
        "outrider.launch.doctor.run:doctor",
        "check a run before training: data, template, target, memory, disk, time, ranks",
        group="doctor", shorthand=("json",)),
    "advise": Verb(
        "outrider.launch.advise:advise",
        "predict the gain of more training text from pilot runs on parts of it", group="advise",
        explains=True),
    "chat": Verb(
        "outrider.eval.chat:chat",
        "chat with the target and a drafter: source of each token, tau and tokens/s",
        root="eval", files=INPUTS, uses=("eval.drafter", "eval.max_new_tokens", "decode")),
    "serve": Verb(
        "outrider.eval.serve.command:serve",
        "serve the target and a drafter by OpenAI's API, to try them from an app",
        root="eval", group="serve", shorthand=("host", "port"), files=INPUTS,
        uses=("eval.drafter", "eval.max_new_tokens", "decode")),
    "plan": Verb(
        "outrider.eval.plan.command:plan",
        "predict speedup over depth, width, nodes, batch and context, here or on a GPU",
        root="eval", group="plan", files=PROMPTS, uses=(*PROMPTS, *SAMPLING), explains=True),
    "publish": Verb(
        "outrider.eval.publish.run:publish",
        "export a drafter to an engine's format, verify it, write a card, upload it",
        root="eval", group="publish", shorthand=("format", "engine", "engine.python"),
        files=PROMPTS, uses=PROMPTS),
    "ranks": Verb(
        "outrider.eval.ranks:ranks",
        "measure how often each rank of the drafter's choices is accepted (ranks.json)",
        root="eval", files=PROMPTS, uses=PROMPTS, explains=True),
    "report": Verb(
        "outrider.eval.page.build:report",
        "write a page about a run, a search or a folder of runs: report.html, report.md",
        root="report", takes="report"),
    "watch": Verb(
        "outrider.launch.watch:watch", "show loss and acceptance of a run while it trains",
        root="watch", takes="words"),
    "compare": Verb(
        "outrider.launch.compare:compare", "compare finished runs in one table",
        root="", takes="words", explains=True),
    "completion": Verb(
        "outrider.launch.completion:completion", "print the completion script of a shell",
        root="", takes="words"),
    "bench": Verb("", "run a benchmark on this machine", root="", takes="words"),
}  # fmt: skip
BENCHES = {
    name: Verb(f"outrider.launch.bench.{target}", line, root="", takes="words")
    for name, target, line in (
        ("train-step", "train_step:train_step", "time and peak memory of one optimizer step"),
        ("lengths", "lengths:lengths", "memory and time of a training step on rows up to 32k"),
        ("long-prompts", "long_prompts:long_prompts", "memory and time of reading a long prompt"),
        ("families", "families:families", "what works with the targets of every family"),
        ("replay", "replay:replay", "two ways to drop rows from recurrent layers, and the speed"),
        ("rounds", "rounds:rounds", "time of each part of a decoding round"),
        ("batch", "batch:batch", "speed of draft shapes and decode=auto, by batch and text"),
        ("turns", "turns:turns", "speed of several drafters of one target, by turns"),
        ("drafting", "drafting:drafting", "time of a draft by context length, for every drafter"),
        ("launches", "equality:launches", "losses and weights after 1, 2, 4 ranks, DDP and ZeRO"),
        ("soak", "soak:soak", "inject faults into a run of several ranks, compare bit by bit"),
        ("storage", "storage:storage", "recording formats: bytes per token against acceptance"),
        ("context", "context:context", "sparse_kv by context, batch and budget: where it pays"),
        ("assisted", "assisted:assisted", "speed against transformers' assisted generation"),
        ("trainers", "trainers:trainers", "acceptance of EAGLE-3 by Outrider and by speculators"),
    )
}
