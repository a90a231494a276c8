"""`outrider prepare`, killed ten times and started again, ends like one that was not killed.

That holds for every byte of the text but the seconds in its manifest, and for every byte of the
recorded features.
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
from outrider.models.load import LoadedTarget
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


def prepare(words: list[str], cache: Path, die_at: int | None) -> None:
    """The verb in a process of its own, which may kill itself at its so many'th fsync.

    A shard takes four: of its file under another name, of its folder, and twice of the manifest.
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
    """From a server that has imported everything: ten starts of Python take a minute."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *IMPORTED])
    process = context.Process(target=prepare, args=(words, cache, die_at))
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    process.join(60)
    return process.exitcode


def made(loaded: LoadedTarget, words: list[str], cache: Path) -> TrainingData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(cache))
        return load_training_data(parse(compose(words)), loaded, (1, 3, 4), Reporter.silent())


def shards(cache: Path) -> int:
    return len(list(cache.glob("self/*/shard-*")))


def features(cache: Path) -> dict[str, bytes]:
    """Return the recorded files by name, with their content."""
    files = cache.glob("traces/*/*.safetensors")
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


def soon(process: BaseProcess, cache: Path, count: int, chance: random.Random) -> None:
    """Wait for so many shards, and a moment of chance longer."""
    while shards(cache) < count and process.is_alive():
        time.sleep(0.001)
    time.sleep(0.02 * chance.random())


@pytest.mark.slow
@pytest.mark.parametrize(("record", "kills"), [(False, 10), (True, 4)])
def test_a_preparation_that_is_killed_again_and_again_ends_as_one_that_is_not(
    loaded: LoadedTarget, tmp_path: Path, record: bool, kills: int
) -> None:
    words = [*WORDS, f"data.generate.record={str(record).lower()}"]
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    assert ended(start(words, hurt, die_at=1)) == -signal.SIGKILL
    chance, left = random.Random(1), 0
    for number in range(2, kills + 1):
        if number % 2:
            process = start(words, hurt, die_at=chance.randint(1, 11))
        else:
            process = start(words, hurt)
            soon(process, hurt, left + chance.randint(0, 2), chance)
            process.kill()
        assert ended(process) == -signal.SIGKILL
        left = shards(hurt)
    assert 0 < left < SHARDS
    assert ended(start(words, hurt)) == 0
    assert ended(start(words, whole)) == 0
    assert shards(whole) == SHARDS
    assert generated_text(hurt) == generated_text(whole)
    assert features(hurt) == features(whole)
    assert bool(features(whole)) == record
    ours, theirs = made(loaded, words, hurt), made(loaded, words, whole)
    assert ours.documents == theirs.documents
    assert ours.about | {"traces": ""} == theirs.about | {"traces": ""}  # the folders differ


@pytest.mark.slow
def test_two_preparations_of_one_text_write_it_once(tmp_path: Path) -> None:
    words = [*WORDS, "data.generate.record=false"]
    places = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    assert [ended(process) for process in [start(words, place) for place in places]] == [0, 0, 0]
    assert generated_text(tmp_path / "a") == generated_text(tmp_path / "b")
