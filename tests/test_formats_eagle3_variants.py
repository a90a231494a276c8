"""EAGLE-3 folders that leave parts out, and the variants: norms before the fusion, windows."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models import formats
from outrider.models.drafters.eagle3 import Eagle3
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target
from tests import outside, tiny
from tests.test_formats_eagle3 import DEFAULT_TAPS, IDS, N


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(num_hidden_layers=N)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return outside.randomise(tiny.drafter("eagle3", target))


# ---- folders that leave parts out ----------------------------------------------------------------


def test_offsets_alone_name_the_tokens(drafter: Drafter, target: Target, tmp_path: Path) -> None:
    """ModelOpt writes no t2d, and orders d2t by frequency: the head's rows follow d2t."""
    folder = outside.publish_as(drafter, target, tmp_path / "f")
    outside.rewrite_weights(folder, lambda t: t.pop("t2d"))
    outside.assert_equal_weights(drafter, formats.load(folder, target)[0])

    def by_frequency(tensors: dict[str, Tensor]) -> None:
        order, rows = torch.randperm(40), torch.arange(40)
        tensors["d2t"] = (tensors["d2t"] + rows)[order] - rows
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].clone()

    outside.rewrite_weights(folder, by_frequency)
    outside.assert_equal_weights(drafter, formats.load(folder, target)[0])


@pytest.mark.parametrize("word", ["sglang", "vllm"])
def test_missing_head_is_the_target_s(target: Target, tmp_path: Path, word: str) -> None:
    """Also a copy of the target's flag that ties it to the embedding."""
    whole = outside.randomise(tiny.drafter("eagle3", target, outside.vocab(True)))
    whole.get_parameter("lm_head.weight").data.copy_(target.head_weight)
    folder = outside.publish_as(whole, target, tmp_path / "f", word)
    outside.rewrite_weights(folder, lambda t: [t.pop(k, None) for k in ("d2t", "t2d")])
    outside.rewrite_weights(folder, lambda t: t.pop("lm_head.weight"))
    outside.assert_equal_weights(whole, formats.load(folder, target)[0])
    outside.edit_config(folder, draft_vocab_size=40)
    with pytest.raises(RunError, match=r"missing, its head of 40 tokens; the target's has 61"):
        formats.load(folder, target)
    outside.edit_config(folder, draft_vocab_size=None, tie_word_embeddings=True)
    with pytest.raises(RunError, match="ties head and embedding, and its head is another"):
        formats.load(folder, target)


def test_tied_head_of_another_size_is_the_target_s_flag(
    drafter: Drafter, target: Target, tmp_path: Path
) -> None:
    folder = outside.publish_as(drafter, target, tmp_path / "f", tie_word_embeddings=True)
    outside.assert_equal_weights(drafter, formats.load(folder, target)[0])
    whole = outside.randomise(tiny.drafter("eagle3", target, outside.vocab(True)))
    folder = outside.publish_as(whole, target, tmp_path / "whole", tie_word_embeddings=True)
    with pytest.raises(RunError, match="ties head and embedding, and its head is another"):
        formats.load(folder, target)


def test_whole_vocabulary_may_be_named_in_every_format(target: Target, tmp_path: Path) -> None:
    whole = outside.randomise(tiny.drafter("eagle3", target, outside.vocab(True)))
    maps = {"d2t": torch.zeros(61, dtype=torch.long), "t2d": torch.ones(61, dtype=torch.bool)}
    for word in ("vllm", "speculators"):
        folder = outside.publish_as(whole, target, tmp_path / word, word)
        assert "d2t" not in outside.weights(folder)
        outside.rewrite_weights(folder, lambda t: t.update(maps))
        outside.assert_equal_weights(whole, formats.load(folder, target)[0])


@pytest.mark.parametrize("heads", [4, 2])
def test_missing_head_size_follows_from_the_weights(tmp_path: Path, heads: int) -> None:
    """32 / 4 is not the size of the heads here."""
    of = tiny.target(num_hidden_layers=N, head_dim=12, num_attention_heads=heads)
    drafter = outside.randomise(tiny.drafter("eagle3", of))
    folder = outside.publish_as(drafter, of, tmp_path / "f", head_dim=None)
    read, _ = formats.load(folder, of)
    assert isinstance(read, Eagle3)
    assert read.shape.head_dim == 12
    outside.assert_equal_weights(drafter, read)


