"""Plugins: what they register, how they are named, and that no folder imports one."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from outrider.conf import plugins
from outrider.conf.compose import choices, compose
from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import read_json, write_json
from outrider.conf.plugins import Registry, load_plugins, named_plugins
from outrider.data.dataset_registry import DATASETS, DatasetSpec
from outrider.data.readers import READERS, read_records
from outrider.data.sources import data_source
from outrider.eval.decoder import Decoder
from outrider.eval.requests import check_policy
from outrider.launch import cli
from outrider.launch.combinations import expand_overrides
from outrider.launch.train import train
from outrider.models.decode.from_config import POLICIES, parse_policy_at_temperature
from outrider.train.losses import LOSSES, LossInputs, TermSpec, parse_loss
from outrider.train.optimizer import OPTIMIZERS
from outrider.train.schedule import SCHEDULES
from outrider.train.settings import load_run, parse
from tests.plugin_registries import restored_registries
from tests.runs import SMALL

LOSS = """
from outrider.train.losses import LOSSES, TermSpec, soft_cross_entropy
LOSSES["focal"] = TermSpec(soft_cross_entropy, "one of the tests")
"""


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plugin(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_a_file_registers_a_loss_that_the_configuration_names(folder: Path) -> None:
    words = ["drafter.loss=[2*focal]", f"run.plugins=[{plugin('mine.py', LOSS)}]"]
    for word in (
        words[0],
        "drafter=mine",
        "decode=mine",
        "train.optimizer=mine",
        "train.schedule=x",
    ):
        with pytest.raises(ConfigError, match=r"\n.*run.plugins=\[MODULE or FILE.py\]"):
            parse(compose([word]))
    load_plugins(named_plugins(words))
    config = parse(compose(words))
    assert config.run.plugins == ("mine.py",)
    assert config.drafter.loss == ("2*focal",)  # type: ignore[attr-defined]
    assert LOSSES.plugin_of("focal") == "mine.py"
    assert LOSSES.plugin_of("kl") is None


def test_a_module_of_the_path_is_imported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name or as the file: a second import would register its names twice."""
    plugin("my_losses.py", LOSS)
    monkeypatch.syspath_prepend(str(folder))
    load_plugins(["my_losses"])
    load_plugins(["my_losses"])
    assert "focal" in LOSSES
    del sys.modules["my_losses"]


def test_a_file_that_python_has_imported_counts_as_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("my_losses.py", LOSS)
    monkeypatch.syspath_prepend(str(folder))
    import my_losses  # type: ignore[import-not-found]

    plugins.require_loaded(["elsewhere/my_losses.py"])
    load_plugins(["my_losses.py"])
    assert LOSSES["focal"].loss is my_losses.soft_cross_entropy
    del sys.modules["my_losses"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[absent.py]", "There is no such file.\n.*Paths start at the current folder"),
        ("[no_such_module]", "There is no module of this name.\n.*PYTHONPATH"),
        ("[mine]", r"There is no module of this name.\n.*Write \[mine.py\]"),
        ("[fails.py]", r"fails on import, line 2: ZeroDivisionError: division by zero"),
        ("[wrong.py]", r"fails on import, line 1: SyntaxError"),
        ("[exits.py]", r"fails on import, line 1: SystemExit: 3"),
        ("[needs.py]", r"fails on import, line 1: ModuleNotFoundError.*\n.*Install no_such_lib"),
        ("[twice.py]", "The loss focal is registered already, by twice.py.\n.*another name"),
        ("[builtin.py]", "The loss kl is registered already, by Outrider."),
        ("[drafter.py]", "The drafter eagle3 is registered already, by Outrider."),
        ("[mine.py,other.py]", "The loss focal is registered already, by mine.py."),
        ("[form.py]", "The loss bad is of type function.\n.*Register a TermSpec"),
        ("[name.py]", "'Bad Name' cannot be the name of a loss"),
        ("[mine.py,sub/mine.py]", "A plugin of this name is loaded already"),
        ("['$(id).py']", "neither the name of a module nor a .py file"),
        ("mine.py", r"not a list of modules or files.\n.*run.plugins=\[mine.py\]"),
        ("[1]", "not a list of modules or files"),
        ("[mine.py],[other.py]", "not a list of modules or files"),
    ],
)
def test_plugins_that_cannot_be_used_are_refused(value: str, message: str, folder: Path) -> None:
    """And leave nothing behind."""
    plugin("mine.py", LOSS)
    plugin("other.py", LOSS)
    (folder / "sub").mkdir()
    plugin("sub/mine.py", "")
    plugin("fails.py", f"{LOSS.strip().splitlines()[0]}\n1 / 0")
    plugin("wrong.py", "a b")
    plugin("exits.py", "raise SystemExit(3)")
    plugin("needs.py", "import no_such_lib")
    plugin("twice.py", LOSS + LOSS)
    plugin("builtin.py", LOSS.replace("focal", "kl"))
    plugin("form.py", LOSS + 'LOSSES["bad"] = soft_cross_entropy')
    plugin("name.py", LOSS.replace("focal", "Bad Name"))
    plugin("drafter.py", (
        "from outrider.models.drafters import DRAFTERS, DrafterKind\n"
        "from outrider.models.drafters.eagle3 import Config, Eagle3\n"
        'DRAFTERS["eagle3"] = DrafterKind(Eagle3, Config)'
    ))  # fmt: skip
    with pytest.raises(ConfigError, match=message) as caught:
        load_plugins(named_plugins([f"run.plugins={value}"]))
    assert caught.value.key == "run.plugins"
    owners = {LOSSES.owner.get("focal")}
    assert owners <= {None, "mine.py"}


