"""What one training run holds: the wrapped drafter, its data, its folder, where it stands.

`loop.py` is the narrative; this is the room it happens in.
"""

import copy
import hashlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.conf.compose import flat
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import read_json, remove, write_tensors
from outrider.data.batches import Batch, Batches, gather, permutation
from outrider.data.prefetch import Ahead
from outrider.data.prepare import Material
from outrider.data.record.reader import Recording
from outrider.data.traces import Traces
from outrider.models import drafters
from outrider.models.drafter import Trace
from outrider.models.load import Loaded
from outrider.train import best_drafter as best
from outrider.train import checkpoint
from outrider.train import distributed as start
from outrider.train.background import Behind
from outrider.train.bad_steps import Guard
from outrider.train.energy import Meter
from outrider.train.heartbeat import Roll
from outrider.train.losses import parse_depth_weights
from outrider.train.metric_sums import Sums
from outrider.train.objective import Objective
from outrider.train.settings import Config, parse, resolved, saved_config
from outrider.train.trackers import IDENTITY

# what a continued run may change: limits, reports, and who does which part of a step (noise, and
# text of the drafter's own, are then drawn anew)
FREE = (
    "run.dir", "train.max_steps", "train.max_minutes", "train.eval_every", "train.save_every",
    "train.keep_last", "train.keep_every", "train.resume", "train.log_every", "train.quick_eval",
    "train.wandb.", "train.tensorboard", "train.skip_bad", "train.spike",
    "train.gradient_checkpointing",
    "eval.", "decode.", "launch.name", "launch.accumulation",
    "launch.offload", "launch.wait",
    "data.generate.minutes", "data.traces", "data.max_gb", "data.workers", "record.damaged",
    "record.share", "record.shard", "record.check_every",
)  # fmt: skip


class Piece(NamedTuple):
    """A micro-batch, and whether its rows are the material's own, of which notes may exist."""

    batch: Batch
    noted: bool


FIT_BATCH = 8  # packed rows at once while the first weights are found


