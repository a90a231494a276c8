"""Fixtures that several files share, the order of the files, and what is left out for time:
checks of shapes, and tests.
"""

import os
import time
from collections import Counter

import pytest
import torch

from outrider.conf.compose import compose
from outrider.data.prepare import Material, material
from outrider.models import load
from outrider.models.load import Loaded
from outrider.train.settings import parse
from tests import shapes
from tests.runs import QUIET, config

PROOFS = {  # that the decoder is lossless: by enumeration, and by token equality
    "test_batch", "test_block", "test_coupled", "test_engine", "test_lossy", "test_on_cpu",
    "test_rules", "test_siblings", "test_static", "test_verify",
}  # fmt: skip


def pytest_configure() -> None:
    """One thread per worker and child process, if nothing else is said: where two workers have two
    each on two cores, the proofs take four times as long.
    """
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The embedded target."""
    torch.set_num_threads(1)  # a training in this process may have taken all cores
    return load.load(parse(compose(["target=tiny"])).target)


@pytest.fixture(scope="module")
def made(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Material:
    """Its data, for the runs of `tests/runs.py`."""
    return material(config(tmp_path_factory.mktemp("m")), loaded, (1, 3, 4), QUIET, rank=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The proofs first, so that they are run on any machine; then files with the most slow tests:
    a worker that takes one last keeps all waiting.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.stem not in PROOFS, -slow[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    shapes.check_again()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    shapes.check_again()


# ---- a machine that needs longer than tests may take ----

LATE = "would have begun too late"


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "tests that would begin behind this second since 1970 are not run; empty: all are"
    parser.addoption("--until", default="", help=what)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until and time.time() > float(until):
        pytest.skip(LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.getreports("skipped")
    late = sum(LATE in str(report.longrepr) for report in skipped)
    if late:
        terminalreporter.write_line(f"{late} tests were not run: each {LATE}", yellow=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing but tests that began too late is no success."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--until"):
        return
    if reporter.getreports("skipped") and not reporter.getreports("passed"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
