"""Fuzz tests of drafter folders: every file, mutated, loads or is refused."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.models import formats
from outrider.models.drafter import Drafter
from outrider.models.formats import mtp_layouts
from outrider.models.formats.mtp_merge import merge_into_target
from tests import tiny
from tests.mutations import fuzz, mutated_json, mutated_safetensors, replace_file
from tests.outside import Case

pytestmark = pytest.mark.untyped
ERRORS = (ConfigError, RunError)
CASES = [
    Case("eagle3", "native", {"layers": 2}, False), Case("medusa", "native", {}, False),
    Case("mtp", "native", {}, False), Case("draft_lm", "native", {}, False),
    Case("eagle", "native", {}, False),
    Case("eagle3", "sglang", {"fc_norm": True, "feedback": "normed"}, False),
    Case("eagle3", "vllm", {}, False), Case("eagle3", "speculators", {"head_dim": 12}, False),
    Case("eagle", "eagle", {}, True), Case("eagle", "sglang", {}, True),
    Case("hass", "vllm", {"bias": False}, True), Case("medusa", "medusa", {}, True),
    Case("medusa", "vllm", {"res_layers": 2}, False), Case("mtp", "deepseek", {}, True),
    Case("mtp", "qwen3_next", {"depths": 1}, True),
    Case("mtp", "speculators", {"depths": 1, "qk_norm": True}, True),
    Case("draft_lm", "transformers", {}, True),
]  # fmt: skip
NAMES = [f"{case.name}-{case.word}" for case in CASES]


class Folders:
    """A target, its states for a short text, and a folder of each format, held in memory."""

    def __init__(self, root: Path) -> None:
        self.target, self.root = tiny.target(hidden_size=16, intermediate_size=16), root
        self.files: dict[str, dict[str, bytes]] = {}
        for name, case in zip(NAMES, CASES, strict=True):
            drafter = case.drafter(self.target).eval()
            config = tiny.config(case.name, **case.changes)
            case.format.write(drafter, self.target, config, root / name)
            self.files[name] = {file.name: file.read_bytes() for file in (root / name).iterdir()}
        self.present = {name: dict(files) for name, files in self.files.items()}
        for name in NAMES:
            self.load_and_use(name, {})
        self.home = root / "target"
        self.target.model.save_pretrained(self.home)

    def weights(self, name: str) -> str:
        """The name of the weight file."""
        return next(file for file in self.files[name] if file.endswith(".safetensors"))

    def load_and_use(self, name: str, changes: dict[str, bytes | None]) -> None:
        """Load the drafter with some files replaced or removed, and draft two tokens."""
        self.write(name, {**self.files[name], **changes})
        try:
            drafter, config = formats.load(self.root / name, self.target)
        except ERRORS as error:
            str(error).encode()
            return
        json.dumps(asdict(config), allow_nan=False)
        self.draft(drafter)

    def write(self, name: str, files: Mapping[str, bytes | None]) -> None:
        """Give the folder these files alone; write those that it does not have."""
        present = self.present[name]
        for file in present.keys() | files.keys():
            if files.get(file) != present.get(file):
                replace_file(self.root / name / file, files.get(file))
        self.present[name] = {file: data for file, data in files.items() if data is not None}

    def draft(self, drafter: Drafter) -> None:
        ids = torch.tensor([[5, 40, 17, 23, 9]])
        positions = torch.arange(5)[None]
        self.target.set_taps(drafter.taps)
        none = torch.zeros_like(ids)
        trace = self.target.trace(ids, none.bool(), none, positions)
        state = drafter.absorb(None, tiny.slice_trace(trace, slice(0, 1), slice(0, 4)))
        for depth in range(1, min(drafter.max_depth, 2) + 1):
            rows, state = drafter.step(state, depth, torch.tensor([3]), torch.tensor([0]))
            assert rows.shape == (1, len(drafter.vocab))
            tokens = drafter.vocab.to_target(rows.nan_to_num().argmax(-1))
            assert (drafter.vocab.to_draft(tokens) >= 0).all()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    made = Folders(tmp_path_factory.mktemp("drafters"))
    with pytest.MonkeyPatch.context() as patch:  # weights that a file then replaces
        patch.setattr("torch.nn.init.normal_", lambda tensor, *_, **__: tensor)
        yield made


@pytest.mark.parametrize("kind", ["native", "eagle3", "eagle|hass", "medusa", "mtp", "draft_lm"])
@fuzz(data=st.data())
def test_settings_of_a_drafter(folders: Folders, kind: str, data: st.DataObject) -> None:
    """config.json; where one exists, without outrider.json in every second example."""
    same_reader = [n for n in NAMES if re.search(f"^({kind})-|-{kind}$", n)]
    name = data.draw(st.sampled_from(same_reader))
    config = json.loads(folders.files[name]["config.json"])
    changes: dict[str, bytes | None] = {"config.json": data.draw(mutated_json(config))}
    if "outrider.json" in folders.files[name] and data.draw(st.booleans()):
        changes["outrider.json"] = None
    folders.load_and_use(name, changes)


@fuzz(data=st.data(), name=st.sampled_from([n for n in NAMES if "native" not in n]))
def test_outrider_json(folders: Folders, name: str, data: st.DataObject) -> None:
    content = json.loads(folders.files[name]["outrider.json"])
    folders.load_and_use(name, {"outrider.json": data.draw(mutated_json(content))})


@fuzz(data=st.data(), name=st.sampled_from(NAMES))
def test_weight_files(folders: Folders, name: str, data: st.DataObject) -> None:
    file = folders.weights(name)
    content = data.draw(mutated_safetensors(folders.files[name][file]))
    folders.load_and_use(name, with_weights(folders, name, content))


@fuzz(data=st.data(), name=st.sampled_from(NAMES))
def test_tensors(folders: Folders, name: str, data: st.DataObject) -> None:
    """Names, shapes, dtypes and values of tensors."""
    tensors = load(folders.files[name][folders.weights(name)])
    keys = st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=2, unique=True)
    for key in data.draw(keys):
        mutate_tensor(tensors, key, data)
    folders.load_and_use(name, with_weights(folders, name, save(tensors)))


@fuzz(data=st.data(), name=st.sampled_from([n for n in NAMES if n.startswith("eagle3")]))
def test_draft_vocabularies(folders: Folders, name: str, data: st.DataObject) -> None:
    tensors = load(folders.files[name][folders.weights(name)])
    keys = sorted(key for key in tensors if key.endswith(("d2t", "t2d")))
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, unique=True)):
        tensors[key] = change_values(tensors[key], data)
    folders.load_and_use(name, with_weights(folders, name, save(tensors)))


@fuzz(
    data=st.data(), name=st.sampled_from(["eagle3-sglang", "medusa-vllm", "draft_lm-transformers"])
)
def test_index_of_a_drafter(folders: Folders, name: str, data: st.DataObject) -> None:
    """The weights are in one shard of another name."""
    weights = folders.files[name]["model.safetensors"]
    index = {
        "metadata": {"total_size": 4},
        "weight_map": dict.fromkeys(sorted(load(weights)), "a.safetensors"),
    }
    folders.load_and_use(
        name,
        {
            "model.safetensors": None,
            "outrider.json": None,
            "a.safetensors": weights,
            "model.safetensors.index.json": data.draw(mutated_json(index)),
        },
    )


@fuzz(data=st.data(), name=st.sampled_from(["mtp-deepseek", "mtp-qwen3_next"]))
def test_modules_for_a_target(folders: Folders, name: str, data: st.DataObject) -> None:
    """MTP modules that a new drafter starts from, or that are merged into their target."""
    files: dict[str, bytes | None] = {**folders.files[name]}
    if data.draw(st.booleans()):
        config = json.loads(folders.files[name]["config.json"])
        files["config.json"] = data.draw(mutated_json(config))
    else:
        tensors = load(folders.files[name]["model.safetensors"])
        mutate_tensor(tensors, data.draw(st.sampled_from(sorted(tensors))), data)
        files["model.safetensors"] = save(tensors)
    folders.write(name, files)
    with suppress(*ERRORS):
        assert mtp_layouts.read_modules(folders.root / name, folders.target.num_layers)
    with suppress(*ERRORS):
        merge_into_target(folders.root / name, folders.home, folders.root / "merged")


def with_weights(folders: Folders, name: str, data: bytes) -> dict[str, bytes | None]:
    """Replace the weights, with their hash in config.json, and without outrider.json."""
    out: dict[str, bytes | None] = {folders.weights(name): data, "outrider.json": None}
    config = json.loads(folders.files[name]["config.json"])
    if "sha256" in config:
        config["sha256"] = hashlib.sha256(data).hexdigest()
        out["config.json"] = json.dumps(config).encode()
    return out


DTYPES = [
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool,
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip


def mutate_tensor(tensors: dict[str, Tensor], key: str, data: st.DataObject) -> None:
    """Remove, rename, reshape or convert one tensor, or change its values."""
    action = data.draw(st.sampled_from(["remove", "rename", "reshape", "convert", "values"]))
    value = tensors[key]
    if action in ("remove", "rename"):
        del tensors[key]
    if action == "rename":
        names = ["", "x", "model." + key, key + ".weight", "layers.9.x", "9" * 30 + ".0.weight"]
        names += ["model.layers.-1.eh_proj.weight", "mtp.fc.weight", "midlayer.x", "\0", "fc.bias"]
        tensors[data.draw(st.sampled_from(names))] = value
    if action == "reshape":
        shapes = [value.flatten(), value.flatten()[:0], value.sum(), value[None], value[:1]]
        shapes += [
            value.mT.contiguous() if value.ndim > 1 else value[:-1],
            value.new_zeros(0, 10**6),
        ]
        tensors[key] = data.draw(st.sampled_from(shapes)).contiguous().clone()
    if action == "convert":
        tensors[key] = value.to(data.draw(st.sampled_from(DTYPES)))
    if action == "values":
        tensors[key] = change_values(value, data)


def change_values(value: Tensor, data: st.DataObject) -> Tensor:
    """Change some values, or the order of the rows."""
    flat = value.flatten().clone()
    big = [float("nan"), float("inf"), 1e30] if value.is_floating_point() else [2**62, -(2**63)]
    numbers = st.sampled_from([0, 1, -1, 61, 10**6, *big])
    for index in data.draw(st.lists(st.integers(0, len(flat) - 1), max_size=4)):
        flat[index] = data.draw(numbers)
    order = data.draw(st.sampled_from(["same", "same", "reversed"]))
    return (flat.flip(0) if order == "reversed" else flat).reshape(value.shape)
