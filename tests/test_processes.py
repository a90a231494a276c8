"""Several processes: two ranks train as one does; killed runs resume.

Real launchers on CPU ranks with gloo. Each test starts processes, so all of them are `slow`.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.launch.processes import clean_environment, train_command

ROOT = Path(__file__).parent.parent
SMALL = [
    "drafter=eagle3", "target=tiny", "data.max_length=128", "data.max_samples=60",
    "train.batch_tokens=512", "train.max_steps=6", "train.eval_every=6", "train.save_every=2",
    "train.log_every=1", "train.lr=1e-3", "drafter.depths=2", "train.quick_eval=false",
    "train.own_prompts=4", "train.optimizer=adamw",  # ZeRO has no Muon, the default of eagle3
]  # fmt: skip
EAGLE3 = ["drafter.feedback=raw", "drafter.taps=null"]  # as published
ONE, TWO = train_command(1), train_command(2)
LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "train.py",
]  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def environment() -> dict[str, str]:
    return {**clean_environment(), "OMP_NUM_THREADS": "1"}


def run(command: list[str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = [] if any(word.startswith("drafter=") for word in words) else EAGLE3
    return subprocess.run(
        [*command, *SMALL, *own, f"run.dir={folder}", *words], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss@1"] for line in lines if line["kind"] != "own"]


def own_lengths(folder: Path) -> list[float]:
    """Return the acceptance lengths on the target's own answers."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["accept_length"] for line in lines if line["kind"] == "own"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last step; the drafter in the run folder may be an earlier one."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    tensors: dict[str, torch.Tensor] = load_file(newest / "state.safetensors")
    return {name: value for name, value in tensors.items() if name.startswith("parameter.")}


def assert_equal_runs(found: Path, expected: Path) -> None:
    """Compare the losses of every step, and the weights after the last one."""
    assert losses(found) == pytest.approx(losses(expected), abs=1e-4)
    assert len(own_lengths(expected)) > 1
    assert own_lengths(found) == pytest.approx(own_lengths(expected), abs=1e-4)
    a, b = weights(found), weights(expected)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank with accumulation 2, which every two-rank run must equal."""
    folder = tmp_path_factory.mktemp("one_rank")
    done = run(ONE, folder, "launch.accumulation=2")
    assert done.returncode == 0, done.stderr
    return folder


def test_two_ranks_equal_one_with_accumulation(one_rank: Path, tmp_path: Path) -> None:
    done = run(TWO, tmp_path, "launch=ddp")
    assert done.returncode == 0, done.stderr
    assert_equal_runs(tmp_path, one_rank)


@pytest.mark.parametrize(
    ("place", "launch", "stray"), [("sharded", "zero3", 0.0), ("tensor", "zero2", 2e-5)]
)
def test_sharded_and_tensor_parallel_targets_train_equally(
    place: str, launch: str, stray: float, one_rank: Path, tmp_path: Path
) -> None:
    """With a drafter that is sharded too, and gradient checkpointing.

    A tensor-parallel target sums in another order, and where a gradient is almost zero Adam steps
    by its sign: two weights in a hundred thousand may differ by a quarter of one step.
    """
    words = [f"target.place={place}", f"launch={launch}", "train.gradient_checkpointing=true"]
    done = run(TWO, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(one_rank), abs=1e-4)
    for name, tensor in weights(one_rank).items():
        found = weights(tmp_path)[name]
        off = (found - tensor).abs() > 1e-4 + 1e-3 * tensor.abs()
        assert off.sum() <= stray * off.numel(), name
        torch.testing.assert_close(found, tensor, atol=2.5e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["hass", "mtp", "medusa", "draft_lm"])
def test_zero3_on_two_ranks_equals_one_rank_for_every_kind_of_drafter(
    name: str, tmp_path: Path
) -> None:
    """The target's head, heads per depth, chained modules, tied weights."""
    words = [f"drafter={name}", *(["drafter.noise=0"] if name == "hass" else [])]
    for folder, command, launch in (("one", ONE, "single"), ("two", TWO, "zero3")):
        pieces = "launch.accumulation=2" if launch == "single" else "launch.accumulation=1"
        done = run(command, tmp_path / folder, *words, f"launch={launch}", pieces)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4, abs=1e-4)
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-3, rtol=1e-2, msg=key)


