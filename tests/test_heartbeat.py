"""A wait that ends in an error: who is missing, and which errors are no wait at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.launch.processes import clean_environment
from outrider.train.heartbeat import Heartbeat
from tests.runs import free_port

GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out")


class Store:
    """A process group's store."""

    def __init__(self, **notes: str) -> None:
        self.notes = notes

    def set(self, key: str, value: str) -> None:
        self.notes[key] = value

    def get(self, key: str) -> bytes:
        if key not in self.notes:
            raise RuntimeError("Socket closed")
        return self.notes[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.notes for key in keys)


def heartbeat(rank: int, world: int, ages: dict[int, tuple[int, float]]) -> Heartbeat:
    """A heartbeat whose store has (step, age in seconds) of each rank."""
    one = Heartbeat(rank, world, wait=100.0)
    now = time.time()
    notes = {f"outrider/{r}": f"{step} {now - age}" for r, (step, age) in ages.items()}
    one.store = cast("Any", Store(**notes))
    one.beat(13)
    return one


def test_only_the_silent_rank_is_named() -> None:
    said = heartbeat(0, 3, {0: (13, 1), 1: (13, 47), 2: (13, 1)}).explain_timeout(GLOO)
    assert said == (
        "Rank 0 waited for the others until the timeout at step 13: "
        "rank 1 was last heard of 47 s ago, at step 13."
    )


def test_living_ranks_are_named_with_their_steps() -> None:
    said = heartbeat(0, 2, {0: (13, 1), 1: (12, 1)}).explain_timeout(GLOO)
    assert said.endswith("rank 1 was last heard of 1 s ago, at step 12 (all are alive).")


def test_a_closed_connection_is_reported_as_such() -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    said = heartbeat(0, 2, {0: (13, 1), 1: (13, 1)}).explain_timeout(error)
    assert (
        said == "Rank 0 lost the others at step 13: rank 1 was last heard of 1 s ago, at step 13."
    )


def test_without_the_store_the_message_is_the_error() -> None:
    assert heartbeat(1, 2, {}).explain_timeout(GLOO).endswith("Timed out")


def test_other_errors_are_not_explained() -> None:
    assert heartbeat(0, 2, {1: (1, 1)}).explain_timeout(RuntimeError("shapes do not match")) == ""
    assert Heartbeat(0, 1, wait=100.0).explain_timeout(GLOO) == ""


def test_a_rank_writes_its_step() -> None:
    one = heartbeat(1, 2, {})
    one.beat(7)
    one._write()
    step, age = one._read(1)
    assert step == 7
    assert age < 5


def test_an_unchanged_entry_is_silence_whatever_its_time() -> None:
    """With a timeout of 100 s, the first other rank reports once, after 75 s."""
    first, second = (heartbeat(rank, 3, {0: (9, 0), 1: (9, 0), 2: (8, -1000)}) for rank in (0, 1))
    assert first._check_others(0.0) == second._check_others(0.0) == ""
    for one, other in ((first, 1), (second, 0)):
        assert one.store is not None
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


RANKS = """
import sys, time, torch.distributed as ranks
from datetime import timedelta
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
    ranks.barrier()  # far longer than the wait: what is said comes from the thread
time.sleep(60)
"""


@pytest.mark.slow
def test_a_stopped_rank_is_named_while_the_others_wait() -> None:
    """Real processes; the one that is stopped is stopped with all its threads."""
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
    assert "has been silent" not in rest[2], "one of them says it"
