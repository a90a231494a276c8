"""Errors of the API, in the shape of OpenAI's: {"error": {message, type, param, code}}."""

from typing import Any

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.shown_text import for_terminal

TYPES = {  # OpenAI's names; other statuses are server_error
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error", 408: "invalid_request_error", 413: "invalid_request_error",
    415: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error",
}  # fmt: skip
SHOWN = 1000  # characters of a message


class ApiError(Exception):
    """An answer that is an error: status, message, and the parameter and code that OpenAI has."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @classmethod
    def of(cls, error: "ApiError | ConfigError | RunError") -> "ApiError":
        """Return the answer to an error of a request's settings or prompt."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ConfigError):
            fix = "" if error.fix.startswith("--help") else f" {error.fix}"
            key = error.key.removeprefix("decode.")[:100]
            return cls(400, f"{key}: {error.why}{fix}", key or None)
        code = "context_length_exceeded" if "positions" in error.message else None
        return cls(400, f"{error.message} {error.fix}", code=code)

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response, without control characters or credentials."""
        message = for_terminal(self.message)
        message = message if len(message) <= SHOWN else f"{message[:SHOWN]}..."
        kind = TYPES.get(self.status, "server_error")
        fields = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}
