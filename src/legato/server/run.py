"""Runs the application until it is told to stop: first politely, then at once."""

import asyncio
import logging
import signal
from collections.abc import Callable
from types import FrameType

import uvicorn

from legato.server.app import Service, create_app

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT new calls are refused with 503 while those that run finish; on the second, and
    after `drain_timeout` seconds, it ends at once.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, drain_timeout: float, ready: Callable[[str], object]
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._service = service
        self._drain_timeout = drain_timeout
        self._draining: asyncio.Future[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.is_draining:
            self.should_exit = self.force_exit = True
            return
        self._service.is_draining = True
        logger.info("%s: finishing %d calls", signal.Signals(sig).name, self._service.open_calls.number)
        self._loop.call_soon_threadsafe(self._start_draining)

    async def startup(self, sockets: list | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        deadline = self._loop.time() + self._drain_timeout
        while self._service.open_calls.number and self._loop.time() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
        self.should_exit = True
        self.force_exit = self._service.open_calls.number > 0


def run(service: Service, host: str, port: int, drain_timeout: float, ready: Callable[[str], object]) -> None:
    """Serve until a signal says otherwise; `ready` is told the address. The manager is stopped by its owner."""
    config = uvicorn.Config(
        create_app(service), host=host, port=port, log_level="warning", access_log=False, server_header=False,
        timeout_keep_alive=30,
    )  # fmt: skip
    DrainingServer(config, service, drain_timeout, ready).run()
