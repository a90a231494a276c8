"""`outrider bench storage`: what small traces cost a drafter.

The same text is recorded in several ways, the same recipe is trained from each recording for the
same number of steps, and each drafter decodes the same prompts. A setting is written as its parts:

    online                 the target runs in every step, nothing is recorded
    bf16                   16 bits, last states: the full recording, which the others are held
                           against
    int8-top16             8 bits, 16 tokens of the teacher
    coded0.5-top16         steps of 0.5 coded by frequency, 16 tokens of the teacher

What is lost is relative to bf16, in the acceptance length that held-out text foresees. Bytes are
those of all files, per token of the text.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import write_json
from outrider.launch.bench.train_step import machine, read_options

KNOWN = {
    "experiment": "bakeoff_smollm2",
    "drafter": "eagle3",
    "settings": "bf16,int8,fp8,int4,coded0.5-top16,coded0.7-top16,coded0.7-top32,online",
    "steps": 150,
    "prompts": 8,
    "new_tokens": 64,
    "folder": "runs/storage",
    "out": "",
}
PART = re.compile(
    r"online|(?P<states>same|bf16|fp8|int8|int4|coded(?=\d))(?P<step>(?<=coded)\d\.\d+)?"
    r"(-top(?P<top>\d+))?"
)
MEASURED = ("bytes", "accept_length", "accept_length_sampling", "tau", "step_s")


def storage(words: list[str]) -> int:
    """The bench."""
    options = read_options(words, KNOWN, _read)
    console, rows = Console(), dict[str, dict[str, float]]()
    for setting in options["settings"].split(","):
        with console.status(f"{setting}: recording, training, decoding"):
            rows[setting] = _measure(setting, options)
        said = ", ".join(f"{name} {rows[setting][name]:.4g}" for name in MEASURED)
        console.print(f"{setting}: {said}", highlight=False, soft_wrap=True)
    console.print(_table(rows))
    console.print(machine())
    if options["out"]:
        facts = {"machine": machine(), "setting": options, "rows": rows}
        write_json(Path(options["out"]), facts)
    return 0


def _read(key: str, value: str, default: Any) -> Any:
    if isinstance(default, int):
        if not value.isdecimal() or (key == "steps" and not int(value)):
            raise ConfigError(key, value, "A whole number is expected.", f"Like {key}={default}.")
        return int(value)
    bad = [] if key != "settings" else [s for s in value.split(",") if not PART.fullmatch(s)]
    if bad:
        why = f"{bad[0]} is no setting."
        raise ConfigError(key, value, why, "Like bf16, fp8, int8-top16, coded0.5-top16, online")
    return value


def _measure(setting: str, options: dict[str, Any]) -> dict[str, float]:
    """Bytes per token, acceptance foreseen on held-out text, tau, seconds per step."""
    run = Path(options["folder"]) / setting
    words = [
        f"experiment={options['experiment']}", f"drafter={options['drafter']}", f"run.dir={run}",
        "train.max_minutes=null", f"train.max_steps={options['steps']}", "train.quick_eval=false",
        *_words(setting),
    ]  # fmt: skip
    _outrider("train", *words)
    trained = json.loads((run / "training.json").read_text())
    held = trained["held_out"]
    return {
        "bytes": _bytes(run), "accept_length": held["accept_length"],
        "accept_length_sampling": held["accept_length_sampling"], "tau": _tau(run, options),
        "step_s": trained["phases"]["steps"] / trained["steps"],
    }  # fmt: skip


def _tau(run: Path, options: dict[str, Any]) -> float:
    """Of a greedy chain over some prompts; 0 where none are asked for."""
    if not options["prompts"]:
        return 0.0
    few = f"eval.limit={options['prompts']}", f"eval.max_new_tokens={options['new_tokens']}"
    _outrider("eval", f"run.dir={run}", "decode=chain", *few, "eval.baseline=false")
    return float(json.loads((run / "eval" / "eval.json").read_text())["tau"])


def _words(setting: str) -> list[str]:
    if setting == "online":
        return ["data.mode=online"]
    match = PART.fullmatch(setting)
    assert match is not None, "checked by _read"
    step = [f"record.step={match['step']}"] if match["step"] else []
    top = f"record.top={match['top'] or 0}"
    return ["data.mode=recorded", f"record.states={match['states']}", *step, top]


def _outrider(*words: str) -> None:
    command = [sys.executable, "-m", "outrider.launch.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RunError(f"outrider {' '.join(words)} failed: {said[-2000:]}", "See what it says.")


def _bytes(run: Path) -> float:
    """Per token, of the recording that the run was trained from; 0 for none."""
    folder = json.loads((run / "manifest.json").read_text())["data"].get("traces")
    if folder is None:
        return 0.0
    facts = [json.loads(file.read_text()) for file in Path(folder).glob("shard-*.json")]
    return float(sum(f["bytes"] for f in facts) / sum(f["tokens"] for f in facts))


def _table(rows: dict[str, dict[str, float]]) -> Table:
    table = Table(title="what small traces cost")
    for name in ("setting", "bytes/token", "foreseen T=0", "T=1", "tau", "lost", "s/step"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    full = rows.get("bf16")
    for setting, row in rows.items():
        lost = "" if full is None else f"{1 - row['accept_length'] / full['accept_length']:+.1%}"
        table.add_row(
            setting, f"{row['bytes']:.0f}", f"{row['accept_length']:.3f}",
            f"{row['accept_length_sampling']:.3f}", f"{row['tau']:.3f}", lost,
            f"{row['step_s']:.2f}",
        )  # fmt: skip
    return table