class Run:
    """Everything the loop needs, built once."""

    def __init__(
        self, config: Config, loaded: Loaded, material: Material, *, begin: bool = True
    ) -> None:
        """Build drafter, objective and optimizer, and hand them to accelerate.

        Args:
            begin: find first weights; without it nothing can be trained, only planned.
        """
        cfg: Any = config.drafter
        self.config, self.material, self.target = config, material, loaded.target
        self.folder = Path(config.run.dir)
        torch.manual_seed(config.run.seed)
        vocab = material.vocab(cfg.draft_vocab_size)
        self.drafter = drafters.build(cfg, self.target, vocab).to(self.target.device)
        self.drafter.recompute = config.train.gradient_checkpointing
        self.rows = config.train.batch_tokens // config.data.max_length
        self.batches = Batches(material.train, self.rows, config.run.seed)
        began = clock()
        self.started_from = self._initialise() if begin else "first weights still to be found"
        fresh = not self.started_from.startswith("a checkpoint")
        self.start_seconds = clock() - began if fresh else None
        self.objective = Objective(
            self.drafter,
            self.target,
            weights=parse_depth_weights(cfg.depth_weights, cfg.depths),
            loss=cfg.loss,
            renormalise=cfg.renormalise,
            path="kept" if config.launch.name == "zero3" else "fused",
        )
        pieces = start.world_size() * config.launch.accumulation
        self.accelerator = start.accelerator(
            config.launch, config.train.clip, max(1, self.rows // pieces),
            sum(p.numel() for p in self.drafter.parameters() if p.requires_grad),
        )  # fmt: skip
        self.main = bool(self.accelerator.is_main_process)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.roll = Roll(rank, world, wait=60 * config.launch.wait)
        self.model, self.optimizer = self.accelerator.prepare(self.objective, self._optimizer())
        self.progress = checkpoint.Progress()
        self.guard = Guard(self.progress, config.train.skip_bad, config.train.spike)
        self.stop_signal: int | None = None
        self._meter, self._metered = Meter(), 0.0
        self.behind = Behind()
        self.ahead = Ahead(self._read, config.data.workers, config.train.max_steps)
        self.notes: list[str] = []  # to be said once there is somebody to say it to

    def _initialise(self) -> str:
        """First weights from the training text; a run that continues has its own already."""
        resume = self.config.train.resume
        if resume != "never" and checkpoint.found(self.folder / "checkpoints"):
            return "a checkpoint of this run"
        rows, source = self.material.train, self._source()
        fitted = getattr(self.config.drafter, "init", "linear") != "random"
        if source is not None and fitted and not source.knows_last:
            source = None  # the target says it once more
        order = permutation(self.config.run.seed, 0, len(rows))
        batches = (gather(rows, part) for part in order.split(FIT_BATCH))
        return self.drafter.initialise(self.target, (self._told(b, source) for b in batches))

    def _optimizer(self) -> torch.optim.Optimizer:
        """AdamW over one group, or more where norms do not decay or some parts learn slower.

        One where it can be: DeepSpeed links the moments for saving after the step of the first
        group, and never finds those of a second.
        """
        train, groups = self.config.train, dict[tuple[float, float], list[nn.Parameter]]()
        rates = self.drafter.rates()
        for name, parameter in self.drafter.named_parameters():
            if parameter.requires_grad:
                pace = next((f for start, f in rates.items() if name.startswith(start)), 1.0)
                decay = train.weight_decay if parameter.ndim > 1 else 0.0
                groups.setdefault((pace, decay), []).append(parameter)
        if len(groups) > 1 and self.config.launch.name.startswith("zero"):
            raise ConfigError(
                "launch", self.config.launch.name,
                "Norms that do not decay, or parts that learn slower, make several parameter "
                "groups, and DeepSpeed cannot save their moments.",
                "Use launch=ddp; or train.weight_decay=0 and one learning rate.",
            )  # fmt: skip
        parts = [
            {"params": params, "weight_decay": decay, "pace": pace}
            for (pace, decay), params in groups.items()
        ]
        # in the CPU's memory the plain loops would take eight times as long
        fused = True if self.config.launch.offload != "none" else None
        return torch.optim.AdamW(parts, lr=train.lr, betas=train.betas, fused=fused)

    # ---- data ----

    def trace(self, batch: Batch, held: bool, noted: bool = True) -> Trace:
        """The target's view of a batch: recorded (where it was noted), or computed now."""
        known = self.material.recorded if noted else None
        return self._told(batch, None if known is None else known[int(held)])

    def _told(self, batch: Batch, source: Traces | None) -> Trace:
        if source is not None:
            return source.trace(Batch(*(field.cpu() for field in batch)), self.target.device)
        return self.target.trace(*(field.to(self.target.device) for field in batch))

    def micro_batches(self, step: int) -> list[Piece]:
        """What this rank trains on, some of it in the drafter's own words if that is its way."""
        return [self._in_own_words(batch) for batch in self._batches(step)]

    def _in_own_words(self, batch: Batch) -> Piece:
        here = Batch(*(field.to(self.target.device) for field in batch))
        written = self.drafter.rewrite(here)
        return Piece(here, True) if written is None else Piece(written, False)

    def traces(self, step: int, pieces: list[Piece]) -> Iterator[Trace]:
        """The target's view of what this rank trains on; recordings are read a step ahead."""
        if isinstance(self._source(), Recording) and all(piece.noted for piece in pieces):
            yield from (trace.to(self.target.device) for trace in self.ahead.take(step))
        else:
            yield from (self.trace(piece.batch, False, piece.noted) for piece in pieces)

    def _source(self) -> Traces | None:
        return None if self.material.recorded is None else self.material.recorded[0]

    def _read(self, step: int) -> list[Trace]:
        """Recorded traces of a step, on the CPU; from threads too."""
        source, pieces = self._source(), self._batches(step)
        assert source is not None
        return [source.trace(batch) for batch in pieces]

    def _batches(self, step: int) -> list[Batch]:
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        return self.batches.micro(step, rank, world, self.config.launch.accumulation)

    def divisors(self, pieces: list[Piece]) -> Tensor:
        """Per depth, supervised rows of the whole step; the legacy switch counts all tokens."""
        cfg: Any = self.config.drafter
        if cfg.normalise == "tokens":
            return torch.full((cfg.depths,), float(self.rows * self.config.data.max_length))
        counts = torch.stack([count_rows(piece.batch, cfg.depths) for piece in pieces]).sum(0)
        return self.reduce(counts).clamp(min=1)

    def reduce(self, values: Tensor) -> Tensor:
        out: Tensor = self.accelerator.reduce(values.to(self.target.device), "sum")
        return out

    # ---- one step ----

    def learning_rate(self, done: float) -> float:
        """Linear warm-up, then what `train.schedule` says; `done` is the share of the run, 0..1."""
        train = self.config.train
        warm = train.warmup
        if isinstance(warm, int):
            warm = warm / max(1, train.max_steps or 1000)
        if done < warm:
            return train.lr * (done + 1e-2 * warm) / (1.01 * warm)
        left = 1 - min(1.0, (done - warm) / (1 - warm))
        shares = {"cosine": 0.5 - 0.5 * math.cos(math.pi * left), "linear": left, "constant": 1.0}
        return train.lr * shares[train.schedule]

    def done(self) -> float:
        """Share of the run that is over."""
        train, now = self.config.train, self.progress
        steps = now.step / train.max_steps if train.max_steps else 0.0
        minutes = now.seconds / (60 * train.max_minutes) if train.max_minutes else 0.0
        return max(steps, minutes)

    def sow(self, step: int) -> None:
        """Random numbers of a step (noise, dropout) depend on seed, step and rank alone."""
        rank = self.accelerator.process_index
        name = f"{self.config.run.seed} {step} {rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:7], "big"))

    def leave_out(self, pieces: list[Piece], wrong: str) -> str:
        """Keep the rows of a bad step and forget its gradients; returns what to say of it.

        Raises:
            RunError: no more steps may be left out.
        """
        self.optimizer.zero_grad()
        step, file = self.progress.step, self._keep(pieces)
        said = f"Step {step} is bad: {wrong}; its batch is in {file}."
        if not self.guard.may_skip():
            fix = "Look at the batch, lower train.lr, or allow more with train.skip_bad."
            raise RunError(said, fix)
        return f"{said} Left out ({self.progress.skipped} of {self.config.train.skip_bad})."

    def _keep(self, pieces: list[Piece]) -> Path:
        """Rows of this rank, for somebody to look at."""
        step, rank = self.progress.step, self.accelerator.process_index
        file = self.folder / f"bad-batch-step-{step:08d}-rank-{rank}.safetensors"
        fields = zip(*(piece.batch for piece in pieces), strict=True)
        rows = Batch(*(torch.cat(field) for field in fields))
        write_tensors(file, rows._asdict(), {})
        return file

    def weights(self) -> list[Tensor]:
        """Copies of what is trained, to measure a step by; none where ranks hold slices."""
        if self.config.launch.name == "zero3":
            return []
        return [p.detach().clone() for p in self.objective.parameters() if p.requires_grad]

    # ---- held-out evaluation, saving ----

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book time and energy."""
        began = clock()
        try:
            yield
        finally:
            phases = self.progress.phases
            phases[name] = phases.get(name, 0.0) + clock() - began
            self._book_energy()

    def _book_energy(self) -> None:
        if (now := self._meter.joules()) is not None:
            self.progress.joules = (self.progress.joules or 0.0) + now - self._metered
            self._metered = now

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Means over all held-out rows, shared by the ranks."""
        cfg: Any = self.config.drafter
        rows, world = self.material.held, self.accelerator.num_processes
        size = max(1, self.rows // (world * self.config.launch.accumulation))
        sums = self.objective.zero(self.target.device)
        divide = torch.ones(cfg.depths)
        self.objective.eval()  # no noise, no dropout
        for turn in range(-(-len(rows) // (world * size))):
            at = (turn * world + self.accelerator.process_index) * size
            index = torch.arange(at, at + size)
            batch = gather(rows, index % len(rows))
            # a rank that has run out repeats rows unheard: ZeRO-3 gathers weights in step
            batch = batch._replace(answer=batch.answer & (index < len(rows))[:, None])
            with self.accelerator.autocast():
                sums.add(self.objective(self.trace(batch, held=True), divide, True)[1])
        self.objective.train()
        return self.over_ranks(sums).means()

    def over_ranks(self, sums: Sums) -> Sums:
        """Added up over all ranks."""
        return sums.filled(self.reduce(sums.stacked()))

    def save(self) -> None:
        """Copy what a checkpoint needs; it is written behind the steps that follow."""
        now = copy.deepcopy(self.progress)
        tensors = checkpoint.gather(self.objective, self.optimizer if now.step > 0 else None)
        if self.main:
            self.behind.begin(partial(self._write, tensors, now))

    def _write(self, tensors: dict[str, Tensor], progress: checkpoint.Progress) -> None:
        train = self.config.train
        keep = checkpoint.Keep(train.keep_last, train.keep_every)
        checkpoint.save(self.folder / "checkpoints", tensors, progress, keep)
        best.forget(self, progress.best_step)

    def resume(self) -> bool:
        """Continue from the newest checkpoint, as train.resume says; whether one was loaded."""
        how, place = self.config.train.resume, self.folder / "checkpoints"
        known = checkpoint.found(place)
        if how == "never":
            self.accelerator.wait_for_everyone()
            if self.main:
                for old in (place, self.folder / "best", self.folder / "drafter"):
                    remove(old)
                for name in ("metrics.jsonl", IDENTITY):
                    (self.folder / name).unlink(missing_ok=True)
            return False
        if not known:
            if how == "must":
                raise RunError(f"{place} holds no checkpoint.", "Use train.resume=auto.")
            return False
        self._same_run()
        if self.config.launch.name.startswith("zero"):
            self._touch_optimizer()
        self.progress, wrong = checkpoint.newest(known, self.objective, self.optimizer)
        self.guard.progress = self.progress
        self.accelerator.wait_for_everyone()  # all ranks have read
        for error, spoiled in zip(wrong, reversed(known), strict=False):
            if self.main:
                checkpoint.set_aside(spoiled)
            self.notes.append(f"{error.message} Continuing from step {self.progress.step}.")
        return True

    def _touch_optimizer(self) -> None:
        """DeepSpeed makes its moments in the first step; a step of size zero makes them now."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        pieces = self.micro_batches(0)
        divide = self.divisors(pieces)
        for batch, noted in pieces:
            with self.accelerator.accumulate(self.model):
                loss, _ = self.model(self.trace(batch, False, noted), divide, False)
                self.accelerator.backward(0.0 * loss)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def _same_run(self) -> None:
        """Refuse to continue a run under settings that change what a step does."""
        before = dict(flat(resolved(parse(saved_config(self.folder)))))  # it may be older: defaults
        known = read_json(self.folder / "manifest.json", checkpoint.FIX).get("data", {})
        if known.get("sha256_documents") != self.material.about["sha256_documents"]:
            raise RunError(
                f"{self.folder} was trained on other text than this run has.",
                "Choose another run.dir, or start over with train.resume=never.",
            )
        if known.get("layout") != self.material.about.get("layout"):
            raise RunError(
                f"{self.folder} was trained from {_recording(known)}, and this run would go on "
                f"from {_recording(self.material.about)}.",
                "Give the data.traces that it began with, or start over with train.resume=never.",
            )
        for name, value in flat(resolved(self.config)):
            if name.startswith(FREE) or before.get(name) == value:
                continue
            raise ConfigError(
                name, value,
                f"{self.folder} holds a run that began with {name} = {before.get(name)!r}.",
                "Choose another run.dir, or start over with train.resume=never.",
            )  # fmt: skip

    # ---- leaving ----

    def listen(self) -> Callable[[], None]:
        """Ctrl-C and SIGTERM ask the loop to save and leave; returns how to stop listening."""

        def note(number: int, _frame: FrameType | None) -> None:
            self.stop_signal = number

        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore

    def agree(self) -> bool:
        """Take the main rank's clock for all; True when any rank was asked to stop.

        The learning rate and the end of a run in minutes hang on the clock, and ranks that differ
        in either drift apart or wait for each other for ever.
        """
        asked, seconds = float(self.stop_signal is not None), self.progress.seconds
        told = self.reduce(torch.tensor([asked, seconds * self.main], dtype=torch.float64))
        stop, self.progress.seconds = told.tolist()
        return bool(stop > 0)


def _recording(about: Mapping[str, Any]) -> str:
    """What it was trained from, of a run's manifest."""
    if "layout" not in about:
        return "traces that were not recorded by outrider record"
    return f"{about['traces']} ({about['layout']})"


def count_rows(batch: Batch, depths: int) -> Tensor:
    """Supervised rows of a batch at each depth, without asking the target."""
    nothing = torch.zeros(*batch.ids.shape, 0)
    trace = Trace(
        batch.ids, batch.ids, batch.answer, batch.document, batch.positions, nothing, nothing
    )
    return torch.stack([trace.counts(d).sum() for d in range(1, depths + 1)]).float()


def clock() -> float:
    return time.monotonic()
