"""What `outrider plan` tries, as settings: the group `plan`."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from outrider.conf.compose import verb_group
from outrider.conf.fields import key

COUNT = "[1, inf)"


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Shapes, settings and the machine that a plan is made for."""

    depths: tuple[int, ...] = key((1, 2, 3, 4), "drafted tokens along one path", COUNT)
    widths: tuple[int, ...] = key((1, 2, 4), "children per node; 1 is a chain", COUNT)
    nodes: tuple[int, ...] = key((4, 8, 16), "drafted nodes of a tree", COUNT)
    batches: tuple[int, ...] = key((1, 4, 16), "prompts decoded together", COUNT)
    contexts: tuple[int, ...] = key((64, 256), "tokens in front of a round", COUNT)
    prompts: int = key(8, "of eval.prompts, answered to learn how often guesses are right", COUNT)
    new_tokens: int = key(64, "of each answer", COUNT)
    repeats: int = key(15, "measurements of each forward; the median counts", COUNT)
    check: int = key(5, "settings also decoded, to hold the plan against; 0: none", "[0, inf)")
    machine: Literal["h100", "h200", "a100", "b200", "rtx4090", "mi300x"] | None = key(
        None, "foresee this one instead of measuring here"
    )
    bandwidth: float | None = key(None, "of another machine: memory bandwidth, TB/s", "(0, inf)")
    flops: float | None = key(None, "of another machine: dense TFLOP/s", "(0, inf)")
    fixed: float | None = key(
        None, "of another machine: what any forward takes besides, microseconds; null: 50, a guess",
        "[0, inf)",
    )  # fmt: skip
    target_params: float | None = key(None, "of another target: weights, 1e9", "(0, inf)")
    target_layers: int | None = key(None, "of another target: attention layers", COUNT)
    target_width: int | None = key(None, "of another target: heads x head size", COUNT)
    target_kv_width: int | None = key(None, "of another target: key heads x head size", COUNT)
    drafter_params: float | None = key(None, "of another drafter: weights, 1e9", "(0, inf)")
    drafter_layers: int = key(1, "of another drafter, shaped like the target's", COUNT)
    budget: int | None = key(None, "cached tokens the drafter reads at most; null: all", COUNT)
    bytes: int = key(2, "of a weight and of a cached number on another machine", COUNT)
    out: str = key("plan", "written are <run.dir>/plan/<out>.json and .png")


def read_plan(overrides: Sequence[str]) -> PlanConfig:
    """The settings behind `plan.*` overrides.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range.
    """
    return verb_group(PlanConfig, "plan", overrides)[0]
