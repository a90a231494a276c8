"""A published folder holds the run's drafter: exported, decoded with, checked by its verify.py."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import sha256_of
from outrider.eval.publish.reference_outputs import VERIFY, compare_outputs
from outrider.eval.publish.round_trip import DecodedAnswer, RoundTrip, require_equal
from outrider.eval.publish.run import export_folder
from outrider.eval.publish.serve_commands import serve_commands
from outrider.models import formats
from outrider.models.formats.atomic_folder import write_weights
from outrider.models.formats.external import write_sidecar
from outrider.models.target.load import TINY
from outrider.models.target.target import Target
from tests import outside, tiny
from tests.outside import CASES, Case

PROMPTS = [[5, 40, 17, 23, 9], [11, 3]]
TOKENS = 16
Weights = dict[str, Tensor]
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@cache
def tokenizer() -> Any:
    return hf.AutoTokenizer.from_pretrained(TINY)


def export(case: Case, target: Target, folder: Path) -> str:
    drafter = case.drafter(target)
    cfg = getattr(drafter, "cfg", None) or tiny.config(case.name, **case.changes)
    trip = RoundTrip(target, drafter, PROMPTS, TOKENS, min(cfg.depths, drafter.max_depth))
    return export_folder(case.format, cfg, trip, folder, tokenizer())


def file_problems(folder: Path) -> list[str]:
    """Return what verify.py of the folder finds without Outrider."""
    problems: list[str] = runpy.run_path(str(folder / "verify.py"))["check_files"](folder)[0]
    return problems


def drafter_problem(folder: Path, target: Target) -> str:
    """Return why Outrider refuses the folder or its reference outputs; "" if it does not."""
    try:
        compare_outputs(folder, formats.load(folder, target)[0], target)
    except RunError as error:
        return error.message
    return ""


# ---- every drafter in every format ---------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_export_round_trip(case: Case, target: Target, tmp_path: Path) -> None:
    """`export_folder` raises unless tokens, accepted draft tokens and verify.py agree."""
    summary = export(case, target, tmp_path / "out")
    assert f"{2 * len(PROMPTS) * TOKENS} tokens" in summary
    assert "golden logits: " in summary
    assert formats.recognise(tmp_path / "out") is case.format
    read, cfg = formats.load(tmp_path / "out", target)
    assert cfg.name == case.name
    outside.assert_equal_weights(case.drafter(target), read)
    assert weights_for_engines(tmp_path / "out") == outside.stored_names(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists() == (case.word == "transformers")


def weights_for_engines(folder: Path) -> set[str]:
    """Return what an engine loads: every tensor of every weight file beside config.json.

    vLLM globs *.safetensors, then *.bin and *.pt, and reads an index only to leave out files.
    """
    others = ("*.bin", "*.pt", "*.pth", "*.gguf")
    assert not [f.name for pattern in others for f in folder.glob(pattern)]
    return set(outside.weights(folder))


def test_reference_outputs_beside_the_weights_would_be_read(target: Target, tmp_path: Path) -> None:
    """Negative control: the layout of earlier versions, which vLLM did not load."""
    folder = tmp_path / "out"
    export(SGLANG, target, folder)
    assert weights_for_engines(folder) == outside.stored_names(folder)
    shutil.copy(folder / "golden" / "outputs.safetensors", folder / "golden.safetensors")
    assert weights_for_engines(folder) != outside.stored_names(folder)


@pytest.mark.parametrize("name", ["eagle", "mtp", "medusa"])
def test_reference_uses_scaled_embeddings_and_capped_logits(name: str, tmp_path: Path) -> None:
    """Gemma scales its embedding and caps its logits."""
    gemma = tiny.target("gemma2")
    case = Case(name, "native", {"own_heads": False}, True)
    assert "largest difference" in export(case, gemma, tmp_path / "out")


def test_drafter_that_patches_its_target_is_compared_on_the_patched_target(tmp_path: Path) -> None:
    of = tiny.target()
    changes: dict[str, Any] = {"adapter_rank": 2, "draft_vocab_size": None}
    drafter = outside.randomise(tiny.drafter("medusa", of, outside.vocab(True), **changes))
    before = tiny.greedy_tokens(of, PROMPTS[0], TOKENS)
    assert drafter.patch_target(of)
    trip = RoundTrip(of, drafter, PROMPTS, TOKENS, tiny.DEPTHS)
    assert trip.expected[0].ids != before
    cfg = tiny.config("medusa", **changes)
    export_folder(formats.find("native", "medusa"), cfg, trip, tmp_path / "out", tokenizer())


# ---- verify.py on a damaged folder ---------------------------------------------------------------

SGLANG, VLLM = Case("eagle3", "sglang", {}, False), Case("eagle3", "vllm", {}, False)
EAGLE, MTP = Case("eagle", "vllm", {"bias": False}, True), Case("mtp", "deepseek", {}, True)
MEDUSA, LM = Case("medusa", "vllm", {}, False), Case("draft_lm", "transformers", {}, True)
NEXT = Case("mtp", "qwen3_next", {"depths": 1}, True)
NATIVE = Case("eagle3", "native", {}, False)
NORMED = Case("eagle3", "vllm", {"feedback": "normed"}, False)
VALID = (SGLANG, VLLM, EAGLE, MTP, MEDUSA, LM, NEXT, NATIVE, NORMED)


@pytest.fixture(scope="module")
def exported(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid folder of each kind."""
    exported = tmp_path_factory.mktemp("exported")
    for case in VALID:
        export(case, target, exported / str(case))
    return exported


