"""Scripts for a shell, hostfiles and sweeps from hostile settings."""

import subprocess
import time
from pathlib import Path

import pytest

from outrider.conf.clusters import ClusterConfig, read_hostfile
from outrider.conf.errors import ConfigError
from outrider.conf.fields import from_dict
from outrider.conf.sweeps import SweepConfig, read_sweep
from outrider.launch.cli import main
from outrider.launch.combinations import MAX_RUNS, expand_overrides
from outrider.launch.grid import run_grid
from tests.test_hostile_files import hostile

ATTACKS = ("$(touch owned)", "a\ntouch owned", "a;touch owned", '"', "`touch owned`", "a b", "")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    ("schema", "key"),
    [(ClusterConfig, "host"), (ClusterConfig, "partition"), (SweepConfig, "partition")],
)
def test_words_of_a_script_are_plain(schema: type, key: str, attack: str) -> None:
    with pytest.raises(ConfigError, match="one plain word"):
        from_dict(schema, {key: attack}, "group")


@pytest.mark.parametrize("host", ["node-0", "10.0.0.7", "[fe80::1]", "fe80::1%eth0", "a.b_c"])
def test_names_and_addresses_of_machines_are_accepted(host: str) -> None:
    assert ClusterConfig(host=host, partition="a100,gpu+x").host == host


def test_the_name_of_a_run_is_no_code_in_a_job(tmp_path: Path) -> None:
    job = tmp_path / "job.sh"
    words = ["cluster.by=slurm", f"cluster.out={job}", "run.dir='runs/a\ntouch owned\n'"]
    assert main(["launch", *words]) == 0
    assert "#SBATCH --job-name=a-touch-owned-\n#SBATCH" in job.read_text()
    stubs = "SLURM_JOB_NODELIST=a; srun() { :; }; scontrol() { :; }; "
    subprocess.run(["bash", "-c", stubs + job.read_text()], cwd=tmp_path, check=True)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("kind", ["fifo", "zero", "huge", "binary", "bytes"])
def test_a_hostile_hostfile_is_one_error(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xff\xfe") if kind == "bytes" else hostile(kind, file)
    with pytest.raises(ConfigError, match=r"cluster\.hosts"):
        read_hostfile(file)


@pytest.mark.parametrize(
    "word",
    [
        "train.lr=range(0,1,1e-9)", "train.max_steps=range(1,1000000000)", "run.seed=range(0,1,0)",
        "train.max_steps=shuffle(range(1,1000000000))", "train.lr=range(0,1,1e-300)",
        f"run.seed={','.join(map(str, range(MAX_RUNS + 1)))}",
    ],
)  # fmt: skip
def test_endless_sweeps_are_refused_at_once(word: str) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match="more than 1,024 runs"):
        expand_overrides(["drafter=eagle3", word])
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("over", ["5", "[1]", "a", "0", "''"])
def test_a_sweep_over_no_keys_is_refused(over: str) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.over"):
        read_sweep([f"sweep.over={over}"])


def test_many_values_of_several_keys_are_refused() -> None:
    seeds = ",".join(map(str, range(MAX_RUNS // 2 + 1)))
    with pytest.raises(ConfigError, match="more than 1,024 runs"):
        run_grid([f"run.seed={seeds}"], SweepConfig(over={"train.lr": [1e-3, 1e-4]}))
    assert len(expand_overrides([f"run.seed={seeds}"])) == MAX_RUNS // 2 + 1
