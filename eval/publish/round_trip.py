"""A drafter that was exported and read again must draft as it did before, round for round.

The same prompts are decoded greedily in float32, as a chain and as a tree, with the run's own
drafter and with the one that the exported folder holds: the tokens and the number of accepted
guesses of every round must be equal. Then `verify.py`, the very file that is published, must agree.
"""

import runpy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from outrider.conf.errors import RunError
from outrider.data.suite import suite_of
from outrider.data.tokenise import prompt_ids
from outrider.models import formats
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Stops
from outrider.models.drafter import Drafter
from outrider.models.load import Loaded
from outrider.models.target import Target
from outrider.train.settings import Config

WIDTH, NODES = 4, 12  # of the tree
FIX = "Nothing was published. This is a fault of Outrider; please report it with the run's config."


class Rounds(NamedTuple):
    """Of one answer."""

    policy: str
    ids: list[int]
    accepted: list[int]


@dataclass
class Proof:
    """The run's own drafter at work, for others to be held against.

    Attributes:
        depth: of the drafts.
        wanted: of every policy and prompt.
    """

    target: Target
    drafter: Drafter
    prompts: list[list[int]]
    new_tokens: int
    depth: int
    stops: Stops = field(default_factory=Stops)
    wanted: list[Rounds] = field(init=False)

    def __post_init__(self) -> None:
        self.wanted = self.decoded(self.drafter)

    def decoded(self, drafter: Drafter) -> list[Rounds]:
        """Every prompt, by both policies."""
        found = []
        policies: dict[str, Policy] = {
            "chain": Chain(self.depth),
            "tree": DynamicTree(self.depth, WIDTH, NODES),
        }
        for name, policy in policies.items():
            engine = Engine(self.target, drafter, policy, stops=self.stops, timed=False)
            for prompt in self.prompts:
                out = engine.generate(prompt, self.new_tokens)
                found.append(Rounds(name, list(out.ids), list(out.accepted)))
        return found

    def text(self) -> list[int]:
        """The longest of the prompts with its answer."""
        answered = [[*p, *rounds.ids] for p, rounds in zip(self.prompts, self.wanted, strict=False)]
        return max(answered, key=len)

    def hold(self, folder: Path) -> str:
        """Hold the exported folder against the run; says what was compared.

        Raises:
            RunError: the two differ, or verify.py finds something.
        """
        try:
            drafter, _ = formats.load(folder, self.target)
        except RunError as error:
            message = f"What was exported cannot be read again: {error.message}"
            raise RunError(message, FIX) from None
        refuse_other(self.wanted, self.decoded(drafter))
        room = runpy.run_path(str(folder / "verify.py"))
        problems, said = room["check"](room["FAMILY"], folder)
        if problems:
            raise RunError(f"verify.py does not agree: {'; '.join(problems)}.", FIX)
        rounds = sum(len(one.accepted) for one in self.wanted)
        tokens = sum(len(one.ids) for one in self.wanted)
        return f"{tokens} tokens in {rounds} rounds as before; verify.py: {said}"


def refuse_other(wanted: Sequence[Rounds], found: Sequence[Rounds]) -> None:
    """
    Raises:
        RunError: some answer or round is another one; the first is named.
    """
    for number, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
        if ours == theirs:
            continue
        what = "tokens" if ours.ids != theirs.ids else "accepted guesses"
        pair = (ours.ids, theirs.ids) if what == "tokens" else (ours.accepted, theirs.accepted)
        message = (
            f"The exported drafter does not draft as the run's own: {what} of answer {number} "
            f"({ours.policy}) are {pair[1]}, and were {pair[0]}."
        )
        raise RunError(message, FIX)


def first_prompts(config: Config, loaded: Loaded, count: int, new_tokens: int) -> list[list[int]]:
    """Openings of the run's suite that leave room for an answer.

    Raises:
        RunError: there is none.
    """
    room = loaded.target.shape().max_positions - new_tokens
    found = [prompt_ids(loaded.tokenizer, p.opening()) for p in suite_of(config, count)]
    fitting = [ids for ids in found if 0 < len(ids) <= room]
    if not fitting:
        message = "No prompt fits the target together with publish.new_tokens."
        raise RunError(message, "Use a smaller publish.new_tokens, or shorter eval.prompts.")
    return fitting
