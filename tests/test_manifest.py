"""The manifest of a run folder: contents, and fingerprints that change only with their object."""

import copy
import json
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import outrider
from outrider.models.formats.fingerprints import fingerprints
from outrider.models.target.load import LoadedTarget
from outrider.train.manifest import git_state, machine, write_manifest
from outrider.train.settings import parse, read_saved_config
from tests.runs import config

ROOT = Path(__file__).parent.parent


def test_manifest_holds_everything_to_repeat_a_run(loaded: LoadedTarget, tmp_path: Path) -> None:
    settings = config(tmp_path)
    write_manifest(tmp_path, settings, {"fingerprints": fingerprints(loaded), "ranks": 1})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest.keys() == {
        "started", "argv", "config", "versions", "git", "machine", "fingerprints", "ranks",
    }  # fmt: skip
    assert parse(read_saved_config(tmp_path)) == settings
    assert manifest["versions"]["outrider"] == outrider.__version__
    assert {"python", "torch", "transformers", "accelerate"} <= manifest["versions"].keys()
    started = datetime.fromisoformat(manifest["started"])
    assert abs((datetime.now(timezone.utc) - started).total_seconds()) < 60
    assert manifest["fingerprints"].keys() == {"target", "tokenizer", "template"}


def test_the_machine_is_described() -> None:
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 2**30
    assert facts["processor"]


def test_the_commit_is_the_checkout_of_the_code() -> None:
    if not (ROOT / ".git").exists():
        assert git_state() == {}
        return
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    state = git_state()
    assert state["commit"] == head
    assert isinstance(state["dirty"], bool)


def test_a_fingerprint_changes_only_with_its_object(loaded: LoadedTarget) -> None:
    before = fingerprints(loaded)
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in before.values())
    loaded.tokenizer(["a", "a longer one"], padding="max_length", truncation=True, max_length=8)
    assert fingerprints(loaded) == before, "calls of the tokenizer do not change it"
    other = copy.deepcopy(loaded.tokenizer)
    other.chat_template = "{{ messages }}"
    assert _differ(loaded, other) == {"template"}
    other = copy.deepcopy(loaded.tokenizer)
    other.add_tokens(["<new>"])
    assert _differ(loaded, other) == {"tokenizer"}


def _differ(loaded: LoadedTarget, tokenizer: object) -> set[str]:
    before, after = fingerprints(loaded), fingerprints(loaded._replace(tokenizer=tokenizer))
    return {name for name in before if before[name] != after[name]}
