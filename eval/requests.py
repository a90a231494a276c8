"""What a script may ask of a `Decoder`: prompts and settings, refused before any decoding."""

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.data.conversations import Message
from outrider.data.tokenise import prompt_ids
from outrider.models.decode.policy import Policy
from outrider.models.decode.rules import RULES, Fitted, Judge
from outrider.models.decode.sampling_params import Sampling

Row = Int[Tensor, "*one S"] | Int[np.ndarray, "*one S"]  # one is 1, or not there
Prompt = str | Sequence[SupportsIndex] | Row | Sequence[Message] | Sequence[str]
KINDS = (
    "Give text; token ids, in a list or a row of an array; or messages: [{'role': 'user', ...}]."
)
NO_ROWS = (Mapping, Set, bytes, bytearray)  # iterable, and yet no row of tokens


def ids_of(tokenizer: Any, prompt: Prompt) -> list[int]:
    """A prompt as tokens.

    Args:
        prompt: text, tokenised as it is; token ids, also as an array of one row; messages, or plain
            strings of user and assistant in turn, for the chat template.

    Raises:
        RunError: it is none of these.
    """
    if isinstance(prompt, str):
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    parts = _parts(prompt)
    found = [_token(part) for part in parts]
    ids = [token for token in found if token is not None]
    if len(ids) == len(parts):
        return ids
    if all(isinstance(part, str) for part in parts) or all(map(_is_message, parts)):
        return prompt_ids(tokenizer, parts)
    wrong = next(part for part, token in zip(parts, found, strict=True) if token is None)
    raise RunError(f"{wrong!r:.80} is no part of a prompt that holds {len(parts)}.", KINDS)


def _parts(prompt: Any) -> list[Any]:
    if hasattr(prompt, "tolist"):  # an array
        prompt = prompt.tolist()
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            (prompt,) = prompt
    if isinstance(prompt, NO_ROWS) or not isinstance(prompt, Iterable):
        raise RunError(f"{prompt!r:.80} is no prompt.", KINDS)
    return list(prompt)


def _token(part: Any) -> int | None:
    try:
        return operator.index(part)
    except TypeError:
        return None


def _is_message(part: Any) -> bool:
    return isinstance(part, Mapping) and {"role", "content"} <= part.keys()


def budget_of(max_new_tokens: Any) -> int:
    """
    Raises:
        ValueError, TypeError: it is no count.
    """
    budget = _whole("max_new_tokens", max_new_tokens)
    if budget < 0:
        raise ValueError(f"max_new_tokens={budget}: must be 0 or more")
    return budget


@dataclass(frozen=True)
class Setting:
    """How one call decodes.

    Raises:
        TypeError: a value that is not of its kind.
        ValueError: there is no such rule.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    seed: int = 0
    policy: str | Policy | None = None
    rule: str | Judge | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, str) or not hasattr(value, "__float__"):
                raise TypeError(f"{name}={value!r}: must be a number")
        # numpy's whole numbers are welcome, and Python's `random` takes none of them
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if isinstance(self.banned, str) or not isinstance(self.banned, Iterable):
            raise TypeError(f"banned={self.banned!r}: must be a list of tokens")
        for token in self.banned:
            _whole("banned", token)
        if not isinstance(self.stop, Iterable) or not all(isinstance(s, str) for s in self.stop):
            raise TypeError(f"stop={self.stop!r}: must be a string, or a list of strings")
        check_policy(self.policy)
        if isinstance(self.rule, str) and self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r}: there is none, but {', '.join(RULES)}")
        if not (self.rule is None or isinstance(self.rule, str) or callable(self.rule)):
            raise TypeError(f"rule={self.rule!r}: must be a rule's name, or one of rules.judge")

    @property
    def lossy(self) -> bool | None:
        """Whether the rule changes what the target says; None: nobody knows, it is your own."""
        if self.temperature == 0 or self.rule is None:
            return False
        if isinstance(self.rule, str):
            return RULES[self.rule].lossy
        return self.rule.lossy if isinstance(self.rule, Fitted) else None

    @property
    def strings(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            float(self.temperature),
            float(self.top_p),
            self.top_k,
            float(self.min_p),
            float(self.repetition_penalty),
            tuple(map(operator.index, self.banned)),
        )


def known(how: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, as `Setting` takes them.

    Raises:
        TypeError: a name that is none; the message has the known ones.
    """
    names = [field.name for field in fields(Setting)]
    for name in how:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise TypeError(f"there is no setting {name!r}: {meant}known are {', '.join(names)}")
    return dict(how)


def check_policy(policy: Any) -> None:
    """
    Raises:
        TypeError: neither a name nor a policy (a class is none yet).
    """
    made = isinstance(policy, Policy) and not isinstance(policy, type)
    if not (policy is None or isinstance(policy, str) or made):
        raise TypeError(f"policy={policy!r}: must be a name, or a policy such as Chain(3)")


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be a whole number") from None
