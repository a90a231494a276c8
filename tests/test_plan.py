"""The plan says what is true and warns of what will hurt."""

from pathlib import Path

import pytest
from rich.console import Console

from outrider.data.prepare import material, prepare
from outrider.launch import plan, start
from outrider.models import load
from outrider.train.compose import compose
from outrider.train.config import Config, LaunchConfig, parse
from outrider.train.errors import ConfigError
from outrider.train.run import Run


def config(folder: Path, *words: str) -> Config:
    small = ["target=tiny", "data.max_samples=40", "data.max_length=128", "train.batch_tokens=512"]
    return parse(compose([*small, f"run.dir={folder}", *words]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    cfg = config(tmp_path_factory.mktemp("plan"), "drafter.draft_vocab_size=100")
    loaded = load.load(cfg.target)
    return Run(cfg, loaded, material(cfg, loaded, (1, 3, 4), Console(quiet=True), rank=0))


def test_the_plan_counts_parameters_and_coverage_exactly(run: Run) -> None:
    console = Console(record=True, width=120)
    plan.show(console, run)
    text = console.export_text()
    trained = sum(p.numel() for p in run.drafter.parameters())
    assert f"{trained / 1e6:.2f} M parameters" in text
    assert f"100 tokens, {run.drafter.vocab.coverage(run.material.held_counts):.2%}" in text
    assert "outputs of decoder layers [1, 3, 4]" in text


def test_a_small_draft_vocabulary_and_few_rows_are_pointed_out(run: Run) -> None:
    notes = " ".join(plan.warnings(run, plan.estimate(run)))
    assert "raise drafter.draft_vocab_size" in notes
    assert "more data would do more good" in notes


def test_the_disk_estimate_is_what_a_run_writes(run: Run) -> None:
    """Two checkpoints of 12 bytes per parameter are most of it."""
    run.progress.step = 1
    run.save()
    run.behind.wait()
    file = next((run.folder / "checkpoints").rglob("state.safetensors"))
    size = sum(p.numel() for p in run.drafter.parameters())
    assert 4 * size <= file.stat().st_size <= 13 * size  # no moments before the first step
    assert plan.estimate(run).disk >= 2 * file.stat().st_size


@pytest.mark.parametrize("data", ["tiny", "self"])
def test_doctor_prints_the_plan_and_leaves_no_run(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is still to be written is judged by a sample; text that is there, as it is."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    words = [f"data={data}", "train.max_steps=9"]
    if data == "self":
        words += ["data.path=data/tiny/prompts.jsonl", "data.overlap=keep"]
        words += ["data.generate.max_new_tokens=12"]
    assert plan.doctor(config(tmp_path / "run", *words)) == 0
    said = capsys.readouterr().out
    for row in ("trained", "supervised", "draft vocabulary", "memory", "disk", "time"):
        assert row in said
    assert ("sample of 16 answers" in said) == (data == "self")
    assert not (tmp_path / "run").exists()
    if data == "self":
        written = config(tmp_path / "run", *words, "data.generate.samples=20")
        prepare(written)
        capsys.readouterr()
        assert plan.doctor(written) == 0
        assert "sample" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "launch", "said"),
    [
        ({"WORLD_SIZE": "2"}, LaunchConfig("single"), "started 2 processes"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            LaunchConfig("zero2"),
            "ZeRO stage 3",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, LaunchConfig("ddp"), "--mixed_precision fp16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, LaunchConfig("zero2"), "steps 4"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, LaunchConfig("zero2"), "train.clip"),
        ({"ACCELERATE_USE_FSDP": "true"}, LaunchConfig("ddp"), "use FSDP"),
        (
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "/a/ds.json"},
            LaunchConfig("zero2"),
            "settings from a file",
        ),
        (
            {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
            LaunchConfig("zero3"),
            "offload parameters",
        ),
    ],
)
def test_a_launcher_that_contradicts_the_configuration_is_refused(
    environment: dict[str, str],
    launch: LaunchConfig,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        start.check(launch)
