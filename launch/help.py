"""What `--help` prints: verbs, and every configuration key with its default and meaning.

Nothing is written twice: meanings and intervals are read from the dataclasses of `config.py`,
a drafter's meanings from the comments of its yaml, defaults and alternatives from `conf/`.
No model code is imported, so help is quick.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.conf.clusters import ClusterConfig
from outrider.conf.compose import CONF, choices, defaults_of, groups, values_of
from outrider.conf.fields import words
from outrider.conf.sweeps import SweepConfig
from outrider.train.doctoring import AdviseConfig, DoctorConfig
from outrider.train.gpus import MemoryConfig
from outrider.train.planning import PlanConfig
from outrider.train.publishing import PublishConfig
from outrider.train.settings import GROUPS, MAY_CHANGE

# groups of one verb (of `train -m`, sweep)
OWN: dict[str, type] = {
    "plan": PlanConfig,
    "cluster": ClusterConfig,
    "memory": MemoryConfig,
    "publish": PublishConfig,
    "sweep": SweepConfig,
    "doctor": DoctorConfig,
    "advise": AdviseConfig,
}
EXAMPLES = {
    "train": (
        ("accelerate launch train.py drafter=eagle3", "the main job, on the embedded target"),
        ("accelerate launch train.py experiment=smollm2", "a real instruct model on two cores"),
        ("accelerate launch train.py target=hf target.path=Qwen/Qwen3-8B", "any causal model"),
        ("accelerate launch --num_processes 8 train.py launch=zero2 train.lr=1e-4", "a GPU node"),
        ("python train.py -m drafter=eagle,medusa experiment=bakeoff_tiny", "two runs and a table"),
    ),
    "eval": (
        ("python eval.py run.dir=runs/eagle3-tiny", "a chain, greedy, the embedded prompts"),
        ("python eval.py run.dir=runs/eagle3-tiny decode=dynamic_tree decode.nodes=16", ""),
        ("python eval.py run.dir=runs/eagle3-tiny decode.temperature=1 eval.out=sampled", ""),
        ("python eval.py run.dir=runs/eagle3-tiny eval.prompts=mine.jsonl eval.limit=8", ""),
        (
            "outrider eval drafter=me/draft target=Qwen/Qwen3-8B run.dir=runs/draft",
            "a published one",
        ),
    ),
    "doctor": (
        ("outrider doctor drafter=eagle3", "the embedded target"),
        ("outrider doctor target=hf target.path=Qwen/Qwen3-8B data=self", "before a long run"),
        ("outrider doctor drafter=hass json=doctor.json", "for programs; exit code 1: wrong"),
        ("outrider doctor target=smollm2 doctor.measure=false", "sums alone, no trial steps"),
    ),
    "advise": (
        ("outrider advise drafter=eagle3", "pilots on 1, 2 and 4 % of the embedded text"),
        ("outrider advise advise.shares=[0.05,0.1,0.2] advise.steps=300", "surer, and dearer"),
    ),
    "report": (
        ("outrider report run.dir=runs/eagle3-tiny", "a run"),
        ("outrider report run.dir=runs/eagle3-tiny report.measure=true", "and its calibration"),
        ("outrider report run.dir=runs/search/eagle3", "a search"),
        ("outrider report run.dir=runs/bakeoff-tiny", "all runs that lie there"),
    ),
}


class Key(NamedTuple):
    """One line of the reference: a key, what it means, what it may be."""

    name: str
    meaning: str
    allowed: str


def schema_keys(schema: type, prefix: str) -> Iterator[Key]:
    """The keys of a configuration dataclass, nested ones included, in their order."""
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        nested = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        name = f"{prefix}.{field.name}"
        if isinstance(nested, type):
            yield from schema_keys(nested, name)
            continue
        literal = get_origin(hints[field.name]) is Literal and field.name != "name"
        within = field.metadata.get("within", "")
        allowed = ", ".join(map(str, kinds)) if literal else words(within) if within else ""
        yield Key(name, field.metadata["help"], allowed)


def yaml_keys(group: str, choice: str) -> Iterator[Key]:
    """The keys of one yaml file; the comment behind a value is its meaning."""
    for line in (CONF / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines():
        match = re.match(r"([a-z]\w*):[^#]*(?:# (.*))?", line)
        if match:
            yield Key(f"{group}.{match[1]}", match[2] or "", "")


def group_keys(group: str, first: str | None = None) -> list[Key]:
    """All keys of a group over all its choices, each once, in the words of the choice `first`."""
    if group in GROUPS:
        return list(schema_keys(GROUPS[group], group))
    ranked = sorted(choices(group), key=lambda choice: choice != first)
    found = [key for choice in ranked for key in yaml_keys(group, choice)]
    return list({key.name: key for key in reversed(found)}.values())[::-1]


def defaults(group: str, first: str | None) -> dict[str, str]:
    """Each key's default: that of the choice `first`, then of the choices that differ.

    defaults("data", "tiny")["data.max_length"] == "256; jsonl, self: 1024"
    """
    by_choice = {choice: values_of(group, choice) for choice in choices(group)}
    names = dict.fromkeys(name for values in by_choice.values() for name in values)
    return {name: _differing(name, by_choice, first) for name in names}


def _differing(name: str, by_choice: Mapping[str, Mapping[str, Any]], first: str | None) -> str:
    if name.endswith(".name"):
        return first or ""
    having: dict[str, list[str]] = {}
    for choice in sorted(by_choice, key=lambda c: c != first):
        if name in by_choice[choice]:
            having.setdefault(show(by_choice[choice][name]), []).append(choice)
    return "; ".join(v if first in c else f"{', '.join(c)}: {v}" for v, c in having.items())


def show(value: Any) -> str:
    """A value as one would type it on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def overview(console: Console, verbs: Mapping[str, str]) -> None:
    """`outrider --help`: the verbs, a line each."""
    console.print("Draft models for speculative decoding, trained and proved.\n", highlight=False)
    console.print("outrider VERB [key=value ...]\n", highlight=False, markup=False)
    table = Table.grid(padding=(0, 2))
    for verb, line in verbs.items():
        table.add_row(Text(f"  {verb}", style="bold"), line)
    console.print(table)
    console.print("\noutrider VERB --help shows what a verb takes.", highlight=False)


