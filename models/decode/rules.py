"""Which verification rule fits which draft: one table, and a refusal for what would be biased.

A draft is made in one of four ways, and each has rules of its own:

    best          the drafter's favourites, chosen without chance (no q rows)
    drawn         siblings drawn one after the other, none twice; in a chain, one draw per depth
    independent   siblings drawn independently from one row, repeats included
    coupled       the favourites of rows with the noise that the target's tokens are chosen with

Shape letters: B prompts, N nodes, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from outrider.models.decode import block_rules as blocks
from outrider.models.decode import lossy_rules as lossy
from outrider.models.decode import sibling_rules as siblings
from outrider.models.decode import verify
from outrider.models.decode import verify_cpu as cpu
from outrider.models.decode.sampling import Coins
from outrider.models.decode.tree import Tree
from outrider.models.decode.verify import Accepted

Judge = Callable[[Tree, Tensor, Tensor | None, Coins], Accepted]
WithRows = Callable[[Tree, Tensor, Tensor, Coins], Accepted]
BEST, DRAWN, INDEPENDENT, COUPLED = DRAFTS = ("best", "drawn", "independent", "coupled")
TOSSED = (DRAWN, INDEPENDENT)  # drafts that come with the rows they were drawn from


class Rule(NamedTuple):
    """A way to verify.

    Attributes:
        build: (draft, **knobs) -> judge.
        drafts: the ways of drafting it is right for.
        chains_only: whether it refuses trees that branch.
        lossy: whether what is emitted is not the target's law.
        knobs: settings, with their usual values; None: must be given.
        on_cpu: the same law for less on a CPU.
    """

    build: Callable[..., Judge]
    drafts: tuple[str, ...]
    chains_only: bool = False
    lossy: bool = False
    knobs: Mapping[str, float | None] = MappingProxyType({})
    on_cpu: cpu.OnCpu | None = None


@dataclass(frozen=True)
class Fitted:
    """A rule for one way of drafting, to be called with tree, p rows, q rows (None for "best"
    drafts) and coins.
    """

    name: str
    draft: str
    verify: Judge

    @property
    def lossy(self) -> bool:
        return RULES[self.name].lossy

    @property
    def chains_only(self) -> bool:
        return RULES[self.name].chains_only

    @property
    def coupled(self) -> bool:
        """Whether the engine lets noise decide (coupled.py), and no coins."""
        return self.name == COUPLED

    @property
    def on_cpu(self) -> cpu.OnCpu | None:
        return RULES[self.name].on_cpu

    def __call__(
        self,
        tree: Tree,
        p_rows: Float[Tensor, "B N V"],
        q_rows: Float[Tensor, "B N V"] | None,
        coins: Coins,
    ) -> Accepted:
        return self.verify(tree, p_rows, q_rows, coins)


def known(draft: str) -> str:
    """Itself.

    Raises:
        ValueError: there is no such way of drafting.
    """
    if draft not in DRAFTS:
        raise ValueError(f"there is no draft {draft!r}: one of {', '.join(DRAFTS)}")
    return draft


def judge(name: str, draft: str, **knobs: float) -> Fitted:
    """A rule for such drafts.

    Raises:
        ValueError: there is no such rule, draft or knob; a knob is missing or out of range; or
            the rule is biased for such drafts.
    """
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}: one of {', '.join(RULES)}")
    rule = RULES[name]
    if known(draft) not in rule.drafts:
        raise ValueError(
            f"rule {name!r} does not fit {draft!r} drafts, {WHY[draft]}: "
            f"use one of {', '.join(fitting(draft))}"
        )
    chosen = {**rule.knobs, **knobs}
    missing = [knob for knob, value in chosen.items() if value is None]
    if chosen.keys() != rule.knobs.keys() or missing:
        raise ValueError(
            f"rule {name!r} has the knobs {list(rule.knobs)}, was given {list(knobs)}"
            + (f" and needs {missing}" if missing else "")
        )
    return Fitted(name, draft, rule.build(draft, **chosen))


def fitting(draft: str) -> list[str]:
    """Names of the lossless rules for a draft."""
    return [name for name, rule in RULES.items() if draft in rule.drafts and not rule.lossy]


def default_rule(draft: str, chain: bool) -> str:
    """The usual lossless rule.

    Args:
        chain: nobody has a sibling. `block` would never keep less than `ratio`; but what `ratio`
            keeps is what training measures (alpha, and the tau it foresees).
    """
    return {
        BEST: "match",
        DRAWN: "ratio" if chain else "without_replacement",
        INDEPENDENT: "ratio" if chain else "independent",
        COUPLED: "coupled",
    }[draft]


WHY = {
    BEST: "whose tokens were not drawn from any row (R1)",
    DRAWN: "whose siblings are no independent draws (R3)",
    INDEPENDENT: "whose siblings may repeat a token (R3)",
    COUPLED: "which come without the rows they were drawn from (R1)",
}


def _reading(rule: WithRows) -> Callable[..., Judge]:
    """A builder for a rule without settings that reads q rows."""
    return lambda draft: _needing_rows(rule)


def _needing_rows(rule: WithRows) -> Judge:
    def verified(
        tree: Tree,
        p_rows: Float[Tensor, "B N V"],
        q_rows: Float[Tensor, "B N V"] | None,
        coins: Coins,
    ) -> Accepted:
        if q_rows is None:
            raise ValueError(verify.NO_ROWS)
        return rule(tree, p_rows, q_rows, coins)

    return verified


def _match(draft: str) -> Judge:
    return lambda tree, p, q, coins: verify.match(tree, p, coins)


def _traversal(draft: str) -> Judge:
    replacement = draft == INDEPENDENT
    return _needing_rows(lambda tree, p, q, coins: blocks.traversal(tree, p, q, coins, replacement))


def _typical(draft: str, epsilon: float, delta: float) -> Judge:
    lossy.check_typical(epsilon, delta)
    return lambda tree, p, q, coins: lossy.typical(tree, p, coins, epsilon, delta)


def _lenience(draft: str, factor: float) -> Judge:
    lossy.check_lenience(factor)
    return _needing_rows(lambda tree, p, q, coins: lossy.lenience(tree, p, q, coins, factor))


RULES: dict[str, Rule] = {
    "match": Rule(_match, (BEST, COUPLED), on_cpu=cpu.match),
    "ratio": Rule(_reading(verify.ratio), (DRAWN, INDEPENDENT), chains_only=True, on_cpu=cpu.ratio),
    "independent": Rule(_reading(siblings.independent), (INDEPENDENT,)),
    "without_replacement": Rule(_reading(siblings.without_replacement), (DRAWN,)),
    "block": Rule(_reading(blocks.block), (DRAWN, INDEPENDENT), chains_only=True),
    "traversal": Rule(_traversal, (DRAWN, INDEPENDENT)),
    "sampled": Rule(_match, DRAFTS, on_cpu=cpu.match),
    "coupled": Rule(_match, DRAFTS),  # with coins in place of noise: the same law
    "lossy_typical": Rule(_typical, DRAFTS, lossy=True, knobs={"epsilon": 0.09, "delta": 0.3}),
    "lossy_lenience": Rule(
        _lenience, (DRAWN, INDEPENDENT), chains_only=True, lossy=True, knobs={"factor": None}
    ),
}
