"""Recipes for published models: their sums, and a short run on a shrunken copy of each target."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from outrider.conf.schema import TargetConfig
from outrider.launch.cli import main
from outrider.launch.step_cost import active_parameters
from outrider.models.target.load import TINY, load_target, meta_model
from outrider.models.target.target import Target

ROOT = Path(__file__).parent.parent
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32}
NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"  # hybrid_override_pattern
KINDS = {"M": "mamba", "E": "moe", "*": "attention"}
# config.json of each target, where it differs from the class's default
TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama31_8b_eagle3": (hf.LlamaConfig, {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}),
    "qwen3_8b_eagle3": (hf.Qwen3Config, {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_key_value_heads": 8}),
    **dict.fromkeys(("qwen3_8b_dflash", "qwen3_8b_dspark"), (hf.Qwen3Config, {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_key_value_heads": 8})),
    "gpt_oss_20b_eagle3": (hf.GptOssConfig, {"num_hidden_layers": 24, "num_local_experts": 32}),
    "qwen3_30b_a3b_eagle3": (hf.Qwen3MoeConfig, {
        **QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8}),
    "deepseek_v3_mtp": (hf.DeepseekV3Config, {}),
    "qwen35_9b_dspark": (hf.Qwen3_5TextConfig, {}),
    "nemotron3_nano_eagle3": (hf.NemotronHConfig, {
        "hidden_size": 2688, "intermediate_size": 1856, "num_key_value_heads": 2,
        "layers_block_type": [KINDS[letter] for letter in NEMOTRON], "mamba_num_heads": 64,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712}),
}  # fmt: skip
# billions of parameters on the models' cards, all and active
CARDS = {"gpt_oss_20b_eagle3": (20.9, 3.6), "qwen3_30b_a3b_eagle3": (30.5, 3.3),
         "deepseek_v3_mtp": (671, 37), "nemotron3_nano_eagle3": (31.6, 3.2)}  # fmt: skip
SHRUNK = {
    "vocab_size": 1536, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16,
    "max_position_embeddings": 512, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
LATENT = {  # of DeepSeek-V3, whose keys have as many heads as its queries
    "num_key_value_heads": 4, "head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
RECURRENT = {  # of Qwen3.5 and Nemotron-H
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16,
    "n_groups": 1, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
Folder = Callable[[str], Path]
each_recipe = pytest.mark.parametrize("name", TARGETS)


def test_every_recipe_for_a_published_target_is_tested() -> None:
    files = {path.stem for path in (ROOT / "conf" / "experiment").glob("*_*.yaml")}
    assert {name for name in files if not name.startswith(("bakeoff", "hass"))} == set(TARGETS)


# ---- sums ----------------------------------------------------------------------------------------


@pytest.fixture
def config_folder(tmp_path: Path) -> Folder:
    def write(name: str) -> Path:
        kind, fields = TARGETS[name]
        kind(**fields, dtype="bfloat16").save_pretrained(tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize("name", CARDS)
def test_parameters_equal_the_cards(name: str, config_folder: Folder) -> None:
    """Active ones with the embedding, which the cards do not always count."""
    settings = TargetConfig(name="hf", path=str(config_folder(name)))
    target = Target(meta_model(settings), fuse=False)
    whole, active = CARDS[name]
    assert target.parameter_count() / 1e9 == pytest.approx(whole, rel=2e-3)
    embedding = target.embedding.weight.numel()
    assert 0 <= active_parameters(target) - active * 1e9 <= embedding + 0.05e9


@each_recipe
def test_stated_sums_are_those_of_the_memory_command(
    name: str, config_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPUs, GB per GPU, hours and GB of disk: in the head of the yaml and in docs/recipes.md."""
    head = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text().replace("\n# ", " ")
    page = (ROOT / "docs" / "recipes.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \|(.*)\|$", page, re.MULTILINE)
    words = re.findall(r"outrider (memory [^)]*)\)", head)[0].split()
    assert main([*words, f"target.path={config_folder(name)}"]) == 0
    printed = capsys.readouterr().out
    totals = re.findall(r"[\d.]+", next(x for x in printed.splitlines() if "total" in x))
    total = totals[2 if "place: sharded" in head else 0]
    hours = re.findall(r"About ([\d.]+) hours", printed)[0]
    disk = re.findall(r"([\d.]+) GB of checkpoints", printed)[0]
    gpus = " ".join(re.findall(r"(\d+) x (H\d+)", printed)[0])
    assert f"{hours} hours and {total} GB per GPU, {disk} GB of disk" in head
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2:6] == [gpus, total, hours, disk]


