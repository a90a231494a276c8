"""`outrider prepare`, killed ten times and restarted, writes what an uninterrupted run writes.

The text is equal in every byte but the seconds in its manifest, the recorded features in all.
"""

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest

from outrider.conf.compose import compose
from outrider.data import generate
from outrider.data.corpus import load_training_data
from outrider.data.reporter import Reporter
from outrider.data.training_data import TrainingData
from outrider.launch import cli
from outrider.models.target.load import LoadedTarget
from outrider.train.settings import parse
from tests.runs import generated_text

WORDS = [
    "target=tiny", "data=self", "data.holdout=0.2", "data.generate.samples=320",
    "data.generate.max_new_tokens=12", "data.generate.batch=24", "data.generate.temperature=1.0",
]  # fmt: skip
IMPORTED = [
    "hydra", "accelerate", "torch._dynamo", "transformers.models.llama.modeling_llama",
    "outrider.train.distributed", "outrider.models.drafters.eagle3",
]  # fmt: skip
SHARD, SHARDS = 8, 40  # prompts per shard, and shards of WORDS
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def prepare(words: list[str], cache: Path, die_at: int | None) -> None:
    """Run the command; kill the process at its `die_at`-th fsync.

    A shard takes four: of its temporary file, of its folder, and twice of the manifest.
    """
    os.environ["OUTRIDER_CACHE"] = str(cache)
    generate.SHARD = SHARD
    fsync, calls = os.fsync, 0

    def counted(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)

    with mock.patch("os.fsync", counted):
        raise SystemExit(cli.main(["prepare", *words]))


def start(words: list[str], cache: Path, die_at: int | None = None) -> BaseProcess:
    """Fork from a server that has imported everything: ten starts of Python take a minute."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *IMPORTED])
    process = context.Process(target=prepare, args=(words, cache, die_at))
    process.start()
    return process


def exit_code(process: BaseProcess) -> int | None:
    process.join(600)
    return process.exitcode


def training_data(loaded: LoadedTarget, words: list[str], cache: Path) -> TrainingData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(cache))
        return load_training_data(parse(compose(words)), loaded, (1, 3, 4), Reporter.silent())


def shards(cache: Path) -> int:
    return len(list(cache.glob("self/*/shard-*")))


def features(cache: Path) -> dict[str, bytes]:
    """Return the recorded files by name, with their content."""
    files = cache.glob("traces/*/*.safetensors")
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


def wait_for_shards(
    process: BaseProcess, cache: Path, count: int, generator: random.Random
) -> None:
    """Wait for `count` shards and a random moment longer."""
    while shards(cache) < count and process.is_alive():
        time.sleep(0.001)
    time.sleep(0.02 * generator.random())


@pytest.mark.parametrize(
    ("record", "kills", "words"),
    [
        (False, 10, ["data.generate.batch=1"]),
        (True, 4, ["data.generate.temperature=0"]),
    ],
)
def test_a_preparation_killed_repeatedly_equals_an_uninterrupted_one(
    loaded: LoadedTarget, tmp_path: Path, record: bool, kills: int, words: list[str]
) -> None:
    """Sampled text one prompt at a time, and greedy text in batches.

    A kill changes which prompts are in a batch, and so the last bits of its logits: among 3,840
    tokens sampled in batches, one may fall on the other side of a draw.
    """
    words = [*WORDS, *words, f"data.generate.record={str(record).lower()}"]
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    assert exit_code(start(words, killed, die_at=1)) == -signal.SIGKILL
    generator, written = random.Random(1), 0
    for number in range(2, kills + 1):
        if number % 2:
            process = start(words, killed, die_at=generator.randint(1, 11))
        else:
            process = start(words, killed)
            wait_for_shards(process, killed, written + generator.randint(0, 2), generator)
            process.kill()
        assert exit_code(process) == -signal.SIGKILL
        written = shards(killed)
    assert 0 < written < SHARDS
    assert exit_code(start(words, killed)) == 0
    assert exit_code(start(words, uninterrupted)) == 0
    assert shards(uninterrupted) == SHARDS
    assert generated_text(killed) == generated_text(uninterrupted)
    assert features(killed) == features(uninterrupted)
    assert bool(features(uninterrupted)) == record
    resumed, reference = (training_data(loaded, words, p) for p in (killed, uninterrupted))
    assert resumed.documents == reference.documents
    assert resumed.about | {"traces": ""} == reference.about | {"traces": ""}  # the folders differ


def test_two_concurrent_preparations_write_the_text_once(tmp_path: Path) -> None:
    words = [*WORDS, "data.generate.record=false"]
    folders = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    processes = [start(words, folder) for folder in folders]
    assert [exit_code(process) for process in processes] == [0, 0, 0]
    assert generated_text(tmp_path / "a") == generated_text(tmp_path / "b")
