"""Bodies of requests: JSON from outside, validated and converted into settings of the decoder.

Fields have the names and meanings of OpenAI's API. `top_k`, `min_p`, `repetition_penalty` and
`banned` are further ones of Outrider's decoder. A field that the decoder does not support is
refused by its name unless its value changes nothing; an unknown field is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.conf.errors import ConfigError
from outrider.conf.fields import COUNT, COUNT0, PROBABILITY, TOKENS, from_dict, option
from outrider.data.conversations import Message
from outrider.data.tool_calls import HALF_PAIR
from outrider.eval.requests import Prompt
from outrider.eval.serve.errors import ApiError

MAX_STOPS = 16  # stop strings of a request
MAX_MESSAGES = 4096
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
IGNORED = (  # they do not concern the answer
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
NEUTRAL: dict[str, Sequence[Any]] = {  # fields that are not supported: values that change nothing
    "logprobs": (None, False), "top_logprobs": (None,), "logit_bias": (None, {}),
    "best_of": (None, 1), "echo": (None, False), "suffix": (None, ""), "tools": (None, []),
    "tool_choice": (None, "none", "auto"), "parallel_tool_calls": (None, True, False),
    "functions": (None, []), "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}), "modalities": (None, ["text"]), "audio": (None,),
    "prediction": (None,), "reasoning_effort": (None,), "verbosity": (None,),
    "web_search_options": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream."""

    include_usage: bool = option(False, "end with a chunk that has the usage")
    include_obfuscation: bool = option(False, "ignored")


@dataclass(frozen=True)
class Parameters:
    """The fields of a request other than its prompt; null takes the server's default."""

    model: str | None = option(None, "name of the model, as /v1/models lists it")
    max_tokens: int | None = option(None, "longest answer, in tokens", TOKENS)
    max_completion_tokens: int | None = option(None, "the same; chat only", TOKENS)
    temperature: float | None = option(None, "0: greedy", "[0, 2]")
    top_p: float | None = option(None, "probability mass kept", "(0, 1]")
    top_k: int | None = option(None, "most likely tokens kept; 0: all", COUNT0)
    min_p: float | None = option(None, "smallest probability kept", PROBABILITY)
    repetition_penalty: float | None = option(None, "above 1: lowers earlier tokens", "(0, 10]")
    presence_penalty: float | None = option(None, "lowers tokens of the answer", "[-2, 2]")
    frequency_penalty: float | None = option(None, "the same, per occurrence", "[-2, 2]")
    banned: tuple[int, ...] | None = option(None, "token ids never generated", COUNT0)
    stop: str | tuple[str, ...] | None = option(None, "texts that end the answer")
    seed: int | None = option(None, "null: another one every time", "[0, 9223372036854775807]")
    n: int | None = option(None, "answers; the k-th has the seed + k", COUNT)
    stream: bool | None = option(None, "send the answer piece by piece")
    stream_options: StreamOptions | None = option(None, "of a stream")

    def __post_init__(self) -> None:
        if isinstance(self.stop, tuple) and len(self.stop) > MAX_STOPS:
            why, fix = f"There are more than {MAX_STOPS} texts.", "Give fewer."
            raise ConfigError("stop", list(self.stop), why, fix)
        if "" in self.stop_strings:
            why, fix = "An empty text would end every answer at once.", "Leave it out."
            raise ConfigError("stop", "", why, fix)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a body; ApiError if it is not a JSON object."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        values = json.loads(body, parse_constant=refuse)
    except RecursionError:
        raise ApiError(400, "The body is not JSON: it is nested too deeply.") from None
    except ValueError as error:  # also of UnicodeDecodeError, and of numbers that are too long
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"The body is a JSON {type(values).__name__}, not an object.")
    return values


def parse_parameters(values: Mapping[str, Any], prompt: str) -> Parameters:
    """Convert the fields of a request, all but `prompt`.

    Raises:
        ConfigError, ApiError: a field is unknown, not supported, or has a wrong value.
    """
    if prompt not in values:
        raise ApiError(400, f"{prompt}: This field is required.", prompt, "missing_field")
    own = {}
    for name, value in values.items():
        if name in NEUTRAL:
            # 0 == False and 1 == True, but logprobs=0 asks for something
            if not any(type(value) is type(one) and value == one for one in NEUTRAL[name]):
                why = f"{name}: This server does not support it; leave it out."
                raise ApiError(400, why, name, "unsupported_parameter")
        elif name not in (prompt, *IGNORED):
            own[name] = value
    for name in ("model", "stop"):  # a number is a valid name in conf/, but not here
        given = own.get(name)
        if any(isinstance(one, int | float) for one in (given if type(given) is list else [given])):
            raise ApiError(400, f"{name}: This field expects text.", name)
    parameters: Parameters = from_dict(Parameters, own, "")
    return parameters


# ---- prompts ----


def read_prompts(value: Any) -> list[Prompt]:
    """Return the prompts of a completion: text, token ids, or a list of either.

    Raises:
        ApiError: it is none of these.
    """
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if isinstance(value, list) and value:
        if all(type(one) is int for one in value):
            return [value]
        if all(isinstance(one, str) for one in value):
            return [_text(one, "prompt") for one in value]
        if all(isinstance(one, list) and one and set(map(type, one)) == {int} for one in value):
            return value
    why = "prompt: Give text, token ids, or a list of texts or of lists of token ids."
    raise ApiError(400, why, "prompt")


def read_messages(value: Any) -> list[Message]:
    """Return the messages of a chat.

    Raises:
        ApiError: they are no messages, or have a role or content that is not text.
    """
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages: Give a list of at least one message.", "messages")
    if len(value) > MAX_MESSAGES:
        raise ApiError(400, f"messages: There are more than {MAX_MESSAGES}.", "messages")
    return [_message(one, f"messages[{i}]") for i, one in enumerate(value)]


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise ApiError(400, f"{place}: A message is an object with role and content.", place)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        why = f"{place}.role: Use one of: {', '.join(ROLES)}."
        raise ApiError(400, why, f"{place}.role")
    for name in value.keys() - {"role", "content", "name"}:
        if value[name]:  # the messages of OpenAI's client have more fields, which are null
            where = f"{place}.{re.sub(r'[^A-Za-z0-9_]', '_', name)[:40]}"
            raise ApiError(400, f"{where}: This server does not support it.", where)
    return Message(role=ROLES[role], content=_content(value.get("content"), f"{place}.content"))


def _content(value: Any, place: str) -> str:
    if isinstance(value, str):
        return _text(value, place)
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{place}: Give text, or a list of parts of type text.", place)
    texts = []
    for i, part in enumerate(value):
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            where = f"{place}[{i}]"
            raise ApiError(400, f"{where}: Only parts of type text are supported.", where)
        texts.append(_text(part["text"], place))
    return "".join(texts)


def _text(value: str, place: str) -> str:
    if HALF_PAIR.search(value):
        why = f"{place}: It holds half of a surrogate pair, which is not text."
        raise ApiError(400, why, place)
    return value
