"""DSpark folders: flags that are missing or contradict the weights, and what no format holds."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.conf.errors import ConfigError, RunError
from outrider.models import formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target
from tests import outside, tiny

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def written(word: str, target: Target, folder: Path, **changes: Any) -> tuple[Drafter, Path]:
    drafter = outside.Case("dspark", word, changes, True).drafter(target)
    formats.find(word, "dspark").write(drafter, target, None, folder / word)
    return drafter, folder / word


def change_config(folder: Path, change: Change) -> None:
    """Change config.json, and remove outrider.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "outrider.json").unlink(missing_ok=True)


MISSING = [
    ("deepspec", "block_size", "2, 3, ..."),
    ("deepspec", "mask_token_id", "the id of a token"),
    ("deepspec", "target_layer_ids", "layers whose outputs are read"),
    ("deepspec", "markov_rank", "the rank of the head"),
    ("deepspec", "enable_confidence_head", "true or false"),
    ("vllm", "confidence_head_with_markov", "true or false"),
    ("speculators", "sample_from_anchor", "false or true"),
    ("speculators", "confidence_head_with_markov", "true or false"),
    ("speculators", "aux_hidden_state_layer_ids", "layers whose inputs are read"),
]


@pytest.mark.parametrize(("word", "flag", "values"), MISSING)
def test_a_folder_without_a_flag_is_refused(
    word: str, flag: str, values: str, target: Target, tmp_path: Path
) -> None:
    _, folder = written(word, target, tmp_path, confidence_head="markov")
    change_config(folder, lambda config: config.pop(flag))
    with pytest.raises(RunError, match=rf"lacks {flag} \({re.escape(values)}") as caught:
        formats.load(folder, target)
    assert "Write into config.json which it was trained with" in caught.value.fix


CONTRADICTIONS: list[tuple[str, Change, str]] = [
    ("deepspec", lambda c: c.update(markov_rank=7), "markov_rank of config.json is 7, and"),
    ("deepspec", lambda c: c.update(markov_head_type="gru"), "it may be vanilla or gated or rnn"),
    ("deepspec", lambda c: c.update(markov_head_type="rnn"), "joint_proj"),
    ("deepspec", lambda c: c.update(enable_confidence_head=False), "confidence_head"),
    ("deepspec", lambda c: c.update(confidence_head_with_markov=False), "confidence_head"),
    ("deepspec", lambda c: c.update(block_size=0), "block_size"),
    ("deepspec", lambda c: c.update(target_layer_ids=[0, 1, 1]), "each once"),
    ("deepspec", lambda c: c.update(target_layer_ids=[0, 1]), "names 2 taps"),
    ("deepspec", lambda c: c.update(mask_token_id=61), "tokens 0 to 60"),
    ("deepspec", lambda c: c.update(is_causal="no"), "is_causal is no; it may be"),
    ("vllm", lambda c: c.update(draft_vocab_size=12), "draft_vocab_size|d2t|tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "change", "message"), CONTRADICTIONS)
def test_flags_that_contradict_the_weights_are_refused(
    word: str, change: Change, message: str, target: Target, tmp_path: Path
) -> None:
    _, folder = written(word, target, tmp_path, confidence_head="markov", markov_rank=8)
    change_config(folder, change)
    with pytest.raises((RunError, ConfigError)) as caught:
        formats.load(folder, target)
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize(
    ("word", "changes", "message"),
    [
        ("vllm", {"markov_head": "gated"}, "vLLM has the vanilla head alone"),
        ("vllm", {"markov_head": "rnn"}, "vLLM has the vanilla head alone"),
        ("deepspec", {"shifted": False}, "DeepSpec's network is shifted"),
        ("deepspec", {"activation": "gelu"}, "no activation but silu"),
        ("speculators", {"window": 5}, "windows are counted from the anchor"),
    ],
)
def test_formats_refuse_what_they_cannot_hold(
    word: str, changes: dict[str, Any], message: str, target: Target
) -> None:
    drafter = outside.Case("dspark", word, changes, True).drafter(target)
    assert message in formats.export_refusals(drafter, "dspark", target)[word]


def test_a_reduced_vocabulary_needs_a_format_that_has_one(target: Target, tmp_path: Path) -> None:
    """Written for vLLM and speculators; a folder of DeepSpec with one is not what it says."""
    drafter = outside.Case("dspark", "vllm", {}, False).drafter(target)
    why = formats.export_refusals(drafter, "dspark", target)
    assert [word for word in ("deepspec", "vllm", "speculators") if why[word]] == ["deepspec"]
    assert "format=vllm" in why["deepspec"]
    formats.find("vllm", "dspark").write(drafter, target, None, tmp_path / "vllm")
    weights = load_file(tmp_path / "vllm" / "model.safetensors")
    del weights["d2t"]
    save_file(weights, tmp_path / "vllm" / "model.safetensors", {"format": "pt"})
    change_config(tmp_path / "vllm", lambda config: None)
    with pytest.raises(RunError, match=r"d2t|lm_head|draft_vocab_size"):
        formats.load(tmp_path / "vllm", target)


def test_the_confidence_head_of_a_folder_is_read(target: Target, tmp_path: Path) -> None:
    """With and without the token before; one output per node in both."""
    for kind in ("slot", "markov"):
        drafter, folder = written("deepspec", target, tmp_path / kind, confidence_head=kind)
        again, cfg = formats.load(folder, target)
        assert cfg.confidence_head == kind
        key = "confidence_head.proj.weight"
        assert torch.equal(again.state_dict()[key], drafter.state_dict()[key])
