"""A request while it is decoded: its prompt, its answer so far, and where it ends."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from random import Random
from typing import NamedTuple

from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.recurrent_states import States
from outrider.models.cache.split_cache import SplitCache
from outrider.models.decode.acceptance import RequestAcceptance
from outrider.models.decode.adaptive_confidence import Threshold
from outrider.models.decode.ledger import Ledger
from outrider.models.decode.round_times import RoundTimes
from outrider.models.decode.rules.gumbel_coupling import GumbelNoise
from outrider.models.decode.rules.round_outcome import RoundOutcome
from outrider.models.drafting.drafter import Absorbed, Drafter, State

PREFILL_TOKENS = 2048  # tokens of several prompts that one forward reads
CHECKPOINTS = 3  # newest checkpoints of a dialogue and the first: each holds a drafter's rows
FIRST, ACCEPTED, CORRECTION, BONUS = "first", "accepted", "correction", "bonus"


class Request(NamedTuple):
    """A prompt to be answered.

    Attributes:
        prompt: at least one token.
        budget: maximum number of new tokens.
        seed: of its random numbers; two requests with one seed draw the same ones.
        stops: what ends the answer; None: the engine's.
    """

    prompt: Sequence[int]
    budget: int
    seed: int = 0
    stops: "Stops | None" = None


@dataclass
class Output:
    """An answer.

    Attributes:
        ids: new tokens, including the end token if there is one.
        origins: of each token: the prompt's forward ("first"), the drafter ("accepted"), the target
            in place of a rejected token ("correction") or after an accepted leaf ("bonus").
        accepted: per round, how many draft tokens were accepted and emitted.
        drafted: per round, the depth of the draft.
        steps: per round, the levels that the drafter has computed, submitted or not.
        room: per round, how many draft tokens the budget had room for.
        rejected: per round, the token that a correction replaces; None if there was none, and for
            trees, where several are rejected at once.
        gaps: per new token, the target's margin between the largest and the second largest score
            (logits with penalties, and with noise where it decides); empty unless requested.
        choices, gains: per round of decode=auto, what was drafted, and the expected tokens per
            second of the best draft over those of plain decoding.
        ledger: of decode=auto, which the requests of a batch share.
        stop_reason: why it ended: "budget", "end token" or "stop string"; "" while it continues.
    """

    ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    rejected: list[int | None] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    ledger: Ledger | None = None
    times: RoundTimes = field(default_factory=RoundTimes)
    stop_reason: str = ""

    @property
    def rounds(self) -> int:
        """Target forwards after the prefill."""
        return len(self.accepted)

    @property
    def tau(self) -> float | None:
        """Tokens per target forward after the prefill; None without a round."""
        return (len(self.ids) - 1) / len(self.accepted) if self.accepted else None


class Event(NamedTuple):
    """The progress of one request: its newest tokens, and its output so far."""

    number: int
    tokens: list[int]
    out: Output


class Stops:
    """What ends an answer before its budget: end tokens and stop strings."""

    def __init__(
        self,
        ids: Sequence[int] = (),
        strings: Sequence[str] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Raise ValueError for strings without `decode` (tokens to text), or an empty string."""
        if strings and decode is None:
            raise ValueError("stop strings need a tokenizer, and none was given")
        if "" in strings:
            raise ValueError("an empty stop string would end every answer at once")
        self.ids, self.strings, self.decode = frozenset(ids), tuple(strings), decode

    def cut(self, ids: list[int], new_ids: list[int]) -> tuple[list[int], str]:
        """Return the new tokens up to the end of the answer, and the reason of the end, or "".

        Args:
            ids: the answer before the new tokens.
        """
        for i, token in enumerate(new_ids, start=1):
            if token in self.ids:
                return new_ids[:i], "end token"
            if self.strings and self._completes_string(ids, new_ids[:i]):
                return new_ids[:i], "stop string"
        return new_ids, ""

    def _completes_string(self, ids: list[int], new_ids: list[int]) -> bool:
        assert self.decode is not None, "stop strings without a tokenizer"
        window = max(map(len, self.strings)) + len(new_ids)  # a token is at least a byte of text
        text = self.decode((ids + new_ids)[-4 * window :])
        return any(string in text for string in self.strings)


