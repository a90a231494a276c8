"""A draft model's plain folder: transformers reads it, and we read what transformers wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from outrider.models import formats
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.target import Target
from outrider.train.errors import RunError
from tests import outside, tiny
from tests.families import small_model


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def layers(count: int) -> dict[str, Any]:
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A small model with a head of its own, in bfloat16 and several shards."""
    model = small_model("qwen2", num_hidden_layers=2).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return tmp_path / "theirs"


@torch.no_grad()
def test_transformers_reads_what_was_written(target: Target, tmp_path: Path) -> None:
    drafter = outside.scrambled(tiny.drafter("draft_lm", target, outside.vocab(whole=True)))
    formats.find("vllm", "draft_lm").write(drafter, target, None, tmp_path / "f")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "f", use_safetensors=True)
    ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(4))
    logits = model.eval()(input_ids=ids).logits[0]
    row = torch.arange(9)[None]
    trace = target.trace(ids, torch.ones_like(ids).bool(), torch.zeros_like(ids), row)
    guess = next(iter(drafter.unroll(trace)))
    ours = drafter.head(guess.hidden)[0]
    torch.testing.assert_close(ours[:8], logits[1:], atol=1e-4, rtol=1e-4)


def test_a_published_model_is_read_and_written_with_equal_weights(
    target: Target, theirs: Path, tmp_path: Path
) -> None:
    form = formats.recognise(theirs)
    assert form is formats.find("transformers", "draft_lm")
    read, cfg = form.read(theirs, target)
    assert isinstance(read, DraftLm)
    assert {p.dtype for p in read.parameters()} == {torch.bfloat16}
    form.write(read, target, cfg, tmp_path / "ours")
    before, after = outside.weights(theirs), outside.weights(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "names code to run"),
        ({"model_type": "evil"}, "could not be loaded"),
        ({"vocab_size": 60}, r"60|could not be loaded"),
        ({"num_hidden_layers": 1}, "could not be loaded: .*layer_type"),
        (layers(3), r"lacks model\.layers\.2"),
        (layers(1), r"holds model\.layers\.1.* does not know"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    target: Target, theirs: Path, changes: dict[str, Any], says: str
) -> None:
    """Missing layers are not drawn at random, unknown ones not left out, code not run."""
    file = theirs / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(RunError, match=says):
        formats.load(theirs, target)


def test_a_truncated_shard_is_refused(target: Target, theirs: Path) -> None:
    file = sorted(theirs.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RunError, match=f"{file.name} cannot be read"):
        formats.load(theirs, target)


def test_a_model_with_another_vocabulary_is_refused(theirs: Path) -> None:
    with pytest.raises(RunError, match="knows 61 tokens and the target 64"):
        formats.load(theirs, tiny.target(vocab_size=64))
