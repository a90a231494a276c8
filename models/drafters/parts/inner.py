"""The inner drafter of `staged`: its settings, its construction and its drafts.

A mapping describes it, as `part.py` says; the drafter that it names may have an inner one again.
The settings that a checkpoint stores name a drafter, never a folder.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models import drafters
from outrider.models.drafters.parts.part import Part
from outrider.models.drafting.drafter import Drafter, State
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.target.target import Target

MAX_STAGES = 4  # of inner drafters
INNER = Part("drafter.inner", "Use another inner drafter, such as ngram.")


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
        INNER.parse(values)
    elif not isinstance(values["path"], str):
        raise ValueError(f"inner = {values}: a path is text")


def build(values: dict[str, Any], lm: Target) -> tuple[Drafter, dict[str, Any]]:
    """Build the inner drafter of the draft model `lm`, or load it, as `Part.build` does.

    Raises:
        ConfigError: its layers have a shape of their own, which the settings cannot hold.
    """
    drafter, settings = INNER.build(values, lm)
    if drafters.custom_shape(drafter) is not None:
        why = "Its layers have another shape than the draft model's, which its settings lack."
        raise ConfigError(f"{INNER.key}.name", settings["name"], why, INNER.fix)
    return drafter, settings


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
