"""The rule of `decode=auto` above temperature 0: chains by a rule for drawn tokens, trees by match.

Each draft is verified by the rule of its kind: drawn tokens come with the rows they were drawn from
(q), the top-k tokens of a tree without. Both rules are lossless, and which kind a round drafts is
decided before anything is drawn. The overlaps sum min(p, q) of a chain, which are the probabilities
of acceptance, are passed on.

Shape letters: B prompts, N nodes, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.decode.rules import token_rules_cpu
from outrider.models.decode.rules.round_outcome import RoundOutcome
from outrider.models.decode.rules.rule_table import BEST, BoundRule, bind_rule
from outrider.models.decode.rules.token_rules import Accepted, Rows
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree

Note = Callable[[list[list[float]]], None]


@dataclass(frozen=True)
class AutoRule(BoundRule):
    """A rule for drafts with and without rows."""

    def __call__(
        self, tree: Tree, p_rows: Rows, q_rows: Rows | None, rng: RandomSource
    ) -> Accepted:
        accepted: Accepted = self.verify(tree, p_rows, q_rows, rng)
        return accepted


def auto_rule(name: str, draft: str, note: Note) -> AutoRule:
    """Return the rule.

    Args:
        name: the rule of chains; "auto" is `ratio`.
        note: called with the overlaps per prompt and level of a chain.

    Raises:
        ValueError: the rule does not fit such drafts.
    """
    chains = bind_rule("ratio" if name == "auto" else name, draft)
    trees = bind_rule("match", BEST)

    def verify(tree: Tree, p_rows: Rows, q_rows: Rows | None, rng: RandomSource) -> Accepted:
        if q_rows is None or tree.size == 1:
            return trees(tree, p_rows, None, rng)
        note(_overlaps(p_rows, q_rows))
        return chains(tree, p_rows, q_rows, rng)

    def on_cpu(
        tree: Tree,
        logits: Rows,
        warp: token_rules_cpu.Warp,
        q_rows: Rows | None,
        rng: RandomSource,
    ) -> list[RoundOutcome]:
        if q_rows is None:
            return token_rules_cpu.match(tree, logits, warp, None, rng)
        p_rows = warp(logits)
        note(_overlaps(p_rows, q_rows))
        return token_rules_cpu.ratio(tree, logits, lambda _: p_rows, q_rows, rng)

    cpu_rule = on_cpu if chains.name == "ratio" else None
    return AutoRule(chains.name, draft, verify, True, False, chains.lossy, cpu_rule)


def _overlaps(p_rows: Rows, q_rows: Rows) -> list[list[float]]:
    """Return sum min(p, q) of every node but the last: the acceptance of its child."""
    if p_rows.shape != q_rows.shape:  # the rule explains it
        return []
    shared: Tensor = torch.minimum(p_rows[:, :-1], q_rows[:, :-1]).sum(-1)
    values: list[list[float]] = shared.tolist()
    return values
