"""`outrider doctor`: every check detects its fault; exit codes; training refuses errors."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.conf.command_settings import DoctorConfig
from outrider.conf.console import Console
from outrider.conf.errors import RunError
from outrider.conf.schema import TargetConfig
from outrider.data.conversations import Message
from outrider.data.dataset_registry import TINY
from outrider.data.prepare import prepare
from outrider.data.tokenise import Document
from outrider.data.training_data import TrainingData
from outrider.launch import cli, cost_estimate
from outrider.launch.bench.common import resident_bytes
from outrider.launch.doctor import (
    answers,
    costs,
    environment,
    target,
    template,
    text,
    trial_steps,
)
from outrider.launch.doctor.finding import (
    Finding,
    FindingGroup,
    print_findings,
    to_json,
    verdict,
    with_state,
)
from outrider.launch.doctor.run import doctor, print_start_summary, require_trainable, run_checks
from outrider.launch.doctor.tokenizer import check_chat_template, check_tokenizer
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.train.trainer import Trainer
from tests.runs import QUIET, SMALL, config

SHORT = DoctorConfig(measure=False, conversations=4)


@pytest.fixture(scope="module")
def run(
    loaded: LoadedTarget, made: TrainingData, tmp_path_factory: pytest.TempPathFactory
) -> Trainer:
    return Trainer(config(tmp_path_factory.mktemp("run")), loaded, made, begin=False)


def states(groups: list[FindingGroup]) -> dict[str, str]:
    return {one.name: one.state for group in groups for one in group.findings}


# ---- the template ----

TURN = "{{ '<|' + m.role + '|>' }}"
LAST = "loop.last and m.role == 'assistant'"
SAME = "{% for m in messages %}" + TURN + "{{ m.content }}<|end|>{% endfor %}"
THOUGHT_IN_LAST = (  # only the last answer shows a thought, as in Qwen3
    "{% for m in messages %}" + TURN + "{% if " + LAST + " %}hm {% endif %}{{ m.content }}<|end|>"
    "{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PROMPTED = PROMPT.replace("|>{%", "|>{% if true %}Sure: {% endif %}{%")
REFUSES = "{{ raise_exception('no') }}"


def dialogue(*contents: str) -> list[Message]:
    return [
        Message(role=("user", "assistant")[n % 2], content=text) for n, text in enumerate(contents)
    ]


DIALOGUES = [dialogue("Hello", "Good day."), dialogue("Who?", "Mia.", "Why?", "Because.")]


def with_template(loaded: LoadedTarget, chat_template: str) -> Any:
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.mark.parametrize(
    ("chat_template", "state", "cases"),
    [
        (SAME + PROMPT, "ok", set()),
        (THOUGHT_IN_LAST + PROMPT, "note", {"turn"}),
        (SAME + PROMPTED, "note", {"prompt"}),
        (REFUSES, "wrong", None),
    ],
)
def test_first_turns_that_do_not_render_to_a_prefix_are_found(
    loaded: LoadedTarget, chat_template: str, state: str, cases: set[str] | None
) -> None:
    finding = template.check_prefix(with_template(loaded, chat_template), DIALOGUES, 200)
    assert finding.state == state
    assert finding.facts["dialogues"] == 4, "two, both joined, and one with an empty answer"
    if cases is not None:
        assert set(finding.facts.get("cases", {})) == cases
    if state == "note":
        assert finding.facts["before"] != finding.facts["after"]
        assert "data.supervise=each" in finding.fix or "target.thinking" in finding.fix


def test_answers_located_in_the_rendered_text_are_counted(loaded: LoadedTarget) -> None:
    """Of three answers only the first of the longer dialogue renders differently later."""
    finding = template.check_prefix(with_template(loaded, THOUGHT_IN_LAST + PROMPT), DIALOGUES, 200)
    assert (finding.facts["answers"], finding.facts["answers_sought_in_text"]) == (3, 1)


def test_a_template_may_refuse_dialogues_not_in_the_data(loaded: LoadedTarget) -> None:
    """The data has no dialogue as long as the two joined ones, which the template refuses."""
    strict = "{% if messages|length > 4 %}" + REFUSES + "{% endif %}" + SAME + PROMPT
    finding = template.check_prefix(with_template(loaded, strict), DIALOGUES, 200)
    assert (finding.state, finding.facts["dialogues"]) == ("ok", 3)


def test_without_a_template_prefixes_are_stable(loaded: LoadedTarget) -> None:
    assert template.check_prefix(with_template(loaded, ""), DIALOGUES, 200).state == "ok"


@pytest.mark.parametrize(
    ("flag", "thoughts", "supported", "state"),
    [
        (None, False, False, "ok"),
        (None, True, False, "note"),
        (None, False, True, "note"),
        (True, True, True, "ok"),
        (True, False, True, "note"),
        (False, False, True, "ok"),
        (False, True, True, "note"),
    ],
)
def test_the_thinking_flag_is_compared_with_the_answers(
    loaded: LoadedTarget, flag: bool | None, thoughts: bool, supported: bool, state: str
) -> None:
    dialogues = [dialogue("Why?", "<think>so</think>So." if thoughts else "So.")]
    tokenizer = with_template(
        loaded, SAME + ("{% if enable_thinking %}{% endif %}" if supported else "")
    )
    finding = template.check_thinking(tokenizer, TargetConfig(thinking=flag), dialogues)
    assert finding.state == state
    assert finding.facts["share_of_answers"] == float(thoughts)


def test_a_template_with_todays_date_is_a_note(loaded: LoadedTarget) -> None:
    changing = "{{ strftime_now('%d') if date_string is undefined else date_string }}" + SAME
    assert template.check_date(with_template(loaded, SAME)).state == "ok"
    assert template.check_date(with_template(loaded, changing)).state == "note"
    fixed = '{% set date_string = "26 Jul" +%}' + changing
    assert template.check_date(with_template(loaded, fixed)).state == "ok"


# ---- the text ----


def test_the_share_of_supervised_tokens_is_counted(
    loaded: LoadedTarget, made: TrainingData
) -> None:
    finding = text.check_mask(loaded, made)
    marked = sum(sum(document.answer) for document in made.documents)
    assert finding.state == "ok"
    assert finding.facts["share"] == marked / sum(len(d.ids) for d in made.documents)
    assert finding.facts["last_supervised"] == "<|end|>"
    assert finding.facts["ended"] == 1.0
    assert finding.facts["preview"].startswith("<|user|>Good evening!<|end|><|assistant|>[Good to")


def unsupervised(made: TrainingData) -> TrainingData:
    return replace(made, counts=0 * made.counts, held_counts=0 * made.held_counts)


def all_supervised(made: TrainingData) -> TrainingData:
    counts = made.counts.clone()
    counts[0] += sum(len(d.ids) for d in made.documents) - int((counts + made.held_counts).sum())
    return replace(made, counts=counts)


def without_stop_tokens(made: TrainingData) -> TrainingData:
    short = [replace(d, answer=np.append(d.answer[:-1], False)) for d in made.documents]
    return replace(made, documents=short)


@pytest.mark.parametrize(
    ("broken", "state", "message"),
    [
        (unsupervised, "wrong", "no token is supervised"),
        (all_supervised, "note", "all tokens"),
        (without_stop_tokens, "note", "0% of"),
    ],
)
def test_wrong_masks_are_found(
    loaded: LoadedTarget,
    made: TrainingData,
    broken: Callable[[TrainingData], TrainingData],
    state: str,
    message: str,
) -> None:
    finding = text.check_mask(loaded, broken(made))
    assert finding.state == state
    assert message in finding.message


def test_the_supervised_share_of_every_source() -> None:
    one = replace(Document.of([1, 2, 3, 4], [False, False, True, True], "a"), source="self")
    other = Document.of([1, 2, 3, 4], [False, False, False, True], "b")
    other = replace(other, source="ultrachat")
    bare = replace(Document.of([1, 2], [False, False], "c"), source="empty")
    finding = text.check_sources([one, other, other])
    shares = {name: row["share"] for name, row in finding.facts["sources"].items()}
    assert (finding.state, shares) == ("ok", {"self": 0.5, "ultrachat": 0.25})
    finding = text.check_sources([one, bare])
    assert finding.state == "note"
    assert "empty" in finding.fix


def test_many_truncated_or_dropped_conversations_are_a_note(
    made: TrainingData,
) -> None:
    assert text.check_conversations(made).facts["cut"] == 6
    whole = [replace(document, cut=0) for document in made.documents]
    made = replace(made, documents=whole, about={**made.about, "cases": {"used": 60}})
    assert text.check_conversations(made).state == "ok"
    cut = replace(made, about={**made.about, "cases": {"used": 60, "cut": 30}})
    finding = text.check_conversations(cut)
    assert (finding.state, finding.facts["cut"]) == ("note", 30)
    assert "data.max_length" in finding.fix


def test_many_passes_and_little_held_out_text_are_notes(run: Trainer, made: TrainingData) -> None:
    few = text.check_rows(run.config, made)
    assert few.facts["passes"] == 6 * 4 / len(made.train)
    assert (few.state, few.facts["held_answer_tokens"]) == ("note", int(made.held_counts.sum()))
    long = replace(run.config, train=replace(run.config.train, max_steps=1000))
    assert "more data helps" in text.check_rows(long, made).fix
    assert (
        text.check_rows(run.config, replace(made, held_counts=made.held_counts + 100)).state == "ok"
    )


@pytest.mark.parametrize(
    ("policy", "state"), [("refuse", "wrong"), ("drop", "note"), ("keep", "note")]
)
def test_overlap_with_the_suite_is_found_and_all_other_checks_run(
    tmp_path: Path, policy: str, state: str
) -> None:
    prompt = json.loads(TINY.read_text().splitlines()[0])
    question = prompt.get("prompt") or prompt["turns"][0]
    rows = [{"prompt": f"{n} and what?", "completion": "So it is."} for n in range(40)]
    rows.append({"prompt": question, "completion": "Well."})
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data=jsonl", f"data.path={file}", f"data.overlap={policy}", "data.max_length=128"]
    groups = run_checks(config(tmp_path / "run", *words), SHORT, QUIET)
    finding = {one.name: one for group in groups for one in group.findings}
    assert (finding["overlap"].state, finding["overlap"].facts["met"]) == (state, 1)
    assert (question[:20] in finding["overlap"].message) == (policy != "drop")
    assert {"prefix", "taps", "disk", "conversations"} <= set(finding)


# ---- the vocabulary ----


def test_the_curve_is_the_coverage_of_the_most_frequent_tokens(made: TrainingData) -> None:
    points = dict(text.vocabulary_curve(made, 100))
    assert {100, 1536} <= set(points)
    order = made.counts.sort(descending=True, stable=True).indices
    for size, share in points.items():
        covered = made.held_counts[order[:size]].sum() / made.held_counts.sum()
        assert share == pytest.approx(float(covered))
    assert list(points.values()) == sorted(points.values())


@pytest.mark.parametrize(("size", "state"), [(8, "wrong"), (300, "note"), (None, "ok")])
def test_small_draft_vocabularies_are_found(
    made: TrainingData, size: int | None, state: str
) -> None:
    finding = text.check_vocabulary(made, size)
    assert finding.state == state
    assert finding.message.count("<- this run") == 1
    assert ("raise drafter.draft_vocab_size" in finding.fix) == (state != "ok")


def test_large_vocabularies_have_the_usual_sizes(made: TrainingData) -> None:
    counts = torch.ones(50_000, dtype=torch.long)
    wide = replace(made, counts=counts, held_counts=counts)
    sizes = [size for size, _ in text.vocabulary_curve(wide, 20_000)]
    assert sizes == [1024, 2048, 4096, 8192, 16384, 20_000, 32768, 50_000]


# ---- the target, the ranks ----


def test_taps_have_the_shape_of_the_drafters_input(run: Trainer) -> None:
    finding = target.check_taps(run)
    assert finding.state == "ok"
    assert finding.facts["taps"] == [1, 128, 3 * 192]


def test_summary_before_training_names_engines_and_refusals(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    run = Trainer(config(tmp_path, "drafter.qk_norm=true"), loaded, made, begin=False)
    console = Console(record=True, width=400)
    print_start_summary(console, run, loaded=loaded)
    (line,) = [line for line in console.export_text().splitlines() if "speculators (" in line]
    assert "formats" in line
    assert "vLLM" in line
    found = target.check_formats(run)
    assert set(found.facts["refused"]) == {"native", "sglang", "vllm", "speculators"}
    for word in ("sglang", "vllm"):
        assert f"not {word}: {found.facts['refused'][word]}" in found.message
        assert "without norms on queries" in found.message


def test_taps_that_are_not_finite_are_wrong(run: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_batch = run.target.trace

    def broken(*batch: torch.Tensor) -> Any:
        trace = trace_batch(*batch)
        return replace(trace, taps=trace.taps / 0)

    monkeypatch.setattr(run.target, "trace", broken)
    assert target.check_taps(run).state == "wrong"


def test_a_rank_without_a_gpu_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = environment.check_launcher(config(tmp_path))
    assert (found.state, found.facts["gpus"]) == ("wrong", 1)
    assert "Rank 1 of this machine has no GPU" in found.message


def test_an_unsupported_precision_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_bfloat16(bytes_of: int) -> float:
        if bytes_of == 2:
            raise RuntimeError("not implemented for 'BFloat16'")
        return 1e9

    monkeypatch.setattr(environment, "matmul_rate", no_bfloat16)
    assert environment.check_precision(config(tmp_path, "launch.precision=bf16")).state == "wrong"
    assert environment.check_precision(config(tmp_path, "target.dtype=bfloat16")).state == "wrong"
    assert environment.check_precision(config(tmp_path)).state == "ok"


@pytest.mark.parametrize(
    ("half", "full", "words", "state"),
    [
        (2.0, 1.0, ["launch.precision=no"], "note"),
        (2.0, 1.0, ["launch.precision=bf16"], "ok"),
        (1.0, 2.0, ["launch.precision=bf16"], "note"),
        (1.0, 1.0, ["target.dtype=float16"], "note"),
    ],
)
def test_the_slower_precision_is_a_note(
    half: float, full: float, words: list[str], state: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(environment, "matmul_rate", lambda size: half if size == 2 else full)
    assert environment.check_precision(config(tmp_path, *words)).state == state


def test_threads_are_compared_with_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for cores, here, state in ((4, 1, "ok"), (4, 2, "note"), (8, 1, "note"), (8, 2, "ok")):
        monkeypatch.setattr(process, "available_cores", lambda n=cores: n)
        monkeypatch.setattr(process, "local_world_size", lambda n=here: n)
        assert environment.check_threads().state == state


def test_deepspeed_is_required_only_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "versions", lambda: {"deepspeed": "not installed"})
    assert environment.check_libraries(config(tmp_path)).state == "ok"
    assert environment.check_libraries(config(tmp_path, "launch=zero2")).state == "wrong"


# ---- trial steps ----


def test_the_largest_fitting_batch_is_found_in_few_trials() -> None:
    for most in (0, 1, 2, 3, 31, 32, 33, 1000):
        tried: list[int] = []

        def fits(rows: int, most: int = most, tried: list[int] = tried) -> bool:
            tried.append(rows)
            return rows <= most

        assert trial_steps.largest_fitting(fits, 4096) == most
        assert len(tried) <= 2 * most.bit_length() + 1
    assert trial_steps.largest_fitting(lambda _: True, 100) == 100


def test_memory_is_a_line_through_two_trials() -> None:
    line = trial_steps.MemoryLine.fit(
        trial_steps.BatchTrial(4, 500.0, 0), trial_steps.BatchTrial(8, 900.0, 0)
    )
    assert (line.fixed, line.each) == (100.0, 100.0)
    assert line.rows(1100.0) == 10
    assert line.rows(50.0) == 0


def test_the_largest_batch_is_measured_and_a_larger_one_is_wrong(
    run: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator reuses memory of earlier tests, so the measurement is replaced."""
    cost = cost_estimate.estimate(run)
    assert trial_steps._trial(run, 2, float(resident_bytes())).seconds > 0

    def growing(_run: Trainer, rows: int, _before: float) -> trial_steps.BatchTrial:
        return trial_steps.BatchTrial(rows, 3e6 + 2e5 * rows, 0.01 * rows)

    monkeypatch.setattr(trial_steps, "_trial", growing)
    monkeypatch.setattr(trial_steps, "free_memory", lambda: 2e8)
    monkeypatch.setattr(trial_steps, "SHORT", 0.2)
    finding = trial_steps.check_largest_batch(run, cost)
    rows, each = finding.facts["rows"], finding.facts["row_bytes"]
    assert finding.facts["rows_now"] == 4
    assert each == pytest.approx(2e5)
    assert finding.facts["fixed_bytes"] + rows * each <= trial_steps.USABLE * 2e8
    monkeypatch.setattr(trial_steps, "free_memory", lambda: 1e6)
    assert trial_steps.check_largest_batch(run, cost).state == "wrong"


