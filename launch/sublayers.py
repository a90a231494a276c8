"""`outrider train` of a `SearchedConfig`: search the sublayers that a draft skips, then measure."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.packages import require_package
from outrider.conf.schema import Config
from outrider.conf.searched import SearchedConfig, Skipped
from outrider.data.reporter import Reporter
from outrider.eval import sublayer_results
from outrider.eval.open_drafter import build_untrained, describe_untrained
from outrider.eval.run import has_reports, short_reports
from outrider.eval.sublayer_search import FINALISTS, LOG, REPEATS, SublayerSearch
from outrider.eval.sublayer_speed import SpeedMeasurement, search_prompts
from outrider.models.decode.from_config import policy_of
from outrider.models.formats.native import target_fingerprint
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.train.callbacks import Callback
from outrider.train.manifest import write_manifest
from outrider.train.schedule import format_seconds
from outrider.train.settings import FOUND, load_run

SHAPE = ("name", "depth", "width", "nodes", "confidence", "acceptance_goal", "gain", "tree")
LOG_FORMAT = "outrider-sublayer-search-1"


def check_search(config: Config, callbacks: Sequence[Callback]) -> None:
    """Check what a search needs, before anything is loaded.

    Raises:
        ConfigError: the settings or the folder do not suit a search.
        RunError: several processes were started.
    """
    name = config.drafter.name
    if callbacks:
        why = f"drafter={name} is searched, not trained."
        raise ConfigError("callbacks", list(callbacks), why, "Leave callbacks out.")
    if process.world_size() > 1:
        message = f"The search was started by {process.world_size()} processes; it runs in one."
        raise RunError(message, f"Use: outrider train drafter={name} ..., without a launcher.")
    require_package("optuna", "drafter", name)
    if config.target.place not in ("replicated", "apart"):
        why = "The search decodes with the whole target in one process."
        raise ConfigError("target.place", config.target.place, why, "Use target.place=replicated.")
    folder = Path(config.run.dir)
    if (folder / "config.yaml").is_file() and not (folder / LOG).is_file():
        why = "It is the folder of another run."
        raise ConfigError("run.dir", config.run.dir, why, "Choose another run.dir.")


def search_sublayers(config: Config, loaded: LoadedTarget, reporter: Reporter) -> None:
    """Search, write the result and measure it on evaluation prompts.

    The same command continues a stopped search.

    Raises:
        ConfigError: the given lists do not suit a search, or the folder has a search with other
            settings.
        RunError: there are too few prompts.
    """
    cfg, folder, layers = config.drafter, Path(config.run.dir), loaded.target.num_layers
    assert isinstance(cfg, SearchedConfig), "train searches no other drafter"
    prompts = search_prompts(config, loaded, cfg.search)
    settings = _settings(config, loaded, prompts)
    decode = replace(config.decode, temperature=0.0, verify="auto", draft="auto")
    measurement = SpeedMeasurement(loaded, cfg, policy_of(decode), prompts)
    seed = config.run.seed
    search = SublayerSearch(folder, layers, cfg.search, seed, measurement, reporter, cfg.skipped)
    measured = search.resume(settings)
    if sublayer_results.is_finished(folder, cfg.search):
        reporter.print(
            f"{folder} is finished: {measured} candidates. To measure it: outrider eval "
            f"run.dir={folder}; to go on, raise drafter.search.trials or drafter.search.minutes."
        )
    else:
        write_manifest(folder, config, {"fingerprints": {"target": settings["target"]}})
        _print_estimate(reporter, cfg, measurement, measured)
        trials = search.run()
        finalists = search.finalists()
        sublayer_results.save(folder, layers, trials, finalists, settings, cfg.search)
        sublayer_results.show(folder, trials, finalists, reporter.console)
    if config.train.quick_eval and not has_reports(config, folder / FOUND):
        _measure(config, loaded, reporter.console)


def _settings(config: Config, loaded: LoadedTarget, prompts: list[list[int]]) -> dict[str, Any]:
    """Return what the values of candidates depend on; a search continues only with the same."""
    decode, cfg, target = asdict(config.decode), asdict(config.drafter), loaded.target
    return {
        "format": LOG_FORMAT, "target": target_fingerprint(target), "dtype": str(target.dtype),
        "device": target.device.type, "seed": config.run.seed,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "tokens": cfg["search"]["tokens"], "decode": {name: decode[name] for name in SHAPE},
        "given": [cfg["skip_attention"], cfg["skip_mlp"]],
    }  # fmt: skip


def _print_estimate(
    reporter: Reporter, cfg: SearchedConfig, measurement: SpeedMeasurement, measured: int
) -> None:
    """Time a candidate that skips nothing, which is also a warm-up, and print the estimate."""
    start, search = time.monotonic(), cfg.search
    list(measurement(Skipped()))
    seconds = time.monotonic() - start
    lengths = [len(prompt) for prompt in measurement.prompts]
    reporter.print(
        f"prompts: {len(lengths)}, of {min(lengths)} to {max(lengths)} tokens, with up to "
        f"{search.tokens} new tokens each; the prefill is not timed"
    )
    left = max(0, search.trials - measured)
    total, limit = format_seconds(seconds * left), ""
    if search.minutes is not None and 60 * search.minutes < seconds * left:
        limit = f"; the search ends after {search.minutes:g} min (drafter.search.minutes)"
    earlier = f"{measured} candidates were measured before; " if measured else ""
    again = format_seconds(seconds * FINALISTS * REPEATS)
    reporter.print(
        f"{earlier}{left} to measure, about {seconds:.1f} s each: {total}{limit}. Then the best "
        f"{FINALISTS} are measured {REPEATS} times: {again}"
    )


def _measure(config: Config, loaded: LoadedTarget, console: Console) -> None:
    """Measure what was found on prompts of the evaluation suite, which the search has not seen."""
    cfg = load_run(config.run.dir, []).drafter
    assert isinstance(cfg, SearchedConfig), "see search_sublayers"
    config = replace(config, drafter=cfg)
    drafter = build_untrained(cfg, loaded.target)
    for _ in short_reports(config, loaded, drafter, describe_untrained(cfg), console):
        pass
