"""Which requests run in the next step, and for how many tokens. No tensors, no model: plain bookkeeping."""

from collections import OrderedDict
from dataclasses import dataclass, field

from legato.cache.block_manager import BlockManager
from legato.engine.policy import SchedulingPolicy
from legato.request import Request, RequestStatus


@dataclass(frozen=True)
class StepLimits:
    """What bounds every step.

    Attributes:
        max_batch_tokens: query tokens in one forward pass.
        max_requests_per_batch: requests that run at once.
        safety_margin: share of the cache below which no new prompt is started, in [0, 1].
    """

    max_batch_tokens: int
    max_requests_per_batch: int
    safety_margin: float


@dataclass(slots=True)
class ScheduledChunk:
    """`num_tokens` tokens of a request, from `request.num_computed_tokens` on; their blocks are allocated."""

    request: Request
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What the scheduler decided.

    Attributes:
        chunks: what runs.
        stalled: running requests left out for want of blocks.
        num_tokens: tokens in `chunks`.
        num_pages: pages that `chunks` read.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    stalled: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    num_pages: int = 0


class Scheduler:
    """Holds the waiting and the running requests and fills each step from them.

    Args:
        policy: in which order running requests are served.
        limits: what bounds a step.
        blocks: the cache's accounts; scheduling a chunk allocates its blocks.
    """

    def __init__(self, policy: SchedulingPolicy, limits: StepLimits, blocks: BlockManager) -> None:
        self.limits = limits
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # by arrival; preempted ones in front
        self.running: dict[str, Request] = {}  # by admission, oldest first
        self._policy = policy
        self._blocks = blocks

    def add(self, request: Request) -> None:
        self.waiting[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, and free its blocks."""
        self.waiting.pop(request.request_id, None)
        if self.running.pop(request.request_id, None) is not None:
            self._blocks.free(request.request_id)

    def preempt(self, request: Request) -> None:
        """Soft reset: free the blocks of a running request and put it first in line; its tokens stay."""
        del self.running[request.request_id]
        self._blocks.free(request.request_id)
        request.status = RequestStatus.PENDING
        request.num_computed_tokens = 0
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def schedule(self) -> StepPlan:
        """Fill a step: running requests in the policy's order, then waiting ones as they came."""
        plan = StepPlan()
        self._schedule_running(plan)
        self._admit_waiting(plan)
        return plan

    def make_room(self, plan: StepPlan) -> list[Request]:
        """Preempt the fewest stalled requests with which the other stalled ones can go on.

        Only stalled ones, so never one that `plan` runs; newest first; never the last running one.

        Returns:
            The preempted.
        """
        left_out = set(plan.stalled)
        stalled = [request for request in self.running.values() if request in left_out]
        preempted = []
        while stalled and len(self.running) > 1 and not self._can_all_go_on(stalled):
            preempted.append(stalled.pop())
            self.preempt(preempted[-1])
        return preempted

    def _can_all_go_on(self, stalled: list[Request]) -> bool:
        lacking = [self._blocks.lacking(r.request_id, r.num_computed_tokens + 1) for r in stalled]
        return self._blocks.fits([sum(column) for column in zip(*lacking, strict=True)])

    def _schedule_running(self, plan: StepPlan) -> None:
        budget = self.limits.max_batch_tokens
        pages = self._blocks.num_pages
        for request in self._policy.order(self.running.values()):
            if plan.num_tokens >= budget:
                break
            num_tokens = min(len(request.tokens) - request.num_computed_tokens, budget - plan.num_tokens)
            num_tokens = self._blocks.grow(request.request_id, request.num_computed_tokens, num_tokens)
            if num_tokens == 0:
                plan.stalled.append(request)
                continue
            held = self._blocks.pages_held(request.request_id)
            if plan.num_pages + held > pages:
                break
            plan.chunks.append(ScheduledChunk(request, num_tokens))
            plan.num_tokens += num_tokens
            plan.num_pages += held

    def _admit_waiting(self, plan: StepPlan) -> None:
        while self.waiting and not plan.stalled:
            request = next(iter(self.waiting.values()))
            num_tokens = min(len(request.tokens), self.limits.max_batch_tokens - plan.num_tokens)
            if num_tokens == 0 or len(self.running) >= self.limits.max_requests_per_batch:
                return
            if self.running and self._blocks.free_share < self.limits.safety_margin:
                return
            if not self._admit(request, plan, num_tokens):
                return

    def _admit(self, request: Request, plan: StepPlan, num_tokens: int) -> bool:
        blocks, request_id = self._blocks, request.request_id
        if not blocks.admit(request_id, len(request.tokens), num_tokens):
            # Alone in the cache, a request starts with whatever its sliding layers have room for.
            if self.running or not blocks.admit(request_id, len(request.tokens), 0):
                return False
            num_tokens = blocks.grow(request_id, 0, num_tokens)
        del self.waiting[request_id]
        self.running[request_id] = request
        request.status = RequestStatus.PREFILLING
        plan.chunks.append(ScheduledChunk(request, num_tokens))
        plan.num_tokens += num_tokens
        plan.num_pages += blocks.pages_held(request_id)
        return True
