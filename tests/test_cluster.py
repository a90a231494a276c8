"""`outrider launch`: the commands per machine, and validation before a job is queued."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.clusters import ClusterConfig
from outrider.conf.compose import verb_group
from outrider.conf.errors import ConfigError
from outrider.launch.cli import main
from outrider.launch.cluster import launch, launch_commands, local_command, rank_environment
from outrider.launch.processes import ROOT, clean_environment
from tests.runs import SMALL, free_port

SIXTEEN = ["train.batch_tokens=8192", "launch=zero2"]


def test_one_machine_has_one_command() -> None:
    (command,) = launch_commands(ClusterConfig(gpus=4), ["drafter=eagle3", "launch=ddp"])
    assert command == "torchrun --standalone --nproc_per_node=4 train.py drafter=eagle3 launch=ddp"


def test_machines_share_one_command_with_the_first_as_rendezvous() -> None:
    (command,) = launch_commands(ClusterConfig(nodes=2, gpus=8, host="a"), ["run.dir=my run"])
    assert command == (
        "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_id=outrider --rdzv_backend=c10d "
        "--rdzv_endpoint=\"a:29500\" train.py 'run.dir=my run'"
    )


def test_accelerate_has_a_command_per_machine() -> None:
    first, second = launch_commands(ClusterConfig(by="accelerate", nodes=2, gpus=8, host="a"), [])
    assert "--num_processes=16 --multi_gpu --machine_rank=0 --main_process_ip=a" in first
    assert first.replace("machine_rank=0", "machine_rank=1") == second


def test_ranks_share_the_cores() -> None:
    assert rank_environment(ClusterConfig(cores=96), 8)["OMP_NUM_THREADS"] == "12"
    assert rank_environment(ClusterConfig(cores=4), 8)["OMP_NUM_THREADS"] == "1"


def test_the_slurm_script_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_invalid_clusters_are_refused(words: list[str], key: str) -> None:
    before = dict(os.environ)
    with pytest.raises(ConfigError) as caught:
        launch(words)
    assert caught.value.key == key
    assert dict(os.environ) == before


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


def test_a_hostfile_gives_a_command_per_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hostfile(tmp_path, "# the cluster\nnode-0 slots=4\n\n10.0.0.7  slots = 2 max_slots=4\n")
    words = [f"cluster.hosts={path}", "cluster.port=29600", "train.batch_tokens=6144", "launch=ddp"]
    assert launch(words) == 0
    output = capsys.readouterr().out
    assert "6 ranks (ddp)" in output
    first, second = output.split("# on node-0\n")[1].split("# on 10.0.0.7\n")
    assert "OMP_NUM_THREADS=2\n" in first
    assert "OMP_NUM_THREADS=4\n" in second
    for text, slots in ((first, 4), (second, 2)):
        assert f"--nnodes=2 --nproc_per_node={slots} " in text
        assert '--rdzv_endpoint="node-0:29600" train.py train.batch_tokens=6144 launch=ddp' in text


def test_accelerate_accepts_a_hostfile_of_equal_machines(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "a slots=8\nb slots=8\n")
    first, second = launch_commands(ClusterConfig(by="accelerate", hosts=str(path)), [])
    assert "--num_processes=16 --multi_gpu --machine_rank=0 --main_process_ip=a" in first
    assert first.replace("machine_rank=0", "machine_rank=1") == second


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", [], "contains no host"),
        ("# empty\n", [], "contains no host"),
        ("a slots=2\na slots=2\n", [], "Line 2 repeats a."),
        ("a\n", [], "Line 1 is 'a'"),
        ("a:8\n", [], "Line 1 is 'a:8'"),
        ("a slots=0\n", [], "Line 1 is 'a slots=0'"),
        ("$(reboot) slots=1\n", [], "Line 1"),
        ("a slots=2\nb slots=1\n", ["cluster.by=accelerate"], "slots differ: a 2, b 1"),
        ("a slots=2\n", ["cluster.by=slurm"], "Slurm chooses the machines"),
    ],
)
def test_an_invalid_hostfile_is_refused(
    text: str, words: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        launch([f"cluster.hosts={hostfile(tmp_path, text)}", "launch=ddp", *words])
    assert caught.value.key == "cluster.hosts"


@pytest.mark.parametrize("word", ["cluster.nodes=2", "cluster.gpus=4", "cluster.host=b"])
def test_a_hostfile_excludes_the_keys_it_replaces(word: str, tmp_path: Path) -> None:
    path = hostfile(tmp_path, "a slots=2\n")
    with pytest.raises(ConfigError, match="also defines it") as caught:
        launch([f"cluster.hosts={path}", word, "launch=ddp"])
    assert caught.value.key == word.partition("=")[0]


WRITES_ITS_ENVIRONMENT = """
import os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
file = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
file.write_text(" ".join(os.environ[name] for name in names))
"""


@pytest.mark.slow
def test_torchrun_numbers_the_processes_of_unequal_machines(tmp_path: Path) -> None:
    """Both printed commands run here: two launchers share one rendezvous."""
    entry = tmp_path / "train.py"
    entry.write_text(WRITES_ITS_ENVIRONMENT)
    path = hostfile(tmp_path, "127.0.0.1 slots=2\nlocalhost slots=1\n")
    commands = launch_commands(ClusterConfig(hosts=str(path), port=free_port()), [str(tmp_path)])
    started = [
        subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]],
                         cwd=tmp_path, env={**clean_environment(), "OMP_NUM_THREADS": "1"})
        for command in commands
    ]  # fmt: skip
    assert [process.wait(timeout=600) for process in started] == [0, 0]
    environments = sorted((tmp_path / str(rank)).read_text().split() for rank in range(3))
    assert [[rank, world] for rank, _, world, _ in environments] == [
        ["0", "3"],
        ["1", "3"],
        ["2", "3"],
    ]
    assert sorted((here, local) for _, local, _, here in environments) == [
        ("1", "0"), ("2", "0"), ("2", "1"),
    ]  # fmt: skip


def test_only_the_overrides_of_cluster_are_removed() -> None:
    cluster, rest = verb_group(
        ClusterConfig, "cluster", ["drafter=eagle3", "cluster.gpus=2", "launch=ddp"]
    )
    assert (cluster.gpus, rest) == (2, ["drafter=eagle3", "launch=ddp"])


def test_the_started_command_is_the_printed_one(
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
    expected = ["accelerate.commands.launch", "--x", str(ROOT / "train.py")]
    assert local_command("accelerate launch --x train.py")[2:] == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_started_ranks_train(tmp_path: Path) -> None:
    words = ["cluster.gpus=2", "cluster.run=true", "cluster.cores=2", "launch=ddp", *SMALL]
    assert launch([*words, "drafter=eagle3", f"run.dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()
