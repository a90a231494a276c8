"""Medusa folders of other projects: heads, layers, vocabularies, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models import formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target
from tests import outside, tiny


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def built(target: Target, whole: bool = True, **changes: Any) -> Drafter:
    return outside.randomise(tiny.drafter("medusa", target, outside.vocab(whole), **changes))


def test_key_prefixes_are_stripped(target: Target, tmp_path: Path) -> None:
    for word, prefix in (("medusa", "medusa_head."), ("vllm", "medusa_heads.")):
        drafter = built(target)
        folder = outside.publish_as(drafter, target, tmp_path / word, word)
        outside.rename_keys(folder, lambda key, prefix=prefix: prefix + key)  # type: ignore[misc]
        outside.assert_equal_weights(drafter, formats.load(folder, target)[0])


@torch.no_grad()
def test_repeated_layers_round_trip(target: Target, tmp_path: Path) -> None:
    """The authors' code repeats one module: equal tensors under several keys."""
    drafter = built(target, res_layers=2)
    for key, value in drafter.named_parameters():
        if ".layers.1." in key:
            value.copy_(drafter.get_parameter(key.replace(".layers.1.", ".layers.0.")))
    folder = outside.publish_as(drafter, target, tmp_path / "f", "medusa")
    read, cfg = formats.load(folder, target)
    assert cfg.res_layers == 2
    outside.assert_equal_weights(drafter, read)
    outside.rewrite_weights(folder, lambda t: t["0.1.linear.weight"].add_(1))
    with pytest.raises(RunError, match=r"0\.1\.linear\.weight and 0\.0\.linear\.weight differ"):
        formats.load(folder, target)


@torch.no_grad()
def test_heads_without_bias_round_trip(target: Target, tmp_path: Path) -> None:
    drafter = built(target, whole=False)
    for key, value in drafter.named_parameters():
        if key.endswith(".bias"):
            value.zero_()
    folder = outside.publish_as(drafter, target, tmp_path / "f", "vllm")
    assert not any(key.endswith(".bias") for key in outside.weights(folder))
    outside.assert_equal_weights(drafter, formats.load(folder, target)[0])


def test_shared_head_may_have_the_name_of_the_first(target: Target, tmp_path: Path) -> None:
    drafter = built(target, own_heads=False)
    folder = outside.publish_as(drafter, target, tmp_path / "f", "vllm")
    outside.rename_keys(folder, lambda key: key.replace("lm_head.", "lm_heads.0."))
    read, cfg = formats.load(folder, target)
    assert not cfg.own_heads
    outside.assert_equal_weights(drafter, read)
    outside.rewrite_weights(folder, lambda t: t["lm_heads.0.weight"].mul_(2))
    with pytest.raises(RunError, match=r"lm_heads\.0\.weight differs from the target's"):
        formats.load(folder, target)


DAMAGE: list[tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], object] | None, str]] = [
    ("medusa", {"medusa_num_heads": 4}, None, "lacks 3.0.linear.bias"),
    ("medusa", {"medusa_num_heads": 2}, None, "holds 2.0.linear.bias"),
    ("medusa", {"medusa_num_layers": 2}, None, "lacks 0.1.linear"),
    ("medusa", {"medusa_num_heads": "x"}, None, "must be an integer >= 1"),
    ("medusa", {}, lambda t: t.pop("1.1.weight"), "lacks 1.1.weight"),
    ("vllm", {"vocab_size": 7}, None, "vocabulary has 7 tokens"),
    ("vllm", {"num_heads": None}, None, "must be an integer >= 1"),
    ("vllm", {"truncated_vocab_size": 61}, None, "does not fit it"),
    ("vllm", {}, lambda t: t.pop("token_map"), "does not fit it"),
    ("vllm", {}, lambda t: t.update(token_map=t["token_map"].flip(0)), "in ascending order"),
    ("vllm", {"original_lm_head": True}, None, "holds lm_heads.1.weight"),
    ("vllm", {"medusa_fc_bias": False}, None, "holds blocks.0.layers.0.bias"),
]


@pytest.mark.parametrize(
    ("word", "changes", "change", "message"), DAMAGE, ids=lambda x: "" if callable(x) else str(x)
)
def test_contradiction_is_refused(
    target: Target,
    tmp_path: Path,
    word: str,
    changes: dict[str, Any],
    change: Callable[[dict[str, Tensor]], object] | None,
    message: str,
) -> None:
    drafter = built(target, whole=word == "medusa")
    folder = outside.publish_as(drafter, target, tmp_path / "f", word, **changes)
    if change is not None:
        outside.rewrite_weights(folder, change)
    with pytest.raises(RunError, match=message) as caught:
        formats.load(folder, target)
    assert caught.value.fix


def test_other_width_is_refused(target: Target, tmp_path: Path) -> None:
    folder = outside.publish_as(built(target), target, tmp_path / "f", "medusa")
    with pytest.raises(
        RunError, match=r"is \[32, 32\], and config.json and target require \[16, 16\]"
    ):
        formats.load(folder, tiny.target(hidden_size=16, head_dim=4))
