"""EAGLE-1 folders of other projects: the bias, the three formats, and what is refused."""

import json
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


def built(target: Target, **changes: Any) -> Drafter:
    return outside.randomise(tiny.drafter("eagle", target, outside.vocab(whole=True), **changes))


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


# ---- the bias ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_each_format_stores_the_bias_differently(
    target: Target, tmp_path: Path, bias: bool
) -> None:
    """SGLang's fc always has a bias, and reads `bias` as that of the attention."""
    drafter = built(target, bias=bias)
    official = outside.publish_as(drafter, target, tmp_path / "e", "eagle")
    assert config_of(official)["bias"] is bias
    assert ("fc.bias" in outside.weights(official)) is bias
    sglang = outside.publish_as(drafter, target, tmp_path / "s", "sglang")
    assert "bias" not in config_of(sglang)
    assert bool(outside.weights(sglang)["fc.bias"].any()) is bias


@torch.no_grad()
def test_vllm_accepts_a_zero_bias_only(target: Target, tmp_path: Path) -> None:
    drafter = built(target)
    drafter.get_parameter("fc.bias").zero_()
    folder = outside.publish_as(drafter, target, tmp_path / "v", "vllm")
    assert config_of(folder)["eagle_fc_bias"] is True
    outside.assert_equal_weights(drafter, formats.load(folder, target)[0])


def test_format_is_recognised_from_the_files(target: Target, tmp_path: Path) -> None:
    drafter = built(target, bias=False)
    for word in ("eagle", "sglang", "vllm"):
        folder = outside.publish_as(drafter, target, tmp_path / word, word)
        assert formats.recognise(folder) is formats.find(word, "eagle")


def test_conversion_between_formats_is_exact(target: Target, tmp_path: Path) -> None:
    drafter = built(target)
    here, form = tmp_path / "start", formats.find("eagle", "eagle")
    form.write(drafter, target, None, here)
    first = (here / "model.safetensors").read_bytes()
    for i, word in enumerate(("sglang", "native", "eagle")):
        read, cfg = formats.load(here, target)
        here = tmp_path / str(i)
        formats.find(word, "eagle").write(read, target, cfg, here)
    assert (here / "model.safetensors").read_bytes() == first


def test_hass_name_is_stored_in_outrider_json(target: Target, tmp_path: Path) -> None:
    """Without outrider.json the folder is read as eagle."""
    drafter = tiny.drafter("hass", target, outside.vocab(whole=True))
    formats.find("eagle", "hass").write(drafter, target, None, tmp_path / "f")
    assert formats.load(tmp_path / "f", target)[1].name == "hass"
    (tmp_path / "f" / "outrider.json").write_text('{"drafter": {"name": "medusa"}}')
    with pytest.raises(RunError, match="drafter 'medusa'"):
        formats.load(tmp_path / "f", target)
    (tmp_path / "f" / "outrider.json").unlink()
    assert formats.load(tmp_path / "f", target)[1].name == "eagle"


# ---- what is refused -----------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("eagle", {"bias": False}, "which the weights contradict"),
    ("eagle", {"num_hidden_layers": 2}, "it has 2 layers"),
    ("eagle", {"add_para_norm": True}, "HASS's two norms"),
    ("eagle", {"rope_parameters": LINEAR}, "of type linear"),
    ("eagle", {"vocab_size": 7}, "vocabulary has 7 tokens"),
    ("vllm", {"eagle_fc_bias": False}, "eagle_fc_bias of config.json contradicts"),
    ("vllm", {"truncated_vocab_size": 7}, "truncated to 7"),
    ("vllm", {"model": None}, "no object model"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "changes", "message"), CONFIGS, ids=str)
@torch.no_grad()
def test_unsupported_config_is_refused(
    target: Target, tmp_path: Path, word: str, changes: dict[str, Any], message: str
) -> None:
    drafter = built(target)
    if word == "vllm":
        drafter.get_parameter("fc.bias").zero_()
    folder = outside.publish_as(drafter, target, tmp_path / "f", word, **changes)
    with pytest.raises(RunError, match=message) as caught:
        formats.load(folder, target)
    assert caught.value.fix


ONES = torch.ones(32)
WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "para norms": (lambda t: t.update({"embedding_layernorm.weight": ONES}), "HASS's two norms"),
    "a norm": (lambda t: t.update({"layers.0.input_layernorm.weight": ONES}), "does not define"),
    "a head": (lambda t: t.update({"lm_head.weight": ONES}), r"holds lm_head\.weight"),
    "missing": (
        lambda t: t.pop("layers.0.mlp.down_proj.weight"),
        r"lacks layers\.0\.mlp\.down_proj",
    ),
    "embedding": (lambda t: t["embed_tokens.weight"].add_(1), "differs from the target's"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_unsupported_weights_are_refused(target: Target, tmp_path: Path, name: str) -> None:
    change, message = WEIGHTS[name]
    folder = outside.publish_as(built(target), target, tmp_path / "f", "eagle")
    outside.rewrite_weights(folder, change)
    with pytest.raises(RunError, match=message) as caught:
        formats.load(folder, target)
    assert caught.value.fix


# ---- warm start ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "hass"])
def test_warm_start_from_a_published_drafter(target: Target, tmp_path: Path, name: str) -> None:
    theirs = built(target).to(torch.float16)
    folder = outside.publish_as(theirs, target, tmp_path / "f", "eagle")
    ours = tiny.drafter(name, target, outside.vocab(whole=True), bias=True, warm_start=str(folder))
    assert str(folder) in ours.initialise(target, [])
    for key, value in ours.named_parameters():
        assert torch.equal(value, theirs.get_parameter(key).float())
        assert value.requires_grad
