"""Every check flags what is broken, the exit code says it, and training refuses what is wrong."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from outrider.conf.errors import RunError
from outrider.data.conversations import Message
from outrider.data.dataset_registry import TINY
from outrider.data.prepare import Material, prepare
from outrider.data.tokenise import Document
from outrider.launch import cli
from outrider.launch import cost_estimate as plan
from outrider.launch.bench.train_step import resident
from outrider.launch.doctor import costs, ranks, target, template, text, vocabulary
from outrider.launch.doctor import trial_steps as measured
from outrider.launch.doctor.finding import Finding, Group, as_json, of_state, show, verdict
from outrider.launch.doctor.run import at_start, doctor, examine
from outrider.models.load import Loaded
from outrider.train import distributed as start
from outrider.train.doctoring import DoctorConfig
from outrider.train.loop import fit
from outrider.train.settings import TargetConfig
from outrider.train.trainer import Run
from tests.runs import QUIET, SMALL, config

SHORT = DoctorConfig(measure=False, conversations=4)


@pytest.fixture(scope="module")
def run(loaded: Loaded, made: Material, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(config(tmp_path_factory.mktemp("run")), loaded, made, begin=False)


def states(groups: list[Group]) -> dict[str, str]:
    return {one.name: one.state for group in groups for one in group.findings}


# ---- the template ----

TURN = "{{ '<|' + m.role + '|>' }}"
LAST = "loop.last and m.role == 'assistant'"
SAME = "{% for m in messages %}" + TURN + "{{ m.content }}<|end|>{% endfor %}"
ONLY_LAST = (  # the last answer alone shows a thought, as Qwen3 has it
    "{% for m in messages %}" + TURN + "{% if " + LAST + " %}hm {% endif %}{{ m.content }}<|end|>"
    "{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PROMPTED = PROMPT.replace("|>{%", "|>{% if true %}Sure: {% endif %}{%")
REFUSES = "{{ raise_exception('no') }}"


def dialogue(*contents: str) -> list[Message]:
    return [
        Message(role=("user", "assistant")[n % 2], content=said) for n, said in enumerate(contents)
    ]


TALKS = [dialogue("Hello", "Good day."), dialogue("Who?", "Mia.", "Why?", "Because.")]


def told(loaded: Loaded, chat_template: str) -> Any:
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.mark.parametrize(
    ("chat_template", "state", "cases"),
    [
        (SAME + PROMPT, "ok", set()),
        (ONLY_LAST + PROMPT, "note", {"turn"}),
        (SAME + PROMPTED, "note", {"prompt"}),
        (REFUSES, "wrong", None),
    ],
)
def test_beginnings_that_are_no_prefix_are_found(
    loaded: Loaded, chat_template: str, state: str, cases: set[str] | None
) -> None:
    found = template.prefix(told(loaded, chat_template), TALKS, 200)
    assert found.state == state
    assert found.facts["dialogues"] == 4, "two, both as one, and one with an empty answer"
    if cases is not None:
        assert set(found.facts.get("cases", {})) == cases
    if state == "note":
        assert found.facts["before"] != found.facts["after"]
        assert "data.supervise=each" in found.fix or "target.thinking" in found.fix


def test_it_is_counted_how_often_the_mask_had_to_seek_in_the_text(loaded: Loaded) -> None:
    """Of three answers only the first of the longer dialogue is shown otherwise later."""
    found = template.prefix(told(loaded, ONLY_LAST + PROMPT), TALKS, 200)
    assert (found.facts["answers"], found.facts["answers_sought_in_text"]) == (3, 1)


def test_a_dialogue_that_nobody_held_may_be_refused(loaded: Loaded) -> None:
    """Two dialogues in one are more than this template takes; the data have none of that."""
    strict = "{% if messages|length > 4 %}" + REFUSES + "{% endif %}" + SAME + PROMPT
    found = template.prefix(told(loaded, strict), TALKS, 200)
    assert (found.state, found.facts["dialogues"]) == ("ok", 3)


def test_without_a_template_nothing_can_be_rewritten(loaded: Loaded) -> None:
    assert template.prefix(told(loaded, ""), TALKS, 200).state == "ok"


@pytest.mark.parametrize(
    ("flag", "thoughts", "asks", "state"),
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
def test_the_thinking_flag_is_held_against_the_answers(
    loaded: Loaded, flag: bool | None, thoughts: bool, asks: bool, state: str
) -> None:
    talks = [dialogue("Why?", "<think>so</think>So." if thoughts else "So.")]
    tokenizer = told(loaded, SAME + ("{% if enable_thinking %}{% endif %}" if asks else ""))
    found = template.thinking(tokenizer, TargetConfig(thinking=flag), talks)
    assert found.state == state
    assert found.facts["share_of_answers"] == float(thoughts)


def test_todays_date_in_a_template_is_pointed_out(loaded: Loaded) -> None:
    changing = "{{ strftime_now('%d') if date_string is undefined else date_string }}" + SAME
    assert template.date(told(loaded, SAME)).state == "ok"
    assert template.date(told(loaded, changing)).state == "note"
    fixed = '{% set date_string = "26 Jul" +%}' + changing
    assert template.date(told(loaded, fixed)).state == "ok"


# ---- the text ----


def test_the_share_of_supervised_tokens_is_counted(loaded: Loaded, made: Material) -> None:
    found = text.mask(loaded, made)
    marked = sum(sum(document.answer) for document in made.documents)
    assert found.state == "ok"
    assert found.facts["share"] == marked / sum(len(d.ids) for d in made.documents)
    assert found.facts["last_supervised"] == "<|end|>"
    assert found.facts["ended"] == 1.0
    assert found.facts["preview"].startswith("<|user|>Good evening!<|end|><|assistant|>[Good to")


def unmarked(made: Material) -> Material:
    return replace(made, counts=0 * made.counts, held_counts=0 * made.held_counts)


def everything(made: Material) -> Material:
    counts = made.counts.clone()
    counts[0] += sum(len(d.ids) for d in made.documents) - int((counts + made.held_counts).sum())
    return replace(made, counts=counts)


def endless(made: Material) -> Material:
    """Answers without the token that ends them."""
    short = [replace(d, answer=np.append(d.answer[:-1], False)) for d in made.documents]
    return replace(made, documents=short)


@pytest.mark.parametrize(
    ("broken", "state", "said"),
    [
        (unmarked, "wrong", "no token is supervised"),
        (everything, "note", "all of the text"),
        (endless, "note", "0% of"),
    ],
)
def test_masks_that_teach_nothing_or_the_wrong_thing_are_flagged(
    loaded: Loaded, made: Material, broken: Callable[[Material], Material], state: str, said: str
) -> None:
    found = text.mask(loaded, broken(made))
    assert found.state == state
    assert said in found.said


def test_every_source_has_its_share() -> None:
    one = replace(Document.of([1, 2, 3, 4], [False, False, True, True], "a"), source="self")
    other = Document.of([1, 2, 3, 4], [False, False, False, True], "b")
    other = replace(other, source="ultrachat")
    bare = replace(Document.of([1, 2], [False, False], "c"), source="empty")
    found = text.sources([one, other, other])
    shares = {name: row["share"] for name, row in found.facts["sources"].items()}
    assert (found.state, shares) == ("ok", {"self": 0.5, "ultrachat": 0.25})
    found = text.sources([one, bare])
    assert found.state == "note"
    assert "empty" in found.fix


def test_what_was_cut_or_left_out_is_counted_and_a_lot_of_it_pointed_out(made: Material) -> None:
    assert text.kept(made).facts["cut"] == 6
    whole = [replace(document, cut=0) for document in made.documents]
    made = replace(made, documents=whole, about={**made.about, "cases": {"used": 60}})
    assert text.kept(made).state == "ok"
    cut = replace(made, about={**made.about, "cases": {"used": 60, "cut": 30}})
    found = text.kept(cut)
    assert (found.state, found.facts["cut"]) == ("note", 30)
    assert "data.max_length" in found.fix


def test_many_passes_and_little_held_out_text_are_pointed_out(run: Run, made: Material) -> None:
    few = text.rows(run.config, made)
    assert few.facts["passes"] == 6 * 4 / len(made.train)
    assert (few.state, few.facts["held_answer_tokens"]) == ("note", int(made.held_counts.sum()))
    long = replace(run.config, train=replace(run.config.train, max_steps=1000))
    assert "more data would do more good" in text.rows(long, made).fix
    assert text.rows(run.config, replace(made, held_counts=made.held_counts + 100)).state == "ok"


@pytest.mark.parametrize(
    ("wish", "state"), [("refuse", "wrong"), ("drop", "note"), ("keep", "note")]
)
def test_questions_of_the_suite_are_found_and_all_else_is_still_looked_at(
    tmp_path: Path, wish: str, state: str
) -> None:
    prompt = json.loads(TINY.read_text().splitlines()[0])
    asked = prompt.get("prompt") or prompt["turns"][0]
    rows = [{"prompt": f"{n} and what?", "completion": "So it is."} for n in range(40)]
    rows.append({"prompt": asked, "completion": "Well."})
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data=jsonl", f"data.path={file}", f"data.overlap={wish}", "data.max_length=128"]
    groups = examine(config(tmp_path / "run", *words), SHORT, QUIET)
    found = {one.name: one for group in groups for one in group.findings}
    assert (found["overlap"].state, found["overlap"].facts["met"]) == (state, 1)
    assert (asked[:20] in found["overlap"].said) == (wish != "drop")
    assert {"prefix", "taps", "disk", "conversations"} <= set(found)


# ---- the vocabulary ----


def test_the_curve_is_what_the_most_frequent_tokens_cover(made: Material) -> None:
    points = dict(vocabulary.curve(made, 100))
    assert {100, 1536} <= set(points)
    order = made.counts.sort(descending=True, stable=True).indices
    for size, share in points.items():
        covered = made.held_counts[order[:size]].sum() / made.held_counts.sum()
        assert share == pytest.approx(float(covered))
    assert list(points.values()) == sorted(points.values())


@pytest.mark.parametrize(("size", "state"), [(8, "wrong"), (300, "note"), (None, "ok")])
def test_small_draft_vocabularies_are_flagged(made: Material, size: int | None, state: str) -> None:
    found = vocabulary.coverage(made, size)
    assert found.state == state
    assert found.said.count("<- this run") == 1
    assert ("raise drafter.draft_vocab_size" in found.fix) == (state != "ok")


def test_large_vocabularies_are_asked_at_the_usual_sizes(made: Material) -> None:
    counts = torch.ones(50_000, dtype=torch.long)
    wide = replace(made, counts=counts, held_counts=counts)
    sizes = [size for size, _ in vocabulary.curve(wide, 20_000)]
    assert sizes == [1024, 2048, 4096, 8192, 16384, 20_000, 32768, 50_000]


# ---- the target, the ranks ----


def test_taps_have_the_shape_that_the_drafter_reads(run: Run) -> None:
    found = target.taps(run)
    assert found.state == "ok"
    assert found.facts["taps"] == [1, 128, 3 * 192]


def test_states_that_are_no_numbers_are_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = run.target.trace

    def broken(*batch: torch.Tensor) -> Any:
        trace = honest(*batch)
        return replace(trace, taps=trace.taps / 0)

    monkeypatch.setattr(run.target, "trace", broken)
    assert target.taps(run).state == "wrong"


def test_a_precision_that_the_device_lacks_is_wrong_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(bytes_of: int) -> float:
        if bytes_of == 2:
            raise RuntimeError("not implemented for 'BFloat16'")
        return 1e9

    monkeypatch.setattr(ranks, "pieces_rate", lacking)
    assert ranks.precision(config(tmp_path, "launch.precision=bf16")).state == "wrong"
    assert ranks.precision(config(tmp_path, "target.dtype=bfloat16")).state == "wrong"
    assert ranks.precision(config(tmp_path)).state == "ok"


@pytest.mark.parametrize(
    ("brief", "full", "words", "state"),
    [
        (2.0, 1.0, ["launch.precision=no"], "note"),
        (2.0, 1.0, ["launch.precision=bf16"], "ok"),
        (1.0, 2.0, ["launch.precision=bf16"], "note"),
        (1.0, 1.0, ["target.dtype=float16"], "note"),
    ],
)
def test_the_slower_precision_is_pointed_out(
    brief: float, full: float, words: list[str], state: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ranks, "pieces_rate", lambda size: brief if size == 2 else full)
    assert ranks.precision(config(tmp_path, *words)).state == state


def test_threads_are_held_against_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for cores, here, state in ((4, 1, "ok"), (4, 2, "note"), (8, 1, "note"), (8, 2, "ok")):
        monkeypatch.setattr(start, "cores", lambda n=cores: n)
        monkeypatch.setattr(start, "ranks_here", lambda n=here: n)
        assert ranks.threads().state == state


def test_deepspeed_is_missed_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "versions", lambda: {"deepspeed": "not installed"})
    assert ranks.libraries(config(tmp_path)).state == "ok"
    assert ranks.libraries(config(tmp_path, "launch=zero2")).state == "wrong"


# ---- what is measured ----


def test_the_largest_that_fits_is_found_in_few_questions() -> None:
    for most in (0, 1, 2, 3, 31, 32, 33, 1000):
        asked: list[int] = []

        def fits(rows: int, most: int = most, asked: list[int] = asked) -> bool:
            asked.append(rows)
            return rows <= most

        assert measured.largest(fits, 4096) == most
        assert len(asked) <= 2 * most.bit_length() + 1
    assert measured.largest(lambda _: True, 100) == 100


def test_memory_is_drawn_as_a_line() -> None:
    drawn = measured.Line.through(measured.Trial(4, 500.0, 0), measured.Trial(8, 900.0, 0))
    assert (drawn.fixed, drawn.each) == (100.0, 100.0)
    assert drawn.rows(1100.0) == 10
    assert drawn.rows(50.0) == 0


def test_the_batch_that_fits_is_measured_and_one_that_does_not_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has held more before grows by nothing, so what is measured is set here."""
    cost = plan.estimate(run)
    assert measured._tried(run, 2, float(resident())).seconds > 0

    def growing(_run: Run, rows: int, _before: float) -> measured.Trial:
        return measured.Trial(rows, 3e6 + 2e5 * rows, 0.01 * rows)

    monkeypatch.setattr(measured, "_tried", growing)
    monkeypatch.setattr(measured, "room_here", lambda: 2e8)
    monkeypatch.setattr(measured, "SOON", 0.2)
    found = measured.largest_batch(run, cost)
    rows, each = found.facts["rows"], found.facts["row_bytes"]
    assert found.facts["rows_now"] == 4
    assert each == pytest.approx(2e5)
    assert found.facts["fixed_bytes"] + rows * each <= measured.SHARE * 2e8
    monkeypatch.setattr(measured, "room_here", lambda: 1e6)
    assert measured.largest_batch(run, cost).state == "wrong"


