"""Decode with the engine itself: tokens and steps must be those of Outrider's decoder.

A script of `engines/` runs in the engine's own environment. Its request is

    {"target": folder or hub id, "drafter": folder, "method": the engine's name of the drafter,
     "device": "cpu", "prompts": [[ids]], "new_tokens": 32, "depth": 3, "stop_ids": [1]}

and its result {"engine": name and version, "answers": [{"ids": [], "steps": []}]}, where a step's
number is how many tokens it added. The first step of an answer adds one token; a later one adds
the accepted draft tokens and one more, unless the answer ends within them. The speculators library
does not decode: its result is {"engine": ..., "depths": 4, "difference": 1e-7}, of golden logits.
"""

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.conf.command_settings import PublishConfig
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import read_json, write_json
from outrider.eval.publish.engine_process import run_script, time_limit
from outrider.eval.publish.reference_outputs import TOLERANCE
from outrider.eval.publish.round_trip import DecodedAnswer, RoundTrip
from outrider.models.formats.external import Format
from outrider.models.formats.mtp_merge import merge_into_target
from outrider.models.target.load import LoadedTarget

SCRIPTS = Path(__file__).parent / "engines"
SERVES = {  # engine -> format -> drafter -> the engine's name of it
    "transformers": {"transformers": {"draft_lm": "assistant"}, "deepseek": {"mtp": "mtp"}},
    "speculators": {"speculators": {"eagle3": "eagle3"}},
    "openvino": {"sglang": {"eagle3": "eagle3"}},
    "llamacpp": {
        "vllm": {"eagle3": "DRAFT_EAGLE3"},
        "speculators": {"eagle3": "DRAFT_EAGLE3"},
        "transformers": {"draft_lm": "DRAFT_SIMPLE"},
    },
    "vllm": {
        "vllm": {"eagle3": "eagle3", "eagle": "eagle", "hass": "eagle", "medusa": "medusa"},
        "speculators": {"eagle3": "eagle3"},
        "transformers": {"draft_lm": "draft_model"},
    },
}
# engine -> settings of eagle3 that it does not read -> the value that it computes
COMPUTES: dict[str, dict[str, Any]] = {
    "llamacpp": {"feedback": "raw", "fc_norm": "none", "residual": "raw", "layers": 1},
    "openvino": {"feedback": "raw", "fc_norm": "none"},
}
FIX = "Nothing was published. Publish without engine=..., or report this with the run's config."


def method(engine: str, form: Format, drafter: str) -> str:
    """Return the engine's name of a drafter in a format, "" if it does not decode with it here."""
    return SERVES[engine].get(form.names[0], {}).get(drafter, "")


def check_settings(settings: PublishConfig, form: Format | None, drafter: str) -> None:
    """Raise ConfigError for an engine that is not installed, or cannot decode with the format."""
    engine = settings.engine
    if engine is None:
        return
    if form is not None and not method(engine, form, drafter):
        names = [name for name, kinds in SERVES[engine].items() if drafter in kinds]
        why = f"{engine} does not decode with {drafter} in format={form.names[0]}."
        fix = f"Use format={' or '.join(names)}." if names else "Choose another engine."
        raise ConfigError("publish.engine", engine, why, fix)
    if not Path(_python(settings)).is_file():
        why = f"{_python(settings)} does not exist."
        build = f"Build the environment: {install_commands(engine)}"
        fix = f"{build}\n  Or give engine.python=<its Python>."
        raise ConfigError("publish.engine_python", settings.engine_python, why, fix)


def check_drafter(settings: PublishConfig, cfg: Any) -> None:
    """Raise ConfigError if the engine would compute something else than the trained drafter."""
    engine = str(settings.engine)
    fixed = COMPUTES.get(engine, {}) if cfg.name == "eagle3" else {}
    for name, value in fixed.items():
        if (own := getattr(cfg, name)) != value:
            why = f"{engine} has no drafter.{name}={own}, with which this drafter was trained."
            fix = f"Train with drafter.{name}={value}, or serve it with vLLM."
            raise ConfigError("publish.engine", engine, why, fix)


def install_commands(engine: str) -> str:
    """Return the shell command that builds an engine's environment, as `make engines` does."""
    place, lists = f".engines/{engine}", [["-r", str(SCRIPTS / f"{engine}.txt")]]
    if (alone := SCRIPTS / f"{engine}-alone.txt").exists():
        lists.append(["--no-deps", "-r", str(alone)])
    commands = [["python3", "-m", "venv", place]]
    commands += [[f"{place}/bin/pip", "install", *words] for words in lists]
    return " && ".join(map(shlex.join, commands))


