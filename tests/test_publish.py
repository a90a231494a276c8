"""A published folder is the run's drafter: exported, decoded with, checked by its own verify.py."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import sha256_of
from outrider.eval.publish.bundle import FAMILIES, verifier
from outrider.eval.publish.round_trip import Proof, Rounds, refuse_other
from outrider.eval.publish.run import export, refuse
from outrider.eval.publish.serve_commands import serving
from outrider.models import drafters, formats
from outrider.models.formats.atomic_folder import write_weights
from outrider.models.target import Target
from tests import outside, tiny
from tests.outside import CASES, Case

PROMPTS = [[5, 40, 17, 23, 9], [11, 3]]
TOKENS = 16
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def exported(case: Case, target: Target, folder: Path) -> str:
    drafter = case.drafter(target)
    cfg = getattr(drafter, "cfg", None) or tiny.config(case.name, **case.changes)
    proof = Proof(target, drafter, PROMPTS, TOKENS, min(cfg.depths, drafter.reach))
    return export(case.format, cfg, proof, folder, str)


def problems(folder: Path) -> list[str]:
    """What verify.py of the folder finds."""
    room = runpy.run_path(str(folder / "verify.py"))
    found: list[str] = room["check"](room["FAMILY"], folder)[0]
    return found


# ---- every drafter in every format ---------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_drafter_is_exported_verified_and_read_back(
    case: Case, target: Target, tmp_path: Path
) -> None:
    """`export` raises unless tokens, accepted guesses and verify.py agree."""
    said = exported(case, target, tmp_path / "out")
    assert f"{2 * len(PROMPTS) * TOKENS} tokens" in said
    assert formats.recognise(tmp_path / "out") is case.format
    read, cfg = formats.load(tmp_path / "out", target)
    assert cfg.name == case.name
    outside.same(case.drafter(target), read)


def test_a_drafter_without_a_checker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"It has no checker"):
        refuse("cell", "native")
    assert set(FAMILIES) <= set(drafters.names())


@pytest.mark.parametrize("name", ["eagle", "mtp", "medusa"])
def test_heads_and_embeddings_of_another_family_are_borrowed_rightly(
    name: str, tmp_path: Path
) -> None:
    """Gemma scales its embedding and caps its logits."""
    of = tiny.target("gemma2")
    case = Case(name, "native", {"own_heads": False}, True)
    assert "off by" in exported(case, of, tmp_path / "out")


def test_a_drafter_that_changes_its_target_is_compared_on_the_changed_one(tmp_path: Path) -> None:
    of = tiny.target()
    changes: dict[str, Any] = {"adapter_rank": 2, "draft_vocab_size": None}
    drafter = outside.scrambled(tiny.drafter("medusa", of, outside.vocab(True), **changes))
    before = tiny.plain(of, PROMPTS[0], TOKENS)
    assert drafter.change(of)
    proof = Proof(of, drafter, PROMPTS, TOKENS, tiny.DEPTHS)
    assert proof.wanted[0].ids != before
    cfg = tiny.config("medusa", **changes)
    export(formats.find("native", "medusa"), cfg, proof, tmp_path / "out", str)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_checker_needs_torch_safetensors_and_transformers_alone(name: str) -> None:
    text = verifier(name)
    lines = [line.split() for line in text.splitlines() if line.lstrip().startswith("from ")]
    lines += [line.split() for line in text.splitlines() if line.startswith("import ")]
    used = {words[1].partition(".")[0] for words in lines} - sys.stdlib_module_names
    assert used <= {"torch", "safetensors", "transformers"}
    assert ("transformers" in used) == (name == "draft_lm")


# ---- what verify.py says of a damaged folder -----------------------------------------------------

PLAIN = [Case("eagle3", "sglang", {}, False), Case("eagle3", "vllm", {}, False)]
EAGLE, MTP = Case("eagle", "vllm", {"bias": False}, True), Case("mtp", "deepseek", {}, True)
MEDUSA, LM = Case("medusa", "vllm", {}, False), Case("draft_lm", "transformers", {}, True)
NEXT = Case("mtp", "qwen3_next", {"depths": 1}, True)
NATIVE = Case("eagle3", "native", {}, False)
NORMED = Case("eagle3", "vllm", {"feedback": "normed"}, False)


@pytest.fixture(scope="module")
def shelf(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good folder of each kind."""
    shelf = tmp_path_factory.mktemp("shelf")
    for case in (*PLAIN, EAGLE, MTP, MEDUSA, LM, NEXT, NATIVE, NORMED):
        exported(case, target, shelf / str(case))
    return shelf


