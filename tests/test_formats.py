"""Every format and drafter: written folders are recognised, read and rewritten exactly."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import sha256_of
from outrider.models import drafters, formats
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats import external
from outrider.models.formats.atomic_folder import write_weights
from outrider.models.formats.weight_folder import WeightFolder
from outrider.models.target.target import Target
from tests import outside, tiny
from tests.outside import CASES, Case

each_case = pytest.mark.parametrize("case", CASES, ids=str)

TABLE = {  # any other drafter has the native format
    "dflash": {"native", "sglang", "specforge", "speculators", "transformers", "vllm", "zlab"},
    "dspark": {"deepspec", "native", "sglang", "speculators", "vllm"},
    "p_eagle": {"native", "speculators", "vllm"},
    "draft_lm": {"native", "sglang", "transformers", "vllm"},
    "eagle": {"eagle", "native", "sglang", "vllm"},
    "eagle3": {"native", "sglang", "specforge", "speculators", "vllm"},
    "hass": {"eagle", "native", "sglang", "vllm"},
    "layerskip": {"native", "transformers"},
    "medusa": {"medusa", "native", "vllm"},
    "mtp": {"deepseek", "native", "qwen3_next", "speculators"},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


# ---- round trips ---------------------------------------------------------------------------------


@each_case
def test_round_trip_is_exact(case: Case, target: Target, tmp_path: Path) -> None:
    drafter = case.drafter(target)
    cfg = getattr(drafter, "cfg", None) or tiny.config(case.name, **case.changes)
    case.format.write(drafter, target, cfg, tmp_path / "out")
    assert formats.recognise(tmp_path / "out") is case.format
    read, read_cfg = case.format.read(tmp_path / "out", target)
    outside.assert_equal_weights(drafter, read)
    if hasattr(cfg, "taps"):
        cfg = dataclasses.replace(cfg, taps=drafter.taps)
    if case.name == "draft_lm":  # transformers adds the name of the class
        cfg, read_cfg = (dataclasses.replace(c, body=None) for c in (cfg, read_cfg))
    assert read_cfg == cfg
    pairs = zip(outside.logits(drafter, target), outside.logits(read, target), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@each_case
def test_rewritten_weights_are_byte_identical(case: Case, target: Target, tmp_path: Path) -> None:
    drafter = case.drafter(target).to(torch.bfloat16)
    first, second = tmp_path / "first", tmp_path / "second"
    case.format.write(drafter, target, getattr(drafter, "cfg", None), first)
    read, cfg = case.format.read(first, target)
    case.format.write(read, target, cfg, second)
    files = sorted(f.name for f in first.iterdir())
    assert files == sorted(f.name for f in second.iterdir())
    for name in files:
        if name.endswith(".safetensors"):
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize("case", [c for c in CASES if c.word != "native"], ids=str)
def test_folder_without_outrider_json_is_read_unless_ambiguous(
    case: Case, target: Target, tmp_path: Path
) -> None:
    """Weights and logits are equal; training settings become the defaults."""
    drafter = case.drafter(target)
    case.format.write(drafter, target, getattr(drafter, "cfg", None), tmp_path / "out")
    (tmp_path / "out" / "outrider.json").unlink()
    if case.word == "sglang" and (case.changes.get("layers") or case.changes.get("feedback")):
        with pytest.raises(RunError, match=r"names suit both|which one is undefined"):
            formats.load(tmp_path / "out", target)
        return
    if case.name == "layerskip":  # a plain model, as any other
        assert formats.recognise(tmp_path / "out") is formats.find("transformers", "draft_lm")
        return
    read, cfg = formats.load(tmp_path / "out", target)
    assert cfg.name == ("eagle" if case.name == "hass" else case.name)
    assert not read.training
    assert not any(p.requires_grad for p in read.parameters())
    ours, theirs = outside.logits(drafter, target), outside.logits(read, target)
    for a, b in zip(ours[:1], theirs[:1], strict=True):  # deeper ones depend on the settings
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", drafters.trained_names())
def test_exported_drafter_decodes_identically(name: str, tmp_path: Path) -> None:
    """A half-trained drafter, exported to every format that holds it."""
    of, answers, drafter = tiny.half_trained(name, "llama")
    expected = rounds(of, drafter)
    assert any(count for _, accepted in expected for count in accepted)
    words = [word for word, why in formats.export_refusals(drafter, name, of).items() if not why]
    assert len(words) > (1 if name in TABLE else 0)
    for word in words:
        cfg = getattr(drafter, "cfg", None)
        formats.find(word, name).write(drafter, of, cfg, tmp_path / word)
        found = rounds(of, formats.load(tmp_path / word, of)[0])
        assert found == expected
        assert [ids for ids, _ in found] == [list(answer) for answer in answers]


def rounds(of: Target, drafter: Drafter) -> list[tuple[list[int], list[int]]]:
    """Return, for every prompt, the output and the number of accepted tokens per round."""
    engine = Engine(of, drafter, DynamicTree(depth=3, width=4, budget=12))
    outs = [engine.generate(prompt, tiny.ANSWER) for prompt in tiny.PROMPTS]
    return [(list(out.ids), list(out.accepted)) for out in outs]


def test_load_converts_dtype(target: Target, tmp_path: Path) -> None:
    drafter = tiny.drafter("eagle3", target)
    formats.find("sglang", "eagle3").write(drafter, target, None, tmp_path / "out")
    read, _ = formats.load(tmp_path / "out", target, torch.bfloat16)
    assert {p.dtype for p in read.parameters()} == {torch.bfloat16}
    assert target.taps == read.taps


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", drafters.trained_names())
@pytest.mark.parametrize("word", formats.format_names())
def test_every_pair_is_supported_or_explained(name: str, word: str) -> None:
    if word in TABLE.get(name, {"native"}):
        form = formats.find(word, name)
        assert word in form.names
        assert form.engines
        return
    with pytest.raises(ConfigError, match=f"format = '{word}'") as caught:
        formats.find(word, name)
    assert "native" in caught.value.fix
    assert "no such format" not in caught.value.why


def test_cases_cover_every_format() -> None:
    covered = {(case.format, case.name) for case in CASES}
    existing = {
        (f, n) for f in formats.all_formats() for n in (f.drafters or drafters.trained_names())
    }
    assert covered == existing


def test_unsupported_pair_is_refused_with_reason() -> None:
    with pytest.raises(ConfigError, match="no Medusa heads; vLLM has"):
        formats.find("sglang", "medusa")
    with pytest.raises(ConfigError, match="inside a copy of their target"):
        formats.find("vllm", "mtp")
    with pytest.raises(ConfigError, match=r"no such format[\s\S]*specforge"):
        formats.find("gguf", "eagle3")


REFUSED: list[tuple[str, str, dict[str, Any], bool, str]] = [
    ("eagle3", "sglang", {"qk_norm": True}, False, "without norms on queries"),
    (
        "eagle3",
        "vllm",
        {"qk_norm": True},
        False,
        "format=speculators, which can name Qwen3's layer",
    ),
    ("eagle3", "sglang", {"taps": (1,)}, False, "single tapped layer"),
    ("eagle3", "sglang", outside.NORMED, False, "residual adds the raw state"),
    *[("eagle3", w, {"taps": (0, 3)}, False, "last decoder layer") for w in ("sglang", "vllm")],
    ("eagle3", "speculators", {"taps": (3,)}, False, "last decoder layer"),
    ("eagle3", "speculators", {"taps": (2, 0)}, False, "in ascending order"),
    *[("eagle", w, {}, False, "draft vocabulary is reduced") for w in ("eagle", "sglang")],
    ("eagle", "vllm", {"bias": False}, False, "draft vocabulary is reduced"),
    ("eagle", "vllm", {}, True, "drops"),
    ("hass", "vllm", {"bias": True}, True, "drops"),
    ("medusa", "medusa", {}, False, "token_map"),
    ("medusa", "medusa", {"res_layers": 2}, True, "layers differ"),
    ("medusa", "vllm", {"adapter_rank": 2, "draft_vocab_size": None}, True, "changes its target"),
    ("mtp", "deepseek", {"feed": "raw"}, True, "after its norm"),
    *[
        ("mtp", w, {"feed": "raw", "mode": "recurrent", "qk_norm": True}, True, "after its norm")
        for w in ("deepseek", "qwen3_next", "speculators")
    ],
    ("mtp", "qwen3_next", {}, True, "layout holds one"),
    ("mtp", "speculators", {"depths": 1}, True, "layers are Qwen3's"),
    ("mtp", "speculators", {"depths": 1}, False, "whole head"),
    ("draft_lm", "transformers", {}, False, "draft vocabulary is reduced"),
]


@pytest.mark.parametrize(("name", "word", "changes", "whole", "why"), REFUSED, ids=str)
def test_drafter_outside_the_format_is_refused(
    target: Target,
    tmp_path: Path,
    name: str,
    word: str,
    changes: dict[str, Any],
    whole: bool,
    why: str,
) -> None:
    drafter = Case(name, word, changes, whole).drafter(target)
    form = formats.find(word, name)
    with pytest.raises(ConfigError, match=why):
        form.write(drafter, target, getattr(drafter, "cfg", None), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert why in formats.export_refusals(drafter, name, target)[form.names[0]]


def test_mtp_export_refuses_scaled_rope(tmp_path: Path) -> None:
    """MTP modules run with the target's rotary embedding; other drafters have their own config."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    scaled = tiny.target(rope_parameters=rope)
    for case in (Case("mtp", "deepseek", {}, True), Case("eagle3", "sglang", {}, False)):
        drafter = case.drafter(scaled)
        assert ("scaled, partial or missing" in case.format.refusal_reason(drafter, scaled)) == (
            case.name == "mtp"
        )
    case.format.write(drafter, scaled, None, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"] is None
    assert config["rope_parameters"]["rope_type"] == "default"


# ---- unknown folders -----------------------------------------------------------------------------


def stored(path: Path, config: dict[str, Any], keys: dict[str, tuple[int, ...]]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({k: torch.ones(shape) for k, shape in keys.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["DominoDraftModel"], "dflash_config": {}}, "is a Domino drafter"),
        ({"speculators_model_type": "xpress"}, "speculators folder of type xpress"),
        ({}, r"no format that Outrider reads; its tensors begin with fc\.weight"),
    ],
)
def test_unknown_folder_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = stored(tmp_path / "f", config, {"fc.weight": (32, 160), "hidden_norm.weight": (32,)})
    with pytest.raises(RunError, match=message):
        formats.recognise(folder)


