"""`outrider launch`: what is typed where, and what is refused before anybody waits in a queue."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outrider.launch.cluster import commands, environment, launch, run_here
from outrider.launch.jobs import ROOT
from outrider.train.cli import main
from outrider.train.clusters import ClusterConfig, read_cluster
from outrider.train.errors import ConfigError
from tests.runs import SMALL

SIXTEEN = ["train.batch_tokens=8192", "launch=zero2"]


def test_one_machine_is_one_command() -> None:
    (typed,) = commands(ClusterConfig(gpus=4), ["drafter=eagle3", "launch=ddp"])
    assert typed == "torchrun --standalone --nproc_per_node=4 train.py drafter=eagle3 launch=ddp"


def test_several_machines_meet_at_the_first_with_one_command() -> None:
    (typed,) = commands(ClusterConfig(nodes=2, gpus=8, host="a"), ["run.dir=my run"])
    assert typed == (
        "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_id=outrider --rdzv_backend=c10d "
        "--rdzv_endpoint=\"a:29500\" train.py 'run.dir=my run'"
    )


def test_accelerate_has_a_command_for_every_machine() -> None:
    first, second = commands(ClusterConfig(by="accelerate", nodes=2, gpus=8, host="a"), [])
    assert "--num_processes=16 --multi_gpu --machine_rank=0 --main_process_ip=a" in first
    assert first.replace("machine_rank=0", "machine_rank=1") == second


def test_cores_are_shared() -> None:
    assert environment(ClusterConfig(gpus=8, cores=96))["OMP_NUM_THREADS"] == "12"
    assert environment(ClusterConfig(gpus=8, cores=4))["OMP_NUM_THREADS"] == "1"


def test_a_slurm_script_is_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.sh"
    words = ["cluster.by=slurm", "cluster.nodes=2", "cluster.gpus=8", "cluster.hours=1.5",
             "cluster.partition=a100", f"cluster.out={out}"]  # fmt: skip
    assert main(["launch", *words, *SIXTEEN]) == 0
    text = out.read_text()
    for line in ("--nodes=2", "--gpus-per-node=8", "--time=01:30:00", "--signal=TERM@120",
                 "--partition=a100"):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert subprocess.run(["bash", "-n", str(out)], check=False).returncode == 0
    assert "srun --cpus-per-task=8 torchrun --nnodes=2 --nproc_per_node=8" in text
    assert "16 ranks (zero2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["cluster.gpus=2"], "launch"),  # of one process
        (["cluster.nodes=2", "launch=ddp"], "cluster.host"),
        (["cluster.gpus=16", "launch=ddp"], "train.batch_tokens"),
        (["cluster.gpus=3", "launch=ddp", "train.batch_tokens=2048"], "train.batch_tokens"),
        (["cluster.nodes=2", "cluster.host=a", "cluster.run=true", *SIXTEEN], "cluster.run"),
        (["cluster.by=slurm", "cluster.run=true"], "cluster.run"),
        (["cluster.gpu=2"], "cluster.gpu"),
        (["cluster.gpus=0"], "cluster.gpus"),
        (["drafter=egle3"], "drafter"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], key: str) -> None:
    before = dict(os.environ)
    with pytest.raises(ConfigError) as caught:
        launch(words)
    assert caught.value.key == key
    assert dict(os.environ) == before


def test_only_the_clusters_own_words_are_taken() -> None:
    cluster, rest = read_cluster(["drafter=eagle3", "cluster.gpus=2", "launch=ddp"])
    assert (cluster.gpus, rest) == (2, ["drafter=eagle3", "launch=ddp"])


def test_what_is_started_here_is_what_was_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    def run(command: list[str], env: dict[str, str], check: bool) -> Any:
        assert env["OMP_NUM_THREADS"] == "4"
        started.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr("subprocess.run", run)
    assert launch(["cluster.gpus=2", "cluster.run=true", "launch=ddp", f"run.dir={tmp_path}"]) == 7
    ((_, _, name, *rest),) = started
    assert name == "torch.distributed.run"
    words = [str(ROOT / "train.py"), "launch=ddp", f"run.dir={tmp_path}"]
    assert rest == ["--standalone", "--nproc_per_node=2", *words]
    there = ["accelerate.commands.launch", "--x", str(ROOT / "train.py")]
    assert run_here("accelerate launch --x train.py")[2:] == there


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_are_started_and_train(tmp_path: Path) -> None:
    words = ["cluster.gpus=2", "cluster.run=true", "cluster.cores=2", "launch=ddp", *SMALL]
    assert launch([*words, "drafter=eagle3", f"run.dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()
