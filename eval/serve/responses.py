"""Bodies of responses: whole answers, chunks of a stream, and the usage of both."""

import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.eval.decoder import Result
from outrider.eval.metrics import ratio

FINISH = {"end token": "stop", "stop string": "stop", "budget": "length", "": None}


class Kind(NamedTuple):
    """The names of an endpoint's objects."""

    id: str
    whole: str
    chunk: str
    prompt: str  # the field of the request


CHAT = Kind("chatcmpl", "chat.completion", "chat.completion.chunk", "messages")
TEXT = Kind("cmpl", "text_completion", "text_completion", "prompt")


class Responses:
    """The bodies of the response to one request."""

    def __init__(self, kind: Kind, model: str, with_usage: bool = False) -> None:
        self.kind, self.with_usage = kind, with_usage
        self.head = {
            "id": f"{kind.id}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of answers that have ended."""
        choices = [
            self._choice(i, result.text, FINISH[result.stop_reason], "message")
            for i, result in enumerate(results)
        ]
        return {**self.head, "object": self.kind.whole, "choices": choices, "usage": usage}

    def chunk(self, number: int, text: str, finish: str | None = None) -> dict[str, Any]:
        """Return a chunk with the next text of an answer."""
        return self._chunk([self._choice(number, text, finish, "delta")])

    def first_chunk(self, number: int) -> dict[str, Any]:
        """Return the first chunk of a chat's answer, which has its role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk, with `stream_options.include_usage`."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.with_usage else {}
        return {**self.head, "object": self.kind.chunk, "choices": choices, **usage}

    def _choice(self, number: int, text: str, finish: str | None, part: str) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.kind is CHAT:
            message: dict[str, Any] = {"content": text} if text or part == "message" else {}
            role = {"role": "assistant", "refusal": None} if part == "message" else {}
            content = {part: {**role, **message}}
        return {"index": number, **content, "logprobs": None, "finish_reason": finish}


def usage_of(prompt_tokens: int, results: Sequence[Result]) -> dict[str, Any]:
    """Return the usage of a request, with what speculation saved.

    Args:
        prompt_tokens: of all prompts; one that has several answers counts once.
    """
    new = sum(len(result.output_ids) for result in results)
    accepted = sum(sum(result.accepted) for result in results)
    rounds = sum(len(result.accepted) for result in results)
    after_prompts = sum(max(0, len(result.output_ids) - 1) for result in results)
    tau = ratio(after_prompts, rounds)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "completion_tokens_details": {"accepted_prediction_tokens": accepted},
        "accepted_tokens": accepted,
        "rounds": rounds,
        "tau": None if tau is None else round(tau, 4),
    }