def test_empty_list_of_layers_names_none(drafter: Drafter, target: Target, tmp_path: Path) -> None:
    """ModelOpt's template writes one."""
    folder = outside.publish_as(drafter, target, tmp_path / "f", eagle_config={IDS: []})
    assert formats.load(folder, target)[0].taps == DEFAULT_TAPS


def test_window_is_read_and_excludes_formats_without_it(
    drafter: Drafter, target: Target, tmp_path: Path
) -> None:
    """The target has 128 positions, so that a window of 128 is full attention."""
    folder = outside.publish_as(drafter, target, tmp_path / "f")
    for size, kinds, window in (
        (128, ["sliding_attention"], None),
        (127, ["sliding_attention"], 127),
        (127, None, 127),
        (127, ["full_attention"], None),
    ):
        outside.edit_config(folder, sliding_window=size, layer_types=kinds)
        read, cfg = formats.load(folder, target)
        assert cfg.window == window
        refused = formats.export_refusals(read, "eagle3", target)
        short = {name for name, why in refused.items() if "window" in why}
        assert short == ({"sglang", "vllm"} if window == 127 else set())


def test_window_is_stored_for_speculators(target: Target, tmp_path: Path) -> None:
    drafter = tiny.drafter("eagle3", target, window=9, layers=2)
    folder = outside.publish_as(drafter, target, tmp_path / "f", "speculators")
    layers = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert (layers["sliding_window"], layers["use_sliding_window"]) == (9, True)
    assert layers["layer_types"] == ["sliding_attention"] * 2
    assert formats.load(folder, target)[1].window == 9


# ---- norms before the fusion ---------------------------------------------------------------------


@pytest.mark.parametrize("word", ["sglang", "vllm", "speculators"])
@pytest.mark.parametrize("kind", ["each", "joint"])
def test_norm_before_the_fusion_is_exported_without_tap_scales(
    target: Target, tmp_path: Path, word: str, kind: str
) -> None:
    """Initialised drafters: a scale that the norm makes useless must not enter fc."""
    drafter = tiny.drafter("eagle3", target, fc_norm=kind, feedback="normed")
    drafter.initialise(target, [tiny.packed_trace(target)])
    drafter.get_buffer("tap_scale").copy_(torch.tensor([0.5, 4.0, 2.0]))  # of earlier versions
    formats.find(word, "eagle3").write(drafter, target, None, tmp_path / "f")
    config = json.loads((tmp_path / "f" / "config.json").read_text())
    assert bool(config.get("norm_before_fc")) == (kind == "joint")
    assert bool(config.get("fc_norm")) == (kind == "each")
    stored = outside.weights(tmp_path / "f")
    assert torch.equal(stored["fc.weight"], drafter.get_parameter("fc.weight"))
    assert ("input_norm.weight" in stored) == (kind == "joint")
    read, cfg = formats.load(tmp_path / "f", target)
    assert (cfg.fc_norm, cfg.feedback) == (kind, "normed")
    pairs = zip(outside.logits(drafter, target), outside.logits(read, target), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_norms_of_taps_and_of_rows_exclude_each_other(target: Target, tmp_path: Path) -> None:
    drafter = tiny.drafter("eagle3", target, fc_norm="joint")
    folder = outside.publish_as(drafter, target, tmp_path / "f", "vllm")
    outside.edit_config(folder, fc_norm=True)
    norms = {f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)}
    outside.rewrite_weights(folder, lambda t: t.update(norms))
    with pytest.raises(RunError, match="norms each tap and all taps together"):
        formats.load(folder, target)


def test_older_values_of_fc_norm_are_read(target: Target, tmp_path: Path) -> None:
    """Booleans, in native and published folders of earlier versions."""
    for value, kind in ((True, "each"), (False, "none")):
        assert tiny.config("eagle3", fc_norm=value).fc_norm == kind
        drafter = outside.randomise(tiny.drafter("eagle3", target, fc_norm=kind))
        for word, name in (("native", "config.json"), ("vllm", "outrider.json")):
            folder = tmp_path / f"{word}-{value}"
            formats.find(word, "eagle3").write(drafter, target, None, folder)
            content = json.loads((folder / name).read_text())
            content["drafter"]["fc_norm"] = value
            (folder / name).write_text(json.dumps(content))
            read, cfg = formats.load(folder, target)
            assert cfg.fc_norm == kind
            outside.assert_equal_weights(drafter, read)
        content["drafter"]["fc_norm"] = not value
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(RunError, match=f"has fc_norm: {not value}, and the files {kind}"):
            formats.load(folder, target)