@pytest.mark.parametrize("name", ["hass", "mtp", "medusa", "draft_lm", "eagle3"])
def test_zero_in_bfloat16_trains_every_kind_of_drafter(name: str, tmp_path: Path) -> None:
    """DeepSpeed casts the weights; no tensor of the drafter, noise included, may stay float32."""
    offload = ["launch=zero3", "launch.offload=parameters"] if name == "eagle3" else []
    done = run(
        TWO, tmp_path, f"drafter={name}", *(offload or ["launch=zero2"]), "launch.precision=bf16",
        "train.max_steps=2", "train.eval_every=2", "target.dtype=bfloat16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(0 < loss < 100 for loss in losses(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        ["launch=zero2"],
        ["launch=zero3"],
        ["launch=zero2", "launch.offload=optimizer"],
        ["launch=zero3", "launch.offload=parameters"],
    ],
    ids=" ".join,
)
def test_zero_resume_equals_an_uninterrupted_run(
    words: list[str], one_rank: Path, tmp_path: Path
) -> None:
    """The last checkpoint is removed; resuming from the one before gives the same steps."""
    assert run(TWO, tmp_path, *words).returncode == 0
    assert_equal_runs(tmp_path, one_rank)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    done = run(TWO, tmp_path, *words, "train.resume=must")
    assert done.returncode == 0, done.stderr
    assert_equal_runs(tmp_path, one_rank)


@pytest.mark.parametrize(
    "words",
    [["launch=zero2", "train.optimizer=sgd"], ["launch=ddp", "train.optimizer=muon"]],
    ids=" ".join,
)
def test_other_optimizers_resume_on_two_ranks(words: list[str], tmp_path: Path) -> None:
    """With an average of the weights, whose drafter and checkpoints are the same, too."""
    words = [*words, "train.ema=0.5"]
    assert run(TWO, tmp_path / "a", *words).returncode == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000006")
    done = run(TWO, tmp_path / "b", *words, "train.resume=must")
    assert done.returncode == 0, done.stderr
    for file in (Path("drafter", "model.safetensors"), Path("checkpoints", "step-00000006")):
        file = file if file.suffix else file / "state.safetensors"
        a, b = load_file(tmp_path / "a" / file), load_file(tmp_path / "b" / file)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), file


def test_a_run_on_two_ranks_resumes_on_one_and_four(one_rank: Path, tmp_path: Path) -> None:
    """Checkpoints and the rows of a step do not depend on the number of ranks.

    Started under ZeRO-2, finished by one process and under DDP.
    """
    first = tmp_path / "two"
    assert run(TWO, first, "launch=zero2").returncode == 0
    shutil.rmtree(first / "checkpoints" / "step-00000006")
    for name, ranks, words in (("one", 1, "launch.accumulation=2"), ("four", 4, "launch=ddp")):
        shutil.copytree(first, tmp_path / name)
        done = run(train_command(ranks), tmp_path / name, words, "train.resume=must")
        assert done.returncode == 0, done.stderr
        assert_equal_runs(tmp_path / name, one_rank)


def test_accelerate_launch_needs_no_configuration_for_zero(one_rank: Path, tmp_path: Path) -> None:
    done = run(LAUNCH, tmp_path, "launch=zero1", "launch.accumulation=2")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(one_rank), abs=1e-4)


SMALL_CHUNKS = """
import sys
sys.path.insert(0, {root!r})
from outrider.train import teacher
teacher.CHUNK = 2**17  # 85 rows of the tiny vocabulary: several chunks per forward
from outrider.launch.cli import command
command(["train", *sys.argv[1:]])
"""


def test_zero3_in_many_chunks_equals_ddp(tmp_path: Path) -> None:
    """The head's weights are gathered once per chunk, and its gradients accumulate."""
    script = tmp_path / "small_chunks.py"
    script.write_text(SMALL_CHUNKS.format(root=str(ROOT)))
    for launch in ("ddp", "zero3"):
        done = run([*TWO[:-1], str(script)], tmp_path / launch, f"launch={launch}")
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "zero3") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-5)


KEEPS_ITS_GROUP = """
import sys
import torch
import torch.distributed as ranks
from outrider.launch.cli import _end_process
store, rank, code = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ranks.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
groups = list(ranks.distributed_c10d._world.pg_map)
for _ in range(20):
    ranks.all_reduce(torch.ones(1000))
ranks.destroy_process_group()
_end_process(code)
"""


