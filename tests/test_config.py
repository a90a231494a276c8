"""The configuration: every yaml composes, every error names its key."""

import dataclasses
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from outrider.conf import automatic
from outrider.conf import compose as composing
from outrider.conf.compose import CONF, choices, compose, groups
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import check_interval, convert, from_dict, option
from outrider.conf.options import parse_words
from outrider.conf.schema import GROUPS, Config, GenerateConfig, to_yaml
from outrider.launch.bench.trainers import Options as Trainers
from outrider.models import drafters
from outrider.models.adapt import adapt
from outrider.models.decode.from_config import decodings
from outrider.models.decode.sampling_params import Sampling
from outrider.train.settings import check_files, is_untrained, load_run, parse

ALL_CHOICES = [
    f"{group}={choice}" for group in groups() for choice in choices(group) if group != "experiment"
]
REQUIRED = {  # overrides that a choice requires
    "target=hf": ["target.path=some/model"],
    "data=jsonl": ["data.path=chats.jsonl"],
}


def parsed(*overrides: str) -> Config:
    return parse(compose(overrides))


def changed(**values: object) -> DictConfig:
    """Return the default run with some values set, as a yaml file sets them."""
    node = compose()
    for name, value in values.items():
        OmegaConf.update(node, name, value, merge=False, force_add=True)
    return node


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parsed(*overrides)
    return caught.value


@pytest.mark.parametrize("override", ALL_CHOICES)
def test_every_choice_composes(override: str) -> None:
    group, _, choice = override.partition("=")
    untrained = group == "drafter" and is_untrained(choice)
    if untrained:
        assert "nothing to train" in str(refused(override))
    config = parse(compose([override, *REQUIRED.get(override, [])]), to_train=not untrained)
    if group in ("target", "data", "drafter", "launch", "decode"):
        assert getattr(config, group).name == choice, "file name and `name:` agree"


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment_composes(name: str) -> None:
    parsed(f"experiment={name}")


def test_a_changed_configuration_leaves_the_next_one_unchanged() -> None:
    """Hydra composes the same choices once."""
    for words in ([], ["train.lr=0.5"]):
        node = compose(words)
        node.train.lr = node.drafter.name = None
        assert compose(["train.lr=0.5"]).train.lr == 0.5
        assert compose(words).drafter.name == "eagle3"


