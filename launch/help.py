"""`--help`: the verbs, and every configuration key with its default and meaning.

Meanings and intervals come from the dataclasses of `conf/`, those of a drafter from the comments of
its yaml, defaults and choices from the yaml files. No model code is imported, so help is quick.
"""

import dataclasses
import importlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

from rich.table import Table
from rich.text import Text

from outrider.conf.command_settings import SERVE_NOTE, VERB_GROUPS
from outrider.conf.compose import ADDED, CONF, choices, default_values, flatten, groups, trainable
from outrider.conf.console import Console
from outrider.conf.fields import describe_interval, leaf_fields
from outrider.conf.schema import GROUPS
from outrider.conf.short_forms import OPTIMIZER, SHORT_FORMS
from outrider.launch.verbs import VERBS, Verb
from outrider.train.settings import CHANGEABLE_KEYS

WIDE = 100  # columns: into a file or pipe, and where columns of all groups are aligned
EXPLAIN = "--explain prints every table, and the definition of every number."
NOTES = {"serve": SERVE_NOTE}
EXAMPLES = {
    "train": """
  outrider train drafter=eagle3  # the embedded target
  outrider train experiment=smollm2  # a real instruct model on two cores
  outrider train target=Qwen/Qwen3-8B data=chats.jsonl  # any causal model
  accelerate launch --num_processes 8 -m outrider train launch=zero2 train.lr=1e-4  # a GPU node
  outrider train drafter=draft_verify target=smollm2  # a search instead of a training
  outrider train -m drafter=eagle,medusa experiment=bakeoff_tiny  # two runs, compared""",
    "eval": """
  outrider eval run.dir=runs/eagle3-tiny  # a chain, greedy, the embedded prompts
  outrider eval run.dir=runs/eagle3-tiny decode=dynamic_tree decode.nodes=16
  outrider eval run.dir=runs/eagle3-tiny decode.temperature=1 eval.out=sampled
  outrider eval run.dir=runs/eagle3-tiny eval.prompts=mine.jsonl eval.limit=8
  outrider eval drafter=me/draft target=Qwen/Qwen3-8B run.dir=runs/draft  # a published drafter
  outrider eval drafter=suffix target=smollm2 run.dir=runs/suffix  # one without weights""",
    "chat": """
  outrider chat run.dir=runs/eagle3-tiny  # a run
  outrider chat drafter=suffix target=smollm2  # a drafter without weights; no run is needed
  outrider chat drafter=me/draft target=Qwen/Qwen3-8B decode.temperature=0.7  # a published one""",
    "serve": """
  outrider serve run.dir=runs/eagle3-tiny  # a run, at http://127.0.0.1:8000/v1
  outrider serve drafter=me/draft target=Qwen/Qwen3-8B port=8001 decode=dynamic_tree
  outrider serve drafter=suffix target=smollm2 serve.batch=4 decode.temperature=0.7""",
    "plan": """
  outrider plan run.dir=runs/eagle3-tiny  # this machine
  outrider plan run.dir=runs/eagle3-tiny plan.machine=h100 plan.batches=[1,8]  # a GPU""",
    "publish": """
  outrider publish run.dir=runs/eagle3-tiny format=vllm  # into the run's folder
  outrider publish run.dir=runs/eagle3-tiny format=vllm engine=vllm  # decoded by the engine, too
  outrider publish run.dir=runs/eagle3-tiny publish.repo=me/draft  # uploaded""",
    "ranks": """
  outrider ranks run.dir=runs/eagle3-tiny
  outrider ranks run.dir=runs/eagle3-tiny --explain  # every table and tree""",
    "launch": """
  outrider launch cluster.gpus=8 launch=zero2 train.batch_tokens=65536  # one machine
  outrider launch cluster.hosts=hostfile launch=zero2 train.batch_tokens=65536  # several
  outrider launch cluster.gpus=8 cluster.by=slurm experiment=qwen3_8b_eagle3  # a script""",
    "memory": """
  outrider memory target=Qwen/Qwen3-8B train.batch_tokens=65536 launch=zero2  # on 8 H100
  outrider memory memory.model=70b memory.gpu=h200 launch.precision=bf16  # without a target
  outrider memory experiment=qwen3_8b_eagle3 --explain  # with the definition of every part""",
    "prepare": """
  outrider prepare data=self data.generate.samples=2000  # the embedded target's answers
  outrider prepare target=Qwen/Qwen3-8B data=self data.path=prompts.jsonl  # to your prompts""",
    "record": """
  outrider record data.traces=traces/tiny  # the embedded target and text
  outrider record target=Qwen/Qwen3-8B data=chats.jsonl data.traces=traces/chats record=small
  outrider train target=Qwen/Qwen3-8B data=chats.jsonl data.traces=traces/chats  # from it""",
    "compare": """
  outrider compare runs/a runs/b  # a row per report
  outrider compare runs/bakeoff-tiny/* to=runs/bakeoff-tiny  # and a page""",
    "completion": """
  outrider completion bash > ~/.local/share/bash-completion/completions/outrider  # for good
  source <(outrider completion zsh)  # in ~/.zshrc, after compinit""",
    "doctor": """
  outrider doctor drafter=eagle3  # the embedded target
  outrider doctor target=Qwen/Qwen3-8B data=self  # before a long run
  outrider doctor drafter=hass json=doctor.json  # for scripts; exit code 1: a failure
  outrider doctor target=smollm2 doctor.measure=false  # estimates only, no trial steps""",
    "advise": """
  outrider advise drafter=eagle3  # pilots on 1, 2 and 4 % of the embedded text
  outrider advise advise.shares=[0.05,0.1,0.2] advise.steps=300  # more exact, slower""",
    "watch": """
  outrider watch run.dir=runs/eagle3-tiny  # in another terminal, while it trains""",
    "report": """
  outrider report run.dir=runs/eagle3-tiny  # a run
  outrider report run.dir=runs/eagle3-tiny report.measure=true  # with calibration
  outrider report run.dir=runs/search/eagle3  # a search
  outrider report run.dir=runs/bakeoff-tiny  # all runs of a folder""",
}
USAGE = {  # words of the verbs without keys, and their meaning
    "compare": (
        "RUN [RUN ...] [to=FOLDER]",
        "RUN: run.dir of a finished run; to=FOLDER: also write report.html and report.md",
    ),
    "completion": (
        "bash|zsh",
        "It completes verbs, groups, keys, drafters and other choices, values, and file names.",
    ),
}


