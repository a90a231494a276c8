"""MTP modules as a drafter's folder: order of inputs, norms, and merging into the target."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from outrider.conf.errors import RunError
from outrider.models import formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats import mtp_layouts, mtp_merge
from outrider.models.target.target import Target
from tests import outside, tiny
from tests.test_mtp_format import DEEPSEEK, Module, expected, part


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def home(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own folder, in three shards, with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("target") / "llama"
    target.model.save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    return folder


def built(target: Target, **changes: Any) -> Drafter:
    return outside.randomise(tiny.drafter("mtp", target, outside.vocab(whole=True), **changes))


# ---- layouts -------------------------------------------------------------------------------------


@torch.no_grad()
def test_exported_modules_have_equal_logits(target: Target, tmp_path: Path) -> None:
    """A reference implementation on the file's tensors; [state; embedding] is swapped there."""
    for order in ("embedding_first", "state_first"):
        drafter = built(target, order=order)
        folder = outside.publish_as(drafter, target, tmp_path / order, "deepseek")
        raw = outside.weights(folder)
        stages = [part(raw, f"model.layers.{4 + k}.") for k in range(3)]
        assert all(
            torch.equal(s["embed_tokens.weight"], target.embed(torch.arange(61))) for s in stages
        )
        assert all(torch.equal(s["shared_head.head.weight"], target.head_weight) for s in stages)
        ids = torch.randint(3, 61, (1, 12), generator=torch.Generator().manual_seed(4))
        row = torch.arange(12)[None]
        trace = target.trace(ids, torch.ones_like(ids).bool(), torch.zeros_like(ids), row)
        reference = expected(
            target, [Module(target, s, DEEPSEEK, "") for s in stages], ids[0], trace.last[0]
        )
        for guess, want in zip(drafter.unroll(trace), reference, strict=True):
            logits = drafter.head(tiny.spread(guess, trace))[0, : len(want)]
            torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


def test_qwen_layout_stores_norms_minus_one(target: Target, tmp_path: Path) -> None:
    drafter = built(target, depths=1)
    folder = outside.publish_as(drafter, target, tmp_path / "f", "qwen3_next")
    stored = outside.weights(folder)["mtp.norm.weight"]
    assert torch.equal(stored, drafter.get_parameter("stages.0.norm.weight") - 1)


@torch.no_grad()
def test_norms_far_from_one_round_trip_within_rounding(target: Target, tmp_path: Path) -> None:
    drafter = built(target, depths=1)
    weight = drafter.get_parameter("stages.0.norm.weight")
    weight.copy_(torch.logspace(-3, 2, 32))
    folder = outside.publish_as(drafter, target, tmp_path / "f", "qwen3_next")
    read = formats.load(folder, target)[0].get_parameter("stages.0.norm.weight")
    assert float((read - weight).abs().max()) < 1e-5
    assert float((read - weight)[weight < 1].abs().max()) <= 2**-24


def test_exported_modules_can_initialise_a_drafter(target: Target, tmp_path: Path) -> None:
    """`drafter.init=target` reads an exported folder."""
    drafter = built(target)
    found = mtp_layouts.read_modules(
        outside.publish_as(drafter, target, tmp_path / "f", "deepseek"), target.num_layers
    )
    for k, module in enumerate(found):
        for key, value in module.items():
            assert torch.equal(value, drafter.state_dict()[f"stages.{k}.{key}"])


# ---- merging into a copy of the target -----------------------------------------------------------


@pytest.mark.parametrize("word", ["deepseek", "qwen3_next"])
def test_merged_folder_holds_target_and_drafter(
    target: Target, home: Path, tmp_path: Path, word: str
) -> None:
    drafter = built(target, **({"depths": 1} if word == "qwen3_next" else {}))
    form = formats.find(word, "mtp")
    form.write(drafter, target, None, tmp_path / "alone")
    mtp_merge.merge_into_target(tmp_path / "alone", home, tmp_path / "both")
    names = {file.name for file in (tmp_path / "both").iterdir()}
    assert "tokenizer.json" in names
    assert "pytorch_model.bin" not in names
    assert formats.recognise(tmp_path / "both") is form
    read, cfg = form.read(tmp_path / "both", target)
    outside.assert_equal_weights(drafter, read)
    assert cfg == vars(drafter)["cfg"]
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "both", use_safetensors=True)
    ours, theirs = target.model.state_dict(), again.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_merging_replaces_existing_modules(target: Target, home: Path, tmp_path: Path) -> None:
    for seed, into in ((2, home), (8, tmp_path / "2")):
        drafter = tiny.drafter("mtp", target, outside.vocab(whole=True), seed=seed)
        formats.find("deepseek", "mtp").write(drafter, target, None, tmp_path / f"alone{seed}")
        mtp_merge.merge_into_target(tmp_path / f"alone{seed}", into, tmp_path / str(seed))
    outside.assert_equal_weights(drafter, formats.load(tmp_path / "8", target)[0])
    size = {n: sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in "28"}
    assert size["2"] == size["8"]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "llama_tied"])