def test_operations_of_a_step_are_those_counted_by_hand(
    config_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """EAGLE-3 with 7 depths and the target with its head, on 65,536 tokens of Llama-3.1-8B."""
    path = config_folder("llama31_8b_eagle3")
    assert main(["memory", "experiment=llama31_8b_eagle3", f"target.path={path}"]) == 0
    hidden, inner, keys = 4096, 14336, 1024
    layer = 2 * hidden * (hidden + 2 * keys) + hidden**2 + 3 * hidden * inner  # reads two states
    drafter = layer + 3 * hidden**2 + 32000 * hidden  # fusion of three taps, and the head
    row = 7 * 6 * drafter + 2 * 8.030e9 + 2 * 128256 * hidden
    printed = float(re.findall(r"([\d.]+) PFLOP", capsys.readouterr().out)[0])
    assert printed == pytest.approx(65536 * row / 1e15, rel=3e-3)


# ---- a short run ---------------------------------------------------------------------------------


def write_shrunken_copy(name: str, folder: Path) -> Path:
    """Write a random model of the recipe's architecture, with the embedded target's tokenizer."""
    kind, _ = TARGETS[name]
    known = kind().to_dict()
    fields = {**SHRUNK, **RECURRENT, **(LATENT if name.startswith("deepseek") else {})}
    torch.manual_seed(0)
    cfg = kind(**{key: value for key, value in fields.items() if key in known})
    hf.AutoModelForCausalLM.from_config(cfg).to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return folder


@pytest.fixture
def new_accelerator_state() -> Iterator[None]:
    """Recipes train in bfloat16; accelerate keeps one precision per process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.usefixtures("new_accelerator_state")
@each_recipe
def test_recipe_trains_and_decodes_a_shrunken_copy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe itself, with smaller numbers: generated text, three steps, an exact evaluation."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    target = write_shrunken_copy(name, tmp_path / "target")
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    turns = [[f"How far is it from {i} to {i + 1}?", "Not far at all."] for i in range(40)]
    prompts.write_text("".join(json.dumps({"prompt": ask}) + "\n" for ask, _ in turns))
    answers.write_text("".join(
        json.dumps({"prompt": ask, "completion": answer}) + "\n" for ask, answer in turns
    ))  # fmt: skip
    generated = [
        f"data.path={prompts}", "data.generate.samples=40", "data.generate.max_new_tokens=12",
        "drafter.draft_vocab_size=1500", "decode.depth=3", "target.thinking=null",
    ]  # fmt: skip
    assert main([
        "train", f"experiment={name}", f"target.path={target}", "target.dtype=float32",
        f"run.dir={tmp_path / 'run'}",
        *(generated if name != "deepseek_v3_mtp" else [f"data.path={answers}"]),
        "launch=single", "launch.accumulation=1", "target.place=replicated", "data.max_length=64",
        "train.batch_tokens=256",
        "train.max_steps=3", "train.eval_every=3", "train.save_every=3", "train.quick_eval=true",
        "eval.prompts=tiny", "eval.limit=2", "eval.max_new_tokens=8", "eval.warmup=0",
        "eval.grid=[chain@0]", "data.overlap=keep",
    ]) == 0  # fmt: skip
    (report,) = (tmp_path / "run" / "eval").glob("*chain*.json")
    assert json.loads(report.read_text())["exact"]


def test_stored_experts_of_gpt_oss_are_loaded_in_bfloat16(tmp_path: Path) -> None:
    """As published: blocks of MXFP4 numbers with a scale for each 32 (arXiv:2310.10537)."""
    folder = write_shrunken_copy("gpt_oss_20b_eagle3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{key}_blocks"] = blocks
        tensors[f"{key}_scales"] = torch.full(blocks.shape[:-1], 120, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(content))
    target = load_target(TargetConfig(name="hf", path=str(folder), dtype="auto")).target
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}


def test_the_text_model_of_qwen35_is_loaded_alone(tmp_path: Path) -> None:
    """As published: a vision tower beside it, and tensors of an MTP module."""
    sizes = {key: value for key, value in {**SHRUNK, **RECURRENT}.items()
             if key in hf.Qwen3_5TextConfig().to_dict()}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
              "out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
    both = hf.Qwen3_5Config(text_config=sizes, vision_config=vision)
    hf.Qwen3_5ForConditionalGeneration(both).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"mtp.fc.weight": torch.zeros(64, 128)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, tmp_path)
    target = load_target(TargetConfig(name="hf", path=str(tmp_path))).target
    assert (target.text_config.model_type, target.num_layers) == ("qwen3_5_text", 4)
    assert not [name for name, _ in target.model.named_parameters() if "visual" in name]