@pytest.mark.parametrize(
    "words",
    [
        ["train.lr=0.5", "drafter=medusa", "drafter.heads=3", "train.lr=1e-2"],
        ["drafter.loss=[soft_ce,tv]", "run.dir='a b'", 'data.path="x=1, y"', "target.path=null"],
        ["drafter=staged", "drafter.inner={name: ngram, n: 2}", "drafter.inner.n=3"],
        ["train.betas=[0.8,0.9]", "+sweep.x.y=1", "train.seed_offset=2"],
        ["run.dir=${oc.env:HOME}/a", "~train.lr", "train.wandb.project=p"],
        ["train.lr=1,2"], ["train.lrr=1"], ["train.lr.x=1"], ["train.lr=["], ["hydra.verbose=true"],
        ["drafter@other=medusa"], ["drafter.name.x=1", "drafter=nothing"], ["train={lr: 0.1}"],
        ["eval.grid=[chain@0,dynamic_tree@1]", "experiment=smollm2", "data.path=${run.dir}/x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_values_are_set_as_hydra_sets_them(words: list[str]) -> None:
    """The same configuration, flags included, or the same error."""

    def outcome(make: Callable[[], DictConfig]) -> tuple[Any, ...]:
        try:
            node = make()
        except Exception as error:  # of Hydra and OmegaConf
            return type(error), str(error)
        flags = OmegaConf.is_struct(node), OmegaConf.is_readonly(node)
        return OmegaConf.to_container(node), *flags

    found = outcome(lambda: composing._compose("train", tuple(words)))
    assert found == outcome(lambda: composing._composed.__wrapped__("train", tuple(words)))


def test_every_yaml_begins_with_description_and_command() -> None:
    for path in CONF.rglob("*.yaml"):
        comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
        commands = ("accelerate launch ", "python eval.py ", "python train.py ", "outrider ")
        assert any(command in line for line in comment for command in commands), path.name


def test_every_drafter_key_has_a_comment() -> None:
    for path in (CONF / "drafter").glob("*.yaml"):
        for line in path.read_text().splitlines():
            assert line.startswith(("#", "name:")) or " # " in line, f"{path.name}: {line}"


def test_drafters_and_yaml_files_correspond() -> None:
    assert choices("drafter") == drafters.OWN_NAMES


def test_dataclass_defaults_equal_yaml_defaults() -> None:
    """Keys that are null in the yaml files have the embedded target's values.

    A dataclass fills what an older file lacks, with the default of that time.
    """
    config = parsed("train.optimizer=adamw", "drafter.feedback=raw", "drafter.taps=null")
    for group, schema in GROUPS.items():
        assert schema() == getattr(config, group), group
    assert type(config.drafter)() == config.drafter
    assert GenerateConfig() == parsed("data=self").data.generate


@pytest.mark.parametrize(
    ("words", "name", "rate"),
    [
        ([], "muon", 3.0),
        (["train.optimizer=auto"], "muon", 3.0),
        (["drafter=eagle"], "muon", 3.0),
        (["drafter=hass"], "muon", 3.0),
        (["drafter=mtp"], "muon", 3.0),
        (["drafter=medusa"], "adamw", 1.0),
        (["launch=zero2"], "adamw", 1.0),  # it divides matrices over the ranks
        (["train.optimizer=muon"], "muon", 1.0),
        (["train.optimizer=sgd"], "sgd", 30.0),
    ],
)
def test_optimizer_suits_drafter_and_launch(words: list[str], name: str, rate: float) -> None:
    optimizer = parsed(*words).train.optimizer
    assert (optimizer.name, optimizer.rate) == (name, rate)


def test_an_older_torch_has_no_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "version", lambda _: "2.8.1+cpu")
    assert parsed().train.optimizer.name == "adamw"


def test_a_stored_optimizer_is_kept() -> None:
    saved = changed(**{"train.optimizer": {"name": "adamw"}})
    assert parse(saved).train.optimizer.name == "adamw"
    values = OmegaConf.to_container(saved)
    assert isinstance(values, dict)
    del values["train"]["optimizer"]  # of a version that had only AdamW
    assert parse(OmegaConf.create(values)).train.optimizer.name == "adamw"


@pytest.mark.parametrize(("target", "data"), [("tiny", "tiny"), ("smollm2", "self")])
def test_target_selects_default_data(target: str, data: str) -> None:
    assert parsed(f"target={target}").data.name == data


def test_explicit_data_overrides_target_default() -> None:
    assert parsed("target=smollm2", "data=tiny").data.name == "tiny"
    assert parsed("data=self").data.name == "self"
    assert parsed("experiment=smollm2", "data=self").target.name == "smollm2"


def test_run_dir_contains_drafter_and_target() -> None:
    assert parsed("target=smollm2").run.dir == "runs/eagle3-smollm2"


def test_scientific_notation() -> None:
    """In YAML 1.1 a bare 1e-4 is text."""
    lr = parsed("train.lr=1e-4").train.lr
    assert type(lr) is float
    assert lr == 1 / 10_000
    assert parsed("train.max_steps=2e2").train.max_steps == 200


def test_warmup_is_int_steps_or_float_share() -> None:
    assert type(parsed("train.warmup=30").train.warmup) is int
    assert type(parsed("train.warmup=0.5").train.warmup) is float


def test_yaml_false_is_converted_to_no() -> None:
    assert parse(changed(**{"launch.precision": False})).launch.precision == "no"


def test_chain_nodes_equal_depth() -> None:
    assert parsed("decode.depth=5").decode.nodes == 5


@pytest.mark.parametrize(
    ("override", "key", "fix"),
    [
        ("train.lrr=1", "train.lrr", "train.lr?"),
        ("+train.lrr=1", "train.lrr", "train.lr?"),
        ("+drafter.depth=3", "drafter.depth", "drafter.depths?"),
        ("train.wandb.mod=online", "train.wandb.mod", "train.wandb.mode?"),
        ("trian.lr=1", "trian.lr", "train.lr?"),
        ("draftr=eagle3", "draftr", "drafter?"),
        ("+foo.bar=1", "foo", "decode"),
        ("drafter=egle3", "drafter", "eagle3"),
        ("target=tinyy", "target", "hf, smollm2, tiny"),
        ("experiment=foo", "experiment", "smoke"),
        ("drafter.name=eagle9", "drafter.name", "eagle3"),
        ("drafter.name=../../evil", "drafter.name", "eagle3"),
        ("data.generate.minutes=3", "data.generate.minutes", "data=self"),
        ("drafter.taps=1,2,3", "drafter.taps", "[1,2,3]"),
    ],
)
def test_unknown_key_suggests_nearest(override: str, key: str, fix: str) -> None:
    error = refused(override)
    assert error.key == key
    assert fix in error.fix


@pytest.mark.parametrize(
    ("key", "value", "at"),
    [
        ("train.lr", "fast", ""),
        ("train.lr", True, ""),
        ("train.clip", None, ""),
        ("train.lr", float("nan"), ""),
        ("train.max_steps", 2.5, ""),
        ("train.max_steps", [1], ""),
        ("train.betas", 0.9, ""),
        ("train.betas", [0.9], ""),
        ("train.betas", [0.9, "x"], "[1]"),
        ("train.quick_eval", 1, ""),
        ("train.wandb", 3, ""),
        ("train.wandb.mode", "on", ""),
        ("train.resume", "maybe", ""),
        ("target.dtype", "float8", ""),
        ("launch.precision", "fp16", ""),
        ("drafter.depths", "many", ""),
        ("drafter.taps", [1, "two", 3], "[1]"),
    ],
)
def test_wrong_type_is_refused(key: str, value: object, at: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(changed(**{key: value}))
    assert caught.value.key == key + at


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.lr", 0),
        ("train.lr", -1e-4),
        ("train.max_steps", 0),
        ("train.max_minutes", 0),
        ("train.betas", [0.9, 1.0]),
        ("train.clip", 0),
        ("train.warmup", -1),
        ("train.warmup", 1.0),
        ("data.holdout", 0),
        ("data.holdout", 0.9),
        ("decode.temperature", -0.1),
        ("decode.top_p", 0),
        ("decode.top_p", 1.1),
        ("decode.top_k", -1),
        ("decode.depth", 0),
        ("launch.accumulation", 0),
        ("eval.limit", 0),
        ("run.seed", -1),
        ("drafter.depths", 0),
    ],
)
def test_value_out_of_range_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(changed(**{key: value}))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.max_steps=null"], "train.max_steps"),
        (["target=hf"], "target.path"),
        (["+data.generate.minutes=1"], "data.generate"),
        (["launch.accumulation=9"], "train.batch_tokens"),
        (["train.batch_tokens=255"], "train.batch_tokens"),
        (["launch.accumulation=3"], "train.batch_tokens"),
        (["launch.offload=optimizer"], "launch.offload"),
        (["launch=zero1", "launch.offload=optimizer"], "launch.offload"),
        (["launch=zero2", "launch.offload=parameters"], "launch.offload"),
        (["train.max_steps=null", "train.max_minutes=5", "train.warmup=30"], "train.warmup"),
        (["decode.width=2"], "decode.width"),
        (["decode.nodes=2"], "decode.nodes"),
        (["decode.nodes=4"], "decode.nodes"),
        (["decode=dynamic_tree", "decode.depth=4", "decode.nodes=3"], "decode.nodes"),
        (["decode=auto", "decode.depth=8", "decode.nodes=7"], "decode.nodes"),
        (["decode=auto", "decode.nodes=0"], "decode.nodes"),
        (["eval.out=../up"], "eval.out"),
        (["run.dir=''"], "run.dir"),
    ],
)
def test_contradictory_keys_are_refused(overrides: list[str], key: str) -> None:
    assert refused(*overrides).key == key


