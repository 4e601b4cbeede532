"""From the engine's thread to whoever waits: threads, callbacks and asyncio, none in another's way."""

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from legato.errors import EngineError, InvalidValueError
from legato.request import GenerationOutput

logger = logging.getLogger(__name__)

ResultHandler = Callable[[GenerationOutput], object]


@dataclass(frozen=True, slots=True)
class Polled:
    """What a look at the router found: an output, or that none will ever come, or neither yet."""

    output: GenerationOutput | None
    ended: bool


class Inbox:
    """Outputs of some requests, for one consumer in an asyncio loop.

    Of each request only the latest is kept, as it holds all of those before: a consumer that is slow gets fewer and
    longer ones, and no heap of them grows.
    """

    def __init__(self) -> None:
        self._latest: dict[str, GenerationOutput] = {}
        self._begun: set[str] = set()
        self._rung = asyncio.Event()

    def put(self, output: GenerationOutput) -> bool:
        """In the loop. Returns whether the consumer should not wait for it: the first of its request, or the last."""
        is_first = output.request_id not in self._begun
        self._begun.add(output.request_id)
        self._latest[output.request_id] = output
        return is_first or output.is_finished()

    def ring(self) -> None:
        """In the loop: wake the consumer, if there is anything for him."""
        if self._latest:
            self._rung.set()

    async def get(self) -> GenerationOutput:
        """The latest output of the request that has waited longest."""
        await self._rung.wait()
        output = self._latest.pop(next(iter(self._latest)))
        if not self._latest:
            self._rung.clear()
        return output


