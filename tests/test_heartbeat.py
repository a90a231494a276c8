"""A wait that ends in an error: who is missing, and which errors are no wait at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.launch.job_pool import bare
from outrider.train.heartbeat import Roll
from tests.runs import free_port

GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out")


class Store:
    """What ranks noted."""

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


def roll(rank: int, world: int, ages: dict[int, tuple[int, float]]) -> Roll:
    """Ranks that noted a step so many seconds ago."""
    one = Roll(rank, world, wait=100.0)
    now = time.time()
    notes = {f"outrider/{r}": f"{step} {now - age}" for r, (step, age) in ages.items()}
    one.store = cast("Any", Store(**notes))
    one.here(13)
    return one


def test_who_has_not_been_heard_of_is_named_and_nobody_else() -> None:
    said = roll(0, 3, {0: (13, 1), 1: (13, 47), 2: (13, 1)}).missing(GLOO)
    assert said == (
        "Rank 0 waited for the others, and gave up, at step 13: "
        "rank 1 was last heard of 47 s ago, at step 13."
    )


def test_where_all_are_alive_their_steps_are_said() -> None:
    said = roll(0, 2, {0: (13, 1), 1: (12, 1)}).missing(GLOO)
    assert said.endswith("rank 1 was last heard of 1 s ago, at step 12 (all are alive).")


def test_a_torn_connection_is_called_one() -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    said = roll(0, 2, {0: (13, 1), 1: (13, 1)}).missing(error)
    assert (
        said == "Rank 0 lost the others at step 13: rank 1 was last heard of 1 s ago, at step 13."
    )


def test_where_the_meeting_place_is_gone_the_error_itself_is_said() -> None:
    assert roll(1, 2, {}).missing(GLOO).endswith("Timed out")


def test_a_mistake_of_another_kind_is_not_explained_away() -> None:
    assert roll(0, 2, {1: (1, 1)}).missing(RuntimeError("shapes do not match")) == ""
    assert Roll(0, 1, wait=100.0).missing(GLOO) == ""


def test_a_rank_notes_where_it_is() -> None:
    one = roll(1, 2, {})
    one.here(7)
    one._note()
    step, age = one._of(1)
    assert step == 7
    assert age < 5


def test_a_note_that_stays_the_same_is_a_silence_whatever_its_clock_says() -> None:
    """100 s are the wait: at 75 s the first of the others speaks, once."""
    first, second = (roll(rank, 3, {0: (9, 0), 1: (9, 0), 2: (8, -1000)}) for rank in (0, 1))
    assert first._silence(0.0) == second._silence(0.0) == ""
    for one, other in ((first, 1), (second, 0)):
        assert one.store is not None
        one.store.set(f"outrider/{other}", "9 1.0")  # alive
        assert one._silence(40.0) == ""
        one.store.set(f"outrider/{other}", "9 2.0")
    assert second._silence(80.0) == "", "rank 0 says it"
    assert (
        first._silence(80.0)
        == "Rank 0 is at step 13: rank 2 has been silent for 80 s, since step 8.\n"
    )
    assert first._silence(81.0) == ""


def test_before_all_have_noted_nobody_is_judged() -> None:
    assert roll(0, 3, {1: (1, 0)})._silence(1000.0) == ""


RANKS = """
import sys, time, torch.distributed as ranks
from datetime import timedelta
from outrider.train.heartbeat import Roll
store, rank = sys.argv[1], int(sys.argv[2])
ranks.init_process_group("gloo", init_method=store, rank=rank, world_size=3,
                         timeout=timedelta(seconds=60))
roll = Roll(rank, 3, wait=4.0)
roll.here(5)
time.sleep(1)
ranks.barrier()
print("ready", flush=True)
if rank != 1:
    ranks.barrier()  # far longer than the wait: what is said comes from the thread
time.sleep(60)
"""


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_while_the_others_wait() -> None:
    """Real processes; the one that is stopped is stopped with all its threads."""
    words = [sys.executable, "-c", RANKS, "tcp://127.0.0.1:" + str(free_port())]
    root = str(Path(__file__).parent.parent)
    env = {**bare(), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
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
