"""Load on a server that speaks OpenAI's protocol: what its clients see of it."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tqdm import tqdm
from yarl import URL

from legato.bench.load import Body, Load, encoded
from legato.bench.serve_figures import Reply, ServeFigures, Slo
from legato.errors import InvalidValueError

HEARTBEAT_SECONDS = 0.05
WARM_UP: Body = {"max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Target:
    """Where the load goes.

    Attributes:
        url: of the server, with or without /v1 at its end.
        model: as the server calls it.
        api_key: what to come in with, if need be.
        timeout: seconds that a request may take.
    """

    url: str
    model: str
    api_key: str | None = None
    timeout: float = 600.0

    def client(self) -> aiohttp.ClientSession:
        """With as many connections as there are requests at once. Raises `InvalidValueError` for what is no URL."""
        try:
            base = URL(f"{self.url.rstrip('/').removesuffix('/v1')}/v1/")
            if base.scheme not in ("http", "https") or not base.host:
                raise ValueError("it must begin with http:// or https:// and name a host")
        except ValueError as error:
            raise InvalidValueError(f"url={self.url!r} is not allowed: {error}") from error
        return aiohttp.ClientSession(
            base_url=base,
            headers={
                "Content-Type": "application/json",
                **({} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}),
            },
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
        )


class BadAnswerError(Exception):
    """An answer that is none; its text is the kind."""


class EventReader:
    """Server-sent events out of bytes, however they are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def push(self, received: bytes) -> Iterator[Any]:
        """The JSON of all events that are complete now."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.done = True
            else:
                yield json.loads(data)


def has_text(event: Any) -> bool:
    """Whether a chunk brings anything of an answer."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls")):
            return True
    return False


@dataclass
class Heartbeat:
    """How late the process that makes the load is, and what it takes.

    Attributes:
        lags: seconds by which it woke up too late, many times over the run.
        cpu_seconds: of all its threads.
    """

    lags: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        before = time.process_time()
        try:
            while True:
                start = time.perf_counter()
                await asyncio.sleep(HEARTBEAT_SECONDS)
                self.lags.append(time.perf_counter() - start - HEARTBEAT_SECONDS)
        finally:
            self.cpu_seconds = time.process_time() - before


class LoadRun:
    """Sends a load once.

    Args:
        load: what, and when.
        target: where to.
    """

    def __init__(self, load: Load, target: Target) -> None:
        self._load = load
        self._target = target
        self._start = 0.0
        self.replies: list[Reply] = []
        self.heartbeat = Heartbeat()

    async def run(self) -> bool:
        """Under a bar on stderr, if that is a terminal.

        Returns:
            Whether all of it was sent and has ended; False if it was interrupted: `replies` are those that have.

        Raises:
            InvalidValueError: the server does not answer a first short request.
        """
        async with self._target.client() as client:
            await self._warm_up(client)
            self._start = time.perf_counter()
            heartbeat = asyncio.create_task(self.heartbeat.run())
            try:
                with tqdm(total=len(self._load.bodies), unit="req", disable=None, dynamic_ncols=True) as bar:
                    await (self._closed(client, bar) if self._load.due is None else self._open(client, bar))
            except asyncio.CancelledError:
                return False
            finally:
                heartbeat.cancel()
                with suppress(asyncio.CancelledError):
                    await heartbeat
        return True

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _warm_up(self, client: aiohttp.ClientSession) -> None:
        is_chat = "messages" in self._load.bodies[0]
        prompt = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Hi"}
        path, content = encoded({**WARM_UP, **prompt}, self._target.model)
        try:
            async with client.post(path, data=content, allow_redirects=False) as response:
                status, said = response.status, " ".join((await response.text(errors="replace")).split())[:200]
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InvalidValueError(f"url={self._target.url!r} cannot be reached: {error}") from error
        if status != 200:
            raise InvalidValueError(f"url={self._target.url!r} answers /{path} with HTTP {status}: {said}")

    async def _open(self, client: aiohttp.ClientSession, bar: Any) -> None:
        async with asyncio.TaskGroup() as calls:
            for body, due in zip(self._load.bodies, self._load.due or (), strict=True):
                path, content = encoded(body, self._target.model)
                await asyncio.sleep(max(0.0, due - self._now()))
                calls.create_task(self._send(client, path, content, due, bar))

    async def _closed(self, client: aiohttp.ClientSession, bar: Any) -> None:
        bodies = iter(self._load.bodies)

        async def one() -> None:
            due = self._now()
            for body in bodies:
                await self._send(client, *encoded(body, self._target.model), due, bar)
                due = self._now()

        async with asyncio.TaskGroup() as clients:
            for _ in range(self._load.clients):
                clients.create_task(one())

    async def _send(self, client: aiohttp.ClientSession, path: str, content: bytes, due: float, bar: Any) -> None:
        sent, pieces, error = self._now(), list[float](), None
        usage: dict[str, Any] = {}
        try:
            async with (
                asyncio.timeout(self._target.timeout),
                client.post(path, data=content, allow_redirects=False) as response,
            ):
                usage = await self._read(response, pieces)
        except TimeoutError:
            error = "timeout"
        except BadAnswerError as bad:
            error = str(bad)
        except (aiohttp.ClientError, OSError, ValueError) as failed:
            error = type(failed).__name__
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        tokens = (usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))
        self.replies.append(Reply(due, sent, self._now(), pieces, *tokens, error=error))
        bar.update()

    async def _read(self, response: aiohttp.ClientResponse, pieces: list[float]) -> dict[str, Any]:
        """The usage that the server tells; the times of pieces go to `pieces`."""
        if response.status != 200:
            raise BadAnswerError(f"HTTP {response.status}")
        reader = EventReader()
        usage: dict[str, Any] = {}
        async for received in response.content.iter_any():
            now = self._now()
            for event in reader.push(received):
                if "error" in event:
                    raise BadAnswerError("error in the stream")
                if has_text(event):
                    pieces.append(now)
                usage = event.get("usage") or usage
        if not reader.done:
            raise BadAnswerError("ended too soon")
        if not usage:
            raise BadAnswerError("no usage told")
        return usage


def _new_loop() -> asyncio.AbstractEventLoop:
    """The quickest there is: what the load takes of the machine, the server lacks."""
    try:
        import uvloop
    except ModuleNotFoundError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def measure_serve(load: Load, target: Target, slo: Slo) -> tuple[ServeFigures, bool]:
    """Send a load and measure.

    Returns:
        The figures, and whether the run came to its end; Ctrl-C makes it end early, with what is finished.

    Raises:
        InvalidValueError: the server does not answer a first short request.
    """
    run = LoadRun(load, target)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        finished = runner.run(run.run())
    return ServeFigures.of(len(load.bodies), run.replies, slo, run.heartbeat.lags, run.heartbeat.cpu_seconds), finished
