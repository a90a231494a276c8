"""Outrider's own checkpoint folder: its content, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.conf.errors import RunError
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats import native
from outrider.models.target.target import Target
from tests import tiny

ABOUT = {"step": 30, "accept_length": 1.5}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return tiny.drafter("eagle3", target).eval()


@pytest.fixture
def folder(drafter: Drafter, target: Target, tmp_path: Path) -> Path:
    native.save(drafter, tmp_path / "drafter", target, tiny.config("eagle3"), ABOUT)
    return tmp_path / "drafter"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite config.json by hand, as a user might."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# ---- content -------------------------------------------------------------------------------------


@torch.no_grad()
def test_loaded_drafter_has_equal_logits(folder: Path, drafter: Drafter, target: Target) -> None:
    """In training and in decoding, whatever the seed."""
    torch.manual_seed(99)
    loaded, cfg = native.load(folder, target)
    assert cfg == tiny.config("eagle3", taps=drafter.taps)
    assert torch.equal(loaded.vocab.target_ids, drafter.vocab.target_ids)
    trace = tiny.packed_trace(target)
    for ours, theirs in zip(drafter.unroll(trace), loaded.unroll(trace), strict=True):
        assert torch.equal(drafter.head(ours.hidden), loaded.head(theirs.hidden))
    for one in (drafter, loaded):
        state = one.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
        logits, _ = one.step(state, 1, torch.tensor([3]), torch.tensor([0]))
        if one is drafter:
            expected = logits
    assert torch.equal(logits, expected)


def test_loaded_drafter_is_ready_to_decode(folder: Path, target: Target) -> None:
    """Eval mode, frozen, in the target's dtype or the requested one; the target's taps are set."""
    target.set_taps(())
    loaded, _ = native.load(folder, target)
    assert target.taps == loaded.taps
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    half, _ = native.load(folder, target, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.vocab.d2t.dtype == torch.int64


def test_folder_holds_config_and_weights(folder: Path, drafter: Drafter, target: Target) -> None:
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["format"] == native.FORMAT
    assert config["drafter"]["name"] == "eagle3"
    assert config["taps"] == list(drafter.taps)
    assert config["draft_vocab_size"] == tiny.DRAFTED
    assert config["about"] == ABOUT
    assert (config["target"]["name"], config["target"]["vocab"]) == ("llama", tiny.VOCAB)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == drafter.state_dict().keys()
    assert not any(value.shape == target.head_weight.shape for value in stored.values())


def test_second_save_replaces_the_first(folder: Path, target: Target) -> None:
    newer = tiny.drafter("eagle3", target, seed=8)
    native.save(newer, folder, target, tiny.config("eagle3"), {"step": 60})
    loaded, _ = native.load(folder, target)
    theirs = loaded.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in newer.state_dict().items())


# ---- what is refused -----------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 1  # one bit of one weight: it still parses
    file.write_bytes(bytes(data))


def cut_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text()[:50])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "damaged"),
    "a bit flipped": (flip, "damaged"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "cannot be read"),
    "no config": (lambda f: (f / "config.json").unlink(), "cannot be read"),
    "half a config": (cut_config, "cannot be read"),
    "no folder": (lambda f: f.rename(f.with_name("elsewhere")), "cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
    "other format": (lambda f: edit(f, lambda c: c.update(format="v9")), "not a drafter of this"),
    "no format": (lambda f: edit(f, lambda c: c.pop("format")), "not a drafter of this"),
    "unknown field": (lambda f: edit(f, lambda c: c["drafter"].update(turbo=1)), "turbo"),
    "impossible value": (lambda f: edit(f, lambda c: c["drafter"].update(depths=0)), "depths"),
    "unknown drafter": (lambda f: edit(f, lambda c: c["drafter"].update(name="eagle9")), "eagle9"),
    "code as a name": (lambda f: edit(f, lambda c: c["drafter"].update(name="../os")), "os"),
    "no name": (lambda f: edit(f, lambda c: c["drafter"].pop("name")), "name"),
    "fewer taps": (lambda f: edit(f, lambda c: c.update(taps=[0, 1])), "size mismatch"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folder_is_refused_with_reason_and_fix(
    name: str, folder: Path, target: Target
) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(RunError, match=message) as caught:
        native.load(folder, target)
    assert caught.value.fix


@pytest.mark.parametrize("field", ["target", "drafter", "taps", "sha256"])
def test_incomplete_config_is_refused(field: str, folder: Path, target: Target) -> None:
    edit(folder, lambda config: config.pop(field))
    with pytest.raises(RunError):
        native.load(folder, target)


def test_target_with_other_weights_is_refused(folder: Path) -> None:
    other = tiny.target(seed=1)
    with pytest.raises(RunError, match=r"trained for other weights[\s\S]*trained for: llama"):
        native.load(folder, other)


def test_other_vocabulary_is_refused_with_both_sizes(folder: Path) -> None:
    with pytest.raises(RunError, match="vocab 61, and llama has 64"):
        native.load(folder, tiny.target(vocab_size=64))


def test_other_layer_count_is_refused(folder: Path) -> None:
    with pytest.raises(RunError, match="layers 4, and llama has 6"):
        native.load(folder, tiny.target(num_hidden_layers=6))


def test_refused_folder_is_unchanged(folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(RunError):
        native.load(folder, tiny.target(seed=1))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
