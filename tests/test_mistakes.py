"""What users get wrong, from the command line to the exit code: one message, 2, nothing lost.

Nothing is replaced here: every verb runs its own code on a real run folder of the tiny target.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.launch import cli
from outrider.models import load
from tests.families import small_model

SMALL = [
    "data.max_length=128", "data.max_samples=60", "train.batch_tokens=256", "train.max_steps=2",
    "train.save_every=1", "drafter.depths=2", "drafter.init=random", "train.quick_eval=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as a short training leaves it."""
    folder = tmp_path_factory.mktemp("mistakes") / "run"
    torch.set_num_threads(1)
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
        with pytest.raises(SystemExit) as left:
            cli.main([str(word) for word in argv])
        said = capfd.readouterr()
        assert left.value.code == 2
        assert "Traceback" not in said.out + said.err
        assert contents(tmp_path) == before, "nothing is lost, nothing is left behind"
        (message,) = [part for part in said.err.split("outrider ")[1:] if "error" in part]
        assert len(message.splitlines()) in (2, 3, 4), "what is wrong, why, what to do"
        return message

    return call


def contents(folder: Path) -> dict[str, str]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_an_unknown_key(refused: Refused, tmp_path: Path) -> None:
    said = refused("train", "train.lrr=1e-3", f"run.dir={tmp_path / 'new'}")
    assert "train.lrr" in said
    assert "train.lr" in said.replace("train.lrr", ""), "the key that was meant"


def test_a_tap_out_of_range(refused: Refused, tmp_path: Path) -> None:
    said = refused("train", *SMALL, "drafter.taps=[1,3,8]", f"run.dir={tmp_path / 'new'}")
    assert "drafter.taps[2]" in said
    assert "0..7" in said


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
def test_a_missing_file(
    refused: Refused, tmp_path: Path, verb: str, key: str, words: list[str]
) -> None:
    missing = tmp_path / "missing.jsonl"
    said = refused(verb, *words, f"{key}={missing}", f"run.dir={tmp_path / 'new'}")
    assert key in said
    assert "missing.jsonl" in said


def test_prompts_of_an_evaluation_that_are_missing(refused: Refused, run: Path) -> None:
    assert "eval.prompts" in refused("eval", f"run.dir={run}", "eval.prompts=missing.jsonl")


def test_empty_answers(refused: Refused, tmp_path: Path) -> None:
    """A conversation in which nothing would be learned is shown."""
    file = tmp_path / "empty.jsonl"
    said_by = {"user": "What is a comet?", "assistant": ""}
    row = {"messages": [{"role": r, "content": c} for r, c in said_by.items()]}
    file.write_text((json.dumps(row) + "\n") * 3)
    said = refused("train", "data=jsonl", f"data.path={file}", f"run.dir={tmp_path / 'new'}")
    assert "comet" in said


def test_a_drafter_of_another_vocabulary(refused: Refused, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(load.TINY, other)
    for name in ("model.safetensors", "config.json"):
        (other / name).unlink()
    small_model("llama", vocab_size=1400, num_hidden_layers=8).save_pretrained(other)
    said = refused("eval", f"run.dir={run}", f"target.path={other}")
    assert "1536" in said
    assert "1400" in said


def test_a_drafter_of_another_target(refused: Refused, run: Path, tmp_path: Path) -> None:
    """The same shapes, other weights: its acceptance would be a meaningless number."""
    other = tmp_path / "other"
    shutil.copytree(load.TINY, other)
    tensors = load_file(other / "model.safetensors")
    first = sorted(tensors)[0]
    save_file({**tensors, first: tensors[first] + 1}, other / "model.safetensors", {"format": "pt"})
    assert "target" in refused("eval", f"run.dir={run}", f"target.path={other}")


def test_a_truncated_drafter(refused: Refused, run: Path) -> None:
    file = run / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused("eval", f"run.dir={run}")


def test_truncated_checkpoints(refused: Refused, run: Path) -> None:
    """All of them: continuing is refused, and the finished drafter stays."""
    files = sorted((run / "checkpoints").rglob("*.safetensors"))
    for file in files:
        file.write_bytes(file.read_bytes()[:-100])
    longer = [word for word in SMALL if not word.startswith("train.max_steps")]
    said = refused("train", *longer, "train.max_steps=4", f"run.dir={run}")
    assert files[-1].parent.name in said


def test_a_run_of_other_settings(refused: Refused, run: Path) -> None:
    said = refused("train", *SMALL, "train.lr=1e-5", f"run.dir={run}")
    assert "train.lr" in said