@pytest.fixture
def folder(exported: Path, tmp_path: Path, case: Case) -> Path:
    """A copy of the valid folder of `case`."""
    return Path(shutil.copytree(exported / str(case), tmp_path / "out"))


def update_hashes(folder: Path, tensors: bool = True) -> None:
    """Recompute the hashes, and the tensors of outrider.json, from the files."""
    if tensors and (folder / "config.json").exists():
        content = json.loads((folder / "outrider.json").read_text())
        write_sidecar(folder, {k: v for k, v in content.items() if k not in ("sha256", "tensors")})
    golden = json.loads((folder / "golden.json").read_text())
    names = (name for name in golden["sha256"] if (folder / name).exists())
    hashes = {name: sha256_of(folder / name) for name in names}
    (folder / "golden.json").write_text(json.dumps({**golden, "sha256": hashes}))


def weights(change: Callable[[Weights], object], file: str = "model.safetensors") -> Damage:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, {"format": "pt"})

    return apply


def rename(tensors: Weights) -> None:
    tensors["midlayer.hidden_norm_.weight"] = tensors.pop("midlayer.hidden_norm.weight")


def swap(*keys: str) -> Damage:
    def halves(tensors: Weights) -> None:
        for key in keys:
            tensors[key] = torch.cat(tensors[key].chunk(2, dim=1)[::-1], dim=1).contiguous()

    return weights(halves)


def roll(key: str) -> Damage:
    return weights(lambda w: w.update({key: w[key].roll(1, 0).contiguous()}))


def reverse_taps(tensors: Weights) -> None:
    parts = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat(parts[::-1], dim=1).contiguous()


def flip_bit(bit: int) -> Callable[[Weights], None]:
    """Flip one bit of the first number of fc."""

    def apply(tensors: Weights) -> None:
        tensors["fc.weight"].view(torch.int32)[0, 0] ^= 1 << bit

    return apply


def cut_rows(tensors: Weights) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:-1].contiguous()


def to_half(tensors: Weights) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].half()


def shift_taps(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    name = "eagle_aux_hidden_state_layer_ids"
    for part in (config, config.get("eagle_config", {})):
        if name in part:
            part[name] = [number + 1 for number in part[name]]
    (folder / "config.json").write_text(json.dumps(config))


def configure(**fields: Any) -> Damage:
    return lambda folder: outside.edit_config(folder, **fields)


def truncate_a_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_weights(folder, tensors, "model", 4000)
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-50])


