"""Compare an exported drafter with the run's own: same tokens, same accepted draft tokens.

The same prompts are decoded greedily in float32, as a chain and as a tree, with the run's drafter
and with the one read from the exported folder. Every round must be equal. Then the files and the
reference outputs of the folder are checked as its `verify.py` does.
"""

import runpy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from outrider.conf.errors import RunError
from outrider.conf.schema import Config
from outrider.data.suite import load_suite
from outrider.data.tokenise import prompt_ids
from outrider.eval.publish.reference_outputs import compare_outputs
from outrider.models import formats
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Stops
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.load import LoadedTarget
from outrider.models.target.target import Target

WIDTH, NODES = 4, 12  # of the tree
FIX = "Nothing was published. This is a fault of Outrider; please report it with the run's config."


class DecodedAnswer(NamedTuple):
    """The tokens of an answer, and the accepted draft tokens of each round."""

    policy: str
    ids: list[int]
    accepted: list[int]

    @property
    def steps(self) -> list[int]:
        """Tokens of each forward: one of the prompt's own, then accepted ones and one more."""
        counts = [1, *(count + 1 for count in self.accepted)]
        return [*counts[:-1], len(self.ids) - sum(counts[:-1])]


@dataclass
class RoundTrip:
    """The answers of the run's own drafter, which an exported one must reproduce."""

    target: Target
    drafter: Drafter
    prompts: list[list[int]]
    new_tokens: int
    depth: int  # of both policies
    stops: Stops = field(default_factory=Stops)
    expected: list[DecodedAnswer] = field(init=False)  # for each policy and prompt
    seconds: float = field(init=False)  # that decoding them took

    def __post_init__(self) -> None:
        start = time.monotonic()
        self.expected = self.decode(self.drafter)
        self.seconds = time.monotonic() - start

    def decode(self, drafter: Drafter) -> list[DecodedAnswer]:
        """Return the answers to every prompt with both policies."""
        answers, tree = [], DynamicTree(self.depth, WIDTH, NODES)
        policies: dict[str, Policy] = {"chain": Chain(self.depth), "tree": tree}
        for name, policy in policies.items():
            engine = Engine(self.target, drafter, policy, stops=self.stops, timed=False)
            for prompt in self.prompts:
                out = engine.generate(prompt, self.new_tokens)
                answers.append(DecodedAnswer(name, list(out.ids), list(out.accepted)))
        return answers

    def longest_text(self) -> list[int]:
        """Return the longest of the prompts with its answer."""
        pairs = zip(self.prompts, self.expected, strict=False)
        return max(([*prompt, *answer.ids] for prompt, answer in pairs), key=len)

    def compare_with_export(self, folder: Path) -> str:
        """Return what was compared; a RunError names what differs."""
        try:
            drafter, _ = formats.load(folder, self.target)
        except RunError as error:
            raise RunError(f"The exported drafter cannot be read: {error.message}", FIX) from None
        require_equal(self.expected, self.decode(drafter))
        problems, checked = runpy.run_path(str(folder / "verify.py"))["check_files"](folder)
        if problems:
            raise RunError(f"verify.py finds differences: {'; '.join(problems)}.", FIX)
        try:
            checked.append(compare_outputs(folder, drafter, self.target))
        except RunError as error:
            raise RunError(error.message, FIX) from None
        rounds = sum(len(answer.accepted) for answer in self.expected)
        tokens = sum(len(answer.ids) for answer in self.expected)
        return f"{tokens} tokens in {rounds} rounds are equal; {'; '.join(checked)}"


def require_equal(expected: Sequence[DecodedAnswer], answers: Sequence[DecodedAnswer]) -> None:
    """Raise a RunError that names the first answer or round that differs."""
    for number, (ours, theirs) in enumerate(zip(expected, answers, strict=True)):
        for what, own, other in (
            ("tokens", ours.ids, theirs.ids),
            ("accepted draft tokens", ours.accepted, theirs.accepted),
        ):
            if own != other:
                message = (
                    f"The exported drafter differs from the run's: {what} of answer "
                    f"{number} ({ours.policy}) are {other}, expected {own}."
                )
                raise RunError(message, FIX)


def first_prompts(
    config: Config, loaded: LoadedTarget, count: int, new_tokens: int
) -> list[list[int]]:
    """Return the first turns of the run's suite that leave space for an answer."""
    limit = loaded.target.shape().max_positions - new_tokens
    prompts = [prompt_ids(loaded.tokenizer, p.first_messages()) for p in load_suite(config, count)]
    fitting = [ids for ids in prompts if 0 < len(ids) <= limit]
    if not fitting:
        message = "No prompt fits the target together with publish.new_tokens."
        raise RunError(message, "Use a smaller publish.new_tokens, or shorter eval.prompts.")
    return fitting
