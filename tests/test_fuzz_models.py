"""Fuzz tests of targets from outside: every file of a folder, mutated, loads or is refused."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import TargetConfig
from outrider.models.decode import tree_shapes
from outrider.models.decode.static_tree import StaticTree
from outrider.models.formats.fingerprints import fingerprints
from outrider.models.target import load
from outrider.models.target.chat_template import render
from tests import tiny
from tests.families import small_model
from tests.mutations import (
    fuzz,
    mutated_bytes,
    mutated_json,
    mutated_safetensors,
    replace_file,
)

pytestmark = pytest.mark.untyped
ERRORS = (ConfigError, RunError)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEMPLATE = "{% for turn in messages %}<s>{{ turn['content'] }}</s>{% endfor %}"


def small_tokenizer() -> Any:
    """Byte pairs over a few letters."""
    words = [*SPECIAL, *"abcdefgh", "\u0120", "ab", "abc"]
    vocab = {word: index for index, word in enumerate(words)}
    bpe = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c")], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", chat_template=TEMPLATE, model_max_length=64,
    )  # fmt: skip


SMALL = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


class Folder:
    """A folder of a target whose files can be replaced for one example."""

    def __init__(self, path: Path) -> None:
        self.path = path
        small_model("llama", **SMALL).save_pretrained(path)
        self.tokenizer = small_tokenizer()
        self.tokenizer.save_pretrained(path, save_jinja_files=False)
        self.settings = TargetConfig(name="hf", path=str(path))
        self.config = AutoConfig.from_pretrained(path)
        self.empty = load.meta_model(self.settings)
        self.load_target()
        self.load_tokenizer()

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    @contextmanager
    def replaced(self, name: str, data: bytes | None) -> Iterator[None]:
        """Replace a file, or remove it."""
        file = self.path / name
        before = file.read_bytes() if file.exists() else None
        replace_file(file, data)
        try:
            yield
        finally:
            replace_file(file, before)

    def load_target(self, other_config: bool = False) -> None:
        """Load the target, or refuse it; what the other files describe is known."""
        known: dict[str, Any] = {"load_tokenizer": lambda _: self.tokenizer}
        if not other_config:
            known["meta_model"] = lambda _: self.empty
        with suppress(*ERRORS), patch.multiple(load, **known):
            loaded = load.load_target(self.settings)
            self.target = loaded.target
            fingerprints(loaded)

    def load_tokenizer(self) -> None:
        """Load the tokenizer, or refuse it, and do what a run does first."""
        try:
            with patch.object(AutoConfig, "from_pretrained", lambda *_, **__: self.config):
                tokenizer = load.load_tokenizer(self.settings)
            load.stop_ids(tokenizer, self.target)
        except ERRORS as error:
            str(error).encode()
            return
        fingerprints(load.LoadedTarget(self.target, tokenizer, ""))
        tokenizer.decode(tokenizer("abc ab", add_special_tokens=False)["input_ids"])
        special = [*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids]
        assert all(type(token) is int for token in special)
        if getattr(tokenizer, "chat_template", None):
            assert isinstance(tokenizer.get_chat_template(), str)
            with suppress(Exception):  # a template may raise anything, which its callers expect
                render(tokenizer, [{"role": "user", "content": "ab"}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    logging.disable_progress_bar()
    return Folder(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@fuzz(data=st.data())
def test_settings_of_a_target(folder: Folder, name: str, data: st.DataObject) -> None:
    with folder.replaced(name, data.draw(mutated_json(folder.json(name)))):
        folder.load_target(other_config=name == "config.json")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
@fuzz(data=st.data())
def test_tokenizer_of_a_target(folder: Folder, name: str, data: st.DataObject) -> None:
    with folder.replaced(name, data.draw(mutated_json(folder.json(name)))):
        folder.load_tokenizer()


@fuzz(template=mutated_bytes(TEMPLATE.encode()))
def test_template_of_a_target(folder: Folder, template: bytes) -> None:
    with folder.replaced("chat_template.jinja", template):
        folder.load_tokenizer()


@fuzz(data=st.data())
def test_index_of_a_target(folder: Folder, data: st.DataObject) -> None:
    """The weights are in two shards."""
    one, two = "model-1.safetensors", "model-2.safetensors"
    weights = load_file(folder.path / WEIGHTS)
    shards = {key: (one, two)["mlp" in key] for key in sorted(weights)}
    index = {"metadata": {"total_size": 4}, "weight_map": shards}
    with ExitStack() as files:
        for shard in (one, two):
            part = {k: v for k, v in weights.items() if shards[k] == shard}
            files.enter_context(folder.replaced(shard, save(part, {"format": "pt"})))
        files.enter_context(folder.replaced(WEIGHTS, None))
        files.enter_context(folder.replaced(INDEX, data.draw(mutated_json(index))))
        folder.load_target()


@fuzz(data=st.data())
def test_weights_of_a_target(folder: Folder, data: st.DataObject) -> None:
    with folder.replaced(
        WEIGHTS, data.draw(mutated_safetensors((folder.path / WEIGHTS).read_bytes()))
    ):
        folder.load_target()


@fuzz(data=mutated_json([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]))
def test_tree_files(folder: Folder, data: bytes) -> None:
    with folder.replaced("tree.json", data):
        try:
            paths = tree_shapes.read(folder.path / "tree.json")
        except ERRORS:
            return
    tree_shapes.picture(paths)
    policy = StaticTree(paths)
    logits = tiny.random_logits(5)
    tiny.propose(policy, tiny.ScriptedDrafter(logits, 5), [(1, 2)])
