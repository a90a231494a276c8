"""Rotary embeddings of outside folders: scaled ones are refused, wherever they begin to differ."""

from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import RunError
from outrider.models import formats
from outrider.models.target.target import Target
from tests import outside, tiny

BASE = {"rope_theta": 10000.0}
ONES = [1.0, 1.0, 1.0, 1.0]  # one factor for each of the four pairs of a head


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def folder_with(rope: dict[str, Any], target: Target, path: Path, old: bool = False) -> Path:
    drafter = outside.randomise(tiny.drafter("eagle3", target))
    fields = {"rope_parameters": None, "rope_scaling": rope} if old else {"rope_parameters": rope}
    return outside.publish_as(drafter, target, path, **fields)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "rope",
    [
        # other frequencies beyond max_position_embeddings, 128 here
        {"rope_type": "dynamic", "factor": 4.0},
        # beyond 64 positions; the factors of short texts change nothing
        {
            "rope_type": "longrope", "short_factor": ONES, "long_factor": [1.0, 1.0, 1.0, 2.0],
            "original_max_position_embeddings": 64, "attention_factor": 1.0,
        },
        # the slowest pair alone: at position 63 its angle is 0.063, and 0.057 if scaled
        {
            "rope_type": "llama3", "factor": 1.1, "low_freq_factor": 1.0, "high_freq_factor": 1.01,
            "original_max_position_embeddings": 6000,
        },
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "attention_factor": 1.0,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
def test_scaled_rope_is_refused(
    rope: dict[str, Any], old: bool, target: Target, tmp_path: Path
) -> None:
    folder = folder_with({**rope, **BASE}, target, tmp_path / "f", old)
    with pytest.raises(RunError, match=f"rotary embedding is of type {rope['rope_type']}"):
        formats.load(folder, target)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "factor": 1.0}, {"rope_type": "default"}]
)
def test_rope_without_effect_is_read(rope: dict[str, Any], target: Target, tmp_path: Path) -> None:
    folder = folder_with({**rope, **BASE}, target, tmp_path / "f")
    assert formats.load(folder, target)[1].name == "eagle3"
