"""A run whose training loop is the user's own: target, text, drafter, objective and result."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.conf.schema import Config
from outrider.conf.searched import SearchedConfig
from outrider.data.corpus import load_training_data
from outrider.data.python_rows import with_rows
from outrider.data.reporter import Reporter
from outrider.data.sources import require_path
from outrider.data.target_fit import load_adapted
from outrider.data.training_data import TrainingData
from outrider.models import drafters
from outrider.models.formats.fingerprints import fingerprints
from outrider.models.interface import Trace
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.train import best_drafter, checkpoint
from outrider.train.checks import check_length
from outrider.train.manifest import write_manifest
from outrider.train.trainer import Trainer


class TrainingRun(Trainer):
    """A `Trainer` for a loop of one's own, in one process::

        run = TrainingRun.open(configure(["drafter=eagle3", "run.dir=runs/own"]))
        optimizer = torch.optim.AdamW(run.drafter.parameters(), lr=1e-3)
        for step in range(100):
            for trace, counts in run.traces(step):
                loss, metrics = run.objective(trace, counts)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        run.finish(steps=100)

    `run.drafter` holds the trained weights, `run.target` the frozen model; `run.optimizer` is the
    one of `train.optimizer`, which a loop may use or not.
    """

    def __init__(self, config: Config, loaded: LoadedTarget, data: TrainingData) -> None:
        super().__init__(config, loaded, data)
        self.loaded = loaded

    @classmethod
    def open(
        cls, config: Config, *, rows: Iterable[Mapping[str, Any]] | None = None
    ) -> "TrainingRun":
        """Load the target, prepare the text, and build the drafter with its initial weights.

        Args:
            rows: training text, as for `train`.

        Raises:
            ConfigError: the settings do not suit the target, the drafter is not trained, or the
                run folder holds checkpoints of `train`.
        """
        console = Console()
        if isinstance(config.drafter, SearchedConfig):
            why = "It is searched, not trained."
            raise ConfigError("drafter", config.drafter.name, why, "Choose one with weights.")
        if checkpoint.list_checkpoints(Path(config.run.dir) / "checkpoints"):
            why = "It holds checkpoints of train, which a loop of your own cannot continue."
            raise ConfigError("run.dir", config.run.dir, why, "Choose another folder.")
        if rows is not None:
            config = with_rows(config, rows, partial(console.print, soft_wrap=True))
        require_path(config.data)
        process.set_threads()
        reporter = Reporter(console)
        config, loaded = load_adapted(config, reporter, begins=True, trains=True)
        check_length(config)
        taps = drafters.resolve_taps(config.drafter, loaded.target.num_layers)
        return cls(config, loaded, load_training_data(config, loaded, taps, reporter))

    def traces(self, step: int) -> Iterator[tuple[Trace, Tensor]]:
        """Yield the forward passes of a step: the target's trace, and the loss's denominators.

        The denominators are the supervised rows of the whole step per depth, so the gradients of
        all passes add up to that of the step. Noise is seeded by the step.
        """
        self.seed_step(step)
        self.drafter.begin_step(step, step / (self.config.train.max_steps or step + 1))
        micro_batches = self.step_data.micro_batches(step)
        counts = self.loss_denominators(micro_batches)
        for trace in self.step_data.traces(step, micro_batches):
            yield trace, counts

    def measure(self) -> dict[str, float]:
        """Return the metrics of the held-out text: docs/reference/metrics."""
        return self.evaluate(self.data.held, self.sources.held)

    def finish(self, steps: int) -> Path:
        """Measure the drafter and write it as the run's result; return its folder.

        `outrider eval`, `report`, `publish` and the others then read the run folder.
        """
        self.progress.step, self.progress.best = steps, -1.0
        best_drafter.save_if_best(self, self.measure(), {})
        prints = fingerprints(self.loaded)
        facts = {"data": self.data.about, "target": self.loaded.source, "fingerprints": prints}
        write_manifest(self.folder, self.config, {**facts, "ranks": 1})
        self.close()
        return best_drafter.write_result(self)
