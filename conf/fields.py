"""Plain values -> frozen dataclasses, with an error that names the key for every misfit.

A dataclass is the schema: its type hints say what a value may be, `Literal` lists the
alternatives, and `key(...)` adds the meaning and the interval that help prints and reading
enforces. Drafters use plain dataclasses and may use the same metadata.

Differs from OmegaConf's structured configs: frozen classes, Literal and tuples work, nothing
is converted silently except what loses nothing (1 -> 1.0, 2e3 -> 2000).
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from outrider.conf.errors import ConfigError

T = TypeVar("T")
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def key(default: Any, meaning: str, within: str = "") -> Any:
    """A field of a configuration dataclass: its default, its meaning, its interval.

    Args:
        default: must equal the value in the group's default yaml (a test compares them).
        meaning: one line for `--help`, with the unit.
        within: interval in mathematical notation, "(0, 1]" or "[1, inf)"; "" allows anything.
    """
    metadata = {"help": meaning, "within": within}
    return dataclasses.field(default=default, metadata=metadata)


def read(schema: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """Build `schema` from plain values; keys left out keep the schema's defaults.

    Args:
        schema: a dataclass, possibly with dataclasses as fields.
        values: plain python values (dict, list, str, int, float, bool, None).
        prefix: the group's key, for messages: "train" makes "train.lr", "" makes "lr".

    Raises:
        ConfigError: a key the schema lacks, a value of the wrong type or outside its interval.
    """
    hints = get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    taken = {}
    for name, value in values.items():
        where = f"{prefix}.{name}".lstrip(".")
        if name not in fields:
            raise unknown(where, value, [f"{prefix}.{field}".lstrip(".") for field in fields])
        taken[name] = convert(hints[name], value, where)
        check_interval(fields[name].metadata.get("within", ""), taken[name], where)
    return _build(schema, taken, prefix)


def convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as the type `kind`, or a ConfigError that says what was expected."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _any_of(get_args(kind), value, where)
    if origin is Literal:
        return _one_of(get_args(kind), value, where)
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return _sequence(origin, get_args(kind), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return read(kind, value, where)  # type: ignore[arg-type]
    if kind is Any or (kind in EXPECTED and type(value) is kind and _finite(value)):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)  # 2e3
    if kind is str and type(value) in (int, float):
        return str(value)  # a folder may be called 2026
    raise ConfigError(where, value, f"This key expects {_describe(kind)}.", _advice(where))


def check_interval(within: str, value: Any, where: str) -> None:
    """Refuse a number (or any number of a list) outside an interval like "(0, 1]"."""
    if not within or value is None:
        return
    low, high = (float(end) for end in within[1:-1].split(","))
    for number in value if isinstance(value, list | tuple) else [value]:
        above = number > low if within[0] == "(" else number >= low
        below = number < high if within[-1] == ")" else number <= high
        if not (above and below):
            raise ConfigError(where, value, f"The value must be {words(within)}.", _advice(where))


def words(within: str) -> str:
    """An interval as people write it: "[1, inf)" is ">= 1", "(0, 1]" is "in (0, 1]"."""
    low, _, high = within[1:-1].partition(", ")
    if high == "inf":
        return f"{'>=' if within[0] == '[' else '>'} {low}"
    return f"in {within}"


def unknown(where: str, value: object, known: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist, with the nearest that does."""
    known = list(known)
    group, _, leaf = where.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == group]
    leaves = [name.rpartition(".")[2] for name in siblings]
    near = [siblings[leaves.index(name)] for name in difflib.get_close_matches(leaf, leaves, 1)]
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf] or known
    near = near or difflib.get_close_matches(where, elsewhere, 1, cutoff=0.5)
    if near and (near[0] in siblings or near[0].endswith(f".{leaf}") or not siblings):
        fix = f"Did you mean {near[0]}?"
    elif leaves:
        fix = f"{group or 'The groups'}: {', '.join(sorted(leaves))}."
    else:
        fix = f"There are: {', '.join(sorted(name for name in known if '.' in name))}."
    return ConfigError(where, value, "There is no such key.", fix)


def _build(schema: type[T], taken: dict[str, Any], prefix: str) -> T:
    """The dataclass; what its `__post_init__` refuses ("depths = 0: why") becomes our error."""
    try:
        return schema(**taken)
    except ConfigError:
        raise
    except ValueError as error:
        left, _, why = str(error).partition(": ")
        name = left.partition(" = ")[0].rpartition(".")[2]
        where = f"{prefix}.{name}" if why and name in taken else prefix
        why = why if why and name in taken else str(error)
        value = taken.get(name, "")
        raise ConfigError(where, value, f"{prefix} refuses it: {why}.", _advice(where)) from None


def _any_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """The member that fits exactly, else the first that can hold the value."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(k for k in kinds if k is not type(None))
    for kind in sorted(kinds, key=lambda k: type(value) is not k):
        try:
            return convert(kind, value, where)
        except ConfigError:
            if len(kinds) == 1:
                raise
    names = " or ".join(_describe(kind) for kind in kinds)
    raise ConfigError(where, value, f"This key expects {names}.", _advice(where))


def _one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is False and "no" in choices:
        return "no"  # YAML reads a bare no as false
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise ConfigError(where, value, "This is none of the choices.", f"Use one of: {listed}.")
    return value


def _sequence(origin: Any, kinds: tuple[Any, ...], values: Any, where: str) -> Any:
    """A list, a tuple of any length (`tuple[int, ...]`) or one of fixed length."""
    fixed = origin is tuple and Ellipsis not in kinds
    if fixed and len(values) != len(kinds):
        why = f"This key expects {len(kinds)} values, not {len(values)}."
        raise ConfigError(where, list(values), why, _advice(where))
    wanted = kinds if fixed else kinds[:1] * len(values)
    pairs = enumerate(zip(wanted, values, strict=True))
    return origin(convert(kind, value, f"{where}[{i}]") for i, (kind, value) in pairs)


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _describe(kind: Any) -> str:
    if get_origin(kind) in (list, tuple):
        return "a list like [1, 2]"
    if dataclasses.is_dataclass(kind):
        return "a group of keys"
    return EXPECTED.get(kind, str(kind))


def _advice(where: str) -> str:
    return f"--help shows the meaning and the default of {where.partition('[')[0]}."
