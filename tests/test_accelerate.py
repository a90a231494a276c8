"""The files for `accelerate launch --config_file`: read by accelerate, equal to `launch`."""

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


LAUNCHERS = {  # accelerate's launchers, and the functions that make their environment
    "simple_launcher": lambda args: makers.prepare_simple_launcher_cmd_env(args)[1],
    "multi_gpu_launcher": lambda args: makers.prepare_multi_gpu_env(args),
    "deepspeed_launcher": lambda args: makers.prepare_deepspeed_cmd_env(args)[1],
}


def accelerate_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment that accelerate makes for the ranks, without starting them."""
    environment = dict[str, str]()

    def record(make: Callable[[Any], dict[str, str]], args: Any) -> None:
        environment.update(make(args), WORLD_SIZE=str(args.num_processes))

    for name, make in LAUNCHERS.items():
        monkeypatch.setattr(launch, name, partial(record, make))
    arguments = ["--config_file", str(path), "train.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    return environment


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_environment_of_accelerate_matches_launch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in accelerate_environment(path, monkeypatch).items():
        monkeypatch.setenv(name, value)
    distributed.require_matching_launcher(launch_of(path))


def start(path: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    return subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["zero2", "two_machines"])
def test_two_ranks_train_under_a_file(name: str, tmp_path: Path) -> None:
    """Two processes of one machine, and of two machines that are both this one."""
    path = PLACE / f"{name}.yaml"
    run = ["--num_processes", "2", "--main_process_port", str(free_port())]
    arguments = [
        "train.py", *SMALL, "train.max_steps=1", f"launch={launch_of(path).name}",
        f"run.dir={tmp_path}",
    ]  # fmt: skip
    meet = ["--main_process_ip", "127.0.0.1"] if name == "two_machines" else []
    ranks = ["0", "1"] if meet else ["0"]
    pair = [start(path, *run, *meet, "--machine_rank", rank, *arguments) for rank in ranks]
    outputs = [process.communicate()[0] for process in pair]
    assert [process.returncode for process in pair] == [0] * len(pair), "\n".join(outputs)
    assert read_json(tmp_path / "training.json", "")["budget"]["ranks"] == 2
