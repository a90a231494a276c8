"""The validated configuration of a training run, of a run folder, or of a published drafter."""

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from outrider.conf.automatic import fill_automatic
from outrider.conf.compose import (
    check_choice,
    choices,
    compose,
    default_values,
    flatten,
    read_yaml,
    refuse_interpolations,
    to_container,
    training_key_error,
)
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import from_dict, unknown_key
from outrider.conf.hub import require_folder_or_id
from outrider.conf.json_shapes import read_object, token
from outrider.conf.plugins import OWN_PART, is_plugin, merge_plugins, require_loaded
from outrider.conf.schema import GROUPS, Config, DrafterSettings, UntrainedConfig, to_dict
from outrider.conf.searched import SearchedConfig
from outrider.conf.short_forms import is_path

INPUT_FILES = ("data.path", "data.given", "eval.prompts")  # keys of files that a run reads
FOUND = "found.json"  # in a run folder: the settings of the drafter that a search has found
FOUND_FORMAT = "outrider-found-1"
FOUND_SHAPE = {
    "format": FOUND_FORMAT, "drafter": {str: [token]}, "speedup": float,
    "finalists": [{"skip_attention, skip_mlp": [token], "speedup, tau, accepted": float}],
}  # fmt: skip
CHANGEABLE_KEYS = (  # an evaluation may set them differently from the training
    "run.seed", "target.path", "target.dtype", "target.trust_remote_code", "target.place",
    "target.devices", "target.thinking", "target.template_args", "data.overlap",
)  # fmt: skip


def parse(node: DictConfig, *, to_train: bool = True, searched: bool = False) -> Config:
    """Validate what `compose` returns, or the `config.yaml` of a run folder; loads no model.

    Args:
        to_train: refuse a drafter without weights.
        searched: but not one whose settings `train` searches.

    Raises:
        ConfigError: the first unknown key, wrong type, value out of range, or contradiction.
    """
    values, groups, automatic = read_groups(node)
    name = values["drafter"].get("name")
    if to_train and is_untrained(name) and not (searched and is_searched(name)):
        raise _nothing_to_train(name)
    schema = drafter_schema(values["drafter"])
    drafter: DrafterSettings = from_dict(schema, values["drafter"], "drafter")
    config = Config(**groups, drafter=drafter, automatic=automatic)
    from outrider.train.checks import CHECKS

    for check in CHECKS:
        check(config)
    return config


