"""One prompt on its way: what is asked for, what has been said, and where it ends."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.batch_kv_cache import SlotCache
from outrider.models.decode.gumbel_coupling import Noise
from outrider.models.decode.round_outcome import News
from outrider.models.decode.round_times import Clock
from outrider.models.drafter import State

READ = 2048  # tokens of several prompts that are read at once
MARKS = 3  # newest places of a dialogue that are kept beside the first: each holds a drafter's rows
FIRST, ACCEPTED, CORRECTION, BONUS = "first", "accepted", "correction", "bonus"


class Request(NamedTuple):
    """One prompt to be answered.

    Attributes:
        prompt: at least one token.
        budget: exact number of new tokens; an answer is shorter only if it ends by itself.
        seed: of its random numbers; two requests with one seed draw the same ones.
    """

    prompt: Sequence[int]
    budget: int
    seed: int = 0


@dataclass
class Output:
    """One answer.

    Attributes:
        ids: new tokens, the end token included if it came.
        origins: for each, who proposed it: the prompt's forward ("first"), the drafter
            ("accepted"), the target in place of a rejected guess ("correction") or behind the
            last of an accepted path ("bonus").
        accepted: per round, how many drafted tokens were accepted and emitted.
        drafted: per round, how deep the draft went.
        rejected: per round, the guess that a correction stands in place of; None where there was
            none, and in trees, where several are rejected at once.
        gaps: per new token, the target's lead of the first over the second choice (logits,
            with penalties, and with noise where that decides);
            empty unless asked for.
        ended: why it is over: "budget", "end token" or "stop string"; "" while it is not.
    """

    ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    rejected: list[int | None] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    ended: str = ""

    @property
    def rounds(self) -> int:
        """Target forwards behind the prefill."""
        return len(self.accepted)

    @property
    def tau(self) -> float | None:
        """Tokens per target forward behind the prefill; None without a round."""
        return (len(self.ids) - 1) / len(self.accepted) if self.accepted else None


class Stops:
    """Where an answer ends by itself: behind an end token, or behind a stop string."""

    def __init__(
        self,
        ids: Sequence[int] = (),
        strings: Sequence[str] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """
        Args:
            decode: tokens to text; needed for strings.

        Raises:
            ValueError: strings without `decode`, or an empty one.
        """
        if strings and decode is None:
            raise ValueError("stop strings need a tokenizer, and none was given")
        if "" in strings:
            raise ValueError("an empty stop string would end every answer at once")
        self.ids, self.strings, self.decode = frozenset(ids), tuple(strings), decode

    def cut(self, said: list[int], emitted: list[int]) -> tuple[list[int], str]:
        """What of the emitted tokens still belongs to the answer, and why it ends ("": it goes on).

        The token that completes a stop string is the last one.
        """
        for i, token in enumerate(emitted, start=1):
            if token in self.ids:
                return emitted[:i], "end token"
            if self.strings and self._complete(said, emitted[:i]):
                return emitted[:i], "stop string"
        return emitted, ""

    def _complete(self, said: list[int], new: list[int]) -> bool:
        """Whether a stop string ends in the text of the last of these tokens."""
        assert self.decode is not None
        reach = max(map(len, self.strings)) + len(new)  # a token is at least a byte of text
        text = self.decode((said + new)[-4 * reach :])
        return any(string in text for string in self.strings)


@dataclass
class Live:
    """A prompt that is being decoded, in its slot.

    Attributes:
        number: of the request.
        state: what the drafter has absorbed.
        noise: what its tokens are chosen with; None where they are not.
        root: the newest token on the device, once rows were handed to a drafter.
    """

    number: int
    request: Request
    generator: Random
    noise: Noise | None = None
    state: State | None = None
    root: Tensor = field(init=False, repr=False, compare=False)
    out: Output = field(default_factory=Output)

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.request.budget - len(self.out.ids)

    def begin(self, token: int, stops: Stops) -> None:
        """The first token, by the prompt's own forward."""
        self.out.ended = stops.cut([], [token])[1]
        self.out.ids, self.out.origins = [token], [FIRST]
        self._end()

    def take(self, news: News, stops: Stops) -> int:
        """Add a round's tokens, up to the first end and the budget (rule R8).

        Returns:
            How many were taken.
        """
        out, guesses = self.out, len(news.tokens) - 1
        kept, out.ended = stops.cut(out.ids, news.tokens[: self.room])
        out.ids.extend(kept)
        origins = [ACCEPTED] * guesses + [BONUS if news.leaf else CORRECTION]
        out.origins.extend(origins[: len(kept)])
        # of a round that was cut, all that was emitted had been drafted or was the next token
        out.accepted.append(min(len(kept), guesses))
        out.drafted.append(news.deep)
        out.rejected.append(news.wrong if len(kept) > guesses else None)
        self._end()
        return len(kept)

    def _end(self) -> None:
        if self.room < 1 and not self.out.ended:
            self.out.ended = "budget"


