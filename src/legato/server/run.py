"""Runs the application until it is told to stop: first politely, then at once."""

import asyncio
import logging
import math
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from legato.server.app import create_app
from legato.server.service import Service

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_END_SECONDS = 2.0  # for open calls to be told that they end
HEAD_SECONDS = 20.0  # until a request's head is here
READ_SECONDS = 60.0  # until a client that has much to read has read some of it


class ImpatientProtocol(H11Protocol):
    """Hangs up on who is slow to say what he wants, or does not read what he asked for.

    Else such connections, and what is held for them, would stay for ever.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_read_timer()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()
        self._stop_read_timer()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT new calls are refused with 503 while those that run finish; on the second, and
    after `drain_timeout` seconds, those that still run end with an error, and it ends.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, drain_timeout: float, ready: Callable[[str], object]
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._service = service
        self._drain_timeout = drain_timeout
        self._hurries = False
        self.ends_calls = False  # in the middle: nothing that goes on for them is to be waited for
        self._draining: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._hurries or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        if self._service.is_draining:
            self._hurries, self.force_exit = True, self.should_exit  # calls have ended, but what was sent is not read
            return
        self._service.is_draining = True
        self._loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)

    async def startup(self, sockets: list | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def _start_draining(self, why: str) -> None:
        told = "%s: calls that run: %d; they have %g seconds to finish, once more ends them now"
        if self._service.open_calls.number:  # somebody may wonder what it waits for
            logger.warning(told, why, self._service.open_calls.number, self._drain_timeout)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        calls = self._service.open_calls
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_timeout
        while calls.number and loop.time() < deadline and not self._hurries:
            await asyncio.sleep(_LOOK_SECONDS)
        if calls.number:
            self.ends_calls = True
            self._service.open_calls.end()
            self._service.manager.stop(block=False, hard_stop=True)  # which gives each of them an error to tell
            deadline = loop.time() + _END_SECONDS
        while calls.number and loop.time() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
        self.should_exit = True
        self.force_exit = calls.number > 0


def new_server(
    service: Service, host: str, port: int, drain_timeout: float, ready: Callable[[str], object]
) -> DrainingServer:
    """A server that is yet to run; `ready` will be told its address."""
    config = uvicorn.Config(
        create_app(service), host=host, port=port, log_level="warning", access_log=False, server_header=False,
        timeout_keep_alive=30, http=ImpatientProtocol,
        timeout_graceful_shutdown=max(2, math.ceil(drain_timeout)),  # for what was sent to be read
    )  # fmt: skip
    return DrainingServer(config, service, drain_timeout, ready)


def run(service: Service, host: str, port: int, drain_timeout: float, ready: Callable[[str], object]) -> int | None:
    """Serve until a signal says otherwise; `ready` is told the address. The manager is stopped by its owner.

    Returns:
        The exit status, if it had to end in the middle of calls: nothing that goes on is to be waited for; else None.
    """
    server = new_server(service, host, port, drain_timeout, ready)
    server.run()
    return int(server.force_exit) if server.ends_calls or server.force_exit else None
