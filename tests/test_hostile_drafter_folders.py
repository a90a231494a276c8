"""Drafter folders, Outrider's own and others', whose settings and weights contradict or explode."""

import ast
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.models import formats
from outrider.models.formats import native
from outrider.models.target.target import Target
from tests import tiny
from tests.outside import CASES, Case

REFUSED = (RunError, ConfigError)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def saved(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each format, by its name."""
    root = tmp_path_factory.mktemp("drafters")
    for case in (
        Case("eagle3", "native", {}, False), Case("eagle3", "sglang", {}, False),
        Case("eagle3", "speculators", {}, False), Case("medusa", "vllm", {}, False),
        Case("eagle", "vllm", {"bias": False}, True), Case("mtp", "deepseek", {}, True),
        Case("draft_lm", "transformers", {}, True),
    ):  # fmt: skip
        drafter = case.drafter(target).eval()
        config = tiny.config(case.name, **case.changes)
        case.format.write(drafter, target, config, root / f"{case.name}-{case.word}")
    return root


@pytest.fixture
def folder(saved: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    name = getattr(request, "param", "eagle3-native")
    return Path(shutil.copytree(saved / name, tmp_path / name))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the weights, with hashes to match."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)
    sha256 = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    if json.loads((folder / "config.json").read_text()).get("format") == native.FORMAT:
        edit(folder / "config.json", lambda config: config.update(sha256=sha256))
    (folder / "outrider.json").unlink(missing_ok=True)


def refused(folder: Path, target: Target) -> str:
    with pytest.raises(REFUSED) as caught:
        formats.load(folder, target)
    assert len(str(caught.value).splitlines()) <= 4
    return str(caught.value)


OFFSETS = [
    torch.tensor([5, 0, 3]), torch.tensor([-1, 0, 0]), torch.tensor([2**62, 2**62]),
    torch.tensor([0, 0, 10**6]), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(4),
    torch.zeros(0, dtype=torch.int64), torch.tensor(3), torch.tensor([True]),
    torch.tensor([float("nan")]), torch.zeros(200, dtype=torch.int64),
]  # fmt: skip


@pytest.mark.parametrize("offsets", OFFSETS, ids=lambda x: f"{x.dtype}{list(x.shape)}")
@pytest.mark.parametrize(
    ("folder", "key"),
    [("eagle3-native", "vocab.d2t"), ("eagle3-sglang", "d2t"), ("eagle3-speculators", "d2t"),
     ("eagle3-native", "vocab.t2d"), ("eagle3-sglang", "t2d")],
    indirect=["folder"],
)  # fmt: skip
def test_impossible_draft_vocabulary(
    folder: Path, target: Target, key: str, offsets: Tensor
) -> None:
    change_weights(folder, lambda weights: weights.update({key: offsets}))
    refused(folder, target)


@pytest.mark.parametrize(
    "fields",
    [
        {"depths": float("nan")}, {"depths": 10**9}, {"depths": 0}, {"depths": "3"},
        {"depths": True}, {"depths": [1]}, {"layers": 10**12}, {"head_dim": 10**9},
        {"head_dim": 65536}, {"layers": 2}, {"loss": 5}, {"name": "../eagle"}, {"name": ["x"]},
        {"draft_vocab_size": -1}, {"fc_norm": "yes"}, {"depth_weights": None}, {"new": 1},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings(folder: Path, target: Target, fields: dict[str, Any]) -> None:
    edit(folder / "config.json", lambda config: config["drafter"].update(fields))
    refused(folder, target)


@pytest.mark.parametrize(
    "taps", [[], ["0"], [0.5], [True], [[0]], [99], [-1], [0, 0], [None], [10**30], [0]], ids=str
)
def test_impossible_taps(folder: Path, target: Target, taps: list[Any]) -> None:
    edit(folder / "config.json", lambda config: config.update(taps=taps))
    refused(folder, target)


@pytest.mark.parametrize(
    "shape", [5, {}, {"heads": 0}, {"head_dim": 10**9}, {"hidden": "x"}, {"intermediate": 2**39}]
)
def test_impossible_shape(folder: Path, target: Target, shape: Any) -> None:
    if shape:
        shape = {**target.shape()._asdict(), **shape} if isinstance(shape, dict) else shape
    edit(folder / "config.json", lambda config: config.update(shape=shape))
    refused(folder, target)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32], ids=str)
@pytest.mark.parametrize("key", ["vocab.t2d", "fc.weight"])
def test_tensors_of_another_kind(
    folder: Path, target: Target, key: str, dtype: torch.dtype
) -> None:
    """Flags are flags after loading, and weights are floating-point numbers."""
    change_weights(folder, lambda weights: weights.update({key: weights[key].to(dtype)}))
    if dtype.is_floating_point == (key == "vocab.t2d"):
        assert "size mismatch" in refused(folder, target)
    else:
        drafter, _ = formats.load(folder, target)
        assert drafter.vocab.t2d.dtype == torch.bool


@pytest.mark.parametrize("change", [{"heads": 8, "head_dim": 4, "kv_heads": 3}, {"head_dim": 1}])
def test_heads_that_do_not_divide(folder: Path, target: Target, change: dict[str, int]) -> None:
    shape = {**target.shape()._asdict(), "heads": 32, "kv_heads": 16, **change}
    edit(folder / "config.json", lambda config: config.update(shape=shape))
    refused(folder, target)


@pytest.mark.parametrize("folder", ["medusa-vllm"], indirect=True)
def test_layers_of_many_heads_are_bounded(folder: Path, target: Target) -> None:
    """A million modules take a minute to build, even without weights."""
    edit(folder / "config.json", lambda config: config.update(num_heads=1024, num_hidden_layers=99))
    (folder / "outrider.json").unlink()
    assert "exceeds 1024" in refused(folder, target)


def test_missing_weights_are_found_before_allocation(folder: Path, target: Target) -> None:
    """The settings describe 1,023 layers that the file does not hold."""
    edit(folder / "config.json", lambda config: config["drafter"].update(layers=1024))
    assert "disagree about layers.0." in refused(folder, target)


OUTSIDE = ["eagle3-sglang", "eagle3-speculators", "medusa-vllm", "eagle-vllm", "mtp-deepseek"]
VALUES = [10**12, -1, 0, "x", None, [], {}, float("nan"), 10**400, True]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:10])
@pytest.mark.parametrize("folder", [*OUTSIDE, "draft_lm-transformers"], indirect=True)
def test_any_value_of_any_field_is_accepted_or_refused(
    folder: Path, target: Target, value: Any
) -> None:
    """Each field of config.json and of outrider.json in turn."""
    for name in ("config.json", "outrider.json"):
        text = (folder / name).read_text()
        for key in json.loads(text):
            (folder / name).write_text(json.dumps({**json.loads(text), key: value}))
            with suppress(*REFUSED):
                formats.load(folder, target)
            (folder / name).write_text(text)
    formats.load(folder, target)


@pytest.mark.parametrize("folder", ["eagle3-sglang"], indirect=True)
def test_only_weight_files_are_hashed(folder: Path, target: Target) -> None:
    os.mkfifo(folder / "fifo")
    edit(folder / "outrider.json", lambda content: content["sha256"].update(fifo="0"))
    assert "holds no weights" in refused(folder, target)


@pytest.mark.parametrize("folder", ["eagle3-sglang", "draft_lm-transformers"], indirect=True)
@pytest.mark.parametrize("name", ["weights.bin", "../x/model.safetensors", "", 7, None])
def test_index_names_safetensors_beside_it(folder: Path, target: Target, name: object) -> None:
    keys = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "weights.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, name)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert "not a safetensors file beside it" in refused(folder, target)


@pytest.mark.parametrize("folder", ["eagle3-sglang"], indirect=True)
def test_weights_that_are_no_file(folder: Path, target: Target) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    assert "not a regular file" in refused(folder, target)


def test_no_format_opens_a_pickle(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was opened")

    for module in (torch, torch.serialization, pickle):
        monkeypatch.setattr(module, "load", fail)
    monkeypatch.setattr(pickle, "loads", fail)
    monkeypatch.setattr(pickle, "Unpickler", fail)
    for number, case in enumerate(CASES):
        config = tiny.config(case.name, **case.changes)
        case.format.write(case.drafter(target).eval(), target, config, tmp_path / str(number))
        formats.load(tmp_path / str(number), target)


@pytest.mark.parametrize("folder", ["eagle3-sglang", "draft_lm-transformers"], indirect=True)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.pt", "x.ckpt"])
def test_folders_of_pickles_are_refused(folder: Path, target: Target, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    assert "is a pickle" in refused(folder, target)


def test_no_file_of_models_calls_a_reader_of_pickles() -> None:
    folder = Path(formats.__file__).parents[1]
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert called not in ("torch.load", "torch.serialization.load"), file
            assert not {"pickle", "dill", "joblib", "shelve"} & {*names}, file
