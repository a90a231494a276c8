"""Settings of every group and verb: any value is accepted or ends in a ConfigError.

Nothing is loaded; each case checks one value of one key.
"""

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.conf.command_settings import VERB_GROUPS, ReportConfig
from outrider.conf.compose import compose, default_values, flatten, to_container
from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.errors import ConfigError, exit_on_error
from outrider.conf.fields import LARGEST, MAX_TEXT, from_dict, leaf_fields
from outrider.conf.schema import GROUPS, TargetConfig
from outrider.launch import cli
from outrider.launch.verbs import BENCHES
from outrider.models import drafters
from outrider.models.decode.from_config import sampling_of
from outrider.models.target import load
from outrider.train.losses import parse_depth_weights, parse_loss
from outrider.train.settings import parse

NUMBERS = [math.nan, math.inf, -math.inf, -1, -1.5, 0, 1e12, -1e12, 10**400, 2**63, 1e-320]
TEXTS = ["", "~x/y", "a" * 100_000, "\0", "\x1b[31m", "\x9b2J", "\ud800", "${run.dir}", "[" * 900]
NESTED: list[Any] = [[], [[]], [[[1]]], [None], {}, {"a": 1}, list(range(5000)), [math.nan], ["\0"]]
for _ in range(50):
    NESTED[2] = [NESTED[2]]
