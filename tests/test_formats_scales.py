"""Activations and scales that engines fix: what a folder holds, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import ConfigError, RunError
from outrider.models import formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target
from tests import outside, tiny
from tests.families import small_model

ROOT = 32**0.5  # of the hidden size, Gemma's factor


@pytest.fixture(scope="module")
def gemma() -> Target:
    return tiny.target("gemma3")


def built(name: str, target: Target, **changes: Any) -> Drafter:
    return outside.randomise(tiny.drafter(name, target, outside.vocab(whole=True), **changes))


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


# ---- embeddings ----------------------------------------------------------------------------------


@torch.no_grad()
def test_embedding_is_the_stored_rows_and_a_factor(gemma: Target) -> None:
    ids = torch.tensor([5, 9])
    assert gemma.embedding_scale == pytest.approx(ROOT)
    assert torch.equal(gemma.embed(ids), gemma.embedding.weight[ids])
    module = gemma.model.get_input_embeddings()
    torch.testing.assert_close(gemma.embed(ids) * gemma.embedding_scale, module(ids))
    assert tiny.target("granite").embedding_scale == 1  # its model multiplies, not its embedding


def test_factor_has_the_rounding_of_the_embedding() -> None:
    """sqrt(1152) = 33.94 is 34 in bfloat16."""
    target = Target(small_model("gemma3", hidden_size=1152, num_hidden_layers=1).bfloat16())
    assert target.embedding_scale == 34


@pytest.mark.parametrize("name", ["eagle", "hass"])
@pytest.mark.parametrize("word", ["eagle", "sglang", "vllm"])
@torch.no_grad()
def test_factor_is_multiplied_into_fc(name: str, word: str, gemma: Target, tmp_path: Path) -> None:
    drafter = built(name, gemma, bias=False)
    folder = outside.publish_as(drafter, gemma, tmp_path / "f", word)
    stored, fc = outside.weights(folder)["fc.weight"], drafter.get_parameter("fc.weight")
    torch.testing.assert_close(stored[:, :32], fc[:, :32] * ROOT)
    assert torch.equal(stored[:, 32:], fc[:, 32:])
    read = formats.load(folder, gemma)[0]
    torch.testing.assert_close(read.get_parameter("fc.weight"), fc)


def test_folder_of_a_version_that_left_the_factor_out_is_refused(
    gemma: Target, tmp_path: Path
) -> None:
    formats.find("vllm", "eagle").write(built("eagle", gemma, bias=False), gemma, None, tmp_path)
    sidecar = json.loads((tmp_path / "outrider.json").read_text())
    del sidecar["drafter"]["activation"]  # stored since the factor is multiplied into fc
    (tmp_path / "outrider.json").write_text(json.dumps(sidecar))
    with pytest.raises(RunError, match="did not multiply the scale of the target's embeddings"):
        formats.load(tmp_path, gemma)


# ---- logits --------------------------------------------------------------------------------------


def test_factor_of_the_head_is_written_for_vllm(tmp_path: Path) -> None:
    """Granite divides its logits by 2 here, Cohere multiplies them by 0.25."""
    for family, scale in (("granite", 0.5), ("cohere", 0.25)):
        target = tiny.target(family)
        for name, changes in (("eagle", {"bias": False}), ("medusa", {"own_heads": False})):
            folder = tmp_path / f"{family}-{name}"
            outside.publish_as(built(name, target, **changes), target, folder, "vllm")
            assert config_of(folder)["logit_scale"] == scale
            assert formats.load(folder, target)[1].name == name
    own = outside.publish_as(
        built("medusa", target, own_heads=True), target, tmp_path / "o", "vllm"
    )
    assert "logit_scale" not in config_of(own)


def test_factor_of_another_head_is_refused(tmp_path: Path) -> None:
    target = tiny.target("granite")
    for name, changes in (("eagle", {"bias": False}), ("medusa", {"own_heads": True})):
        drafter = built(name, target, **changes)
        folder = outside.publish_as(drafter, target, tmp_path / name, "vllm", logit_scale=3.0)
        with pytest.raises(RunError, match=r"scaled by 3\.0"):
            formats.load(folder, target)


def test_cap_of_the_logits_is_written_for_sglang(tmp_path: Path) -> None:
    target = tiny.target("gemma2")
    folder = outside.publish_as(built("eagle", target), target, tmp_path / "f", "sglang")
    assert (
        config_of(folder)["final_logit_softcapping"] == target.text_config.final_logit_softcapping
    )


# ---- activations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "hass", "eagle3"])
def test_layers_have_silu_whatever_the_target_has(name: str, gemma: Target) -> None:
    assert gemma.shape().activation == "gelu"
    drafter: Any = built(name, gemma)
    assert drafter.decoder_layers[0].mlp.act is torch.nn.functional.silu


@pytest.mark.parametrize(
    ("name", "word"),
    [("eagle", "sglang"), ("hass", "vllm"), *(("eagle3", w) for w in ("sglang", "vllm"))],
)
def test_gelu_is_refused_where_no_engine_loads_it(name: str, word: str, gemma: Target) -> None:
    drafter = built(name, gemma, activation="gelu", **({} if name == "eagle3" else {"bias": False}))
    with pytest.raises(ConfigError, match=r"no activation but silu(.|\n)*drafter.activation=silu"):
        formats.find(word, name).write(drafter, gemma, None, Path("unused"))


def test_gelu_round_trips_in_the_format_of_eagles_authors(gemma: Target, tmp_path: Path) -> None:
    drafter = built("eagle", gemma, activation="gelu")
    formats.find("eagle", "eagle").write(drafter, gemma, None, tmp_path)
    assert config_of(tmp_path)["hidden_act"] == "gelu_pytorch_tanh"
    read, cfg = formats.load(tmp_path, gemma)
    assert cfg.activation == "gelu"
    for ours, theirs in zip(*(outside.logits(d, gemma) for d in (drafter, read)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["eagle", "hass", "eagle3"])
def test_native_folder_without_the_setting_keeps_the_activation_of_its_target(
    name: str, gemma: Target, tmp_path: Path
) -> None:
    drafter = built(name, gemma, activation="gelu")
    formats.find("native", name).write(drafter, gemma, None, tmp_path)
    config = config_of(tmp_path)
    del config["drafter"]["activation"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, cfg = formats.load(tmp_path, gemma)
    assert cfg.activation == "gelu"
    for ours, theirs in zip(*(outside.logits(d, gemma) for d in (drafter, read)), strict=True):
        assert torch.equal(ours, theirs)
