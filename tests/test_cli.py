"""The command line: help, exit codes, dispatch to verbs."""

import gc
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from outrider.conf import garbage
from outrider.conf.clusters import ClusterConfig
from outrider.conf.command_settings import MemoryConfig
from outrider.conf.compose import compose, default_values, known_keys, verb_group
from outrider.conf.errors import ConfigError, RunError, exit_on_error
from outrider.conf.schema import Config, to_yaml
from outrider.eval import ranks
from outrider.launch import cli
from outrider.launch.cluster import assume_world_size, checked_config
from outrider.launch.help import EVERYDAY, EXAMPLES
from outrider.launch.verbs import BENCHES, SAMPLING, VERBS
from outrider.models.decode.sampling_params import Sampling
from outrider.models.drafters import trained_names
from outrider.train.settings import load_run, parse
from tests.test_page import write_run

ROOT = Path(__file__).parent.parent
DOCUMENTED_KEYS = re.findall(
    r"\S+",
    """
run.dir run.seed target.path target.revision target.dtype target.trust_remote_code data.path
data.max_length drafter.depths drafter.taps drafter.draft_vocab_size train.max_steps
train.max_minutes train.batch_tokens train.lr train.warmup train.clip train.eval_every
train.save_every train.resume launch.precision launch.accumulation eval.prompts
eval.max_new_tokens eval.limit eval.out decode.depth decode.width decode.nodes
decode.temperature decode.top_p decode.top_k
""",
)
LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "OUTRIDER_DEBUG")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of launchers, of debugging and of the terminal's width."""
    for name in (*LAUNCHERS, "ACCELERATE_MIXED_PRECISION", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


class Stub(types.ModuleType):
    """A replacement of a verb's module."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace every verb's module by one that records its arguments."""
    recorded: list[object] = []

    def record(*arguments: object, **more: object) -> int:
        recorded.extend([*arguments, *more.items()])
        return 0

    for verb in (*VERBS.values(), *BENCHES.values()):
        module, _, function = verb.target.partition(":")
        if not module:
            continue
        if type(sys.modules.get(module)) is not Stub:
            monkeypatch.setitem(sys.modules, module, Stub(module))
        setattr(sys.modules[module], function, record)
    return recorded


def failed(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "all"]) == 0
    listed = set(re.findall(r"^  (\w+\.[\w.]+)", capsys.readouterr().out, re.MULTILINE))
    assert set(DOCUMENTED_KEYS) <= listed
    names = [*trained_names(), "draft_verify"]  # `train` searches the latter's settings
    trained = {key for name in names for key in default_values(f"drafter/{name}")}
    known = {key for key in known_keys() if "." in key}
    assert listed == {key for key in known if key in trained or not key.startswith("drafter.")}


