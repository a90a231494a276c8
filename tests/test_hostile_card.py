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
from outrider.eval.publish import card
from outrider.train.settings import parse

pytestmark = pytest.mark.untyped  # files hold values of any type

ATTACKS = (
    "<script>alert(1)</script>", "x`\n\n# Owned\n\n[click](http://evil)", "![x](http://evil/a.png)",
    "a | b | c", "\x1b[2J\u202e", "```\n\n<img src=x>\n", "---\nlicense: mit\n---", "<!-- ",
)  # fmt: skip
NUMBERS = {
    "tau": 2.5, "tau_95": None, "speedup": 1.5, "speedup_95": None, "prompts": 3,
    "accept_at": [0.5], "cond_at": [0.5],
}  # fmt: skip


def render(run: Path, text: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    """The card of a run whose files hold `text` wherever text may stand."""
    manifest = {
        "argv": ["outrider", "train", f"drafter.warm_start={text}", str(text)],
        "versions": dict.fromkeys(("outrider", "torch", "transformers"), text),
        "git": {"commit": text},
        "data": {"source": text}, "config": {"train": {"x": text}, "drafter": {"y": text}},
    }  # fmt: skip
    row = {"batch": text, "context": 1, "shape": text, "tau": 2.0, "speedup": 1.0}
    plan = {"machine": text, "recommended": [row], "warnings": [text]}
    training = {"steps": 1, "tokens": 1000, "seconds": 1.0, "best_step": text}
    report = {
        "policy": "chain", "depth": 2, "nodes": 2, "temperature": text, "dtype": text,
        "device": text, "threads": text, "exact_note": text, **NUMBERS,
        "categories": {str(text): NUMBERS},
    }  # fmt: skip
    (run / "plan").mkdir()
    for name, content in (("manifest", manifest), ("plan/plan", plan), ("training", training)):
        (run / f"{name}.json").write_text(json.dumps({**content, **changes.get(name, {})}))
    monkeypatch.setattr(card, "target_fingerprint", lambda _target: "0123")
    monkeypatch.setattr(card, "_target_card", lambda *_: {"license": text, "license_name": text})
    config = parse(compose([f"run.dir='{run}'", "target=hf", "target.path=a/b"]))
    drafter = SimpleNamespace(parameters=list, vocab=[1], taps=[1], max_depth=3)
    subject = card.CardSubject(
        config, PublishConfig(datasets=(str(text),)), drafter, config.drafter,  # type: ignore[arg-type]
        SimpleNamespace(name=str(text), vocab_size=9), "sglang", str(text),  # type: ignore[arg-type]
        {str(text): {**report, **changes.get("report", {})}}, [str(text)],
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


@pytest.mark.parametrize("value", [["<b>"], {"<b>": "<i>"}, True, 3])
def test_values_of_other_types_are_escaped(
    tmp_path: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = render(tmp_path, value, monkeypatch).split("\n---\n", 1)[1]
    assert "<b>" not in page.partition("## Training")[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest": {"config": "text"}}, {"manifest": {"versions": {}}}, {"manifest": {"git": 3}},
        {"manifest": {"argv": 7}}, {"training": {"tokens": "many"}}, {"report": {"tau": "high"}},
        {"report": {"accept_at": 5}}, {"report": {"categories": []}},
        {"plan/plan": {"recommended": 1}},
    ],
)  # fmt: skip
def test_wrong_types_end_with_a_message(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CorruptFile, match="unexpected content"):
        render(tmp_path, "text", monkeypatch, **changes)


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
