"""DFlash folders: transformers' own network and decoding, flags, and folders of other projects."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from outrider.conf.errors import ConfigError, RunError
from outrider.eval.publish.reference_outputs import (
    compare_outputs,
    reference_outputs,
    write_reference,
)
from outrider.models import formats
from outrider.models.drafting.block.backbone import BlockDrafter
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target
from tests import outside, tiny

WORDS = ("zlab", "vllm", "transformers", "speculators")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def written(word: str, target: Target, folder: Path, **changes: Any) -> tuple[Drafter, Path]:
    drafter = outside.Case("dflash", word, changes, True).drafter(target)
    folder = folder / f"{word}{len(changes)}"
    formats.find(word, "dflash").write(drafter, target, None, folder)
    return drafter, folder


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change config.json, and remove outrider.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "outrider.json").unlink(missing_ok=True)


# ---- transformers --------------------------------------------------------------------------------


MIXED = {"layers": 3, "window": 5, "window_layers": (0, 2)}


@pytest.mark.parametrize(
    "changes", [{}, {"window": 5}, MIXED, {"layers": 3, "taps": (0, 2)}], ids=str
)
@torch.no_grad()
def test_transformers_network_has_our_slots(
    changes: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    """Its own class, loaded from the folder, on the context and the block of one anchor."""
    drafter, folder = written("transformers", target, tmp_path, **changes)
    assert isinstance(drafter, BlockDrafter)
    target.set_taps(drafter.taps)
    trace, t = tiny.packed_trace(target), 8
    theirs: Any = hf.AutoModel.from_pretrained(folder, dtype=torch.float32)
    block = torch.tensor([[int(trace.next_ids[1, t]), *[tiny.VOCAB - 1] * 3]])
    out = theirs(
        noise_embeds=target.model.get_input_embeddings()(block),
        context_hidden_states=trace.taps[1:, : t + 1],
        position_ids=torch.arange(t + 5)[None],
        past_key_values=cache(theirs.config, t + 1),
    ).last_hidden_state[0, 1:]
    ours = torch.stack(
        [g.states(torch.tensor([tiny.LENGTH + t]))[0] for g in drafter.unroll(trace)]
    )
    torch.testing.assert_close(drafter.norm(ours), out, atol=1e-5, rtol=1e-5)


def cache(config: Any, accepted: int) -> Any:
    """The cache of transformers' DFlash generator before its first round."""
    made = hf.cache_utils.DFlashCache(config=config)
    made.activate_past_recording()
    made.set_previous_accepted_tokens(accepted)
    return made


# ---- flags ---------------------------------------------------------------------------------------

MISSING = [
    ("zlab", "dflash_config", "sample_from_anchor", "false or true"),
    ("zlab", "dflash_config", "mask_token_id", "the id of a token"),
    ("zlab", "dflash_config", "target_layer_ids", "layers whose outputs are read"),
    ("transformers", "", "block_size", "2, 3, ..."),
    ("transformers", "", "layer_types", "full_attention or sliding_attention"),
    ("transformers", "", "rope_parameters", "the base of the rotary embedding"),
    ("speculators", "", "sliding_window_non_causal", "true or false"),
    ("speculators", "", "aux_hidden_state_layer_ids", "layers whose inputs are read"),
]


@pytest.mark.parametrize(("word", "part", "flag", "values"), MISSING)
def test_a_folder_without_a_flag_is_refused(
    word: str, part: str, flag: str, values: str, target: Target, tmp_path: Path
) -> None:
    """The message names the flag and its values; outrider.json or config.json settles it."""
    _, folder = written(word, target, tmp_path)
    change_config(folder, lambda config: (config[part] if part else config).pop(flag))
    name = "rope_theta" if flag == "rope_parameters" else flag
    with pytest.raises(RunError, match=rf"lacks {name} \({re.escape(values)}"):
        formats.load(folder, target)


def test_causality_of_windows_must_be_given(target: Target, tmp_path: Path) -> None:
    """Without a window, readers agree that an absent `causal` is false."""
    for changes in ({}, {"window": 5}):
        _, folder = written("zlab", target, tmp_path, **changes)
        change_config(folder, lambda config: config["dflash_config"].pop("causal"))
        if not changes:
            assert not formats.load(folder, target)[1].causal
            continue
        with pytest.raises(RunError, match=r"lacks causal \(false or true"):
            formats.load(folder, target)