@dataclass
class ActiveRequest:
    """A request that is being decoded.

    Attributes:
        noise: where a verifier chooses tokens with noise.
        threshold: where a policy adapts its confidence.
        acceptance: by kind of draft, where a policy estimates it.
        absorbed: by the drafter, whose state is `state`.
        root: the newest token on the device; set when rows are absorbed.
    """

    number: int
    request: Request
    generator: Random
    noise: GumbelNoise | None = None
    threshold: Threshold | None = None
    acceptance: dict[str, RequestAcceptance] = field(default_factory=dict)
    absorbed: Absorbed = field(default_factory=Absorbed)
    root: Tensor = field(init=False, repr=False, compare=False)
    out: Output = field(default_factory=Output)

    @property
    def state(self) -> State | None:
        return self.absorbed.state

    @property
    def remaining(self) -> int:
        """Tokens left of the budget."""
        return self.request.budget - len(self.out.ids)

    @property
    def room(self) -> int:
        """The deepest useful draft token: the target adds one more."""
        return self.remaining - 1

    def add_first(self, token: int, stops: Stops) -> None:
        """Add the token of the prompt's own forward."""
        self.out.stop_reason = (self.request.stops or stops).cut([], [token])[1]
        self.out.ids, self.out.origins = [token], [FIRST]
        self._end_at_budget()

    def add_round(self, outcome: RoundOutcome, stops: Stops, steps: int) -> int:
        """Add a round's tokens up to the first end and the budget (rule R8); return how many.

        Args:
            steps: of the drafter.
        """
        out, accepted = self.out, len(outcome.tokens) - 1
        stops = self.request.stops or stops
        out.room.append(self.room)
        new_ids, out.stop_reason = stops.cut(out.ids, outcome.tokens[: self.remaining])
        out.ids.extend(new_ids)
        origins = [ACCEPTED] * accepted + [BONUS if outcome.ends_at_leaf else CORRECTION]
        out.origins.extend(origins[: len(new_ids)])
        out.accepted.append(min(len(new_ids), accepted))
        out.drafted.append(outcome.draft_depth)
        out.steps.append(steps)
        out.rejected.append(outcome.rejected if len(new_ids) > accepted else None)
        self._end_at_budget()
        return len(new_ids)

    def end_draft(self, drafter: Drafter | None, drafted: State) -> None:
        """Tell the drafter what it has drafted in a round, after the round has been added."""
        if drafter is not None and drafted is not self.state:
            state = drafter.end_draft(self.state, drafted, self.out.drafted[-1])
            self.absorbed = self.absorbed._replace(state=state)

    def _end_at_budget(self) -> None:
        if self.remaining < 1 and not self.out.stop_reason:
            self.out.stop_reason = "budget"


class Checkpoint(NamedTuple):
    """A place of a dialogue to continue from.

    Attributes:
        rows: how many were absorbed.
        state: the drafter's then.
        recurrent: of the target then; empty if its layers have none, or it has read nothing since.
    """

    rows: int
    state: State | None
    recurrent: States


@dataclass
class DialogueCache:
    """The target's cache between the turns of a dialogue, and checkpoints to continue from.

    States of a drafter and of recurrent layers cannot be shortened, so they are kept at some
    positions. A later prompt that starts with the text up to such a position and the token after it
    continues from there.

    Attributes:
        text: all tokens so far; the newest is not in the cache.
        checkpoints: after every prompt.
        latest: after the newest round.
    """

    cache: KVCache | SplitCache | None = None
    text: list[int] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    latest: Checkpoint | None = None

    def match_prefix(self, prompt: Sequence[int]) -> Absorbed:
        """Return what is cached of a prompt, and absorbed by the drafter."""
        equal = [*map(eq, prompt, self.text), False]
        common = equal.index(False)
        candidates = [*self.checkpoints, *([self.latest] if self.latest else [])]
        self.checkpoints = [one for one in candidates if one.rows < min(common, len(prompt))]
        self.latest = None
        rows, state, recurrent = self.checkpoints[-1] if self.checkpoints else (0, None, {})
        if recurrent and self.cache is not None:
            self.cache.restore(0, rows, recurrent)
        self.text = self.text[: rows + 1]  # the rest of the cache is about to be overwritten
        return Absorbed(rows, state)

    def add_prompt(self, cache: KVCache | SplitCache, text: list[int], absorbed: Absorbed) -> None:
        """Add a checkpoint after a prompt and its first token."""
        self.cache, self.text = cache, text
        newest = self.checkpoints[1:][1 - CHECKPOINTS :]
        checkpoint = Checkpoint(*_at_end(text, absorbed), cache.states.copy_of(0))
        self.checkpoints = [*self.checkpoints[:1], *newest, checkpoint]

    def add_round(self, text: list[int], absorbed: Absorbed) -> None:
        """Record a round, so that an interrupted answer is cached up to here."""
        self.text, self.latest = text, Checkpoint(*_at_end(text, absorbed), {})


def _at_end(text: Sequence[int], absorbed: Absorbed) -> Absorbed:
    """Return what is absorbed of a text without its newest token; without a drafter, its rows."""
    return Absorbed(len(text) - 1) if absorbed.state is None else absorbed


def check_request(request: Request, max_positions: int, vocab: int) -> None:
    """Raise RunError if a target of these sizes cannot decode a request."""
    if not request.prompt:
        raise RunError("A prompt is empty.", "Give at least one token, for example a start token.")
    least, most = min(request.prompt), max(request.prompt)
    if least < 0 or most >= vocab:
        token = least if least < 0 else most
        message = f"A prompt holds token {token}, and the target's are 0 to {vocab - 1}."
        raise RunError(message, "Was it tokenised for another model?")
    if len(request.prompt) + request.budget > max_positions:
        raise RunError(
            f"A prompt of {len(request.prompt)} tokens and {request.budget} new ones do not fit "
            f"the target's {max_positions} positions.",
            "Shorten the prompt, or request fewer tokens.",
        )
    if request.seed < 0:  # Python's generators take it for its absolute value
        raise RunError(f"seed={request.seed} is negative.", "Give 0 or more.")


def same_length_batch(
    waiting: deque[tuple[int, Request]], most: int
) -> Iterator[tuple[int, Request]]:
    """Yield the next request, and following ones of equal length that fit into one forward."""
    length = len(waiting[0][1].prompt)
    for _ in range(min(most, max(1, PREFILL_TOKENS // length))):
        if not waiting or len(waiting[0][1].prompt) != length:
            return
        yield waiting.popleft()
