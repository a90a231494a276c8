"""DeepSpeed's operator loads although a killed process left its lock file."""

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
def test_lock_file_of_killed_build_is_removed() -> None:
    lock_file = deepspeed_build.build_folder() / NAME / deepspeed_build.BUILD_LOCK
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock_file.touch()
    code = "from outrider.train.deepspeed_build import load_operator; load_operator()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=250)
    assert not lock_file.exists()
    assert list(lock_file.parent.glob("*.so"))


def test_lock_file_of_running_build_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    lock_file = tmp_path / NAME / deepspeed_build.BUILD_LOCK
    lock_file.parent.mkdir()
    with folder_lock(tmp_path, on_wait=lambda: None):
        lock_file.touch()
        second = Thread(target=deepspeed_build.load_operator)
        second.start()
        assert not Builder.loaded.wait(timeout=0.5)
        assert lock_file.exists()
    second.join(timeout=10)
    assert Builder.loaded.is_set()
    assert not lock_file.exists()
