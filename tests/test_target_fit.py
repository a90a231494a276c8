"""Settings that do not suit the target are refused by its configuration alone.

The target of these tests is a folder with nothing but a config.json: whatever reads its weights or
its tokenizer, or any text, fails with another message.
"""

import json
from pathlib import Path

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import Config, TargetConfig
from outrider.data.target_fit import load_fitting_target
from outrider.launch import cli
from outrider.models.target import load
from outrider.train.settings import parse

LAYERS, VOCAB, POSITIONS = 8, 1536, 2048  # of the embedded target, whose config.json this is


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of the embedded target alone."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "config.json").write_bytes((load.TINY / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def other_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of a model with a token more."""
    folder = tmp_path_factory.mktemp("other")
    fields = json.loads((load.TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "vocab_size": VOCAB + 1}))
    return folder


def config_of(bare: Path, *words: str) -> Config:
    """A configuration for the folder of the embedded target's config.json."""
    place = ["target=hf", f"target.path={bare}", "data=tiny"]
    return parse(compose([*place, *words]), to_train=False)


def test_the_shape_is_that_of_the_loaded_target() -> None:
    shape = load.read_shape(TargetConfig())
    assert shape == load.load_target(TargetConfig()).target.shape()
    assert shape is not None
    assert (shape.layers, shape.vocab, shape.max_positions) == (LAYERS, VOCAB, POSITIONS)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["drafter.taps=[0,1,99]"], "drafter.taps[2]"),
        (["drafter=kangaroo", "drafter.exit_layer=9"], "drafter.exit_layer"),
        (["drafter=layerskip", "drafter.exit_layer=9"], "drafter.exit_layer"),
        (["drafter=lookahead", "drafter.window=1024", "drafter.n=64"], ""),
        (["drafter=draft_verify", "drafter.skip_mlp=[8]"], "drafter.skip_mlp[0]"),
        (["drafter=draft_verify", "drafter.search.contexts=[4000]"], "drafter.search.contexts"),
        (["drafter=sparse_kv", "drafter.method=snapkv", "drafter.window=4000"], "drafter.window"),
        (["drafter=sparse_kv", "drafter.path=OTHER"], "drafter.path"),
        (["drafter=draft_lm", "drafter.path=OTHER"], "drafter.path"),
        (["drafter=draft_lm", "drafter.body={model_type:llama,vocab_size:7}"], "drafter.body"),
        (["drafter=staged", "drafter.inner={path:nowhere}"], "drafter.inner.path"),
        (["drafter=staged", "drafter.inner={name:kangaroo}"], "drafter.inner.name"),
        (["drafter=staged", "drafter.inner={name:eagle3,taps:[2]}"], "drafter.inner.taps[0]"),
        (["decode.banned=[1536]"], "decode.banned"),
        (["data.max_length=4096", "train.batch_tokens=4096"], "data.max_length"),
        (["eval.max_new_tokens=2048"], "eval.max_new_tokens"),
        (["drafter=eagle", "record.states=coded"], "record.states"),
    ],
)
def test_a_setting_is_refused_by_the_configuration_alone(
    bare: Path, other_lm: Path, words: list[str], key: str
) -> None:
    words = [word.replace("OTHER", str(other_lm)) for word in words]
    with pytest.raises(ConfigError) as refused:
        load_fitting_target(config_of(bare, *words), trains=True, measures=True, records=True)
    assert refused.value.key == (key or "target.path")  # "": all suits, and the weights are missing


def test_recorded_tokens_have_16_bits(tmp_path: Path) -> None:
    fields = json.loads((load.TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 70_000}))
    config = config_of(tmp_path, "drafter=eagle", "record.top=8")
    with pytest.raises(ConfigError, match="has 70,000 tokens") as refused:
        load_fitting_target(config, records=True)
    assert refused.value.key == "record.top"


@pytest.mark.parametrize("drafter", ["eagle", "hass", "mtp"])
def test_first_weights_of_another_kind_are_refused_before_the_target_is_read(
    bare: Path, drafter: str
) -> None:
    """The folder is that of the embedded target: a model, but no drafter and no MTP modules."""
    config = config_of(bare, f"drafter={drafter}", f"drafter.warm_start={load.TINY}")
    with pytest.raises(RunError, match=r"holds no (eagle|MTP)"):
        load_fitting_target(config, begins=True)


@pytest.mark.parametrize("verb", ["train", "prepare", "record", "doctor", "advise"])
def test_every_verb_that_trains_refuses_a_tap_first(
    verb: str, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["target=hf", f"target.path={bare}", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) if verb != "doctor" else pytest.MonkeyPatch.context():
        cli.main([verb, *place, "data=tiny", "drafter.taps=[0,1,99]"])
    output = capsys.readouterr()
    assert "drafter.taps[2]" in output.out + output.err
    assert "conversations" not in output.out


def test_a_weight_of_0_is_said_before_the_target_is_read(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LayerSkip: e(0) = 0, and exit_layer=2 trains e(1)."""
    place = ["target=hf", f"target.path={bare}", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(SystemExit):
        cli.main(["train", *place, "data=tiny", "drafter=layerskip", "drafter.exit_layer=1"])
    output = capsys.readouterr()
    assert "weight 0 in the loss" in output.out
    assert "drafter.exit_layer=2" in output.out
    assert "could not be loaded" in output.err
