"""The commands of docs/five_commands.md, with the wheel, in an empty folder, on a new model."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.models.target.load import TINY
from tests.wheel import run_outrider, unpack_wheel

PAGE = Path(__file__).parent.parent / "docs" / "five_commands.md"


def write_llama(folder: Path) -> None:
    """Write a random Llama with the tokenizer of the embedded target."""
    torch.manual_seed(0)
    cfg = LlamaConfig(
        vocab_size=1536, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(cfg).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_commands_train_and_publish_a_new_model(tmp_path: Path) -> None:
    site, empty = unpack_wheel(tmp_path), tmp_path / "empty"
    write_llama(empty / "my-llama")
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [words[:2] for words in commands] == [
        ["outrider", verb] for verb in ("doctor", "train", "eval", "report", "publish")
    ]
    for words in commands:
        run_outrider(site, empty, *words[1:])
    run = empty / "runs" / "my-llama"
    assert json.loads((run / "eval" / "eval.json").read_text())["exact"]
    assert (run / "report.html").is_file()
    assert json.loads((run / "published" / "vllm" / "config.json").read_text())
    assert (run / "published" / "vllm" / "README.md").is_file()