def weights(change: Callable[[Weights], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def rename(tensors: Weights) -> None:
    tensors["midlayer.hidden_norm_.weight"] = tensors.pop("midlayer.hidden_norm.weight")


def swap(*keys: str) -> Callable[[Path], None]:
    def halves(tensors: Weights) -> None:
        for key in keys:
            tensors[key] = torch.cat(tensors[key].chunk(2, dim=1)[::-1], dim=1).contiguous()

    return weights(halves)


def rows(key: str) -> Callable[[Path], None]:
    return weights(lambda w: w.update({key: w[key].roll(1, 0).contiguous()}))


def reversed_taps(tensors: Weights) -> None:
    parts = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat(parts[::-1], dim=1).contiguous()


def shift(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    name = "eagle_aux_hidden_state_layer_ids"
    for part in (config, config.get("eagle_config", {})):
        if name in part:
            part[name] = [number + 1 for number in part[name]]
    (folder / "config.json").write_text(json.dumps(config))


def say(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        outside.edit(folder, **fields)

    return apply


def truncate_a_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_weights(folder, tensors, "model", 4000)
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-50])


def disguise(folder: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, folder / "model.safetensors")


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


QKV = [f"midlayer.self_attn.{x}_proj.weight" for x in "qkv"]
EDGE = "model.layers.4.embed_tokens.weight"
DAMAGES: list[tuple[str, Case, Callable[[Path], None], str]] = [
    ("renamed key", PLAIN[0], weights(rename), r"unknown \(a renamed layers.0.hidden_norm.weight"),
    ("swapped halves", PLAIN[0], swap(*QKV), "the halves of what its layer reads are swapped"),
    ("swapped halves", EAGLE, swap("fc.weight"), "the halves of what its layer reads are swapped"),
    ("swapped halves", NEXT, swap("mtp.fc.weight"), "the halves of what its layer reads are"),
    ("shifted tap", PLAIN[0], shift, r"a tap is shifted"),
    ("shifted tap", PLAIN[1], shift, r"a tap is shifted"),
    ("taps in another order", PLAIN[1], weights(reversed_taps), "taps in the opposite order"),
    ("dropped d2t", PLAIN[0], weights(lambda w: w.pop("d2t")), "d2t is missing"),
    ("moved d2t", PLAIN[0], weights(lambda w: w["d2t"].add_(1)), "d2t and t2d do not name"),
    ("moved token_map", MEDUSA, weights(lambda w: w["token_map"].sub_(1)), "ids were changed"),
    ("truncated shard", PLAIN[0], truncate_a_shard, "truncated or damaged"),
    ("pickle in disguise", PLAIN[0], disguise, "a pickle in disguise; it is not opened"),
    ("no weights", PLAIN[0], remove("model.safetensors"), "there is no file of weights"),
    ("no config", PLAIN[0], remove("config.json"), "config.json cannot be read"),
    ("no golden", PLAIN[0], remove("golden.json"), "golden.json cannot be read"),
    ("field gone", PLAIN[0], say(num_attention_heads=None), "KeyError 'num_attention_heads'"),
    ("other heads", PLAIN[0], say(head_dim=16), "config.json asks for"),
    ("other base", PLAIN[0], say(rope_parameters={"rope_theta": 500.0}), "was changed"),
    ("fed back raw", NORMED, say(norm_output=False), "another state is fed back"),
    ("residual", PLAIN[1], say(norm_before_residual=True), "was changed"),
    ("other embedding", MTP, rows(EDGE), "embed_tokens.weight is not the target's embedding"),
    ("other embedding", EAGLE, rows("embed_tokens.weight"), "is not the target's embedding"),
    ("modules", MTP, say(num_nextn_predict_layers=2), "stages.2.* is unknown"),
    ("norm not shifted", NEXT, weights(lambda w: w["mtp.norm.weight"].add_(1)), "was changed"),
    ("a head", MEDUSA, rows("lm_heads.1.weight"), "its guesses of depths 2 differ"),
    ("one number", NATIVE, weights(lambda w: w["fc.weight"][0].mul_(-1)), "was changed"),
    ("a layer", LM, weights(lambda w: w["model.norm.weight"].mul_(-1)), "was changed"),
    ("other sizes", LM, say(intermediate_size=20), "config.json is not understood|mismatched"),
    ("renamed", LM, weights(lambda w: w.update({"x": w.pop("model.norm.weight")})), "missing in"),
]


@pytest.mark.parametrize("sealed", [False, True], ids=["", "with hashes to suit"])
@pytest.mark.parametrize(
    ("case", "damage", "cause"), [d[1:] for d in DAMAGES], ids=[f"{d[0]} {d[1]}" for d in DAMAGES]
)
def test_damage_is_named_by_its_cause(
    shelf: Path,
    tmp_path: Path,
    case: Case,
    damage: Callable[[Path], None],
    cause: str,
    sealed: bool,
) -> None:
    """Whether or not somebody made the hashes suit."""
    folder = tmp_path / "out"
    shutil.copytree(shelf / str(case), folder)
    assert problems(folder) == []
    damage(folder)
    if sealed and (folder / "golden.json").exists():
        golden = json.loads((folder / "golden.json").read_text())
        hashed = {f.name: sha256_of(f) for f in folder.iterdir() if f.name in golden["sha256"]}
        (folder / "golden.json").write_text(json.dumps({**golden, "sha256": hashed}))
    found = problems(folder)
    assert re.search(cause, found[0]), found
    if not sealed and (folder / "golden.json").exists():
        assert "its sha256 differs" in found[-1] or "is missing" in found[-1]


def test_golden_numbers_that_are_not_all_there_are_told(shelf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(shelf / str(PLAIN[0]), folder)
    golden = json.loads((folder / "golden.json").read_text())
    (folder / "golden.json").write_text(json.dumps({**golden, "sha256": {}, "taps": None}))
    assert problems(folder)[0].startswith("config.json has it read the outputs of layers")
    (folder / "golden.json").write_text(json.dumps({k: golden[k] for k in ("format", "drafter")}))
    assert problems(folder) == ["golden.json lacks sha256"]


def test_a_card_may_be_edited(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf / str(EAGLE), tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("other words")
    assert problems(tmp_path / "out") == []


ALONE = """
import runpy, sys
sys.modules["outrider"] = None  # an import of it is an error
sys.argv = ["verify.py"]
runpy.run_path("verify.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", [PLAIN[0], LM], ids=str)
def test_verify_runs_where_outrider_is_not(shelf: Path, tmp_path: Path, case: Case) -> None:
    folder = tmp_path / "out"
    shutil.copytree(shelf / str(case), folder)
    words = [sys.executable, "-I", "-c", ALONE]
    good = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith(f"OK: {case.name} for llama, format {case.format.words[0]}")
    (folder / "config.json").write_text("{}")
    bad = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert bad.stdout.startswith("WRONG: ")
    assert "Traceback" not in bad.stderr


# ---- the proof -----------------------------------------------------------------------------------


def test_other_tokens_and_other_accepted_guesses_are_told_apart() -> None:
    ours = [Rounds("chain", [1, 2, 3], [1, 0])]
    refuse_other(ours, ours)
    with pytest.raises(RunError, match="tokens of answer 0"):
        refuse_other(ours, [Rounds("chain", [1, 2, 4], [1, 0])])
    with pytest.raises(RunError, match="accepted guesses of answer 0"):
        refuse_other(ours, [Rounds("chain", [1, 2, 3], [0, 1])])


def test_a_drafter_that_guesses_worse_is_not_the_runs(tmp_path: Path) -> None:
    """Half trained, so that guesses are accepted; what is held against it is another one."""
    of, _, drafter = tiny.half_trained("eagle3", "llama")
    prompts = [list(prompt) for prompt in tiny.PROMPTS]
    proof = Proof(of, drafter, prompts, TOKENS, tiny.DEPTHS)
    assert any(any(rounds.accepted) for rounds in proof.wanted)
    form, cfg = formats.find("vllm", "eagle3"), drafter.cfg
    export(form, cfg, proof, tmp_path / "good", str)
    untrained = tiny.drafter("eagle3", of, tiny.vocab(tiny.VOCAB))
    form.write(untrained, of, cfg, tmp_path / "other")
    with pytest.raises(RunError, match="accepted guesses of answer"):
        proof.hold(tmp_path / "other")


def test_a_text_too_short_for_the_depths_is_refused(target: Target, tmp_path: Path) -> None:
    drafter = PLAIN[0].drafter(target)
    proof = Proof(target, drafter, [[5]], 3, tiny.DEPTHS)
    with pytest.raises(RunError, match="too short to compare 3 depths"):
        export(PLAIN[0].format, tiny.config("eagle3"), proof, tmp_path / "out", str)


# ---- what engines are told -----------------------------------------------------------------------

LEGAL = [
    (PLAIN[0], "any number works", "--speculative-num-steps 3"),
    (PLAIN[1], "any number works", '"method": "eagle3"'),
    (Case("hass", "vllm", {"bias": False}, True), "any number works", '"method": "eagle"'),
    (MEDUSA, "3, exactly", '"method": "medusa"'),
    (MTP, "3 or fewer", '"method": "mtp"'),
    (LM, "any number works", '"method": "draft_model"'),
]


@pytest.mark.parametrize(("case", "legal", "part"), LEGAL, ids=[str(case[0]) for case in LEGAL])
def test_engines_are_told_how_deep_they_may_draft(
    case: Case, legal: str, part: str, target: Target
) -> None:
    drafter = case.drafter(target)
    cfg = getattr(drafter, "cfg", None)
    found = serving(case.format.words[0], drafter, cfg, "me/draft", "them/target", "tiny")
    assert found.legal.startswith(legal)
    assert any(part in text for _, text in found.commands)
    for _, text in found.commands:
        for said in re.findall(r"--speculative-config '(.*)'", text):
            assert json.loads(said)["num_speculative_tokens"] == found.tokens == 3
        for steps, tokens in re.findall(r"num-steps (\d+) .*draft-tokens (\d+)", text):
            assert int(tokens) == int(steps) + 1
