"""`ContinuousBatchingManager`: the engine's thread, its life, and the way in and out of it."""

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Any

from transformers import GenerationConfig

from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.engine.assemble import assemble
from legato.engine.engine import EngineStats
from legato.errors import EngineError, InvalidValueError, ManagerStateError, QueueFullError
from legato.generation import GenerationDefaults, RequestFactory
from legato.request import GenerationOutput, Request, RequestSpec, RequestStatus
from legato.router import OutputIterator, OutputRouter, ResultHandler

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.2
HARD_STOP_ERROR = "RuntimeError: the manager was stopped before the request finished"


class _State(Enum):
    NEW = auto()  # accepts requests, runs none
    RUNNING = auto()
    STOPPING = auto()  # finishes what it accepted
    HARD_STOPPING = auto()  # fails what it accepted
    STOPPED = auto()
    FAILED = auto()  # the engine raised
    DESTROYED = auto()


class ContinuousBatchingManager:
    """Serves a model to any number of threads. Made by `init_continuous_batching`; every method is thread-safe.

    Args:
        model: a causal language model of transformers.
        generation_config: what requests do unless they say otherwise; None: the model's own.
        continuous_batching_config: memory and scheduling; None: defaults.
        workload_hints: what is known of the requests to come.
        lock: shared by all managers of this model, so that they take turns; None: there is only this one.

    Raises:
        ValueError: a setting that cannot work.
        NotImplementedError: a setting whose machinery does not exist yet.
        UnsupportedModelError: a model that cannot be served.
        OutOfCacheMemoryError: a cache that does not fit.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
        lock: "threading.Lock | None" = None,
    ) -> None:
        self.config = replace(ContinuousBatchingConfig.convert(continuous_batching_config))  # checked once more
        self.config.require_implemented()
        self._model = model
        self._defaults = self._read_defaults(generation_config)
        self._assembly = assemble(
            model, self.config, workload_hints or WorkloadHints(), self._defaults.do_sample, lock or threading.Lock()
        )
        self._engine = self._assembly.engine
        self._factory = RequestFactory(
            self._assembly.shape.vocab_size,
            self._assembly.shape.max_length,
            self._assembly.max_request_tokens,
            self.config.seed,
        )
        self._router = OutputRouter()
        self._turn = threading.Condition(threading.RLock())  # guards everything below
        self._state = _State.NEW
        self._thread: threading.Thread | None = None
        self._stepping = False
        self._paused_by: list[int] = []  # idents of the threads inside pause()
        self._unfinished: dict[str, Request] = {}
        self._num_ids = 0
        self._failure: EngineError | None = None
        self._session_thread: int | None = None

    # Life

    def start(self) -> None:
        """Start the background thread. Works again after `stop()`; does nothing while running.

        Raises:
            ManagerStateError: the manager was destroyed.
            EngineError: the engine has failed.
        """
        with self._turn:
            while self._state in (_State.STOPPING, _State.HARD_STOPPING):
                self._turn.wait()
            if self._state is _State.RUNNING:
                logger.warning("start() does nothing: the manager is running")
                return
            self._refuse_if_over()
            self._state = _State.RUNNING
            self._router.open()
            self._thread = threading.Thread(target=self._serve, name="legato-engine", daemon=True)
            atexit.register(self._stop_at_exit)
            self._thread.start()

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """Take no new requests, finish those accepted, and end the thread.

        Args:
            block: wait for the thread to end.
            timeout: seconds to wait at most; a thread that goes on longer is left to finish.
            hard_stop: do not finish what was accepted: it fails with a `RuntimeError` text. Also hastens a soft stop.

        Raises:
            ManagerStateError: a blocking soft stop inside this thread's own `pause()`, which could never end.
        """
        with self._turn:
            thread = self._thread
            if thread is None:
                self._stop_unstarted()
                return
            if block and not hard_stop and threading.get_ident() in self._paused_by:
                raise ManagerStateError("stop() inside pause() would wait for ever; use hard_stop=True or block=False")
            if self._state in (_State.RUNNING, _State.STOPPING):
                self._state = _State.HARD_STOPPING if hard_stop else _State.STOPPING
                self._turn.notify_all()
        if block and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                logger.warning("the manager is still finishing after timeout=%s seconds", timeout)

    def destroy(self) -> None:
        """Stop if running, then free the cache. The manager cannot start again."""
        self.stop()
        with self._turn:
            self._state = _State.DESTROYED
            self._engine = self._assembly = None  # type: ignore[assignment]

    def is_running(self) -> bool:
        """Whether the background thread is alive."""
        with self._turn:
            return self._thread is not None and self._thread.is_alive()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No step runs inside this context, so that weights can be changed. Nests, and may be used by several threads.

        Raises:
            ManagerStateError: called from the engine's own thread (a result handler).
        """
        if threading.current_thread() is self._thread:
            raise ManagerStateError("pause() from a result handler would wait for itself")
        with self._turn:
            self._paused_by.append(threading.get_ident())
            while self._stepping:
                self._turn.wait()
        try:
            yield
        finally:
            with self._turn:
                self._paused_by.remove(threading.get_ident())
                self._turn.notify_all()

    @contextmanager
    def session(self, block: bool = True, timeout: float | None = None, destroy: bool = True) -> Iterator[None]:
        """Started inside, stopped (and destroyed) after. An exception inside stops it hard.

        `for output in manager` in the thread that opened the session ends when all that was accepted has been handed
        out: that thread is the one that would stop the manager.
        """
        self.start()
        self._session_thread = threading.get_ident()
        try:
            yield
        except BaseException:
            self.stop(hard_stop=True)
            raise
        else:
            self.stop(block, timeout)
        finally:
            self._session_thread = None
            if destroy and (block or not self.is_running()):
                self.destroy()

    # Requests in

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **sampling: Any,
    ) -> str | None:
        """Submit a prompt.

        Args:
            input_ids: token ids, at least one.
            request_id: a name not in use; None: one is made.
            max_new_tokens: new tokens at most; None: as the generation config says.
            streaming: give an output for each new token, not only a final one.
            record_timestamps: note when each token was generated.
            eos_token_id: tokens that end the request instead of the generation config's; -1 for none.
            **sampling: `do_sample`, or fields of `SamplingParams`, for this request alone. Giving any of temperature,
                top_k and top_p makes it sample.

        Returns:
            The id; None when the manager is stopping or stopped: nothing was queued, and a warning says so.

        Raises:
            InvalidValueError: the request can never be served. Other requests are not touched.
            QueueFullError: `max_queue_size` requests are waiting.
            EngineError: the engine has failed.
            ManagerStateError: the manager was destroyed.
        """
        spec = RequestSpec(input_ids, max_new_tokens, streaming, record_timestamps, eos_token_id, sampling)
        if not self._accepts(1):
            return None
        request_id = self._new_ids(1)[0] if request_id is None else request_id
        request = self._factory.make(self._defaults, request_id, spec)
        return request_id if self._submit([request]) else None

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Submit many prompts at once; arguments as of `add_request`.

        A prompt that can never be served fails alone: its output is FAILED and carries the reason.

        Returns:
            Ids in input order; none when the manager is stopping or stopped.

        Raises:
            InvalidValueError: arguments wrong for all of them. Nothing was queued.
            QueueFullError: they do not all fit into `max_queue_size`. Nothing was queued.
            EngineError, ManagerStateError: as of `add_request`.
        """
        common = RequestSpec([0], max_new_tokens, streaming, record_timestamps, eos_token_id, sampling)
        self._factory.make(self._defaults, "all", common)  # what is wrong for all is raised here and now
        return self._add_specs([replace(common, input_ids=ids) for ids in inputs], None)

    def as_completed(
        self, specs: Sequence[RequestSpec], heartbeat: Callable[[], object] | None = None
    ) -> Generator[tuple[int, GenerationOutput], None, None]:
        """Submit requests and yield their outputs, partial ones of streaming requests too, as they come.

        Closing the iterator early cancels what is unfinished. A request that can never be served fails alone.

        Args:
            specs: the requests.
            heartbeat: called several times a second while waiting.

        Yields:
            (index in `specs`, output).

        Raises:
            InvalidValueError, QueueFullError, ManagerStateError: as of `add_requests`.
            EngineError: the engine failed; `__cause__` is why.
        """
        outputs: SimpleQueue[GenerationOutput] = SimpleQueue()
        ids = self._add_specs(specs, outputs.put)
        if len(ids) < len(specs):
            raise ManagerStateError("the manager is stopped or stopping: nothing was submitted")
        unfinished = {request_id: index for index, request_id in enumerate(ids)}
        try:
            while unfinished:
                output = _next_output(outputs, heartbeat)
                index = unfinished[output.request_id]
                if output.is_finished():
                    self._refuse_if_over()
                    del unfinished[output.request_id]
                yield index, output
        finally:
            for request_id in unfinished:
                self.cancel_request(request_id)

    def cancel_request(self, request_id: str) -> None:
        """End a request at the next step; its final output is FAILED, with `finish_reason` "cancelled".

        Does nothing for a request that has ended.
        """
        with self._turn:
            request = self._unfinished.get(request_id)
            if request is not None and self._engine is not None:
                self._engine.cancel(request)
                self._turn.notify_all()

    def use_generation_config(self, generation_config: GenerationConfig | None) -> None:
        """What requests made from now on do unless they say otherwise.

        Raises:
            InvalidValueError: as of the constructor.
        """
        self._defaults = self._read_defaults(generation_config)

    # Outputs out

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output, or the next one of that request.

        Args:
            request_id: None takes the oldest output that nobody waits for by id.
            timeout: seconds to wait at most; None: for as long as one can come.

        Returns:
            None on timeout, and at once when none can come: the manager is stopped, or the request has ended (or is not
            known) and its outputs are taken.

        Raises:
            EngineError: the engine failed; `__cause__` is why.
        """
        return self._router.get(request_id, timeout)

    def __iter__(self) -> OutputIterator:
        """Outputs as they come, until the manager has stopped and all are handed out. See `session` for its thread."""
        return self._router.iterate(until_idle=self._session_thread == threading.get_ident())

    def __aiter__(self) -> OutputIterator:
        return self.__iter__()

    def request_id_iter(self, request_id: str) -> OutputIterator:
        """The outputs of one request, for `for` or `async for`; ends after its final one."""
        return self._router.iterate(request_id)

    def register_result_handler(self, request_id: str, callback: ResultHandler) -> None:
        """Give every output of a request to `callback` instead of storing it.

        Registered inside a running asyncio loop, the callback runs in that loop; else in the engine's thread, where it
        must be quick. What it raises is logged.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._router.add_handler(request_id, callback)
            return

        def in_loop(output: GenerationOutput) -> None:
            loop.call_soon_threadsafe(callback, output)

        self._router.add_handler(request_id, in_loop)

    @property
    def stats(self) -> EngineStats:
        """The engine as its latest step left it."""
        engine = self._engine
        return EngineStats() if engine is None else engine.stats

    def describe(self) -> str:
        """One line: the model, the path it runs on, and every figure that was resolved."""
        return "destroyed" if self._assembly is None else self._assembly.description

    # The engine's thread

    def _serve(self) -> None:
        failure = None
        try:
            while self._wait_for_turn():
                outputs = self._engine.step()
                self._end_turn(outputs)
                self._router.publish(outputs)
            self._router.publish(self._fail_unfinished(HARD_STOP_ERROR))
        except BaseException as error:
            logger.error("the engine failed", exc_info=error)
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._end_thread(failure)

    def _wait_for_turn(self) -> bool:
        """Sleep until there is a step to run (True) or the thread is to end (False)."""
        with self._turn:
            while self._state is not _State.HARD_STOPPING:
                has_work = self._engine.has_work
                if has_work and not self._paused_by:
                    self._stepping = True
                    return True
                if not has_work and self._state is _State.STOPPING:
                    break
                self._turn.wait()
            return False

    def _end_turn(self, outputs: list[GenerationOutput]) -> None:
        with self._turn:
            for output in outputs:
                if output.is_finished():
                    del self._unfinished[output.request_id]
            self._stepping = False
            if self._paused_by:
                self._turn.notify_all()

    def _fail_unfinished(self, error: str) -> list[GenerationOutput]:
        outputs = self._engine.fail_all(error)
        self._end_turn(outputs)
        return outputs

    def _end_thread(self, failure: EngineError | None) -> None:
        """The thread's last act: nobody waits any more."""
        with self._turn:
            self._stepping = False
            self._thread = None
            self._state = _State.STOPPED if failure is None else _State.FAILED
            self._failure = failure
            lost = list(self._unfinished.values())
            self._unfinished.clear()
            self._turn.notify_all()
        atexit.unregister(self._stop_at_exit)
        for request in lost:
            request.finish("error", str(failure))
        self._router.close(failure, [request.output() for request in lost])

    def _stop_at_exit(self) -> None:
        self.stop(hard_stop=True)

    # Under self._turn

    def _stop_unstarted(self) -> None:
        if self._state is _State.NEW:
            self._router.publish(self._fail_unfinished(HARD_STOP_ERROR))
            self._state = _State.STOPPED

    def _refuse_if_over(self) -> None:
        if self._state is _State.DESTROYED:
            raise ManagerStateError("the manager was destroyed: make a new one")
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure.__cause__

    # Helpers

    def _accepts(self, num_requests: int) -> bool:
        with self._turn:
            self._refuse_if_over()
            if self._state not in (_State.NEW, _State.RUNNING):
                logger.warning("the manager is stopped or stopping: %d request(s) dropped", num_requests)
                return False
            limit, waiting = self.config.max_queue_size, self._engine.num_waiting
        if limit and waiting + num_requests > limit:
            raise QueueFullError(
                f"max_queue_size={limit}: {waiting} requests are waiting, {num_requests} more were submitted"
            )
        return True

    def _read_defaults(self, config: GenerationConfig | None) -> GenerationDefaults:
        return GenerationDefaults.of(self._model, config, self.config.drop_unsupported_processors)

    def _new_ids(self, count: int) -> list[str]:
        ids: list[str] = []
        with self._turn:
            while len(ids) < count:
                request_id = f"req_{self._num_ids}"
                self._num_ids += 1
                if not self._router.knows(request_id):
                    ids.append(request_id)
        return ids

    def _add_specs(self, specs: Sequence[RequestSpec], handler: ResultHandler | None) -> list[str]:
        if not specs or not self._accepts(len(specs)):
            return []
        ids = self._new_ids(len(specs))
        requests = [self._make_or_fail(i, spec) for i, spec in zip(ids, specs, strict=True)]
        return ids if self._submit(requests, handler) else []

    def _make_or_fail(self, request_id: str, spec: RequestSpec) -> Request:
        try:
            return self._factory.make(self._defaults, request_id, spec)
        except InvalidValueError as error:
            request = self._factory.make_failed(request_id, spec, str(error))
            logger.warning("request %s fails alone: %s", request_id, error)
            return request

    def _submit(self, requests: list[Request], handler: ResultHandler | None = None) -> bool:
        """Queue requests, all or none; those that failed already go straight to their consumers."""
        with self._turn:
            if not self._accepts(len(requests)):
                return False
            self._router.expect([request.request_id for request in requests], handler)
            for request in requests:
                if request.status < RequestStatus.FINISHED:
                    self._unfinished[request.request_id] = request
                    self._engine.submit(request)
            self._turn.notify_all()
        self._router.publish([r.output() for r in requests if r.status >= RequestStatus.FINISHED])
        return True


def _next_output(outputs: SimpleQueue[GenerationOutput], heartbeat: Callable[[], object] | None) -> GenerationOutput:
    while True:
        try:
            return outputs.get(timeout=None if heartbeat is None else HEARTBEAT_SECONDS)
        except Empty:
            if heartbeat is not None:
                heartbeat()
