"""EAGLE-3 folders of other projects: conventions, ambiguities, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models import formats
from outrider.models.drafters.eagle3 import Eagle3
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats import native
from outrider.models.target.target import Target
from tests import outside, tiny

IDS = "eagle_aux_hidden_state_layer_ids"
N, DEFAULT_TAPS = 8, (1, 3, 4)  # layers of the target; its low, middle and high ones


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(num_hidden_layers=N)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return outside.randomise(tiny.drafter("eagle3", target))


# ---- conventions that the files resolve ----------------------------------------------------------


def test_default_taps_need_not_be_named(drafter: Drafter, target: Target, tmp_path: Path) -> None:
    """All engines default to the outputs 1, n/2 - 1, n - 4."""
    folder = outside.publish_as(drafter, target, tmp_path / "f", eagle_config=None)
    read, cfg = formats.load(folder, target)
    assert read.taps == cfg.taps == drafter.taps == DEFAULT_TAPS
    outside.assert_equal_weights(drafter, read)


@pytest.mark.parametrize(("word", "first"), [("sglang", 0), ("vllm", 1), ("speculators", 1)])
def test_layer_ids_are_outputs_for_sglang_and_inputs_for_vllm(
    target: Target, tmp_path: Path, word: str, first: int
) -> None:
    drafter = tiny.drafter("eagle3", target, taps=(0, 2, 5))
    folder = outside.publish_as(drafter, target, tmp_path / "f", word)
    config = json.loads((folder / "config.json").read_text())
    ids = config.get(IDS) or config["eagle_config"][IDS]
    assert ids == [tap + first for tap in (0, 2, 5)]
    assert formats.load(folder, target)[0].taps == (0, 2, 5)


def test_outrider_json_settles_ids_equal_to_vllms_defaults(target: Target, tmp_path: Path) -> None:
    drafter = tiny.drafter("eagle3", target, taps=(2, 4, 5))
    form = formats.find("sglang", "eagle3")
    form.write(drafter, target, None, tmp_path / "f")
    assert form.read(tmp_path / "f", target)[0].taps == (2, 4, 5)


@pytest.mark.parametrize("prefix", ["model.", "module.", "draft_model.model."])
def test_key_prefixes_are_stripped(
    drafter: Drafter, target: Target, tmp_path: Path, prefix: str
) -> None:
    folder = outside.rename_keys(
        outside.publish_as(drafter, target, tmp_path / "f"), lambda key: prefix + key
    )
    outside.assert_equal_weights(drafter, formats.load(folder, target)[0])


def test_alternative_key_names_are_read(target: Target, tmp_path: Path) -> None:
    """SGLang's aux_norm_*, and layers.0 for midlayer, as ModelOpt writes it."""
    drafter = outside.randomise(tiny.drafter("eagle3", target, fc_norm="each"))
    folder = outside.publish_as(drafter, target, tmp_path / "f", eagle_config=None)
    other = {f"fc_norm.{i}": f"aux_norm_{n}" for i, n in enumerate(("low", "mid", "high"))}

    def name(key: str) -> str:
        for ours, theirs in other.items():
            key = key.replace(ours, theirs)
        return key.replace("midlayer.", "layers.0.")

    outside.assert_equal_weights(
        drafter, formats.load(outside.rename_keys(folder, name), target)[0]
    )


def test_copy_of_the_target_embedding_is_accepted(
    drafter: Drafter, target: Target, tmp_path: Path
) -> None:
    folder = outside.publish_as(drafter, target, tmp_path / "f")
    mine = target.model.get_input_embeddings().weight.detach()
    outside.rewrite_weights(folder, lambda t: t.update({"embed_tokens.weight": mine.half()}))
    outside.assert_equal_weights(drafter, formats.load(folder, target)[0])
    outside.rewrite_weights(folder, lambda t: t["embed_tokens.weight"].mul_(1.1))
    with pytest.raises(RunError, match=r"embed_tokens\.weight differs from the target's"):
        formats.load(folder, target)


