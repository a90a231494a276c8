"""The files for `accelerate launch --config_file`: read by accelerate, and no rival of `launch`."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands import launch
from accelerate.utils import launch as makers

from outrider.conf.compose import choices
from outrider.conf.files import read_json
from outrider.conf.schema import LaunchConfig
from outrider.launch.processes import ROOT, clean_environment
from outrider.train import distributed
from tests.runs import SMALL, free_port

PLACE = ROOT / "launch" / "accelerate"
FILES = sorted(PLACE.glob("*.yaml"))
LAUNCHES = {"two_machines": "ddp"}  # the others are named after theirs


def launch_of(path: Path) -> Any:
    return LaunchConfig(name=LAUNCHES.get(path.stem, path.stem))  # type: ignore[arg-type]


def test_every_launch_has_a_file() -> None:
    assert {path.stem for path in FILES} == {*choices("launch"), "two_machines"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_opens_with_a_command_that_names_it(path: Path) -> None:
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    command = f"accelerate launch --config_file {path.relative_to(ROOT)} "
    assert any(command in line for line in comment)


MAKERS = {  # accelerate's ways to start processes, and what makes their environment
    "simple_launcher": lambda args: makers.prepare_simple_launcher_cmd_env(args)[1],
    "multi_gpu_launcher": lambda args: makers.prepare_multi_gpu_env(args),
    "deepspeed_launcher": lambda args: makers.prepare_deepspeed_cmd_env(args)[1],
}


def told(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that accelerate makes for the ranks, right before it would start them."""
    found = dict[str, str]()

    def stopped(make: Callable[[Any], dict[str, str]], args: Any) -> None:
        found.update(make(args), WORLD_SIZE=str(args.num_processes))

    for name, make in MAKERS.items():
        monkeypatch.setattr(launch, name, partial(stopped, make))
    words = ["--config_file", str(path), "train.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_accelerate_tells_the_ranks_is_what_launch_says(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in told(path, monkeypatch).items():
        monkeypatch.setenv(name, value)
    distributed.require_matching_launcher(launch_of(path))


def begun(path: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    return subprocess.Popen(
        [*command, *words], cwd=ROOT, env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["zero2", "two_machines"])
def test_two_ranks_train_under_a_file(name: str, tmp_path: Path) -> None:
    """Two processes of one machine; and of two, both of which are this one."""
    path = PLACE / f"{name}.yaml"
    run = ["--num_processes", "2", "--main_process_port", str(free_port())]
    words = [
        "train.py", *SMALL, "train.max_steps=1", f"launch={launch_of(path).name}",
        f"run.dir={tmp_path}",
    ]  # fmt: skip
    meet = ["--main_process_ip", "127.0.0.1"] if name == "two_machines" else []
    ranks = ["0", "1"] if meet else ["0"]
    pair = [begun(path, *run, *meet, "--machine_rank", rank, *words) for rank in ranks]
    said = [process.communicate()[0] for process in pair]
    assert [process.returncode for process in pair] == [0] * len(pair), "\n".join(said)
    assert read_json(tmp_path / "training.json", "")["budget"]["ranks"] == 2
