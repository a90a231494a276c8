"""The device of a process, and waiting for another process (models/target/process.py)."""

from itertools import count

import pytest
import torch

from outrider.conf.errors import RunError
from outrider.models.target.process import backend, device, wait_until


@pytest.mark.parametrize(
    ("value", "kind"),
    [("True", "cpu"), ("true", "cpu"), ("1", "cpu"), ("False", "cuda"), ("0", "cuda")],
)
def test_a_gpu_is_not_used_where_accelerate_asks_for_the_cpu(
    value: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --cpu` writes "True"."""
    use_gpus(monkeypatch, 1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    assert (device().type, backend()) == (kind, "gloo" if kind == "cpu" else "nccl")


def use_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch say that there are GPUs."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_rank_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RunError, match="Rank 2 of this machine has no GPU: it sees 2 GPUs"):
        device()


def test_waiting_ends_when_the_condition_is_met() -> None:
    calls = count()
    wait_until(lambda: (next(calls) == 3, None), 1.0, "a shard", poll=0.001)
    assert next(calls) == 4


def test_waiting_without_progress_has_a_deadline() -> None:
    with pytest.raises(RunError, match=r"Waited 0.001 minutes \(launch.wait\) for rank 0's text"):
        wait_until(lambda: (False, 7), 0.001, "rank 0's text", poll=0.001)


def test_progress_moves_the_deadline() -> None:
    """100 calls of 2 ms each exceed the deadline of 60 ms, and each one reports progress."""
    calls = count()
    wait_until(lambda: ((n := next(calls)) == 100, n), 0.001, "shards", poll=0.002)
