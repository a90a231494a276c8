"""Settings that are chosen for the target and the drafter: null unless the user sets them.

A configuration is complete before a model is loaded: `fill_automatic` puts the values for the
embedded target in, and `models/adapt.py` replaces them as soon as the target is known.
"""

import dataclasses
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

TINY_LENGTH, LENGTH = 256, 1024  # data.max_length of data=tiny, and of other text
LEARNING_RATE = 3.5e-3  # train.lr for the embedded target
DEPTHS = {"chain": 3, "opt_tree": 8, "best_first_tree": 8, "auto": 8}  # decode.depth
TREE_DEPTH = 4  # of the other policies
MUON_DRAFTERS = ("eagle", "eagle3", "hass", "mtp")  # docs/benchmarks.md has what it gained
MUON_RATE = 3.0  # their train.optimizer.rate


def automatic_depth(policy: str, nodes: object = None) -> int:
    """Return the depth of a policy's drafts if the drafter's is at least as large.

    Args:
        nodes: of its trees at most; anything but a positive integer is ignored.
    """
    depth = DEPTHS.get(policy, TREE_DEPTH)
    if policy == "chain" or not isinstance(nodes, int) or nodes < 1:
        return depth
    return min(depth, nodes)


def automatic_optimizer(drafter: object, launch: object) -> dict[str, Any]:
    """Return name and rate of the optimizer of a drafter under a launch, by their names.

    torch has Muon since version 2.9; ZeRO divides matrices, which Muon needs whole.
    """
    torch = tuple(int(part) for part in version("torch").split(".")[:2])
    if drafter in MUON_DRAFTERS and not str(launch).startswith("zero") and torch >= (2, 9):
        return {"name": "muon", "rate": MUON_RATE}
    return {"name": "adamw", "rate": 1.0}


def adjust(settings: Any, name: str, value: Any) -> bool:
    """Set a setting of a frozen dataclass to a value that agrees with the others.

    Called by `__post_init__` of a drafter's settings, whose `adjusted` lists what was set.

    Returns:
        False if the setting is given: it differs from its default, and stays.
    """
    (default,) = (field.default for field in dataclasses.fields(settings) if field.name == name)
    if getattr(settings, name) != default:
        return False
    if value != default:
        object.__setattr__(settings, name, value)
        shown = f"{name}={'null' if value is None else value}"
        object.__setattr__(settings, "adjusted", (*settings.adjusted, shown))
    return True


def fill_automatic(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Replace null by the value for the embedded target, in place.

    Args:
        values: groups as dictionaries; others are left as they are.

    Returns:
        The keys that were null: ("train.lr", ...).
    """
    groups = {group: content for group, content in values.items() if isinstance(content, dict)}
    names = {group: content.get("name") for group, content in groups.items()}
    defaults = {
        "data.max_length": TINY_LENGTH if names.get("data") == "tiny" else LENGTH,
        "train.lr": LEARNING_RATE,
        "decode.depth": automatic_depth(
            str(names.get("decode")), groups.get("decode", {}).get("nodes")
        ),
        "decode.confidence": 0.0,
    }
    if names.get("decode") == "chain":
        defaults["decode.nodes"] = defaults["decode.depth"]
    keys = []
    for key, default in defaults.items():
        group, _, name = key.partition(".")
        if name in groups.get(group, {}) and groups[group][name] is None:
            groups[group][name] = default
            keys.append(key)
    train = groups.get("train", {})
    if train.get("optimizer", {}) in (None, {"name": None}):
        train["optimizer"] = automatic_optimizer(names.get("drafter"), names.get("launch"))
        keys.append("train.optimizer")
    return tuple(keys)