class LoopMail:
    """From the engine's thread into one asyncio loop, which is woken once for all outputs of a step: to wake it takes a
    system call, after which the two threads would contend for the interpreter.

    Args:
        loop: where outputs go.
        interval: seconds from one time that consumers are woken to the next; who is to get the first or the last
            output of a request is woken at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self._interval = interval
        self._sent: deque[tuple[Inbox, GenerationOutput]] = deque()
        self._woken = False
        self.num_users = 0
        # In the loop alone:
        self._held: dict[Inbox, None] = {}  # whose consumers are to be woken when the interval is over
        self._rung = loop.time()  # when that was last
        self._timer: asyncio.TimerHandle | None = None

    def handler(self, inbox: Inbox) -> ResultHandler:
        """What hands outputs to an inbox, once `wake` is called."""
        return lambda output: self._sent.append((inbox, output))

    def wake(self) -> None:
        """Deliver what was sent; from any thread."""
        if self._sent and not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # a loop that was closed has nobody left to wake
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before anything is taken: what is sent from now on wakes anew
        while self._sent:
            inbox, output = self._sent.popleft()
            if inbox.put(output) or not self._interval:
                inbox.ring()
            else:
                self._held[inbox] = None
        if self._held and self._timer is None:
            self._timer = self._loop.call_at(self._rung + self._interval, self._ring)

    def _ring(self) -> None:
        self._timer, self._rung = None, self._loop.time()
        for inbox in self._held:
            inbox.ring()
        self._held.clear()


class OutputRouter:
    """Outputs on their way to consumers; each goes to exactly one.

    Outputs of a request with a handler go to the handler. All others are stored in the order they came. A consumer
    that waits for one request has that request's outputs for itself while it waits; a consumer of any output takes the
    oldest that nobody waits for by name.

    Args:
        interval: of deliveries into asyncio loops, see `LoopMail`.
    """

    def __init__(self, interval: float = 0.0) -> None:
        self._interval = interval
        self._changed = threading.Condition(threading.RLock())
        self._open = False
        self._failure: EngineError | None = None
        self._expected: set[str] = set()
        self._stored: OrderedDict[int, GenerationOutput] = OrderedDict()
        self._stored_of: defaultdict[str, deque[int]] = defaultdict(deque)  # keys into _stored, oldest first
        self._next_key = 0
        self._waited_for: Counter[str] = Counter()
        self._handlers: dict[str, ResultHandler] = {}
        self._listeners: set[Callable[[], object]] = set()
        self._mail: dict[asyncio.AbstractEventLoop, LoopMail] = {}

    # The engine's side

    def open(self) -> None:
        """Outputs will come: consumers wait for them from now on."""
        with self._changed:
            self._open = True

    def close(self, failure: EngineError | None = None, lost: Sequence[GenerationOutput] = ()) -> None:
        """No output will come any more.

        With a `failure`, waiting consumers get it, once what is stored already is gone; handlers, which cannot be
        raised at, get the final outputs of the `lost` requests.
        """
        with self._changed:
            self._open, self._failure = False, failure
            self._expected.clear()
            handled = [(self._handlers.pop(o.request_id), o) for o in lost if o.request_id in self._handlers]
        for handler, output in handled:
            _call(handler, output)
        self.announce()

    def expect(self, request_ids: Sequence[str], handler: ResultHandler | None = None) -> None:
        """Requests were accepted: the final output of each will come, to `handler` if there is one.

        Raises:
            InvalidValueError: an id is in use, by an unfinished request or by outputs not yet fetched.
        """
        with self._changed:
            for request_id in request_ids:
                if self.knows(request_id):
                    raise InvalidValueError(f"request_id={request_id!r} is in use")
            self._expected.update(request_ids)
            if handler is not None:
                self._handlers.update(dict.fromkeys(request_ids, handler))

    def publish(self, outputs: list[GenerationOutput]) -> None:
        """Hand outputs on, and wake who waits for them."""
        self.put(outputs)
        self.announce()

    def put(self, outputs: list[GenerationOutput]) -> None:
        """Hand outputs on; who waits for stored ones, or in asyncio, is not woken before `announce`.

        Handlers run here and now, outside the lock; what they raise is logged.
        """
        handled = []
        with self._changed:
            for output in outputs:
                if output.is_finished():
                    self._expected.discard(output.request_id)
                handler = self._handlers.get(output.request_id)
                if handler is None:
                    self._store(output)
                else:
                    handled.append((handler, output))
                    if output.is_finished():
                        del self._handlers[output.request_id]
        for handler, output in handled:
            _call(handler, output)

    def _store(self, output: GenerationOutput) -> None:
        self._stored[self._next_key] = output
        self._stored_of[output.request_id].append(self._next_key)
        self._next_key += 1

    def announce(self) -> None:
        """Wake who waits for outputs, or for their end."""
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    # The consumers' side

    def knows(self, request_id: str) -> bool:
        """Whether the id is in use: its final output is still to come, or to be fetched."""
        with self._changed:
            return request_id in self._expected or request_id in self._stored_of

    def add_handler(self, request_id: str, handler: ResultHandler) -> None:
        """Give all outputs of a request, those stored already included, to `handler`, until its final one."""
        with self._changed:
            stored = [self._take(key) for key in list(self._stored_of.get(request_id, ()))]
            in_turn = _InTurn(handler, stored)
            if not (stored and stored[-1].is_finished()):
                self._handlers[request_id] = in_turn
        in_turn.work_off()

    def poll(self, request_id: str | None, until_idle: bool = False) -> Polled:
        """Take an output if there is one.

        Args:
            request_id: of that request, or None: of any request that nobody waits for by id.
            until_idle: call it ended when no accepted request is unfinished, and not only when the engine stopped.

        Raises:
            EngineError: the engine failed, and nothing is stored.
        """
        with self._changed:
            return self._poll(request_id, until_idle)

    def get(
        self, request_id: str | None, timeout: float | None = None, until_idle: bool = False
    ) -> GenerationOutput | None:
        """Like `poll`, but waits up to `timeout` seconds (None: for as long as an output can come)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed, self._waiting_for(request_id):
            while True:
                polled = self._poll(request_id, until_idle)
                left = None if deadline is None else deadline - time.monotonic()
                if polled.output is not None or polled.ended or (left is not None and left <= 0):
                    return polled.output
                self._changed.wait(left)

    def iterate(self, request_id: str | None = None, until_idle: bool = False) -> "OutputIterator":
        return OutputIterator(self, request_id, until_idle)

    def reserve(self, request_id: str) -> None:
        """Keep a request's outputs from consumers of any output, until `release`."""
        with self._changed:
            self._waited_for[request_id] += 1

    def release(self, request_id: str) -> None:
        with self._changed:
            self._waited_for[request_id] -= 1
            if not self._waited_for[request_id]:
                del self._waited_for[request_id]
                self._changed.notify_all()

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` after every change, from whatever thread made it."""
        with self._changed:
            self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], object]) -> None:
        with self._changed:
            self._listeners.discard(listener)

    @contextmanager
    def mail_to(self, loop: asyncio.AbstractEventLoop) -> Iterator[LoopMail]:
        """The mail into a loop, one for all who use it at the same time."""
        with self._changed:
            mail = self._mail.setdefault(loop, LoopMail(loop, self._interval))
            mail.num_users += 1
            self._listeners.add(mail.wake)
        try:
            yield mail
        finally:
            with self._changed:
                mail.num_users -= 1
                if not mail.num_users:
                    del self._mail[loop]
                    self._listeners.discard(mail.wake)

    @contextmanager
    def _waiting_for(self, request_id: str | None) -> Iterator[None]:
        if request_id is None:
            yield
            return
        self.reserve(request_id)
        try:
            yield
        finally:
            self.release(request_id)

    def _poll(self, request_id: str | None, until_idle: bool) -> Polled:
        if request_id is not None:
            key = next(iter(self._stored_of.get(request_id, ())), None)
            ended = request_id not in self._expected
        else:
            waited_for = self._waited_for
            key = next((k for k, o in self._stored.items() if o.request_id not in waited_for), None)
            ended = not self._open or (until_idle and not self._expected)
        if key is not None:
            return Polled(self._take(key), ended=False)
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure.__cause__
        return Polled(None, ended or not self._open)

    def _take(self, key: int) -> GenerationOutput:
        output = self._stored.pop(key)
        keys = self._stored_of[output.request_id]
        keys.remove(key)
        if not keys:
            del self._stored_of[output.request_id]
        return output


class OutputIterator(Iterator[GenerationOutput], AsyncIterator[GenerationOutput]):
    """Outputs as they come, for `for` and `async for`: of one request until its final one, or of all until the end.

    A request's outputs are reserved for the iterator from its creation.
    """

    def __init__(self, router: OutputRouter, request_id: str | None, until_idle: bool) -> None:
        self._router = router
        self._request_id = request_id
        self._until_idle = until_idle
        self._done = False
        if request_id is not None:
            router.reserve(request_id)

    def __iter__(self) -> "OutputIterator":
        return self

    def __next__(self) -> GenerationOutput:
        if self._done:
            raise StopIteration
        try:
            output = self._router.get(self._request_id, None, self._until_idle)
        except EngineError:
            self.close()
            raise
        if output is None:
            self.close()
            raise StopIteration
        return self._passed(output)

    def __aiter__(self) -> "OutputIterator":
        return self

    async def __anext__(self) -> GenerationOutput:
        if self._done:
            raise StopAsyncIteration
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # A loop that was closed in the middle of waiting has nobody left to wake.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        self._router.listen(wake)
        try:
            while True:
                changed.clear()
                polled = self._router.poll(self._request_id, self._until_idle)
                if polled.output is not None:
                    return self._passed(polled.output)
                if polled.ended:
                    self.close()
                    raise StopAsyncIteration
                await changed.wait()
        except EngineError:
            self.close()
            raise
        finally:
            self._router.unlisten(wake)

    def close(self) -> None:
        """Give the reservation up; the iterator has ended."""
        if not self._done and self._request_id is not None:
            self._router.release(self._request_id)
        self._done = True

    def __del__(self) -> None:
        self.close()

    def _passed(self, output: GenerationOutput) -> GenerationOutput:
        if self._request_id is not None and output.is_finished():
            self.close()
        return output


class _InTurn:
    """A handler that is given outputs in the order they came, one at a time, though they come from two threads.

    Args:
        handler: the handler.
        stored: outputs that come first, once `work_off` is called.
    """

    def __init__(self, handler: ResultHandler, stored: Sequence[GenerationOutput]) -> None:
        self._handler = handler
        self._waiting = deque(stored)
        self._is_busy = True  # until what is stored has been worked off
        self._lock = threading.Lock()

    def __call__(self, output: GenerationOutput) -> None:
        with self._lock:
            self._waiting.append(output)
            if self._is_busy:
                return
            self._is_busy = True
        self.work_off()

    def work_off(self) -> None:
        """Hand on all that waits; who comes meanwhile leaves it to this thread."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_busy = False
                    return
                output = self._waiting.popleft()
            _call(self._handler, output)


def _call(handler: ResultHandler, output: GenerationOutput) -> None:
    try:
        handler(output)
    except BaseException:  # whatever it is, it must not end the engine that others wait for
        logger.exception("the result handler of request %s failed", output.request_id)