class KeyHelp(NamedTuple):
    """A row of the reference: a key, its meaning, its choices or interval."""

    name: str
    meaning: str
    allowed: str = ""


EVERYDAY = {  # the keys of a first `--help`, by verb or root; a group is shown with its choices
    "train": (
        "target", "data", "drafter", "experiment", "run.dir", "data.max_length", "data.max_samples",
        "drafter.depths", "train.max_steps", "train.lr", "train.batch_tokens", "launch",
        "launch.precision", "decode", "eval.prompts",
    ),
    "eval": (
        "run.dir", "eval.drafter", "target.path", "decode", "decode.depth", "decode.nodes",
        "decode.temperature", "decode.top_p", "decode.verify", "eval.prompts", "eval.limit",
        "eval.max_new_tokens", "eval.grid", "eval.repeats", "eval.out",
    ),
    "chat": (
        "run.dir", "eval.drafter", "target.path", "run.seed", "eval.max_new_tokens", "decode",
        "decode.depth", "decode.width", "decode.nodes", "decode.temperature", "decode.top_p",
        "decode.top_k", "decode.min_p", "decode.repetition_penalty", "decode.verify",
    ),
    "serve": (
        "run.dir", "eval.drafter", "target.path", "eval.max_new_tokens", "decode", "decode.depth",
        "decode.width", "decode.nodes", "decode.temperature", "decode.top_p", "decode.verify",
    ),
}  # fmt: skip


def schema_keys(schema: type, prefix: str) -> Iterator[KeyHelp]:
    """Yield the keys of a configuration dataclass, nested ones included, in their order."""
    for key, kind, metadata in leaf_fields(schema, prefix):
        allowed = describe_interval(metadata["within"]) if metadata["within"] else ""
        if get_origin(kind) is Literal and not key.endswith(".name"):
            allowed = ", ".join(map(str, get_args(kind)))
        yield KeyHelp(key, metadata["help"], allowed)


