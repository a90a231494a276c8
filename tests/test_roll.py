"""A wait that ends in an error: who is missing, and which errors are no wait at all."""

import time
from typing import Any, cast

from outrider.launch.roll import Roll

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


def roll(rank: int, world: int, ages: dict[int, tuple[int, float]]) -> Roll:
    """Ranks that noted a step so many seconds ago."""
    one = Roll(rank, world)
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
    assert Roll(0, 1).missing(GLOO) == ""


def test_a_rank_notes_where_it_is() -> None:
    one = roll(1, 2, {})
    one.here(7)
    one._note()
    step, age = one._of(1)
    assert step == 7
    assert age < 5
