"""Prompts and generation settings of a `Decoder`, validated before decoding."""

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex, TypedDict

import numpy as np
from jaxtyping import Int
from torch import Tensor

from outrider.conf.compose import choices
from outrider.conf.errors import ConfigError, RunError
from outrider.data.conversations import Message
from outrider.data.tokenise import prompt_ids
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.from_config import AUTO_RULES
from outrider.models.decode.policy import Policy
from outrider.models.decode.rules.rule_table import COUPLED, RULES, BoundRule, VerifyFn, bind_rule
from outrider.models.decode.sampling_params import Sampling

PLAIN = "plain"
Row = Int[Tensor, "*one S"] | Int[np.ndarray, "*one S"]  # "one": an optional leading dimension of 1
Prompt = str | Sequence[SupportsIndex] | Row | Sequence[Message] | Sequence[str]
PROMPT_FORMS = (
    "Give text; token ids, in a list or a row of an array; or messages: [{'role': 'user', ...}]."
)
NOT_SEQUENCES = (Mapping, Set, bytes, bytearray)  # iterable, but not a row of tokens


def tokenise_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt; its forms are those of `Decoder.generate`.

    Raises:
        RunError: it is none of these.
    """
    if isinstance(prompt, str):
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    parts, ids = _parts(prompt), list[int]()
    texts = all(isinstance(part, str) for part in parts)
    if parts and (texts or all(map(_is_message, parts))):
        return prompt_ids(tokenizer, parts)
    for part in parts:
        try:
            ids.append(operator.index(part))
        except TypeError:
            why = f"{part!r:.80} is not a valid part of a prompt of {len(parts)}."
            raise RunError(why, PROMPT_FORMS) from None
    return ids


def _parts(prompt: Any) -> list[Any]:
    if hasattr(prompt, "tolist"):  # an array
        prompt = prompt.tolist()
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            (prompt,) = prompt
    if isinstance(prompt, NOT_SEQUENCES) or not isinstance(prompt, Iterable):
        raise RunError(f"{prompt!r:.80} is not a prompt.", PROMPT_FORMS)
    return list(prompt)


def _is_message(part: Any) -> bool:
    return isinstance(part, Mapping) and {"role", "content"} <= part.keys()


def check_budget(max_new_tokens: Any) -> int:
    """Return max_new_tokens as an int.

    Raises:
        ValueError, TypeError: it is not a count.
    """
    budget = _integer("max_new_tokens", max_new_tokens)
    if budget < 0:
        raise ValueError(f"max_new_tokens={budget}: must be 0 or more")
    return budget


class GenerationOptions(TypedDict, total=False):
    """Keywords of `Decoder.generate` and its like; their defaults are in `GenerationSettings`.

    Attributes:
        temperature: 0 is greedy, 1 the target's own distribution.
        top_p: nucleus sampling: probability mass kept.
        top_k: most likely tokens kept; 0: all.
        min_p: smallest probability kept, relative to the top-1's.
        banned: token ids that are never generated.
        stop: strings that end an answer.
        policy: a name of conf/decode/, a policy object, or "plain"; None: the decoder's.
        rule: above temperature 0: a name from the table in docs/decoding.md, or a result of
            `bind_rule`; None: the policy's lossless default.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    banned: Sequence[int]
    stop: str | Sequence[str]
    seed: int
    policy: str | Policy | None
    rule: str | VerifyFn | None


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of one call; see `GenerationOptions`.

    Raises:
        TypeError: a value of a wrong type.
        ValueError: an unknown rule.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    banned: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    seed: int = 0
    policy: str | Policy | None = None
    rule: str | VerifyFn | None = None

    @classmethod
    def of(cls, how: Mapping[str, Any]) -> "GenerationSettings":
        return cls(**check_names(how))

    def __post_init__(self) -> None:
        penalties = [name for name in Sampling._fields if name.endswith("penalty")]
        for name in ("temperature", "top_p", "min_p", *penalties):
            value = getattr(self, name)
            if isinstance(value, str) or not hasattr(value, "__float__"):
                raise TypeError(f"{name}={value!r}: must be a number")
            object.__setattr__(self, name, float(value))
        # convert numpy integers, which Python's `random` rejects
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        if isinstance(self.banned, str) or not isinstance(self.banned, Iterable):
            raise TypeError(f"banned={self.banned!r}: must be a list of tokens")
        object.__setattr__(self, "banned", tuple(_integer("banned", t) for t in self.banned))
        if not isinstance(self.stop, Iterable) or not all(isinstance(s, str) for s in self.stop):
            raise TypeError(f"stop={self.stop!r}: must be a string, or a list of strings")
        check_policy(self.policy)
        if isinstance(self.rule, str) and self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r}: unknown; use one of {', '.join(RULES)}")
        if not (self.rule is None or isinstance(self.rule, str) or callable(self.rule)):
            raise TypeError(f"rule={self.rule!r}: must be a rule's name, or a result of bind_rule")

    @property
    def lossy(self) -> bool | None:
        """Whether the rule changes the target's distribution; None: unknown (a custom rule)."""
        if self.temperature == 0 or self.rule is None:
            return False
        if isinstance(self.rule, str):
            return RULES[self.rule].lossy
        return self.rule.lossy if isinstance(self.rule, BoundRule) else None

    @property
    def coupled(self) -> bool:
        is_coupled = isinstance(self.rule, BoundRule) and self.rule.coupled
        return self.rule == COUPLED or is_coupled

    def bound_rule(self, policy: Policy | None) -> VerifyFn | None:
        """Return the rule for the drafts of a policy; None greedily and for the default."""
        if not isinstance(self.rule, str):
            return self.rule
        if isinstance(policy, Auto) and self.rule in AUTO_RULES:
            return policy.default_rule(self.rule)
        if self.sampling.greedy or (policy is None and not self.coupled):
            return None  # plain decoding differs by noise only
        return bind_rule(self.rule, COUPLED if policy is None else policy.draft)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> Sampling:
        return Sampling(*(getattr(self, name) for name in Sampling._fields))


def check_names(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `GenerationSettings`.

    Raises:
        TypeError: an unknown name.
    """
    names = [field.name for field in fields(GenerationSettings)]
    for name in how:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise TypeError(f"unknown setting {name!r}: {hint}valid are {', '.join(names)}")
    return dict(how)


def check_policy(policy: Any) -> None:
    """Check a policy's type and name; None is valid.

    Raises:
        TypeError: neither a name nor a policy object.
        ConfigError: an unknown name.
    """
    is_object = isinstance(policy, Policy) and not isinstance(policy, type)
    if not (policy is None or isinstance(policy, str) or is_object):
        raise TypeError(f"policy={policy!r}: must be a name, or a policy such as Chain(3)")
    names = (PLAIN, *choices("decode"))
    if isinstance(policy, str) and policy not in names:
        fix = f"Use one of: {', '.join(names)}."
        raise ConfigError("policy", policy, "There is no such policy.", fix)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be a whole number") from None
