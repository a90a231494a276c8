"""Heartbeats: messages for timeouts of collectives, and for ranks that become silent."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from outrider.launch.processes import clean_environment
from outrider.train import distributed
from outrider.train.heartbeat import Heartbeat
from tests.runs import free_port

GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out")


class Store:
    """A process group's store."""

    def __init__(self, **entries: str) -> None:
        self.entries = entries

    def set(self, key: str, value: str) -> None:
        self.entries[key] = value

    def get(self, key: str) -> bytes:
        if key not in self.entries:
            raise RuntimeError("Socket closed")
        return self.entries[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)


def heartbeat(rank: int, world: int, ages: dict[int, tuple[int, float]]) -> Heartbeat:
    """A heartbeat whose store has (step, age in seconds) of each rank."""
    one = Heartbeat(rank, world, wait=100.0)
    now = time.time()
    entries = {f"outrider/{r}": f"{step} {now - age}" for r, (step, age) in ages.items()}
    one.store = cast("Any", Store(**entries))
    one.beat(13)
    return one


def test_message_names_only_the_silent_rank() -> None:
    message = heartbeat(0, 3, {0: (13, 1), 1: (13, 47), 2: (13, 1)}).explain_timeout(GLOO)
    assert message == (
        "Rank 0 waited for the others until the timeout at step 13: "
        "rank 1 was last heard of 47 s ago, at step 13."
    )


def test_message_gives_steps_if_all_are_alive() -> None:
    message = heartbeat(0, 2, {0: (13, 1), 1: (12, 1)}).explain_timeout(GLOO)
    assert message.endswith("rank 1 was last heard of 1 s ago, at step 12 (all are alive).")


def test_message_for_closed_connection() -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    message = heartbeat(0, 2, {0: (13, 1), 1: (13, 1)}).explain_timeout(error)
    last = "rank 1 was last heard of 1 s ago, at step 13."
    assert message == f"Rank 0 lost the others at step 13: {last}"


def test_message_is_the_error_without_store() -> None:
    assert heartbeat(1, 2, {}).explain_timeout(GLOO).endswith("Timed out")


def test_entries_of_other_ranks_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    one = heartbeat(0, 2, {0: (13, 1), 1: (13, 47)})
    one.wait = 0.4  # seconds
    one.store.set("outrider/1", "\x1b[2J 0")
    thread = threading.Thread(target=one._run)
    thread.start()
    deadline, shown = time.monotonic() + 20, ""
    while not shown and time.monotonic() < deadline:
        time.sleep(0.05)
        shown = capsys.readouterr().err
    one.close()
    thread.join()
    assert "since step \\x1b[2J." in shown


def test_other_errors_are_not_explained() -> None:
    assert heartbeat(0, 2, {1: (1, 1)}).explain_timeout(RuntimeError("shapes do not match")) == ""
    assert Heartbeat(0, 1, wait=100.0).explain_timeout(GLOO) == ""


def test_beat_writes_the_step() -> None:
    one = heartbeat(1, 2, {})
    one.beat(7)
    one._write()
    step, age = one._read(1)
    assert step == 7
    assert age < 5


def test_rank_with_unchanged_entry_is_silent() -> None:
    """With a timeout of 100 s, the first other rank reports once, after 75 s."""
    first, second = (heartbeat(rank, 3, {0: (9, 0), 1: (9, 0), 2: (8, -1000)}) for rank in (0, 1))
    assert first._check_others(0.0) == second._check_others(0.0) == ""
    for one, other in ((first, 1), (second, 0)):
        one.store.set(f"outrider/{other}", "9 1.0")  # alive
        assert one._check_others(40.0) == ""
        one.store.set(f"outrider/{other}", "9 2.0")
    assert second._check_others(80.0) == "", "rank 0 reports"
    assert (
        first._check_others(80.0)
        == "Rank 0 is at step 13: rank 2 has been silent for 80 s, since step 8.\n"
    )
    assert first._check_others(81.0) == ""


def test_no_rank_is_reported_before_all_have_started() -> None:
    assert heartbeat(0, 3, {1: (1, 0)})._check_others(1000.0) == ""


def test_every_process_group_waits_as_long_as_the_launch_says(tmp_path: Path) -> None:
    """Also one that a library made, which has the default of PyTorch, half an hour."""
    ranks = torch.distributed
    ranks.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        groups = [ranks.group.WORLD, ranks.new_group([0])]
        distributed.limit_waits(0.25)
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        assert [backend.options._timeout.total_seconds() for backend in backends] == [15, 15]
    finally:
        ranks.destroy_process_group()


RANKS = """
import sys, time, torch.distributed as ranks
from datetime import timedelta
from outrider.train import distributed
from outrider.train.heartbeat import Heartbeat
store, rank = sys.argv[1], int(sys.argv[2])
ranks.init_process_group("gloo", init_method=store, rank=rank, world_size=3,
                         timeout=timedelta(seconds=60))
heartbeat = Heartbeat(rank, 3, wait=4.0)
heartbeat.beat(5)
time.sleep(1)
ranks.barrier()
print("ready", flush=True)
if rank != 1:
    ranks.barrier()  # longer than the wait: the thread prints the message
time.sleep(60)
"""


@pytest.mark.slow
def test_stopped_rank_is_reported_before_the_timeout() -> None:
    """Real processes; SIGSTOP stops all threads of one."""
    words = [sys.executable, "-c", RANKS, "tcp://127.0.0.1:" + str(free_port())]
    root = str(Path(__file__).parent.parent)
    env = {**clean_environment(), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    three = [
        subprocess.Popen([*words, str(rank)], env=env, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(3)
    ]  # fmt: skip
    try:
        for rank in three:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        os.kill(three[1].pid, signal.SIGSTOP)
        assert three[0].stderr is not None
        line = next(line for line in three[0].stderr if line.startswith("Rank "))
    finally:
        for rank in three:
            rank.kill()
        rest = [rank.communicate()[1] for rank in three]
    assert line.startswith("Rank 0 is at step 5: rank 1 has been silent for ")
    assert line.endswith(" s, since step 5.\n")
    assert "has been silent" not in rest[2], "only one rank prints it"
