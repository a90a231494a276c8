"""Settings that the user did not set: their values for the target and the drafter."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.conf.schema import Config, to_yaml
from outrider.conf.sweeps import read_sweep
from outrider.eval.run import evaluate
from outrider.launch.search import _base_config
from outrider.launch.train import train
from outrider.models.adapt import adapt, learning_rate
from outrider.models.decode.from_config import decodings
from outrider.models.target import load
from outrider.models.target.load import TINY, load_target
from outrider.train.resume import as_it_began
from outrider.train.settings import load_run, parse
from tests import tiny

AUTOMATIC = (
    "data.max_length", "train.lr", "decode.depth", "decode.confidence", "decode.nodes",
    "train.optimizer",
)  # fmt: skip
SHORT = [
    "data=tiny", "data.max_samples=40", "train.max_steps=2", "train.own_prompts=0",
    "train.quick_eval=false", "train.batch_tokens=256",
]  # fmt: skip


def parsed(*overrides: str) -> Config:
    return parse(compose(overrides))


def adapted(*overrides: str, hidden: int = 192, positions: int = 2048) -> tuple[Config, list[str]]:
    """Return the settings for a target of this shape, and the notes."""
    notes = list[str]()
    shape = tiny.target().shape()._replace(hidden=hidden, max_positions=positions)
    return adapt(parsed(*overrides), notes.append, shape), notes


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of hidden size 256 with 64 positions, and the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1536, hidden_size=256, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    for file in TINY.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


# ---- values ----


def test_the_embedded_target_keeps_its_values_without_a_note() -> None:
    loaded, notes = load_target(parsed().target), list[str]()
    config = adapt(parsed(), notes.append, loaded.target.shape())
    assert (config.train.lr, config.data.max_length, config.decode.depth) == (3.5e-3, 256, 3)
    assert (config.automatic, notes) == ((), [])


def test_the_learning_rate_falls_with_the_hidden_size_and_rises_with_the_batch() -> None:
    """The values are those of the search, of experiment=smollm2, and of EAGLE-3 and SpecForge."""
    assert learning_rate(192, 2048) == 3.5e-3
    assert learning_rate(576, 1024) == pytest.approx(5e-4, rel=0.05)
    assert 5e-5 <= learning_rate(4096, 16384) <= 1e-4
    assert learning_rate(4096, 4 * 2048) == pytest.approx(2 * learning_rate(4096, 2048), rel=0.05)
    assert learning_rate(64, 10**6) == 3.5e-3, "never above the embedded target's"


def test_settings_adapt_to_a_larger_target_with_one_note() -> None:
    config, notes = adapted(
        "data=self", "drafter=mtp", "drafter.depths=2", hidden=576, positions=512
    )
    assert (config.train.lr, config.data.max_length) == (learning_rate(576, 2048), 512)
    assert (config.decode.depth, config.decode.nodes) == (2, 2)
    assert notes == [
        "not set, so chosen: train.lr=0.00067 for hidden size 576 and 2048 tokens per step; "
        "data.max_length=512, the target's positions; decode.depth=2, as deep as the drafter can"
    ]


def test_settings_of_the_user_stay() -> None:
    drafter = ["drafter=mtp", "drafter.depths=2"]
    own = ["train.lr=3.5e-3", "data.max_length=1024", "decode.depth=3"]
    config, notes = adapted("data=self", *drafter, *own, hidden=576, positions=512)
    assert (config.train.lr, config.data.max_length, config.decode.depth) == (3.5e-3, 1024, 3)
    assert notes == []


def test_experiments_keep_their_learning_rate() -> None:
    assert adapted("experiment=smollm2", hidden=576)[0].train.lr == 5e-4
    assert adapted("experiment=bakeoff_tiny")[0].train.lr == 1e-3


@pytest.mark.parametrize(
    ("words", "depth", "nodes"),
    [
        (["drafter=mtp", "drafter.depths=2"], 2, 2),
        (["drafter=medusa", "drafter.depths=1"], 1, 1),
        (["drafter=eagle3", "drafter.depths=7"], 3, 3),
        (["drafter=eagle3", "drafter.depths=2"], 3, 3),
        (["drafter=mtp", "drafter.mode=recurrent", "drafter.depths=2"], 3, 3),
        (["drafter=mtp", "decode=dynamic_tree"], 3, 8),
        (["drafter=eagle3", "decode=opt_tree"], 8, 8),
        (["drafter=eagle3", "decode=dynamic_tree"], 4, 8),
        (["drafter=dspark", "drafter.depths=2"], 2, 2),
        (["drafter=dflash", "decode=best_first_tree"], 7, 16),
    ],
)
def test_a_draft_is_at_most_as_deep_as_the_drafter_can(
    words: list[str], depth: int, nodes: int
) -> None:
    """Medusa has heads and a chained MTP modules; the others read their own output and go on."""
    config, _ = adapted(*words)
    assert (config.decode.depth, config.decode.nodes) == (depth, nodes)


@pytest.mark.parametrize(("name", "nodes"), [("auto", 7), ("dynamic_tree", 3)])
def test_a_depth_that_the_nodes_limit_is_no_limit_of_the_drafter(name: str, nodes: int) -> None:
    config, notes = adapted(f"decode={name}", f"decode.nodes={nodes}")
    assert (config.decode.depth, notes) == (nodes, [])
    config, notes = adapted(f"decode={name}", f"decode.nodes={nodes}", "drafter=medusa")
    depth = config.drafter.depths
    assert config.decode.depth == min(depth, nodes)
    assert any("as deep as the drafter can" in note for note in notes) == (depth < nodes)


def test_the_grid_adapts_to_the_drafter_with_a_note() -> None:
    grid = "eval.grid=[chain@0,dynamic_tree@1]"
    config, notes = adapted("drafter=mtp", "drafter.depths=2", grid)
    assert [decode.depth for _, decode in decodings(config)] == [2, 2]
    assert "decode.depth=2" in notes[0]
    assert [name for name, _ in decodings(config)] == ["chain-t0", "dynamic_tree-t1"]
    named, _ = adapted(grid, "eval.out=again")
    assert [name for name, _ in decodings(named)] == ["again-chain-t0", "again-dynamic_tree-t1"]


# ---- configuration files ----


def test_automatic_keys_are_null_until_a_target_is_known() -> None:
    config = parsed()
    assert config.automatic == AUTOMATIC
    written = OmegaConf.create(to_yaml(config))
    assert isinstance(written, DictConfig)
    assert all(OmegaConf.select(written, key) is None for key in AUTOMATIC)
    assert parse(written) == config
    chosen, _ = adapted()
    assert parse(OmegaConf.create(to_yaml(chosen))) == chosen  # type: ignore[arg-type]


def test_a_continued_run_keeps_the_values_that_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    began, _ = adapted("train.lr=1e-3", "data.max_length=100", "train.optimizer=adamw")
    (tmp_path / "config.yaml").write_text(to_yaml(began))
    again = parsed(f"run.dir={tmp_path}")
    continued = as_it_began(again)
    assert (continued.train.lr, continued.data.max_length) == (1e-3, 100)
    assert continued.train.optimizer == began.train.optimizer
    assert continued.automatic == ("decode.depth", "decode.confidence", "decode.nodes")
    other = parsed(f"run.dir={tmp_path}", "train.lr=2e-3")
    assert as_it_began(other).train.lr == 2e-3, "the comparison with the saved one refuses it"
    assert as_it_began(parsed(f"run.dir={tmp_path}", "train.resume=never")).train.lr == 3.5e-3


def test_a_search_begins_with_the_values_for_its_target(wide: Path) -> None:
    over = "+sweep.over={train.lr: {low: 1e-4, high: 1e-2}}"
    settings, words = read_sweep(["sweep.trials=1", over, f"target={wide}", "data=tiny"])
    assert _base_config(words, settings).train.lr == learning_rate(256, 2048)


# ---- commands ----


def test_a_run_and_its_evaluation_use_and_store_what_was_chosen(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SHORT, f"target={wide}", f"run.dir={tmp_path}", "drafter=mtp", "drafter.depths=2"]
    assert train(parsed(*words)) == 0
    assert "note: not set, so chosen: train.lr=" in capsys.readouterr().out
    saved = OmegaConf.load(tmp_path / "config.yaml")
    assert saved.train.lr == learning_rate(256, 256)
    assert (saved.data.max_length, saved.decode.depth, saved.decode.nodes) == (64, 2, 2)
    assert train(parsed(*words)) == 0, "the finished run has the same settings"
    shown = " ".join(capsys.readouterr().out.split())
    assert f"is finished: 2 steps. To measure it: outrider eval run.dir={tmp_path};" in shown
    assert "raise train.max_steps;" in shown
    with (
        patch.object(load, "load_target", side_effect=AssertionError("refused too late")),
        pytest.raises(ConfigError, match=r"train\.lr = 0\.0001\n.*began with"),
    ):
        train(parsed(*words, "train.lr=1e-4"))
    evaluation = load_run(tmp_path, ["eval.limit=1", "eval.max_new_tokens=4", "eval.warmup=0"])
    assert evaluate(evaluation) == 0
    assert "note: not set, so chosen: decode.depth=2" in capsys.readouterr().out


def test_rows_longer_than_the_positions_are_refused_before_training(
    wide: Path, tmp_path: Path
) -> None:
    words = [*SHORT, f"target={wide}", f"run.dir={tmp_path}", "data.max_length=65"]
    with pytest.raises(ConfigError, match=r"data.max_length = 65\n.*64 positions"):
        train(parsed(*words))
    assert not (tmp_path / "checkpoints").exists()
