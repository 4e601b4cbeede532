"""`ContinuousBatchingManager`: the engine's thread, its life, and the way in and out of it."""

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from transformers import GenerationConfig

from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.engine.assemble import assemble
from legato.engine.engine import EngineStats
from legato.engine.observer import StepObserver
from legato.engine_thread import EngineThread
from legato.errors import InvalidValueError, ManagerStateError
from legato.generation import GenerationDefaults, RequestFactory
from legato.request import GenerationOutput, Request, RequestSpec
from legato.router import Inbox, OutputIterator, OutputRouter, ResultHandler
from legato.sampling_params import STRUCTURED

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.2
MOST_COMPILING = 2  # grammars at a time: each takes a core from the engine


class ContinuousBatchingManager:
    """Serves a model to any number of threads. Made by `init_continuous_batching`; every method is thread-safe.

    Args:
        model: a causal language model of transformers.
        generation_config: what requests do unless they say otherwise; None: the model's own.
        continuous_batching_config: memory and scheduling; None: defaults.
        workload_hints: what is known of the requests to come.
        tokenizer: the model's; requests that stop at texts need it.

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
        tokenizer: Any = None,
    ) -> None:
        self.config = replace(ContinuousBatchingConfig.convert(continuous_batching_config))  # checked once more
        self.config.require_implemented()
        self._model = model
        self._defaults = self._read_defaults(generation_config)
        engine, self._facts = assemble(model, self.config, workload_hints or WorkloadHints(), self._defaults.do_sample)
        self._factory = RequestFactory(
            self._facts.shape.vocab_size,
            self._facts.shape.max_length,
            self._facts.max_request_tokens,
            self.config.seed,
            self.config.return_logprobs,
            tokenizer,
            0 if self.config.speculative is None else self.config.num_speculative_tokens,
        )
        self._router = OutputRouter(self.config.stream_interval)
        self._thread = EngineThread(engine, self._router, self.config.max_queue_size)
        self._submitting = ThreadPoolExecutor(2, thread_name_prefix="legato-submit")
        self._compiling = ThreadPoolExecutor(MOST_COMPILING, thread_name_prefix="legato-compile")
        self._id_numbers = itertools.count()
        self._session_thread: int | None = None

    # Life

    def start(self) -> None:
        """Start the background thread. Works again after `stop()`; does nothing while running.

        Raises:
            ManagerStateError: the manager was destroyed, or is stopping and waits for the calling thread.
            EngineError: the engine has failed.
        """
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
        self._thread.stop(block, timeout, hard_stop)

    def destroy(self) -> None:
        """Stop if running, then free the cache. The manager cannot start again.

        Raises:
            ManagerStateError: called from the engine's own thread (a result handler).
        """
        self._thread.destroy()

    def is_running(self) -> bool:
        """Whether the background thread is alive."""
        return self._thread.is_running()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No step runs inside this context, so that weights can be changed. Nests, and may be used by several threads.

        Requests that start after it share no cached prefix with those from before. A change of parameters outside of it
        is noticed too: any that training makes, once the engine was idle between; while requests run or wait, in-place
        and replaced ones. Not noticed outside of it: changes of adapters, of single values, and, while requests run,
        of buffers, writes through `weight.data` and by fused optimizers. All weights are packed anew after it.

        Raises:
            ManagerStateError: called from the engine's own thread (a result handler).
        """
        with self._thread.pause():
            try:
                yield
            finally:
                self._thread.forget_prefixes()

    @contextmanager
    def session(self, block: bool = True, timeout: float | None = None) -> Iterator[None]:
        """Started inside, stopped after; an exception inside stops it hard.

        `for output in manager` in the thread that opened the session ends when all that was accepted has been handed
        out: that thread is the one that would stop the manager.
        """
        self.start()
        self._session_thread = threading.get_ident()
        try:
            yield
            self.stop(block, timeout)
        except BaseException:
            self.stop(hard_stop=True)
            raise
        finally:
            self._session_thread = None

    # Requests in

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
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
            cache_salt: only requests with the same one share cached prefixes: keeps tenants apart.
            priority: requests with a lower one start first, and get what a step has first; of those that lack room in
                one step the least urgent makes way.
            **sampling: `do_sample`, or fields of `SamplingParams`, for this request alone, or further settings of
                `GenerationConfig` that ask for logits processors. Giving any of temperature, top_k, top_p, min_p and
                typical_p makes it sample.

        Returns:
            The id, that of the first of `n` samples: the others' are it with ":1", ":2" and so on after it. None when
            the manager is stopping or stopped: nothing was queued, and a warning says so.

        Raises:
            InvalidValueError: the request can never be served. Other requests are not touched.
            QueueFullError: `max_queue_size` requests are waiting.
            EngineError: the engine has failed.
            ManagerStateError: the manager was destroyed.
        """
        spec = RequestSpec(
            input_ids, max_new_tokens, streaming, record_timestamps, eos_token_id, cache_salt, sampling, priority
        )
        if not self._thread.accepts(1):
            return None
        request_id = self._new_ids(1)[0] if request_id is None else request_id
        request = self._factory.make(self._defaults, request_id, spec)
        return request_id if self._thread.submit([request]) else None

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> list[str]:
        """Submit many prompts at once; arguments as of `add_request`.

        With `allow_block_sharing` they run in the order of their tokens, so that those that begin alike are neighbours.
        A prompt that can never be served fails alone: its output is FAILED and carries the reason.

        Returns:
            Ids in input order, those of all samples of a prompt one after the other; none when the manager is stopping
            or stopped.

        Raises:
            InvalidValueError: arguments wrong for all of them. Nothing was queued.
            QueueFullError: they do not all fit into `max_queue_size`. Nothing was queued.
            EngineError, ManagerStateError: as of `add_request`.
        """
        common = RequestSpec(
            [0], max_new_tokens, streaming, record_timestamps, eos_token_id, cache_salt, sampling, priority
        )
        self._factory.make(self._defaults, "all", common)  # what is wrong for all is raised here and now
        families = self._add_specs([replace(common, input_ids=ids) for ids in inputs], None)
        return [request_id for family in families for request_id in family]

    def as_completed(
        self, specs: Sequence[RequestSpec], heartbeat: Callable[[], object] | None = None
    ) -> Generator[tuple[int, GenerationOutput], None, None]:
        """Submit requests and yield their outputs, partial ones of streaming requests too, as they come.

        A request of `n` samples has so many final outputs.

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
        unfinished = self._submit_all(specs, outputs.put)
        try:
            while unfinished:
                yield self._placed(_next_output(outputs, heartbeat), unfinished)
        finally:
            self._cancel_all(unfinished)

    async def as_completed_async(
        self, specs: Sequence[RequestSpec]
    ) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
        """`as_completed` for asyncio: submitting, which may compile a grammar, is done beside the loop.

        Of a request's partial outputs that came while nobody took any only the latest is given.
        """
        loop, inbox = asyncio.get_running_loop(), Inbox()

        def withdraw(done: Future[dict[str, int]]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._cancel_all(done.result())

        has_grammar = any(name in spec.sampling for spec in specs for name in STRUCTURED)
        with self._router.mail_to(loop) as mail:
            threads = self._compiling if has_grammar else self._submitting  # no other waits for a grammar
            submitting = threads.submit(self._submit_all, specs, mail.handler(inbox))
            submitted = asyncio.wrap_future(submitting)
            try:
                unfinished = await asyncio.shield(submitted)
            except asyncio.CancelledError:
                submitting.cancel()
                # One that has begun goes on: it must leave no requests behind, and nobody hears of its failure.
                submitting.add_done_callback(withdraw)
                submitted.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise
            try:
                while unfinished:
                    yield self._placed(await inbox.get(), unfinished)
            finally:
                self._cancel_all(unfinished)

    def cancel_request(self, request_id: str) -> None:
        """End a request at the next step; its final output is FAILED, with `finish_reason` "cancelled".

        Does nothing for a request that has ended.
        """
        self._thread.cancel(request_id)

    def use_generation_config(self, generation_config: GenerationConfig | None) -> None:
        """What requests made from now on do unless they say otherwise.

        Raises:
            InvalidValueError: as of the constructor.
        """
        self._defaults = self._read_defaults(generation_config)

    def fits(self, config: ContinuousBatchingConfig) -> bool:
        """Whether a manager made now with `config` would be like this one; weights may have been cast or moved."""
        same_weights = (self._model.dtype, self._model.device) == (self._facts.dtype, self._facts.device)
        return same_weights and self.config == config

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
        must be quick, and for outputs that are stored already, and what comes meanwhile, in the caller's, before this
        returns. What it raises is logged.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._router.add_handler(request_id, callback)
            return

        def in_loop(output: GenerationOutput) -> None:
            loop.call_soon_threadsafe(callback, output)

        self._router.add_handler(request_id, in_loop)

    def watch(self, observer: StepObserver | None) -> None:
        """Tell `observer` of every step from now on, in the engine's thread, where it must be quick; None: nobody.

        What it raises is logged, and it is not told any more.
        """
        self._thread.watch(observer)

    @property
    def stats(self) -> EngineStats:
        """The engine as its latest step left it."""
        return self._thread.stats

    @property
    def max_tokens(self) -> int:
        """The longest request, prompt and answer together, that model and cache can take."""
        return min(self._facts.shape.max_length, self._facts.max_request_tokens)

    def num_samples(self, spec: RequestSpec) -> int:
        """Final outputs that a request will have, if it can be served."""
        asked = spec.sampling.get("n")
        return 1 if spec.score_from is not None else asked if isinstance(asked, int) else self._defaults.params.n

    def describe(self) -> str:
        """One line: the model, the path it runs on, and every figure that was resolved."""
        return self._facts.description

    # Helpers

    def _read_defaults(self, config: GenerationConfig | None) -> GenerationDefaults:
        defaults = GenerationDefaults.of(self._model, config)
        dropped = ", ".join(defaults.dropped)
        if dropped and not self.config.drop_unsupported_processors:
            raise InvalidValueError(
                f"no logits processor for {dropped} can work here; drop_unsupported_processors=True leaves it out"
            )
        if dropped:
            logger.warning("dropped, as no logits processor for them can work here: %s", dropped)
        return defaults

    def _new_ids(self, count: int) -> list[str]:
        fresh = (i for i in map("req_{}".format, self._id_numbers) if not self._router.knows(i))
        return list(itertools.islice(fresh, count))

    def _add_specs(self, specs: Sequence[RequestSpec], handler: ResultHandler | None) -> list[list[str]]:
        """The ids of each one's samples; none at all, when the manager is stopping or stopped."""
        if not specs or not self._thread.accepts(len(specs)):
            return []
        ids = self._new_ids(len(specs))
        requests = [self._make_or_fail(i, spec) for i, spec in zip(ids, specs, strict=True)]
        families = [[one.request_id for one in (request, *request.children)] for request in requests]
        if self.config.allow_block_sharing:
            requests.sort(key=lambda request: request.prompt_ids)
        return families if self._thread.submit(requests, handler) else []

    def _submit_all(self, specs: Sequence[RequestSpec], handler: ResultHandler) -> dict[str, int]:
        """The ids of all samples, each with its index in `specs`."""
        if not self.is_running():
            self._thread.check()
            raise ManagerStateError("the manager is not running: call start() first")
        families = self._add_specs(specs, handler)
        if len(families) < len(specs):
            raise ManagerStateError("the manager is stopped or stopping: nothing was submitted")
        return {request_id: index for index, family in enumerate(families) for request_id in family}

    def _placed(self, output: GenerationOutput, unfinished: dict[str, int]) -> tuple[int, GenerationOutput]:
        """An output with its index; a final one is no longer among the unfinished."""
        index = unfinished[output.request_id]
        if output.is_finished():
            if output.error is not None:
                self._thread.check()  # it may have failed with all others
            del unfinished[output.request_id]
        return index, output

    def _cancel_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.cancel_request(request_id)

    def _make_or_fail(self, request_id: str, spec: RequestSpec) -> Request:
        try:
            return self._factory.make(self._defaults, request_id, spec)
        except InvalidValueError as error:
            request = self._factory.make_failed(request_id, spec, str(error))
            logger.info("request %s fails alone: %.200r", request_id, str(error))  # whose text may be anybody's
            return request


def _next_output(outputs: SimpleQueue[GenerationOutput], heartbeat: Callable[[], object] | None) -> GenerationOutput:
    while True:
        try:
            return outputs.get(timeout=None if heartbeat is None else HEARTBEAT_SECONDS)
        except Empty:
            if heartbeat is not None:
                heartbeat()
