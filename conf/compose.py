"""Hydra, at arm's length: yaml files and overrides -> one plain configuration.

Only Hydra's compose API is used, so nothing is written, no folder changes and every rank may
compose. Hydra's own exceptions leave here as `ConfigError`. `conf/train.yaml` and
`conf/eval.yaml` are the two roots; each folder of `conf/` is a group, each file a choice.
"""

import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from outrider.conf.errors import ConfigError
from outrider.conf.fields import read, unknown

T = TypeVar("T")
CONF = Path(__file__).parent.parent / "conf"
DRAFTERS = Path(__file__).parent.parent / "models" / "drafters"


def compose(overrides: Sequence[str] = (), root: str = "train") -> DictConfig:
    """The configuration that these overrides ask for, not yet validated (see `config.parse`).

    Args:
        overrides: Hydra's grammar, as on the command line: ["target=smollm2", "train.lr=1e-4"].
        root: "train", "eval", or one file of a group such as "data/self".

    Raises:
        ConfigError: unknown key, group or choice, or an override that cannot be read.
    """
    try:
        with initialize_config_dir(str(CONF.absolute()), version_base="1.3"):
            return hydra_compose(root, list(overrides))
    except OverrideParseException as error:
        why = "This is not an override."
        fix = "Write key=value; quote what the shell or Hydra would read: 'key=\"a, b\"'."
        raise ConfigError("overrides", error.override, why, fix) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _translated(error, overrides, root) from None


def plain(node: DictConfig) -> dict[str, Any]:
    """Plain dicts, lists and values, with every ${...} replaced.

    Raises:
        ConfigError: a ${...} that leads nowhere, or a value left as ???.
    """
    try:
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        where = str(error.full_key or "configuration")
        why = str(error).splitlines()[0]
        raise ConfigError(where, error.value, why, f"Give it a value: {where}=...") from None
    assert isinstance(values, dict), "a DictConfig turns into a dict"
    return {str(name): value for name, value in values.items()}


def groups(root: str = "train") -> dict[str, str | None]:
    """The groups of a root and the choice each starts with, as in {"target": "tiny", ...}."""
    found: dict[str, str | None] = {}
    node: Any = OmegaConf.load(CONF / f"{root}.yaml")
    for entry in node.get("defaults", []):
        if isinstance(entry, DictConfig):
            ((name, choice),) = _raw(entry).items()
            if not name.startswith("override "):
                found[name] = choice
    if "target" in found and "data" in found:  # data follows the target
        found["data"] = compose([], root).data.name
    return found


def choices(group: str) -> list[str]:
    """The files of a group in alphabetical order; of "target": ["hf", "smollm2", "tiny"]."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("train.lr", 0.001), ... of nested mappings, in their order."""
    for name, value in node.items():
        where = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{where}.")
        else:
            yield where, value


@functools.cache
def values_of(group: str, choice: str) -> Mapping[str, Any]:
    """What one file of a group sets; of "data", "tiny": {"data.name": "tiny", ...}."""
    node = compose([], f"{group}/{choice}")
    return MappingProxyType(dict(flat(_raw(node))))


def defaults_of(root: str) -> dict[str, Any]:
    """Every key of a root with its default, ${...} as written."""
    return dict(flat(_raw(compose([], root))))


@functools.cache
def known_keys(root: str = "train") -> tuple[str, ...]:
    """Every key that some choice of the groups has, and the groups themselves."""
    found = dict.fromkeys(groups(root))
    found.update(defaults_of(root))
    for group in groups(root):
        for choice in choices(group) if group != "experiment" else []:
            found.update(values_of(group, choice))
    return tuple(found)


def verb_group(schema: type[T], name: str, overrides: Sequence[str]) -> tuple[T, list[str]]:
    """The settings of a group that belongs to one verb alone, and the other overrides.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range.
    """
    own = [word for word in overrides if word.startswith(f"{name}.")]
    settings = read(schema, plain(compose(own, f"{name}/default"))[name], name)
    return settings, [word for word in overrides if word not in own]


def drafter_schema(values: object) -> type:
    """The `Config` dataclass of the drafter that these values name.

    A drafter is found by file name alone, so that a configuration from elsewhere can never name
    code to run.

    Raises:
        ConfigError: no name, or no file of that name in models/drafters.
    """
    name = values.get("name") if isinstance(values, dict) else None
    known = sorted(path.stem for path in DRAFTERS.glob("[a-z]*.py"))
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name) or name not in known:
        why = "There is no drafter of this name in models/drafters."
        raise ConfigError("drafter.name", name, why, f"Use one of: {', '.join(known)}.")
    schema = importlib.import_module(f"outrider.models.drafters.{name}").Config
    assert isinstance(schema, type), f"drafters/{name}.py defines Config as a dataclass"
    return schema


def _raw(node: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(node, resolve=False)
    assert isinstance(values, dict), "a DictConfig turns into a dict"
    return {str(name): value for name, value in values.items()}


def _translated(error: Exception, overrides: Sequence[str], root: str) -> ConfigError:
    """Hydra's exception in this project's words; its own first line where no rule fits."""
    typed = {left.lstrip("+~"): right for left, _, right in (o.partition("=") for o in overrides)}
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if group in typed:
            fix = f"Use one of: {', '.join(choices(group))}."
            return ConfigError(group, choice, f"The group {group} has no such choice.", fix)
    said = str(error).strip().splitlines()[0]
    quoted = (name.lstrip("+~").partition("=")[0] for name in re.findall("'([^']+)'", said))
    name = next((name for name in quoted if name in typed), None)
    if name is None:
        return ConfigError("overrides", " ".join(overrides), said, "--help shows four examples.")
    if re.search(r"multirun|sweep(?![./])|ambiguous", said, re.IGNORECASE):
        fix = f"One run takes one value; a list is written {name}=[{typed[name]}]."
        return ConfigError(name, typed[name], "Several values ask for several runs.", fix)
    return _misplaced(name, typed[name], said, root)


def _misplaced(name: str, value: str, said: str, root: str) -> ConfigError:
    """A key that Hydra has no place for: another choice has it, another root, or nobody."""
    group = name.partition(".")[0]
    having = [c for c in choices(group) if name in values_of(group, c)] if group != name else []
    if having and group in groups(root):
        fix = f"Add {group}={having[0]}" + "".join(f" or {group}={c}" for c in having[1:]) + "."
        return ConfigError(name, value, f"The chosen {group} has no such key.", fix)
    known = known_keys(root)
    if root == "eval" and name not in known and name in known_keys("train"):
        why = "The run folder fixes what was trained; eval only measures it."
        return ConfigError(name, value, why, "outrider eval --help lists what may be set here.")
    if name in known:
        return ConfigError(name, value, said, "--help lists the keys and choices.")
    return unknown(name, value, known)
