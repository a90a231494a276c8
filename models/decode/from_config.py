"""From settings to a policy and its rule."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.eval.rank_tables import best_tree
from outrider.models.decode import tree_shapes as shapes
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.rules import BEST, TOSSED, Fitted, default_rule, judge
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafter import Drafter
from outrider.train.decoding import DecodeConfig

Tables = Mapping[
    str, Tensor
]  # eval/rank_tables.py: "best@0", "best@1", "drawn@1", .. -> chances [D, K]


def sampling_of(decode: DecodeConfig) -> Sampling:
    return Sampling(
        decode.temperature,
        decode.top_p,
        decode.top_k,
        decode.min_p,
        decode.repetition_penalty,
        decode.banned,
    )


def policy_of(decode: DecodeConfig, tables: Tables | None = None) -> Policy:
    """The shape of drafts.

    Args:
        tables: of the checkpoint; needed for a static tree without a file.

    Raises:
        ConfigError: a static tree cannot be had, or does not suit its drafts.
    """
    draft = decode.tossing if decode.temperature > 0 else BEST  # greedily nothing is drawn
    if decode.kind == "chain":
        return Chain(decode.depth, draft, decode.confidence)
    if decode.kind == "dynamic_tree":
        return DynamicTree(decode.depth, decode.width, decode.nodes, decode.gain, draft)
    paths = shapes.read(Path(decode.tree)) if decode.tree else searched(decode, tables)
    if draft in TOSSED and not shapes.contiguous(paths):
        why = "Drawn siblings come one after the other: the ranks below a node must be 0, 1, 2, .."
        raise ConfigError(
            "decode.tree", decode.tree, why, "Use decode.draft=best, or fill the gaps."
        )
    return StaticTree(paths, draft)


def searched(decode: DecodeConfig, tables: Tables | None) -> shapes.Paths:
    """The best shape of `decode.nodes` nodes for a checkpoint's chances."""
    draft = decode.tossing if decode.temperature > 0 else BEST
    name = f"{'drawn' if draft in TOSSED else draft}@{1 if decode.temperature > 0 else 0}"
    if tables is None or name not in tables:
        why = f"The run has no measured chances ({name} in ranks.json) to search a tree by."
        fix = "Give decode.tree=FILE, or run: outrider ranks run.dir=..."
        raise ConfigError("decode.tree", decode.tree, why, fix)
    table = tables[name][: decode.depth, : decode.width]
    return best_tree(name, table, decode.nodes)


def shortfall(policy: Policy, drafter: Drafter) -> str:
    """What to say where drafts are wished deeper than the drafter can go; "" where they are not."""
    if policy.levels <= drafter.reach:
        return ""
    return (
        f"drafts of depth {policy.levels} are wished, and this drafter reaches {drafter.reach}: "
        "they end there"
    )


def rule_of(decode: DecodeConfig, policy: Policy) -> Fitted:
    """How guesses are verified above temperature 0."""
    name = decode.verify
    if name == "auto" or decode.temperature == 0:
        return judge(default_rule(policy.draft, not policy.branches), policy.draft)
    return judge(name, policy.draft, **decode.knobs)
