"""The table of verification rules: which rule fits which kind of draft.

A draft is of one of five kinds, and a rule fits one or several of them:

    best          the drafter's top-k tokens, chosen deterministically (no q rows)
    drawn         siblings drawn without replacement; in a chain, one draw per depth
    independent   siblings drawn independently from one row, so that they may repeat
    coupled       top-k of the drafter's rows with the noise that chooses the target's tokens
    merged        independent draws from the rows of one or several drafters; equal ones share a
                  node, and `Tree.draws` lists all

Shape letters: B prompts, N nodes, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from outrider.models.decode.rules import lossy_rules, token_rules, token_rules_cpu
from outrider.models.decode.rules.block_rules import block, traversal
from outrider.models.decode.rules.multi_step import multi_step
from outrider.models.decode.rules.sibling_rules import sibling_by_sibling
from outrider.models.decode.rules.token_rules import Accepted, Rows
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree

VerifyFn = Callable[[Tree, Tensor, Tensor | None, RandomSource], Accepted]
DRAFTS = ("best", "drawn", "independent", "coupled", "merged")
BEST, DRAWN, INDEPENDENT, COUPLED, MERGED = DRAFTS
SAMPLED_DRAFTS = (DRAWN, INDEPENDENT)  # they come with the row that each node's children are from
WITH_ROWS = (*SAMPLED_DRAFTS, MERGED)  # they come with the rows they were drawn from
PROPERTIES = {
    BEST: "whose tokens were not drawn from any row (R1)",
    DRAWN: "whose siblings are not independent draws (R3)",
    INDEPENDENT: "whose siblings may repeat a token (R3)",
    COUPLED: "which come without the rows they were drawn from (R1)",
    MERGED: "whose nodes stand for draws from several rows (R1)",
}


class Rule(NamedTuple):
    """A verification rule.

    Attributes:
        verify: (tree, p_rows, q_rows, rng, **parameters) -> Accepted; without q_rows if some of its
            drafts have none.
        drafts: the kinds of drafts it can verify; a lossless rule is exact for each.
        chains_only: it refuses trees that branch.
        replacement: `verify` has the parameter `replacement`: siblings are independent draws.
        lossy: its output does not have the target's distribution.
        parameters: parameters and their defaults; None: a value is required.
        check: raises ValueError if a parameter is out of range.
        cpu_rule: the same distribution from fewer operations on a CPU.
    """

    verify: Callable[..., Accepted]
    drafts: tuple[str, ...]
    chains_only: bool = False
    replacement: bool = False
    lossy: bool = False
    parameters: Mapping[str, float | None] = MappingProxyType({})
    check: Callable[..., None] | None = None
    cpu_rule: token_rules_cpu.CpuRule | None = None


@dataclass(frozen=True)
class BoundRule:
    """A rule for one kind of draft, called with tree, p rows, q rows (None for "best" and
    "coupled" drafts) and a random source; see Rule.
    """

    name: str
    draft: str
    verify: Callable[..., Accepted]
    reads_q: bool
    chains_only: bool
    lossy: bool
    cpu_rule: token_rules_cpu.CpuRule | None

    @property
    def coupled(self) -> bool:
        """Whether the engine decides by shared noise in place of random numbers."""
        return self.name == COUPLED

    def __call__(
        self,
        tree: Tree,
        p_rows: Rows,
        q_rows: Float[Tensor, "B rows V"] | None,
        rng: RandomSource,
    ) -> Accepted:
        if not self.reads_q:
            return self.verify(tree, p_rows, rng)
        if q_rows is None:
            raise ValueError(token_rules.NO_ROWS)
        return self.verify(tree, p_rows, q_rows, rng)


def check_draft(draft: str) -> str:
    """Return the kind of draft; raise ValueError if there is no such kind."""
    if draft not in DRAFTS:
        raise ValueError(f"there is no draft {draft!r}: one of {', '.join(DRAFTS)}")
    return draft


def bind_rule(name: str, draft: str, **parameters: float) -> BoundRule:
    """Return a rule for a kind of draft.

    Raises:
        ValueError: there is no such rule, draft or parameter; a parameter is missing or out of
            range; or the rule is biased for such drafts.
    """
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}: one of {', '.join(RULES)}")
    rule = RULES[name]
    if check_draft(draft) not in rule.drafts:
        raise ValueError(
            f"rule {name!r} does not fit {draft!r} drafts, {PROPERTIES[draft]}: "
            f"use one of {', '.join(lossless_rules(draft))}"
        )
    values = {**rule.parameters, **parameters}
    missing = [key for key, value in values.items() if value is None]
    if values.keys() != rule.parameters.keys() or missing:
        raise ValueError(
            f"rule {name!r} has the parameters {list(rule.parameters)}, "
            f"was given {list(parameters)}" + (f" and needs {missing}" if missing else "")
        )
    if rule.check is not None:
        rule.check(**values)
    if rule.replacement:
        values["replacement"] = draft == INDEPENDENT
    reads_q = set(rule.drafts) <= set(WITH_ROWS)
    function = partial(rule.verify, **values)
    return BoundRule(name, draft, function, reads_q, rule.chains_only, rule.lossy, rule.cpu_rule)


def lossless_rules(draft: str) -> list[str]:
    """Return the names of the lossless rules for a kind of draft."""
    return [name for name, rule in RULES.items() if draft in rule.drafts and not rule.lossy]


def default_rule(draft: str, chain: bool) -> str:
    """Return the name of the default lossless rule.

    Args:
        chain: no node has a sibling. Then `block` would accept at least as much as `ratio`, but
            training measures what `ratio` accepts (alpha, and the predicted tau).
    """
    return {
        BEST: "match",
        DRAWN: "ratio" if chain else "without_replacement",
        INDEPENDENT: "ratio" if chain else "independent",
        COUPLED: "coupled",
        MERGED: "multi_step",
    }[draft]


RULES: dict[str, Rule] = {
    "match": Rule(token_rules.match, (BEST, COUPLED), cpu_rule=token_rules_cpu.match),
    "ratio": Rule(
        token_rules.ratio, SAMPLED_DRAFTS, chains_only=True, cpu_rule=token_rules_cpu.ratio
    ),
    "independent": Rule(sibling_by_sibling, (INDEPENDENT,), replacement=True),
    "without_replacement": Rule(sibling_by_sibling, (DRAWN,), replacement=True),
    "multi_step": Rule(multi_step, (MERGED,)),
    "block": Rule(block, SAMPLED_DRAFTS, chains_only=True),
    "traversal": Rule(traversal, SAMPLED_DRAFTS, replacement=True),
    "sampled": Rule(token_rules.match, DRAFTS, cpu_rule=token_rules_cpu.match),
    "coupled": Rule(token_rules.match, DRAFTS),  # the engine uses noise instead (verifier.py)
    "lossy_typical": Rule(
        lossy_rules.typical,
        DRAFTS,
        lossy=True,
        parameters={"epsilon": 0.09, "delta": 0.3},
        check=lossy_rules.check_typical,
    ),
    "lossy_lenience": Rule(
        lossy_rules.lenience,
        SAMPLED_DRAFTS,
        chains_only=True,
        lossy=True,
        parameters={"factor": None},
        check=lossy_rules.check_lenience,
    ),
}