def test_on_a_gpu_batches_grow_until_one_does_not_fit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same search with a device of five rows; the GPU's own calls are replaced."""
    tried: list[int] = []

    def room_for_five(_run: Run, rows: int) -> float:
        tried.append(rows)
        if rows > 5:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return 0.1

    monkeypatch.setattr(measured, "step", room_for_five)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * 2**30, 0))
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    rows, how, facts = measured._on_gpu(run)
    assert (rows, tried) == (5, [1, 2, 4, 8, 6, 5])
    assert [trial[0] for trial in facts["trials"]] == [1, 2, 4, 5]
    assert "8.0 GB of free memory" in how
    monkeypatch.setattr(measured, "LONG", 0.05)
    tried.clear()
    assert measured._on_gpu(run)[0] == 1
    assert tried == [1], "nobody waits for larger ones"


def test_steps_are_timed_and_change_no_weight(run: Run) -> None:
    before = [p.detach().clone() for p in run.drafter.parameters()]
    found = measured.pace(run, 2, plan.estimate(run))
    assert all(map(torch.equal, before, run.drafter.parameters()))
    each, held = found.facts["seconds_per_step"], found.facts["seconds_held_out"]
    assert each > 0
    assert found.facts["training_seconds"] == pytest.approx(6 * each + 3 * held)


