"""`outrider bench storage`: acceptance of drafters that train from smaller recorded features.

One text is recorded in several ways, one recipe is trained from each recording, and each drafter
decodes the same prompts. A setting is written as its parts:

    online             the target runs in every step, nothing is recorded
    bf16               record.states=bf16: the full recording, the baseline of the others
    int8-top16         8 bits, the teacher's 16 most probable tokens
    coded0.5-top16     entropy-coded in steps of 0.5, 16 tokens of the teacher

The loss is relative to bf16, in the acceptance length predicted on held-out text. Bytes are those
of all files, per token.
"""

import dataclasses
import re
from pathlib import Path
from typing import get_args, get_type_hints

from rich.table import Table

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.json_shapes import read_object
from outrider.conf.options import parse_words
from outrider.conf.schema import RecordConfig
from outrider.launch.bench.common import number_table, report, run_outrider

STATES = [name for name in get_args(get_type_hints(RecordConfig)["states"]) if name != "coded"]
SETTING = re.compile(
    rf"online|(?P<states>{'|'.join(STATES)}|coded(?=\d))(?P<step>(?<=coded)\d\.\d+)?"
    r"(-top(?P<top>\d+))?"
)
AGAIN = "Run the benchmark again in another folder."
TRAINING = {
    "steps": int, "phases": {"steps": float},
    "held_out": {"accept_length, accept_length_sampling": float},
}  # fmt: skip
MANIFEST, SHARD = {"data": {"traces?": (str, None)}}, {"bytes, tokens": int}
MEASURED = ("bytes", "accept_length", "accept_length_sampling", "tau", "step_s")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `outrider bench storage`."""

    experiment: str = option("bakeoff_smollm2", "experiment of conf/ that all runs share")
    drafter: str = option("eagle3", "which drafter is trained")
    settings: tuple[str, ...] = option(
        ("bf16", "int8", "coded0.5-top16", "coded0.7-top16", "coded0.7-top32", "online"),
        "settings to compare, such as bf16, int8-top16, coded0.5-top16, online",
    )
    steps: int = option(150, "optimizer steps of each run", "[1, inf)")
    prompts: int = option(8, "prompts to decode; 0: none", "[0, inf)")
    new_tokens: int = option(64, "tokens of each answer", "[0, 4194304]")
    folder: str = option("runs/storage", "folder of the runs")
    out: str = option("", "JSON file for the result")

    def __post_init__(self) -> None:
        for setting in self.settings:
            if not SETTING.fullmatch(setting):
                fix = "Examples: bf16, int8-top16, coded0.5-top16, online."
                raise ConfigError("settings", setting, "There is no such setting.", fix)


def storage(words: list[str]) -> int:
    options = parse_words(Options, words)
    console, rows = Console(), dict[str, dict[str, float]]()
    for setting in options.settings:
        with console.status(f"{setting}: recording, training, decoding"):
            rows[setting] = _measure(setting, options)
        figures = ", ".join(f"{name} {rows[setting][name]:.4g}" for name in MEASURED)
        console.print(f"{setting}: {figures}", soft_wrap=True)
    result = {"setting": dataclasses.asdict(options), "rows": rows}
    report(console, _table(rows), options.out, result)
    return 0


def _measure(setting: str, options: Options) -> dict[str, float]:
    run = Path(options.folder) / setting
    run_outrider(
        "train", f"experiment={options.experiment}", f"drafter={options.drafter}",
        f"run.dir={run}", "train.max_minutes=null", f"train.max_steps={options.steps}",
        "train.quick_eval=false", *overrides(setting),
    )  # fmt: skip
    tau = 0.0
    if options.prompts:
        limits = f"eval.limit={options.prompts}", f"eval.max_new_tokens={options.new_tokens}"
        run_outrider("eval", f"run.dir={run}", "decode=chain", *limits, "eval.baseline=false")
        tau = read_object(run / "eval" / "eval.json", AGAIN, {"tau": float})["tau"]
    summary = read_object(run / "training.json", AGAIN, TRAINING)
    held = summary["held_out"]
    return {
        "bytes": _bytes_per_token(run), "accept_length": held["accept_length"],
        "accept_length_sampling": held["accept_length_sampling"], "tau": tau,
        "step_s": summary["phases"]["steps"] / summary["steps"],
    }  # fmt: skip


def overrides(setting: str) -> list[str]:
    if setting == "online":
        return ["data.mode=online"]
    match = SETTING.fullmatch(setting)
    assert match is not None, "checked by Options"
    step = [f"record.step={match['step']}"] if match["step"] else []
    top = f"record.top={match['top'] or 0}"
    return ["data.mode=recorded", f"record.states={match['states']}", *step, top]


def _bytes_per_token(run: Path) -> float:
    """Return the size of the recording that the run was trained from; 0 without one."""
    folder = read_object(run / "manifest.json", AGAIN, MANIFEST)["data"].get("traces")
    if folder is None:
        return 0.0
    shards = [read_object(file, AGAIN, SHARD) for file in Path(folder).glob("shard-*.json")]
    return float(sum(s["bytes"] for s in shards) / sum(s["tokens"] for s in shards))


def _table(rows: dict[str, dict[str, float]]) -> Table:
    head = ("setting", "bytes/token", "predicted T=0", "T=1", "tau", "loss", "s/step")
    depths = "predicted for drafter.depths tokens, tau of decode.depth"
    table = number_table(f"cost of smaller recordings; {depths}", head, ("setting",))
    full = rows.get("bf16")
    for setting, row in rows.items():
        loss = "" if full is None else f"{1 - row['accept_length'] / full['accept_length']:+.1%}"
        table.add_row(
            setting, f"{row['bytes']:.0f}", f"{row['accept_length']:.3f}",
            f"{row['accept_length_sampling']:.3f}", f"{row['tau']:.3f}", loss,
            f"{row['step_s']:.2f}",
        )  # fmt: skip
    return table
