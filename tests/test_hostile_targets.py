"""Targets whose files disagree, lack weights, name pickles or describe impossible models."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from outrider.conf.errors import ConfigError, exit_on_error
from outrider.conf.schema import TargetConfig
from outrider.models.drafting.causal_lm import load_lm
from outrider.models.target import load
from tests.families import FAMILIES, small_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    small_model("llama").save_pretrained(folder)
    load.load_tokenizer(TargetConfig(name="tiny")).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "target"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def load_folder(folder: Path) -> load.LoadedTarget:
    return load.load_target(TargetConfig(name="hf", path=str(folder)))


def refused(folder: Path) -> str:
    """The message of the refused target; a draft model is refused as well."""
    with pytest.raises(ConfigError) as caught:
        load_folder(folder)
    assert len(str(caught.value).splitlines()) == 3
    return str(caught.value)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize(
    "name", ["weights.bin", "../other/weights.bin", "../other/model.safetensors", "", 3, None, "/"]
)
def test_index_names_safetensors_files_beside_it_alone(folder: Path, name: object) -> None:
    keys = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "weights.bin")
    shutil.copytree(folder, folder.parent / "other")
    (folder.parent / "other" / "weights.bin").rename(folder.parent / "other" / WEIGHTS)
    for place in (folder, folder.parent / "other"):
        (place / "weights.bin").write_bytes(pickle.dumps(Bomb(folder.parent / "opened")))
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(keys, name)}))
    assert "not a safetensors file beside it" in refused(folder)
    with pytest.raises(ConfigError, match="beside it"):
        load_lm(str(folder))
    assert not (folder.parent / "opened").exists()


@pytest.mark.parametrize("name", ["adapter_model.bin", "../model.safetensors", "x.bin.index.json"])
def test_config_names_safetensors_files_alone(folder: Path, name: str) -> None:
    edit(folder / "config.json", transformers_weights=name)
    assert "not a safetensors file" in refused(folder)


def test_adapters_are_refused(folder: Path) -> None:
    """With a whole model beside them, too, and without the package that would load them."""
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(folder / "opened")))
    assert "holds an adapter" in refused(folder)
    with pytest.raises(ConfigError, match="holds an adapter"):
        load_lm(str(folder))
    assert not (folder / "opened").exists()


def test_pickle_named_safetensors_is_not_opened(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb(folder / "opened")))
    refused(folder)
    assert not (folder / "opened").exists()


def test_files_that_are_not_regular_are_refused(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    assert "not a regular file" in refused(folder)


def test_links_of_the_hubs_cache_are_followed(folder: Path) -> None:
    """A snapshot holds links to blobs outside of it, by their hashes."""
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "main"
    folder.rename(blobs)
    snapshot.mkdir(parents=True)
    keys = load_file(blobs / WEIGHTS)
    (blobs / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, "one.safetensors")})
    )
    for file in blobs.iterdir():
        name = "one.safetensors" if file.name == WEIGHTS else file.name
        (snapshot / name).symlink_to(file.rename(blobs / f"{hash(name):x}"))
    assert load_folder(snapshot).target.num_layers == 4


# ---- complete weights ----


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_from_its_own_files(family: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / WEIGHTS).unlink()
    small_model(family).save_pretrained(tmp_path)
    assert load_folder(tmp_path).target.num_layers == 4


def change_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    "key", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"]
)
def test_missing_tensors_are_named(folder: Path, key: str) -> None:
    change_weights(folder, lambda weights: weights.pop(key))
    assert f"lacks {key}" in refused(folder)
    with pytest.raises(ConfigError, match="lack"):
        load_lm(str(folder))


@pytest.mark.parametrize("key", ["model.layers.4.mlp.up_proj.weight", "secret", "model.extra"])
def test_unknown_tensors_are_named(folder: Path, key: str) -> None:
    change_weights(folder, lambda weights: weights.update({key: torch.zeros(2)}))
    assert f"holds {key}" in refused(folder)


@pytest.mark.parametrize(
    "keys",
    [
        ["model.layers.0.self_attn.rotary_emb.inv_freq"],
        ["mtp.fc.weight", "mtp.norm.weight"],
        ["model.layers.4.eh_proj.weight", "model.layers.4.mlp.up_proj.weight"],
    ],
)
def test_known_surplus_is_accepted(folder: Path, keys: list[str]) -> None:
    """Buffers of older versions and MTP modules."""
    change_weights(folder, lambda weights: weights.update({k: torch.zeros(2) for k in keys}))
    load_folder(folder)


# ---- config.json ----


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**12}, {"num_hidden_layers": 0}, {"num_hidden_layers": "4"},
        {"num_attention_heads": 0}, {"num_key_value_heads": -1}, {"num_attention_heads": 2.5},
        {"hidden_size": "wide"}, {"hidden_size": 10**9}, {"head_dim": 0}, {"vocab_size": True},
        {"vocab_size": 10**12}, {"text_config": {"num_hidden_layers": 10**12}},
        {"intermediate_size": 10**7}, {"num_key_value_heads": 3}, {"rope_parameters": [1]},
        {"hidden_act": "explode"}, {"model_type": 5}, {"dtype": "int99"},
        {"model_type": "gpt_neo", "attention_types": [[["global"], 4]], "num_layers": 4,
         "num_heads": 4, "max_position_embeddings": 2**20},
        {"eos_token_id": "two"}, {"eos_token_id": [[1]]}, {"max_position_embeddings": -5},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_configs_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "config.json", **changes)
    refused(folder)


def test_sizes_are_compared_with_the_files_before_allocation(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=2**22, hidden_size=2**14, head_dim=2**12)
    assert "the weight files hold" in refused(folder)


@pytest.mark.parametrize("ids", ["two", [1, "x"], [[1]], 1.5, {"a": 1}, 10**12])
def test_end_tokens_of_other_types_are_refused(folder: Path, ids: object) -> None:
    edit(folder / "generation_config.json", eos_token_id=ids)
    refused(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "32"}, "hidden_size: '32', which must be an integer"),
        ({"model_type": ["llama"]}, "model_type: ['llama']"),
        ({"eos_token_id": "two"}, "eos_token_id': TypeError"),  # the two lines of transformers
    ],
)
def test_a_refused_config_is_named_with_its_reason(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    edit(folder / "config.json", **changes)
    assert reason in refused(folder)


@pytest.mark.parametrize("template", [5, {"a": "b"}, ["x"], [[1]], True, {"default": 5}], ids=str)
def test_templates_that_are_no_text_are_refused(folder: Path, template: object) -> None:
    edit(folder / "tokenizer_config.json", chat_template=template)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    refused(folder)


def test_tokenizers_that_fail_on_a_word_are_refused(folder: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "[UNK]"}
    edit(folder / "tokenizer.json", model=model, added_tokens=[])
    refused(folder)


class PanicException(BaseException):
    """Like that of libraries in Rust."""


def test_a_panic_of_a_library_is_a_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    with pytest.raises(SystemExit) as stopped, exit_on_error("outrider"):
        panic()
    assert stopped.value.code == 2
    assert "index out of bounds" in capsys.readouterr().err
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", panic)
    assert "index out of bounds" in refused(folder)


def test_a_normalizer_without_a_pattern_is_accepted_or_refused(folder: Path) -> None:
    """Version 0.23 of tokenizers panics on any text."""
    normalizer = {"type": "Replace", "pattern": {"String": ""}, "content": "a"}
    edit(folder / "tokenizer.json", normalizer=normalizer)
    with suppress(ConfigError):
        load_folder(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '"', "{}", '{"a": NaN', "\0\0", "7"])
def test_nonsense_in_json_is_a_message(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with suppress(ConfigError):
        load_folder(folder)