def test_on_a_gpu_the_batch_grows_until_it_does_not_fit(
    run: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a simulated device that fits five rows."""
    tried: list[int] = []

    def fits_five_rows(_run: Trainer, rows: int) -> float:
        tried.append(rows)
        if rows > 5:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return 0.1

    monkeypatch.setattr(trial_steps, "forward_backward", fits_five_rows)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * 2**30, 0))
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    rows, method, facts = trial_steps._on_gpu(run)
    assert (rows, tried) == (5, [1, 2, 4, 8, 6, 5])
    assert [trial[0] for trial in facts["trials"]] == [1, 2, 4, 5]
    assert "8.6 GB of free memory" in method
    monkeypatch.setattr(trial_steps, "LONG", 0.05)
    tried.clear()
    assert trial_steps._on_gpu(run)[0] == 1
    assert tried == [1], "larger ones take too long"


def test_steps_are_timed_and_change_no_weight(run: Trainer) -> None:
    before = [p.detach().clone() for p in run.drafter.parameters()]
    finding = trial_steps.check_step_time(run, 2, cost_estimate.estimate(run))
    assert all(map(torch.equal, before, run.drafter.parameters()))
    each, evaluation = finding.facts["seconds_per_step"], finding.facts["seconds_held_out"]
    assert each > 0
    assert finding.facts["training_seconds"] == pytest.approx(6 * each + 3 * evaluation)


def test_a_loss_that_is_not_finite_is_wrong(run: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = cost_estimate.estimate(run)
    monkeypatch.setattr("outrider.train.loop._problem", lambda *_: "its loss is nan")
    assert trial_steps.check_step_time(run, 1, cost).state == "wrong"


def test_a_disk_that_is_too_small_is_wrong(run: Trainer) -> None:
    cost = cost_estimate.estimate(run)
    assert costs.check_disk(run, cost).state == "ok"
    assert costs.check_disk(run, cost, text=1e18).state == "wrong"
    assert costs.check_disk(run, cost._replace(disk=1e18)).state == "wrong"


def test_a_learning_rate_above_the_usual_one_is_a_note(
    run: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert costs.check_learning_rate(run).state == "ok"
    monkeypatch.setattr(costs, "FAST", 0.5)
    finding = costs.check_learning_rate(run)
    assert (finding.state, finding.facts["lr"]) == ("note", 1e-3)
    assert "Without train.lr it is 0.0018" in finding.fix


# ---- the verb, and the start of a run ----


def test_json_and_tables_have_the_same_content(tmp_path: Path) -> None:
    groups = [
        FindingGroup(
            "one", [Finding("a", "ok", "fine", {"x": 1}), Finding("b", "note", "unusual", {}, "do")]
        ),
        FindingGroup("two", [Finding("c", "wrong", "no", {"y": [1.5]}, "fix it")]),
    ]
    console = Console(record=True, width=80)
    print_findings(console, groups)
    printed = console.export_text()
    finding = json.loads(json.dumps(to_json(groups)))
    assert finding == to_json(groups), "only types of JSON"
    for name, group in finding["groups"].items():
        assert name in printed
        for title, row in group.items():
            assert all(
                part in printed for part in (title, row["state"], row["message"], row["fix"])
            )
    assert finding["may_start"] is False
    assert verdict(groups) == "Training cannot start: 1 wrong, 1 to note"
    assert to_json(groups[:1])["may_start"] is True
    assert [one.name for one in with_state(groups, "wrong")] == ["c"]


def doctor_words(*words: str) -> list[str]:
    return ["doctor", *SMALL, "doctor.conversations=4", *words]


def test_a_folder_is_refused_as_json_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(doctor_words(f"json={tmp_path}"))
    assert stopped.value.code == 2
    assert "doctor.json" in capsys.readouterr().err


def test_doctor_accepts_the_embedded_target_and_writes_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert (
        cli.main(doctor_words(f"run.dir={tmp_path / 'run'}", f"json={out}", "doctor.steps=1")) == 0
    )
    printed, finding = capsys.readouterr().out, json.loads(out.read_text())
    assert finding["may_start"] is True
    assert set(finding["groups"]) == {"launcher", "target", "template", "text", "costs"}
    assert finding["groups"]["text"]["vocabulary"]["curve"][-1] == [1536, 1.0]
    assert finding["groups"]["costs"]["memory"]["rows"] >= 4
    assert finding["groups"]["costs"]["time"]["steps"] == 1
    assert "tokens are supervised, from 'Good' to '<|end|>'" in printed
    assert "Training can start" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "check"),
    [
        (["drafter.draft_vocab_size=8", "doctor.measure=false"], "vocabulary"),
        (["target.path=data/tiny"], "probe"),
        (["launch=single"], "launcher"),
    ],
)
def test_the_exit_code_is_1_if_a_finding_is_wrong(
    words: list[str], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check == "launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    out = tmp_path / "out.json"
    assert cli.main(doctor_words(f"run.dir={tmp_path / 'run'}", f"json={out}", *words)) == 1
    finding = json.loads(out.read_text())
    wrong = [c for g in finding["groups"].values() for c, f in g.items() if f["state"] == "wrong"]
    assert (finding["may_start"], wrong) == (False, [check])


@pytest.mark.slow
def test_text_not_yet_generated_is_checked_on_a_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    words = ["data=self", "data.path=data/tiny/prompts.jsonl", "data.overlap=keep"]
    words += ["data.max_length=128", "data.generate.max_new_tokens=12"]
    cfg = config(tmp_path / "run", *words)
    assert doctor(cfg, SHORT) == 0
    assert "sample of 16 answers" in capsys.readouterr().out
    written = config(tmp_path / "run", *words, "data.generate.samples=20")
    prepare(written)
    finding = run_checks(written, SHORT, QUIET)
    assert states(finding)["recorded"] == "ok"
    assert states(finding)["overlap"] == "note", "set by data.overlap=keep"
    (shares,) = (one for g in finding for one in g.findings if one.name == "sources")
    assert list(shares.facts["sources"]) == ["self"]
    assert "sample" not in capsys.readouterr().out


def test_training_prints_the_short_form(run: Trainer, loaded: LoadedTarget) -> None:
    console = Console(record=True, width=120)
    print_start_summary(console, run, loaded=loaded)
    printed = console.export_text()
    trained = sum(p.numel() for p in run.drafter.parameters())
    assert f"{trained / 1e6:.2f} M parameters" in printed
    assert "100.00% of the held-out answer tokens" in printed
    for one in ("memory", "disk", "time", "speculators (vLLM)"):
        assert one in printed
    assert "mask" not in printed, "the mask is ok"


class AsciiTokenizer:
    """A tokenizer that drops every character outside ASCII, joins spaces, and has no template."""

    chat_template = None
    eos_token_id = 1

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in " ".join(text.split(" ")) if ord(c) < 128]}

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(word for word in "".join(map(chr, ids)).split(" ") if word)


def test_lost_characters_and_a_missing_template_are_notes(loaded: LoadedTarget) -> None:
    assert check_tokenizer(loaded.tokenizer).state == "ok"
    assert check_chat_template(loaded.tokenizer).state == "ok"
    finding = check_tokenizer(AsciiTokenizer())
    assert finding.state == "note"
    assert "'Björn, naïve, Łódź' becomes 'Bjrn, nave, d'" in finding.message
    assert finding.facts["changed"]["a\tb\n\n  c   d"] == "a\tb\n\n c d"
    assert check_chat_template(AsciiTokenizer()).state == "note"


def test_training_warns_of_lost_characters_and_a_missing_template_once(
    run: Trainer, loaded: LoadedTarget
) -> None:
    console = Console(record=True, width=120)
    tokenizer = copy.copy(loaded.tokenizer)
    tokenizer.chat_template = None
    lossy = AsciiTokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "__call__", lambda _, text, **k: lossy(text, **k))
        print_start_summary(console, run, loaded=loaded._replace(tokenizer=tokenizer))
    printed = console.export_text()
    assert printed.count("test texts change in encoding and decoding") == 1
    assert printed.count("no chat template") == 1


def test_training_refuses_wrong_findings(
    loaded: LoadedTarget, made: TrainingData, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="Training cannot start") as caught:
        require_trainable(config(tmp_path, "drafter.draft_vocab_size=8"), loaded, made)
    assert "vocabulary" in caught.value.message
    assert "drafter.draft_vocab_size" in caught.value.fix
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_folder_with_a_run_is_a_note(run: Trainer) -> None:
    assert costs.check_run_folder(run.config).state == "ok"
    (run.folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    finding = costs.check_run_folder(run.config)
    assert (finding.state, finding.facts["checkpoints"]) == ("note", 1)


# ---- the answers ----

THOUGHT = Message(role="assistant", content="4", reasoning_content="2+2=4")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = Message(role="assistant", content="Let me add.", tool_calls=[CALL])
QUESTION = Message(role="user", content="2+2?")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
REMOVES = SAME.replace("m.content }", "m.content.split('</think>')[-1] }")
CLOSES = SAME.replace("}}{{ m.content", "}}{{ m.reasoning_content }}{{ m.content") + (
    "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"
)


def answer_findings(
    loaded: LoadedTarget, chat_template: str, dialogues: list[list[Message]], **more: Any
) -> dict[str, Finding]:
    with_tokenizer = loaded._replace(tokenizer=with_template(loaded, chat_template))
    counts = answers.count_answers(with_tokenizer, dialogues)
    found = answers.check_answers(with_tokenizer, counts, more.get("skip_bad", 0), None)
    return {one.name: one for one in found}


@pytest.mark.parametrize(
    ("chat_template", "turns", "name", "state", "words"),
    [
        (SAME + PROMPT, [QUESTION, CALLING], "calls", "note", "calls not rendered"),
        (SAME + PROMPT, [QUESTION, THOUGHT], "thoughts", "note", "thoughts not taken"),
        (REMOVES + PROMPT, dialogue("?", "<think>so</think>4"), "thoughts", "note", "removed"),
        (CLOSES, [QUESTION, THOUGHT], "thoughts", "wrong", "contradiction"),
        (NO_SYSTEM + SAME + PROMPT, [Message(role="system", content="x"), *DIALOGUES[0]],
         "refused", "wrong", "no system"),
    ],
)  # fmt: skip
def test_the_share_of_the_answers_that_the_template_loses_is_told(
    loaded: LoadedTarget, chat_template: str, turns: list[Message], name: str, state: str,
    words: str,
) -> None:  # fmt: skip
    """One of four answers."""
    findings = answer_findings(loaded, chat_template, [turns, *DIALOGUES])
    finding = findings.pop(name)
    assert (finding.state, finding.facts["concerned"], finding.facts["share"]) == (state, 1, 0.25)
    assert words in finding.message
    assert "25% of 4 answers" in finding.message
    assert finding.fix
    assert {one.state for one in findings.values()} == {"ok"}


def test_refused_rows_within_the_limit_are_a_note(loaded: LoadedTarget) -> None:
    rows = [[Message(role="system", content="x"), *DIALOGUES[0]], *DIALOGUES]
    finding = answer_findings(loaded, NO_SYSTEM + SAME + PROMPT, rows, skip_bad=1)["refused"]
    assert finding.state == "note"
    assert "data.skip_bad=1" in finding.fix


def test_answers_without_a_stop_token_are_told(loaded: LoadedTarget) -> None:
    finding = answer_findings(loaded, SAME.replace("<|end|>", "\n") + PROMPT, DIALOGUES)["ends"]
    assert (finding.state, finding.facts["share"]) == ("note", 1.0)
    assert "generation_config" in finding.fix
