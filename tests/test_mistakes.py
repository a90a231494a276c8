"""User errors from the command line: one message, exit code 2, no changed file.

No part is mocked: every verb runs on a real run folder of the tiny target.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from outrider.launch import cli
from outrider.models.target import load
from tests.families import small_model

SMALL = [
    "data.max_length=128", "data.max_samples=60", "train.batch_tokens=256", "train.max_steps=2",
    "train.save_every=1", "drafter.depths=2", "drafter.init=random", "train.quick_eval=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a short training."""
    folder = tmp_path_factory.mktemp("mistakes") / "run"
    assert cli.main(["train", *SMALL, f"run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Run a command that must be refused; returns its message."""

    def call(*argv: object) -> str:
        before = contents(tmp_path)
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_error:
            cli.main([str(word) for word in argv])
        output = capfd.readouterr()
        assert exit_error.value.code == 2
        assert "Traceback" not in output.out + output.err
        assert contents(tmp_path) == before, "no file is changed, removed or added"
        (message,) = [part for part in output.err.split("outrider ")[1:] if "error" in part]
        assert len(message.splitlines()) in (2, 3, 4), "problem, reason, fix"
        return message

    return call


def contents(folder: Path) -> dict[str, str]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_unknown_key(refused: Refused, tmp_path: Path) -> None:
    message = refused("train", "train.lrr=1e-3", f"run.dir={tmp_path / 'new'}")
    assert "train.lrr" in message
    assert "train.lr" in message.replace("train.lrr", ""), "the suggested key"


def test_tap_out_of_range(refused: Refused, tmp_path: Path) -> None:
    message = refused("train", *SMALL, "drafter.taps=[1,3,8]", f"run.dir={tmp_path / 'new'}")
    assert "drafter.taps[2]" in message
    assert "0..7" in message


@pytest.mark.parametrize(
    ("verb", "key", "words"),
    [
        ("train", "data.path", ["data=jsonl"]),
        ("train", "data.path", ["data=self"]),
        ("train", "target.path", ["target=hf"]),
        ("train", "eval.prompts", []),
        ("prepare", "data.path", ["data=jsonl"]),
    ],
)
def test_missing_file(
    refused: Refused, tmp_path: Path, verb: str, key: str, words: list[str]
) -> None:
    missing = tmp_path / "missing.jsonl"
    message = refused(verb, *words, f"{key}={missing}", f"run.dir={tmp_path / 'new'}")
    assert key in message
    assert "missing.jsonl" in message


@pytest.mark.parametrize("verb", ["train", "prepare", "doctor", "record"])
def test_text_of_a_file_without_its_name(refused: Refused, verb: str) -> None:
    """In Python the text may come as `rows` instead."""
    assert "data.path" in refused(verb, "data=jsonl")


def test_missing_prompts_of_evaluation(refused: Refused, run: Path) -> None:
    assert "eval.prompts" in refused("eval", f"run.dir={run}", "eval.prompts=missing.jsonl")


def test_empty_answers(refused: Refused, tmp_path: Path) -> None:
    """The message shows a conversation without supervised tokens."""
    file = tmp_path / "empty.jsonl"
    contents_by_role = {"user": "What is a comet?", "assistant": ""}
    row = {"messages": [{"role": r, "content": c} for r, c in contents_by_role.items()]}
    file.write_text((json.dumps(row) + "\n") * 3)
    message = refused("train", "data=jsonl", f"data.path={file}", f"run.dir={tmp_path / 'new'}")
    assert "comet" in message


def test_drafter_of_another_vocabulary(refused: Refused, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(load.TINY, other)
    for name in ("model.safetensors", "config.json"):
        (other / name).unlink()
    small_model("llama", vocab_size=1400, num_hidden_layers=8).save_pretrained(other)
    message = refused("eval", f"run.dir={run}", f"target.path={other}", "eval.max_new_tokens=16")
    assert "1536" in message
    assert "1400" in message


def test_drafter_of_another_target(refused: Refused, run: Path, tmp_path: Path) -> None:
    """The same shapes, other weights: its acceptance would be a meaningless number."""
    other = tmp_path / "other"
    shutil.copytree(load.TINY, other)
    tensors = load_file(other / "model.safetensors")
    first = sorted(tensors)[0]
    save_file({**tensors, first: tensors[first] + 1}, other / "model.safetensors", {"format": "pt"})
    assert "target" in refused("eval", f"run.dir={run}", f"target.path={other}")


def test_truncated_drafter(refused: Refused, run: Path) -> None:
    file = run / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused("eval", f"run.dir={run}")


def test_truncated_checkpoints(refused: Refused, run: Path) -> None:
    """All of them: continuing is refused, and the finished drafter stays."""
    files = sorted((run / "checkpoints").rglob("*.safetensors"))
    for file in files:
        file.write_bytes(file.read_bytes()[:-100])
    longer = [word for word in SMALL if not word.startswith("train.max_steps")]
    message = refused("train", *longer, "train.max_steps=4", f"run.dir={run}")
    assert files[-1].parent.name in message


def test_run_of_other_settings(refused: Refused, run: Path) -> None:
    message = refused("train", *SMALL, "train.lr=1e-5", f"run.dir={run}")
    assert "train.lr" in message
