"""Shared fixtures, the order of the test files, and when shapes are checked."""

import os
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import settings

from outrider.conf.compose import compose
from outrider.data.corpus import load_training_data
from outrider.data.reporter import Reporter
from outrider.data.training_data import TrainingData
from outrider.models.decode.costs import measurement
from outrider.models.decode.round_times import Stopwatch
from outrider.models.target import load, process
from outrider.models.target.load import LoadedTarget
from outrider.train.settings import parse
from tests import shapes
from tests.runs import config
from tests.simulated_clock import Clock

PROOFS = {  # the decoder is lossless: enumeration and token equality
    "test_batch", "test_block_rules", "test_engine", "test_gumbel_coupling", "test_lossy_rules",
    "test_rule_table", "test_sibling_rules", "test_static_tree", "test_token_rules",
    "test_token_rules_cpu",
}  # fmt: skip

CONTRACT = "test_drafter_contract"
for profile in ("default", "thorough"):  # see mutations.py; a slow processor fails no test
    settings.register_profile(profile, deadline=None)
settings.load_profile("default")
SAMPLE = 6  # cases of a parametrised test that `make test` runs
measurement.REPEATS = 1  # of cost tables: no test depends on measured seconds


def pytest_configure() -> None:
    """Give each worker and child process one thread of the CPU, unless OMP_NUM_THREADS is set.

    Two workers with two threads each on two cores take four times as long. Commands run on the CPU,
    also on a machine with a GPU, unless `accelerate launch` starts them; test_gpu.py compares both.
    """
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(process.THREADS, threads)  # ranks that a launcher starts


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    """The embedded target."""
    return load.load_target(parse(compose(["target=tiny"])).target)


@pytest.fixture(scope="module")
def made(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    """Its data, for the runs of `tests/runs.py`."""
    return load_training_data(
        config(tmp_path_factory.mktemp("m")), loaded, (1, 3, 4), Reporter.silent()
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the exactness proofs first, then the files with the most slow tests; mark some cases.

    A worker that starts a long file last delays the end of the session.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.stem not in PROOFS, -slow[item.path]))
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark_exhaustive(cases)


def mark_exhaustive(cases: list[pytest.Item]) -> None:
    """Mark all but SAMPLE cases of a parametrised test, evenly spread, for `make test-all`.

    Every drafter runs its whole contract in `make test`, too.
    """
    if len(cases) <= SAMPLE or cases[0].path.stem == CONTRACT:
        return
    sample = {round(n * (len(cases) - 1) / (SAMPLE - 1)) for n in range(SAMPLE)}
    for number, case in enumerate(cases):
        if number not in sample:
            case.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Reset the threads of this process, which an earlier test may have changed."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    shapes.check_again()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    shapes.check_again(enabled=item.get_closest_marker("untyped") is None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Stopwatch, "clock", staticmethod(clock.read))
    return clock
