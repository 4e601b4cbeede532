"""The step, the only loop in the system: intake → schedule → allocate → build → run → commit."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from legato.cache.block_manager import BlockManager
from legato.engine.batch import Batch, BatchBuilder, StepResult
from legato.engine.scheduler import Scheduler, StepPlan
from legato.request import GenerationOutput, Request, RequestStatus


class BatchRunner(Protocol):
    """Computes a batch; knows nothing of requests."""

    def run(self, batch: Batch) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at the end of its latest step.

    Attributes:
        num_steps: forward passes so far.
        num_running, num_waiting: requests.
        num_batch_requests, num_batch_tokens: of the latest forward pass.
        num_generated_tokens: new tokens of all requests so far.
        num_prompt_tokens: prompt tokens computed so far, recomputed ones included.
        num_finished: requests that ended, well or not.
        num_preempted: soft resets so far.
        cache_used_share: share of the cache's chunks that requests own, from 0 to 1.
    """

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_batch_requests: int = 0
    num_batch_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_finished: int = 0
    num_preempted: int = 0
    cache_used_share: float = 0.0


class Engine:
    """Moves requests from `submit` to their outputs, a step at a time.

    `submit` and `cancel` may be called from any thread; everything else belongs to the thread that steps.

    Args:
        scheduler: decides; shares `blocks`.
        blocks: the cache's accounts.
        builder: makes batches.
        runner: computes them.
    """

    def __init__(self, scheduler: Scheduler, blocks: BlockManager, builder: BatchBuilder, runner: BatchRunner) -> None:
        self.stats = EngineStats()
        self._scheduler = scheduler
        self._blocks = blocks
        self._builder = builder
        self._runner = runner
        self._submitted: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._num_generated = self._num_prompt = self._num_finished = self._num_preempted = 0

    def submit(self, request: Request) -> None:
        self._submitted.append(request)

    def cancel(self, request: Request) -> None:
        """End a submitted request at the next step. Does nothing if it has ended by then."""
        self._cancelled.append(request)

    @property
    def num_waiting(self) -> int:
        """Requests submitted and not yet started, from any thread's view."""
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
        outputs = self._intake()
        plan = self._schedule()
        if plan.chunks:
            started = time.perf_counter()
            batch = self._builder.build(plan.chunks, self._blocks.tables)
            result = self._runner.run(batch)
            outputs += self._commit(plan, result, started)
        self._record(plan)
        return outputs

    def cancel_all(self, error: str) -> list[GenerationOutput]:
        """End every unfinished request with `error` and free its blocks.

        Returns:
            Their final outputs.
        """
        self._intake_submitted()
        unfinished = [*self._scheduler.running.values(), *self._scheduler.waiting.values()]
        outputs = [self._end(request, "cancelled", error) for request in unfinished]
        self._record(StepPlan())
        return outputs

    def _intake(self) -> list[GenerationOutput]:
        self._intake_submitted()
        outputs = []
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.status < RequestStatus.FINISHED:
                outputs.append(self._end(request, "cancelled", "cancelled by cancel_request"))
        return outputs

    def _intake_submitted(self) -> None:
        while self._submitted:
            self._scheduler.add(self._submitted.popleft())

    def _schedule(self) -> StepPlan:
        """A plan that fits; requests that stand in its way are preempted."""
        scheduler = self._scheduler
        plan = scheduler.schedule()
        while plan.stalled:
            preempted = scheduler.make_room(plan)
            if not preempted and not plan.chunks:
                # Alone, yet short of chunks: its blocks lie scattered, since others that lay between them have left.
                preempted = plan.stalled
                scheduler.preempt(*preempted)
            for request in preempted:
                self._builder.forget(request.request_id)
            self._num_preempted += len(preempted)
            if plan.chunks:
                return plan
            plan = scheduler.schedule()
        if not plan.chunks and (scheduler.running or scheduler.waiting):
            raise RuntimeError("no request can be scheduled: the cache's accounts are wrong")
        return plan

    def _commit(self, plan: StepPlan, result: StepResult, started: float) -> list[GenerationOutput]:
        outputs = []
        now = time.perf_counter()
        sampled = 0
        for chunk in plan.chunks:
            request = chunk.request
            if request.first_scheduled_time < 0:
                request.first_scheduled_time = started
            request.num_computed_tokens += chunk.num_tokens
            if request.status is RequestStatus.PREFILLING:
                self._num_prompt += chunk.num_tokens
            if request.num_computed_tokens < len(request.tokens):
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
        self._num_generated += sampled
        return outputs

    def _end(self, request: Request, reason: str, error: str | None = None) -> GenerationOutput:
        self._scheduler.remove(request)
        self._builder.forget(request.request_id)
        request.finish(reason, error)
        self._num_finished += 1
        return request.output()

    def _record(self, plan: StepPlan) -> None:
        self.stats = EngineStats(
            num_steps=self.stats.num_steps + bool(plan.chunks),
            num_running=len(self._scheduler.running),
            num_waiting=self.num_waiting,
            num_batch_requests=len(plan.chunks),
            num_batch_tokens=plan.num_tokens,
            num_generated_tokens=self._num_generated,
            num_prompt_tokens=self._num_prompt,
            num_finished=self._num_finished,
            num_preempted=self._num_preempted,
            cache_used_share=1.0 - self._blocks.free_share,
        )