@pytest.mark.parametrize("name", ["dynamic_tree", "opt_tree", "best_first_tree", "auto"])
def test_an_unset_depth_is_that_of_the_nodes_at_most(name: str) -> None:
    for nodes, depth in (
        (3, 3),
        (5, min(5, automatic.automatic_depth(name))),
        (31, automatic.automatic_depth(name)),
    ):
        assert parsed(f"decode={name}", f"decode.nodes={nodes}").decode.depth == depth


def test_batch_tokens_must_cover_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """2048 tokens are eight rows of 256: enough for eight ranks, too few for nine."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    parsed()
    monkeypatch.setenv("WORLD_SIZE", "9")
    assert refused().key == "train.batch_tokens"


@pytest.mark.parametrize("override", ["run.dir=${no.such}", "run.dir=???", "=3", "a b=", "train=1"])
def test_hydra_errors_become_config_errors(override: str) -> None:
    refused(override)


def test_drafter_value_error_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class InvalidConfig:
        name: str = "eagle3"
        heads: int = 1

        def __post_init__(self) -> None:
            raise ValueError(f"heads = {self.heads}: too few")

    with pytest.raises(ConfigError, match="too few") as caught:
        from_dict(InvalidConfig, {"heads": 2}, "drafter")
    assert caught.value.key == "drafter.heads"


@pytest.mark.parametrize(
    "overrides", [[], ["experiment=smollm2"], ["decode=dynamic_tree", "drafter.taps=[0,1,2]"]]
)
def test_yaml_round_trip(overrides: list[str]) -> None:
    config = parsed(*overrides)
    written = OmegaConf.create(to_yaml(config))
    assert isinstance(written, DictConfig)
    assert parse(written) == config
    assert asdict(config)["drafter"]["name"] == config.drafter.name


def test_every_dataclass_key_is_in_yaml() -> None:
    """A key that no yaml sets could only be overridden with a +."""
    known = set(composing.known_keys())
    for group, schema in GROUPS.items():
        for field in dataclasses.fields(schema):
            name = f"{group}.{field.name}"
            assert name in known or any(key.startswith(f"{name}.") for key in known), name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = parsed("train.lr=5e-4", "decode.depth=5", "eval.limit=3", "run.seed=7")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    return tmp_path


def test_load_run_applies_evaluation_overrides(run: Path) -> None:
    """Training keys come from the run, evaluation keys from eval.yaml and the overrides."""
    config = load_run(run, ["decode=dynamic_tree", "eval.limit=8", "target.dtype=bfloat16"])
    assert (config.decode.name, config.decode.nodes, config.eval.limit) == ("dynamic_tree", 8, 8)
    assert config.target.dtype == "bfloat16"
    assert (config.train.lr, config.run.seed, config.run.dir) == (5e-4, 7, str(run))


def test_load_run_ignores_evaluation_settings_of_training(run: Path) -> None:
    config = load_run(run, ["run.seed=1"])
    assert not config.target.trust_remote_code, "a run folder cannot enable it"
    assert load_run(run, ["target.trust_remote_code=true"]).target.trust_remote_code
    assert (config.decode.depth, config.eval.limit, config.run.seed) == (3, None, 1)


@pytest.mark.parametrize("override", ["train.lr=1", "+train.lr=1", "+target.name=hf", "data=self"])
def test_load_run_refuses_training_keys(run: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="run folder fixes") as caught:
        load_run(run, [override])
    assert caught.value.key == override.partition("=")[0].lstrip("+")


def test_load_run_requires_config_yaml(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        load_run(tmp_path, [])


@pytest.mark.parametrize("text", ["a: [1,", "- 1", "run: {}"])
def test_load_run_refuses_truncated_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RunError, match=r"config\.yaml"):
        load_run(tmp_path, [])


def test_missing_files_are_refused(tmp_path: Path) -> None:
    config = parse(changed(**{"data.name": "jsonl", "data.path": f"{tmp_path}/chats.jsonl"}))
    with pytest.raises(ConfigError, match=r"chats\.jsonl"):
        check_files(config, "data.path", "eval.prompts")
    (tmp_path / "chats.jsonl").touch()
    check_files(config, "data.path", "eval.prompts")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (float, 1, 1.0),
        (int, 2e3, 2000),
        (int | float, 1, 1),
        (int | float, 1.0, 1.0),
        (str, 2026, "2026"),
        (int | None, None, None),
        (tuple[int, ...], [1, 2], (1, 2)),
        (list[int] | None, (1, 2), [1, 2]),
        (Any, {"a": 1}, {"a": 1}),
    ],
)
def test_convert_is_lossless(kind: Any, value: Any, expected: Any) -> None:
    got = convert(kind, value, "key")
    assert got == expected
    assert type(got) is type(expected)


@dataclasses.dataclass(frozen=True)
class Run:
    """A key with a dot: `run.dir`."""

    dir: str = option("", "folder of a run")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a benchmark."""

    run: Run = dataclasses.field(default_factory=Run)
    depths: tuple[int, ...] = option((3, 7), "depths", "[1, inf)")
    recompute: tuple[Literal["no", "yes"], ...] = option(("no", "yes"), "checkpointing")
    threads: int = option(0, "CPU threads", "[0, inf)")
    out: str = option("", "file")


