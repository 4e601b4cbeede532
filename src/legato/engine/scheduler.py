"""Which requests run in the next step, and for how many tokens. No tensors, no model: plain bookkeeping."""

from collections import OrderedDict
from dataclasses import dataclass, field

from legato.cache.block_manager import BlockManager
from legato.cache.prefix import PageHasher
from legato.cache.swap import UnitCopies
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
        restores: copies from the host to be made before the forward pass, for requests that were offloaded.
        num_tokens: tokens in `chunks`.
        num_cached_tokens: prompt tokens of requests that start now which need not be computed.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    stalled: list[Request] = field(default_factory=list)
    restores: list[UnitCopies] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Preempted:
    """Requests that were taken out of the cache to make room for others.

    Attributes:
        offloaded: those whose blocks go to the host.
        copies: to be made before anything else is written to the cache.
        reset: those that start over.
    """

    offloaded: list[Request] = field(default_factory=list)
    copies: list[UnitCopies] = field(default_factory=list)
    reset: list[Request] = field(default_factory=list)


class Scheduler:
    """Holds the waiting and the running requests and fills each step from them.

    Args:
        policy: in which order running requests are served.
        limits: what bounds a step.
        blocks: the cache's accounts; scheduling a chunk allocates its blocks.
        hasher: of pages, by which requests share prefixes; None: they do not.
    """

    def __init__(
        self, policy: SchedulingPolicy, limits: StepLimits, blocks: BlockManager, hasher: PageHasher | None = None
    ) -> None:
        self.limits = limits
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # by arrival; those that ran before in front
        self.running: dict[str, Request] = {}  # by admission, oldest first
        self._policy = policy
        self._blocks = blocks
        self._hasher = hasher
        self._awaited: dict[str, bytes] = {}  # waiting requests whose next page another one is about to compute

    def add(self, request: Request) -> None:
        self.waiting[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, and free its blocks."""
        self.waiting.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        self._awaited.pop(request.request_id, None)
        self._blocks.free(request.request_id)

    def forget_prefixes(self) -> None:
        """The weights have changed: what was computed so far is not shared with requests that start from now on."""
        if self._hasher is None:
            return
        self._hasher.weights_changed()
        self._blocks.forget_content()
        for request in (*self.running.values(), *self.waiting.values()):
            started = request.num_computed_tokens > 0
            request.start_chain(self._hasher.private_root(request.request_id) if started else b"")

    def schedule(self, admit: bool = True) -> StepPlan:
        """Fill a step: running requests in the policy's order, then waiting ones as they came, if any may start now."""
        plan = StepPlan()
        self._schedule_running(plan)
        if admit and not plan.stalled:
            self._admit_waiting(plan)
        return plan

    def make_room(self, plan: StepPlan, preempted: Preempted) -> None:
        """Take the fewest stalled requests out of the cache with which the other stalled ones can go on.

        Only stalled ones, so never one that `plan` runs; newest first; never the last running one.
        """
        left_out = set(plan.stalled)
        stalled = [request for request in self.running.values() if request in left_out]
        while stalled and len(self.running) > 1 and not self._can_all_go_on(stalled):
            self.preempt(stalled.pop(), preempted)

    def preempt(self, request: Request, preempted: Preempted) -> None:
        """Take a running request out of the cache and put it first in line.

        Its blocks go to the host if there is room (offload); else they are dropped and it starts over with all its
        tokens (soft reset).
        """
        copies = self._blocks.offload(request.request_id, request.num_computed_tokens)
        if copies is None:
            self._blocks.free(request.request_id)
            request.start_over()
            preempted.reset.append(request)
        else:
            preempted.offloaded.append(request)
            preempted.copies.append(copies)
        del self.running[request.request_id]
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _can_all_go_on(self, stalled: list[Request]) -> bool:
        lacking = [self._blocks.lacking(r.request_id, r.num_computed_tokens + 1) for r in stalled]
        return self._blocks.fits([sum(column) for column in zip(*lacking, strict=True)])

    # Running requests

    def _schedule_running(self, plan: StepPlan) -> None:
        budget = self.limits.max_batch_tokens
        for request in self._policy.order(self.running.values()):
            if plan.num_tokens >= budget:
                break
            num_tokens = min(len(request.tokens) - request.num_computed_tokens, budget - plan.num_tokens)
            num_tokens = self._blocks.grow(request.request_id, request.num_computed_tokens, num_tokens)
            if num_tokens:
                self._add_chunk(plan, request, num_tokens)
            else:
                plan.stalled.append(request)

    def _add_chunk(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        plan.chunks.append(ScheduledChunk(request, num_tokens))
        plan.num_tokens += num_tokens
        if self._hasher is not None:
            self._share_pages(request, request.num_computed_tokens + num_tokens)

    def _share_pages(self, request: Request, num_tokens: int) -> None:
        """Of the first `num_tokens` tokens, which the cache holds once this step has run."""
        num_pages = num_tokens // self._blocks.page_size
        if num_pages > self._blocks.num_shared_pages(request.request_id):
            self._hash_pages(request)
            self._blocks.share(request.request_id, request.page_hashes[:num_pages])

    def _hash_pages(self, request: Request) -> None:
        if self._hasher is not None:
            request.prefix_root = request.prefix_root or self._hasher.root(request.cache_salt)
            self._hasher.extend(request.page_hashes, request.prefix_root, request.tokens)

    # Waiting requests

    def _admit_waiting(self, plan: StepPlan) -> None:
        admitted = []
        for request in self.waiting.values():
            if self._is_full(plan):
                break
            if self._awaits_prefix(request):
                continue
            num_tokens = self._admit(request, plan)
            if num_tokens is None:
                break
            admitted.append(request)
            self.running[request.request_id] = request
            self._add_chunk(plan, request, num_tokens)
        for request in admitted:
            del self.waiting[request.request_id]

    def _is_full(self, plan: StepPlan) -> bool:
        limits = self.limits
        if plan.num_tokens >= limits.max_batch_tokens or len(self.running) >= limits.max_requests_per_batch:
            return True
        return bool(self.running) and self._blocks.free_share < limits.safety_margin

    def _awaits_prefix(self, request: Request) -> bool:
        """Whether a page that the request needs next is about to be computed: then it waits rather than compute it too.

        What is awaited is looked up once, and found again as long as it is still to come.
        """
        if self._hasher is None or request.num_computed_tokens:
            return False
        awaited = self._awaited.get(request.request_id)
        if awaited is not None and self._blocks.is_promised(awaited):
            return True
        self._awaited.pop(request.request_id, None)
        self._hash_pages(request)
        cached = self._blocks.find_prefix(request.page_hashes)
        if cached < len(request.page_hashes) and self._blocks.is_promised(request.page_hashes[cached]):
            self._awaited[request.request_id] = request.page_hashes[cached]
            return True
        return False

    def _admit(self, request: Request, plan: StepPlan) -> int | None:
        """Give a waiting request its blocks. Returns how many tokens it runs in this step; None: there is no room."""
        if self._blocks.is_offloaded(request.request_id):
            return self._admit_offloaded(request, plan)
        return self._admit_new(request, plan)

    def _admit_new(self, request: Request, plan: StepPlan) -> int | None:
        blocks, known = self._blocks, len(request.tokens)
        # The last token is always computed: its logits are what the request is here for.
        found = blocks.find_prefix(request.page_hashes[: (known - 1) // blocks.page_size])
        room = self.limits.max_batch_tokens - plan.num_tokens
        for cached_pages, first in self._attempts(found, room):
            cached = cached_pages * blocks.page_size
            if blocks.admit(request.request_id, known, min(known, cached + first), request.page_hashes, cached_pages):
                break
        else:
            return None
        num_tokens = blocks.grow(request.request_id, cached, min(known - cached, room))
        request.status = RequestStatus.PREFILLING
        request.num_computed_tokens = cached
        if request.first_scheduled_time < 0:
            request.num_cached_tokens = cached
            plan.num_cached_tokens += cached
        return num_tokens

    def _admit_offloaded(self, request: Request, plan: StepPlan) -> int | None:
        blocks, known, computed = self._blocks, len(request.tokens), request.num_computed_tokens
        num_tokens = min(known - computed, self.limits.max_batch_tokens - plan.num_tokens)
        for num_shared, first in self._attempts(computed // blocks.page_size, num_tokens):
            copies = blocks.restore(request.request_id, known, computed + first, request.page_hashes[:num_shared])
            if copies is not None:
                plan.restores.append(copies)
                return blocks.grow(request.request_id, computed, num_tokens)
        return None

    def _attempts(self, num_shared_pages: int, num_tokens: int) -> list[tuple[int, int]]:
        """Pages to share and tokens to start with, best first.

        Alone in the cache, a request may start with a single token, if need be on blocks of its own: those it might
        share may lie scattered over more chunks than there are.
        """
        if self.running:
            return [(num_shared_pages, num_tokens)]
        return [(num_shared_pages, num_tokens), (num_shared_pages, 1), (0, 1)]
