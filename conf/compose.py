"""Composition of yaml files and overrides into one plain configuration, by Hydra's compose API.

The roots are `train.yaml`, `eval.yaml` and `report.yaml`; each folder of `conf/` is a group, each
file a choice. The compose API writes nothing and keeps the working directory: any rank may
compose. Hydra's exceptions become `ConfigError`.
"""

import copy
import dataclasses
import functools
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import check_plain, convert, from_dict, leaf_fields, unknown_key
from outrider.conf.plugins import OWN_PART, require_loaded
from outrider.conf.short_forms import OPTIMIZER, SHORT_FORMS, config_words, expand

T = TypeVar("T")
CONF = Path(__file__).parent
OF_ONE_POLICY = tuple(  # settings of a draft's shape
    f"decode.{name}"
    for name in ("width", "nodes", "tree", "gain", "confidence", "acceptance_goal", "auto.eps")
)
VALUE = re.compile(r"\w+(\.\w+)+=")  # the beginning of an override that is no choice of a group
YAML_BYTES, YAML_DEPTH = 1 << 18, 32  # of a saved configuration, which has 5 KB and 4 levels


class AddedChoice(NamedTuple):
    """A choice without a file."""

    values: dict[str, Any]
    meanings: dict[str, str]  # full key -> its meaning


ADDED: dict[str, AddedChoice] = {}  # "drafter/mine" -> what a plugin registered


def compose(overrides: Sequence[str] = (), root: str = "train") -> DictConfig:
    """Compose a root with overrides; `train.settings.parse` validates the result.

    Args:
        overrides: Hydra's grammar, as on the command line: ["target=smollm2", "train.lr=1e-4"],
            or a short form, ["target=Qwen/Qwen3-8B", "data=chats.jsonl"].
        root: "train", "eval", or one file of a group such as "data/self".

    Raises:
        ConfigError: unknown key, group or choice, or an override that cannot be read.
    """
    if root == "train":
        overrides = expand(overrides, {one: choices(one) for one in (*SHORT_FORMS, OPTIMIZER)})
    elif root in ("eval", "report"):
        overrides = expand(overrides, {"target": []})
    try:
        node = _compose(root, tuple(overrides))
    except OverrideParseException as error:
        why = "This is not an override."
        fix = "Write key=value; quote special characters: 'key=\"a, b\"'."
        raise ConfigError("overrides", error.override, why, fix) from None
    except Exception as error:  # hydra and OmegaConf raise many kinds
        raise _translate(error, overrides, root) from None
    _refuse_beside_grid(node, overrides)
    return node


def _refuse_beside_grid(node: DictConfig, overrides: Sequence[str]) -> None:
    """Raise a `ConfigError` for a setting of `decode` that no entry of `eval.grid` would use.

    A search of sublayers (`drafter.search`) uses all of them.
    """
    grid = OmegaConf.select(node, "eval.grid")
    if not isinstance(grid, ListConfig) or not grid or OmegaConf.select(node, "drafter.search"):
        return
    own, policies = node.decode.name, [str(entry).partition("@")[0] for entry in grid]
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        why = fix = ""
        if key == "decode.temperature":
            why, fix = "Every entry of eval.grid has its own temperature.", f"Write {own}@{value}."
        elif key in ("decode", *OF_ONE_POLICY) and own not in policies:
            why = f"No entry of eval.grid has the policy {own}, which this sets."
            fix = f"Drop it, choose decode={policies[0]}, or add {own}@0 to eval.grid."
        if why:
            raise ConfigError(key, value, why, fix)


def _compose(root: str, words: tuple[str, ...]) -> DictConfig:
    """Compose once for the same choices, and set the values of single keys in a copy.

    Whatever is not a value for an existing key is left to Hydra, errors included.
    """
    values = [word for word in words if VALUE.match(word)]
    try:
        if not any(word.startswith(("+", "~")) for word in words):
            node = _composed(root, tuple(word for word in words if word not in values))
            return _with_values(copy.deepcopy(node), values)
    except (HydraException, OmegaConfBaseException):
        pass
    return copy.deepcopy(_composed(root, words))