@dataclass
class Memory:
    """What a dialogue leaves behind for its next turn: the target's cache, and marks to go on from.

    A drafter's state cannot be shortened, so the states at some places are kept: a later prompt
    that agrees with the text up to and with the token behind such a place goes on from there.

    Attributes:
        text: all tokens so far, the newest included, which no cache holds yet.
        marks: how many rows were absorbed, and the drafter's state then: behind every prompt.
        latest: the same behind the newest round.
    """

    cache: SlotCache | None = None
    text: list[int] = field(default_factory=list)
    marks: list[tuple[int, State | None]] = field(default_factory=list)
    latest: tuple[int, State | None] | None = None

    def known(self, prompt: Sequence[int]) -> tuple[int, State | None]:
        """Rows of the prompt that need not be read again, and the drafter's state behind them."""
        agree = 0
        while agree < min(len(prompt), len(self.text)) and prompt[agree] == self.text[agree]:
            agree += 1
        found = [*self.marks, *([self.latest] if self.latest else [])]
        self.marks = [mark for mark in found if mark[0] < min(agree, len(prompt))]
        self.latest = None
        rows, state = self.marks[-1] if self.marks else (0, None)
        self.text = self.text[: rows + 1]  # the rest of the cache is about to be written over
        return rows, state

    def begin(self, cache: SlotCache, text: list[int], state: State | None) -> None:
        """A prompt has been read and its first token said: a place to come back to."""
        self.cache, self.text = cache, text
        self.marks = [*self.marks[:1], *self.marks[1:][1 - MARKS :], (len(text) - 1, state)]

    def go_on(self, text: list[int], state: State | None) -> None:
        """A round is over; an answer that is broken off later is known this far."""
        self.text, self.latest = text, (len(text) - 1, state)


def check(request: Request, positions: int, vocab: int) -> None:
    """Refuse what a target of so many positions and tokens cannot decode.

    Raises:
        RunError: the prompt is empty, longer than the target's context allows, or holds what is
            none of its tokens; the seed is negative.
    """
    if not request.prompt:
        raise RunError("A prompt is empty.", "Give at least one token, a start token for instance.")
    least, most = min(request.prompt), max(request.prompt)
    if least < 0 or most >= vocab:
        wrong = least if least < 0 else most
        message = f"A prompt holds token {wrong}, and the target's are 0 to {vocab - 1}."
        raise RunError(message, "Was it tokenised for another model?")
    if len(request.prompt) + request.budget > positions:
        raise RunError(
            f"A prompt of {len(request.prompt)} tokens and {request.budget} new ones do not fit "
            f"the target's {positions} positions.",
            "Shorten the prompt, or ask for fewer tokens.",
        )
    if request.seed < 0:  # Python's generators would take it for its opposite
        raise RunError(f"seed={request.seed} is negative.", "Give 0 or more.")


def alike(waiting: deque[tuple[int, Request]], most: int) -> Iterator[tuple[int, Request]]:
    """The next request, and those right behind it whose prompts can be read in one forward."""
    length = len(waiting[0][1].prompt)
    for _ in range(min(most, max(1, READ // length))):
        if not waiting or len(waiting[0][1].prompt) != length:
            return
        yield waiting.popleft()
