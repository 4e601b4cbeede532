"""The step, the only loop in the system: intake → schedule → allocate → build → run → commit."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from legato.cache.block_manager import BlockManager, BlockTables
from legato.cache.swap import CacheCopies, UnitCopies
from legato.engine.batch import StepResult
from legato.engine.observer import StepObserver, StepRecord
from legato.engine.scheduler import Preempted, ScheduledChunk, Scheduler, StepPlan
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
        """A number that changes when the weights do, as far as that is cheap to see."""

    def weights_sample(self) -> int:
        """The same from their values: slower, and sees more."""

    def reread_weights(self) -> None:
        """They have changed, as somebody says who knows: keep nothing that was made of them."""


class BlockMover(Protocol):
    """Copies blocks between the cache and the host, and within the cache."""

    def copy(self, copies: Sequence[CacheCopies]) -> None: ...

    def offload(self, copies: Sequence[UnitCopies]) -> None: ...

    def restore(self, copies: Sequence[UnitCopies]) -> None: ...


@dataclass(slots=True)
class EngineStats:
    """The engine at the end of its latest step.

    Attributes:
        num_steps: forward passes so far.
        num_running, num_waiting: requests.
        num_batch_requests, num_batch_tokens: of the latest forward pass.
        num_generated_tokens: new tokens of all requests so far.
        num_prompt_tokens: tokens read so far before a request went on generating: its prompt, after a reset all it had.
        num_cached_tokens: prompt tokens found in the cache instead so far.
        num_recomputed_tokens: tokens computed again after a soft reset so far.
        num_draft_tokens, num_accepted_tokens: tokens guessed so far, and those of them that were right.
        num_finished: requests that ended, well or not.
        num_resets: soft resets so far.
        num_offloads: times a request's blocks went to the host so far.
        num_offloaded: requests whose blocks are there now; they count as waiting.
        num_evicted_blocks: blocks whose cached content had to go so far.
        cache_used_share: share of the cache's chunks that requests own, from 0 to 1.
        cache_blank_share: share that nobody owns and that holds nothing; the rest is kept for prompts that begin alike.
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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_finished: int = 0
    num_resets: int = 0
    num_offloads: int = 0
    num_offloaded: int = 0
    num_evicted_blocks: int = 0
    cache_used_share: float = 0.0
    cache_blank_share: float = 1.0


