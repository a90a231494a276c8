"""Folders of eight projects, built as each of them writes them, without Outrider's writer.

Names, shapes and fields are those of the projects' releases of 2026: SpecForge 0.2, speculators
0.9, ModelOpt 0.47, Automodel 0.7, AngelSlim 0.5, and the authors' code of EAGLE, HASS and Medusa.
The weights are those of a drafter trained for a few steps, in bfloat16. A folder must decode like
that drafter: the same answers, and the same number of accepted tokens in every round.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models import drafters, formats
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.target.target import Target
from tests import tiny

N, V, VD, H, INNER, HEADS, KV, SIZE = 8, tiny.VOCAB, 40, 32, 48, 4, 2, 8
POSITIONS = 128
Tensors = dict[str, Tensor]
Json = dict[str, Any]
IDS = "eagle_aux_hidden_state_layer_ids"


@cache
def target() -> Target:
    return tiny.target(num_hidden_layers=N)


@cache
def answers() -> tuple[list[int], ...]:
    return tuple(tiny.greedy_tokens(target(), prompt) for prompt in tiny.PROMPTS)


def vocab(size: int) -> DraftVocab:
    """Every token of the answers, and the lowest others."""
    counts = torch.bincount(torch.tensor([t for answer in answers() for t in answer]), minlength=V)
    return DraftVocab.from_counts(counts, size)


class Project(NamedTuple):
    """What a project writes, and what its network is in Outrider's settings."""

    name: str  # of the drafter here
    settings: Json
    config: Callable[[Tensors], Json]
    tensors: Callable[[Tensors, DraftVocab], Tensors]
    exports: tuple[str, ...]  # formats that can hold it
    size: int = VD  # of its draft vocabulary
    file: str = "model.safetensors"


# ---- layouts -------------------------------------------------------------------------------------

LAYER = {
    "self_attn.q_proj": (HEADS * SIZE, 2 * H), "self_attn.k_proj": (KV * SIZE, 2 * H),
    "self_attn.v_proj": (KV * SIZE, 2 * H), "self_attn.o_proj": (H, HEADS * SIZE),
    "mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H), "mlp.down_proj": (H, INNER),
    "hidden_norm": (H,), "input_layernorm": (H,), "post_attention_layernorm": (H,),
}  # fmt: skip
EAGLE3 = {f"midlayer.{part}.weight": shape for part, shape in LAYER.items()} | {
    "fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VD, H),
}  # fmt: skip


def maps(words: DraftVocab) -> Tensors:
    """Return d2t as offsets and t2d as a mask."""
    chosen = torch.zeros(V, dtype=torch.bool)
    chosen[words.target_ids] = True
    return {"d2t": words.target_ids - torch.arange(VD), "t2d": chosen}


def embedding() -> Tensors:
    return {"embed_tokens.weight": target().embedding.weight.detach().bfloat16()}


def renamed(weights: Tensors, old: str, new: str) -> Tensors:
    return {key.replace(old, new): value for key, value in weights.items()}


def specforge(weights: Tensors, words: DraftVocab) -> Tensors:
    return weights | maps(words)


def speculators(weights: Tensors, words: DraftVocab) -> Tensors:
    return renamed(weights, "midlayer.", "layers.0.") | maps(words) | embedding()


def modelopt(weights: Tensors, words: DraftVocab) -> Tensors:
    """No t2d; draft ids in the order of frequency, not of the target's ids."""
    order = torch.randperm(VD, generator=torch.Generator().manual_seed(6))
    out = renamed(weights, "midlayer.", "layers.0.")
    out["lm_head.weight"] = weights["lm_head.weight"][order]
    return out | {"d2t": words.target_ids[order] - torch.arange(VD)}


def automodel(weights: Tensors, words: DraftVocab) -> Tensors:
    inner = renamed(weights, "midlayer.", "layers.0.") | embedding()
    head = {"lm_head.weight": inner.pop("lm_head.weight")}
    return {f"model.{key}": value for key, value in inner.items()} | head | maps(words)


def angelslim(weights: Tensors, words: DraftVocab) -> Tensors:
    return weights | maps(words) | embedding()


def eagle(weights: Tensors, words: DraftVocab) -> Tensors:
    return weights | embedding()


def medusa(weights: Tensors, words: DraftVocab) -> Tensors:
    """A ModuleList of Sequentials: one ResBlock, then the head."""
    out = Tensors()
    for head in range(tiny.DEPTHS):
        for part in ("weight", "bias"):
            out[f"{head}.0.linear.{part}"] = weights[f"blocks.{head}.layers.0.{part}"]
        out[f"{head}.1.weight"] = weights[f"lm_heads.{head}.weight"]
    return out


# ---- configurations ------------------------------------------------------------------------------

LLAMA: Json = {  # as the configuration of a Llama of 2023, which EAGLE, HASS and SpecForge copy
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": H, "initializer_range": 0.02, "intermediate_size": INNER,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
    "use_cache": True, "vocab_size": V,
}  # fmt: skip


