"""Two machines train as one: two network namespaces, each with its own address.

Skipped without the permission to make namespaces (root on Linux).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.launch.processes import ROOT, clean_environment
from tests.runs import SMALL
from tests.test_processes import losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FIRST, SECOND = "10.77.0.1", "10.77.0.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces connected by a veth pair."""
    names = (f"outrider-a{os.getpid()}", f"outrider-b{os.getpid()}")
    if shutil.which("ip") is None:
        pytest.skip("the program `ip` is missing")
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "wire",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "wire",
            "netns",
            names[1],
        )
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"no right to make network namespaces: {error.stderr.decode().strip()}")
    yield names
    _remove(names)


def _remove(names: tuple[str, str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_rank(machine: str, address: str, *words: str) -> "subprocess.Popen[str]":
    """The command that `outrider launch cluster.nodes=2` prints, on this machine.

    Both share one host name, so torchrun gets the node ranks.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
        "--rdzv_id=outrider", "--rdzv_backend=c10d", f"--rdzv_endpoint={FIRST}:29500",
        f"--local_addr={address}", f"--rdzv_conf=is_host={int(address == FIRST)}",
        str(ROOT / "train.py"), *SMALL, *words,
    ]  # fmt: skip
    env = {**clean_environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire"}
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, *command], text=True, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_two_machines_train_as_one(machines: tuple[str, str], tmp_path: Path) -> None:
    words = ("drafter=eagle3", "launch=zero2", f"run.dir={tmp_path / 'two'}")
    pair = [start_rank(*one, *words) for one in zip(machines, (FIRST, SECOND), strict=True)]
    outputs = [process.communicate()[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], "\n".join(outputs)
    alone = [sys.executable, str(ROOT / "train.py"), *SMALL, "drafter=eagle3"]
    alone += ["train.optimizer=adamw"]  # ZeRO has no Muon
    alone += ["launch.accumulation=2", f"run.dir={tmp_path / 'one'}"]
    subprocess.run(
        alone, env={**clean_environment(), "OMP_NUM_THREADS": "1"}, check=True, capture_output=True
    )
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