def pickle_weights(folder: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, folder / "model.safetensors")


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


TENSORS: list[tuple[str, Case, Damage, str]] = [
    ("name", SGLANG, weights(rename), "hidden_norm.weight: the tensor is missing"),
    ("extra", SGLANG, weights(lambda w: w.update(x=torch.ones(1))), "x: an unknown tensor"),
    ("shape", SGLANG, weights(cut_rows), r"fc.weight: .*\[31, 96\].* expected .*\[32, 96\]"),
    ("dtype", SGLANG, weights(to_half), "fc.weight: .*F16.* expected .*F32"),
    ("truncated", SGLANG, truncate_a_shard, "damaged, or not safetensors"),
    ("pickle", SGLANG, pickle_weights, "damaged, or not safetensors"),
    ("no weights", SGLANG, remove("model.safetensors"), "holds no weights"),
    ("no sidecar", SGLANG, remove("outrider.json"), "outrider.json: cannot be read"),
    ("no list", NATIVE, lambda f: (f / "outrider.json").write_text("{}"), "tensors is missing"),
    ("no golden", SGLANG, remove("golden.json"), "golden.json: cannot be read"),
    ("empty golden", SGLANG, lambda f: (f / "golden.json").write_text("{}"), "sha256 is missing"),
]


@pytest.mark.parametrize("updated", [False, True], ids=["", "hashes updated"])
@pytest.mark.parametrize(
    ("case", "damage", "cause"), [d[1:] for d in TENSORS], ids=[d[0] for d in TENSORS]
)
def test_verify_detects_damaged_files_without_outrider(
    folder: Path, damage: Damage, cause: str, updated: bool
) -> None:
    assert file_problems(folder) == []
    damage(folder)
    if updated and "golden" not in cause and "sha256" not in cause:
        update_hashes(folder, tensors=False)
    problems = file_problems(folder)
    assert any(re.search(cause, problem) for problem in problems), problems


@pytest.mark.parametrize("case", VALID, ids=str)
def test_verify_detects_one_flipped_bit_in_any_file(folder: Path, case: Case) -> None:
    """Negative control: the lowest bit of the last byte of each file, one after the other."""
    names = json.loads((folder / "golden.json").read_text())["sha256"]
    assert {"config.json", "outrider.json", "golden/outputs.safetensors"} < names.keys()
    for name in names:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert f"{name}: the sha256 differs from the published file's" in file_problems(folder)
        (folder / name).write_bytes(data)
    assert file_problems(folder) == []