def specforge_config(weights: Tensors) -> Json:
    """Transformers 5 rewrites the fields of the rotary embedding; the exporter adds rope_theta."""
    return LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, "dtype": "bfloat16",
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": SIZE, "mlp_bias": False,
        "pretraining_tp": 1, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0, "transformers_version": "5.8.1",
        "eagle_config": {"use_aux_hidden_state": True, IDS: [0, 2, 5]},
    }  # fmt: skip


def speculators_config(weights: Tensors, window: int = 2048) -> Json:
    """By default every layer has a window, which no text of this target is longer than."""
    layer = hf.LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=INNER, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=KV, hidden_act="silu",
        max_position_embeddings=POSITIONS, initializer_range=0.02, rms_norm_eps=1e-6,
        head_dim=SIZE, tie_word_embeddings=False, sliding_window=window, use_sliding_window=True,
        layer_types=["sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    verifier = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": VD, "dtype": "bfloat16",
        IDS: [2, N // 2, N - 3], "embed_requires_grad": False, "fc_norm": False,
        "norm_before_fc": True, "norm_before_residual": True, "norm_output": True,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [proposal], "verifier": verifier,
        },
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "target_hidden_size": None, "tie_word_embeddings": False,
        "transformer_layer_config": layer.to_diff_dict(), "transformers_version": "5.19.0",
    }  # fmt: skip


def modelopt_config(weights: Tensors) -> Json:
    """The template's fields; what neither model has is null."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": H, "initializer_range": 0.01,
        "intermediate_size": INNER, "max_position_embeddings": POSITIONS, "model_type": "llama",
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "num_hidden_layers": 1,
        "pad_token_id": None, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "5.12.0", "use_cache": True,
        "vocab_size": V, "draft_vocab_size": VD,
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000}, "attention_bias": False,
        "attention_dropout": 0.0, "head_dim": SIZE, "mlp_bias": False, "pretraining_tp": None,
        "rope_theta": 10000,
        "eagle_config": {
            IDS: [1, N // 2 - 1, N - 4], "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
            "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    }  # fmt: skip


def automodel_config(weights: Tensors) -> Json:
    """A copy of the target's, with its number of layers; the tapped layers are not stored."""
    config: Json = json.loads(target().model.config.to_json_string(use_diff=False))
    return config | {
        "architectures": ["LlamaEagle3DraftModel"], "draft_vocab_size": VD,
        "target_hidden_size": H, "tie_word_embeddings": False, "attn_implementation": "eager",
        "fc_norm": True, "norm_output": True, "parallel_drafting": False,
    }  # fmt: skip


def angelslim_config(weights: Tensors) -> Json:
    return LLAMA | {
        "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": VD,
        "dtype": "bfloat16", "aux_hidden_states_layer_ids": [1, 2, 6],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rope_scaling": None,
    }  # fmt: skip


def medusa_config(weights: Tensors) -> Json:
    return {
        "base_model_name_or_path": "tiny", "medusa_num_heads": tiny.DEPTHS, "medusa_num_layers": 1,
        "model_type": "", "transformers_version": "4.34.1", "version": "2",
    }  # fmt: skip


SPECULATORS: Json = {
    "fc_norm": "joint", "feedback": "normed", "residual": "normed", "init": "random",
}  # fmt: skip
PROJECTS = {
    "specforge": Project(
        "eagle3", {"taps": (0, 2, 5)}, specforge_config, specforge, ("sglang", "vllm")
    ),
    "speculators": Project(
        "eagle3", SPECULATORS, speculators_config, speculators, ("speculators", "vllm")
    ),
    "speculators_window": Project(
        "eagle3", {**SPECULATORS, "window": 6}, partial(speculators_config, window=6),
        speculators, ("speculators",),
    ),
    "modelopt": Project("eagle3", {}, modelopt_config, modelopt, ("sglang", "speculators")),
    "automodel": Project(
        "eagle3", {"fc_norm": "each", "feedback": "normed"}, automodel_config, automodel,
        ("sglang", "vllm"),
    ),
    "angelslim": Project(
        "eagle3", {"taps": (1, 2, 6)}, angelslim_config, angelslim, ("vllm", "sglang")
    ),
    "eagle": Project("eagle", {"bias": True}, lambda _: LLAMA, eagle, ("eagle", "sglang"), V),
    "hass": Project("hass", {"bias": True}, lambda _: LLAMA, eagle, ("eagle", "sglang"), V),
    "medusa": Project(
        "medusa", {"own_heads": True}, medusa_config, medusa, ("medusa", "vllm"), V,
        "medusa_lm_head.safetensors",
    ),
}  # fmt: skip


# ---- drafters and folders ------------------------------------------------------------------------


