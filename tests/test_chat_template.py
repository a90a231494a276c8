"""Chat template arguments: rendering, parsing, and the warning about changes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.compose import compose
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, CorruptFile
from outrider.conf.template_args import parse_template_args
from outrider.data.conversations import Message
from outrider.data.tokenise import prompt_ids, render
from outrider.eval.run import evaluate, warn_of_another_template
from outrider.launch.train import train
from outrider.models.target.chat_template import set_template_args, template_change, template_hash
from outrider.models.target.load import LoadedTarget, load_target, load_tokenizer
from outrider.train.settings import load_run, parse
from tests import runs

# In the manner of Qwen3: a macro, a default, and an empty think block where thinking is off.
TEMPLATE = (
    "\n{%- macro say(role, text) %}<{{ role }}{{ date }}>{{ text }}\n{% endmacro %}"
    "{% for m in messages %}{{ say(m.role, m.content) }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
DIALOGUE = [Message(role="user", content="2+2?"), Message(role="assistant", content="4")]
CASES: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": True, "date": "26 Jul 'x' \"y\" \u00e9 \\n"},
    {"date": None},
    {"date": [1, {"a": 2.5}]},
]


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose(["target=tiny"])).target)


@pytest.mark.parametrize("args", CASES, ids=str)
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.removeprefix("\n{%- "), "\n" + TEMPLATE])
def test_set_arguments_render_like_passed_arguments(
    loaded: LoadedTarget, args: dict[str, Any], template: str
) -> None:
    plain, preset = (copy.deepcopy(loaded.tokenizer) for _ in range(2))
    plain.chat_template = preset.chat_template = (
        template if template.startswith(("\n", "{")) else "{% " + template
    )
    set_template_args(preset, args)
    assert template_hash(preset) != template_hash(plain)
    for prompt in (True, False):
        texts = [
            tokenizer.apply_chat_template(
                DIALOGUE, tokenize=False, add_generation_prompt=prompt, **extra
            )
            for tokenizer, extra in ((plain, args), (preset, {}))
        ]
        assert texts[0] == texts[1]
    assert preset.decode(prompt_ids(preset, DIALOGUE)) == plain.apply_chat_template(
        DIALOGUE, tokenize=False, add_generation_prompt=True, **args
    )
    assert preset.decode(render(preset, DIALOGUE, max_length=200).ids) == texts[1]


def test_arguments_are_parsed_to_values() -> None:
    words = ("date_string=26 Jul 2024", "depth=3", "tools=null", "b=false", "eq=a=b")
    assert parse_template_args(True, words) == {
        "enable_thinking": True, "date_string": "26 Jul 2024", "depth": 3, "tools": None,
        "b": False, "eq": "a=b",
    }  # fmt: skip
    assert parse_template_args(None, ()) == {}


@pytest.mark.parametrize("word", ["date", "a-b=1", "=1", "enable_thinking=true"])
def test_an_argument_without_value_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"target\.template_args"):
        parse(compose(["target.thinking=false", f"target.template_args=['{word}']"]))


def test_an_unused_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target\.thinking = False\n.*does not use"):
        load_target(parse(compose(["target=tiny", "target.thinking=false"])).target)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedTarget) -> Path:
    """The embedded target with a template that uses enable_thinking."""
    folder = tmp_path_factory.mktemp("thinker")
    loaded.target.model.save_pretrained(folder)
    tokenizer = copy.deepcopy(loaded.tokenizer)
    mark = "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    tokenizer.chat_template = str(tokenizer.chat_template) + mark
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_another_thinking_flag_than_in_training_is_warned_about(
    thinker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["target=hf", f"target.path={thinker}", "target.dtype=float32", "target.thinking=false"]
    train(runs.config(tmp_path, *words, "data=jsonl", f"data.path={text(tmp_path)}"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    config = load_run(tmp_path, [f"run.dir={tmp_path}"])
    assert config.target.thinking is False
    tokenizer = load_target(config.target).tokenizer
    assert manifest["fingerprints"]["template"] == template_hash(tokenizer)
    assert template_change(manifest, config.target, tokenizer) == ""
    usual = ["eval.limit=1", "eval.max_new_tokens=4", "eval.warmup=0", f"run.dir={tmp_path}"]
    evaluate(load_run(tmp_path, usual))
    assert "not the one of training" not in capsys.readouterr().out
    evaluate(load_run(tmp_path, [*usual, "target.thinking=true"]))
    output = capsys.readouterr().out
    assert "not the one of training" in output
    assert "trained with enable_thinking=false" in output
    assert "measured with enable_thinking=true" in output


@pytest.mark.parametrize("target", [{"template_args": ["no value"]}, {"template_args": "a=b"}])
def test_wrong_template_arguments_of_a_manifest_are_one_error(
    tmp_path: Path, target: dict[str, object]
) -> None:
    manifest = {"fingerprints": {"template": "0" * 16}, "config": {"target": target}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    config = parse(compose(["target=tiny"]))
    tokenizer = load_tokenizer(config.target)
    with pytest.raises(CorruptFile, match="template_args"):
        warn_of_another_template(tmp_path, config, tokenizer, Console())


def text(folder: Path) -> Path:
    """Sixty different conversations."""
    file = folder / "text.jsonl"
    rows = [{"prompt": f"What is {n} plus {n}?", "completion": str(2 * n)} for n in range(60)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file