QKV = [f"midlayer.self_attn.{x}_proj.weight" for x in "qkv"]
EDGE = "model.layers.4.embed_tokens.weight"
GOLDEN = "golden/outputs.safetensors"
DIFFERS = "of the drafter in the folder differs by"
DAMAGES: list[tuple[str, Case, Damage, str]] = [
    ("renamed key", SGLANG, weights(rename), r"is it midlayer.hidden_norm.weight"),
    ("one bit", VLLM, weights(flip_bit(30)), DIFFERS),
    ("one bit", NATIVE, weights(flip_bit(0)), "its bytes are not the ones that were written"),
    ("swapped halves", SGLANG, swap(*QKV), DIFFERS),
    ("swapped halves", EAGLE, swap("fc.weight"), DIFFERS),
    ("swapped halves", NEXT, swap("mtp.fc.weight"), DIFFERS),
    ("shifted tap", SGLANG, shift_taps, "a tap is shifted|the files"),
    ("shifted tap", VLLM, shift_taps, "a tap is shifted|the files"),
    ("taps in another order", VLLM, weights(reverse_taps), DIFFERS),
    ("dropped d2t", SGLANG, weights(lambda w: w.pop("d2t")), "d2t is missing"),
    (
        "moved d2t",
        SGLANG,
        weights(lambda w: w["d2t"].add_(1)),
        "d2t, .* does not name tokens",
    ),
    ("moved token_map", MEDUSA, weights(lambda w: w["token_map"].sub_(1)), "token_map must name"),
    ("field gone", SGLANG, configure(num_attention_heads=None), "is .* require"),
    ("other heads", SGLANG, configure(head_dim=16), "config.json and target require"),
    ("other base", SGLANG, configure(rope_parameters={"rope_theta": 500.0}), "two rotary"),
    ("fed back raw", NORMED, configure(norm_output=False), "feedback: normed, and the files raw"),
    ("residual", VLLM, configure(norm_before_residual=True), "and the files"),
    ("other embedding", MTP, roll(EDGE), "differs from the target's"),
    ("other embedding", EAGLE, roll("embed_tokens.weight"), "differs from the target's"),
    ("modules", MTP, configure(num_nextn_predict_layers=2), "has 2 modules, and the weights 3"),
    ("norm not shifted", NEXT, weights(lambda w: w["mtp.norm.weight"].add_(1)), DIFFERS),
    ("a head", MEDUSA, roll("lm_heads.1.weight"), DIFFERS),
    ("a layer", LM, weights(lambda w: w["model.norm.weight"].mul_(-1)), DIFFERS),
    ("other sizes", LM, configure(intermediate_size=20), "size"),
    ("renamed", LM, weights(lambda w: w.update({"x": w.pop("model.norm.weight")})), "lacks"),
    ("golden logits", SGLANG, weights(lambda w: w["logits"][2, 1, 5].add_(0.1), GOLDEN), DIFFERS),
    ("golden tap", SGLANG, weights(lambda w: w["tap.1"].neg_(), GOLDEN), "tap.1 " + DIFFERS),
    ("golden text", SGLANG, weights(lambda w: w["ids"].add_(1), GOLDEN), DIFFERS),
    ("golden is cut", SGLANG, weights(lambda w: w.pop("last"), GOLDEN), "does not fit"),
    (
        "golden tokens",
        SGLANG,
        weights(lambda w: w["tokens"].sub_(1), GOLDEN),
        "does not fit|differs",
    ),
]


@pytest.mark.parametrize("updated", [False, True], ids=["", "hashes updated"])
@pytest.mark.parametrize(
    ("case", "damage", "cause"), [d[1:] for d in DAMAGES], ids=[f"{d[0]} {d[1]}" for d in DAMAGES]
)
def test_every_damage_is_detected(
    folder: Path, target: Target, damage: Damage, cause: str, updated: bool
) -> None:
    """verify.py detects it by the hash; with hashes recomputed, Outrider names the cause."""
    assert drafter_problem(folder, target) == ""
    damage(folder)
    if not updated:
        assert file_problems(folder) != []
        return
    update_hashes(folder)
    assert file_problems(folder) == []
    assert re.search(cause, drafter_problem(folder, target))


@pytest.mark.parametrize("case", [EAGLE], ids=str)
def test_card_may_be_edited(folder: Path) -> None:
    (folder / "README.md").write_text("other text")
    assert file_problems(folder) == []


# ---- verify.py as a script -----------------------------------------------------------------------


