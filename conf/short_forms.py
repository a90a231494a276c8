"""Short forms on the command line: `target=<folder or hub id>`, `data=<file or name>`, `--config`.

target=Qwen/Qwen3-8B    target=hf target.path=Qwen/Qwen3-8B
data=chats.jsonl        data=jsonl data.path=chats.jsonl
train.optimizer=muon    train/optimizer=muon
"""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

MAPPINGS = ("data.columns",)  # keys whose value is a mapping, not a group of keys
OPTIMIZER = "train/optimizer"  # Hydra's name of a group within a group
SHORT_FORMS = {"target": "hf", "data": "jsonl"}  # group: the choice that reads `<group>.path`


def expand(overrides: Sequence[str], choices: Mapping[str, Sequence[str]]) -> list[str]:
    """Replace `target=PATH` and `data=PATH` by a choice of the group and its path.

    `train.optimizer=NAME` becomes a choice, too; without a file, the name of a registered one.

    Args:
        choices: of the groups to look at; none if the root has the group's path alone.
    """
    out = []
    for word in overrides:
        group, _, value = word.partition("=")
        if group in ("train.optimizer", "train.optimizer.name", OPTIMIZER) and OPTIMIZER in choices:
            name = value.strip("'\"")
            known = name in choices[OPTIMIZER]
            out.append(f"{OPTIMIZER}={name}" if known else f"train.optimizer.name={value}")
        elif group in choices and is_path(value, choices[group]):
            out += [f"{group}={SHORT_FORMS[group]}"] if choices[group] else []
            plain = re.fullmatch(r"[\w./+:@-]+|['\"].*", value)
            out.append(f"{group}.path={value if plain else json.dumps(value)}")
        else:
            out.append(word)
    return out


def is_path(value: str, names: Sequence[str]) -> bool:
    """Whether a value is a path, hub id or name rather than a choice, mistyped or not."""
    if not value or value in names or "," in value:
        return False
    written_as_path = "/" in value or "." in value or Path(value).expanduser().exists()
    return written_as_path or not get_close_matches(value, names)


def config_words(values: Mapping[str, Any], choices: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the overrides that a user's yaml file stands for.

    Both forms of a group are read: `drafter: eagle3`, and a mapping whose `name` is the choice.
    """
    words, settings = [], []
    for group, content in values.items():
        if not isinstance(content, Mapping):
            words.append(f"{group}={content if isinstance(content, str) else json.dumps(content)}")
            continue
        chosen = content.get("name") in choices.get(group, ())
        words += [f"{group}={content.get('name')}"] * chosen
        force = "++" * chosen  # the config.yaml of a run has keys that the choice's file lacks
        for key, text in _leaves(content, group):
            within = key.startswith("train.optimizer.") and not key.endswith(".name")
            settings.append(f"{'++' if within else force}{key}={text}")
    return words + settings


def _leaves(node: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    """Return ("train.lr", "0.001"), ... in Hydra's grammar."""
    out = []
    for name, value in node.items():
        key = f"{prefix}.{name}"
        if key in MAPPINGS and isinstance(value, Mapping):
            pairs = ", ".join(f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
            out.append((key, f"{{{pairs}}}"))
        elif isinstance(value, Mapping) and value:
            out += _leaves(value, key)
        else:
            out.append((key, json.dumps(value, ensure_ascii=False)))
    return out
