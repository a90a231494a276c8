"""DeepSpeed's operator is loaded whatever a killed process has left in its folder."""

import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

import pytest

from outrider.conf.files import folder_lock
from outrider.train import deepspeed_build

pytest.importorskip("deepspeed")
NAME = "deepspeed_shm_comm"


@pytest.mark.slow
def test_the_file_of_a_killed_build_is_removed() -> None:
    mark = deepspeed_build.build_folder() / NAME / deepspeed_build.BUILD_LOCK
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    code = "from outrider.train.deepspeed_build import load_operator; load_operator()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=250)
    assert not mark.exists()
    assert list(mark.parent.glob("*.so"))


def test_the_file_of_a_running_build_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running build holds the lock, and the next process waits."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    class Builder:
        NAME, name = "shm_comm", NAME
        loaded = Event()

        def load(self) -> None:
            self.loaded.set()

    monkeypatch.setattr(deepspeed_build, "build_folder", lambda: tmp_path)
    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda _name: Builder())
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", {Builder.NAME: True})
    mark = tmp_path / NAME / deepspeed_build.BUILD_LOCK
    mark.parent.mkdir()
    with folder_lock(tmp_path, on_wait=lambda: None):
        mark.touch()
        second = Thread(target=deepspeed_build.load_operator)
        second.start()
        assert not Builder.loaded.wait(timeout=0.5)
        assert mark.exists()
    second.join(timeout=10)
    assert Builder.loaded.is_set()
    assert not mark.exists()