@functools.lru_cache(maxsize=128)
def _composed(root: str, words: tuple[str, ...]) -> DictConfig:
    """Run Hydra, which takes 0.1 s."""
    with initialize_config_dir(str(CONF.absolute()), version_base="1.3"):
        return hydra_compose(root, list(words))


def _with_values(node: DictConfig, words: list[str]) -> DictConfig:
    """Set the values of `train.lr=0.1, ..` in a composed node, as Hydra does."""
    for override in OverridesParser.create().parse_overrides(words):
        if override.is_sweep_override():
            raise HydraException("a sweep")
        OmegaConf.update(node, override.key_or_group, override.value(), merge=True)
    return node


def to_container(node: DictConfig, *, resolve: bool = True) -> dict[str, Any]:
    """Convert to plain dicts, lists and values, with every ${...} resolved.

    Raises:
        ConfigError: a ${...} without a value, or a value of ???.
    """
    try:
        values = OmegaConf.to_container(node, resolve=resolve, throw_on_missing=resolve)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "configuration")
        why = str(error).splitlines()[0]
        raise ConfigError(key, error.value, why, f"Set a value: {key}=...") from None
    assert isinstance(values, dict), "a DictConfig becomes a dict"
    return {str(name): value for name, value in values.items()}


def refuse_interpolations(values: Mapping[str, Any], place: str = "") -> None:
    """Raise a `ConfigError` for text with ${...} in resolved values: it would be resolved again.

    The text itself is not shown: it may be a value of the environment.
    """
    for key, value in flatten(values):
        if "${" in f"{key} {value}":
            why = "It holds ${...}: only the command line of a new run may, and only once."
            fix = "Write the value itself."
            raise ConfigError(f"{place}{key}" if "${" not in key else place, "${...}", why, fix)


