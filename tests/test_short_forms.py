"""Short forms of the command line: target=PATH, data=PATH, --config; names of other projects."""

from pathlib import Path
from typing import Any

import pytest

from outrider.conf.compose import compose, known_keys, read_overrides
from outrider.conf.errors import ConfigError
from outrider.conf.fields import SYNONYMS
from outrider.conf.schema import Config, to_yaml
from outrider.launch import cli
from outrider.train.settings import parse


def of(*overrides: str) -> Config:
    return parse(compose(overrides))


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("target=Qwen/Qwen3-8B", ["target=hf", "target.path=Qwen/Qwen3-8B"]),
        ("target=gpt2", ["target=hf", "target.path=gpt2"]),
        ("data=chats.jsonl", ["data=jsonl", "data.path=chats.jsonl"]),
        ("data=ultrachat", ["data=jsonl", "data.path=ultrachat"]),
        ("data=~/a/b.parquet", ["data=jsonl", "data.path='~/a/b.parquet'"]),
    ],
)
def test_a_path_in_place_of_a_choice(short: str, long: list[str]) -> None:
    assert of(short) == of(*long)
    assert of("train.lr=1e-5", short, "data.holdout=0.1") == of(
        "train.lr=1e-5", *long, "data.holdout=0.1"
    )


def test_a_folder_named_like_a_mistyped_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="hf, smollm2, tiny; or a path or name"):
        of("target=tiny2")
    (tmp_path / "tiny2").mkdir()
    assert of("target=tiny2").target.path == "tiny2"


def test_an_evaluation_takes_the_folder_of_its_target() -> None:
    node = compose(["target=/models/moved", "run.dir=runs/x"], "eval")
    assert node.target.path == "/models/moved"


def test_choices_stay_choices() -> None:
    assert of("target=smollm2", "data=self").target.name == "smollm2"
    with pytest.raises(ConfigError, match="one value"):
        compose(["target=tiny,smollm2"])


USER_FILE = """
target: Qwen/Qwen3-8B
drafter: hass
data: {name: self, max_length: 512, generate: {samples: 8}}
train: {lr: 1.0e-4, betas: [0.8, 0.9]}
run: {dir: "runs/with space"}
"""


def test_config_file_gives_overrides_and_the_command_line_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(USER_FILE)
    seen: list[Any] = []

    def train(config: Config) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("outrider.launch.train.train", train)
    assert cli.main(["train", "train.lr=1e-5", "--config", str(file)]) == 0
    (config,) = seen
    assert (config.target.name, config.target.path) == ("hf", "Qwen/Qwen3-8B")
    assert (config.drafter.name, config.data.name) == ("hass", "self")
    assert (config.data.max_length, config.data.generate.samples) == (512, 8)
    assert (config.train.lr, config.train.betas) == (1e-5, (0.8, 0.9))
    assert config.run.dir == "runs/with space"
    assert cli.main(["train", f"--config={file}"]) == 0
    assert seen[1].train.lr == 1e-4


def test_config_file_of_a_run_repeats_it(tmp_path: Path) -> None:
    config = of("drafter=medusa", "data=self", "decode=opt_tree", "train.lr=2e-4", "launch=zero2")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert of(*read_overrides(str(file))) == config


@pytest.mark.parametrize(
    "text",
    [
        "- 1",
        "train: {lr: fast}",
        "trian: {lr: 1}",
        "train: {lrr: 1}",
        "run: {dir: '${a}'}",
        "a: &b",
    ],
)
def test_config_file_that_is_wrong(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--config", str(file), "--cfg"])
    assert caught.value.code in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) in (2, 3)


@pytest.mark.parametrize("words", [["--config"], ["--config", "no/such.yaml"]])
def test_config_without_a_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", *words])
    assert caught.value.code == 2
    assert "--config" in capsys.readouterr().err


def test_names_of_other_projects_suggest_a_key() -> None:
    leaves = {key.rpartition(".")[2] for key in (*known_keys(), *known_keys("eval"))}
    assert set(SYNONYMS.values()) <= leaves
    assert not leaves & set(SYNONYMS), "no key of ours has such a name"
    for key, fix in {
        "train.learning_rate": "train.lr",
        "learning_rate": "train.lr",
        "train.max_seq_length": "data.max_length",
        "decode.num_speculative_tokens": "decode.depth",
    }.items():
        with pytest.raises(ConfigError, match=f"Did you mean {fix}"):
            of(f"{key}=1")
