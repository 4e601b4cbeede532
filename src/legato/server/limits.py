"""What stands before every request: keys, how large a body may be, and that nobody is left waiting at the end."""

import asyncio
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.errors import InvalidValueError
from legato.server.errors import ApiError, shutting_down

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})
OPEN_FOLDER = "/page/"  # of the page, which asks for the key
BODY_TOO_LARGE = "body_too_large"  # OpenAI has no word for it


@dataclass(frozen=True)
class Limits:
    """Of one call.

    Attributes:
        body_bytes: of its body.
        body_seconds: until all of that is here.
        prompts: in one call.
        choices: prompts times samples.
        characters: of a prompt: longer ones are not even tokenized, which takes seconds for a million; None: no limit.
        seconds: until its last token, unless it asks for less; None: for as long as it takes.
    """

    body_bytes: int = 4 << 20
    body_seconds: float = 60.0
    prompts: int = 256
    choices: int = 1024
    characters: int | None = None
    seconds: float | None = None

    def refuse_long(self, name: str, given: Any) -> None:
        """Refuse a text, or what holds texts, that cannot fit whatever its tokens are, before it is tokenized.

        Args:
            name: of the field.

        Raises:
            InvalidValueError: it has too many characters.
            RecursionError: it is nested too deeply.
        """
        found = 0 if self.characters is None else _num_characters(given)
        if self.characters is not None and found > self.characters:
            told = f"no more than {self.characters} can fit in the model's context"
            raise InvalidValueError(f"{name} has {found} characters: {told}")


class OpenCalls:
    """Calls that are being answered, from the first byte of their request to the last of their answer."""

    def __init__(self) -> None:
        self._silent: set[asyncio.Task[Any]] = set()  # of whose answers nothing has been sent
        self.has_ended = False
        self.number = 0

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a call while `app` answers it; after `end` it is answered here, unless its answer has begun."""
        task = asyncio.current_task()
        assert task is not None

        async def begun(message: Message) -> None:
            self._silent.discard(task)
            await send(message)

        self.number += 1
        self._silent.add(task)
        try:
            await app(scope, receive, begun)
        except asyncio.CancelledError:
            if not (self.has_ended and task in self._silent):
                raise
            task.uncancel()
            await refuse(shutting_down())(scope, receive, send)
        finally:
            self._silent.discard(task)
            self.number -= 1

    def end(self) -> None:
        """Give up, whatever they wait for, the calls whose answers have not begun: they are told so."""
        self.has_ended = True
        for task in self._silent:
            task.cancel()


class Gate:
    """Refuses who has no key and what is too large, before anything of it is read or parsed, and counts the others.

    Args:
        app: what is behind it.
        open_calls: where they are counted.
        api_keys: any of them will do; none: everybody may come in.
        limits: of a call.
    """

    def __init__(self, app: ASGIApp, open_calls: OpenCalls, api_keys: Sequence[str], limits: Limits) -> None:
        self._app = app
        self._open_calls = open_calls
        self._api_keys = [key.encode() for key in api_keys]
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refused = self._refusal(scope["path"], headers)
        if refused is not None:
            await refuse(refused)(scope, receive, send)
            return
        await self._open_calls.answer(self._app, scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """What it receives, as long as the body is neither too large nor too slow."""
        num_bytes, is_complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._limits.body_seconds

        async def bounded() -> Message:
            nonlocal num_bytes, is_complete
            try:
                async with asyncio.timeout_at(None if is_complete else deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body was not complete after {self._limits.body_seconds} seconds"
                raise HTTPException(408, late) from None  # the only kind that those who parse let pass
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self._limits.body_bytes:
                raise HTTPException(413, str(self._too_large()))
            return message

        return bounded

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._open_calls.has_ended:
            return shutting_down()
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        if not is_open and not self._is_known(headers.get(b"authorization", b"")):
            return ApiError(401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key")
        length = headers.get(b"content-length", b"")
        return self._too_large() if length.isdigit() and int(length) > self._limits.body_bytes else None

    def _is_known(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        # All are compared, each in constant time: how long it takes tells nothing.
        num_equal = sum(hmac.compare_digest(given, key) for key in self._api_keys)
        return not self._api_keys or (scheme.lower() == b"bearer" and num_equal > 0)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limits.body_bytes} bytes", code=BODY_TOO_LARGE)


def _num_characters(given: Any) -> int:
    """Of all texts in it."""
    if isinstance(given, str):
        return len(given)
    inner = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    return sum(map(_num_characters, inner))


def refuse(error: ApiError) -> JSONResponse:
    """The response that says so."""
    return JSONResponse(error.as_dict(), error.status, error.headers)