def test_parse_words() -> None:
    """Lists need no brackets, text is literal, numbers are those of yaml."""
    words = ["run.dir=a=b", "depths=1,2", "recompute=no", "threads=1e3", "out=1_0"]
    options = Options(Run("a=b"), (1, 2), ("no",), 1000, "1_0")
    assert parse_words(Options, words) == options
    assert parse_words(Options, ["depths=[1, 2]", "out="]) == Options(depths=(1, 2))
    assert parse_words(Trainers, ["rates=[]", "words=[]"]).rates == ()
    words = ["words=[data=tiny,drafter.loss=[soft_ce,0.5*kl],decode.tree=[[0],[0,0]]]"]
    expected = "data=tiny", "drafter.loss=[soft_ce,0.5*kl]", "decode.tree=[[0],[0,0]]"
    assert parse_words(Trainers, words).words == expected
    assert parse_words(Trainers, ["words=drafter.taps=[1,2]"]).words == ("drafter.taps=[1,2]",)


@pytest.mark.parametrize(
    ("word", "key", "fix"),
    [
        ("depth=1", "depth", "depths?"),
        ("run.dri=1", "run.dri", "run.dir?"),
        ("depths=1,x", "depths[1]", "--help"),
        ("depths=0", "depths", "--help"),
        ("recompute=maybe", "recompute[0]", "no, yes"),
        ("threads", "option", "run.dir, depths"),
        ("threads=", "threads", "--help"),
        ("threads=[1", "threads", "--help"),
        ("depths=[]", "depths", "Leave the key out"),
    ],
)
def test_parse_words_refuses_invalid_word(word: str, key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_words(Options, [word])
    assert caught.value.key == key
    assert fix in caught.value.fix


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_check_interval(value: float) -> None:
    """(0, 1] has an open and a closed end."""
    inside = 0 < value <= 1
    try:
        check_interval("(0, 1]", value, "key")
    except ConfigError:
        assert not inside
    else:
        assert inside


# ---- eval.grid ----

GRID = "eval.grid=[chain@0,dynamic_tree@1]"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [(3, 3, 0.0, 1.0), (4, 8, 1.0, 1.0)]),
        (["decode.depth=6"], [(6, 6, 0.0, 1.0), (6, 8, 1.0, 1.0)]),
        (["decode.depth=9"], [(9, 9, 0.0, 1.0), (9, 9, 1.0, 1.0)]),
        (["decode.depth=3"], [(3, 3, 0.0, 1.0), (3, 8, 1.0, 1.0)]),
        (["decode.top_p=0.9"], [(3, 3, 0.0, 0.9), (4, 8, 1.0, 0.9)]),
        (["decode=dynamic_tree", "decode.nodes=20"], [(3, 3, 0.0, 1.0), (4, 20, 1.0, 1.0)]),
    ],
)
def test_settings_of_decode_apply_to_the_entries_of_a_grid(
    words: list[str], expected: list[tuple[int, int, float, float]]
) -> None:
    """Before the target is known, and after: depth, nodes, temperature, top_p."""
    config, note = parse(compose([GRID, *words])), list[str]().append
    for one in (config, adapt(config, note), adapt(adapt(config, note), note)):
        found = [(d.depth, d.nodes, d.temperature, d.top_p) for _, d in decodings(one)]
        assert found == expected
        written = OmegaConf.create(to_yaml(one))
        assert isinstance(written, DictConfig)
        assert parse(written).decode.depth == config.decode.depth