def test_help_shows_choices_defaults_and_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["train", "all", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "target = hf | smollm2 | tiny (default tiny)" in out
    assert "train.clip 1.0 gradient clipping: largest norm (> 0)" in out
    assert "data.max_length null tokens per row; null: 1024 (data=tiny: 256)" in out
    assert re.search(r"drafter.depths 4; dflash, .{0,40}training-time-test steps", out)
    assert "accelerate launch --num_processes 8 -m outrider train launch=zero2" in out


def test_help_of_eval_lists_only_what_eval_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", "--help", "all"])
    listed = set(re.findall(r"^  (\w+\.[\w.]+)", capsys.readouterr().out, re.MULTILINE))
    assert listed == {key for key in known_keys("eval") if "." in key}


@pytest.mark.parametrize("verb", ["train", "eval", "doctor", "chat"])
def test_help_shows_the_everyday_keys_first(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    keys = EVERYDAY.get(verb, EVERYDAY.get(VERBS[verb].root, ()))
    assert len(keys) == 15
    assert all(re.search(rf"^  {re.escape(key)} ", out, re.MULTILINE) for key in keys)
    assert "train.betas" not in out
    assert f"outrider {verb} --help all lists every key." in out


@pytest.mark.parametrize(
    ("verb", "word"),
    [
        ("ranks", "eval.limit=2"),
        ("ranks", "decode.temperature=1"),
        ("plan", "eval.grid=[chain@0]"),
        ("plan", "decode=opt_tree"),
        ("publish", "eval.limit=3"),
        ("chat", "eval.repeats=2"),
    ],
)
def test_a_key_that_the_verb_would_ignore_is_refused(
    verb: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        cli.main([verb, f"run.dir={tmp_path / 'run'}", word])
    key = word.partition("=")[0]
    assert re.search(rf"{re.escape(key)} = .*\n  {verb} does not use", capsys.readouterr().err)
    cli.main([verb, "--help", "all"])
    assert f"  {key} " not in capsys.readouterr().out


def test_a_plan_takes_every_setting_of_sampling() -> None:
    """The table of verbs names them itself, so that help needs no torch."""
    assert tuple(f"decode.{name}" for name in Sampling._fields) == SAMPLING


def test_ranks_has_the_prompts_of_the_run_unless_others_are_given(tmp_path: Path) -> None:
    """The text is the training's, from which conversations like these prompts were dropped."""
    run = write_run(tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(to_yaml(parse(compose(["target=tiny", "eval.prompts=own.jsonl"]))))
    assert ranks._with_own_prompts(load_run(run, [])).eval.prompts == "own.jsonl"
    others = load_run(run, ["eval.prompts=others.jsonl"])
    assert ranks._with_own_prompts(others).eval.prompts == "others.jsonl"


def test_a_mapping_of_keys_is_refused_with_a_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", f"run.dir={tmp_path / 'run'}", "decode={temperature: 1}"])
    assert "Write each key that it uses: decode.<key>=..." in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["eval", "chat"])
def test_a_missing_run_is_one_message(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([verb])
    error = capsys.readouterr().err
    assert "run.dir = ''" in error
    assert "Without a run: drafter=" in error


def test_help_lists_every_verb_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.line)}", out, re.MULTILINE)


@pytest.mark.parametrize("verb", ["compare", "bench"])
def test_help_of_verbs_without_keys(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"outrider {verb} ")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "bench"])
def test_help_ends_with_examples_of_the_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    _, _, examples = capsys.readouterr().out.partition("\nexamples\n")
    assert examples.startswith(f"  outrider {verb} ")


@pytest.mark.parametrize("verb", ["launch", "memory", "prepare", "record"])
def test_examples_are_valid(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the target, which is not fetched."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostfile").write_text("node-0 slots=8\nnode-1 slots=8\n")
    for file in ("chats.jsonl", "prompts.jsonl"):
        (tmp_path / file).write_text("{}\n")
    for line in EXAMPLES[verb].strip().splitlines():
        name, *words = shlex.split(line, comments=True)[1:]
        words = [word for word in words if word != "--explain"]
        if name == "launch":
            cluster, words = verb_group(ClusterConfig, "cluster", words)
            checked_config(cluster, words)
        elif name == "memory":
            settings, words = verb_group(MemoryConfig, "memory", words)
            with assume_world_size(settings.gpus):
                parse(compose(words))
        else:
            cli._arguments(name, words)


