"""The step, the only loop in the system: intake → schedule → allocate → build → run → commit."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from legato.cache.block_manager import BlockManager, BlockTables
from legato.cache.swap import UnitCopies
from legato.engine.batch import StepResult
from legato.engine.observer import StepObserver, StepRecord
from legato.engine.scheduler import Evictions, ScheduledChunk, Scheduler, StepPlan
from legato.request import GenerationOutput, Request, RequestStatus


class Builder(Protocol):
    """Makes what its runner takes, a `Batch`, of a step's chunks; may keep notes on requests that are in the cache."""

    def build(self, chunks: Sequence[ScheduledChunk], tables: dict[str, BlockTables]) -> Any: ...

    def forget(self, request_id: str) -> None:
        """The request has left the cache."""


class BatchRunner(Protocol):
    """Computes batches; knows nothing of requests."""

    def run(self, batch: Any) -> StepResult: ...

    def weights_version(self) -> int:
        """A number that changes when the weights do."""


class BlockMover(Protocol):
    """Copies blocks between the cache and the host."""

    def offload(self, copies: Sequence[UnitCopies]) -> None: ...

    def restore(self, copies: Sequence[UnitCopies]) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at the end of its latest step.

    Attributes:
        num_steps: forward passes so far.
        num_running, num_waiting: requests.
        num_batch_requests, num_batch_tokens: of the latest forward pass.
        num_generated_tokens: new tokens of all requests so far.
        num_prompt_tokens: prompt tokens computed so far, those of soft-reset requests again.
        num_cached_tokens: prompt tokens found in the cache instead so far.
        num_recomputed_tokens: tokens computed again after a soft reset so far.
        num_finished: requests that ended, well or not.
        num_resets: soft resets so far.
        num_offloads: times a request's blocks went to the host so far.
        num_offloaded: requests whose blocks are there now; they count as waiting.
        num_evicted_chunks: chunks whose cached content had to go so far.
        cache_used_share: share of the cache's chunks that requests own, from 0 to 1.
    """

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_batch_requests: int = 0
    num_batch_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_finished: int = 0
    num_resets: int = 0
    num_offloads: int = 0
    num_offloaded: int = 0
    num_evicted_chunks: int = 0
    cache_used_share: float = 0.0


@dataclass(slots=True)
class _Counts:
    """What has happened since the engine was made; see `EngineStats`."""

    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    finished: int = 0
    resets: int = 0
    offloads: int = 0


@dataclass(slots=True)
class _StepNotes:
    """What happens in one step, besides its plan."""

    started: float
    evictions: Evictions = field(default_factory=Evictions)
    arrived: dict[str, float] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)


class Engine:
    """Moves requests from `submit` to their outputs, a step at a time.

    `submit`, `cancel` and `forget_prefixes` may be called from any thread; everything else belongs to the thread that
    steps.

    Args:
        scheduler: decides; shares `blocks`.
        blocks: the cache's accounts.
        builder: makes batches.
        runner: computes them.
        mover: moves blocks to the host and back; needed if `blocks` has swap space.
        clock: the time, in seconds.

    Raises:
        ValueError: there is swap space, but nothing to move blocks with.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        builder: Builder,
        runner: BatchRunner,
        mover: BlockMover | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if blocks.swap.num_units and mover is None:
            raise ValueError("an engine with swap space needs a mover")
        self.stats = EngineStats()
        self.observer: StepObserver | None = None
        self._scheduler = scheduler
        self._blocks = blocks
        self._builder = builder
        self._runner = runner
        self._mover = mover
        self._clock = clock
        self._submitted: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._prefixes_are_stale = False
        self._weights_version = runner.weights_version()
        self._counts = _Counts()
        self._notes = _StepNotes(clock())

    def submit(self, request: Request) -> None:
        self._submitted.append(request)

    def cancel(self, request: Request) -> None:
        """End a submitted request at the next step. Does nothing if it has ended by then."""
        self._cancelled.append(request)

    def forget_prefixes(self) -> None:
        """The weights have changed: from the next step on nothing computed so far is shared with new requests."""
        self._prefixes_are_stale = True

    @property
    def num_waiting(self) -> int:
        """Requests submitted and not running, from any thread's view."""
        return len(self._submitted) + len(self._scheduler.waiting)

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        return bool(self._submitted or self._cancelled or scheduler.running or scheduler.waiting)

    def step(self) -> list[GenerationOutput]:
        """Run one forward pass over whatever is due.

        Returns:
            The final outputs of requests that ended, and a partial one for each streaming request with a new token.

        Raises:
            Exception: whatever the forward pass raised. The engine's state is then undefined but for `cancel_all`.
        """
        self._notes = _StepNotes(self._clock())
        outputs = self._intake()
        plan = self._schedule()
        self._move_blocks(plan)
        prefilling = self._prefilling(plan)
        if plan.chunks:
            batch = self._builder.build(plan.chunks, self._blocks.tables)
            result = self._runner.run(batch)
            outputs += self._commit(plan, result)
        self._record(plan, prefilling)
        return outputs

    def cancel_all(self, error: str) -> list[GenerationOutput]:
        """End every unfinished request with `error` and free its blocks.

        Returns:
            Their final outputs.
        """
        self._notes = _StepNotes(self._clock())
        self._intake_submitted()
        unfinished = [*self._scheduler.running.values(), *self._scheduler.waiting.values()]
        outputs = [self._end(request, "cancelled", error) for request in unfinished]
        self._record(StepPlan(), [])
        return outputs

    # Intake

    def _intake(self) -> list[GenerationOutput]:
        if self._submitted or self._scheduler.waiting:
            version = self._runner.weights_version()
            self._prefixes_are_stale |= version != self._weights_version
            self._weights_version = version
        if self._prefixes_are_stale:
            self._prefixes_are_stale = False
            self._scheduler.forget_prefixes()
        self._intake_submitted()
        outputs = []
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.status < RequestStatus.FINISHED:
                outputs.append(self._end(request, "cancelled", "cancelled by cancel_request"))
        return outputs

    def _intake_submitted(self) -> None:
        while self._submitted:
            request = self._submitted.popleft()
            self._scheduler.add(request)
            self._notes.arrived[request.request_id] = request.created_time

    # Schedule and allocate

    def _schedule(self) -> StepPlan:
        """A plan that fits; requests that stand in its way leave the cache."""
        scheduler, evictions = self._scheduler, self._notes.evictions
        plan = scheduler.schedule()
        while plan.stalled:
            num_running = len(scheduler.running)
            scheduler.make_room(plan, evictions)
            if plan.chunks:
                break
            if len(scheduler.running) == num_running:
                # Alone, yet short of chunks: its blocks lie scattered, since others that lay between them have left.
                scheduler.evict(plan.stalled[0], evictions)
            plan = scheduler.schedule(admit=not scheduler.running)  # what has just left stays out for this step
        for request in (*evictions.offloaded, *evictions.reset):
            self._builder.forget(request.request_id)
        if not plan.chunks and (scheduler.running or scheduler.waiting):
            raise RuntimeError("no request can be scheduled: the cache's accounts are wrong")
        return plan

    def _move_blocks(self, plan: StepPlan) -> None:
        """To the host first: what comes back, and what the pass writes, may take the place of what leaves."""
        if self._mover is None:
            return
        if any(copies.cache_units for copies in self._notes.evictions.copies):
            self._mover.offload(self._notes.evictions.copies)
        if any(copies.cache_units for copies in plan.restores):
            self._mover.restore(plan.restores)

    # Commit

    def _commit(self, plan: StepPlan, result: StepResult) -> list[GenerationOutput]:
        outputs = []
        now, started, counts = self._clock(), self._notes.started, self._counts
        sampled = 0
        for chunk in plan.chunks:
            request = chunk.request
            if request.first_scheduled_time < 0:
                request.first_scheduled_time = started
            start = request.num_computed_tokens
            end = request.num_computed_tokens = start + chunk.num_tokens
            if start < request.max_computed_tokens:
                counts.recomputed_tokens += min(end, request.max_computed_tokens) - start
            request.max_computed_tokens = max(end, request.max_computed_tokens)
            if request.status is RequestStatus.PREFILLING:
                counts.prompt_tokens += chunk.num_tokens
            if end < len(request.tokens):
                continue
            token_id = result.token_ids[sampled]
            request.tokens.append(token_id)
            request.status = RequestStatus.DECODING
            if result.logprobs is not None:
                request.logprobs.append(result.logprobs[sampled])
            if request.timestamps is not None:
                request.timestamps.append(now)
            sampled += 1
            if token_id in request.stop_token_ids:
                outputs.append(self._end(request, "stop"))
            elif len(request.tokens) - len(request.prompt_ids) >= request.max_new_tokens:
                outputs.append(self._end(request, "length"))
            elif request.streaming:
                outputs.append(request.output())
        counts.steps += 1
        counts.generated_tokens += sampled
        counts.cached_tokens += plan.num_cached_tokens
        return outputs

    def _end(self, request: Request, reason: str, error: str | None = None) -> GenerationOutput:
        self._scheduler.remove(request)
        self._builder.forget(request.request_id)
        request.finish(reason, error, self._clock())
        self._counts.finished += 1
        self._notes.finished.append(request.request_id)
        return request.output()

    # For those who watch

    def _prefilling(self, plan: StepPlan) -> list[bool]:
        """Which of the plan's chunks are prefill: known before the step only."""
        if self.observer is None:
            return []
        return [chunk.request.status is RequestStatus.PREFILLING for chunk in plan.chunks]

    def _record(self, plan: StepPlan, prefilling: Sequence[bool]) -> None:
        counts, evictions = self._counts, self._notes.evictions
        counts.resets += len(evictions.reset)
        counts.offloads += len(evictions.offloaded)
        self.stats = stats = EngineStats(
            num_steps=counts.steps,
            num_running=len(self._scheduler.running),
            num_waiting=self.num_waiting,
            num_batch_requests=len(plan.chunks),
            num_batch_tokens=plan.num_tokens,
            num_generated_tokens=counts.generated_tokens,
            num_prompt_tokens=counts.prompt_tokens,
            num_cached_tokens=counts.cached_tokens,
            num_recomputed_tokens=counts.recomputed_tokens,
            num_finished=counts.finished,
            num_resets=counts.resets,
            num_offloads=counts.offloads,
            num_offloaded=self._scheduler.num_offloaded,
            num_evicted_chunks=self._blocks.pool.num_evicted,
            cache_used_share=1.0 - self._blocks.free_share,
        )
        if self.observer is not None:
            self.observer(_step_record(self._notes, plan, prefilling, stats, self._clock()))


def _step_record(
    notes: _StepNotes, plan: StepPlan, prefilling: Sequence[bool], stats: EngineStats, now: float
) -> StepRecord:
    kinds = list(zip(plan.chunks, prefilling, strict=True))
    return StepRecord(
        started=notes.started,
        ended=now,
        arrived=notes.arrived,
        prefilled={chunk.request.request_id: chunk.num_tokens for chunk, prefill in kinds if prefill},
        decoded=tuple(chunk.request.request_id for chunk, prefill in kinds if not prefill),
        offloaded=tuple(request.request_id for request in notes.evictions.offloaded),
        reset=tuple(request.request_id for request in notes.evictions.reset),
        finished=tuple(notes.finished),
        num_batch_tokens=plan.num_tokens,
        cache_used_share=stats.cache_used_share,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_offloaded=stats.num_offloaded,
    )