def test_merging_into_other_families(tmp_path: Path, family: str) -> None:
    """The target's layers are of another type; the modules are Llama layers of the same sizes."""
    other = tiny.target(family)
    other.model.save_pretrained(tmp_path / "whole")
    drafter = built(other)
    formats.find("deepseek", "mtp").write(drafter, other, None, tmp_path / "alone")
    mtp_merge.merge_into_target(tmp_path / "alone", tmp_path / "whole", tmp_path / "both")
    (tmp_path / "both" / "outrider.json").unlink()
    outside.assert_equal_weights(drafter, formats.load(tmp_path / "both", other)[0])


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("gemma2", {}, "layers, and the two differ in post_feedforward_layernorm.weight"),
        ("qwen3_moe", {"qk_norm": True}, "the two differ in mlp"),
        ("granite", {}, "layers, which have residual_multiplier 0.5"),
        ("llama", {"qk_norm": True}, "without norms on queries and keys .drafter.qk_norm=false"),
        ("qwen3", {}, "with norms on queries and keys .drafter.qk_norm=true"),
        ("qwen2", {}, ""),  # biases are written as zeros
    ],
)
def test_module_that_an_engine_would_build_with_other_parts_is_refused(
    family: str, changes: dict[str, Any], why: str
) -> None:
    """The engine's module is one of the target's decoder layers."""
    other = tiny.target(family)
    reason = formats.export_refusals(built(other, **changes), "mtp", other)["deepseek"]
    assert re.search(why, reason) if why else reason == ""


def test_merged_folder_with_scaled_rope_is_refused(
    target: Target, home: Path, tmp_path: Path
) -> None:
    formats.find("deepseek", "mtp").write(built(target), target, None, tmp_path / "alone")
    mtp_merge.merge_into_target(tmp_path / "alone", home, tmp_path / "both")
    (tmp_path / "both" / "outrider.json").unlink()
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(RunError, match="scaled, partial or missing"):
        formats.load(tmp_path / "both", tiny.target(rope_parameters=rope))


def test_modules_of_other_sizes_are_read_but_not_exported(target: Target, tmp_path: Path) -> None:
    other = tiny.target(intermediate_size=20, rms_norm_eps=1e-4)
    folder = outside.publish_as(built(other, depths=1), other, tmp_path / "f", "qwen3_next")
    read, _ = formats.load(folder, target)
    assert "have other sizes" in formats.find("qwen3_next", "mtp").refusal_reason(read, target)


def test_merging_into_a_single_file_target(target: Target, tmp_path: Path) -> None:
    """A lone model.safetensors would be read instead of the index."""
    target.model.save_pretrained(tmp_path / "whole")
    drafter = built(target, depths=1)
    formats.find("deepseek", "mtp").write(drafter, target, None, tmp_path / "alone")
    mtp_merge.merge_into_target(tmp_path / "alone", tmp_path / "whole", tmp_path / "both")
    assert not (tmp_path / "both" / "model.safetensors").exists()
    outside.assert_equal_weights(drafter, formats.load(tmp_path / "both", target)[0])


def test_merging_refuses_another_target(target: Target, home: Path, tmp_path: Path) -> None:
    other = tiny.target(num_hidden_layers=6)
    formats.find("deepseek", "mtp").write(built(other, depths=1), other, None, tmp_path / "alone")
    with pytest.raises(RunError, match=r"num_hidden_layers is 6, and in .* 4"):
        mtp_merge.merge_into_target(tmp_path / "alone", home, tmp_path / "both")
    assert not (tmp_path / "both").exists()
    (tmp_path / "alone" / "outrider.json").unlink()
    with pytest.raises(RunError, match="target has 6 layers, and this one 4"):
        formats.load(tmp_path / "alone", target)


