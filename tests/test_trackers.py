"""Services that follow a run: they get every number, and nothing they do reaches the run."""

import threading
import time
from pathlib import Path

import pytest

from outrider.train import trackers
from outrider.train.config import Config
from outrider.train.errors import ConfigError
from outrider.train.trackers import ROOM, Background, services
from tests.runs import config


class Fake:
    """Remembers; fails or sleeps where it is told to."""

    def __init__(self, fails: str = "", waits: threading.Event | None = None) -> None:
        self.fails, self.waits, self.lines, self.closed = fails, waits, list[int](), False

    def open(self) -> "Fake":
        if self.fails == "open":
            raise RuntimeError("no route to host\nand much more")
        return self

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        if self.waits is not None:
            self.waits.wait()
        if self.fails == "log" and step == 3:
            raise ConnectionError("gone away")
        self.lines.append(step)

    def close(self) -> None:
        self.closed = True


def test_everything_arrives_in_order() -> None:
    fake, said = Fake(), list[str]()
    background = Background("fake", fake.open, said.append)
    for step in range(100):
        background.log(step, "train", {"loss@1": 1.0})
    background.close()
    assert fake.lines == list(range(100))
    assert fake.closed
    assert said == []


@pytest.mark.parametrize(("fails", "why", "came"), [
    ("open", "no route to host", []), ("log", "gone away", [0, 1, 2]),
])  # fmt: skip
def test_a_service_that_fails_is_left_alone(fails: str, why: str, came: list[int]) -> None:
    fake, said = Fake(fails), list[str]()
    background = Background("fake", fake.open, said.append)
    for step in range(2 * ROOM):
        background.log(step, "train", {})
    background.close()
    assert fake.lines == came
    assert said == [f"fake is not available ({why}); the run goes on without it"]


def test_a_service_that_hangs_costs_no_time() -> None:
    never, said = threading.Event(), list[str]()
    background = Background("fake", Fake(waits=never).open, said.append, patience=0.2)
    began = time.perf_counter()
    for step in range(ROOM + 500):
        background.log(step, "train", {})
    assert time.perf_counter() - began < 1
    background.close()
    assert time.perf_counter() - began < 3
    (line,) = said
    assert "did not take" in line
    assert int(line.split("take ")[1].split()[0]) >= ROOM
    never.set()


def test_what_is_logged_later_does_not_change_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    values, seen = {"loss": 1.0}, list[float]()

    class Reads(Fake):
        def log(self, step: int, kind: str, values: dict[str, float]) -> None:
            seen.append(values["loss"])

    background = Background("fake", Reads().open, lambda _: None)
    background.log(0, "train", values)
    values["loss"] = 2.0
    background.close()
    assert seen == [1.0]


def test_nobody_follows_unless_asked(tmp_path: Path) -> None:
    assert services(config(tmp_path), print) == []


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (service,) = services(config(tmp_path, "train.tensorboard=true"), pytest.fail)
    for step in range(3):
        service.log(step, "train", {"loss@1": 2.0 - step})
    service.log(2, "held", {"accept_length": 1.5})
    service.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss@1")] == [(0, 2), (1, 1), (2, 0)]
    assert [e.value for e in events.Scalars("held/accept_length")] == [1.5]


def test_wandb_offline_has_settings_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real run of the library, into a folder; no key is asked for."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    asked: Config = config(tmp_path, "train.wandb.mode=offline")
    (service,) = services(asked, pytest.fail)
    service.log(0, "train", {"loss@1": 1.0})
    service.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"accept" not in content
    assert b"loss@1" in content
    assert b"a" * 40 not in content, "secrets stay out"


def test_a_missing_package_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.tensorboard.*\n.*package is missing"):
        trackers.check(config(tmp_path, "train.tensorboard=true"))
    trackers.check(config(tmp_path))
