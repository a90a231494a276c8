"""From settings to training data: what is mixed, recorded and shared."""

import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from outrider.conf.compose import compose
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError, exit_on_error
from outrider.data.corpus import load_training_data
from outrider.data.record.reader import RecordedTraces
from outrider.data.reporter import Reporter
from outrider.data.training_data import TrainingData
from outrider.launch import cli
from outrider.models import drafters
from outrider.models.target.load import LoadedTarget, load_target
from outrider.train.loop import fit
from outrider.train.settings import parse

ANSWERS = 20
OWN = [
    "target=tiny", "data=self", "data.max_length=64", "data.holdout=0.2",
    f"data.generate.samples={ANSWERS}", "data.generate.max_new_tokens=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose(["target=tiny"])).target)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Write ten conversations to a file."""
    turns = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Good day."}]
    lines = [json.dumps({"id": f"given-{i}", "messages": turns}) for i in range(10)]
    file = tmp_path / "given.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def training_data(loaded: LoadedTarget, *words: str) -> TrainingData:
    config = parse(compose([*OWN, *words]))
    taps = drafters.resolve_taps(config.drafter, loaded.target.num_layers)
    return load_training_data(config, loaded, taps, Reporter.silent())


def test_given_conversations_are_mixed_in_at_their_share(loaded: LoadedTarget, given: Path) -> None:
    """A quarter of all: seven beside twenty. Mixed text is not recorded."""
    mixed = training_data(loaded, f"data.given={given}", "data.given_share=0.25")
    assert len(mixed.documents) == mixed.about["documents"] == ANSWERS + 7
    assert mixed.about["cases"] == {"used": ANSWERS}
    assert mixed.about["given_cases"] == {"used": 7}
    assert mixed.recorded is None
    assert "given" in mixed.about
    alone = training_data(loaded)
    assert len(alone.documents) == ANSWERS
    assert alone.recorded is not None
    assert mixed.documents[:ANSWERS] == alone.documents


def test_self_generated_text_is_recorded_in_the_precision_of_the_target(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    """Drafters share the text; those that read the same states share the recording."""
    recordings = {}
    for name in drafters.trained_names():
        source = trained_source(training_data(loaded, f"drafter={name}", "record.states=int8"))
        assert source.folder.layout.states == "same"
        recordings[name] = source.path
    assert recordings["eagle"] == recordings["hass"] != recordings["eagle3"]
    assert len(list((tmp_path / "cache" / "self").iterdir())) == 1


@pytest.mark.parametrize(
    "words", [["data.generate.record=false"], ["data.mode=online"]], ids=["record", "mode"]
)
def test_self_generated_text_is_not_recorded_on_request(
    loaded: LoadedTarget, words: list[str]
) -> None:
    assert training_data(loaded, *words).recorded is None


def test_a_run_trained_online_continues_from_an_exact_recording(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    """Runs of earlier versions on self-generated text have no layout in their manifest."""
    words = [*OWN, f"run.dir={tmp_path / 'run'}", "train.batch_tokens=128", "drafter=medusa"]
    for steps, changes in ((1, ["data.mode=online"]), (2, []), (3, ["data.mode=online"])):
        config = parse(compose([*words, f"train.max_steps={steps}"]))
        data = training_data(loaded, "drafter=medusa", *changes)
        assert fit(config, loaded, data, Console(quiet=True)) is not None
    lossy = training_data(loaded, "drafter=medusa", "data.mode=recorded", "record.states=int8")
    config = parse(compose([*words, "train.max_steps=4"]))
    with pytest.raises(RunError, match="was trained from the target's own output"):
        fit(config, loaded, lossy, Console(quiet=True))


def trained_source(data: TrainingData) -> RecordedTraces:
    assert data.recorded is not None
    assert isinstance(data.recorded.train, RecordedTraces)
    return data.recorded.train


def test_data_given_requires_self_generation(given: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.given"):
        parse(compose(["data=jsonl", f"data.path={given}", f"data.given={given}"]))


PEAK = """
import re, sys
from pathlib import Path
from outrider.launch import cli
cli.main(sys.argv[1:])
# getrusage would include the memory of the parent process
print("peak", int(re.findall(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[0]) * 1024)
"""


@pytest.mark.slow
def test_ten_million_tokens_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    """From a file to packed rows; Python, torch and the target take about 430 MB."""
    file, sentence = tmp_path / "chats.jsonl", "the kite is blue and the boat sails home in spring "
    with file.open("w") as stream:
        for number in range(10_600):
            row = {"prompt": f"Where is kite {number}?", "completion": sentence * 75}
            stream.write(json.dumps(row) + "\n")
    words = ["prepare", "target=tiny", "data=jsonl", f"data.path={file}", "data.max_length=1024"]
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, *words], capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    found = re.findall(r"([0-9,]+) training rows of ([0-9]+) tokens", ran.stdout)[0]
    rows, length = (int(number.replace(",", "")) for number in found)
    filled = float(re.findall(r"([0-9.]+)% filled", ran.stdout)[0])
    assert rows * length * filled / 100 > 9_500_000  # a twentieth is held out
    assert int(ran.stdout.split("peak ")[1]) < 10**9


GOOD = [json.dumps({"prompt": f"{n} plums?", "completion": f"{n} plums."}) for n in range(30)]
SHAPES = [  # a row of each, and the rule that applies
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "used"),
    ({"instruction": "Add.", "input": "2 2", "output": "4"}, "used"),
    ({"text": "in no shape"}, "unknown shape"),
    ({"messages": "no list"}, "unknown shape"),
    ({"messages": [1, None]}, "no turns"),
    ({"prompt": 5, "completion": "x"}, "no turns"),
    ({"turns": ["a question"]}, "no answer"),
    ({"prompt": "half an emoji", "completion": "\ud83d"}, "no answer"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "leading answer"),
]


def prepare(
    tmp_path: Path, content: str | bytes, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    """Return exit code and output of `outrider prepare` for a file of these bytes."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    usual = ["prepare", "target=tiny", "data=jsonl", f"data.path={file}", "data.max_length=64"]
    try:
        with exit_on_error("outrider prepare"):
            code = cli.main([*usual, "data.holdout=0.2", *words])
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else -1
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_rows_of_mixed_shapes_are_used_or_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*GOOD, *(json.dumps(row) for row, _ in SHAPES)]
    code, output = prepare(tmp_path, "\n".join(lines), capsys)
    assert code == 0
    counts = dict(re.findall(r"^\S ([a-z ]+?) +\S +(\d+) ", output, re.MULTILINE))
    expected = Counter(case for _, case in SHAPES)
    assert {case: int(counts[case]) for case in expected} == {**expected, "used": 32, "no turns": 3}
    assert "data: 32 conversations" in output


MIXED = [  # a row and how often it is left out, by reason
    (GOOD[0], ""),  # a copy
    ({"messages": [{"role": role, "content": "Two plums?"} for role in ("user", "user", "assistant",
                                                                         "user")]}, ""),
    ('{"prompt": "cut o', "bad row"),
    ({"text": "in no shape"}, "unknown shape"),
    ({"turns": ["a question"]}, "no answer"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "no turns"),
    ({"prompt": "What is the colour of a plum?", "completion": "It is blue."}, "in the suite"),
    ({"prompt": "Many?", "completion": "plum " * 200}, "too long"),
    ({"prompt": "One?", "completion": "a"}, "short"),
]  # fmt: skip


@pytest.mark.parametrize(("limit", "used"), [(None, 32), (31, 31), (7, 7)])
def test_every_row_is_used_or_left_out_once(
    loaded: LoadedTarget, tmp_path: Path, limit: int | None, used: int
) -> None:
    """Screen, manifest and rows show the same number, and the cases add up to the rows read."""
    rows = [row if isinstance(row, str) else json.dumps(row) for row, _ in MIXED]
    (tmp_path / "a.jsonl").write_text("\n".join([*GOOD, *rows]))
    suite = {"id": "one", "turns": ["What is the colour of a plum?"]}
    (tmp_path / "suite.jsonl").write_text(json.dumps(suite))
    config = parse(compose([
        "target=tiny", "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", "data.max_length=64",
        "data.holdout=0.2", f"eval.prompts={tmp_path / 'suite.jsonl'}", "data.overlap=drop",
        "data.long=drop", "data.skip_bad=1", "data.shortest=3",
        f"data.max_samples={'null' if limit is None else limit}",
    ]))  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    data = load_training_data(config, loaded, (1, 3, 4), Reporter(console))
    output = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    left_out = Counter(reason for _, reason in MIXED if reason) if limit is None else Counter()
    cases = data.about["cases"]
    assert {case: cases.get(case, 0) for case in ("used", *left_out)} == {"used": used, **left_out}
    assert len(data.documents) == data.about["documents"] == used
    title = f"conversations: {used + len(left_out)} read = {used} used + {len(left_out)} left out"
    assert title in output
    assert f"data: {used} conversations, " in output


def test_rows_of_one_answer_are_counted_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": role, "content": "plums"} for role in ("user", "assistant") * 2]
    rows = [json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, *turns[1:]]})
            for n in range(10)]  # fmt: skip
    code, output = prepare(tmp_path, "\n".join(rows), capsys, "data.supervise=each")
    assert code == 0
    assert "rows of one answer: 20 read = 20 used + 0 left out" in output
    assert "data: 20 rows of one answer, " in output


def test_self_generated_text_beyond_max_samples_is_counted(loaded: LoadedTarget) -> None:
    about = training_data(loaded, "data.mode=online", f"data.max_samples={ANSWERS - 5}").about
    assert about["cases"] == {"used": ANSWERS - 5, "not selected": 5}
    assert about["documents"] == ANSWERS - 5


BAD = {
    b"": (0, "The file is empty"),
    b"\n \n": (0, "has no conversation with an answer (empty)"),
    b'{"text": "x"}': (0, "has no conversation with an answer (unknown shape: 1). The first:"),
    "\n".join(GOOD).encode("utf-16"): (0, "iconv -f UTF-16"),
    GOOD[0].encode(): (0, "1 conversation: too few to train"),
    "\n".join([*GOOD, GOOD[0][:20]]).encode(): (1, "line 31: this is not one complete JSON object"),
    "\n".join([*GOOD, '{"prompt": "\u00e9"}']).encode("latin-1"): (1, "line 31: 'utf-8' codec"),
    "\n".join([*GOOD, '{"a": ' + "x" * (1 << 24)]).encode(): (1, "line 31: the line is longer"),
    "\n".join([*GOOD, "[" * 100_000]).encode(): (1, "line 31: maximum recursion"),
    "\n".join([*GOOD, "[1]"]).encode(): (1, "line 31: a JSON object is needed, not list"),
}


@pytest.mark.parametrize("content", BAD, ids=[message for _, message in BAD.values()])
def test_a_bad_file_raises_or_its_bad_rows_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    """The whole command: its output and its exit code."""
    skipped, expected = BAD[content]
    code, output = prepare(tmp_path, content, capsys)
    assert code == 2
    assert expected in " ".join(output.split())
    if skipped:
        assert "data.skip_bad=1" in output
        code, output = prepare(tmp_path, content, capsys, "data.skip_bad=1")
        assert code == 0
        assert re.search(r"bad row +\S +1 ", output)
        assert "data: 30 conversations" in output
