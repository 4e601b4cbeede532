"""The thread that steps an engine: its life, and who may do what when."""

import atexit
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

from legato.engine.engine import Engine, EngineStats
from legato.engine.observer import StepObserver, StepRecord
from legato.errors import EngineError, ManagerStateError, QueueFullError
from legato.openmp import release_workers
from legato.request import GenerationOutput, Request, RequestStatus
from legato.router import OutputRouter, ResultHandler

logger = logging.getLogger(__name__)

HARD_STOP_ERROR = "RuntimeError: the manager was stopped before the request finished"


class _State(Enum):
    NEW = auto()  # accepts requests, runs none
    RUNNING = auto()
    STOPPING = auto()  # finishes what it accepted
    HARD_STOPPING = auto()  # fails what it accepted
    STOPPED = auto()
    FAILED = auto()  # the engine raised
    DESTROYED = auto()


class EngineThread:
    """Steps an engine in a thread of its own and publishes what comes of it. Every method is thread-safe.

    Whatever happens, each accepted request gets one final output, and nobody is left waiting.

    Args:
        engine: stepped by this thread alone.
        router: where outputs go.
        max_queue_size: waiting requests accepted; 0: no limit.
    """

    def __init__(self, engine: Engine, router: OutputRouter, max_queue_size: int) -> None:
        self._engine: Engine | None = engine
        self._router = router
        self._max_queue_size = max_queue_size
        self._turn = threading.Condition(threading.RLock())  # guards everything below
        self._state = _State.NEW
        self._thread: threading.Thread | None = None
        self._stepping = False
        self._paused_by: list[int] = []  # idents of the threads inside pause()
        self._unfinished: dict[str, Request] = {}
        self._failure: EngineError | None = None

    def start(self) -> None:
        """See `ContinuousBatchingManager.start`."""
        with self._turn:
            stopping = self._state in (_State.STOPPING, _State.HARD_STOPPING)
            if stopping and (self._thread is threading.current_thread() or threading.get_ident() in self._paused_by):
                raise ManagerStateError("start() here would wait for ever for the stop under way to end")
            while self._state in (_State.STOPPING, _State.HARD_STOPPING):
                self._turn.wait()
            if self._state is _State.RUNNING:
                logger.warning("start() does nothing: the manager is running")
                return
            engine = self._live_engine()
            self._state = _State.RUNNING
            self._router.open()
            self._thread = threading.Thread(target=self._serve, args=(engine,), name="legato-engine", daemon=True)
            atexit.register(self._stop_at_exit)
            release_workers()
            self._thread.start()

    def stop(self, block: bool, timeout: float | None, hard_stop: bool) -> None:
        """See `ContinuousBatchingManager.stop`."""
        with self._turn:
            thread = self._thread
            if thread is None and self._state is not _State.NEW:
                return
            if block and not hard_stop and threading.get_ident() in self._paused_by:
                raise ManagerStateError("stop() inside pause() would wait for ever; use hard_stop=True or block=False")
            if thread is None:
                self._state = _State.STOPPED  # before it ever ran
                outputs = self._fail_unfinished(self._live_engine())
            elif self._state in (_State.RUNNING, _State.STOPPING):
                self._state = _State.HARD_STOPPING if hard_stop else _State.STOPPING
                self._turn.notify_all()
        if thread is None:
            self._router.publish(outputs)
        elif block and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                logger.warning("the manager is still finishing after timeout=%s seconds", timeout)

    def destroy(self) -> None:
        """See `ContinuousBatchingManager.destroy`."""
        if threading.current_thread() is self._thread:
            raise ManagerStateError("destroy() from a result handler would take the engine from under itself")
        self.stop(block=True, timeout=None, hard_stop=False)
        with self._turn:
            self._state = _State.DESTROYED
            self._engine = None

    def is_running(self) -> bool:
        with self._turn:
            return self._state in (_State.RUNNING, _State.STOPPING, _State.HARD_STOPPING)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See `ContinuousBatchingManager.pause`."""
        if threading.current_thread() is self._thread:
            raise ManagerStateError("pause() from a result handler would wait for itself")
        ident = threading.get_ident()  # a generator may be left by another thread than entered it
        with self._turn:
            self._paused_by.append(ident)
            while self._stepping:
                self._turn.wait()
        try:
            yield
        finally:
            with self._turn:
                self._paused_by.remove(ident)
                self._turn.notify_all()

    def accepts(self, num_requests: int) -> bool:
        """Whether requests would be queued now; if not because of a stop, a warning says so.

        Raises:
            QueueFullError, EngineError, ManagerStateError: as of `ContinuousBatchingManager.add_request`.
        """
        with self._turn:
            waiting, limit = self._live_engine().num_waiting, self._max_queue_size
            if self._state not in (_State.NEW, _State.RUNNING):
                logger.warning("the manager is stopped or stopping: %d request(s) dropped", num_requests)
                return False
        if limit and waiting + num_requests > limit:
            raise QueueFullError(
                f"max_queue_size={limit}: {waiting} requests are waiting, {num_requests} more were submitted"
            )
        return True

    def submit(self, requests: Sequence[Request], handler: ResultHandler | None = None) -> bool:
        """Queue requests, all or none; those that failed already go straight to their consumers.

        Returns:
            Whether they were accepted; raises as `accepts` does.
        """
        samples = [sample for request in requests for sample in (request, *request.children)]
        with self._turn:
            if not self.accepts(len(samples)):
                return False
            engine = self._live_engine()
            self._router.expect([sample.request_id for sample in samples], handler)
            self._unfinished.update((s.request_id, s) for s in samples if s.status < RequestStatus.FINISHED)
            for request in requests:
                if request.status < RequestStatus.FINISHED:
                    engine.submit(request)
            self._turn.notify_all()
        failed = [request.output() for request in requests if request.status >= RequestStatus.FINISHED]
        if failed:
            self._router.publish(failed)
        return True

    def cancel(self, request_id: str) -> None:
        """End a request at the next step. Does nothing for one that has ended."""
        with self._turn:
            request = self._unfinished.get(request_id)
            if request is not None:
                self._live_engine().cancel(request)
                self._turn.notify_all()

    def watch(self, observer: StepObserver | None) -> None:
        """See `ContinuousBatchingManager.watch`."""
        engine = self._live_engine()

        def tell(record: StepRecord) -> None:
            try:
                if observer is not None:
                    observer(record)
            except BaseException:  # whatever it is, it must not end the engine that others wait for
                logger.exception("the step observer failed and is not told any more")
                if engine.observer is tell:
                    engine.observer = None

        engine.observer = None if observer is None else tell

    def forget_prefixes(self) -> None:
        """See `Engine.forget_prefixes`."""
        engine = self._engine
        if engine is not None:
            engine.forget_prefixes()

    def check(self) -> None:
        """Raise what `add_request` would raise of a failed or destroyed engine."""
        with self._turn:
            self._live_engine()

    @property
    def stats(self) -> EngineStats:
        engine = self._engine
        return EngineStats() if engine is None else engine.stats

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise ManagerStateError("the manager was destroyed: make a new one")
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure.__cause__
        return self._engine

    def _stop_at_exit(self) -> None:
        self.stop(block=True, timeout=None, hard_stop=True)

    # In the thread

    def _serve(self, engine: Engine) -> None:
        failure = None
        try:
            while self._wait_for_turn(engine):
                outputs = engine.step(self._router.announce)
                self._end_turn(outputs)
                self._router.put(outputs)
            self._router.publish(self._fail_unfinished(engine))
        except BaseException as error:
            logger.error("the engine failed", exc_info=error)
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._end(failure)

    def _wait_for_turn(self, engine: Engine) -> bool:
        """Sleep until there is a step to run (True) or the thread is to end (False).

        Who waits for the last step's outputs is woken before it sleeps, else when the next pass is ready to be
        computed, some milliseconds later: at once, he and this thread would contend for the interpreter meanwhile.
        """
        with self._turn:
            while self._state is not _State.HARD_STOPPING:
                has_work = engine.has_work
                if has_work and not self._paused_by:
                    self._stepping = True
                    return True
                if not has_work and self._state is _State.STOPPING:
                    break
                self._router.announce()
                self._turn.wait()
            return False

    def _end_turn(self, outputs: Sequence[GenerationOutput]) -> None:
        with self._turn:
            for output in outputs:
                if output.is_finished():
                    del self._unfinished[output.request_id]
            self._stepping = False
            if self._paused_by:
                self._turn.notify_all()

    def _fail_unfinished(self, engine: Engine) -> list[GenerationOutput]:
        outputs = engine.cancel_all(HARD_STOP_ERROR)
        self._end_turn(outputs)
        return outputs

    def _end(self, failure: EngineError | None) -> None:
        """The thread's last act. STOPPED comes last: a thread started anew must find the router closed already."""
        with self._turn:
            self._stepping = False
            if failure is not None:
                self._state, self._failure = _State.FAILED, failure
            lost = list(self._unfinished.values())
            self._unfinished.clear()
            self._turn.notify_all()
        for request in lost:
            request.finish("error", str(failure), time.perf_counter())
        self._router.close(failure, [request.output() for request in lost])
        atexit.unregister(self._stop_at_exit)
        with self._turn:
            if failure is None:
                self._state = _State.STOPPED
            self._thread = None
            self._turn.notify_all()