# ---- pickles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "x.pth"])
def test_pickle_is_refused_with_conversion_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(RunError, match=r"is a pickle[\s\S]*weights_only=True"):
        formats.recognise(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_named_safetensors_is_refused(tmp_path: Path, zipped: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    if zipped:
        torch.save({"fc.weight": torch.ones(2)}, file)
    else:
        file.write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(RunError, match="pickle with the extension"):
        formats.recognise(tmp_path)


def test_header_is_not_mistaken_for_a_pickle(tmp_path: Path) -> None:
    """A header of 640 bytes begins as a pickle does."""
    (tmp_path / "config.json").write_text("{}")
    for size in range(400, 1300, 8):
        about = {"note": "x" * size}
        save_file({"fc.weight": torch.ones(2)}, tmp_path / "model.safetensors", about)
        assert WeightFolder(tmp_path).shapes == {"fc.weight": (2,)}


class _Bomb:
    """Fails the test that unpickles it."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was opened",))


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three files and an index."""
    tensors = {f"part.{i}": torch.full((8, 8), float(i)) for i in range(6)}
    folder = tmp_path / "out"
    folder.mkdir()
    write_weights(folder, tensors, "model", 600)
    (folder / "config.json").write_text("{}")
    external.write_sidecar(folder, {"format": "x"})
    return folder


def test_sharded_weights_round_trip(shards: Path) -> None:
    assert len(list(shards.glob("*.safetensors"))) == 3
    opened = WeightFolder(shards)
    assert set(opened.shapes) == {f"part.{i}" for i in range(6)}
    read = opened.tensors(["part.4", "part.1"])
    assert torch.equal(read["part.4"], torch.full((8, 8), 4.0))
    opened.check_hashes(json.loads((shards / "outrider.json").read_text())["sha256"])


def index_of(shards: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shards / "model.safetensors.index.json").read_text())
    return found


DAMAGES = ["cut", "missing", "moved", "unlisted", "short", "uncounted", "outside", "bit"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_is_named(shards: Path, damage: str) -> None:
    index, names = index_of(shards), sorted(f.name for f in shards.glob("*.safetensors"))
    file = shards / names[1]
    message = names[1]
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
        message += " cannot be read.*truncated"
    elif damage == "missing":
        file.unlink()
    elif damage == "moved":
        index["weight_map"]["part.0"], message = names[1], r"disagree about part\.0"
    elif damage == "unlisted":
        del index["weight_map"]["part.5"]
        message = r"disagree about part\.5"
    elif damage == "short":
        index["metadata"]["total_size"], message = 10**9, "has total_size 1,000,000,000 bytes"
    elif damage == "uncounted":
        index["metadata"], message = ["total_size"], "has no number metadata.total_size"
    elif damage == "outside":
        index["weight_map"]["part.0"], message = "../x.safetensors", "does not map weights to files"
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RunError, match=message):
        WeightFolder(shards).check_hashes(
            json.loads((shards / "outrider.json").read_text())["sha256"]
        )


def test_write_is_atomic(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, drafter = formats.find("sglang", "eagle3"), tiny.drafter("eagle3", target)
    form.write(drafter, target, None, tmp_path / "out")
    before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}

    def full(*_: object) -> None:
        raise RunError("the disk is full", "Free some space.")

    monkeypatch.setattr(external, "write_json", full)
    for name in ("out", "new"):
        with pytest.raises(RunError, match="disk is full"):
            form.write(tiny.drafter("eagle3", target, seed=9), target, None, tmp_path / name)
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("word", ["sglang", "native"])
def test_foreign_folder_is_not_replaced(target: Target, tmp_path: Path, word: str) -> None:
    form, drafter = formats.find(word, "eagle3"), tiny.drafter("eagle3", target)
    form.write(drafter, target, tiny.config("eagle3"), tmp_path / "out")
    form.write(drafter, target, tiny.config("eagle3"), tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"precious": 1}')
    with pytest.raises(RunError, match="not written by Outrider"):
        form.write(drafter, target, tiny.config("eagle3"), tmp_path / "other")
    assert (tmp_path / "other" / "config.json").read_text() == '{"precious": 1}'


# ---- outrider.json -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "vllm"}, "has format vllm"),
        ({"taps": [0, 1, 3]}, "a tap is shifted"),
        ({"joins": ["state", "embedding"]}, "the halves are swapped"),
        ({"drafter": {"feedback": "normed"}}, "has feedback: normed, and the files raw"),
        ({"drafter": {"turbo": 1}}, "out does not fit this version: .*turbo"),
        ({"drafter": [1]}, "not written by Outrider: drafter"),
        ({"sha256": ["0"]}, "not written by Outrider: sha256"),
        ({"turbo": 1}, "was not written by Outrider: .*turbo"),
        ({"target": {"name": "other", "fingerprint": "0"}}, "trained for other"),
        ({"sha256": {"model.safetensors": "0"}}, "not the ones that were written"),
    ],
)
def test_contradicting_outrider_json_is_refused(
    target: Target, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    form, drafter = formats.find("sglang", "eagle3"), tiny.drafter("eagle3", target)
    form.write(drafter, target, None, tmp_path / "out")
    file = tmp_path / "out" / "outrider.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RunError, match=message) as caught:
        formats.load(tmp_path / "out", target)
    assert caught.value.fix


@pytest.mark.parametrize(
    "change", [{"target": "llama"}, {"taps": 3}, {"drafter": []}, {"shape": 1}, {"sha256": "0"}, {}]
)
def test_badly_edited_native_folder_is_refused(
    target: Target, tmp_path: Path, change: dict[str, Any]
) -> None:
    form, drafter = formats.find("native", "eagle3"), tiny.drafter("eagle3", target)
    form.write(drafter, target, None, tmp_path / "out")
    outside.edit_config(tmp_path / "out", **change)
    if not change:  # the draft vocabulary, without which nothing can be read
        file = tmp_path / "out" / "model.safetensors"
        rest = {k: v for k, v in load_file(file).items() if k != "vocab.d2t"}
        save_file(rest, file)
        outside.edit_config(tmp_path / "out", sha256=sha256_of(file))
    with pytest.raises(RunError, match="out") as caught:
        formats.load(tmp_path / "out", target)
    assert caught.value.fix


def test_other_target_is_refused(target: Target, tmp_path: Path) -> None:
    form, drafter = formats.find("sglang", "eagle3"), tiny.drafter("eagle3", target)
    form.write(drafter, target, None, tmp_path / "out")
    with pytest.raises(RunError, match="trained for llama, and this target has other weights"):
        form.read(tmp_path / "out", tiny.target(seed=1))
    (tmp_path / "out" / "outrider.json").unlink()
    with pytest.raises(RunError, match="vocabulary has 61 tokens and the target's 64"):
        form.read(tmp_path / "out", tiny.target(vocab_size=64))