def test_help_has_the_width_of_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, which can be copied, are not wrapped."""
    widest = dict[str, int]()
    for columns in ("80", "120", ""):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli.main(["train", "--help"]) == 0
        table = capsys.readouterr().out.partition("\nexamples\n")[0]
        widest[columns] = max(map(len, table.splitlines()))
    assert widest == {"80": 80, "120": 120, "": 100}


@pytest.mark.parametrize("name", BENCHES)
def test_help_of_a_benchmark_lists_its_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", name, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"outrider bench {name} [key=value ...]")
    assert re.search("^  (out|run.dir) ", output, re.MULTILINE)


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_a_verb_receives_the_validated_configuration(verb: str, calls: list[object]) -> None:
    assert cli.main([verb, "drafter=eagle3", "train.lr=1e-4"]) == 0
    (config,) = calls
    assert isinstance(config, Config)
    assert config.train.lr == 1e-4


@pytest.mark.parametrize("verb", ["doctor", "advise"])
def test_a_verb_with_a_group_of_its_own_receives_both(verb: str, calls: list[object]) -> None:
    own = "json=out.json" if verb == "doctor" else "advise.steps=7"
    assert cli.main([verb, "train.lr=1e-4", own]) == 0
    config, settings = calls
    assert isinstance(config, Config)
    assert config.train.lr == 1e-4
    assert getattr(settings, "json", None) == "out.json" or getattr(settings, "steps", None) == 7
    assert failed(verb, f"{verb}.coffee=1") == 2


def test_eval_receives_the_run(calls: list[object], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(parse(compose(["train.lr=5e-4"]))))
    assert cli.main(["eval", f"run.dir={tmp_path}", "eval.limit=8"]) == 0
    (config,) = calls
    assert isinstance(config, Config)
    assert (config.run.dir, config.eval.limit, config.train.lr) == (str(tmp_path), 8, 5e-4)


def test_only_the_process_of_a_command_exempts_objects_from_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_is_command", False)
    garbage.exempt_objects()
    assert gc.get_freeze_count() == 0
    with pytest.raises(SystemExit):
        cli.command(["--version"])
    try:
        garbage.exempt_objects()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_bench_and_compare_receive_their_words(calls: list[object]) -> None:
    assert cli.main(["bench", "train-step", "drafter.depths=7"]) == 0
    assert cli.main(["compare", "runs/a", "runs/b"]) == 0
    assert calls == [["drafter.depths=7"], ["runs/a", "runs/b"]]


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"],
        ["train", "--fast"],
        ["train", "drafter=egle3"],
        ["train", "train.lrr=1"],
        ["train", "data=jsonl", "data.path=no/such.jsonl"],
        ["eval"],
        ["eval", "run.dir=no/such/run"],
        ["eval", "train.lr=1"],
        ["compare"],
        ["bench"],
        ["bench", "coffee"],
        ["doctor", "--multirun"],
        ["train", "-m", "train.lr=1e-4,1e-3"],  # both would write into one folder
        ["train", "-m", "drafter=eagle,egle3"],
    ],
)
def test_an_error_exits_with_2_and_one_message(
    argv: list[str], calls: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(*argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    assert len(output.err.splitlines()) in (2, 3), "the key, the reason, the fix"
    assert calls == []


@pytest.mark.parametrize("name", ["eval", "ranks", "plan", "compare", "memory", "advise"])
def test_explain_is_an_option_of_verbs_that_print_numbers(
    name: str, calls: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(parse(compose([]))))
    words = {"compare": [str(tmp_path)], "memory": []}.get(name, [f"run.dir={tmp_path}"])
    assert cli.main([name, *words, "--explain"]) == 0
    assert calls[-1] == ("explain", True)
    assert cli.main([name, "--help"]) == 0
    assert "--explain prints every table" in capsys.readouterr().out
    assert failed("train", "--explain") == 2


def test_cfg_prints_the_configuration_and_runs_nothing(
    calls: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--cfg", "job", "train.lr=5e-4"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == to_yaml(parse(compose(["train.lr=5e-4"]))).strip()
    assert calls == []


@pytest.mark.parametrize("name", ["LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"])
def test_a_sweep_under_a_launcher_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "0")
    assert failed("train", "-m", "train.lr=1e-4,1e-3") == 2
    assert "every rank would run every job" in capsys.readouterr().err


def test_a_config_error_is_printed_by_rank_0_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught, exit_on_error("train.py"):
        raise ConfigError("train.lr", 0, "why", "fix")
    assert caught.value.code == 2
    assert capsys.readouterr().err == ""


def test_a_config_error_reads_as_key_why_fix(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exit_on_error("train.py"):
        raise ConfigError("drafter.taps[2]", 36, "Layers are 0..35.", "Use [2, 18, 33].")
    expected = (
        "train.py: config error: drafter.taps[2] = 36\n  Layers are 0..35.\n  Use [2, 18, 33].\n"
    )
    assert capsys.readouterr().err == expected


def test_a_run_error_names_its_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as caught, exit_on_error("train.py"):
        raise RunError("model.safetensors is truncated.", "Copy it again.")
    assert caught.value.code == 2
    message = "train.py [rank 3]: error: model.safetensors is truncated.\n  Copy it again.\n"
    assert capsys.readouterr().err == message


def test_debugging_restores_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    with pytest.raises(ConfigError), exit_on_error("train.py"):
        raise ConfigError("train.lr", 0, "why", "fix")


def test_ctrl_c_ends_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, exit_on_error("train.py"):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == ""


def test_other_exceptions_propagate() -> None:
    with pytest.raises(ZeroDivisionError), exit_on_error("train.py"):
        raise ZeroDivisionError


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_scripts_print_their_own_name_in_messages(script: str, tmp_path: Path) -> None:
    """From any folder, without installation: Python adds the script's folder to its path."""
    command = [sys.executable, str(ROOT / script), "no.such=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{script}: config error: no.such = '1'\n")
    assert list(tmp_path.iterdir()) == [], "Hydra wrote nothing"
