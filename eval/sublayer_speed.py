"""Speed of draft tokens that skip sublayers of the target, against plain decoding.

Both decode the same prompts greedily, one right after the other and in turns first, so that a drift
of the machine affects both. Prompts have several lengths, since a skipped attention sublayer saves
more where the context is long. The prefill is not timed: it does not depend on the draft.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import Config
from outrider.conf.searched import SearchConfig, SearchedConfig, Skipped
from outrider.data.contamination import OverlapFilter
from outrider.data.conversations import Message, read_prompts
from outrider.data.self_generated import prompt_source
from outrider.data.suite import load_suite
from outrider.data.tokenise import prompt_ids
from outrider.eval.open_drafter import build_untrained
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Policy
from outrider.models.decode.request import Output, Stops
from outrider.models.target.load import LoadedTarget, stop_ids


class Timing(NamedTuple):
    """One prompt, decoded with a draft and without.

    Attributes:
        tokens, plain_tokens: new tokens after the first, which belongs to the prefill.
        seconds, plain_seconds: of the rounds.
        rounds, drafted, accepted: of the draft.
    """

    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float
    rounds: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, fast: Output, plain: Output) -> "Timing":
        return cls(
            len(fast.ids) - 1, fast.times.rounds, len(plain.ids) - 1, plain.times.rounds,
            fast.rounds, sum(fast.drafted), sum(fast.accepted),
        )  # fmt: skip


class Speed(NamedTuple):
    """Speed over several prompts.

    Attributes:
        speedup: seconds per token of plain decoding / of drafting and verifying.
        tokens_per_second: with the draft.
        tau: tokens per target forward.
        accepted: share of draft tokens that were accepted; 0 without any.
    """

    speedup: float
    tokens_per_second: float
    tau: float
    accepted: float

    @classmethod
    def of(cls, timings: Iterable[Timing]) -> "Speed":
        total = Timing(*map(sum, zip(*timings, strict=True)))
        plain = total.plain_seconds / total.plain_tokens
        return cls(
            plain * total.tokens / total.seconds, total.tokens / total.seconds,
            total.tokens / total.rounds, total.accepted / max(1, total.drafted),
        )  # fmt: skip


class SpeedMeasurement:
    """Decode prompts with any candidate; the answers are those of plain decoding."""

    def __init__(
        self, loaded: LoadedTarget, cfg: SearchedConfig, policy: Policy,
        prompts: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        """
        Args:
            policy: greedy draft tokens.

        Raises:
            RunError: the answers of all prompts are a single token.
        """
        self.target, self.cfg, self.policy, self.prompts = loaded.target, cfg, policy, prompts
        self.stops = Stops(stop_ids(loaded.tokenizer, loaded.target))
        self.plain = Engine(self.target, None, None, stops=self.stops, timed=False)
        answers = [self.plain.generate(prompt, cfg.search.tokens) for prompt in prompts]
        self.prompts = [p for p, out in zip(prompts, answers, strict=True) if out.rounds]
        if not self.prompts:
            message = "Every answer ends after its first token: there is nothing to measure."
            raise RunError(message, "Give other prompts: data.path.")

    def __call__(self, candidate: Skipped) -> Iterator[Timing]:
        """Yield the times of every prompt, in an order that is the same for all candidates."""
        drafter = build_untrained(self.cfg.skipping(candidate), self.target)
        fast = Engine(self.target, drafter, self.policy, stops=self.stops, timed=False)
        for i, prompt in enumerate(self.prompts):
            engines = [fast, self.plain] if i % 2 else [self.plain, fast]
            outs = {one: one.generate(prompt, self.cfg.search.tokens) for one in engines}
            yield Timing.of(outs[fast], outs[self.plain])


def search_prompts(config: Config, loaded: LoadedTarget, search: SearchConfig) -> list[list[int]]:
    """Return prompts, the context lengths in turn: `search.prompts` of each.

    A prompt is one message of as many questions of the training text as reach the length. Questions
    of the evaluation suite are left out.

    Raises:
        ConfigError: a prompt does not fit the target.
        RunError: the text has too few questions.
    """
    questions = _questions(config)
    lengths = search.contexts * search.prompts
    prompts = [_joined(questions, length, loaded) for length in lengths]
    longest = max(map(len, prompts)) + search.tokens
    positions = loaded.target.shape().max_positions
    if longest > positions:
        why = f"A prompt and its answer have {longest} tokens, the target {positions} positions."
        raise ConfigError("drafter.search.contexts", search.contexts, why, "Use shorter contexts.")
    return prompts


def _questions(config: Config) -> Iterator[str]:
    """Yield the first questions of the training text in random order."""
    prompts = read_prompts(prompt_source(config), config.data.max_samples)
    suite = OverlapFilter(load_suite(config, None), "drop")
    order = Random(config.run.seed).sample(range(len(prompts)), len(prompts))
    return (prompts[i].turns[0] for i in order if not suite.overlaps(prompts[i].turns[:1]))


def _joined(questions: Iterator[str], length: int, loaded: LoadedTarget) -> list[int]:
    """Return the tokens of a message of questions, at least `length` of them."""
    text, ids = "", list[int]()
    while len(ids) < length:
        question = next(questions, None)
        if question is None:
            message = f"The text has too few questions for prompts of {length} tokens."
            fix = "Use fewer or shorter ones (drafter.search.prompts, .contexts), or more text."
            raise RunError(message, f"{fix[:-1]} (data.path).")
        text = f"{text}\n\n{question}".strip()
        ids = prompt_ids(loaded.tokenizer, [Message(role="user", content=text)])
    return ids
