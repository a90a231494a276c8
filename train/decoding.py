"""How drafts are shaped, tossed and verified, as settings: the group `decode`.

What cannot go together is refused here, before a model is loaded: above all a verification rule
that would be biased for the drafts it is given.
"""

import dataclasses
import re
from typing import Literal

from outrider.conf.compose import choices, compose, plain
from outrider.conf.errors import ConfigError
from outrider.conf.fields import key, read

COUNT = "[1, inf)"
CHANCE = "[0, 1]"


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The shape of a draft, and how tokens are drawn."""

    name: Literal["chain", "static_tree", "sampled_tree", "dynamic_tree", "opt_tree"] = key(
        "chain", "draft shape (choose with decode=...)"
    )
    depth: int = key(3, "drafted tokens along one path", COUNT)
    width: int = key(1, "children kept per node and nodes expanded per level", COUNT)
    nodes: int = key(3, "drafted nodes the target verifies in one forward", COUNT)
    draft: Literal["auto", "best", "drawn", "independent", "coupled"] = key(
        "auto",
        "guesses above temperature 0: the drafter's favourites, or drawn from its rows without "
        "replacement, or independently, or coupled to the target's by one noise; auto: chain and "
        "sampled_tree drawn, the other trees best, all of them coupled with decode.verify=coupled",
    )
    verify: str = key(
        "auto",
        "rule above temperature 0: match, ratio, block, independent, without_replacement, "
        "traversal, sampled, coupled, lossy_typical, lossy_lenience; auto: the usual lossless one",
    )
    tree: str | None = key(
        None,
        "static_tree, sampled_tree: json file of paths of ranks; null: the best known",
    )
    confidence: float = key(
        0.0, "chain: stop behind a guess of less chance (the guess is still verified)", CHANCE
    )
    gain: float = key(
        0.0, "dynamic_tree, opt_tree: grow until a level adds no more tokens than this", "[0, inf)"
    )
    lenience: float = key(0.5, "lossy_lenience: accept with min(1, p / (lenience q))", "(0, 1]")
    epsilon: float = key(
        0.09, "lossy_typical: accept where p > min(epsilon, delta exp(-H))", "(0, 1]"
    )
    delta: float = key(0.3, "lossy_typical: see epsilon", "(0, inf)")
    temperature: float = key(0.0, "0 is greedy, 1 the target's own distribution", "[0, inf)")
    top_p: float = key(1.0, "nucleus share; 1 keeps all", "(0, 1]")
    top_k: int = key(0, "most likely tokens kept; 0 keeps all", "[0, inf)")
    min_p: float = key(0.0, "least chance kept, in shares of the most likely token's", CHANCE)
    repetition_penalty: float = key(
        1.0, "divides positive logits of tokens already said", "(0, inf)"
    )
    banned: tuple[int, ...] = key((), "token ids that are never said")

    @property
    def kind(self) -> str:
        """The policy behind the name: chain, static_tree or dynamic_tree."""
        return {"sampled_tree": "static_tree", "opt_tree": "dynamic_tree"}.get(self.name, self.name)

    @property
    def tossing(self) -> str:
        """`draft`, decided."""
        if self.draft != "auto":
            return self.draft
        if self.verify == "coupled":
            return "coupled"
        return "drawn" if self.name in ("chain", "sampled_tree") else "best"

    @property
    def plain_law(self) -> bool:
        """Greedy, or the target's own distribution."""
        warped = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        changed = self.repetition_penalty != 1 or bool(self.banned)
        return self.temperature in (0, 1) and not warped and not changed

    @property
    def knobs(self) -> dict[str, float]:
        """Settings of the rule."""
        known: dict[str, dict[str, float]] = {
            "lossy_typical": {"epsilon": self.epsilon, "delta": self.delta},
            "lossy_lenience": {"factor": self.lenience},
        }
        return known.get(self.verify, {})


def check(decode: DecodeConfig) -> None:
    """
    Raises:
        ConfigError: keys that contradict each other.
    """
    chain = decode.kind == "chain"
    if chain and decode.width != 1:
        why, fix = "A chain has one child per node.", "Take decode=dynamic_tree for a tree."
        raise ConfigError("decode.width", decode.width, why, fix)
    if chain and decode.nodes != decode.depth:
        why = f"A chain of decode.depth={decode.depth} has exactly {decode.depth} nodes."
        fix = "Set decode.depth alone, or take decode=dynamic_tree for a tree."
        raise ConfigError("decode.nodes", decode.nodes, why, fix)
    if decode.nodes < decode.depth:
        why = f"A tree of decode.depth={decode.depth} has at least {decode.depth} nodes."
        fix = f"Use decode.nodes={decode.depth} or more, or a smaller depth."
        raise ConfigError("decode.nodes", decode.nodes, why, fix)
    if decode.kind == "dynamic_tree" and decode.tossing not in ("best", "coupled"):
        why = "A tree that is cut by its tokens' chances must not toss them: that is biased."
        fix = "Use best or coupled, or decode=sampled_tree."
        raise ConfigError("decode.draft", decode.draft, why, fix)
    for name, of in (("confidence", "chain"), ("gain", "dynamic_tree"), ("tree", "static_tree")):
        if getattr(decode, name) and decode.kind != of:
            why = f"Only a {of} has it."
            raise ConfigError(f"decode.{name}", getattr(decode, name), why, f"Take decode={of}.")
    _check_rule(decode, chain)


def _check_rule(decode: DecodeConfig, chain: bool) -> None:
    if decode.verify == "auto":
        return
    from outrider.models.decode.rules import RULES, judge

    try:
        judge(decode.verify, decode.tossing, **decode.knobs)
    except ValueError as error:
        why = f"{str(error)[0].upper()}{str(error)[1:]}."
        raise ConfigError("decode.verify", decode.verify, why, "Or leave it at auto.") from None
    if RULES[decode.verify].chains_only and not chain:
        fix = "Take decode=chain, or traversal for a tree."
        raise ConfigError("decode.verify", decode.verify, "It verifies chains only.", fix)


def shaped(entry: str) -> tuple[str, DecodeConfig]:
    """An entry of `eval.grid`: "chain@1" -> ("chain-t1", conf/decode/chain.yaml at temperature 1).

    Raises:
        ConfigError: it is no policy@temperature.
    """
    policy, _, temperature = entry.partition("@")
    if policy not in choices("decode") or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", temperature):
        fix = f"Use policy@temperature, policies: {', '.join(choices('decode'))}."
        raise ConfigError("eval.grid", entry, "This says not what to measure.", fix)
    values = plain(compose([f"decode.temperature={temperature}"], f"decode/{policy}"))["decode"]
    return f"{policy}-t{temperature}", read(DecodeConfig, values, "decode")
