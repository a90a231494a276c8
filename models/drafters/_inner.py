"""The inner drafter of `staged`: its settings, its construction and its drafts.

A mapping describes it: the settings of any drafter, {name: ngram, n: 4}, where that drafter may
have an inner one again; or the folder of a trained drafter whose target is the draft model,
{path: FOLDER}. The settings that a checkpoint stores are of the first kind.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.conf.fields import from_dict
from outrider.models import drafters, formats
from outrider.models.drafting.drafter import Drafter, State
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape
from outrider.models.target.target import Target

MAX_STAGES = 4  # of inner drafters
KEY = "drafter.inner"
OTHER = "Use another inner drafter, such as ngram."


def check_settings(values: Any) -> None:
    """Raise ValueError unless these are settings of an inner drafter, or None.

    An error of a drafter's own setting is a `ConfigError` that names it: drafter.inner.n.
    """
    stages, inside = 0, values
    while isinstance(inside, dict):
        stages, inside = stages + 1, inside.get("inner")
    if stages > MAX_STAGES:
        raise ValueError(f"inner = {stages} stages: there are {MAX_STAGES} at most")
    if values is None:
        return
    named = isinstance(values, dict) and isinstance(values.get("name"), str)
    if not named and not (isinstance(values, dict) and set(values) == {"path"}):
        raise ValueError(f"inner = {values}: use {{name: ngram, n: 3}} or {{path: FOLDER}}")
    if named:
        parse_settings(values)
    elif not isinstance(values["path"], str):
        raise ValueError(f"inner = {values}: a path is text")


def check(values: dict[str, Any], lm: ModelShape) -> None:
    """Raise an error if the settings, or the folder, do not suit a draft model of this shape."""
    if "name" in values:
        with _named_inside():
            drafters.check(parse_settings(values), lm)
    elif _folder(values).is_dir():
        formats.recognise(_folder(values))
    else:
        why, fix = "There is no such folder.", f"Paths start at the current folder, {Path.cwd()}."
        raise ConfigError(f"{KEY}.path", values["path"], why, fix)


def _folder(values: dict[str, Any]) -> Path:
    """Return the folder of a drafter, or of a run's drafter."""
    folder = Path(values["path"]).expanduser()
    return folder / "drafter" if (folder / "drafter").is_dir() else folder


@contextmanager
def _named_inside() -> Iterator[None]:
    """Turn the key of a `ConfigError`, drafter.n, into that of the inner drafter's setting."""
    try:
        yield
    except ConfigError as error:
        key = KEY + error.key.removeprefix("drafter")
        fix = error.fix.replace("drafter.", f"{KEY}.")
        raise ConfigError(key, error.value, error.why, fix) from None


def parse_settings(values: dict[str, Any]) -> Any:
    """Return the `Config` of the inner drafter that `values` name.

    Raises:
        ConfigError: there is no such drafter, it runs its target itself, or a setting is wrong.
    """
    with _named_inside():
        schema = drafters.config_class(values["name"])
        cfg = from_dict(schema, values, "drafter")
    _refuse_target_running(drafters.drafter_class(cfg.name), cfg.name)
    return cfg


def build(values: dict[str, Any], lm: Target) -> tuple[Drafter, dict[str, Any]]:
    """Build the inner drafter of the draft model `lm`, whose taps are set, or load it.

    Returns:
        The drafter, frozen and in eval mode, and its complete settings, in which a folder is
        replaced by what it holds.
    """
    if "name" in values:
        cfg = parse_settings(values)
        with _named_inside():
            drafter = drafters.build(cfg, lm, _vocab(cfg, lm))
    else:
        drafter, cfg = _load(_folder(values), lm)
    cfg = getattr(drafter, "cfg", cfg)
    size = None if drafter.vocab.is_full else len(drafter.vocab)
    settings = {**dataclasses.asdict(cfg), "draft_vocab_size": size}
    drafter.to(lm.device, lm.dtype).eval().requires_grad_(False)
    return drafter, json.loads(json.dumps(settings))


def _load(folder: Path, lm: Target) -> tuple[Drafter, Any]:
    """Load the drafter of a folder."""
    drafter, cfg = formats.load(folder, lm)
    _refuse_target_running(type(drafter), cfg.name)
    if drafters.custom_shape(drafter) is not None:
        why = "Its layers have another shape than the draft model's, which its settings lack."
        raise ConfigError(f"{KEY}.name", cfg.name, why, OTHER)
    lm.set_taps(drafter.taps)
    return drafter, cfg


def _vocab(cfg: Any, lm: Target) -> DraftVocab:
    """Return the draft vocabulary; a checkpoint overwrites which tokens a reduced one has."""
    with torch.device("cpu"):  # also where a checkpoint is read: its values are checked
        no_counts = torch.zeros(lm.vocab_size, dtype=torch.long)
        return DraftVocab.from_counts(no_counts, cfg.draft_vocab_size or lm.vocab_size)


def _refuse_target_running(drafter: type[Drafter], name: str) -> None:
    if drafter.runs_target():
        why = "It runs its target itself, and the drafter runs the draft model."
        raise ConfigError(f"{KEY}.name", name, why, OTHER)


def draft_chains(
    drafter: Drafter,
    states: Sequence[State],
    newest: Sequence[int],
    depths: int,
    allowed: DraftVocab,
) -> list[list[int]]:
    """Return the chain of most probable tokens after each of several texts, at most `depths`.

    A chain ends where the drafter abstains, where its logits are NaN, or before a token outside the
    vocabulary `allowed`.

    Args:
        newest: the last token of each text.
    """
    t2d = allowed.t2d
    ids = torch.tensor(newest, device=t2d.device)[:, None]
    parents, alive = torch.zeros_like(ids), torch.ones_like(ids[:, 0], dtype=torch.bool)
    drafted, kept = list[Tensor](), list[Tensor]()
    for depth in range(1, min(depths, drafter.max_depth) + 1):
        logits, states = drafter.step_batch(states, depth, ids, parents)
        best = logits[:, 0].max(-1)
        ids = drafter.vocab.to_target(best.indices)[:, None]
        alive = alive & (best.values > float("-inf")) & t2d[ids[:, 0]]
        drafted.append(ids[:, 0])
        kept.append(alive)
        if not bool(alive.any()):
            break
    tokens, lengths = torch.stack(drafted, 1).tolist(), torch.stack(kept, 1).sum(1).tolist()
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]