VALUES = [*NUMBERS, *TEXTS, *NESTED, None, True]
BENCH_OPTIONS = {
    name: importlib.import_module(bench.target.partition(":")[0]).Options
    for name, bench in BENCHES.items()
}
DRAFTERS = {f"drafter {name}": drafters.drafter_module(name).Config for name in drafters.names()}
SCHEMAS = {**GROUPS, **VERB_GROUPS, "report": ReportConfig, **BENCH_OPTIONS, **DRAFTERS}
KEYS = [(name, key) for name, schema in SCHEMAS.items() for key, _, _ in leaf_fields(schema)]


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} of the key a.b."""
    head, _, rest = key.partition(".")
    return {head: nested(rest, value) if rest else value}


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers_in(item)]
    return [value] if isinstance(value, int | float) else []


def check(schema: Any, key: str, value: Any) -> None:
    """Accept a bounded configuration, or a short error that names the key."""
    try:
        out = from_dict(schema, nested(key, value), "group")
    except ConfigError as error:
        length = len(str(error))
    else:
        length = 0
        for name, found in flatten(dataclasses.asdict(out)):
            assert all(abs(number) <= 2**32 for number in numbers_in(found)), name
    assert length < 3000


def test_every_key_accepts_or_refuses_every_value() -> None:
    for name, key in KEYS:
        for value in VALUES:
            check(SCHEMAS[name], key, value)
            check(SCHEMAS[name], key, [value])


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(which=st.sampled_from(KEYS), value=anything)
@settings(max_examples=300)
def test_random_values(which: tuple[str, str], value: Any) -> None:
    check(SCHEMAS[which[0]], which[1], value)


def test_no_number_is_endless() -> None:
    endless = (math.nan, math.inf, 10**400, -(10**400), 1e300, 2**33, -2 * LARGEST)
    values = [value for number in endless for value in (number, [number], [0.5, number])]
    for schema in SCHEMAS.values():
        for key, kind, _ in leaf_fields(schema):
            if {int, float} & {kind, *get_args(kind)}:
                for value in values:
                    with pytest.raises(ConfigError):
                        from_dict(schema, nested(key, value), "group")


@pytest.mark.parametrize(
    "word",
    [
        "decode.banned=[-1]", "drafter.depth_weights=geometric:nan", "train.batch_tokens=1e12",
        "decode.depth=100000", "train.lr=1e400", "launch.wait=1e300", "data.workers=100000000",
        "drafter.loss=[1e400*tv]", "drafter.depths=1000000000", "run.seed=1e300",
        "drafter.depth_weights=geometric:1e300", "target.template_args=[a]", "run.dir='a\0b'",
        f"train.lr={'[' * 400}1{']' * 400}", f"run.dir={'9' * 5000}", "run.dir=''",
        f"eval.grid=[{','.join(['chain@0'] * 100)}]", f"run.dir={'a' * (MAX_TEXT + 1)}",
        "record.share=1/99999999999999999999", "train.lr={a: 1}", "train.betas=[0.9,nan]",
    ],
)  # fmt: skip
def test_a_hostile_override_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(compose([word], "train"))
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("words", [
    ["plan", "run.dir=x", "plan.depths=[1e12]"], ["memory", "memory.room=nan"],
    ["advise", "advise.shares=[nan,0.1]"], ["launch", "cluster.nodes=1e9"],
    ["train", "-m", "sweep.over={train.lr: {low: 1e-4, high: 1e400}}"],
    ["train", "-m", "sweep.jobs=1e9"], ["bench", "step", "rows=1e9"],
    ["bench", "lengths", "lengths=nan"], ["doctor", "doctor.steps=-1"],
])  # fmt: skip
def test_a_verb_refuses_its_own_settings(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["geometric:nan", "geometric:1e400", "mean:inf", "nan", "1e400"])
def test_depth_weights_are_finite_at_one_depth(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_depth_weights(text, 1)


def test_the_weight_of_a_loss_is_finite() -> None:
    with pytest.raises(ConfigError, match="weight"):
        parse_loss(["1e400*tv"])


def test_banned_tokens_are_checked_before_training() -> None:
    with pytest.raises(ConfigError, match="banned"):
        sampling_of(DecodeConfig(banned=(5, 300)), vocab=256)


@pytest.mark.parametrize("devices", [("cuda:77",), ("nowhere",), ("meta",), ("cpu", "cpu"), ("",)])
def test_a_missing_device_is_refused_before_the_target_is_loaded(
    devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "locate_weights", lambda _: pytest.fail("loads the target"))
    with pytest.raises(ConfigError, match="no device here"):
        load.load_target(TargetConfig(place="apart", devices=devices))


@pytest.mark.parametrize("text", ["", "[[5, 5]]", "{}", "[" * 5000])
def test_a_hostile_tree_is_refused_before_the_target_is_loaded(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_: pytest.fail("loads the target"))
    tree = tmp_path / "tree.json"
    tree.write_text(text)
    words = ["decode=static_tree", f"decode.tree={tree}", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", *words])
    assert caught.value.code == 2
    assert "holds no tree" in capsys.readouterr().err


ADDRESSES = (
    "http://[::1/v1", "http://a\nb/v1", "http://\u202e/v1", "http://", "http:///v1", "http://a:0/v1",
    "http://a:99999999/v1", "http://a:x/v1", "http://a b/v1", "ftp://a/v1", "file:///etc/passwd",
    "http://a:-1/", "//a/v1", "a",
)  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_endpoints_that_are_no_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="This is not a URL"):
        parse(compose(["data=self", f"data.generate.endpoint='{address}'"]))


@pytest.mark.parametrize(
    "address", ["http://[::1]:8000/v1", "https://me:pw@a.b/v1?x=%20", "http://a"]
)
def test_addresses_of_servers_are_accepted(address: str) -> None:
    parse(compose(["data=self", f"data.generate.endpoint='{address}'"]))


def test_template_arguments_that_are_no_json_values_are_text() -> None:
    for text in ("NaN", "[1e999]", "[" * 3000):
        TargetConfig(template_args=(f"date_string={text}",))


def test_an_error_shows_the_start_of_a_long_value(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("a" * 100_000, 10**10_000):
        with pytest.raises(SystemExit), exit_on_error("outrider train"):
            raise ConfigError("run.dir", value, "It is long.", "Shorten it.")
        assert len(capsys.readouterr().err) < 1000


def test_all_defaults_pass() -> None:
    for name in ("train", "eval"):
        assert dict(default_values(name))
    parse(compose([], "train"))
    assert to_container(compose([], "train"))
