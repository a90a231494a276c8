"""The table of rules: it allows what is lossless, and refuses the rest with a reason."""

import pytest
import torch
from torch import Tensor

from outrider.models.decode.rules.rule_table import (
    DRAFTS,
    RULES,
    bind_rule,
    default_rule,
    lossless_rules,
)
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree
from tests.enumeration import (
    Propose,
    Scripted,
    Toy,
    argmax_chain,
    bias,
    by,
    enumerate_law,
    sampled_chain,
    sampled_tree,
    top_k_tree,
)
from tests.tries import other_rows, own_rows, tries

DRAWING: dict[str, tuple[Propose, Propose]] = {
    "best": (argmax_chain(2), top_k_tree(2, 1)),
    "drawn": (sampled_chain(2), sampled_tree((2, 1), replacement=False)),
    "independent": (sampled_chain(2), sampled_tree((2, 1), replacement=True)),
    "coupled": (argmax_chain(2), top_k_tree(2, 1)),  # the noise given; the rest is the engine's
    "merged": (tries([own_rows], 2), tries([own_rows, other_rows], 2)),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", RULES)
def test_the_table_allows_exactly_the_lossless_rules(name: str, draft: str) -> None:
    """What is allowed is exact on chains and trees; the rest is refused, with what to use."""
    rule = RULES[name]
    if rule.lossy:
        assert name.startswith("lossy_")
    elif draft in rule.drafts:
        for propose in DRAWING[draft][: 1 if rule.chains_only else 2]:
            assert bias(Toy(13), propose, by(bind_rule(name, draft))) < 1e-12
    else:
        with pytest.raises(ValueError, match=f"use one of {', '.join(lossless_rules(draft))}"):
            bind_rule(name, draft)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("chain", [True, False])
def test_the_default_rule_is_lossless_and_fits(draft: str, chain: bool) -> None:
    rule = RULES[default_rule(draft, chain)]
    assert draft in rule.drafts
    assert not rule.lossy
    assert chain or not rule.chains_only


@pytest.mark.parametrize(
    ("name", "draft", "parameters", "message"),
    [
        ("matching", "best", {}, "no rule 'matching'"),
        ("match", "greedy", {}, "no draft 'greedy'"),
        ("match", "best", {"factor": 0.5}, r"parameters \[\], was given \['factor'\]"),
        ("lossy_lenience", "drawn", {}, "needs .'factor'"),
        ("lossy_lenience", "drawn", {"factor": 0.0}, "factor=0.0"),
        ("lossy_typical", "best", {"epsilon": 1.0}, "epsilon=1.0"),
    ],
)
def test_invalid_arguments_of_bind_rule_are_refused(
    name: str, draft: str, parameters: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bind_rule(name, draft, **parameters)


def test_a_rule_that_reads_rows_refuses_a_draft_without_them() -> None:
    chain = Tree.chain(torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="rows it was drawn from"):
        bind_rule("block", "drawn")(chain, torch.ones(1, 2, 2), None, Scripted())


@pytest.mark.parametrize("name", RULES)
def test_without_draft_tokens_every_rule_is_plain_decoding(name: str) -> None:
    """A lone root, and a root with nodes that only fill up; the rows of q are never read."""
    rule = RULES[name]
    parameters = {key: 0.5 if value is None else value for key, value in rule.parameters.items()}
    verified = bind_rule(name, rule.drafts[0], **parameters)
    for size in (1, 3):
        tree = Tree.chain(torch.zeros(1, size, dtype=torch.long), torch.tensor([0]))
        p = torch.tensor([0.25, 0.5, 0.25]).expand(1, size, 3)
        nothing = torch.full_like(p, torch.nan)

        def process(
            rng: RandomSource, tree: Tree = tree, p: Tensor = p, q: Tensor = nothing
        ) -> tuple[int, ...]:
            path, length, next_ids = verified(tree, p, q, rng)
            return (*path[0].tolist(), int(length), int(next_ids))

        plain = [((0,) * (size + 1) + (token,), p[0, 0, token]) for token in range(3)]
        assert enumerate_law(process) == pytest.approx({k: float(v) for k, v in plain})