def test_a_failed_plugin_can_be_corrected_and_loaded(folder: Path) -> None:
    plugin("mine.py", f"{LOSS}\n1 / 0")
    with pytest.raises(ConfigError, match="fails on import"):
        load_plugins(["mine.py"])
    assert "focal" not in LOSSES
    load_plugins([plugin("mine.py", LOSS)])
    assert "focal" in LOSSES


def test_a_part_that_is_removed_is_no_choice_any_more() -> None:
    OPTIMIZERS["mine"] = OPTIMIZERS["sgd"]
    assert (
        parse(compose(["train.optimizer=mine", "train.optimizer.rate=2"])).train.optimizer.rate == 2
    )
    assert "mine" in choices("train/optimizer")
    del OPTIMIZERS["mine"]
    assert "mine" not in choices("train/optimizer")
    with pytest.raises(ConfigError, match="There is no optimizer of this name"):
        parse(compose(["train.optimizer=mine"]))


def test_a_cell_that_runs_twice_registers_its_name_again() -> None:
    """Outside of plugins; Outrider's own names stay."""

    def loss(rows: LossInputs, _: float) -> torch.Tensor:
        return rows.alpha

    LOSSES["cell"] = TermSpec(loss, "")
    LOSSES["cell"] = TermSpec(loss, "")
    with pytest.raises(ConfigError, match="The loss kl is registered already, by Outrider"):
        LOSSES["kl"] = TermSpec(loss, "")
    with pytest.raises(ConfigError, match="The loss kl is registered already, by Outrider"):
        LOSSES.update(kl=TermSpec(loss, ""))
    assert parse_loss(["0.5*cell"])[0].spec.loss is loss


@pytest.mark.parametrize("registry", [OPTIMIZERS, SCHEDULES, LOSSES, POLICIES, READERS, DATASETS])
def test_every_registry_keeps_outriders_names(registry: Registry[Any]) -> None:
    name = next(iter(registry))
    with pytest.raises(ConfigError, match="is registered already, by Outrider"):
        registry[name] = registry[name]


def test_a_term_that_averages_its_rows_is_refused() -> None:
    LOSSES["mine"] = TermSpec(lambda rows, _: rows.log_q.mean(), "")
    p, none = torch.full((3, 2), 0.5), torch.zeros(0, 1)
    rows = LossInputs(p.log(), p, p, torch.ones(3).bool(), torch.zeros(3).long(), none, none)
    with pytest.raises(
        ConfigError, match=r"values of shape \[\] for 3 rows.\n.*one value for each"
    ):
        parse_loss(["mine"])[0](rows)


def test_an_unknown_data_set_may_be_one_of_a_plugin() -> None:
    with pytest.raises(ConfigError, match=r"no such file, folder or data set.\n.*run.plugins="):
        data_source("no_such_data_set")


def test_a_policy_is_chosen_with_the_settings_of_a_tree(folder: Path) -> None:
    text = (
        "from outrider.models.decode.from_config import POLICIES, draft_of\n"
        "from outrider.models.decode.dynamic_tree import DynamicTree\n"
        'POLICIES["wide"] = lambda d, _: DynamicTree(2, d.width, d.nodes, d.gain, draft_of(d))'
    )
    load_plugins([plugin("wide.py", text)])
    config = parse(compose(["decode=wide", "decode.gain=0.5"]))
    assert config.decode == DecodeConfig("wide", 4, 4, 8, gain=0.5)
    name, decode = parse_policy_at_temperature("wide@1")
    assert (name, decode.name, decode.temperature) == ("wide-t1", "wide", 1.0)
    assert POLICIES["wide"](decode, None).levels == 2
    assert "wide" in choices("decode")
    check_policy("wide")
    parse(compose(["decode=wide", "decode.depth=20"]))  # it counts its own nodes
    with pytest.raises(ConfigError, match="has at least 20 nodes"):
        parse(compose(["decode=dynamic_tree", "decode.depth=20"]))


