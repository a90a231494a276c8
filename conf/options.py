"""The `key=value` words of a command that has no group in conf/, such as the benchmarks."""

import functools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar, get_args, get_origin

from omegaconf import OmegaConf
from yaml import YAMLError

from outrider.conf.errors import ConfigError
from outrider.conf.fields import from_dict, leaf_fields, unknown_key

T = TypeVar("T")


def parse_words(schema: type[T], words: Sequence[str]) -> T:
    """Build `schema` from the `key=value` words of a command that has no group in conf/.

    A list is written with or without brackets: `depths=3,7`. Text is taken literally; a comma
    within brackets does not separate entries. `[]` is the empty list, where it is the default or
    the schema names the key in MAY_BE_EMPTY.
    """
    kinds = {key: kind for key, kind, _ in leaf_fields(schema)}
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            fix = f"Write key=value. The keys are: {', '.join(kinds)}."
            raise ConfigError("option", word, "This is not an option.", fix)
        if key not in kinds:
            raise unknown_key(key, text, kinds)
        *parents, leaf = key.split(".")
        group = functools.reduce(lambda node, name: node.setdefault(name, {}), parents, values)
        group[leaf] = _parse(kinds[key], text)
    options = from_dict(schema, values, "")
    for key in values:
        default = next(field.default for field in fields(schema) if field.name == key)  # type: ignore[arg-type]
        if getattr(options, key) == () != default and key not in getattr(
            schema, "MAY_BE_EMPTY", ()
        ):
            raise ConfigError(
                key, "[]", "This list needs an entry.", "Leave the key out, or name one."
            )
    return options


def _split(text: str) -> list[str]:
    """Split at commas that are not within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse(kind: Any, text: str) -> Any:
    """A word's text as a plain value of the type `kind`, not yet checked."""
    if get_origin(kind) in (list, tuple):
        inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        parts = [] if text == "[]" else _split(inside)
        return [_parse(get_args(kind)[0], part.strip()) for part in parts]
    if kind is str or get_origin(kind) is Literal:
        return text
    try:
        return OmegaConf.from_dotlist([f"value={text}"]).value
    except YAMLError:
        return text
