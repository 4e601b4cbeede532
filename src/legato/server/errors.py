"""Errors in OpenAI's shape."""

import re
from collections.abc import Mapping
from typing import Any

from legato.errors import EngineError, InvalidValueError, ManagerStateError, QueueFullError
from legato.sampling_params import SamplingParams

RETRY_AFTER_SECONDS = 1
_FIELDS = frozenset(SamplingParams.__dataclass_fields__) | {
    "messages", "prompt", "input", "cache_salt", "priority", "tools", "response_format", "chat_template_kwargs",
    "top_logprobs",
}  # fmt: skip
_RENAMED = {"input_ids": "prompt", "min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens",
            "template": "chat_template_kwargs"}  # fmt: skip


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: of HTTP.
        message: what is wrong, and what would do.
        param: the field at fault.
        kind: OpenAI's type of error.
        code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.kind, self.code = status, param, kind, code

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_SECONDS)}
        if self.code == "timeout":  # OpenAI's clients would ask twice more
            return {"X-Should-Retry": "false"}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def as_dict(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """Of what the manager raises."""
        if isinstance(error, QueueFullError):
            return cls(429, str(error), kind="rate_limit_error", code="queue_full")
        if isinstance(error, ManagerStateError):
            return shutting_down()
        if isinstance(error, EngineError):
            return cls(500, "the engine has failed", kind="server_error", code="engine_failed")
        if isinstance(error, InvalidValueError):
            return cls.invalid(str(error))
        return cls(500, "internal error", kind="server_error")

    @classmethod
    def invalid(cls, message: str, renamed: Mapping[str, str] | None = None) -> "ApiError":
        """A value that cannot be served; messages begin with the field's name.

        Args:
            renamed: what fields are called in the call, where that is not their own name.
        """
        names = {**_RENAMED, **(renamed or {})}
        first = re.split("[= ]", message, maxsplit=1)[0]
        param = names.get(first, first if first in _FIELDS else None)
        return cls(400, names.get(first, first) + message[len(first) :], param)


def shutting_down() -> ApiError:
    """For whoever comes, or still waits, when the server ends."""
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