def test_a_reader_and_a_data_set_are_found_by_their_names(folder: Path) -> None:
    def pairs(file: Path, policy: Any) -> Iterator[dict[str, Any]]:
        for line in file.read_text().splitlines():
            question, answer = line.split("|")
            yield {"prompt": question, "completion": answer}

    READERS[".pairs"] = pairs
    Path("sums.pairs").write_text("1+1?|2\n2+2?|4\n")
    DATASETS["sums"] = DatasetSpec("sums.pairs", "mine")
    assert list(read_records("sums.pairs"))[1] == {"prompt": "2+2?", "completion": "4"}
    assert len(list(data_source("sums").rows())) == 2
    Path("sums.pairs").write_text("1+1?|2\nbroken\n")
    with pytest.raises(RunError, match=r"reader of .pairs failed on sums.pairs: ValueError"):
        list(read_records("sums.pairs"))
    READERS[".bad"] = lambda file, policy: iter([1])  # type: ignore[list-item]
    Path("x.bad").write_text("x")
    with pytest.raises(RunError, match="a JSON object is needed, not int"):
        list(read_records("x.bad"))


def test_a_sweep_passes_plugins_on_to_every_run() -> None:
    jobs = expand_overrides(["drafter=eagle,medusa", "run.plugins=[a.py,b.py]"])
    assert [named_plugins(job) for job in jobs] == [["a.py", "b.py"]] * 2


# ---- folders that name a plugin ----

MARK = "from pathlib import Path\nPath('imported').touch()\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without plugins."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(parse(compose([*SMALL, "train.max_steps=2", f"run.dir={folder}"])))
    return folder


@pytest.fixture
def recorded(finished: Path, folder: Path) -> Path:
    """A copy of it whose config.yaml names a plugin beside it, which would leave a mark."""
    shutil.copytree(finished, folder / "run")
    plugin("mark.py", MARK)
    file = folder / "run" / "config.yaml"
    config = OmegaConf.load(file)
    config.run.plugins = ["mark.py"]
    OmegaConf.save(config, file)
    return folder / "run"


@pytest.mark.parametrize(
    "command",
    [
        "eval run.dir=run", "chat run.dir=run", "serve run.dir=run port=0", "plan run.dir=run",
        "publish run.dir=run format=native", "ranks run.dir=run", "report run.dir=run",
        f"train run.dir=run {' '.join(SMALL)} train.max_steps=3",
        "train --config run/config.yaml run.dir=other", "doctor --config run/config.yaml",
        "bench rounds run.dir=run",
    ],
)  # fmt: skip
def test_no_command_imports_what_a_run_folder_names(
    command: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each says what to add."""
    with pytest.raises(SystemExit) as caught:
        cli.main(command.split())
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "run.plugins = ['mark.py']" in shown
    assert "If you trust it, add run.plugins=[mark.py]" in shown
    assert not Path("imported").exists()


@pytest.mark.parametrize("command", ["compare run", "watch run.dir=run"])
def test_commands_that_only_read_need_no_plugin(command: str, recorded: Path) -> None:
    (recorded / "eval").mkdir(exist_ok=True)
    with suppress(SystemExit):
        cli.main(command.split())
    assert not Path("imported").exists()


def test_python_imports_nothing_that_a_run_folder_names(recorded: Path) -> None:
    for call in (lambda: load_run("run", []), lambda: Decoder.from_run("run")):
        with pytest.raises(ConfigError, match=r"add run.plugins=\[mark.py\]; in Python, load_plug"):
            call()
    assert not Path("imported").exists()
    load_plugins(["mark.py"])
    assert Path("imported").exists()
    assert load_run("run", []).run.plugins == ("mark.py",)


@pytest.mark.parametrize("value", ["mark.py", ["mark.py", 5], {"a": "mark.py"}, ["../;rm"], 5])
def test_a_damaged_record_of_plugins_is_refused(value: Any, recorded: Path) -> None:
    config = OmegaConf.load("run/config.yaml")
    config.run.plugins = value
    OmegaConf.save(config, "run/config.yaml")
    with pytest.raises(ConfigError, match=r"run\.plugins"):
        load_run("run", [])
    assert not Path("imported").exists()


def test_a_command_adds_plugins_to_those_of_the_run(recorded: Path) -> None:
    """A run is the same from another folder: its plugin is known by its name."""
    Path("sub").mkdir()
    shutil.move("mark.py", "sub/mark.py")
    plugin("more.py", "")
    words = ["run.plugins=[sub/mark.py,more.py]"]
    load_plugins(named_plugins(words))
    assert load_run("run", words).run.plugins == ("mark.py", "more.py")


def test_a_published_drafter_of_a_plugin_names_it_and_imports_nothing(
    recorded: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded / "drafter" / "config.json"
    config = read_json(file, "")
    config["drafter"]["name"], config["plugin"] = "cell", "mark.py"
    write_json(file, config)
    with pytest.raises(SystemExit):
        cli.main(["eval", "drafter=run/drafter", "target=tiny", "run.dir=out"])
    shown = capsys.readouterr().err
    assert "The drafter cell is of the plugin mark.py." in shown
    assert "add run.plugins=[mark.py]" in shown
    assert not Path("imported").exists()
    config["plugin"] = "mark.py]; rm"
    write_json(file, config)
    with pytest.raises(RunError, match="no such drafter") as caught:
        Decoder.from_pretrained("tiny", "run/drafter")
    assert "rm" not in str(caught.value)