def read_yaml(file: Path, fix: str) -> DictConfig:
    """Read a saved yaml file as data: no ${...}, no aliases; size and depth are bounded.

    Raises:
        RunError: it cannot be read, or is not a mapping; the message ends with `fix`.
        ConfigError: it holds an interpolation.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(YAML_BYTES + 1).decode()
        if len(text) > YAML_BYTES:
            raise ValueError(f"it is larger than {YAML_BYTES} bytes")
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > YAML_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has aliases, or is nested deeper than {YAML_DEPTH} levels")
        node = OmegaConf.load(io.StringIO(text))
        if not isinstance(node, DictConfig):
            raise ValueError("it is not a mapping")
        values = to_container(node, resolve=False)
        json.dumps(values)  # a TypeError for bytes and other values that no setting has
    except Exception as error:  # yaml and OmegaConf raise many kinds
        raise RunError(f"{file} cannot be read: {error}", fix) from None
    refuse_interpolations(values, f"{file}: ")
    return node


def read_overrides(file: str) -> list[str]:
    """Return the overrides of a user's yaml file (`--config FILE`): see `config_words`.

    It may be the config.yaml of a run: the plugins that it records must be named by the user.
    """
    fix = "Write groups and keys: `drafter: eagle3`, and `train:` with `lr: 1e-4` below it."
    if not Path(file).expanduser().is_file():
        raise ConfigError("--config", file, "There is no such file.", fix)
    values = to_container(read_yaml(Path(file).expanduser(), fix), resolve=False)
    run = values.get("run")
    if isinstance(run, dict) and isinstance(recorded := run.get("plugins"), list):
        del run["plugins"]
        require_loaded(recorded)
    return config_words(values, {group: choices(group) for group in groups()})


def groups(root: str = "train") -> dict[str, str | None]:
    """Return the groups of a root and the default choice of each, as in {"target": "tiny", ...}."""
    defaults = default_choices(root)
    if "target" in defaults and "data" in defaults:  # the target decides the default data
        defaults["data"] = compose([], root).data.name
    return defaults


def default_choices(root: str) -> dict[str, str | None]:
    """Return the groups of a root as its file has them; that of data may depend on another."""
    defaults: dict[str, str | None] = {}
    node: Any = OmegaConf.load(CONF / f"{root}.yaml")
    for entry in node.get("defaults", []):
        if isinstance(entry, DictConfig):
            ((name, choice),) = to_container(entry, resolve=False).items()
            if not name.startswith("override "):
                defaults[name] = choice
    return defaults


def choices(group: str) -> list[str]:
    """Return the choices of a group, sorted: ["hf", "smollm2", "tiny"] of "target"."""
    added = [name.rpartition("/")[2] for name in ADDED if name.rpartition("/")[0] == group]
    return sorted([*(path.stem for path in (CONF / group).glob("*.yaml")), *added])


def add_choice(group: str, settings: Any, **values: Any) -> None:
    """Add a choice to a group, as a file of its name would: of a part that a plugin registers.

    Args:
        settings: a dataclass object with the values of its keys; `name` is the choice.
        values: of keys whose value is another one, such as null.
    """
    plain = to_container(OmegaConf.create({**dataclasses.asdict(settings), **values}))
    meanings = {
        key: data.get("help", "")
        for key, _, data in leaf_fields(type(settings), group.replace("/", "."))
    }
    ADDED[f"{group}/{settings.name}"] = AddedChoice(plain, meanings)
    ConfigStore.instance().store(settings.name, OmegaConf.create(plain), group)
    _clear_caches()


def remove_choice(group: str, name: str) -> None:
    """Remove a choice that `add_choice` has added."""
    ADDED.pop(f"{group}/{name}", None)
    _clear_caches()


def _clear_caches() -> None:
    for cached in (_composed, default_values, _file_values, known_keys):
        cached.cache_clear()


def flatten(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("train.lr", 0.001), ... of nested mappings, in their order."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@functools.cache
def default_values(root: str) -> Mapping[str, Any]:
    """Return every key of a root, or of one file of a group, with its default, ${...} unresolved.

    The file data/tiny.yaml -> {"data.name": "tiny", ...}.
    """
    values, group = _file_values(root), root.rpartition("/")[0]
    if not group or "defaults" in values:
        values = to_container(compose([], root), resolve=False)
    else:  # composing takes ten times as long, and would change nothing
        values = {group.replace("/", "."): values}
    return MappingProxyType(dict(flatten(values)))


@functools.cache
def _file_values(root: str) -> dict[str, Any]:
    if root in ADDED:
        return ADDED[root].values
    node = OmegaConf.load(CONF / f"{root}.yaml")
    assert isinstance(node, DictConfig), "a file of conf/ is a mapping"
    return to_container(node, resolve=False)


@functools.cache
def known_keys(root: str = "train") -> tuple[str, ...]:
    """Return the groups of a root and every key that any of their choices has."""
    keys = dict.fromkeys(groups(root))
    keys.update(default_values(root))
    for group in groups(root):
        for choice in choices(group) if group != "experiment" else []:
            keys.update(default_values(f"{group}/{choice}"))
    for choice in choices(OPTIMIZER) if root == "train" else []:
        keys.update(default_values(f"{OPTIMIZER}/{choice}"))
    return tuple(keys)


def check_choice(group: str, values: Mapping[str, Any]) -> None:
    """Check the keys and numbers of a group against the yaml file of its choice, `values["name"]`.

    It finds most mistakes without the group's dataclass, whose module may be slow to import: an
    unknown key, and a value of another kind where the default is a number or true or false.
    """
    if values.get("name") in choices(group):
        _check_kinds(values, _file_values(f"{group}/{values['name']}"), group)


def _check_kinds(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> None:
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if name not in defaults:
            raise unknown_key(key, value, [f"{prefix}.{known}" for known in defaults])
        check_plain(value, key)
        default = defaults[name]
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            _check_kinds(value, default, key)
        elif isinstance(default, bool | int | float) and value is not None:
            convert(type(default), value, key)


def verb_group(schema: type[T], name: str, overrides: Sequence[str]) -> tuple[T, list[str]]:
    """Read the group of a command; return its settings and the other overrides."""
    own = [word for word in overrides if word.startswith(f"{name}.")]
    settings = from_dict(schema, to_container(compose(own, f"{name}/default"))[name], name)
    return settings, [word for word in overrides if word not in own]


def trainable(group: str) -> list[str]:
    """Return the choices of a group, without drafters that are neither trained nor searched."""
    return [n for n in choices(group) if group != "drafter" or {"loss", "search"} & drafter_keys(n)]


def drafter_keys(name: str) -> set[str]:
    """Return the keys of a drafter's yaml, which has `loss` if the drafter is trained."""
    return set(_file_values(f"drafter/{name}"))


