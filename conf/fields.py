"""Conversion of plain values into frozen dataclasses; every error names its key.

A dataclass is the schema: type hints and `Literal` define the values, and `option(...)` adds the
help text and the interval.

Differs from OmegaConf's structured configs: frozen classes, Literal and tuples work. Differs from
pydantic: true is not a number, and only lossless conversions happen (1 -> 1.0, 2e3 -> 2000,
2026 -> "2026"). Nothing is unbounded: numbers end at LARGEST unless their interval has other ends,
text and lists have a longest length, and nan and control characters are refused.
"""

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from outrider.conf.errors import ConfigError

# intervals of `option`
COUNT = "[1, inf)"
COUNT0 = "[0, inf)"
TOKENS = "[1, 4194304]"  # of a row, an answer or a cache
DEPTHS = "[1, 1024]"  # draft tokens along one path; also of layers and heads
WIDTH = "[1, 65536]"  # of hidden states and attention heads
NODES = "[1, 4096]"  # of a tree: its attention mask has their square
PROBABILITY = "[0, 1]"

T = TypeVar("T")
LARGEST = 1e9  # of a number whose interval has no other end
MAX_TEXT, MAX_LIST, MAX_DEPTH = 4096, 4096, 16  # characters; entries; lists inside lists
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # tab and newline are text
SYNONYMS = {  # names that other projects use
    "learning_rate": "lr", "lr_scheduler_type": "schedule", "max_grad_norm": "clip",
    "warmup_steps": "warmup", "warmup_ratio": "warmup", "num_train_epochs": "max_steps",
    "epochs": "max_steps", "steps": "max_steps", "batch_size": "batch_tokens",
    "per_device_train_batch_size": "batch_tokens", "gradient_accumulation_steps": "accumulation",
    "eval_steps": "eval_every", "save_steps": "save_every", "logging_steps": "log_every",
    "max_seq_length": "max_length", "max_seq_len": "max_length", "seq_length": "max_length",
    "model_max_length": "max_length", "output_dir": "dir", "model_name_or_path": "path",
    "torch_dtype": "dtype", "mixed_precision": "precision", "num_speculative_tokens": "depth",
    "num_draft_tokens": "depth", "gamma": "depth",
}  # fmt: skip
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def option(default: Any, meaning: str, within: str = "") -> Any:
    """Return a field of a configuration dataclass.

    Args:
        default: must equal the value in the group's default yaml (a test compares them).
        meaning: one line for `--help`, with the unit.
        within: interval in mathematical notation, "(0, 1]" or "[1, inf)"; "" is any number. An
            infinite end stands for LARGEST.
    """
    return dataclasses.field(default=default, metadata={"help": meaning, "within": within})