def test_outrider_json_settles_a_missing_flag(target: Target, tmp_path: Path) -> None:
    _, folder = written("zlab", target, tmp_path)
    change_config(folder, lambda config: config["dflash_config"].pop("sample_from_anchor"))
    for shifted, depths in ((False, 3), (True, 4)):
        (folder / "outrider.json").write_text(json.dumps({"drafter": {"shifted": shifted}}))
        cfg = formats.load(folder, target)[1]
        assert (cfg.shifted, cfg.depths, cfg.block_size) == (shifted, depths, 4)


CONTRADICTIONS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("zlab", lambda c: c.update(block_size=9), "block_size: 9, and its dflash_config 4"),
    ("zlab", lambda c: c["dflash_config"].update(causal="no"), "causal is no; it may be"),
    ("zlab", lambda c: c["dflash_config"].update(target_layer_ids=[0, 1]), "names 2 taps"),
    ("zlab", lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 1]), "each once"),
    ("zlab", lambda c: c["dflash_config"].update(mask_token_id=61), "tokens 0 to 60"),
    ("transformers", lambda c: c.update(layer_types=["full_attention"]), "names 1 layers"),
    ("transformers", lambda c: c.update(layer_types=["full_attention", "chunked_attention"]),
     "its layers have chunked_attention"),
    ("speculators", lambda c: c.update(sliding_window_non_causal=False), "causal in vLLM"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "change", "message"), CONTRADICTIONS)
def test_contradictory_flags_are_refused(
    word: str,
    change: Callable[[dict[str, Any]], object],
    message: str,
    target: Target,
    tmp_path: Path,
) -> None:
    _, folder = written(word, target, tmp_path)
    change_config(folder, change)
    with pytest.raises((RunError, ConfigError)) as caught:
        formats.load(folder, target)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_layers_with_and_without_a_window_are_read_trained_and_written(
    name: str, target: Target, tmp_path: Path
) -> None:
    """In every format; other kinds of the same layers are another network."""
    words = {"dflash": WORDS, "dspark": ("deepspec", "vllm", "speculators")}[name]
    for word in words:
        counted = {"window_from": "anchor"} if word == "speculators" else {}
        drafter = outside.Case(name, word, {**MIXED, **counted}, True).drafter(target)
        folder = tmp_path / word
        formats.find(word, name).write(drafter, target, None, folder)
        config = json.loads((folder / "config.json").read_text())
        layers = config.get("transformer_layer_config", config)
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        assert layers["layer_types"] == kinds
        (folder / "outrider.json").unlink()
        again, cfg = formats.load(folder, target)
        assert (cfg.window, cfg.window_layers) == (5, (0, 2))
        before, after = outside.logits(drafter, target), outside.logits(again, target)
        assert all(map(torch.equal, before, after))
        layers["layer_types"] = kinds[::-1][1:] + kinds[:1]
        (folder / "config.json").write_text(json.dumps(config))
        other = formats.load(folder, target)[0]
        assert not all(map(torch.equal, before, outside.logits(other, target)))
        again.train().requires_grad_(True)
        losses = tiny.train_drafter(again, target, tiny.packed_trace(target), steps=4)
        assert losses[-1] < losses[0]


def test_mixed_layers_whose_causality_engines_disagree_about_are_refused(
    target: Target, tmp_path: Path
) -> None:
    """An absent `causal`, which vLLM derives per layer; and speculators' causal sliding layers."""
    _, folder = written("zlab", target, tmp_path, **MIXED)
    change_config(folder, lambda config: config["dflash_config"].pop("causal"))
    with pytest.raises(RunError, match=r"lacks causal \(false or true"):
        formats.load(folder, target)
    changes = {**MIXED, "window_from": "anchor"}
    _, folder = written("speculators", target, tmp_path, **changes)
    change_config(folder, lambda config: config.update(sliding_window_non_causal=False))
    with pytest.raises(RunError, match="sliding_window_non_causal is false"):
        formats.load(folder, target)
    drafter = outside.Case("dflash", "speculators", {**changes, "causal": True}, True)
    refused = formats.export_refusals(drafter.drafter(target), "dflash", target)
    assert "blocks are bidirectional" in refused["speculators"]


@pytest.mark.parametrize(
    ("word", "changes", "message"),
    [
        ("zlab", {"shifted": True}, "engines read DFlash unshifted"),
        ("zlab", {"causal": True}, "blocks are bidirectional"),
        ("zlab", {"window": 5, "window_from": "anchor"}, "windows are counted from the slot"),
        ("speculators", {"window": 5}, "windows are counted from the anchor"),
        ("speculators", {"causal": True}, "blocks are bidirectional"),
        ("vllm", {"taps": (0, 3)}, "taps the last decoder layer"),
        ("vllm", {"taps": (1, 0)}, "ascending order"),
        ("vllm", {"activation": "gelu"}, "no activation but silu"),
    ],
)
def test_formats_refuse_what_they_cannot_hold(
    word: str, changes: dict[str, Any], message: str, target: Target
) -> None:
    drafter = outside.Case("dflash", word, changes, True).drafter(target)
    assert message in formats.export_refusals(drafter, "dflash", target)[word]


