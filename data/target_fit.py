"""Loading of a run's target, after a check of all settings that depend on its configuration.

The configuration of the target is read first, alone. Settings that do not suit it are refused
before its weights are read and before any text is prepared.
"""

from outrider.conf.errors import ConfigError
from outrider.conf.schema import Config
from outrider.conf.searched import SearchedConfig
from outrider.data.record.layout import check_record
from outrider.data.reporter import Reporter
from outrider.models import drafters
from outrider.models.adapt import adapt
from outrider.models.decode.from_config import decodings, sampling_of
from outrider.models.decode.tree_layout import tree_refusal
from outrider.models.interface import ModelShape
from outrider.models.target import load, process
from outrider.models.target.load import LoadedTarget


def load_fitting_target(
    config: Config,
    *,
    begins: bool = False,
    trains: bool = False,
    measures: bool = False,
    records: bool = False,
) -> LoadedTarget:
    """Load the target of a run onto the process's device.

    Args:
        begins: training starts from the drafter's first weights.
        trains: the text is used, too.
        measures: prompts of the suite are decoded.
        records: features are recorded.

    Raises:
        ConfigError: a setting does not suit the target, or the target cannot be loaded.
    """
    if load.is_recurrent(config.target):
        check_recurrent_fit(config)
    if shape := load.read_shape(config.target):
        check_fit(config, shape)
        if trains:
            _check_text(config, shape)
        if begins:
            cfg = config.drafter
            drafters.drafter_class(cfg.name).check_first_weights(cfg, shape)
        if measures:
            _check_answers(config, shape)
        if records or (trains and config.data.mode == "recorded" and not config.data.traces):
            check_record(config.record, config.drafter, shape.vocab)
    return load.load_target(config.target, process.device())


def load_adapted(config: Config, reporter: Reporter, **uses: bool) -> tuple[Config, LoadedTarget]:
    """Load the target, print its source, and return it with the settings adapted to it.

    Args:
        uses: those of `load_fitting_target`.
    """
    loaded = load_fitting_target(config, **uses)
    reporter.console.print(f"target: {loaded.source}")
    return adapt(config, reporter.note, loaded.target.shape()), loaded


def check_fit(config: Config, shape: ModelShape) -> None:
    """Check the drafter, unless it is a published one, and the settings of sampling."""
    if config.eval.drafter is None:
        drafters.check(config.drafter, shape)
    for _, decode in decodings(config):
        sampling_of(decode, shape.vocab)


def check_recurrent_fit(config: Config) -> None:
    """Check the drafter, unless it is a published one, and the policies of decoding."""
    if config.eval.drafter is None:
        drafters.check_recurrent(config.drafter.name)
    for _, decode in decodings(config):
        if decode.kind in ("static_tree", "dynamic_tree", "merged_tree"):
            raise tree_refusal("target", decode.name)


def _check_text(config: Config, shape: ModelShape) -> None:
    """Check the length of rows, and of the prompts of a search."""
    longest, data = shape.max_positions, config.data
    if data.max_length > longest and "data.max_length" not in config.automatic:
        why = f"The target has {longest} positions."
        raise ConfigError("data.max_length", data.max_length, why, f"Use at most {longest}.")
    if not isinstance(config.drafter, SearchedConfig):
        return
    search = config.drafter.search
    if max(search.contexts) + search.tokens > longest:
        why = f"The target has {longest} positions, for a prompt and {search.tokens} tokens more."
        fix = "Use shorter contexts."
        raise ConfigError("drafter.search.contexts", [*search.contexts], why, fix)


def _check_answers(config: Config, shape: ModelShape) -> None:
    """Check that a prompt fits beside an answer."""
    count, longest = config.eval.max_new_tokens, shape.max_positions
    if count >= longest:
        why = f"The target has {longest} positions, for a prompt and its answer."
        raise ConfigError("eval.max_new_tokens", count, why, f"Use less than {longest}.")
