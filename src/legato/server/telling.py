"""From a call's requests to its response: whole, or piece by piece."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Response
from starlette.responses import JSONResponse

from legato.request import GenerationOutput, RequestSpec
from legato.server.beside import Deadline
from legato.server.errors import ApiError
from legato.server.protocol import GenerationRequest
from legato.server.service import Outputs, Service
from legato.server.streaming import EventStream, event

Event = dict[str, Any]


class Telling(Protocol):
    """How an endpoint tells the outputs of one call.

    Attributes:
        closing: what stands at the end of every stream.
    """

    closing: bytes

    async def add(self, index: int, output: GenerationOutput) -> None:
        """A final output of an answer that is told whole, with its request's index."""

    def whole(self) -> dict[str, Any]:
        """All that was added."""

    def begin(self) -> Iterable[Event]:
        """What a stream tells before the first output."""

    async def push(self, index: int, output: GenerationOutput) -> Iterable[Event]:
        """What is new in a partial or final output."""

    def end(self) -> Iterable[Event]:
        """What a stream tells after the last output."""

    def failed(self, error: ApiError) -> Iterable[Event]:
        """In place of the end: a stream's status is sent already."""


async def tell(
    service: Service, asked: GenerationRequest, specs: Sequence[RequestSpec], telling: Telling,
    headers: dict[str, str], deadline: Deadline,
) -> Response:  # fmt: skip
    """Run a call's requests and answer with what comes of them.

    Raises:
        ApiError: there will be no answer.
    """
    outputs = service.run(asked, specs, deadline)
    if asked.stream:
        # The first output tells whether there will be an answer at all, while the status can still say so.
        first = await anext(outputs, None)
        return EventStream(_events(telling, first, outputs), headers)
    async with aclosing(outputs):
        async for index, output in outputs:
            await telling.add(index, output)
    return JSONResponse(telling.whole(), headers=headers)


async def _events(
    telling: Telling, first: tuple[int, GenerationOutput] | None, outputs: Outputs
) -> AsyncGenerator[bytes, None]:
    current = first
    async with aclosing(outputs):
        try:
            for one in telling.begin():
                yield event(one)
            while current is not None:
                for one in await telling.push(*current):
                    yield event(one)
                current = await anext(outputs, None)
            for one in telling.end():
                yield event(one)
        except Exception as error:  # noqa: BLE001 - it must be told here, whatever it is
            for one in telling.failed(error if isinstance(error, ApiError) else ApiError.of(error)):
                yield event(one)
    if telling.closing:
        yield telling.closing
