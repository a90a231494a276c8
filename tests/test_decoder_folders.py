"""The decoder on folders: the folders of a run, and the script that the documents show."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import write_json
from outrider.conf.schema import to_yaml
from outrider.eval.decoder import Chat, Decoder, Piece, Result
from outrider.eval.open_drafter import published_folder
from outrider.eval.rank_tables import FILE, FORMAT, TABLES
from outrider.eval.requests import PLAIN as ALONE
from outrider.models import drafters, formats
from outrider.models.decode.policy import Chain
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.target.load import load_target
from outrider.train.settings import load_run, parse
from tests.families import small_model
from tests.test_tokenise import PLAIN, byte_tokenizer, dialogue

ROOT = Path(__file__).parent.parent


def untrained(folder: Path) -> Path:
    """A run of the embedded target whose drafter has learned nothing."""
    run = folder / "run"
    config = parse(compose([f"run.dir={run}"], "train"))
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    loaded = load_target(config.target).target
    torch.manual_seed(0)
    drafter = drafters.build(config.drafter, loaded, DraftVocab.identity(loaded.vocab_size))
    native.save(drafter, run / "drafter", loaded, config.drafter, {})
    return run


@pytest.fixture(name="run", scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(name="from_run", scope="module")
def opened(run: Path) -> Decoder:
    return Decoder.from_run(run)


def test_run_and_published_folders_decode_equally(run: Path, from_run: Decoder) -> None:
    question = "When should I visit Amberton?"
    by_parts = Decoder.from_pretrained("tiny", run / "drafter", dtype="float32")
    alone = Decoder.from_pretrained("tiny", dtype="float32")
    whole = from_run.generate(dialogue(question), 16)
    assert whole.stop_reason == "end token"
    assert "<" not in whole.text
    assert len(whole.text) > 8
    for policy in ("plain", "chain", "dynamic_tree"):
        assert from_run.generate(dialogue(question), 16, policy=policy).text == whole.text
        assert by_parts.generate(dialogue(question), 16, policy=policy).text == whole.text
    assert alone.generate(dialogue(question), 16).text == whole.text
    assert (from_run.changed, alone.drafter, alone.policy) == (None, None, ALONE)


@pytest.mark.parametrize("word", ["vllm", "speculators"])
def test_a_drafter_may_come_in_any_format(
    word: str, run: Path, from_run: Decoder, tmp_path: Path
) -> None:
    config, folder = load_run(run, []).drafter, tmp_path / word
    folder.mkdir()
    assert from_run.drafter is not None
    formats.find(word, "eagle3").write(from_run.drafter, from_run.target, config, folder)
    ours = Decoder.from_pretrained("tiny", folder, dtype="float32")
    how: dict[str, Any] = {"policy": "chain", "temperature": 1.0, "seed": 4}
    mine, theirs = (one.generate("Once upon", 16, **how) for one in (from_run, ours))
    assert (mine.output_ids, mine.accepted) == (theirs.output_ids, theirs.accepted)


def test_folders_without_a_drafter_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is a run, not a drafter(?s:.*)/drafter, or run.dir"):
        Decoder.from_pretrained("tiny", run)
    with pytest.raises(ConfigError, match="There is no such folder"):
        Decoder.from_pretrained("tiny", tmp_path / "nowhere")
    missing = r"no folder, and cannot be downloaded from the hub(?s:.*)without weights: .*ngram"
    with pytest.raises(RunError, match=missing):
        published_folder("nobody/nothing")


def test_weights_are_loaded_from_the_folder(run: Path, from_run: Decoder) -> None:
    torch.manual_seed(0)
    built = drafters.build(load_run(run, []).drafter, from_run.target, whole_vocab(from_run))
    assert isinstance(from_run.drafter, Drafter)
    torch.testing.assert_close(from_run.drafter.state_dict(), built.state_dict(), rtol=0, atol=0)


def whole_vocab(decoder: Decoder) -> DraftVocab:
    return DraftVocab.identity(decoder.target.vocab_size)


def test_overrides_of_a_run_reach_its_target(run: Path) -> None:
    config = load_run(run, [f"run.dir={run}", "target.dtype=bfloat16"])
    changed = Decoder.from_config(config, Chain(2))
    assert changed.target.dtype == torch.bfloat16
    assert changed.policy == Chain(2)


def test_a_run_that_has_not_finished_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    with pytest.raises(RunError, match="its training has not finished"):
        Decoder.from_run(tmp_path)
    with pytest.raises(RunError, match=r"no config\.yaml"):
        Decoder.from_run(tmp_path / "nowhere")


def test_a_drafter_of_another_target_is_refused(run: Path, tmp_path: Path) -> None:
    coder = byte_tokenizer(PLAIN)
    small_model("llama", vocab_size=len(coder)).save_pretrained(tmp_path)
    coder.save_pretrained(tmp_path)
    with pytest.raises(RunError):
        Decoder.from_pretrained(tmp_path, run / "drafter")


# ---- the scripts of the documents ----------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "docs/decoding.md"])
def test_the_documented_script_runs(
    page: str, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From an empty folder, with the run where the script expects it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    place = tmp_path / "runs" / "eagle3-tiny"
    shutil.copytree(run, place)
    chances = {name: [[0.6, 0.2], [0.5, 0.2]] for name in TABLES}  # as training leaves them
    write_json(place / FILE, {"format": FORMAT, **chances})
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    exec(compile(script, page, "exec"), found)
    result, piece = found["result"], found["piece"]
    assert isinstance(result, Result)
    assert isinstance(piece, Piece)
    assert 0 < len(result.output_ids) <= 64
    assert piece.result.output_ids
    if page == "docs/decoding.md":
        answers, chat = found["answers"], found["chat"]
        assert isinstance(answers, list)
        assert isinstance(chat, Chat)
        assert len(answers) == 3
        assert [message["role"] for message in chat.messages] == ["user", "assistant"]