def _translate(error: Exception, overrides: Sequence[str], root: str) -> ConfigError:
    """Return the ConfigError for Hydra's exception; with its first line if no case applies."""
    values = {left.lstrip("+~"): right for left, _, right in (o.partition("=") for o in overrides)}
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if group in values:
            other = "; or a path or name" if group in SHORT_FORMS else ""
            own = f" {OWN_PART}" if group in ("drafter", "decode") else ""
            fix = f"Use one of: {', '.join(trainable(group))}{other}.{own}"
            return ConfigError(group, choice, f"The group {group} has no such choice.", fix)
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    quoted = (name.lstrip("+~").partition("=")[0] for name in re.findall("'([^']+)'", message))
    key = next((name for name in quoted if name in values), None)
    if key is None:
        return ConfigError("overrides", " ".join(overrides), message, "--help shows examples.")
    if re.search(r"multirun|sweep(?![./])|ambiguous", message, re.IGNORECASE):
        fix = f"Write a list as {key}=[{values[key]}]; train -m starts several runs."
        return ConfigError(key, values[key], "A run takes one value.", fix)
    return _misplaced_key(key, values, message, root)


def _misplaced_key(key: str, values: Mapping[str, str], message: str, root: str) -> ConfigError:
    """Return the error for a key that belongs to another choice or root, or does not exist."""
    group, value = key.partition(".")[0], values[key]
    if key.startswith("train.optimizer."):
        group = OPTIMIZER
    files = choices(group) if group != key else []
    owners = [choice for choice in files if key in default_values(f"{group}/{choice}")]
    if owners and group.partition("/")[0] in groups(root):
        group = group.replace("/", ".")
        fix = f"Add {' or '.join(f'{group}={choice}' for choice in owners)}."
        return ConfigError(key, value, f"The chosen {group} has no such key.", fix)
    known = known_keys(root)
    if root == "eval" and key not in known and key in known_keys("train"):
        return training_key_error(key, value)
    if key in known:
        return ConfigError(key, value, message, "--help lists the keys and choices.")
    chosen, parent = _chosen_keys(root, values), key.rpartition(".")[0]
    has_parent = any(name.rpartition(".")[0] == parent for name in chosen)
    return unknown_key(key, value, chosen if has_parent else known)


def _chosen_keys(root: str, values: Mapping[str, str]) -> list[str]:
    """Return the groups of a root, and the keys that it has with the choices in `values`."""
    chosen = {group: values.get(group, default) for group, default in groups(root).items()}
    replaced = tuple(f"{group}." for group in chosen if chosen[group] in choices(group))
    keys = [key for key in default_values(root) if not key.startswith(replaced)]
    files = [f"{group}/{chosen[group]}" for group in chosen if f"{group}." in replaced]
    return [*chosen, *keys, *(key for file in files for key in default_values(file))]


def training_key_error(key: str, value: object) -> ConfigError:
    """Return the error for a training key in an evaluation."""
    why = "The run folder fixes what was trained; eval only measures it."
    return ConfigError(key, value, why, "outrider eval --help lists the keys of an evaluation.")
