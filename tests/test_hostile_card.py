"""A model card escapes what a received run folder holds, and names no home folder."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from outrider.conf.command_settings import PublishConfig
from outrider.conf.compose import compose
from outrider.conf.errors import CorruptFile
from outrider.conf.shown_text import escape_controls
from outrider.eval.page import elements, write
from outrider.eval.plan.surface import FORMAT as PLAN
from outrider.eval.publish import card
from outrider.eval.publish import run as publish_run
from outrider.models.target import load
from outrider.train.settings import parse
from tests.test_page import measured

pytestmark = pytest.mark.untyped  # files hold values of any type

ATTACKS = (
    "<script>alert(1)</script>", "x`\n\n# Owned\n\n[click](http://evil)", "![x](http://evil/a.png)",
    "a | b | c", "\x1b[2J\u202e", "```\n\n<img src=x>\n", "---\nlicense: mit\n---", "<!-- ",
)  # fmt: skip


def render(run: Path, text: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    """Return the card of a run whose files hold `text` wherever text may stand."""
    manifest = {
        "argv": ["outrider", "train", f"drafter.warm_start={text}", text],
        "versions": dict.fromkeys(("outrider", "torch", "transformers"), text),
        "git": {"commit": text},
        "data": {"source": text}, "config": {"train": {"x": text}, "drafter": {"y": text}},
    }  # fmt: skip
    counts = dict.fromkeys(("batch", "context", "depth", "width", "nodes"), 1)
    times = dict.fromkeys(("tau", "speedup", "draft_ms", "verify_ms", "round_ms", "plain_ms"), 2.0)
    plan = {
        "format": PLAN, "machine": text, "assumptions": [text], "warnings": [text], "rows": [],
        "recommended": [{**counts, **times, "shape": text}],
    }  # fmt: skip
    training = {"steps": 1, "tokens": 1000, "seconds": 1.0, "best_step": 1}
    report = measured(dtype=text, device=text).fields()
    report |= {"exact_note": text, "categories": {text: report["categories"]["story"]}}
    files: dict[str, dict[str, Any]] = {
        "manifest": manifest,
        "plan/plan": plan,
        "training": training,
        "eval/chain": report,
    }
    for name, content in files.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / f"{name}.json").write_text(json.dumps({**content, **changes.get(name, {})}))
    monkeypatch.setattr(card, "target_fingerprint", lambda _target: "0123")
    monkeypatch.setattr(card, "fingerprint", lambda _tensors: "d")
    monkeypatch.setattr(card, "_target_card", lambda *_: {"license": text, "license_name": text})
    config = parse(compose([f"run.dir='{run}'", "target=hf", "target.path=a/b"]))
    drafter: Any = SimpleNamespace(
        parameters=list, vocab=[1], taps=[1], max_depth=3, state_dict=dict,
        describe_target_change=lambda: None,
    )  # fmt: skip
    target: Any = SimpleNamespace(name=text, vocab_size=9)
    reports, others = card.read_reports(run, drafter)
    subject = card.CardSubject(
        config, PublishConfig(datasets=(text,)), drafter, config.drafter, target, "sglang", text,
        reports, [*others, text],
    )  # fmt: skip
    return card.write_card(subject, None)


@pytest.mark.parametrize("attack", ATTACKS)
def test_card_shows_text_of_the_run_as_text(
    tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = render(tmp_path, attack, monkeypatch)
    text.encode()
    assert escape_controls(text) == text
    block, page = text.split("\n---\n", 1)
    assert yaml.safe_load(block)["datasets"] == [attack]
    html, harmless = (
        MarkdownIt("gfm-like", {"linkify": False}).render(one)
        for one in (page, render_again(tmp_path, monkeypatch))
    )
    for tag in ("<script", "<img", "<a ", "<h1", "<h2", "<table", "<pre", "<!--", "<td", "<hr"):
        assert html.count(tag) == harmless.count(tag), tag


def render_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same card of harmless text."""
    (run / "second").mkdir()
    return render(run / "second", "plain", monkeypatch).split("\n---\n", 1)[1]


def test_card_links_the_project_once_it_has_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"versions": dict.fromkeys(card.VERSIONS, "1.2")}
    assert "\nOutrider 1.2, commit" in render(tmp_path, "a", monkeypatch, manifest=known)
    monkeypatch.setattr(card, "project_url", lambda: "https://host.example/some_one/project")
    linked = "\n[Outrider](https://host.example/some_one/project) 1.2, commit"
    assert linked in render(tmp_path, "a", monkeypatch, manifest=known)


def test_card_calls_a_speedup_above_tau_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "chain, depth 3, temperature 0.0: Speedup above tau is noise"
    assert sentence in render(tmp_path, "a", monkeypatch, **{"eval/chain": {"speedup": 9.0}})
    assert "is noise" not in render(tmp_path, "a", monkeypatch)


@pytest.mark.parametrize(("name", "changes"), [
    ("manifest", {"config": "text"}), ("manifest", {"fingerprints": {"template": 3}}),
    ("manifest", {"config": {"target": {"thinking": "yes"}}}),
    ("manifest", {"config": {"target": {"template_args": "a=b"}}}),
    ("manifest", {"versions": {"torch": 2}}),
    ("manifest", {"git": 3}), ("manifest", {"argv": 7}), ("training", {"tokens": "many"}),
    ("eval/chain", {"tau": "high"}), ("eval/chain", {"accept_at": 5}),
    ("eval/chain", {"categories": []}), ("plan/plan", {"recommended": 1}),
])  # fmt: skip
def test_wrong_types_end_with_a_message(
    tmp_path: Path, name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CorruptFile, match=f"{name}.json: {next(iter(changes))}"):
        render(tmp_path, "text", monkeypatch, **{name: changes})


@pytest.mark.parametrize("name", ["eval/chain", "plan/plan", "manifest", "training"])
def test_damaged_files_are_found_before_the_target_is_loaded(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / f"{name}.json").write_text('"text"')
    monkeypatch.setattr(load, "load_target", lambda *_: pytest.fail("loaded"))
    config = parse(compose([f"run.dir='{tmp_path}'", "target=tiny", "drafter=eagle3"]))
    with pytest.raises(CorruptFile, match=f"{name}.json does not hold a JSON object"):
        publish_run.publish(config, PublishConfig())


def test_manifest_without_versions_has_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = render(tmp_path, "text", monkeypatch, manifest={"versions": {}})
    assert "commit" not in text


def test_card_has_no_home_folder_and_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    private = "/srv/people/ada/x /home/bob/y https://u:secret@host/z?token=abc"
    text = render(tmp_path, private, monkeypatch)
    assert "~/x ~/y https://" in text
    for word in ("ada", "bob", "secret", "abc"):
        assert word not in text


def test_page_has_no_credentials_and_no_overrides() -> None:
    text = "https://me:pass-word@host/x?token=abc \u202e\u2066\x1b[2J"
    parts = (elements.Listing("config.yaml", text), elements.Note(text, text))
    section = elements.Section("s", text, [elements.Collapsible(text, list(parts))])
    page = elements.Page(text, [text], [section], text)
    for written in (write.as_html(page), write.as_markdown(page)):
        assert "pass-word" not in written
        assert "abc" not in written.replace("abcdef", "")
        assert not set("\u202e\u2066\x1b") & set(written)
