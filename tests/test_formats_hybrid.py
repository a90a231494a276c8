"""Exported drafters of targets with recurrent layers: what engines read from their folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from outrider.models import drafters, formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats.external import ExternalFormat
from outrider.models.target.target import Target
from tests import outside, tiny
from tests.families import HYBRIDS, small_model

# linear attention with gated queries, Mamba-2 and experts, convolutions, no attention at all
KINDS = ("qwen3_next", "nemotron_h", "lfm2", "mamba2")
# where a folder names the tapped layers, and what it adds to the number of the layer whose output
# is read
TAPS: list[tuple[str, str, tuple[str, ...], int]] = [
    ("eagle3", "sglang", ("eagle_config", "eagle_aux_hidden_state_layer_ids"), 0),
    ("eagle3", "vllm", ("eagle_aux_hidden_state_layer_ids",), 1),
    ("eagle3", "speculators", ("eagle_aux_hidden_state_layer_ids",), 1),
    ("p_eagle", "vllm", ("eagle_aux_hidden_state_layer_ids",), 1),
    ("dflash", "zlab", ("dflash_config", "target_layer_ids"), 0),
    ("dflash", "transformers", ("target_layer_ids",), 0),
    ("dflash", "speculators", ("aux_hidden_state_layer_ids",), 1),
    ("dspark", "deepspec", ("target_layer_ids",), 0),
    ("dspark", "vllm", ("target_layer_ids",), 0),
]
# fields of the target that would change the drafter's layers: another share of rotated numbers,
# states instead of keys, experts
FOREIGN = ("partial_rotary", "linear_", "mamba", "ssm", "conv", "expert", "moe")


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(small_model(request.param), name=request.param)


def exported(drafter: Drafter, name: str, word: str, target: Target, folder: Path) -> Any:
    formats.find(word, name).write(drafter, target, None, folder)
    return json.loads((folder / "config.json").read_text())


def layer_fields(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("transformer_layer_config") or config
    return found


@pytest.mark.parametrize(("name", "word", "path", "shift"), TAPS)
def test_folders_number_all_layers_and_describe_the_drafter_alone(
    name: str, word: str, path: tuple[str, ...], shift: int, target: Target, tmp_path: Path
) -> None:
    """Recurrent layers count; no field of theirs, nor of the target's heads, is written."""
    drafter = outside.Case(name, word, {}, True).drafter(target)
    config = found = exported(drafter, name, word, target, tmp_path / "f")
    for key in path:
        found = found[key]
    assert found == [tap + shift for tap in drafter.taps]
    assert config.get("num_target_layers", target.num_layers) == target.num_layers
    fields = layer_fields(config)
    assert not [key for key in fields if any(word in key.lower() for word in FOREIGN)]
    assert "partial_rotary_factor" not in fields["rope_parameters"]
    assert set(fields.get("layer_types") or ()) <= {"full_attention"}
    sizes = {key: len(value) for key, value in outside.weights(tmp_path / "f").items()}
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        rows = {n for key, n in sizes.items() if key.endswith(f"self_attn.{part}_proj.weight")}
        assert rows == {fields[heads] * fields["head_dim"]}
    loaded = formats.load(tmp_path / "f", target)[0]
    outside.assert_equal_weights(loaded, drafter)


@pytest.mark.parametrize("word", ["sglang", "vllm", "speculators"])
def test_heads_may_differ_from_the_targets(word: str, target: Target, tmp_path: Path) -> None:
    drafter = outside.Case("eagle3", word, {"head_dim": 24}, True).drafter(target)
    fields = layer_fields(exported(drafter, "eagle3", word, target, tmp_path / "f"))
    assert fields["head_dim"] == 24 != target.shape().head_dim
    outside.assert_equal_weights(formats.load(tmp_path / "f", target)[0], drafter)


# ---- MTP -----------------------------------------------------------------------------------------


def mtp(target: Target, **changes: Any) -> Drafter:
    return outside.randomise(tiny.drafter("mtp", target, outside.vocab(whole=True), **changes))


@pytest.mark.parametrize("family", HYBRIDS)
def test_modules_inside_a_hybrid_are_refused_with_the_part_that_differs(family: str) -> None:
    """An engine would build them as one more layer of the target."""
    target = Target(small_model(family), name=family)
    refusals = formats.export_refusals(mtp(target, depths=1, qk_norm=True), "mtp", target)
    for word in ("deepseek", "qwen3_next"):
        assert "rotary embedding" in refusals[word] or "decoder layers" in refusals[word]
    assert refusals["speculators"] == "" or "rotary embedding" in refusals["speculators"]


def test_gated_queries_are_refused_by_their_size() -> None:
    """Qwen3-Next's layer has the names of a module, and a gate beside every query."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    target = Target(small_model("qwen3_5", rope_parameters=rope), name="qwen3_5")
    refusals = formats.export_refusals(mtp(target, depths=1, qk_norm=True), "mtp", target)
    assert "self_attn.q_proj.weight is [64, 32] and not [32, 32]" in refusals["qwen3_next"]


def test_a_folder_of_modules_counts_them_and_the_targets_layers(tmp_path: Path) -> None:
    target = Target(small_model("olmo_hybrid"), name="olmo_hybrid")
    config = exported(mtp(target, depths=1, qk_norm=True), "mtp", "speculators", target, tmp_path)
    assert config["num_nextn_predict_layers"] == 1
    assert layer_fields(config)["num_hidden_layers"] == target.num_layers


# ---- sizes of published models -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "heads", "size", "layers"),
    [
        (hf.Qwen3_5TextConfig, {}, (16, 4), 256, 32),
        (hf.Qwen3NextConfig, {"num_experts": 2}, (16, 2), 256, 48),
        (hf.NemotronHConfig, {"hidden_size": 2688, "num_key_value_heads": 2}, (32, 2), 128, 4),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_drafters_have_the_heads_of_the_attention_layers(
    kind: Any, fields: dict[str, Any], heads: tuple[int, int], size: int, layers: int
) -> None:
    """Not those of the recurrent ones: 32 of 128 numbers in Qwen3.5, 128 of 64 in Nemotron-H."""
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(kind(**fields))
    target = Target(model, name="published", fuse=False)
    vocab = tiny.vocab(99, target.vocab_size)
    with torch.device("meta"):
        drafter = drafters.build(tiny.config("eagle3"), target, vocab)
    form = formats.find("vllm", "eagle3")
    assert isinstance(form, ExternalFormat)
    config = form.config(drafter, target)
    found = config["num_attention_heads"], config["num_key_value_heads"]
    assert (found, config["head_dim"], target.num_layers) == (heads, size, layers)