def test_a_reduced_vocabulary_needs_a_format_with_a_head(target: Target) -> None:
    drafter = outside.Case("dflash", "vllm", {}, False).drafter(target)
    why = formats.export_refusals(drafter, "dflash", target)
    assert [word for word in WORDS if why[word]] == ["zlab", "transformers"]
    assert "format=vllm" in why["zlab"]


# ---- the same network under a wrong flag ---------------------------------------------------------


def test_a_network_read_with_a_wrong_flag_fails_its_check(target: Target, tmp_path: Path) -> None:
    """Shifted in place of unshifted, and taps off by one; outrider.json, if there, tells."""
    drafter = outside.Case("dflash", "zlab", {}, True).drafter(target)
    text = torch.arange(3, 40).tolist()
    for flag, ours, value in (
        ("sample_from_anchor", "shifted", True), ("target_layer_ids", "taps", [1, 2, 3]),
    ):  # fmt: skip
        folder = tmp_path / ours
        formats.find("zlab", "dflash").write(drafter, target, None, folder)
        outputs = reference_outputs(drafter, target, text, 3)
        write_reference(folder, outputs, drafter, target, {})
        assert "golden logits: 3 depths" in compare_outputs(folder, drafter, target)
        config = json.loads((folder / "config.json").read_text())
        config["dflash_config"][flag] = value
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(RunError, match=rf"outrider.json has (the )?{ours}.*, and"):
            formats.load(folder, target)
        (folder / "outrider.json").unlink()
        wrong = formats.load(folder, target)[0]
        reason = "logits of the drafter" if ours == "shifted" else "does not fit|tap|logits"
        with pytest.raises(RunError, match=reason):
            compare_outputs(folder, wrong, target)


# ---- a folder of another project -----------------------------------------------------------------


def published(folder: Path, target: Target) -> None:
    """Write z-lab's layout by the tables of docs/formats.md, without the writer."""
    shape, generator = target.shape(), torch.Generator().manual_seed(4)
    hidden, inner, size = shape.hidden, shape.intermediate, shape.head_dim
    wide, narrow = shape.heads * size, shape.kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(2):
        shapes |= {
            f"layers.{i}.self_attn.{name}.weight": size_
            for name, size_ in {
                "q_proj": (wide, hidden), "k_proj": (narrow, hidden), "v_proj": (narrow, hidden),
                "o_proj": (hidden, wide), "q_norm": (size,), "k_norm": (size,),
            }.items()
        }  # fmt: skip
        shapes |= {f"layers.{i}.mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        shapes |= {f"layers.{i}.mlp.down_proj.weight": (hidden, inner)}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"layers.{i}.{name}.weight": (hidden,) for name in norms}
    folder.mkdir()
    weights = {k: torch.randn(s, generator=generator) * s[-1] ** -0.5 for k, s in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 4,
        "dflash_config": {
            "mask_token_id": 7, "target_layer_ids": [0, 2], "sample_from_anchor": False,
        },
        "num_target_layers": 4, "num_hidden_layers": 2, "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": shape.heads, "hidden_act": "silu",
        "num_key_value_heads": shape.kv_heads, "head_dim": size, "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps, "rope_theta": shape.rope_theta, "rope_scaling": None,
        "max_position_embeddings": shape.max_positions, "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2, "sliding_window": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_of_another_project_is_read_trained_and_exported(
    target: Target, tmp_path: Path
) -> None:
    published(tmp_path / "theirs", target)
    drafter, cfg = formats.load(tmp_path / "theirs", target)
    assert (cfg.taps, cfg.mask_token_id, cfg.block_size, cfg.layers) == ((0, 2), 7, 4, 2)
    before = outside.logits(drafter, target)
    drafter.train().requires_grad_(True)
    losses = tiny.train_drafter(drafter, target, tiny.packed_trace(target), steps=5)
    assert losses[-1] < losses[0]
    drafter.eval()
    formats.find("zlab", "dflash").write(drafter, target, cfg, tmp_path / "ours")
    again = formats.load(tmp_path / "ours", target)[0]
    after = outside.logits(again, target)
    assert all(map(torch.equal, after, outside.logits(drafter, target)))
    assert not torch.equal(before[0], after[0])
    assert outside.weights(tmp_path / "ours").keys() == outside.weights(tmp_path / "theirs").keys()