def reference(console: Console, program: str, line: str, root: str, own: str | None = None) -> None:
    """`outrider train --help`: every key, its default and meaning; the choices; examples.

    Args:
        own: a group that belongs to this verb alone; it comes first.
    """
    console.print(f"{program}: {line}\n", highlight=False, markup=False)
    cfg = " [--cfg]" if own is None else ""  # a group of one verb is no part of a configuration
    console.print(f"{program} [group=choice ...] [key=value ...]{cfg} [--help]", markup=False)
    if cfg:
        console.print("--cfg prints the configuration that would run, checked, and stops.")
    console.print()
    if own is not None:
        console.print(Text(own, style="bold"))
        console.print(_table(list(schema_keys(OWN[own], own)), defaults(own, "default")))
    known = defaults_of(root)
    if root == "eval":
        known |= {"run.dir": "(needed)", **dict.fromkeys(MAY_CHANGE, "as trained")}
    if root == "report":
        known |= {"run.dir": "(needed)", "target.path": "as trained"}
    started = groups(root)
    for group in dict.fromkeys(["run", "target", "data", *started]):
        if group == "experiment":
            continue
        of_file = defaults(group, started[group]) if group in started else {}
        keys = group_keys(group, started.get(group))
        rows = [key for key in keys if key.name in known or key.name in of_file]
        console.print(_title(group, started))
        console.print(_table(rows, {name: show(known[name]) for name in known} | of_file))
    if "experiment" in started:
        console.print(_title("experiment", started), Text("  presets that cross groups\n"))
    _examples(console, own if own is not None and own in EXAMPLES else root)


def _title(group: str, started: Mapping[str, str | None]) -> Text:
    if group not in started:
        return Text(group, style="bold")
    text = Text.assemble((group, "bold"), f" = {' | '.join(choices(group))}")
    return text.append(f"   (default {started[group]})") if started[group] else text


def _table(rows: list[Key], values: Mapping[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, min_width=28)
    table.add_column(min_width=14, max_width=26, overflow="fold")
    table.add_column()
    for key in rows:
        allowed = f" ({key.allowed})" if key.allowed else ""
        meaning = Text(key.meaning).append(allowed, style="dim")
        table.add_row(Text(f"  {key.name}"), Text(values.get(key.name, "")), meaning)
    table.add_row()
    return table


def _examples(console: Console, of: str) -> None:
    console.print(Text("examples", style="bold"))
    for command, meaning in EXAMPLES[of]:
        note = f"  # {meaning}" if meaning else ""
        console.print(Text(f"  {command}").append(note, style="dim"), soft_wrap=True)
