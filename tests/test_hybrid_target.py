"""The small hybrid that a script trains: its size, its batches, and a run with it."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outrider.data.make import hybrid_target, tiny_target
from outrider.launch.cli import main
from outrider.models.target.layer_kinds import layer_kinds
from outrider.models.target.target import Target


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_target.FOLDER, local_files_only=True)


def test_it_has_three_recurrent_layers_per_attention_layer(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    target = Target(hybrid_target.make_model(tokenizer))
    assert layer_kinds(target) == {"recurrent": 6, "attention": 2}
    assert 1e6 < target.parameter_count() < 5e6


def test_a_row_is_one_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    """A pool has every conversation once; padding has no label and follows the text."""
    batches, rows = hybrid_target.conversation_batches(tokenizer, 5), list[list[int]]()
    while len(rows) < hybrid_target.POOL:
        ids, labels = next(batches)
        assert ids.shape == labels.shape
        assert ids.numel() <= hybrid_target.BATCH_TOKENS or len(ids) == 1
        for row, label in zip(ids, labels, strict=True):
            count = int((label >= 0).sum())
            assert torch.equal(row[:count], label[:count])
            assert set(row[count:].tolist()) <= {tokenizer.pad_token_id}
            rows.append(row[:count].tolist())
    texts = itertools.islice(tiny_target.texts(5), hybrid_target.POOL)
    assert sorted(rows) == sorted(tokenizer(text)["input_ids"] for text in texts)


@pytest.mark.slow
def test_a_drafter_is_trained_and_measured_on_it(tmp_path: Path) -> None:
    """As the documents say, with fewer steps."""
    build = ["-m", "outrider.data.make.hybrid_target", "--steps", "2", "--out"]
    out = subprocess.run(
        [sys.executable, *build, str(tmp_path / "hybrid")], check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    assert "held-out loss" in out.stdout
    words = [
        f"target={tmp_path / 'hybrid'}", "target.dtype=float32", "data=tiny", "drafter=eagle3",
        "train.max_steps=3",
        "train.batch_tokens=256", "data.max_samples=40", "eval.limit=2", "eval.max_new_tokens=8",
        "eval.prompts=tiny", f"run.dir={tmp_path / 'run'}", "train.own_prompts=0",
    ]  # fmt: skip
    assert main(["train", *words]) == 0
    report = json.loads((tmp_path / "run" / "eval" / "eval.json").read_text())
    assert report["exact"]