def yaml_keys(group: str, choice: str) -> Iterator[KeyHelp]:
    """Yield the keys of a yaml file, nested ones too; the comment after a value is its meaning."""
    parent = group
    if added := ADDED.get(f"{group}/{choice}"):
        yield from (KeyHelp(key, meaning) for key, meaning in added.meanings.items())
        return
    for line in (CONF / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines():
        match = re.match(r"(  )?([a-z]\w*):([^#]*)(?:# (.*))?", line)
        if match and (match[1] or match[3].strip()):
            yield KeyHelp(f"{parent if match[1] else group}.{match[2]}", match[4] or "")
        elif match:
            parent = f"{group}.{match[2]}"


def group_keys(group: str, first: str | None = None) -> list[KeyHelp]:
    """Return all keys of a group, each once; meanings of the choice `first` win."""
    if group in GROUPS:
        return list(schema_keys(GROUPS[group], group))
    ordered = sorted(trainable(group), key=lambda choice: choice != first)
    keys = dict[str, KeyHelp]()
    for choice in ordered:
        for key in yaml_keys(group, choice):
            keys.setdefault(key.name, key)
    return list(keys.values())


def defaults(group: str, first: str | None) -> dict[str, str]:
    """Return each key's default: that of the choice `first`, then of choices that differ.

    defaults("data", "tiny")["data.max_length"] == "256; jsonl, self: 1024"
    """
    by_name = defaultdict[str, dict[str, list[str]]](dict)  # the choices with each value
    for choice in sorted(trainable(group), key=lambda choice: choice != first):
        for name, value in default_values(f"{group}/{choice}").items():
            by_name[name].setdefault(show(value), []).append(choice)
    for choice in choices(OPTIMIZER) if group == "train" else []:
        for name, value in default_values(f"{OPTIMIZER}/{choice}").items():
            if not name.endswith(".name"):
                by_name[name].setdefault(show(value), []).append(choice)
    texts = {
        name: "; ".join(v if first in c else f"{', '.join(c)}: {v}" for v, c in by_value.items())
        for name, by_value in by_name.items()
    }
    return texts | ({f"{group}.name": first or ""} if f"{group}.name" in texts else {})


def show(value: Any) -> str:
    """Return a value as written on the command line; ${.depth}, a key of its group, as depth."""
    return re.sub(r"^\$\{\.(\w+)\}$", r"\1", value) if isinstance(value, str) else json.dumps(value)


def overview() -> int:
    console = _console()
    console.print("Train and measure draft models for speculative decoding.\n")
    console.print("outrider VERB [key=value ...]\n")
    table = Table.grid(padding=(0, 2))
    for name, verb in VERBS.items():
        table.add_row(Text(f"  {name}", style="bold"), verb.line)
    console.print(table)
    console.print("\noutrider VERB --help lists the keys of a verb.")
    return 0


def benchmark(program: str, bench: Verb) -> int:
    """Print `outrider bench NAME --help`: the options of a benchmark."""
    options = importlib.import_module(bench.target.partition(":")[0]).Options
    values = flatten(dataclasses.asdict(options()))
    console = _console()
    console.print(f"{program} [key=value ...]: {bench.line}\n")
    _print_table(console, list(schema_keys(options, "")), {key: show(v) for key, v in values})
    return 0


def reference(program: str, verb: Verb, own: str = "", everything: bool = False) -> int:
    """Print `outrider VERB --help`: keys with default and meaning, and examples.

    Args:
        own: group that belongs to this verb alone, listed first; "": none.
        everything: every key, by group (`--help all`); otherwise those of EVERYDAY, if any.
    """
    console = _console()
    root, name = verb.root, program.rpartition(" ")[2]
    console.print(f"{program}: {verb.line}\n")
    if name in NOTES:
        console.print(f"{NOTES[name]}\n")
    cfg = "" if own else " [--cfg]"  # a verb's own group is not part of a configuration
    options = f"[--config FILE]{cfg} [--help [all]]"
    usage = f"{program} [group=choice ...] [key=value ...] {options}"
    console.print(usage)
    if root == "train":
        console.print("--config reads keys from a yaml file; those of the command line win.")
    if cfg:
        console.print("--cfg prints the validated configuration and stops.")
    if verb.explains:
        console.print(EXPLAIN)
    console.print()
    if own:
        console.print(Text(own, style="bold"))
        _print_table(console, list(schema_keys(VERB_GROUPS[own], own)), defaults(own, "default"))
    keys = EVERYDAY.get(name, EVERYDAY.get(root, ()))
    if everything or not keys:
        _print_groups(console, verb, _defaults_of(root, name))
    else:
        _print_everyday(console, root, filter(verb.uses_key, keys), _defaults_of(root, name))
        console.print(f"{program} --help all lists every key.\n")
    console.print(Text("examples", style="bold"), end="")
    examples = Text(EXAMPLES[name if name in EXAMPLES else root])
    examples.highlight_regex("  # .*", "dim")
    console.print(examples, soft_wrap=True)
    return 0


def _defaults_of(root: str, name: str) -> dict[str, str]:
    """Return the default of every key of a verb, as text."""
    values = {name: show(value) for name, value in default_values(root).items()}
    if root == "eval":
        values |= {"run.dir": "(required)", **dict.fromkeys(CHANGEABLE_KEYS, "as trained")}
    if name in ("chat", "serve"):
        values["run.dir"] = "(this, or drafter=)"
    if root in ("report", "watch"):
        values["run.dir"] = "(required)"
    if root == "report":
        values["target.path"] = "as trained"
    return values


def _print_everyday(
    console: Console, root: str, keys: Iterable[str], values: dict[str, str]
) -> None:
    """Print some keys of a root; a group is shown with its choices."""
    started, rows = groups(root), list[KeyHelp]()
    for name in keys:
        group = name.partition(".")[0]
        if group == name:
            path = ", a path or a name" if group in SHORT_FORMS else ""
            rows.append(KeyHelp(name, f"{', '.join(trainable(group))}{path}"))
            values[name] = started[name] or ""
        else:
            rows += [key for key in group_keys(group, started.get(group)) if key.name == name]
            values |= defaults(group, started[group]) if group in started else {}
    _print_table(console, rows, values)


def _print_groups(console: Console, verb: Verb, values: dict[str, str]) -> None:
    """Print every key that a verb uses, by group."""
    started = groups(verb.root)
    for group in dict.fromkeys(["run", "target", "data", *started]):
        if group == "experiment":
            continue
        of_group = defaults(group, started[group]) if group in started else {}
        keys = group_keys(group, started.get(group))
        rows = [key for key in keys if key.name in values or key.name in of_group]
        rows = [key for key in rows if verb.uses_key(key.name)]
        if not rows:
            continue
        console.print(_title(group, started if verb.uses_key(group) else {}))
        _print_table(console, rows, values | of_group)
    if "experiment" in started:
        console.print(_title("experiment", started), Text("  presets that cross groups\n"))


def _console() -> Console:
    """Return a console of the terminal's width or COLUMNS; else WIDE, for a file or pipe."""
    columns = os.environ.get("COLUMNS", "")
    known = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    return Console(width=None if known else WIDE)


def _title(group: str, started: Mapping[str, str | None]) -> Text:
    if group not in started:
        return Text(group, style="bold")
    text = Text.assemble((group, "bold"), f" = {' | '.join(trainable(group))}")
    return text.append(f"   (default {started[group]})") if started[group] else text


def _print_table(console: Console, rows: list[KeyHelp], values: Mapping[str, str]) -> None:
    wide = console.width >= WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, min_width=28 if wide else None)
    table.add_column(min_width=14 if wide else None, max_width=26 if wide else 18, overflow="fold")
    table.add_column()
    for key in rows:
        allowed = f" ({key.allowed})" if key.allowed else ""
        meaning = Text(key.meaning).append(allowed, style="dim")
        table.add_row(Text(f"  {key.name}"), Text(values.get(key.name, "")), meaning)
    table.add_row()
    console.print(table)
