"""Settings of a decoding: shape of a draft, verification and sampling."""

import dataclasses
from typing import Literal

from outrider.conf.fields import COUNT0, DEPTHS, NODES, PROBABILITY, option


@dataclasses.dataclass(frozen=True)
class AutoConfig:
    """Settings of decode=auto; everything else follows from measurement."""

    eps: float = option(
        0.03, "auto: what drafts may cost beyond plain decoding, as a share of its time", "[0, 1]"
    )


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Shape of a draft, verification and sampling."""

    name: str = option("chain", "draft policy (choose with decode=...)")
    depth: int = option(3, "draft tokens along one path; null: as far as the drafter can", DEPTHS)
    width: int = option(1, "children per node, and nodes expanded per level", NODES)
    nodes: int = option(3, "draft tokens that the target verifies in one forward", NODES)
    draft: Literal["auto", "best", "drawn", "independent", "coupled"] = option(
        "auto",
        "draft tokens above temperature 0: best (the drafter's top-k), drawn (sampled without "
        "replacement), independent (with replacement), coupled (by noise shared with the target); "
        "auto: drawn for chains and sampled_tree, best for other trees, coupled for verify=coupled",
    )
    verify: str = option(
        "auto",
        "verification above temperature 0: match, ratio, block, independent, without_replacement, "
        "traversal, multi_step, sampled, coupled, lossy_typical, lossy_lenience; auto: the usual "
        "lossless one",
    )
    tree: str | None = option(None, "static_tree, sampled_tree: JSON of rank paths; null: the best")
    confidence: float | Literal["adaptive"] = option(
        0.0, "chain: stop after a token of lower confidence; adaptive: by acceptance", PROBABILITY
    )
    acceptance_goal: float = option(0.9, "confidence=adaptive: share to accept", PROBABILITY)
    auto: AutoConfig = dataclasses.field(default_factory=AutoConfig)
    gain: float = option(0.0, "trees: stop if a level adds fewer expected tokens", "[0, inf)")
    lenience: float = option(0.5, "lossy_lenience: accept with min(1, p / (lenience q))", "(0, 1]")
    epsilon: float = option(0.09, "lossy_typical: accept p > min(epsilon, delta exp(-H))", "(0, 1]")
    delta: float = option(0.3, "lossy_typical: see epsilon", "(0, inf)")
    temperature: float = option(0.0, "0: greedy; 1: the target's own distribution", "[0, inf)")
    top_p: float = option(1.0, "nucleus sampling: probability mass kept; 1: all", "(0, 1]")
    top_k: int = option(0, "most likely tokens kept; 0: all", "[0, inf)")
    min_p: float = option(0.0, "smallest probability kept, relative to the top-1's", PROBABILITY)
    repetition_penalty: float = option(1.0, "above 1: lowers earlier tokens' logits", "(0, inf)")
    presence_penalty: float = option(
        0.0, "subtracted from the logits of tokens of the answer", "[-2, 2]"
    )
    frequency_penalty: float = option(0.0, "the same, once per occurrence", "[-2, 2]")
    banned: tuple[int, ...] = option((), "token ids that are never generated", COUNT0)

    @property
    def kind(self) -> str:
        """The kind: chain, static_tree, dynamic_tree, auto, or the name of a registered policy."""
        kinds = {"sampled_tree": "static_tree"}
        kinds |= dict.fromkeys(("opt_tree", "best_first_tree"), "dynamic_tree")
        return kinds.get(self.name, self.name)

    @property
    def draft_kind(self) -> str:
        """`draft` with auto resolved."""
        if self.draft != "auto":
            return self.draft
        if self.verify == "coupled":
            return "coupled"
        if self.name == "merged_tree":
            return "merged"
        return "drawn" if self.name in ("chain", "sampled_tree", "auto") else "best"

    @property
    def is_unwarped(self) -> bool:
        """Whether decoding is greedy, or samples from the target's unchanged distribution."""
        warped = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        changed = any(penalties) or bool(self.banned)
        return self.temperature in (0, 1) and not warped and not changed
