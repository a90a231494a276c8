"""`outrider train drafter=draft_verify`: search the sublayers that a draft skips, then measure."""

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import folder_lock
from outrider.conf.packages import require_package
from outrider.conf.schema import Config
from outrider.data.reporter import Reporter
from outrider.data.target_fit import load_fitting_target
from outrider.eval import sublayer_results
from outrider.eval.open_drafter import build_untrained, describe_untrained
from outrider.eval.run import has_reports, short_reports
from outrider.eval.sublayer_search import FINALISTS, LOG, REPEATS, SublayerSearch
from outrider.eval.sublayer_speed import Skipped, SpeedMeasurement, search_prompts
from outrider.models.adapt import adapt
from outrider.models.decode.from_config import policy_of
from outrider.models.drafters.draft_verify import Config as DraftVerifyConfig
from outrider.models.formats.native import target_fingerprint
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.train.manifest import write_manifest
from outrider.train.schedule import format_seconds
from outrider.train.settings import FOUND, load_run

SHAPE = ("name", "depth", "width", "nodes", "confidence", "acceptance_goal", "gain", "tree")
LOG_FORMAT = "outrider-sublayer-search-1"


def search_sublayers(config: Config) -> int:
    """Search, write the result and measure it on evaluation prompts. Returns the exit code.

    The same command continues a stopped search.

    Raises:
        ConfigError: the target or the given lists do not suit a search, or the folder has a search
            with other settings.
        RunError: several processes were started, or there are too few prompts.
    """
    if process.world_size() > 1:
        message = f"The search was started by {process.world_size()} processes; it runs in one."
        raise RunError(message, "Use: outrider train drafter=draft_verify ..., without a launcher.")
    require_package("optuna", "drafter", config.drafter.name)
    if config.target.place not in ("replicated", "apart"):
        why = "The search decodes with the whole target in one process."
        raise ConfigError("target.place", config.target.place, why, "Use target.place=replicated.")
    folder = Path(config.run.dir)
    with folder_lock(folder):
        if (folder / "config.yaml").is_file() and not (folder / LOG).is_file():
            why = "It is the folder of another run."
            raise ConfigError("run.dir", config.run.dir, why, "Choose another run.dir.")
        return _search(config, Console())


def _search(config: Config, console: Console) -> int:
    process.set_threads()
    loaded = load_fitting_target(config, trains=True, measures=config.train.quick_eval)
    console.print(f"target: {loaded.source}")
    reporter = Reporter(console)
    config = adapt(config, reporter.note, loaded.target.shape())
    cfg, folder, layers = config.drafter, Path(config.run.dir), loaded.target.num_layers
    assert isinstance(cfg, DraftVerifyConfig), "the only drafter that is searched"
    prompts = search_prompts(config, loaded, cfg.search)
    settings = _settings(config, loaded, prompts)
    decode = replace(config.decode, temperature=0.0, verify="auto", draft="auto")
    measurement = SpeedMeasurement(loaded, cfg, policy_of(decode), prompts)
    given = Skipped(*(tuple(sorted({*part})) for part in (cfg.skip_attention, cfg.skip_mlp)))
    seed = config.run.seed
    search = SublayerSearch(folder, layers, cfg.search, seed, measurement, reporter, given)
    measured = search.resume(settings)
    if sublayer_results.is_finished(folder, cfg.search):
        console.print(
            f"{folder} is finished: {measured} candidates. To measure it: outrider eval "
            f"run.dir={folder}; to go on, raise drafter.search.trials or drafter.search.minutes.",
            soft_wrap=True,
        )
    else:
        write_manifest(folder, config, {"fingerprints": {"target": settings["target"]}})
        _print_estimate(reporter, cfg, measurement, measured)
        trials = search.run()
        finalists = search.finalists()
        sublayer_results.save(folder, layers, trials, finalists, settings, cfg.search)
        sublayer_results.show(folder, trials, finalists, console)
    if config.train.quick_eval and not has_reports(config, folder / FOUND):
        _measure(config, loaded, console)
    return 0


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
    reporter: Reporter, cfg: DraftVerifyConfig, measurement: SpeedMeasurement, measured: int
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
    assert isinstance(cfg, DraftVerifyConfig), "see search_sublayers"
    config = replace(config, drafter=cfg)
    drafter = build_untrained(cfg, loaded.target)
    for _ in short_reports(config, loaded, drafter, describe_untrained(cfg), console):
        pass