def test_a_rank_exits_with_its_code_while_its_group_is_referenced(tmp_path: Path) -> None:
    """With the interpreter's normal shutdown, a rank of about every second pair aborted."""
    env = {**environment(), "WORLD_SIZE": "2"}
    for turn, code in enumerate((0, 0, 0, 0, 0, 2)):
        words = [sys.executable, "-c", KEEPS_ITS_GROUP, str(tmp_path / f"store-{turn}")]
        pair = [subprocess.Popen([*words, rank, str(code)], env=env) for rank in ("0", "1")]
        assert [rank.wait() for rank in pair] == [code, code]


NAN_ON_ONE_RANK = """
import os, sys
sys.path.insert(0, {root!r})
from outrider.train.objective import Objective
from outrider.train.trainer import Trainer
forward, seed_step, now = Objective.forward, Trainer.seed_step, [0]
def wrong(self, *args):
    loss, sums = forward(self, *args)
    bad = self.training and now[0] == 2 and os.environ["RANK"] == "1"
    return loss * (float("nan") if bad else 1.0), sums
def seed(run, step):
    now[0] = step
    seed_step(run, step)
Objective.forward, Trainer.seed_step = wrong, seed
from outrider.launch.cli import command
command(["train", *sys.argv[1:]])
"""


def test_a_nan_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    """Under every sharding; all other steps are equal."""
    script = tmp_path / "nan.py"
    script.write_text(NAN_ON_ONE_RANK.format(root=str(ROOT)))
    for launch in ("ddp", "zero2", "zero3"):
        done = run(
            [*TWO[:-1], str(script)], tmp_path / launch, f"launch={launch}", "train.skip_bad=1"
        )
        assert done.returncode == 0, done.stderr
        kinds = [
            (line["step"], line["kind"]) for line in map(json.loads, _lines(tmp_path / launch))
        ]
        assert (2, "skipped") in kinds
        assert (2, "train") not in kinds
        trained = [
            json.loads(line)["loss@1"] for line in _lines(tmp_path / launch) if "loss@1" in line
        ]
        found = weights(tmp_path / launch)
        if launch == "ddp":
            ddp_losses, ddp_weights = trained, found
        assert trained == pytest.approx(ddp_losses, abs=1e-4)
        for name in found:
            torch.testing.assert_close(found[name], ddp_weights[name], atol=1e-4, rtol=1e-3)


SLOW_SAVE = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from outrider.train import checkpoint
from outrider.train.trainer import Trainer
save, seed_step = checkpoint.save, Trainer.seed_step
def slow(folder, tensors, progress, *keep):
    time.sleep(2.0 * (progress.step == 3))
    save(folder, tensors, progress, *keep)
def seed(run, step):
    if step == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    seed_step(run, step)
checkpoint.save, Trainer.seed_step = slow, seed
from outrider.launch.cli import command
command(["train", *sys.argv[1:]])
"""


@pytest.mark.parametrize("launch", ["ddp", "zero2"])
def test_a_signal_to_one_rank_saves_however_long_it_takes(launch: str, tmp_path: Path) -> None:
    """The launcher ends all ranks when the first exits, so none exits before the save."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_SAVE.format(root=str(ROOT)))
    done = run([*TWO[:-1], str(script)], tmp_path / "run", f"launch={launch}")
    assert done.returncode == 1, done.stderr
    assert "stopped at step 3, saved" in done.stdout
    saved = {folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {"step-00000002", "step-00000003"}


def test_a_launcher_that_contradicts_the_configuration_is_refused(tmp_path: Path) -> None:
    done = run(TWO, tmp_path, "launch=single")
    assert done.returncode != 0
    assert "The launcher started 2 processes" in done.stderr


def test_resume_after_three_kills_is_bit_exact(tmp_path: Path) -> None:
    """Killed (kill -9) at three random moments, each time restarted with the same command."""
    longer = ["train.max_steps=16", "train.eval_every=4"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(ONE, whole, *longer).returncode == 0
    generator = random.Random(7)
    for _ in range(3):
        process = subprocess.Popen(
            [*ONE, *SMALL, *EAGLE3, *longer, f"run.dir={killed}"], cwd=ROOT, env=environment(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        before = len(_lines(killed))
        steps = generator.randint(1, 4)
        while process.poll() is None and len(_lines(killed)) < before + steps:
            time.sleep(0.01)
        time.sleep(generator.random() * 0.3)  # somewhere inside a step, a save or an evaluation
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "killed, not finished"
    done = run(ONE, killed, *longer)
    assert done.returncode == 0, done.stderr
    a, b = weights(whole), weights(killed)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert losses(whole) == losses(killed)


def _lines(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.is_file() else []