def test_every_sampling_setting_applies_to_all_entries_of_a_grid() -> None:
    changed: dict[str, Any] = {
        "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "banned": (3,),
        "presence_penalty": 0.5, "frequency_penalty": 0.25,
    }  # fmt: skip
    assert {"temperature", *changed} == {*Sampling._fields}
    words = [f"decode.{n}={[*v] if n == 'banned' else v}" for n, v in changed.items()]
    for _, decode in decodings(parse(compose([GRID, *words]))):
        assert {name: getattr(decode, name) for name in changed} == changed


def test_recipes_measure_at_their_own_depth() -> None:
    depths = {"gpt_oss_20b": 7, "llama31_8b": 5, "qwen3_8b": 5, "qwen3_30b_a3b": 4}
    for name, depth in depths.items():
        config = parse(compose([f"experiment={name}_eagle3"]))
        assert {decode.depth for _, decode in decodings(config)} == {depth}, name


@pytest.mark.parametrize("root", ["train", "eval"])
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["decode.temperature=1"], "decode.temperature"),
        (["decode=opt_tree"], "decode"),
        (["decode=opt_tree", "decode.gain=0.1"], "decode"),
        (["eval.grid=[dynamic_tree@0]", "decode.confidence=0.5"], "decode.confidence"),
    ],
)
def test_settings_that_no_entry_of_a_grid_uses_are_refused(
    words: list[str], key: str, root: str
) -> None:
    with pytest.raises(ConfigError, match="grid") as caught:
        compose([GRID, *words], root)
    assert caught.value.key == key


def test_a_search_of_sublayers_uses_decode_beside_a_grid() -> None:
    compose(["drafter=draft_verify", GRID, "decode.temperature=0", "decode.confidence=0.5"])
