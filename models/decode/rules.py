"""The table of verification rules: which rule fits which kind of draft.

A draft is of one of four kinds, and each has its own rules:

    best          the drafter's top-k tokens, chosen deterministically (no q rows)
    drawn         siblings drawn without replacement; in a chain, one draw per depth
    independent   siblings drawn independently from one row, so that they may repeat
    coupled       top-k of the drafter's rows with the noise that chooses the target's tokens

Shape letters: B prompts, N nodes, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from outrider.models.decode import block_rules, lossy_rules, sibling_rules, verify, verify_cpu
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree import Tree
from outrider.models.decode.verify import Accepted

VerifyFn = Callable[[Tree, Tensor, Tensor | None, RandomSource], Accepted]
BEST, DRAWN, INDEPENDENT, COUPLED = DRAFTS = ("best", "drawn", "independent", "coupled")
SAMPLED_DRAFTS = (DRAWN, INDEPENDENT)  # they come with the rows they were drawn from


class Rule(NamedTuple):
    """A verification rule.

    Attributes:
        build: (draft, **parameters) -> VerifyFn.
        drafts: the kinds of drafts it is exact for.
        chains_only: it refuses trees that branch.
        lossy: its output does not have the target's distribution.
        parameters: parameters and their defaults; None: a value is required.
        cpu_rule: the same distribution from fewer operations on a CPU.
    """

    build: Callable[..., VerifyFn]
    drafts: tuple[str, ...]
    chains_only: bool = False
    lossy: bool = False
    parameters: Mapping[str, float | None] = MappingProxyType({})
    cpu_rule: verify_cpu.CpuRule | None = None


@dataclass(frozen=True)
class BoundRule:
    """A rule for one kind of draft, called with tree, p rows, q rows (None for "best" and
    "coupled" drafts) and a random source; see Rule.
    """

    name: str
    draft: str
    verify: VerifyFn
    chains_only: bool
    lossy: bool
    cpu_rule: verify_cpu.CpuRule | None

    @property
    def coupled(self) -> bool:
        """Whether the engine decides by shared noise in place of random numbers."""
        return self.name == COUPLED

    def __call__(
        self,
        tree: Tree,
        p_rows: Float[Tensor, "B N V"],
        q_rows: Float[Tensor, "B N V"] | None,
        rng: RandomSource,
    ) -> Accepted:
        return self.verify(tree, p_rows, q_rows, rng)


def check_draft(draft: str) -> str:
    """Return the kind of draft.

    Raises:
        ValueError: there is no such kind.
    """
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
    verify_fn = rule.build(draft, **values)
    return BoundRule(name, draft, verify_fn, rule.chains_only, rule.lossy, rule.cpu_rule)


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
    }[draft]


PROPERTIES = {
    BEST: "whose tokens were not drawn from any row (R1)",
    DRAWN: "whose siblings are not independent draws (R3)",
    INDEPENDENT: "whose siblings may repeat a token (R3)",
    COUPLED: "which come without the rows they were drawn from (R1)",
}


def _match(_draft: str) -> VerifyFn:
    return lambda tree, p, q, rng: verify.match(tree, p, rng)


def _with_rows(rule: Callable[..., Accepted]) -> Callable[..., VerifyFn]:
    """Return a builder for a rule that reads q rows."""
    return lambda _draft, **parameters: _requiring_rows(partial(rule, **parameters))


def _requiring_rows(rule: Callable[..., Accepted]) -> VerifyFn:
    def verified(
        tree: Tree,
        p_rows: Float[Tensor, "B N V"],
        q_rows: Float[Tensor, "B N V"] | None,
        rng: RandomSource,
    ) -> Accepted:
        if q_rows is None:
            raise ValueError(verify.NO_ROWS)
        return rule(tree, p_rows, q_rows, rng)

    return verified


def _traversal(draft: str) -> VerifyFn:
    return _requiring_rows(partial(block_rules.traversal, replacement=draft == INDEPENDENT))


def _typical(_draft: str, epsilon: float, delta: float) -> VerifyFn:
    lossy_rules.check_typical(epsilon, delta)
    return lambda tree, p, q, rng: lossy_rules.typical(tree, p, rng, epsilon, delta)


def _lenience(_draft: str, factor: float) -> VerifyFn:
    lossy_rules.check_lenience(factor)
    return _requiring_rows(partial(lossy_rules.lenience, factor=factor))


RULES: dict[str, Rule] = {
    "match": Rule(_match, (BEST, COUPLED), cpu_rule=verify_cpu.match),
    "ratio": Rule(
        _with_rows(verify.ratio), SAMPLED_DRAFTS, chains_only=True, cpu_rule=verify_cpu.ratio
    ),
    "independent": Rule(_with_rows(sibling_rules.independent), (INDEPENDENT,)),
    "without_replacement": Rule(_with_rows(sibling_rules.without_replacement), (DRAWN,)),
    "block": Rule(_with_rows(block_rules.block), SAMPLED_DRAFTS, chains_only=True),
    "traversal": Rule(_traversal, SAMPLED_DRAFTS),
    "sampled": Rule(_match, DRAFTS, cpu_rule=verify_cpu.match),
    "coupled": Rule(_match, DRAFTS),  # by random numbers; the engine uses noise (verifier.py)
    "lossy_typical": Rule(_typical, DRAFTS, lossy=True, parameters={"epsilon": 0.09, "delta": 0.3}),
    "lossy_lenience": Rule(
        _lenience, SAMPLED_DRAFTS, chains_only=True, lossy=True, parameters={"factor": None}
    ),
}
