"""Fixtures that several files share, and the order of the files."""

from collections import Counter

import pytest
import torch

from outrider.data.prepare import Material, material
from outrider.models import load
from outrider.models.load import Loaded
from outrider.train.compose import compose
from outrider.train.config import parse
from tests.runs import QUIET, config


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The embedded target."""
    torch.set_num_threads(1)
    return load.load(parse(compose(["target=tiny"])).target)


@pytest.fixture(scope="module")
def made(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Material:
    """Its data, for the runs of `tests/runs.py`."""
    return material(config(tmp_path_factory.mktemp("m")), loaded, (1, 3, 4), QUIET, rank=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests come first: a worker that takes one last keeps all waiting."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
