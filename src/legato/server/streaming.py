"""Answers that take their time: events as they come, and clients that go away before."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


async def unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Given up when the client goes away: nobody else tells a call whose response has not begun."""
    working, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_leaves(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=499)
    finally:
        working.cancel()
        leaving.cancel()


async def _leaves(request: Request) -> None:
    """Returns when the client has gone away; the body is read already."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of a generator, which is closed with the response, however that ends."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        told = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}  # nginx must not hold events back
        super().__init__(events, media_type="text/event-stream", headers=told)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event; its name is that of its type, if it has one."""
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {_encode(content)}\n\n".encode()
