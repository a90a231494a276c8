"""Lossy rules: more tokens are accepted, and the output distribution changes.

    typical     accept a token that is likely enough under the target, independent of q
    lenience    the ratio test with q scaled down

Shape letters: B prompts, N nodes, V vocabulary.

Source: Cai et al. 2024, "Medusa", section 2.3.1, arXiv:2401.10774 (typical acceptance, where the
condition is Hewitt et al. 2022, arXiv:2210.15191); Leviathan et al. 2023, appendix A.5,
arXiv:2211.17192 (lenience).
Differs from Medusa's code: p is the warped row, and the token after the path is drawn from it
(their fast mode takes the argmax at any temperature).
"""

import torch

from outrider.models.decode.rules.token_rules import (
    Accepted,
    Rows,
    deepest_path,
    draft_probabilities,
    draw_one,
    ratio,
    select_node,
)
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree


def typical(
    tree: Tree, p_rows: Rows, rng: RandomSource, epsilon: float = 0.09, delta: float = 0.3
) -> Accepted:
    """Accept x iff p(x) > min(epsilon, delta * exp(-H(p))); the longest path, most probable first.

    Args:
        epsilon: a probability that is always accepted, in (0, 1).
        delta: > 0; the flatter the row, the lower the threshold. H is in nats.

    Raises:
        ValueError: epsilon or delta out of range; p_rows does not have one row per node.
    """
    check_typical(epsilon, delta)
    p, _ = draft_probabilities(tree, p_rows, p_rows)
    entropy = torch.special.entr(p_rows).sum(-1)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    passed = p > threshold.gather(1, tree.parents.clamp(min=0))
    log_probs = torch.where(tree.ancestor_mask, p.log()[:, None], 0.0).sum(-1)
    path, length = deepest_path(tree, passed, log_probs)
    return Accepted(path, length, draw_one(select_node(p_rows, path[:, -1]), rng))


def lenience(tree: Tree, p_rows: Rows, q_rows: Rows, rng: RandomSource, factor: float) -> Accepted:
    """Accept x with probability min(1, p(x) / (factor q(x))); else draw from max(p - factor q, 0).

    With a factor l no token becomes more probable than p(x) / l after any text. 1 is `ratio`.

    Args:
        factor: l in (0, 1].

    Raises:
        ValueError: the factor is out of range; or as `token_rules.ratio`.
    """
    check_lenience(factor)
    return ratio(tree, p_rows, factor * q_rows, rng)


def check_typical(epsilon: float, delta: float) -> None:
    """Raise ValueError if a parameter of `typical` is out of range."""
    if not 0 < epsilon < 1 or not delta > 0:
        raise ValueError(f"epsilon={epsilon}, delta={delta}: needs 0 < epsilon < 1 and delta > 0")


def check_lenience(factor: float) -> None:
    """Raise ValueError if the parameter of `lenience` is out of range."""
    if not 0 < factor <= 1:
        raise ValueError(f"factor={factor}: needs 0 < factor <= 1, and 1 is lossless")