def test_merging_refuses_other_layer_names(target: Target, home: Path, tmp_path: Path) -> None:
    """Engines do not look for modules there."""
    formats.find("deepseek", "mtp").write(built(target), target, None, tmp_path / "alone")
    shutil.copytree(home, tmp_path / "other")
    for file in (tmp_path / "other").glob("*.safetensors"):
        named = {
            k.replace("model.", "model.language_model."): v for k, v in load_file(file).items()
        }
        save_file(named, file)
    index = tmp_path / "other" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.', '"model.language_model.'))
    with pytest.raises(RunError, match="layers are not named"):
        mtp_merge.merge_into_target(tmp_path / "alone", tmp_path / "other", tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_merging_refuses_speculators_layout(target: Target, home: Path, tmp_path: Path) -> None:
    form = formats.find("speculators", "mtp")
    form.write(built(target, depths=1, qk_norm=True), target, None, tmp_path / "alone")
    with pytest.raises(RunError, match="format=deepseek or qwen3_next"):
        mtp_merge.merge_into_target(tmp_path / "alone", home, tmp_path / "both")


def test_damage_in_a_merged_folder_is_refused(target: Target, home: Path, tmp_path: Path) -> None:
    formats.find("deepseek", "mtp").write(built(target), target, None, tmp_path / "alone")
    mtp_merge.merge_into_target(tmp_path / "alone", home, tmp_path / "both")
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "both", cut)
    file = cut / mtp_merge.MODULES
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(RunError, match="truncated"):
        formats.load(cut, target)
    file = tmp_path / "both" / "config.json"
    config = json.loads(file.read_text())
    assert config["num_nextn_predict_layers"] == 3
    file.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(RunError, match="has 1 modules, and the weights 3"):
        formats.load(tmp_path / "both", target)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name", "message"),
    [
        ("deepseek", "model.layers.4.self_attn.kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa"),
        ("qwen3_next", "mtp.layers.0.mlp.experts.0.gate_proj.weight", "experts.0.gate_proj"),
        ("speculators", "mtp_layers.0.input_proj.bias", "input_proj.bias"),
    ],
)
def test_unknown_key_is_named(
    target: Target, tmp_path: Path, word: str, name: str, message: str
) -> None:
    drafter = built(target, depths=1, qk_norm=word == "speculators")
    folder = outside.publish_as(drafter, target, tmp_path / "f", word)
    outside.rewrite_weights(folder, lambda t: t.update({name: torch.ones(3)}))
    with pytest.raises(RunError, match=f"holds .*{message}.* does not define"):
        formats.load(folder, target)


@pytest.mark.parametrize("end", ["embed_tokens", "shared_head.head"])
def test_other_embedding_or_head_is_refused(target: Target, tmp_path: Path, end: str) -> None:
    folder = outside.publish_as(built(target, depths=1), target, tmp_path / "f", "deepseek")
    outside.rewrite_weights(folder, lambda t: t[f"model.layers.4.{end}.weight"].add_(1))
    with pytest.raises(RunError, match=f"{end}.weight differs from the target's"):
        formats.load(folder, target)


def test_outrider_json_selects_recurrent_mode(target: Target, tmp_path: Path) -> None:
    folder = outside.publish_as(built(target, depths=1), target, tmp_path / "f", "deepseek")
    content = {"drafter": {"mode": "recurrent", "depths": 5}}
    (folder / "outrider.json").write_text(json.dumps(content))
    cfg = formats.load(folder, target)[1]
    assert (cfg.mode, cfg.depths) == ("recurrent", 5)


def test_drafter_saved_without_feed_keeps_raw(target: Target, tmp_path: Path) -> None:
    """The default was raw, and is normed since; a folder that names none is older."""
    formats.find("native", "mtp").write(built(target), target, None, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    assert config["drafter"].pop("feed") == "normed"
    file.write_text(json.dumps(config))
    assert formats.load(tmp_path / "out", target)[1].feed == "raw"


def test_outrider_json_of_an_older_export_keeps_raw(target: Target, tmp_path: Path) -> None:
    """Older versions exported raw modules of several depths; no engine feeds such a state."""
    formats.find("deepseek", "mtp").write(built(target), target, None, tmp_path / "out")
    file = tmp_path / "out" / "outrider.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "drafter": {**content["drafter"], "feed": "raw"}}))
    read, cfg = formats.load(tmp_path / "out", target)
    assert cfg.feed == "raw"
    assert "after its norm" in formats.find("deepseek", "mtp").refusal_reason(read, target)
