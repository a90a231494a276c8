"""Sampling, policy and rule of `conf/decode`, and the checks of its settings."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from outrider.conf.automatic import fill_automatic
from outrider.conf.compose import add_choice, choices, compose, remove_choice, to_container
from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.errors import ConfigError
from outrider.conf.fields import from_dict
from outrider.conf.plugins import OWN_PART, Registry
from outrider.conf.schema import Config, EvalConfig, UntrainedConfig
from outrider.models.decode import tree_shapes
from outrider.models.decode.acceptance import AcceptanceTable
from outrider.models.decode.adaptive_confidence import AdaptiveConfidence
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.rules.rule_table import (
    BEST,
    COUPLED,
    MERGED,
    SAMPLED_DRAFTS,
    BoundRule,
    bind_rule,
    default_rule,
)
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tries.policy import MergedTree
from outrider.models.drafting.drafter import Drafter

# of `decode`, for every entry of `eval.grid`; so is decode.depth, if it is set
SHARED = (
    "verify", "lenience", "epsilon", "delta", "draft",
    *(name for name in Sampling._fields if name != "temperature"),
)  # fmt: skip
AUTO_DRAFTS, AUTO_RULES = ("auto", "coupled"), ("auto", "ratio", "block", "coupled")
# of `decode`, without effect at temperature 0
ABOVE_ZERO = ("verify", "draft", "lenience", "epsilon", "delta", "top_p", "top_k", "min_p")
Tables = Mapping[str, AcceptanceTable]  # eval/rank_tables.py: "best@0", "drawn@1", ..
PolicyFn = Callable[[DecodeConfig, Tables | None], Policy]


def sampling_of(decode: DecodeConfig, vocab: int) -> Sampling:
    """Return the sampling parameters; ConfigError if they are invalid for the target."""
    try:
        return Sampling(*(getattr(decode, field) for field in Sampling._fields)).check(vocab)
    except ValueError as error:
        key = str(error).partition("=")[0].partition(":")[0]
        why, fix = f"{error}.", "See outrider eval --help."
        raise ConfigError(f"decode.{key}", getattr(decode, key, ""), why, fix) from None


def policy_of(decode: DecodeConfig, tables: Tables | None = None) -> Policy:
    """Return the draft policy.

    Args:
        tables: of the checkpoint; required for a static tree without a file.

    Raises:
        ConfigError: a static tree has neither a file nor a table, or does not suit its drafts.
    """
    return POLICIES[decode.name](decode, tables)


def _chain(decode: DecodeConfig, tables: Tables | None) -> Policy:
    confidence = decode.confidence
    if confidence == "adaptive":
        return Chain(decode.depth, draft_of(decode), AdaptiveConfidence(decode.acceptance_goal))
    return Chain(decode.depth, draft_of(decode), confidence)


def _auto(decode: DecodeConfig, tables: Tables | None) -> Policy:
    table = (tables or {}).get(_table_name(decode))
    shape = decode.depth, decode.nodes, decode.width
    return Auto(*shape, draft_of(decode), decode.auto.eps, table=table)


def _dynamic_tree(decode: DecodeConfig, tables: Tables | None) -> Policy:
    return DynamicTree(decode.depth, decode.width, decode.nodes, decode.gain, draft_of(decode))


def _best_first_tree(decode: DecodeConfig, tables: Tables | None) -> Policy:
    return DynamicTree(decode.depth, decode.nodes, decode.nodes, decode.gain, draft_of(decode))


def _static_tree(decode: DecodeConfig, tables: Tables | None) -> Policy:
    draft = draft_of(decode)
    paths = tree_shapes.read(Path(decode.tree)) if decode.tree else search_tree(decode, tables)
    if draft in SAMPLED_DRAFTS and not tree_shapes.contiguous(paths):
        why = "Siblings are sampled in sequence: ranks below a node must be 0, 1, 2, .."
        fix = "Use decode.draft=best, or fill the gaps."
        raise ConfigError("decode.tree", decode.tree, why, fix)
    return StaticTree(paths, draft)


def _merged_tree(decode: DecodeConfig, tables: Tables | None) -> Policy:
    return MergedTree(decode.depth, decode.nodes // decode.depth, draft_of(decode))


OWN_POLICIES: dict[str, PolicyFn] = {
    "chain": _chain, "static_tree": _static_tree, "sampled_tree": _static_tree,
    "dynamic_tree": _dynamic_tree, "opt_tree": _dynamic_tree, "auto": _auto,
    "best_first_tree": _best_first_tree, "merged_tree": _merged_tree,
}  # fmt: skip
# what `decode.name` may name; a registered one has the settings and the depth of a tree
POLICIES: Registry[PolicyFn] = Registry(
    "draft policy", Callable, OWN_POLICIES,
    on_remove=partial(remove_choice, "decode"),
    on_add=lambda name, _: add_choice(
        "decode", DecodeConfig(name=name, width=4, nodes=8), depth=None, confidence=None
    ),
)  # fmt: skip


def draft_of(decode: DecodeConfig) -> str:
    """Return the kind of the drafts: `best` at temperature 0."""
    return decode.draft_kind if decode.temperature > 0 else BEST


def search_tree(decode: DecodeConfig, tables: Tables | None) -> tree_shapes.Paths:
    """Return the best shape of `decode.nodes` nodes; ConfigError if there is no table for it."""
    name = _table_name(decode)
    if tables is None or name not in tables:
        why = f"No ranks.json with {name} is beside the drafter."
        fix = "Give decode.tree=FILE, or measure it for a run: outrider ranks run.dir=..."
        raise ConfigError("decode.tree", decode.tree, why, fix)
    table = tables[name].ranks[: decode.depth, : decode.width]
    return best_tree(name, table, decode.nodes)


def _table_name(decode: DecodeConfig) -> str:
    """Return the name of the table of the drafts of `decode`."""
    draft = draft_of(decode)
    kind = "drawn" if draft in SAMPLED_DRAFTS else draft
    return f"{kind}@{1 if decode.temperature > 0 else 0}"


def best_tree(name: str, table: Float[Tensor, "D K"], nodes: int) -> tree_shapes.Paths:
    """Return the shape with the most expected tokens for a table; "drawn@..." ones have no gaps."""
    if name.startswith("drawn"):
        return tree_shapes.sequoia(table, nodes, len(table))
    return tree_shapes.best_first(table, nodes)


def depth_warning(policy: Policy, drafter: Drafter) -> str:
    """Return a warning if the policy is deeper than the drafter supports; else ""."""
    if policy.levels <= drafter.max_depth:
        return ""
    return (
        f"decode.depth={policy.levels} is deeper than this drafter can draft: "
        f"drafts end at depth {drafter.max_depth}"
    )


def greedy_warning(decodings: Sequence[DecodeConfig]) -> str:
    """Return a warning if settings have no effect, since every decoding is greedy; else ""."""
    default, unused = DecodeConfig(), dict[str, object]()
    for decode in decodings:
        if decode.temperature > 0:
            return ""
        values = {key: getattr(decode, key) for key in ABOVE_ZERO}
        unused |= {key: value for key, value in values.items() if value != getattr(default, key)}
    if not unused:
        return ""
    settings = ", ".join(f"decode.{key}={value}" for key, value in unused.items())
    has = "has" if len(unused) == 1 else "have"
    return (
        f"{settings} {has} no effect at temperature 0, where a draft token is accepted if it is "
        "the target's top-1 token"
    )


def rule_of(decode: DecodeConfig, policy: Policy) -> BoundRule:
    """Return the verification rule at temperatures above 0."""
    name = decode.verify
    if isinstance(policy, Auto):
        return policy.default_rule(name if decode.temperature else "auto")
    if name == "auto" or decode.temperature == 0:
        return bind_rule(default_rule(policy.draft, not policy.branches), policy.draft)
    return bind_rule(name, policy.draft, **_rule_parameters(decode))


def _rule_parameters(decode: DecodeConfig) -> dict[str, float]:
    if decode.verify == "lossy_typical":
        return {"epsilon": decode.epsilon, "delta": decode.delta}
    return {"factor": decode.lenience} if decode.verify == "lossy_lenience" else {}


def check_decode(decode: DecodeConfig) -> None:
    """Raise ConfigError if two settings contradict each other."""

    def refuse(key: str, why: str, fix: str) -> ConfigError:
        return ConfigError(f"decode.{key}", getattr(decode, key), why, fix)

    if decode.name not in POLICIES:
        fix = f"Use one of: {', '.join(POLICIES)}. {OWN_PART}"
        raise ConfigError("decode", decode.name, "There is no policy of this name.", fix)
    chain, depth = decode.kind == "chain", decode.depth
    if chain and decode.width != 1:
        fix = "Use decode=dynamic_tree for a tree."
        raise refuse("width", "A chain has one child per node.", fix)
    if decode.name == "best_first_tree" and decode.width != 1:
        fix = "Set decode.nodes, or use decode=dynamic_tree."
        raise refuse("width", "A best-first tree is as wide as its nodes allow.", fix)
    if chain and decode.nodes != depth:
        fix = "Set only decode.depth, or use decode=dynamic_tree for a tree."
        raise refuse("nodes", f"A chain of decode.depth={depth} has exactly {depth} nodes.", fix)
    if decode.nodes < depth and decode.name in OWN_POLICIES:  # others count their own nodes
        fix = f"Use decode.nodes={depth} or more, or a smaller depth."
        raise refuse("nodes", f"A tree of decode.depth={depth} has at least {depth} nodes.", fix)
    if decode.kind == "dynamic_tree" and decode.draft_kind not in (BEST, COUPLED):
        why = "A tree that is pruned by probability must not sample its tokens: that is biased."
        raise refuse("draft", why, "Use best or coupled, or decode=sampled_tree.")
    if decode.kind == "merged_tree" and decode.width != 1:
        fix = "Set decode.nodes and decode.depth."
        raise refuse("width", "It has as many chains as decode.nodes holds.", fix)
    if decode.kind == "merged_tree" and decode.draft_kind not in (BEST, MERGED):
        why = "Chains that are merged are independent draws, or begin with the best tokens."
        raise refuse("draft", why, "Use auto or best.")
    for key, kind in (("confidence", "chain"), ("gain", "dynamic_tree"), ("tree", "static_tree")):
        if getattr(decode, key) and decode.kind != kind and decode.name in OWN_POLICIES:
            raise refuse(key, f"Only decode={kind} has this setting.", f"Use decode={kind}.")
    if decode.kind == "auto":
        _check_auto(decode)
        return
    if decode.acceptance_goal != DecodeConfig.acceptance_goal and decode.confidence != "adaptive":
        why, fix = "Only an adaptive confidence has a goal.", "Add decode.confidence=adaptive."
        raise refuse("acceptance_goal", why, fix)
    if decode.verify == "auto":
        return
    try:
        rule = bind_rule(decode.verify, decode.draft_kind, **_rule_parameters(decode))
    except ValueError as error:
        why = f"{str(error)[0].upper()}{str(error)[1:]}."
        raise refuse("verify", why, "Use another rule, or decode.verify=auto.") from None
    if rule.chains_only and not chain:
        fix = "Use decode=chain, or traversal for a tree."
        raise refuse("verify", "It verifies chains only.", fix)


def _check_auto(decode: DecodeConfig) -> None:
    """Raise ConfigError for drafts or a rule that decode=auto does not choose between."""
    for key, known in (("draft", AUTO_DRAFTS), ("verify", AUTO_RULES)):
        if (value := getattr(decode, key)) not in known:
            why = "decode=auto verifies drawn chains and trees of top-k tokens, or coupled ones."
            fix = f"Use one of {', '.join(known)}, or another decode=..."
            raise ConfigError(f"decode.{key}", value, why, fix)
    if decode.draft == COUPLED and decode.verify not in ("auto", COUPLED):
        why = "Coupled drafts are verified by equality with the target's own draw."
        raise ConfigError("decode.verify", decode.verify, why, "Use auto or coupled.")


def parse_policy_at_temperature(entry: str) -> tuple[str, DecodeConfig]:
    """Parse an entry of `eval.grid`: a name for its report, and its settings.

    "chain@1" -> ("chain-t1", conf/decode/chain.yaml at temperature 1); any other form is a
    ConfigError.
    """
    policy, _, temperature = entry.partition("@")
    if policy not in choices("decode") or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", temperature):
        why = "Expected policy@temperature, for example chain@0."
        raise ConfigError("eval.grid", entry, why, f"Policies: {', '.join(choices('decode'))}.")
    values = to_container(compose([f"decode.temperature={temperature}"], f"decode/{policy}"))
    fill_automatic(values)
    return f"{policy}-t{temperature}", from_dict(DecodeConfig, values["decode"], "decode")


def decodings(config: Config) -> list[tuple[str, DecodeConfig]]:
    """Return the decodings of an evaluation by report name: `decode`, or those of `eval.grid`.

    An entry with the policy of `decode` has its settings, one with another policy the SHARED ones;
    both at the entry's temperature. Unless they are set, depth and confidence suit the drafter.
    Names begin with `eval.out`, if it is not "eval".
    """
    out = config.eval.out
    if not config.eval.grid:
        return [(out, config.decode)]
    prefix = "" if out == EvalConfig.out else f"{out}-"
    parsed = map(parse_policy_at_temperature, config.eval.grid)
    return [(prefix + name, _entry_of(config, decode)) for name, decode in parsed]


def _entry_of(config: Config, entry: DecodeConfig) -> DecodeConfig:
    """Return the settings of an entry of `eval.grid`, given those of its policy's file."""
    own = config.decode
    if entry.name == own.name:
        decode = replace(own, temperature=entry.temperature)
    else:
        shared = {key: getattr(own, key) for key in SHARED}
        decode = suit_drafter(replace(entry, **shared), config.drafter)
    if "decode.confidence" in config.automatic and decode.kind == "chain":
        decode = replace(decode, confidence=config.drafter.confidence)
    if "decode.depth" in config.automatic:
        return suit_depth(decode, config.drafter)
    nodes = own.depth if decode.kind == "chain" else max(decode.nodes, own.depth)
    return replace(decode, depth=own.depth, nodes=nodes)


def suit_depth(decode: DecodeConfig, drafter: Any) -> DecodeConfig:
    """Return the settings with the drafter's depth at most, or just that without weights.

    A tree is not deeper than its number of nodes.
    """
    exactly, chain = isinstance(drafter, UntrainedConfig), decode.kind == "chain"
    depth = drafter.depths if exactly else min(decode.depth, drafter.max_depth)
    if chain:
        return replace(decode, depth=depth, nodes=depth)
    return replace(decode, depth=min(depth, decode.nodes))


def suit_drafter(decode: DecodeConfig, drafter: Any) -> DecodeConfig:
    """Return the settings with the depth and, for a chain, the confidence that suit the drafter."""
    decode = suit_depth(decode, drafter)
    return replace(decode, confidence=drafter.confidence) if decode.kind == "chain" else decode