def test_other_sizes_than_the_target_round_trip(target: Target, tmp_path: Path) -> None:
    """Heads, MLP and rotary base, also through the native format and back."""
    other = tiny.target(
        num_hidden_layers=N, intermediate_size=20, num_key_value_heads=4, head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rms_norm_eps=1e-4,
    )  # fmt: skip
    drafter = outside.randomise(tiny.drafter("eagle3", other))
    folder = outside.publish_as(drafter, other, tmp_path / "f")
    read, cfg = formats.load(folder, target)
    assert isinstance(read, Eagle3)
    assert read.shape == other.shape()._replace(layers=N)
    outside.assert_equal_weights(drafter, read)
    native.save(read, tmp_path / "own", target, cfg, {})
    again, _ = formats.load(tmp_path / "own", target)
    assert isinstance(again, Eagle3)
    assert again.shape == read.shape
    one, two = (outside.logits(d, target) for d in (read, again))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    formats.find("sglang", "eagle3").write(again, target, None, tmp_path / "out")
    before, after = (
        json.loads((p / "config.json").read_text()) for p in (folder, tmp_path / "out")
    )
    assert before == after
    file = "model.safetensors"
    assert (folder / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


def test_vocab_maps_may_have_any_dtype(drafter: Drafter, target: Target, tmp_path: Path) -> None:
    folder = outside.publish_as(drafter, target, tmp_path / "f")
    outside.rewrite_weights(folder, lambda t: t.update(d2t=t["d2t"].int(), t2d=t["t2d"].byte()))
    outside.assert_equal_weights(drafter, formats.load(folder, target)[0])


def test_sglang_folder_names_a_whole_vocabulary_and_need_not(
    target: Target, tmp_path: Path
) -> None:
    """optimum-intel leaves an absent d2t uninitialised; folders of others have none."""
    whole = outside.randomise(tiny.drafter("eagle3", target, outside.vocab(True)))
    folder = outside.publish_as(whole, target, tmp_path / "f")
    stored = outside.weights(folder)
    assert not stored["d2t"].any()
    assert stored["t2d"].all()
    for change in (lambda t: None, lambda t: (t.pop("d2t"), t.pop("t2d"))):
        outside.rewrite_weights(folder, change)
        read, cfg = formats.load(folder, target)
        assert cfg.draft_vocab_size is None
        outside.assert_equal_weights(whole, read)


def test_missing_rope_theta_has_llamas_default(
    drafter: Drafter, target: Target, tmp_path: Path
) -> None:
    missing: dict[str, Any] = {"rope_theta": None, "rope_parameters": None, "rms_norm_eps": None}
    folder = outside.publish_as(drafter, target, tmp_path / "f", **missing)
    read, _ = formats.load(folder, target)
    assert isinstance(read, Eagle3)
    assert (read.shape.rope_theta, read.shape.eps) == (10000.0, 1e-6)


def test_conversion_between_formats_is_exact(
    drafter: Drafter, target: Target, tmp_path: Path
) -> None:
    here = tmp_path / "start"
    formats.find("sglang", "eagle3").write(drafter, target, None, here)
    first = (here / "model.safetensors").read_bytes()
    for i, word in enumerate(("vllm", "native", "speculators", "vllm", "sglang")):
        read, cfg = formats.load(here, target)
        here = tmp_path / str(i)
        formats.find(word, "eagle3").write(read, target, cfg, here)
    assert (here / "model.safetensors").read_bytes() == first


@torch.no_grad()
def test_tap_scale_is_folded_into_fc(target: Target, tmp_path: Path) -> None:
    """Exact for powers of two."""
    for sizes, exact in (((0.5, 4.0, 2.0), True), ((0.3, 1.7, 0.9), False)):
        drafter = outside.randomise(tiny.drafter("eagle3", target))
        assert isinstance(drafter, Eagle3)
        drafter.tap_scale.copy_(torch.tensor(sizes))
        folder = outside.publish_as(drafter, target, tmp_path / str(exact))
        (folder / "outrider.json").write_text('{"drafter": {"depths": 3}}')
        read, _ = formats.load(folder, target)
        assert isinstance(read, Eagle3)
        assert read.tap_scale.tolist() == [1.0] * 3
        pairs = zip(outside.logits(drafter, target), outside.logits(read, target), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)
            assert torch.equal(ours, theirs) or not exact


def test_tap_scale_of_training_folds_exactly(target: Target, tmp_path: Path) -> None:
    drafter = tiny.drafter("eagle3", target)
    assert isinstance(drafter, Eagle3)
    trace = tiny.packed_trace(target)
    drafter.initialise(target, [trace])
    scale = drafter.tap_scale
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)), "powers of two"
    assert bool((scale != 1).any())
    taps = trace.taps[trace.document >= 0].unflatten(-1, (len(scale), -1)) * scale[:, None]
    sizes = taps.square().mean(-1).sqrt().median(0).values
    assert bool(((sizes > 0.7) & (sizes < 1.42)).all())
    folder = outside.publish_as(drafter, target, tmp_path / "f", "vllm")
    (folder / "outrider.json").write_text('{"drafter": {"depths": 3}}')
    read, _ = formats.load(folder, target)
    pairs = zip(outside.logits(drafter, target), outside.logits(read, target), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@torch.no_grad()
def test_normed_residual_feeds_the_first_layer(target: Target) -> None:
    drafter = tiny.drafter("eagle3", target, **outside.NORMED)
    assert isinstance(drafter, Eagle3)
    embedding, state = torch.randn(3, 32), torch.randn(3, 32)
    residual, read = drafter.layer_inputs(embedding, state)
    assert torch.equal(residual, drafter.midlayer.hidden_norm(state))
    assert torch.equal(read, drafter.midlayer.concat_inputs(embedding, state))


# ---- ambiguities ---------------------------------------------------------------------------------


def test_ambiguity_is_refused_and_settled_by_outrider_json(
    drafter: Drafter, target: Target, tmp_path: Path
) -> None:
    """Layer names that suit both engines; `norm_output`, which two projects define differently."""
    eagle_config = {"use_aux_hidden_state": True, IDS: [0, 2, 5]}
    folder = outside.publish_as(
        drafter, target, tmp_path / "f", eagle_config=eagle_config, norm_output=True
    )
    outside.rename_keys(folder, lambda key: key.replace("midlayer.", "layers.0."))
    with pytest.raises(
        RunError, match=r"inputs for vLLM and outputs for SGLang[\s\S]*outrider\.json"
    ):
        formats.load(folder, target)
    (folder / "outrider.json").write_text(json.dumps({"taps": [1, 3, 6]}))
    with pytest.raises(RunError, match=r"norm_output is [\s\S]*outrider\.json"):
        formats.load(folder, target)
    content = {"taps": [1, 3, 6], "drafter": {"feedback": "raw", "depths": 7}}
    (folder / "outrider.json").write_text(json.dumps(content))
    read, cfg = formats.load(folder, target)
    assert (read.taps, cfg.feedback, cfg.depths) == ((1, 3, 6), "raw", 7)
    outside.assert_equal_weights(drafter, read)


# ---- what is refused -----------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("sglang", {"eagle_config": {IDS: [2, 4, 5]}}, "vLLM's default.*would be shifted"),
    ("sglang", {"eagle_config": None, IDS: [2, 4, 5]}, "are where vLLM reads them"),
    ("sglang", {"eagle_config": {IDS: [1, 3]}}, "fc.weight reads 3"),
    ("sglang", {"eagle_config": {IDS: [4, 3, 1]}}, r"taps \[4, 3, 1\]; engines .* ascending"),
    ("vllm", {IDS: [0, 4, 5]}, r"taps layers \[-1, 3, 4\] of 8"),
    ("vllm", {IDS: [2, 4, 9]}, r"taps layers \[1, 3, 8\] of 8"),
    ("sglang", {"eagle_config": {IDS: "1,3,4"}}, "must be a list of integers"),
    ("sglang", {"eagle_config": 3}, "no object eagle_config"),
    ("sglang", {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step: 4"),
    ("sglang", {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm: True"),
    ("vllm", {"norm_before_fc": True}, "norm_before_fc of config.json contradicts"),
    ("vllm", {"fc_norm": True}, "fc_norm of config.json contradicts"),
    ("vllm", {"eagle_config": {"fc_norm": True}}, "fc_norm: False, and its eagle_config True"),
    ("sglang", {"rope_parameters": LLAMA3}, "rotary embedding is of type llama3"),
    ("sglang", {"rope_parameters": None, "rope_scaling": LLAMA3}, "rotary embedding is of type"),
    ("sglang", {"rope_scaling": LLAMA3}, "two rotary embeddings"),
    ("sglang", {"rope_theta": 500000.0}, "two rotary embeddings"),
    ("sglang", {"rope_scaling": [1]}, "not a llama config.*rope_parameters"),
    (
        "sglang",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        r"partial \(0\.25\)",
    ),
    ("sglang", {"rope_parameters": None, "partial_rotary_factor": 0.25}, r"partial \(0\.25\)"),
    ("sglang", {"hidden_size": 64}, "hidden size is 64 and the target's 32"),
    ("sglang", {"vocab_size": 64}, "vocabulary has 64 tokens"),
    ("sglang", {"draft_vocab_size": 41}, "d2t names 40 tokens"),
    ("sglang", {"intermediate_size": 56}, r"mlp.* is \[48, 32\], and config.json .* \[56, 32\]"),
    ("sglang", {"hidden_act": "relu"}, "activation is relu"),
    ("sglang", {"attention_bias": True}, "attention_bias: True"),
    ("sglang", {"sliding_window": 0}, "sliding-window attention, and sliding_window is 0"),
    ("sglang", {"layer_types": ["sliding_attention"]}, "sliding_window is None"),
    (
        "sglang",
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
        "with a sliding window and layers without",
    ),
    ("sglang", {"layer_types": ["linear_attention"]}, "its layers have linear_attention"),
    ("sglang", {"model_type": "kimi_k2"}, "layers are of type kimi_k2"),
    ("sglang", {"num_hidden_layers": "two"}, "not a llama config.*num_hidden_layers"),
    ("sglang", {"num_hidden_layers": 2}, "lacks layers.0"),
    ("sglang", {"num_attention_heads": "x"}, "not a llama config"),
    ("speculators", {"norm_before_residual": None}, "norm_before_residual is missing"),
    ("speculators", {"target_hidden_size": 64}, "target has another hidden size"),
    ("speculators", {"transformer_layer_config": None}, "no object transformer_layer_config"),
]


@pytest.mark.parametrize(("word", "changes", "message"), CONFIGS, ids=str)
def test_unsupported_config_is_refused(
    drafter: Drafter,
    target: Target,
    tmp_path: Path,
    word: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    folder = outside.publish_as(drafter, target, tmp_path / "f", word, **changes)
    with pytest.raises(RunError, match=message) as caught:
        formats.load(folder, target)
    assert caught.value.fix
    assert "Fetch" not in caught.value.fix, "fetching again cannot help"


def rename_q_proj(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_prj.weight"] = tensors.pop("midlayer.self_attn.q_proj.weight")


def narrow_k_proj(tensors: dict[str, Tensor]) -> None:
    """Cut the first layer's input, twice the hidden size, to one."""
    key = "midlayer.self_attn.k_proj.weight"
    tensors[key] = tensors[key][:, :32].contiguous()


WEIGHTS: list[tuple[str, Callable[[dict[str, Tensor]], object], str]] = [
    ("renamed", rename_q_proj, r"lacks midlayer.*q_proj.*holds .*q_prj.*is it .*q_proj"),
    ("missing", lambda t: t.pop("norm.weight"), r"lacks norm\.weight"),
    ("unknown", lambda t: t.update({"fc.bias": torch.ones(32)}), r"holds fc\.bias"),
    ("no d2t", lambda t: t.pop("d2t"), "d2t is missing"),
    (
        "neither",
        lambda t: (t.pop("d2t"), t.pop("t2d")),
        "d2t is missing, which names the 40 tokens of its head; the target has 61",
    ),
    ("ids", lambda t: t["d2t"].add_(torch.arange(40)), "does not name tokens of the target"),
    ("negative", lambda t: t["d2t"].sub_(61), "does not name tokens of the target"),
    ("one token twice", lambda t: t["d2t"][1].sub_(1), "does not name tokens of the target"),
    ("another token", lambda t: t["d2t"][1].add_(1), "do not name the same"),
    ("no head", lambda t: t.pop("lm_head.weight"), "head of 40 tokens; the target's has 61"),
    ("flipped", lambda t: t["t2d"].logical_not_(), "do not name the same"),
    (
        "short head",
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:39].clone()}),
        "d2t names",
    ),
    ("int8", lambda t: t.update({"fc.weight": t["fc.weight"].char()}), r"fc.weight is quantised"),
    ("cut", narrow_k_proj, r"k_proj.weight is \[16, 32\], and .* require \[16, 64\]"),
    (
        "twice",
        lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(32)}),
        "are the same weight",
    ),
    ("wrapped twice", lambda t: t.update({"model.norm.weight": torch.ones(32)}), "weight twice"),
    ("fc", lambda t: t.update({"fc.weight": torch.ones(32, 97)}), "no multiple of 32"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), WEIGHTS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_unsupported_weights_are_refused(
    drafter: Drafter,
    target: Target,
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    folder = outside.publish_as(drafter, target, tmp_path / name)
    outside.rewrite_weights(folder, change)
    with pytest.raises(RunError, match=message) as caught:
        formats.load(folder, target)
    assert caught.value.fix
    assert "Fetch" not in caught.value.fix, "fetching again cannot help"


def test_other_taps_than_the_default_must_be_named(target: Target, tmp_path: Path) -> None:
    drafter = tiny.drafter("eagle3", target, taps=(0, 2))
    folder = outside.publish_as(drafter, target, tmp_path / "f", eagle_config=None)
    with pytest.raises(RunError, match=r"does not name the 2 layers[\s\S]*outrider\.json"):
        formats.load(folder, target)
