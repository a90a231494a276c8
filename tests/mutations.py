"""Random mutations of valid files, for the fuzz tests of the readers of outside files.

A test tries 40 examples; with `--hypothesis-profile=thorough` (conftest.py), as in `make test-all`,
2,000. They are the same in every run.
"""

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HOSTILE: list[Any] = [
    None, True, 0, -1, -7, 1, 2**31, 10**12, 10**400, 0.5, -0.0, 1e300, math.nan, math.inf,
    -math.inf, "", "a", "\0", "\x1b[31m", "\ud800", "\u202e", "../..", "/etc/passwd",
    "${oc.env:HOME}", "x" * 5000, [], [[]], {}, {"": None}, [None], ["\0"], [10**12],
    {"a": {"b": [math.nan]}}, list(range(300)),
]  # fmt: skip
FRAGMENTS = [
    b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x80", b"{", b"}", b"[" * 200, b'"', b"\\ud800",
    b"\\u0000", b"NaN", b"1e999", b"null", b"\n", b"\r", b",", b":", b"&a [*a]",
    b"!!python/name:os.system", b"\x1b[2J", b"9" * 30,
]  # fmt: skip
# made once, since hypothesis checks a strategy where it is made
PICKLED = st.sampled_from([pickle.dumps(value) for value in HOSTILE])
INSERTED = st.sampled_from(FRAGMENTS) | st.binary(max_size=6) | st.none()  # None: the slice twice
ACTIONS = st.sampled_from(["replace", "replace", "replace", "remove", "add"])
NEW_KEYS = st.sampled_from(["", "x", "\0", "__class__", "_target_"])


def fuzz(
    share: float = 1.0, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that runs a test with random arguments, as often as the profile says.

    Nothing is flushed to disk. `share` is of the examples, for a test whose steps take long.
    """

    def decorate(test: Callable[..., None]) -> Any:
        thorough = settings.get_current_profile_name() == "thorough"
        chosen = settings(
            max_examples=round(share * (2000 if thorough else 40)),
            derandomize=True,  # the same examples on every machine
            suppress_health_check=list(HealthCheck),
        )
        unflushed = patch("os.fsync", lambda _: None)(chosen(given(**strategies)(test)))
        return pytest.mark.fuzz(unflushed)

    return decorate


def replace_file(file: Path, data: bytes | None) -> None:
    """Give a file these bytes; None: remove it.

    It is a new file, since some file systems flush one that was truncated.
    """
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)


@st.composite
def mutated_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Return `valid` with one to four slices replaced, removed, repeated or cut off."""
    out = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(out)))
        stop = min(len(out), start + draw(st.integers(0, 24)))
        middle = draw(INSERTED)
        rest = b"" if draw(st.integers(0, 9)) == 0 else out[stop:]
        out = out[:start] + (out[start:stop] * 2 if middle is None else middle) + rest
    return out


@st.composite
def mutated_value(draw: st.DrawFn, valid: Any) -> Any:
    """Return a JSON value in which one to three entries are replaced, removed or added."""
    out = {"": pickle.loads(pickle.dumps(valid))}  # a copy, faster than deepcopy
    for _ in range(draw(st.integers(1, 3))):
        containers = _containers(out)
        holder = containers[draw(st.integers(0, len(containers) - 1))]
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        if not keys:
            continue
        key = keys[draw(st.integers(0, len(keys) - 1))]
        action = draw(ACTIONS)
        value = pickle.loads(draw(PICKLED))
        if action == "remove" and holder is not out:
            del holder[key]
        elif action == "add" and holder is not out:
            if isinstance(holder, dict):
                holder[draw(NEW_KEYS)] = value
            else:
                holder.insert(key, value)
        else:
            holder[key] = value
    return out[""]


def mutated_json(valid: Any) -> st.SearchStrategy[bytes]:
    """Return mutations of a JSON file: of its values, or of its bytes."""
    values = mutated_value(valid).map(lambda value: json.dumps(value).encode())
    return values | mutated_bytes(json.dumps(valid).encode())


@st.composite
def mutated_safetensors(draw: st.DrawFn, valid: bytes) -> bytes:
    """Return mutations of a safetensors file: of its header's values, its length, or any bytes."""
    size = int.from_bytes(valid[:8], "little")
    header, body = valid[8 : 8 + size], valid[8 + size :]
    if draw(st.integers(0, 3)) == 0:
        return draw(mutated_bytes(valid))
    header = draw(mutated_json(json.loads(header)))
    hostile = st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1, len(valid)])
    size = draw(st.just(len(header)) | st.just(len(header)) | hostile)
    return size.to_bytes(8, "little") + header + draw(st.sampled_from([body, body, body[:-1], b""]))


def _containers(value: Any) -> list[Any]:
    """Return all lists and dicts of a JSON value."""
    if not isinstance(value, dict | list):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [value, *(inner for item in items for inner in _containers(item))]