@dataclass(slots=True)
class _StepNotes:
    """What happens in one step, besides its plan; `observer` is to be told of it."""

    started: float
    observer: StepObserver | None
    preempted: Preempted = field(default_factory=Preempted)
    arrived: dict[str, float] = field(default_factory=dict)
    prefilled: dict[str, int] = field(default_factory=dict)
    decoded: list[str] = field(default_factory=list)
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
        mover: moves blocks to the host and back.
        clock: the time, in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        builder: Builder,
        runner: BatchRunner,
        mover: BlockMover,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = EngineStats()  # a copy of `_stats` as the latest step left them: for other threads to read
        self.observer: StepObserver | None = None
        self._scheduler = scheduler
        self._blocks = blocks
        self._builder = builder
        self._runner = runner
        self._mover = mover
        self._clock = clock
        self._submitted: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._weight_changes: deque[None] = deque()  # that somebody told us of
        self._weights_version = runner.weights_version()
        self._weights_sample = runner.weights_sample()
        self._stats = EngineStats()
        self._notes = _StepNotes(clock(), None)

    def submit(self, request: Request) -> None:
        self._submitted.append(request)

    def cancel(self, request: Request) -> None:
        """End a submitted request at the next step. Does nothing if it has ended by then."""
        self._cancelled.append(request)

    def forget_prefixes(self) -> None:
        """The weights have changed: from the next step on nothing computed so far is shared with new requests."""
        self._weight_changes.append(None)

    @property
    def num_waiting(self) -> int:
        """Requests submitted and not running, from any thread's view."""
        return sum(1 + len(request.children) for request in (*self._submitted, *self._scheduler.waiting.values()))

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        return bool(self._submitted or self._cancelled or scheduler.running or scheduler.waiting)

    def step(self, before_pass: Callable[[], object] = lambda: None) -> list[GenerationOutput]:
        """Run one forward pass over whatever is due.

        Args:
            before_pass: called when all is ready to be computed, which takes long and needs little of the interpreter:
                the time for others to be woken.

        Returns:
            The final outputs of requests that ended, and a partial one for each streaming request with a new token.

        Raises:
            Exception: whatever the forward pass raised. The engine's state is then undefined but for `cancel_all`.
        """
        self._notes = _StepNotes(self._clock(), self.observer)
        outputs = self._intake()
        plan = self._schedule()
        self._move_blocks(plan)
        if plan.chunks:
            batch = self._builder.build(plan.chunks, self._blocks.tables)
            before_pass()
            result = self._runner.run(batch)
            outputs += self._commit(plan, result)
        self._record(plan)
        return outputs

    def cancel_all(self, error: str) -> list[GenerationOutput]:
        """End every unfinished request with `error` and free its blocks.

        Returns:
            Their final outputs.
        """
        self._notes = _StepNotes(self._clock(), self.observer)
        self._intake_submitted()
        parents = [*self._scheduler.running.values(), *self._scheduler.waiting.values()]
        unfinished = [request for parent in parents for request in (parent, *parent.children)]
        for parent in parents:
            parent.children.clear()
        outputs = [self._end(request, "cancelled", error) for request in unfinished]
        self._record(StepPlan())
        return outputs

    # Intake

    def _intake(self) -> list[GenerationOutput]:
        was_idle = not (self._scheduler.running or self._scheduler.waiting)
        # Taken out first: a request is submitted before it is cancelled, so it is known when its turn comes.
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        self._intake_submitted()
        # Looked at after the intake, so that nobody starts on what was there before a change.
        if self._weights_have_changed(was_idle):
            self._scheduler.forget_prefixes()
        outputs = []
        for request in cancelled:
            if request.status < RequestStatus.FINISHED:
                self._scheduler.disown(request)
                outputs.append(self._end(request, "cancelled", "cancelled by cancel_request"))
        return outputs

    def _intake_submitted(self) -> None:
        while self._submitted:
            request = self._submitted.popleft()
            if request.status is RequestStatus.FAILED:
                continue  # cancelled so soon that it ended before it came here
            family = (request, *request.children)
            del request.children[self._scheduler.limits.max_requests_per_batch - 1 :]  # more could never run at once
            for one in (request, *family[len(request.children) + 1 :]):
                self._scheduler.add(one)
            self._notes.arrived.update((one.request_id, one.created_time) for one in family)

    def _weights_have_changed(self, was_idle: bool) -> bool:
        """Told, or seen: while requests wait by the cheap sign, and by the other after the engine was idle."""
        changed = bool(self._weight_changes)
        self._weight_changes.clear()
        if changed:
            self._runner.reread_weights()
        if self._scheduler.waiting:
            before, self._weights_version = self._weights_version, self._runner.weights_version()
            changed |= before != self._weights_version
            if was_idle:
                before, self._weights_sample = self._weights_sample, self._runner.weights_sample()
                changed |= before != self._weights_sample
        return changed

    # Schedule and allocate

    def _schedule(self) -> StepPlan:
        """A plan that fits; requests that stand in its way leave the cache."""
        scheduler, preempted = self._scheduler, self._notes.preempted
        plan = scheduler.schedule()
        while plan.stalled:
            num_running = len(scheduler.running)
            scheduler.make_room(plan, preempted)
            if plan.chunks:
                break
            if len(scheduler.running) == num_running:
                # Alone, yet short of chunks: its blocks lie scattered, since others that lay between them have left.
                scheduler.preempt(plan.stalled[0], preempted)
            plan = scheduler.schedule(admit=not scheduler.running)  # what has just left stays out for this step
        for request in (*preempted.offloaded, *preempted.reset):
            self._builder.forget(request.request_id)
        self._stats.num_offloads += len(preempted.offloaded)
        self._stats.num_resets += len(preempted.reset)
        if not plan.chunks and (scheduler.running or scheduler.waiting):
            raise RuntimeError("no request can be scheduled: the cache's accounts are wrong")
        return plan

    def _move_blocks(self, plan: StepPlan) -> None:
        """To the host first: what comes back, and what the pass writes, may take the place of what leaves."""
        if any(copies.cache_units for copies in self._notes.preempted.copies):
            self._mover.offload(self._notes.preempted.copies)
        if any(copies.cache_units for copies in plan.restores):
            self._mover.restore(plan.restores)

    # Commit

    def _commit(self, plan: StepPlan, result: StepResult) -> list[GenerationOutput]:
        outputs: list[GenerationOutput] = []
        now, row, scores = self._clock(), 0, iter(result.scores)
        for chunk in plan.chunks:
            request, start = chunk.request, chunk.request.num_computed_tokens
            request.prompt_logprobs += islice(scores, request.num_scored(start, start + chunk.num_tokens))
            self._advance(chunk)
            if chunk.drafts:
                outputs += self._take_drafted(chunk, result, row, now)
                row += 1 + len(chunk.drafts)
            elif request.samples(request.num_computed_tokens):
                family = [request, *self._fork(request)]  # before the first may end and give its blocks back
                for one in family:
                    outputs += self._take_token(one, result, row, now)
                    row += 1
            elif request.num_computed_tokens == len(request.tokens):
                outputs.append(self._end(request, "length"))
        self._stats.num_steps += 1
        self._stats.num_cached_tokens += plan.num_cached_tokens
        return outputs

    def _fork(self, request: Request) -> list[Request]:
        """The further samples of a prompt that has just been computed: they share its blocks, or start over."""
        children, request.children = request.children, []
        copies = [self._scheduler.fork(request, child) for child in children]
        if any(copy is not None and copy.source_units for copy in copies):
            self._mover.copy([copy for copy in copies if copy is not None])
        return children

    def _advance(self, chunk: ScheduledChunk) -> None:
        """The chunk is in the cache."""
        request, stats, notes = chunk.request, self._stats, self._notes
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + chunk.num_tokens
        if request.first_scheduled_time < 0:
            request.first_scheduled_time = notes.started
        if request.max_computed_tokens > start:
            stats.num_recomputed_tokens += min(end, request.max_computed_tokens) - start
        request.max_computed_tokens = max(end, request.max_computed_tokens)
        if request.status is RequestStatus.PREFILLING:
            stats.num_prompt_tokens += chunk.num_tokens
            notes.prefilled[request.request_id] = chunk.num_tokens
        elif notes.observer is not None:
            notes.decoded.append(request.request_id)

    def _take_drafted(self, chunk: ScheduledChunk, result: StepResult, row: int, now: float) -> list[GenerationOutput]:
        """The tokens of a chunk with drafts: as long as a row drew the draft, the next row's token is right too."""
        request, drafts, num_accepted = chunk.request, chunk.drafts, 0
        outputs = self._take_token(request, result, row, now)
        for draft in drafts:
            if request.status >= RequestStatus.FINISHED or result.token_ids[row + num_accepted] != draft:
                break
            num_accepted += 1
            request.num_computed_tokens += 1  # the draft's K and V are in the cache
            outputs += self._take_token(request, result, row + num_accepted, now)
        request.max_computed_tokens = max(request.num_computed_tokens, request.max_computed_tokens)
        assert request.drafter is not None
        request.drafter.learn(len(drafts), num_accepted, len(request.tokens))
        self._stats.num_draft_tokens += len(drafts)
        self._stats.num_accepted_tokens += num_accepted
        return outputs

    def _take_token(self, request: Request, result: StepResult, row: int, now: float) -> list[GenerationOutput]:
        """Returns what is to be handed out for the row's token, if anything."""
        if row in result.errors:
            return [self._end(request, "error", result.errors[row])]
        token_id, logprobs = result.token_ids[row], result.logprobs[row]
        if logprobs is not None:
            request.logprobs.append(logprobs)
        if request.num_computed_tokens:
            request.status = RequestStatus.DECODING
        num_tokens = len(request.tokens)
        try:
            reason, error = request.take(token_id, now)
        except Exception as failure:  # noqa: BLE001 - the tokenizer's, which follows texts and grammars
            reason, error = "error", f"the tokenizer failed: {type(failure).__name__}: {failure}"
        if len(request.tokens) == num_tokens and logprobs is not None:
            request.logprobs.pop()  # of a token that is no part of the answer
        self._stats.num_generated_tokens += len(request.tokens) - num_tokens
        if reason is not None:
            return [self._end(request, reason, error)]
        return [request.output()] if request.streaming else []

    def _end(self, request: Request, reason: str, error: str | None = None) -> GenerationOutput:
        self._scheduler.remove(request)
        self._builder.forget(request.request_id)
        request.finish(reason, error, self._clock())
        self._stats.num_finished += 1
        self._notes.finished.append(request.request_id)
        return request.output()

    # For those who watch

    def _record(self, plan: StepPlan) -> None:
        stats, blocks = self._stats, self._blocks
        stats.num_running = len(self._scheduler.running)
        stats.num_waiting = self.num_waiting
        stats.num_offloaded = blocks.num_offloaded
        stats.num_batch_requests = len(plan.chunks)
        stats.num_batch_tokens = plan.num_tokens
        stats.num_evicted_blocks = blocks.pool.num_evicted
        stats.cache_used_share = 1.0 - blocks.free_share
        stats.cache_blank_share = blocks.blank_share
        self.stats = replace(stats)
        if self._notes.observer is not None:
            self._notes.observer(_step_record(self._notes, stats, self._clock()))


def _step_record(notes: _StepNotes, stats: EngineStats, now: float) -> StepRecord:
    return StepRecord(
        started=notes.started,
        ended=now,
        arrived=notes.arrived,
        prefilled=notes.prefilled,
        decoded=tuple(notes.decoded),
        offloaded=tuple(request.request_id for request in notes.preempted.offloaded),
        reset=tuple(request.request_id for request in notes.preempted.reset),
        finished=tuple(notes.finished),
        num_batch_tokens=stats.num_batch_tokens,
        cache_used_share=stats.cache_used_share,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting - stats.num_offloaded,
        num_offloaded=stats.num_offloaded,
    )
