"""P-EAGLE folders: the mask token, and what they do not hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import ConfigError, RunError
from outrider.models import formats
from outrider.models.target.target import Target
from tests import outside, tiny


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def changed(
    word: str, target: Target, folder: Path, change: Callable[[dict[str, Any]], object]
) -> Path:
    """A folder with another config.json and without outrider.json."""
    drafter = outside.Case("p_eagle", word, {}, False).drafter(target)
    formats.find(word, "p_eagle").write(drafter, target, None, folder / word)
    config = json.loads((folder / word / "config.json").read_text())
    change(config)
    (folder / word / "config.json").write_text(json.dumps(config))
    (folder / word / "outrider.json").unlink()
    return folder / word


@pytest.mark.parametrize(
    ("word", "flag"), [("vllm", "pard_token"), ("speculators", "mask_token_id")]
)
def test_a_folder_without_its_mask_token_is_refused(
    word: str, flag: str, target: Target, tmp_path: Path
) -> None:
    folder = changed(word, target, tmp_path, lambda config: config.pop(flag))
    with pytest.raises(RunError, match=rf"lacks {flag} \(the id of the mask token"):
        formats.load(folder, target)


def test_a_mask_token_beyond_the_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    folder = changed("vllm", target, tmp_path, lambda config: config.update(pard_token=61))
    with pytest.raises(ConfigError, match="tokens 0 to 60"):
        formats.load(folder, target)


def test_layers_with_and_without_a_window_are_refused_by_the_key(
    target: Target, tmp_path: Path
) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    folder = changed("vllm", target, tmp_path, lambda config: config.update(kinds))
    with pytest.raises(RunError, match=r"layer_types of config\.json has layers with"):
        formats.load(folder, target)