def test_verify_imports_only_the_standard_library() -> None:
    tree = ast.parse(VERIFY.read_text())
    names = {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
    names |= {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    packages = {str(name).partition(".")[0] for name in names} - sys.stdlib_module_names
    assert not packages


WITHOUT_OUTRIDER = """
import runpy, sys
for name in ("outrider", "torch", "numpy", "transformers"):
    sys.modules[name] = None  # an import of it is an error
sys.argv = ["verify.py", *sys.argv[1:]]
runpy.run_path("verify.py", run_name="__main__")
"""


@pytest.mark.parametrize("case", [SGLANG, LM], ids=str)
def test_verify_runs_without_outrider(folder: Path) -> None:
    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-I", "-c", WITHOUT_OUTRIDER, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    code, text = run()
    assert code == 0
    assert text.startswith("checked: sha256 of ")
    assert "golden logits not checked: no --target is given\nOK" in text
    code, text = run("--target", "tiny")
    assert code == 0
    assert "golden logits not checked: outrider is not installed" in text
    (folder / "config.json").write_text("{}")
    code, text = run("--target", "tiny")
    assert code == 1
    assert "golden logits not checked: the files differ" in text
    assert "WRONG: config.json: the sha256 differs" in text
    assert text.endswith("FAILED\n")


# ---- the round trip ------------------------------------------------------------------------------


def test_require_equal_names_the_first_difference() -> None:
    expected = [DecodedAnswer("chain", [1, 2, 3], [1, 0])]
    require_equal(expected, expected)
    with pytest.raises(RunError, match="tokens of answer 0"):
        require_equal(expected, [DecodedAnswer("chain", [1, 2, 4], [1, 0])])
    with pytest.raises(RunError, match="accepted draft tokens of answer 0"):
        require_equal(expected, [DecodedAnswer("chain", [1, 2, 3], [0, 1])])


def test_export_that_drafts_worse_is_refused(tmp_path: Path) -> None:
    """The run's drafter is half trained, so that drafts are accepted; the other is untrained."""
    of, _, drafter = tiny.half_trained("eagle3", "llama")
    prompts = [list(prompt) for prompt in tiny.PROMPTS]
    trip = RoundTrip(of, drafter, prompts, TOKENS, tiny.DEPTHS)
    assert any(any(answer.accepted) for answer in trip.expected)
    form, cfg = formats.find("vllm", "eagle3"), drafter.cfg
    export_folder(form, cfg, trip, tmp_path / "good", tokenizer())
    untrained = tiny.drafter("eagle3", of, tiny.vocab(tiny.VOCAB))
    form.write(untrained, of, cfg, tmp_path / "other")
    with pytest.raises(RunError, match="accepted draft tokens of answer"):
        trip.compare_with_export(tmp_path / "other")


def test_text_too_short_for_the_depths_is_refused(target: Target, tmp_path: Path) -> None:
    trip = RoundTrip(target, SGLANG.drafter(target), [[5]], 3, tiny.DEPTHS)
    with pytest.raises(RunError, match="too short to compare 3 depths"):
        export_folder(SGLANG.format, tiny.config("eagle3"), trip, tmp_path / "out", tokenizer())


# ---- serving -------------------------------------------------------------------------------------

LEGAL = [
    (SGLANG, "any number works", "--speculative-num-steps 3"),
    (VLLM, "any number works", '"method": "eagle3"'),
    (Case("hass", "vllm", {"bias": False}, True), "any number works", '"method": "eagle"'),
    (MEDUSA, "3, exactly", '"method": "medusa"'),
    (MTP, "3 or fewer", '"method": "mtp"'),
    (LM, "any number works", '"method": "draft_model"'),
]


@pytest.mark.parametrize(("case", "legal", "part"), LEGAL, ids=[str(case[0]) for case in LEGAL])
def test_serving_commands_have_accepted_draft_depths(
    case: Case, legal: str, part: str, target: Target
) -> None:
    drafter = case.drafter(target)
    cfg = getattr(drafter, "cfg", None)
    serving = serve_commands(case.format.names[0], drafter, cfg, "me/draft", "them/target", "tiny")
    assert serving.legal.startswith(legal)
    assert any(part in text for _, text in serving.commands)
    assert ("vLLM serves Medusa up to 0.32" in " ".join(serving.notes)) == (case == MEDUSA)
    for _, text in serving.commands:
        for settings in re.findall(r"--speculative-config '(.*)'", text):
            assert json.loads(settings)["num_speculative_tokens"] == 3
        for steps, tokens in re.findall(r"num-steps (\d+) .*draft-tokens (\d+)", text):
            assert int(tokens) == int(steps) + 1
