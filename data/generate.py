"""Self-generation: the target generates its own training data (`data=self`, `outrider prepare`).

The built-in engine decodes without a drafter, many prompts at a time. Each answer has its own
random numbers, derived from (seed, prompt), so the text does not depend on which prompts share a
batch (up to the rounding of the target's precision).
"""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from outrider.conf.errors import DiskFull
from outrider.conf.schema import GenerateConfig
from outrider.data.generated_store import GeneratedAnswer, GeneratedStore
from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Request, Stops
from outrider.models.decode.sampling_params import Sampling
from outrider.models.target.target import Target

SHARD = 64  # prompts per shard
SORT_BLOCK = 512  # prompts that are sorted by length together


@dataclass(frozen=True)
class PromptTokens:
    """A prompt in tokens."""

    index: int  # among all prompts
    key: str  # names its text; the random numbers of the answer depend on it
    ids: list[int]

    def with_answer(self, ids: list[int]) -> GeneratedAnswer:
        return GeneratedAnswer(self.index, self.key, self.ids + ids, len(self.ids))


# called with a prompt and its answer (None where the backend has none); False stops the generation
OnAnswer: TypeAlias = Callable[[PromptTokens, GeneratedAnswer | None], bool]


@runtime_checkable
class AnswerBackend(Protocol):
    """Interface of answer generation: the target in this process, or a server."""

    answer_tokens: int  # generated so far

    def run(self, prompts: Sequence[PromptTokens], on_answer: OnAnswer) -> None:
        """Answer all prompts; call `on_answer` as each answer ends."""


class SelfGenerator:
    """Answer generation by the target in this process (an `AnswerBackend`)."""

    def __init__(
        self, target: Target, stop_ids: Sequence[int], options: GenerateConfig, seed: int = 0
    ) -> None:
        sampling = Sampling(options.temperature, top_p=options.top_p)
        self.engine = Engine(
            target, None, None, sampling=sampling, stops=Stops(stop_ids), timed=False
        )
        self.options, self.seed = options, seed
        self.prompt_tokens = self.answer_tokens = 0

    def run(self, prompts: Sequence[PromptTokens], on_answer: OnAnswer) -> None:
        """Answer all prompts, started in the order of the list."""
        events = self.engine.run([self._request(p) for p in prompts], self.options.batch)
        for event in events:
            self.answer_tokens += len(event.tokens)
            if event.out.stop_reason:
                prompt = prompts[event.number]
                self.prompt_tokens += len(prompt.ids)
                if not on_answer(prompt, prompt.with_answer(event.out.ids)):
                    return

    def _request(self, prompt: PromptTokens) -> Request:
        digest = hashlib.sha256(f"{self.seed} {prompt.key}".encode()).digest()
        free = self.engine.target.shape().max_positions - len(prompt.ids)
        budget = min(self.options.max_new_tokens, free)
        return Request(prompt.ids, budget, int.from_bytes(digest[:8], "big") >> 1)


def sort_by_length(prompts: Sequence[PromptTokens]) -> list[PromptTokens]:
    """Sort prompts by length within blocks: prompts of equal length share one prefill."""
    blocks = [prompts[i : i + SORT_BLOCK] for i in range(0, len(prompts), SORT_BLOCK)]
    return [p for block in blocks for p in sorted(block, key=lambda p: len(p.ids))]


def generate_missing(
    backend: AnswerBackend,
    prompts: Sequence[PromptTokens],
    store: GeneratedStore,
    *,
    minutes: float | None = None,
    tick: Callable[[int, int, float], object] = lambda done, tokens, rate: None,
) -> None:
    """Generate the answers that the store does not hold yet.

    `SHARD` consecutive prompts (sorted by length) make a shard, which is written when the last of
    their answers ends. The content of a shard therefore depends only on the prompts; a call that
    continues after a kill writes the shards that the killed call would have written. Any other end,
    an error or Ctrl-C included, writes the finished answers of incomplete shards too.

    Generation stops when the store holds `minutes` of it, including those of earlier calls. `tick`
    is called after each answer with (answers, answer tokens, answer tokens per second).
    """
    before, started, count = store.seconds, time.monotonic(), 0
    if minutes is not None and before >= 60 * minutes:
        return
    answered, ordered = {answer.index for answer in store.answers()}, sort_by_length(prompts)
    shard_of = {p.index: i // SHARD for i, p in enumerate(ordered) if p.index not in answered}
    missing = Counter(shard_of.values())
    pending: dict[int, list[GeneratedAnswer]] = defaultdict(list)

    def write_shard(shard: int) -> None:
        store.add(pending[shard], before + time.monotonic() - started - store.seconds)
        del pending[shard]

    def on_answer(prompt: PromptTokens, answer: GeneratedAnswer | None) -> bool:
        nonlocal count
        shard = shard_of[prompt.index]
        missing[shard] -= 1
        elapsed = time.monotonic() - started
        if answer is not None:
            pending[shard].append(answer)
            count += 1
            store.touch()
            tick(count, backend.answer_tokens, backend.answer_tokens / elapsed)
        if not missing[shard] and shard in pending:
            write_shard(shard)
        return minutes is None or before + elapsed < 60 * minutes

    try:
        backend.run([p for p in ordered if p.index in shard_of], on_answer)
    except DiskFull:
        pending.clear()  # a smaller file might fit, but it would not be a whole shard
        raise
    finally:
        for shard in list(pending):
            write_shard(shard)