@cache
def trained(name: str) -> Drafter:
    """Train the project's network for some steps, and round its weights to bfloat16."""
    project = PROJECTS[name]
    torch.manual_seed(7)
    cfg = tiny.config(project.name, **project.settings)
    drafter = drafters.build(cfg, target(), vocab(project.size))
    if name == "modelopt":  # its rms_norm_eps differs from the target's
        shape = target().shape()._replace(eps=1e-5)
        drafter = drafters.build(cfg, target(), vocab(project.size), shape)
    tiny.train_drafter(drafter, target(), tiny.answered_trace(target(), answers()), steps=20)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(weight.bfloat16())
    return drafter.eval()


def written(name: str, path: Path) -> Path:
    """Write the folder of a project."""
    project, drafter = PROJECTS[name], trained(name)
    weights = {key: value.detach().bfloat16() for key, value in drafter.named_parameters()}
    tensors = project.tensors(weights, drafter.vocab)
    path.mkdir()
    save_file({key: value.contiguous() for key, value in tensors.items()}, path / project.file)
    (path / "config.json").write_text(json.dumps(project.config(weights)))
    return path


def edit(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def measure(drafter: Drafter) -> list[list[int]]:
    """Return the accepted tokens of every round, after comparing the answers with the target's."""
    target().set_taps(drafter.taps)
    engine, rounds = Engine(target(), drafter, Chain(tiny.DEPTHS)), []
    for prompt, answer in zip(tiny.PROMPTS, answers(), strict=True):
        out = engine.generate(prompt, tiny.ANSWER)
        assert list(out.ids) == answer
        rounds.append(list(out.accepted))
    return rounds


@pytest.mark.parametrize("name", PROJECTS)
def test_folder_is_read_measured_and_exported(name: str, tmp_path: Path) -> None:
    project, folder = PROJECTS[name], written(name, tmp_path / name)
    drafter, cfg = formats.load(folder, target())
    native = trained(name)
    assert drafter.taps == native.taps
    expected = measure(native)
    assert sum(map(sum, expected)) > 3, "guesses that are right"
    assert measure(drafter) == expected
    read = cfg.name
    assert read == {"hass": "eagle"}.get(project.name, project.name)
    for word in project.exports:
        out = tmp_path / f"as-{word}"
        formats.find(word, read).write(drafter, target(), cfg, out)
        assert measure(formats.load(out, target())[0]) == expected


def test_tensors_of_eagle3_are_those_of_the_reference() -> None:
    """The names that the layouts above are made from; SpecForge and EAGLE-3's authors have them."""
    shapes = {key: tuple(p.shape) for key, p in trained("specforge").named_parameters()}
    assert shapes == EAGLE3


# ---- what a project writes besides, and what must be corrected by hand ---------------------------


def test_modelopt_adds_yarn_at_export_to_a_drafter_trained_without(tmp_path: Path) -> None:
    """Its default: rope_scaling of type yarn, which no forward of the training had."""
    folder = written("modelopt", tmp_path / "f")
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    edit(folder, rope_scaling=yarn)
    with pytest.raises(RunError, match=r"of type yarn[\s\S]*ModelOpt writes[\s\S]*remove it"):
        formats.load(folder, target())
    edit(folder, rope_scaling=None)
    assert measure(formats.load(folder, target())[0]) == measure(trained("modelopt"))


def test_specforge_s_norm_output_is_another_switch(tmp_path: Path) -> None:
    """It is the norm before the head there; a folder with it names no project."""
    folder = written("specforge", tmp_path / "f")
    edit(folder, norm_output=True)
    with pytest.raises(RunError, match=r"norm_output is the norm before the head for SpecForge"):
        formats.load(folder, target())
    state = {"taps": [0, 2, 5], "drafter": {"feedback": "raw"}}
    (folder / "outrider.json").write_text(json.dumps(state))
    assert measure(formats.load(folder, target())[0]) == measure(trained("specforge"))


def test_eagle_trains_a_bias_that_its_llama3_config_denies(tmp_path: Path) -> None:
    folder = written("hass", tmp_path / "f")
    edit(folder, bias=False)
    with pytest.raises(RunError, match=r"bias: False, which the weights contradict[\s\S]*to true"):
        formats.load(folder, target())
    edit(folder, bias=True)
    assert measure(formats.load(folder, target())[0]) == measure(trained("hass"))


def test_pickles_of_the_authors_are_converted_as_the_message_says(tmp_path: Path) -> None:
    """EAGLE's and HASS's training scripts write pytorch_model.bin, EAGLE-3's always."""
    for name in ("specforge", "eagle"):
        folder = written(name, tmp_path / name)
        tensors = PROJECTS[name].tensors(
            {k: v.detach().half() for k, v in trained(name).named_parameters()}, trained(name).vocab
        )
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        with pytest.raises(RunError, match=r"pytorch_model\.bin is a pickle") as caught:
            formats.load(folder, target())
        assert "torch.load(FILE, weights_only=True)" in caught.value.fix
        assert "safetensors.torch.save_file(weights, 'model.safetensors')" in caught.value.fix
        save_file(torch.load(folder / "pytorch_model.bin"), folder / "model.safetensors")
        measure(formats.load(folder, target())[0])