def _python(settings: PublishConfig) -> str:
    default = f".engines/{settings.engine}/bin/python"
    default = sys.executable if settings.engine == "transformers" else default
    return str(Path(settings.engine_python or default).expanduser().absolute())


def decode_and_compare(
    settings: PublishConfig, form: Format, trip: RoundTrip, folder: Path, loaded: LoadedTarget,
    note: Callable[[str], object],
) -> str:  # fmt: skip
    """Decode the prompts with the engine; return what was equal.

    Args:
        note: called with lines of progress.

    Raises:
        RunError: the engine fails or takes too long, or a token or step differs.
    """
    drafter: Any = trip.drafter
    name, stages = drafter.cfg.name, len(getattr(drafter, "stages", ()))
    engine, depth = str(settings.engine), stages or trip.depth
    if depth != trip.depth:  # one module, run in a loop
        trip = RoundTrip(trip.target, drafter, trip.prompts, trip.new_tokens, depth, trip.stops)
    with TemporaryDirectory() as place:
        start, target = time.monotonic(), Path(place) / "target"
        loaded.target.model.save_pretrained(target)
        loaded.tokenizer.save_pretrained(target)
        if name == "mtp":
            merge_into_target(folder, target, target := Path(place) / "merged")
        request = {
            "target": str(target), "drafter": str(folder.absolute()),
            "method": method(engine, form, name), "device": trip.target.device.type,
            "prompts": trip.prompts, "new_tokens": trip.new_tokens, "depth": depth,
            "stop_ids": sorted(trip.stops.ids),
        }  # fmt: skip
        limit = time_limit(trip.seconds + time.monotonic() - start)
        result = _run(_python(settings), engine, request, Path(place), limit, note)
    if engine == "speculators":
        return _compare_logits(result)
    equal = compare_steps([a for a in trip.expected if a.policy == "chain"], result)
    return f"{equal}, {trip.target.device.type.upper()}"


def _run(
    python: str, engine: str, request: dict[str, Any], place: Path, limit: float,
    note: Callable[[str], object],
) -> dict[str, Any]:  # fmt: skip
    """Run the engine's script, for at most `limit` seconds, and return its result."""
    write_json(place / "request.json", request)
    words = [python, str(SCRIPTS / f"run_{engine}.py")]
    words += [str(place / name) for name in ("request.json", "result.json")]
    own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "TOKENIZERS_PARALLELISM": "false"}
    run_script(engine, words, place / "log.txt", limit, note, own, FIX)
    return read_json(place / "result.json", FIX)


def _compare_logits(result: dict[str, Any]) -> str:
    """Return what is equal; the speculators library trains and does not decode."""
    what = f"golden logits of {result['depths']} depths differ by {result['difference']:.1g}"
    if not result["difference"] <= TOLERANCE:
        raise RunError(f"{result['engine']}: {what} of the largest value.", FIX)
    return f"{what} at most, {result['engine']}"


def compare_steps(expected: Sequence[DecodedAnswer], result: dict[str, Any]) -> str:
    """Return what is equal; a RunError names the first step that differs."""
    engine, answers = result["engine"], result["answers"]
    for number, (ours, theirs) in enumerate(zip(expected, answers, strict=True)):
        pairs = zip(_steps(ours.ids, ours.steps), _steps(theirs["ids"], theirs["steps"]))  # noqa: B905
        for round_, (own, other) in enumerate(pairs):
            if own != other:
                why = f"{engine} differs in answer {number}, round {round_}: it adds {other}"
                raise RunError(f"{why}, and Outrider {own}.", FIX)
        if ours.ids != theirs["ids"]:
            why = f"{engine} differs in answer {number}: {len(theirs['ids'])} tokens"
            raise RunError(f"{why}, and Outrider {len(ours.ids)}.", FIX)
    rounds, count = sum(len(one.accepted) for one in expected), len(expected)
    return f"{count} of {count} answers, {rounds} of {rounds} rounds, {engine}"


def _steps(ids: list[int], counts: list[int]) -> Iterator[list[int]]:
    """Yield the tokens that each step added."""
    start = 0
    for count in counts:
        yield ids[start : start + count]
        start += count