def leaf_fields(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield (key, type, metadata) of every field, those of nested dataclasses in their place."""
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind, key = hints[field.name], f"{prefix}.{field.name}".lstrip(".")
        nested = [one for one in (kind, *get_args(kind)) if dataclasses.is_dataclass(one)]
        if nested:
            yield from leaf_fields(nested[0], key)
        else:
            yield key, kind, field.metadata


def from_dict(schema: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """Build `schema`, possibly nested, from yaml's plain values; missing keys keep their defaults.

    Args:
        prefix: the group's key, for messages: "train" makes "train.lr", "" makes "lr".

    Raises:
        ConfigError: an unknown key, a wrong type, a value outside its interval, or a ValueError of
            the dataclass itself.
    """
    hints = get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    converted = {}
    for name, value in values.items():
        key = f"{prefix}.{name}".lstrip(".")
        if name not in fields:
            raise unknown_key(key, value, [f"{prefix}.{field}".lstrip(".") for field in fields])
        check_plain(value, key)
        converted[name] = convert(hints[name], value, key)
        check_interval(fields[name].metadata.get("within", ""), converted[name], key)
    try:
        return schema(**converted)
    except ConfigError:
        raise
    except OSError as error:  # a path that the operating system rejects
        raise ConfigError(prefix, values, f"{error.strerror}.", _advice(prefix)) from None
    except (ValueError, RuntimeError) as error:  # RuntimeError: the home of an unknown user (~name)
        raise _translate(error, converted, prefix) from None


def _translate(error: Exception, values: Mapping[str, Any], prefix: str) -> ConfigError:
    """Return the ConfigError for a dataclass's error "depths = 0: reason"."""
    left, _, why = str(error).partition(": ")
    name = left.partition(" = ")[0].rpartition(".")[2]
    if not why or name not in values:
        return ConfigError(prefix, values.get(name, ""), f"{error}.", _advice(prefix))
    key = f"{prefix}.{name}".lstrip(".")
    return ConfigError(key, values[name], f"The value is invalid: {why}.", _advice(key))


def check_plain(value: Any, key: str, depth: int = 0) -> None:
    """Raise a `ConfigError` for text, a list or a number, also inside, that no setting can have."""
    why = ""
    if isinstance(value, float) and not math.isfinite(value):
        why = "The number must be finite."
    elif isinstance(value, int) and abs(value) >= 2**63:
        why = "The number must have 64 bits at most."
    elif isinstance(value, str) and (match := UNPRINTABLE.search(value)):
        why = f"The text must not contain the control character {match[0]!r}."
    elif isinstance(value, str | list | tuple | Mapping):
        largest = MAX_TEXT if isinstance(value, str) else MAX_LIST
        if len(value) > largest:
            unit = "characters" if isinstance(value, str) else "entries"
            why = f"{len(value)} {unit} are too many: {largest} at most."
        elif depth > MAX_DEPTH:
            why = f"Lists inside lists end at depth {MAX_DEPTH}."
    if why:
        raise ConfigError(key, value, why, _advice(key))
    if isinstance(value, list | tuple | Mapping):
        inside = [*value, *value.values()] if isinstance(value, Mapping) else value
        for item in inside:
            check_plain(item, key, depth + 1)


def convert(kind: Any, value: Any, key: str) -> Any:
    """Convert `value` to the type `kind`, or raise a `ConfigError` that names what is expected."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(kind), value, key)
    if origin is Literal:
        return _convert_literal(get_args(kind), value, key)
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return _convert_sequence(origin, get_args(kind), value, key)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return from_dict(kind, value, key)  # type: ignore[arg-type]
    if origin is dict and isinstance(value, Mapping):
        left, right = get_args(kind)
        return {convert(left, k, key): convert(right, v, f"{key}.{k}") for k, v in value.items()}
    if kind is Any or (kind in TYPE_NAMES and type(value) is kind):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)  # 2e3
    if kind is str and type(value) in (int, float):
        return str(value)  # a folder named 2026
    raise ConfigError(key, value, f"This key expects {_describe(kind)}.", _advice(key))


def _convert_union(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    """Convert to the member of exactly this type, else to the first member that fits."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if isinstance(value, list | tuple):  # an error names the element
        kinds = tuple(kind for kind in kinds if get_origin(kind) in (list, tuple)) or kinds
    for kind in sorted(kinds, key=lambda kind: type(value) is not kind):
        try:
            return convert(kind, value, key)
        except ConfigError:
            if len(kinds) == 1:
                raise
    names = " or ".join(_describe(kind) for kind in kinds)
    raise ConfigError(key, value, f"This key expects {names}.", _advice(key))


def _convert_literal(choices: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is False and "no" in choices:
        return "no"  # YAML reads a bare no as false
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise ConfigError(key, value, "This is not one of the choices.", f"Use one of: {listed}.")
    return value


def _convert_sequence(origin: Any, kinds: tuple[Any, ...], values: Any, key: str) -> Any:
    """Convert a list, a tuple of any length (`tuple[int, ...]`) or one of fixed length."""
    fixed = origin is tuple and Ellipsis not in kinds
    if fixed and len(values) != len(kinds):
        why = f"This key expects {len(kinds)} values, not {len(values)}."
        raise ConfigError(key, list(values), why, _advice(key))
    items = zip(kinds if fixed else kinds[:1] * len(values), values, strict=True)
    return origin(convert(kind, value, f"{key}[{i}]") for i, (kind, value) in enumerate(items))


def check_interval(within: str, value: Any, key: str) -> None:
    """Raise a `ConfigError` for a number, also in a list, outside an interval such as "(0, 1]".

    "" and infinite ends stand for -LARGEST and LARGEST.
    """
    within = within or "(-inf, inf)"
    low, high = (float(end) for end in within[1:-1].split(","))
    for number in value if isinstance(value, list | tuple) else [value]:
        if type(number) not in (int, float):
            continue
        above = number > low if within[0] == "(" else number >= low
        below = number < high if within[-1] == ")" else number <= high
        if not (above and below):
            why = f"The value must be {describe_interval(within)}."
        elif abs(number) > LARGEST and math.inf in (abs(low), high):
            why = f"The value must be between -{LARGEST:.0f} and {LARGEST:.0f}."
        else:
            continue
        raise ConfigError(key, value, why, _advice(key))


def require_word(key: str, value: str | None) -> None:
    """Raise a `ConfigError` for text that is more than one word in a script of a shell."""
    if value is not None and not re.fullmatch(r"[\w.:,%+\[\]-]+", value):
        why = "It is written into a script, where it must be one plain word."
        raise ConfigError(key, value, why, "Use letters, digits and the characters . _ - : , + %")


def describe_interval(within: str) -> str:
    """Format an interval for messages: "[1, inf)" is ">= 1", "(0, 1]" is "in (0, 1]"."""
    low, _, high = within[1:-1].partition(", ")
    if high == "inf":
        return f"{'>=' if within[0] == '[' else '>'} {low}"
    return f"in {within}"


def unknown_key(key: str, value: object, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that does not exist; its fix is the nearest known key."""
    known = list(known)
    group, _, leaf = key.rpartition(".")
    leaf = SYNONYMS.get(leaf, leaf)
    siblings = [name for name in known if name.rpartition(".")[0] == group]
    leaves = [name.rpartition(".")[2] for name in siblings]
    near = [siblings[leaves.index(name)] for name in difflib.get_close_matches(leaf, leaves, 1)]
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
    if not (near or elsewhere or group):  # a key without its group
        everywhere = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = [everywhere[name] for name in difflib.get_close_matches(leaf, everywhere, 1)]
    elif not (near or siblings):
        near = difflib.get_close_matches(key, elsewhere or known, 1)
    if near := near or elsewhere[:1]:
        fix = f"Did you mean {near[0]}?"
    elif leaves:
        fix = f"{group or 'The keys'}: {', '.join(sorted(leaves))}."
    else:
        groups = sorted({name.partition(".")[0] for name in known if "." in name})
        fix = f"The groups are: {', '.join(groups)}. --help lists their keys."
    return ConfigError(key, value, "There is no such key.", fix)


def _describe(kind: Any) -> str:
    if get_origin(kind) in (list, tuple):
        return "a list like [1, 2]"
    if get_origin(kind) is dict:
        return "a mapping like {a: b}"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if dataclasses.is_dataclass(kind):
        return "a group of keys"
    return TYPE_NAMES.get(kind, str(kind))


def _advice(key: str) -> str:
    return f"--help shows the meaning and the default of {key.partition('[')[0]}."
