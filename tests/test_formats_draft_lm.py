"""Draft models as Hugging Face folders, exchanged with transformers in both directions."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from outrider.conf.errors import RunError
from outrider.eval.publish.serve_commands import serve_commands
from outrider.models import drafters, formats
from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Stops
from outrider.models.drafters.draft_lm import Config, DraftLm
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.target.load import TINY, LoadedTarget, stop_ids
from outrider.models.target.target import Target
from tests import outside, tiny
from tests.families import small_model
from tests.test_bench_assisted import shallow


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
def test_transformers_loads_the_export(target: Target, tmp_path: Path) -> None:
    drafter = outside.randomise(tiny.drafter("draft_lm", target, outside.vocab(whole=True)))
    formats.find("vllm", "draft_lm").write(drafter, target, None, tmp_path / "f")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "f", use_safetensors=True)
    ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(4))
    logits = model.eval()(input_ids=ids).logits[0]
    row = torch.arange(9)[None]
    trace = target.trace(ids, torch.ones_like(ids).bool(), torch.zeros_like(ids), row)
    guess = next(iter(drafter.unroll(trace)))
    ours = drafter.head(tiny.spread(guess, trace))[0]
    torch.testing.assert_close(ours[:8], logits[1:], atol=1e-4, rtol=1e-4)


def test_published_model_round_trips(target: Target, theirs: Path, tmp_path: Path) -> None:
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
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "names code to run"),
        ({"model_type": "evil"}, "could not be loaded"),
        ({"vocab_size": 60}, r"60|could not be loaded"),
        ({"num_hidden_layers": 1}, "could not be loaded: .*layer_type"),
        (layers(3), r"lacks model\.layers\.2"),
        (layers(1), r"holds model\.layers\.1.* does not know"),
    ],
)
def test_contradicting_config_is_refused(
    target: Target, theirs: Path, changes: dict[str, Any], message: str
) -> None:
    """Missing layers are not initialised, unknown ones not skipped, code not run."""
    file = theirs / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(RunError, match=message):
        formats.load(theirs, target)


def test_truncated_shard_is_refused(target: Target, theirs: Path) -> None:
    file = sorted(theirs.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RunError, match=f"{file.name} cannot be read"):
        formats.load(theirs, target)


def test_other_vocabulary_is_refused(theirs: Path) -> None:
    with pytest.raises(RunError, match="has 61 tokens and the target 64"):
        formats.load(theirs, tiny.target(vocab_size=64))


# ---- assisted generation in transformers ---------------------------------------------------------


@pytest.fixture(scope="module")
def exported(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lower layers of the embedded target, published as its draft model."""
    folder = tmp_path_factory.mktemp("exported")
    cfg = Config(path=str(shallow(folder / "shallow")))
    whole = DraftVocab.identity(loaded.target.vocab_size)
    drafter = drafters.build(cfg, loaded.target, whole)
    formats.find("transformers", "draft_lm").write(drafter, loaded.target, None, folder / "out")
    return folder / "out"


@pytest.mark.slow
def test_assisted_generation_equals_plain_decoding(loaded: LoadedTarget, exported: Path) -> None:
    theirs, assistant = (
        hf.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for place in (TINY, exported)
    )
    calls = list[object]()
    theirs.model.register_forward_pre_hook(lambda *_: calls.append(None))
    stops = Stops(stop_ids(loaded.tokenizer, loaded.target))
    plain = Engine(loaded.target, None, None, stops=stops)
    tokens = 0
    for text in ("Once upon a time", "When should I visit", "It was a windy day, and"):
        ids = loaded.tokenizer(text, return_tensors="pt").input_ids
        out = theirs.generate(ids, assistant_model=assistant, do_sample=False, max_new_tokens=48)
        ours = plain.generate(ids[0].tolist(), 48).ids
        assert out[0, ids.shape[1] :].tolist() == ours
        tokens += len(ours)
    assert len(calls) < 0.8 * tokens, "some of its guesses were accepted"


@pytest.mark.slow
def test_transformers_command_of_the_card_runs(loaded: LoadedTarget, exported: Path) -> None:
    drafter, cfg = formats.load(exported, loaded.target)
    found = serve_commands("transformers", drafter, cfg, str(exported), str(TINY), "tiny")
    title, command = found.commands[0]
    assert title == "transformers"
    place = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, check=False, env=place
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert len(done.stdout) > 2 * len("Once upon a time")
