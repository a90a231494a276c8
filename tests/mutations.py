"""Random mutations of valid files, for the fuzz tests of the readers of outside files.

A test tries 40 examples; with `--hypothesis-profile=thorough` (conftest.py) 2,000. They are the
same in every run.
"""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

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
    b"!!python/name:os.system",    b"\x1b[2J", b"9" * 30,
]  # fmt: skip


def fuzz(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that runs a test with random arguments, as often as the profile says."""

    def decorate(test: Callable[..., None]) -> Any:
        thorough = settings.get_current_profile_name() == "thorough"
        chosen = settings(
            max_examples=2000 if thorough else 40,
            deadline=None,
            derandomize=True,  # the same examples on every machine
            suppress_health_check=list(HealthCheck),
        )
        return chosen(given(**strategies)(test))

    return decorate


@st.composite
def mutated_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Return `valid` with one to four slices replaced, removed, repeated or cut off."""
    out = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(out)))
        stop = min(len(out), start + draw(st.integers(0, 24)))
        middle = draw(
            st.sampled_from(FRAGMENTS) | st.binary(max_size=6) | st.just(out[start:stop] * 2)
        )
        rest = b"" if draw(st.integers(0, 9)) == 0 else out[stop:]
        out = out[:start] + middle + rest
    return out


@st.composite
def mutated_value(draw: st.DrawFn, valid: Any) -> Any:
    """Return a JSON value in which one to three entries are replaced, removed or added."""
    out = {"": copy.deepcopy(valid)}
    for _ in range(draw(st.integers(1, 3))):
        holder = draw(st.sampled_from(_containers(out)))
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            continue
        key = draw(st.sampled_from(keys))
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        value = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
        if action == "remove" and holder is not out:
            del holder[key]
        elif action == "add" and holder is not out:
            if isinstance(holder, dict):
                holder[draw(st.sampled_from(["", "x", "\0", "__class__", "_target_"]))] = value
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