def read_groups(node: DictConfig) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Validate what can be without model code, whose import takes seconds.

    Returns:
        All values, the groups but the drafter as dataclasses, and the keys of `Config.automatic`.
    """
    values = to_container(node)
    refuse_interpolations(values)
    automatic = fill_automatic(values)
    for group, content in values.items():
        if group not in (*GROUPS, "drafter"):
            raise unknown_key(group, content, (*GROUPS, "drafter"))
        if not isinstance(content, dict):
            raise ConfigError(group, content, "This is a group of keys.", f"Set {group}.<key>=...")
    groups = {name: from_dict(kind, values.get(name, {}), name) for name, kind in GROUPS.items()}
    require_loaded(groups["run"].plugins)
    check_choice("drafter", values.setdefault("drafter", {}))
    return values, groups, automatic


def _nothing_to_train(name: str) -> ConfigError:
    words = f"drafter={name} target=... run.dir=..."
    fix = f"Measure it: outrider eval {words}"
    if is_searched(name):
        fix = f"Search its settings: outrider train {words}\n  {fix}"
    return ConfigError("drafter", name, "It has no weights: there is nothing to train.", fix)


def drafter_schema(values: object) -> type:
    """Return the `Config` dataclass of the drafter named in `values`.

    A drafter is identified only by its file's name, or a name that a loaded plugin registered, so a
    configuration cannot name code to run.
    """
    name = values.get("name") if isinstance(values, dict) else None
    known = choices("drafter")
    if not isinstance(name, str) or name not in known:
        why, fix = "There is no drafter of this name.", f"Use one of: {', '.join(known)}."
        raise ConfigError("drafter.name", name, why, f"{fix} {OWN_PART}")
    from outrider.models import drafters

    return drafters.config_class(name)


def is_untrained(name: str) -> bool:
    """Return whether a drafter of this name exists that has no weights, by its yaml file."""
    return name in choices("drafter") and "drafter.loss" not in default_values(f"drafter/{name}")


def is_searched(name: str) -> bool:
    """Return whether `train` searches the settings of this drafter, by its yaml file."""
    return name in choices("drafter") and "drafter.search.trials" in default_values(
        f"drafter/{name}"
    )


def check_published(name: str) -> None:
    """Raise a `ConfigError` if `drafter=NAME` is a drafter with weights, mistyped or not."""
    known = choices("drafter")
    if is_path(name, known) or Path(name).expanduser().exists():
        return require_folder_or_id("drafter", name)
    if name in known:
        why = "It has weights, which a training writes to its run folder."
        fix = f"Train it: outrider train drafter={name} target=... run.dir=runs/{name}\n"
        fix += f"  Then use its run: run.dir=runs/{name} alone; in Python, Decoder.from_run."
        raise ConfigError("drafter", name, why, fix)
    why = "There is no folder, no hub id and no drafter of this name."
    fix = f"Drafters without weights: {', '.join(filter(is_untrained, known))}."
    raise ConfigError("drafter", name, why, f"{fix}\n  Others need their run: run.dir=runs/<name>.")


def check_files(config: Config, *keys: str) -> None:
    """Raise a `ConfigError` for a key such as data.path whose file is missing."""
    from outrider.data.sources import data_source, require_path, suite_source

    if "data.path" in keys:
        require_path(config.data)
    sources = {"data.path": data_source, "data.given": data_source, "eval.prompts": suite_source}
    values = dict(flatten(to_dict(config)))
    for key in keys:
        path = values.get(key)
        if path is not None and key in sources:
            sources[key](path, key)
        elif path is not None and not Path(path).expanduser().exists():
            fix = f"Paths start at the current folder, {Path.cwd()}."
            raise ConfigError(key, path, "There is no such file or folder.", fix)


def check_places(config: Config, *, trains: bool) -> None:
    """Raise a `ConfigError` for models that are no folder and can be no hub id.

    Args:
        trains: the drafter is built, not read from a run.
    """
    values = dict(flatten(to_dict(config)))
    keys = ["target.path", "eval.drafter"]
    if trains or isinstance(config.drafter, UntrainedConfig):
        keys += [key for key in values if re.fullmatch(r"drafter\.(inner\.)*path", key)]
    for key in keys:
        if values[key] is not None:
            require_folder_or_id(key, str(values[key]))


def load_run(folder: str | Path, overrides: list[str]) -> Config:
    """Return the configuration for measuring a finished run.

    All comes from `<folder>/config.yaml`, except for eval and decode, which conf/eval.yaml and
    `overrides` set, for CHANGEABLE_KEYS in `overrides`, and for the settings of the drafter that a
    search has found.

    Raises:
        RunError: the folder has no readable config.yaml, or its search has not finished.
        ConfigError: an override that does not exist or would change what was trained.
    """
    evaluation = _compose_evaluation(overrides)
    refuse_interpolations({"run": {"dir": str(folder)}})
    saved = read_saved_config(Path(folder))
    saved.eval, saved.decode = evaluation.eval, evaluation.decode
    saved.run.dir = str(folder)
    recorded = saved.run.get("plugins", OmegaConf.create([]))
    if isinstance(recorded, ListConfig) and all(map(is_plugin, recorded)):
        saved.run.plugins = merge_plugins(recorded, evaluation.run.plugins)
    for key in CHANGEABLE_KEYS:
        if (value := OmegaConf.select(evaluation, key)) is not None:
            OmegaConf.update(saved, key, value)
    config = parse(saved, searched=True)
    if not isinstance(config.drafter, SearchedConfig):
        return config
    saved.drafter.update(read_found(Path(folder))["drafter"])
    return parse(saved, searched=True)


def read_found(folder: Path) -> dict[str, Any]:
    """Read the result of a search; without one, raise a RunError."""
    file = folder / FOUND
    if not file.is_file():
        message = f"{folder} has no {FOUND}: its search has not finished."
        raise RunError(message, "Finish it: the same outrider train command continues it.")
    return read_object(file, "Search again, with another run.dir.", FOUND_SHAPE)


def load_published(overrides: list[str], *, report: bool = True) -> Config:
    """Return the configuration for decoding with a published drafter, or one without weights.

    The target is chosen as in training, or `target=` names a folder or hub id. `drafter` is the one
    without weights, or a placeholder until the files of `eval.drafter` are read. A `report` needs a
    folder of its own.
    """
    groups = ("target=", "target.", "drafter=", "drafter.")
    words = [word for word in overrides if word.startswith(groups)]
    evaluation = _compose_evaluation([word for word in overrides if word not in words])
    folder = evaluation.run.dir
    if report and (not folder or (Path(folder) / "config.yaml").exists()):
        why = "This report needs its own folder, not a training run's."
        raise ConfigError("run.dir", folder, why, "Add run.dir=runs/<name>.")
    if not any(word.startswith("target=") for word in words):
        why = "This drafter needs its target."
        raise ConfigError("target", None, why, "Add target=<folder or hub id>, tiny or smollm2.")
    config = compose(words, "train")
    config.eval, config.decode, config.run.dir = evaluation.eval, evaluation.decode, folder or "."
    config.run.seed, config.run.plugins = evaluation.run.seed or 0, evaluation.run.plugins
    return parse(config, to_train=False)


def _compose_evaluation(overrides: list[str]) -> DictConfig:
    """Compose conf/eval.yaml, resolved; refuse `+train.lr=1`, which an evaluation would ignore."""
    values = to_container(compose(overrides, "eval"))
    refuse_interpolations(values)
    known = ("run.dir", "run.plugins", *CHANGEABLE_KEYS)
    for key, value in flatten(values):
        if not key.startswith(("eval.", "decode.")) and key not in known:
            raise training_key_error(key, value)
    return OmegaConf.create(values)


def read_saved_config(folder: Path) -> DictConfig:
    """Read a run folder's `config.yaml`, not yet validated; a `RunError` if it is not one."""
    path = folder / "config.yaml"
    if not path.is_file():
        fix = "Use the run.dir of a training run: run.dir=runs/..."
        raise RunError(f"{folder} is not a run folder: it has no config.yaml.", fix)
    fix = "Restore it, or train again."
    saved = read_yaml(path, fix)
    groups = [saved.get(name) for name in ("run", "target", "drafter")]
    if not all(isinstance(group, DictConfig) for group in groups):
        raise RunError(f"{path} is not the configuration of a run.", fix)
    return saved
