"""Nothing leaks: saved configurations are data, and credentials and home folders are masked."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from outrider.conf.compose import YAML_BYTES, compose
from outrider.conf.errors import ConfigError, RunError, exit_on_error
from outrider.conf.schema import Config, to_yaml
from outrider.conf.shown_text import mask_address, mask_credentials, mask_home, mask_values
from outrider.data.sources import data_source
from outrider.launch.cli import main
from outrider.train.manifest import write_manifest
from outrider.train.settings import load_run, parse, read_saved_config

SECRET = "hf_" + "a1B2" * 8
ADDRESS = "https://me:pass-word@host.example/rows.jsonl?part=1&access_token=abcdef"
MASKED = "https://***@host.example/rows.jsonl?part=1&access_token=***"


def write_run(folder: Path, *replace: tuple[str, str]) -> Path:
    text = to_yaml(parse(compose([])))
    for old, new in replace:
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(text)
    return folder


# ---- saved configurations ----


@pytest.mark.parametrize(
    "resolver", ["oc.env:HF_TOKEN", "run.seed", "oc.env:HOME,x", "bad:", "a:[$"]
)
@pytest.mark.parametrize("verb", ["eval", "report", "plan", "publish", "chat", "ranks"])
def test_saved_interpolation_is_refused_by_every_verb(
    tmp_path: Path, verb: str, resolver: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    run = write_run(tmp_path / "run", ("project: outrider", f"project: '${{{resolver}}}'"))
    with pytest.raises(SystemExit) as stop:
        main([verb, f"run.dir={run}"])
    shown = "".join(capsys.readouterr())
    assert stop.value.code == 2
    assert "config.yaml" in shown
    assert SECRET not in shown
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("place", ["key", "list", "folder", "evaluation"])
def test_interpolations_are_refused_wherever_they_stand(tmp_path: Path, place: str) -> None:
    run = write_run(tmp_path / "run")
    words, text = [f"run.dir={run}"], (run / "config.yaml").read_text()
    if place == "key":
        (run / "config.yaml").write_text(text + "${oc.env:HOME}: 1\n")
    elif place == "list":
        (run / "config.yaml").write_text(text + "more: [[a, '${oc.env:HOME}']]\n")
    elif place == "folder":
        run = write_run(tmp_path / "${oc.env:HOME}")
    else:
        words.append("eval.out='\\${oc.env:HOME}'")
    with pytest.raises(ConfigError, match="only the command line of a new run"):
        load_run(run, words)


def test_escaped_interpolation_is_refused_before_it_is_saved() -> None:
    with pytest.raises(ConfigError, match="Write the value itself"):
        parse(compose(["run.dir='runs/\\${oc.env:HOME}'"]))


def test_interpolation_of_the_command_line_is_saved_resolved(monkeypatch: Any) -> None:
    monkeypatch.setenv("NAME_OF_RUN", "seven")
    config = parse(compose(["run.dir='runs/${oc.env:NAME_OF_RUN}'"]))
    assert config.run.dir == "runs/seven"
    assert "${" not in to_yaml(config)


HOSTILE_YAML = {
    "aliases": b"a: &a [x, x]\nb: &b [*a, *a]\nrun: *b\n",
    "bomb": b"a: &a [x,x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 120)
    ),
    "deep flow": b"a: " + b"[" * 100_000,
    "deep blocks": b"".join(b" " * i + b"a:\n" for i in range(200)),
    "large": b"a: " + b"x" * YAML_BYTES,
    "not utf-8": b"run: \xff\xfe",
    "object": b"run: !!python/object/apply:os.system ['true']\n",
    "list": b"- run\n- target\n- drafter\n",
    "groups of text": b"run: 1\ntarget: 2\ndrafter: 3\n",
    "recursive": b"run: &r {a: *r}\ntarget: {}\ndrafter: {}\n",
    "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_hostile_yaml_ends_with_a_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_bytes(HOSTILE_YAML[name])
    start = time.monotonic()
    with pytest.raises(RunError, match=r"config\.yaml") as error:
        read_saved_config(tmp_path)
    assert time.monotonic() - start < 5
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "run: {dir: !!binary aGVsbG8=}", "drafter: [1]", "train: [[a]]", "target: {a: [{}]}",
        "1: 2\nnull: 3", "run: {dir: ~}", "? [1, 2]\n: 3", "hydra: {a: 1}", "defaults: [x]",
        "run: {'dir=x,seed': 5}", "train: {lr: ???}", "a: *b", *map(bytes.decode, (
            HOSTILE_YAML["deep flow"], HOSTILE_YAML["object"], HOSTILE_YAML["list"])),
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_hostile_files_of_keys_end_with_a_message(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--cfg", "--config", str(tmp_path / "keys.yaml")])
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


# ---- credentials ----


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (ADDRESS, MASKED),
        (MASKED, MASKED),
        (f"data.path={ADDRESS} train.lr=1", f"data.path={MASKED} train.lr=1"),
        ("http://token@host/v1", "http://***@host/v1"),
        ("https://a:b@c@host/", "https://***@host/"),
        ("s3://b/x?X-Amz-Signature=ab%2F&n=1", "s3://b/x?X-Amz-Signature=***&n=1"),
        ("https://h/x?sv=1&sig=ab", "https://h/x?sv=1&sig=***"),
        (f"login with {SECRET}.", "login with ***."),
        ("https://huggingface.co/a/b?download=true#x@y", None),
        ("mail me@host.example, a://b", None),
        ("mt_bench@question.jsonl", None),
    ],
)
def test_credentials_are_masked(text: str, masked: str | None) -> None:
    assert mask_credentials(text) == (text if masked is None else masked)


def test_token_of_the_environment_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert mask_values({"a": ["x 0123456789abcdef"], "n": (1, None)}) == {
        "a": ["x ***"], "n": (1, None),
    }  # fmt: skip


def secret_config() -> Config:
    return parse(compose(["data=jsonl", f"data.path='{ADDRESS}'"]))


def assert_masked(text: str) -> None:
    assert "access_token=***" in text
    for secret in ("pass-word", "abcdef"):
        assert secret not in text


def test_manifest_and_config_hold_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "train", f"data.path={ADDRESS}"])
    write_manifest(tmp_path, secret_config(), {"data": {"source": ADDRESS}})
    for name in ("config.yaml", "manifest.json"):
        assert_masked((tmp_path / name).read_text())
    again = load_run(tmp_path, [f"run.dir={tmp_path}"])
    assert again.data.path == MASKED
    assert json.loads((tmp_path / "manifest.json").read_text())["argv"][1] == "train"


def test_printed_configuration_holds_no_credentials(capsys: Any) -> None:
    main(["train", "data=jsonl", f"data.path='{ADDRESS}'", "--cfg", "job"])
    assert_masked(capsys.readouterr().out)


def test_message_of_an_error_holds_no_credentials(capsys: Any) -> None:
    with pytest.raises(SystemExit), exit_on_error("outrider"):
        raise ConfigError("data.path", ADDRESS, "There is no such file.", f"Like {ADDRESS}")
    assert_masked(capsys.readouterr().err)


def test_unreachable_address_holds_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    source = data_source("https://me:pass-word@127.0.0.1:1/rows.jsonl?token=abcdef")
    with pytest.raises(ConfigError) as error:
        list(source.rows())
    assert "pass-word" not in error.value.why
    assert not [file for file in tmp_path.rglob("*") if "abcdef" in file.name]


def test_parts_of_an_address_are_masked_in_its_error() -> None:
    message = mask_address(ADDRESS, "nonnumeric port: 'pass-word@host.example' for me")
    assert "pass-word" not in message


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("drafter.warm_start=/home/ada/runs/x", "drafter.warm_start=~/runs/x"),
        ("/Users/ada/x", "~/x"),
        ("HOME/own.yaml", "~/own.yaml"),
        ("https://host/home/ada", "https://host/home/ada"),
    ],
)
def test_home_folders_are_not_published(text: str, published: str) -> None:
    assert mask_home(text.replace("HOME", str(Path.home()))) == published


def test_saved_file_is_still_yaml_with_a_masked_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token-of-mine")
    text = to_yaml(parse(compose(["train.wandb.project=token-of-mine"])))
    assert OmegaConf.create(text).train.wandb.project == "***"
