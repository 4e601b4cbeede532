"""What an engine does, step by step, for those who watch it: one snapshot several times a second for all of them."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from statistics import median
from typing import Any

from legato.engine.engine import EngineStats
from legato.engine.observer import StepRecord
from legato.errors import LegatoError
from legato.manager import ContinuousBatchingManager
from legato.timeline.recording import RequestState

MAX_STEPS = 300
MAX_ROWS = 64
MAX_REQUESTS = 256
_PERIOD = 0.1  # seconds between snapshots
_RATE_SECONDS = 2.0
_SILENCE_SECONDS = 15.0
_MAX_RECORDS = 20_000
_MAX_FIRST_TOKENS = 50
_LETTERS = {state: state.label[0] for state in RequestState if state is not RequestState.RESET} | {
    RequestState.RESET: "x"
}


@dataclass(slots=True)
class LiveRequest:
    """An unfinished request.

    Attributes:
        arrived: when it was made, in seconds on the engine's clock.
        row: its place in the picture; None: all are taken.
        num_read: tokens of its prompt that were processed; after a soft reset those of its answer too.
        num_decoded: steps in which it processed its newest token.
        read_at: when the latest part of its prompt was done; None: none yet, or its arrival was not seen.
    """

    request_id: str
    arrived: float
    state: RequestState = RequestState.WAITING
    row: int | None = None
    num_read: int = 0
    num_decoded: int = 0
    read_at: float | None = None


class Board:
    """Follows an engine: its unfinished requests, and its latest steps as columns of a picture.

    A column has a letter for each row: w(aiting), p(refill), d(ecode), o(ffloaded), x (reset) or a blank; a capital
    one where that request ended. A row is a request's as long as it lives, then another's.

    Attributes:
        requests: by id, earliest first.
        num_steps: steps seen.
        steps: the latest of them: column, seconds, tokens of the pass, waiting requests.
        first_tokens: seconds to the first token of those that had it lately.
    """

    def __init__(self) -> None:
        self.requests: dict[str, LiveRequest] = {}
        self.num_steps = 0
        self.steps: deque[tuple[str, float, int, int]] = deque(maxlen=MAX_STEPS)
        self.first_tokens: deque[float] = deque(maxlen=_MAX_FIRST_TOKENS)
        self._rows: list[LiveRequest | None] = [None] * MAX_ROWS
        self._free_rows = list(range(MAX_ROWS))

    def add(self, record: StepRecord) -> None:
        """Take in the next step."""
        for request_id, arrived in record.arrived.items():
            self.requests[request_id] = LiveRequest(request_id, arrived)
        for request_id in record.offloaded:
            self._known(request_id, record).state = RequestState.OFFLOADED
        for request_id in record.reset:
            self._known(request_id, record).state = RequestState.RESET
        for request_id, num_tokens in record.prefilled.items():
            self._prefill(self._known(request_id, record), num_tokens, record)
        for request_id in record.decoded:
            self._decode(self._known(request_id, record))
        self._seat()
        column = self._column(set(record.finished))
        self.num_steps += 1
        self.steps.append((column, record.ended - record.started, record.num_batch_tokens, record.num_waiting))
        for request_id in record.finished:
            self._finish(request_id, record)

    def forget_requests(self) -> None:
        """Steps were missed: who is still there will be heard of again."""
        self.requests.clear()
        self._rows = [None] * MAX_ROWS
        self._free_rows = list(range(MAX_ROWS))

    def _known(self, request_id: str, record: StepRecord) -> LiveRequest:
        return self.requests.setdefault(request_id, LiveRequest(request_id, record.started))

    def _prefill(self, request: LiveRequest, num_tokens: int, record: StepRecord) -> None:
        request.state = RequestState.PREFILL
        request.num_read += num_tokens
        request.read_at = record.ended

    def _decode(self, request: LiveRequest) -> None:
        request.state = RequestState.DECODE
        request.num_decoded += 1
        if request.num_decoded == 1:
            self._note_first_token(request)

    def _note_first_token(self, request: LiveRequest) -> None:
        # The pass that reads the last of a prompt draws the first token.
        if request.read_at is not None:
            self.first_tokens.append(request.read_at - request.arrived)

    def _seat(self) -> None:
        if not self._free_rows:
            return
        for request in self.requests.values():
            if request.row is None:
                request.row = heappop(self._free_rows)
                self._rows[request.row] = request
                if not self._free_rows:
                    return

    def _column(self, finished: set[str]) -> str:
        letters = []
        for request in self._rows:
            letter = " " if request is None else _LETTERS[request.state]
            letters.append(letter.upper() if request is not None and request.request_id in finished else letter)
        return "".join(letters).rstrip()

    def _finish(self, request_id: str, record: StepRecord) -> None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        if not request.num_decoded and request_id in record.prefilled:
            self._note_first_token(request)
        if request.row is not None:
            self._rows[request.row] = None
            heappush(self._free_rows, request.row)


@dataclass
class _Rates:
    """Tokens and steps a second, over the latest seconds."""

    _seen: deque[tuple[float, int, int]] = field(default_factory=deque)

    def push(self, now: float, stats: EngineStats) -> tuple[float, float]:
        self._seen.append((now, stats.num_generated_tokens, stats.num_steps))
        while now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        then, num_tokens, num_steps = self._seen[0]
        seconds = max(now - then, _PERIOD)
        return (stats.num_generated_tokens - num_tokens) / seconds, (stats.num_steps - num_steps) / seconds


class LiveView:
    """Snapshots of a manager's engine. The engine's thread only notes its steps, and only while somebody watches.

    Belongs to one asyncio loop.

    Args:
        manager: started.
    """

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self._manager = manager
        self._num_watchers = 0
        self._begin()

    async def events(self, is_open: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each a snapshot in JSON; a slow reader misses some. Ends when `is_open` says so.

        A snapshot has what is new since the one before it, the first one, and one after a gap, the latest steps.

        Raises:
            LegatoError: the engine has failed.
        """
        if not self._num_watchers:
            self._begin()
            self._manager.watch(self._records.append)
        self._num_watchers += 1
        seen, silent_since = -1, time.perf_counter()
        try:
            while is_open():
                self._refresh()
                if seen != self._number:
                    event = self._delta if seen == self._number - 1 else self._event(self._board.num_steps)
                    seen, silent_since = self._number, time.perf_counter()  # before others go on while this one writes
                    yield event
                elif time.perf_counter() - silent_since > _SILENCE_SECONDS:  # proxies close what says nothing
                    yield b":\n\n"
                    silent_since = time.perf_counter()
                await asyncio.sleep(_PERIOD)
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                with suppress(LegatoError):
                    self._manager.watch(None)

    def _begin(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=_MAX_RECORDS)
        self._board, self._rates = Board(), _Rates()
        self._facts: dict[str, Any] = {}
        self._number, self._delta, self._taken = 0, b"", float("-inf")

    def _refresh(self) -> None:
        """Take in what has happened, unless that was done just now."""
        now = time.perf_counter()
        if now - self._taken < _PERIOD:
            return
        self._taken = now
        num_steps = self._board.num_steps
        if len(self._records) == _MAX_RECORDS:
            self._board.forget_requests()
        for _ in range(len(self._records)):
            self._board.add(self._records.popleft())
        facts = self._look(now)
        if facts != self._facts or num_steps != self._board.num_steps:
            self._facts = facts
            self._number += 1
            self._delta = self._event(self._board.num_steps - num_steps)

    def _look(self, now: float) -> dict[str, Any]:
        stats, board = self._manager.stats, self._board
        tokens_per_second, steps_per_second = self._rates.push(now, stats)
        num_prompt_tokens = stats.num_cached_tokens + stats.num_prompt_tokens
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting - stats.num_offloaded,
            "offloaded": stats.num_offloaded,
            "cache": {
                "used": round(stats.cache_used_share, 4),
                "blank": round(stats.cache_blank_share, 4),
            },
            "prefix_hit_share": round(stats.num_cached_tokens / num_prompt_tokens, 4) if num_prompt_tokens else None,
            "tokens_per_second": round(tokens_per_second, 1),
            "steps_per_second": round(steps_per_second, 1),
            "first_token_seconds": round(median(board.first_tokens), 4) if board.first_tokens else None,
            "requests": [
                [r.request_id, r.state.label, r.num_read, r.num_decoded, round(now - r.arrived, 1)]
                for r in islice(board.requests.values(), MAX_REQUESTS)
            ],
        }

    def _event(self, num_new_steps: int) -> bytes:
        """The snapshot, with that many of the latest steps."""
        steps = list(self._board.steps)[-num_new_steps:] if num_new_steps else []
        told = [[column, round(1000 * seconds, 2), *rest] for column, seconds, *rest in steps]
        snapshot = {**self._facts, "num_steps": self._board.num_steps, "steps": told}
        return b"data: " + json.dumps(snapshot, separators=(",", ":")).encode() + b"\n\n"