def test_a_step_that_is_no_number_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = plan.estimate(run)
    monkeypatch.setattr("outrider.train.loop._wrong", lambda *_: "its loss is nan")
    assert measured.pace(run, 1, cost).state == "wrong"


def test_a_disk_that_is_too_small_is_wrong(run: Run) -> None:
    cost = plan.estimate(run)
    assert costs.disk(run, cost).state == "ok"
    assert costs.disk(run, cost, text=1e18).state == "wrong"
    assert costs.disk(run, cost._replace(disk=1e18)).state == "wrong"


def test_a_learning_rate_for_small_states_is_too_much_for_wide_ones(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert costs.rate(run).state == "ok"
    monkeypatch.setattr(costs, "WIDE", 192)
    monkeypatch.setattr(costs, "FAST", 1e-4)
    assert costs.rate(run).state == "note"


# ---- the verb, and the start of a run ----


def test_the_json_says_what_the_tables_say(tmp_path: Path) -> None:
    groups = [
        Group("one", [Finding("a", "ok", "well", {"x": 1}), Finding("b", "note", "hm", {}, "do")]),
        Group("two", [Finding("c", "wrong", "no", {"y": [1.5]}, "mend it")]),
    ]
    console = Console(record=True, width=80)
    show(console, groups)
    said = console.export_text()
    found = json.loads(json.dumps(as_json(groups)))
    assert found == as_json(groups), "json's types alone"
    for name, group in found["groups"].items():
        assert name in said
        for check, row in group.items():
            assert all(part in said for part in (check, row["state"], row["said"], row["fix"]))
    assert found["may_start"] is False
    assert verdict(groups) == "training may not start: 1 wrong, 1 to note"
    assert as_json(groups[:1])["may_start"] is True
    assert [one.name for one in of_state(groups, "wrong")] == ["c"]


def said_by(*words: str) -> list[str]:
    return ["doctor", *SMALL, "doctor.conversations=4", *words]


def test_a_folder_is_no_file_for_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(said_by(f"json={tmp_path}"))
    assert stopped.value.code == 2
    assert "doctor.json" in capsys.readouterr().err


def test_doctor_finds_nothing_wrong_with_the_embedded_target_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert cli.main(said_by(f"run.dir={tmp_path / 'run'}", f"json={out}", "doctor.steps=1")) == 0
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    assert found["may_start"] is True
    assert set(found["groups"]) == {"launcher", "target", "template", "text", "costs"}
    assert found["groups"]["text"]["vocabulary"]["curve"][-1] == [1536, 1.0]
    assert found["groups"]["costs"]["memory"]["rows"] >= 4
    assert found["groups"]["costs"]["time"]["steps"] == 1
    assert "tokens are supervised, from 'Good' to '<|end|>'" in said
    assert "training may start" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "check"),
    [
        (["drafter.draft_vocab_size=8", "doctor.measure=false"], "vocabulary"),
        (["target.path=data/tiny"], "probe"),
        (["launch=single"], "launcher"),
    ],
)
def test_the_exit_code_is_1_where_something_is_wrong(
    words: list[str], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check == "launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    out = tmp_path / "out.json"
    assert cli.main(said_by(f"run.dir={tmp_path / 'run'}", f"json={out}", *words)) == 1
    found = json.loads(out.read_text())
    wrong = [c for g in found["groups"].values() for c, f in g.items() if f["state"] == "wrong"]
    assert (found["may_start"], wrong) == (False, [check])


@pytest.mark.slow
def test_text_that_is_still_to_be_written_is_judged_by_a_sample(
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
    found = examine(written, SHORT, QUIET)
    assert states(found)["recorded"] == "ok"
    assert states(found)["overlap"] == "note", "asked for by data.overlap=keep"
    (shares,) = (one for g in found for one in g.findings if one.name == "sources")
    assert list(shares.facts["sources"]) == ["self"]
    assert "sample" not in capsys.readouterr().out


def test_a_run_begins_with_the_short_form(run: Run, loaded: Loaded) -> None:
    console = Console(record=True, width=120)
    at_start(console, run, loaded)
    said = console.export_text()
    trained = sum(p.numel() for p in run.drafter.parameters())
    assert f"{trained / 1e6:.2f} M parameters" in said
    assert "100.00% of the held-out answer tokens" in said
    for check in ("memory", "disk", "time"):
        assert check in said
    assert "mask" not in said, "nothing is to be said of it"


def test_training_refuses_what_is_wrong(loaded: Loaded, made: Material, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="worth nothing") as caught:
        fit(config(tmp_path, "drafter.draft_vocab_size=8"), loaded, made, QUIET)
    assert "vocabulary" in caught.value.message
    assert "drafter.draft_vocab_size" in caught.value.fix
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_folder_that_holds_a_run_is_named(run: Run) -> None:
    assert costs.folder(run.config).state == "ok"
    (run.folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    found = costs.folder(run.config)
    assert (found.state, found.facts["checkpoints"]) == ("note", 1)
