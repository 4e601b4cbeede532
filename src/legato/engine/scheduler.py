"""Which requests run in the next step, and for how many tokens. No tensors, no model: plain bookkeeping."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from legato.cache.block_manager import BlockManager
from legato.cache.prefix import PageHasher
from legato.cache.swap import CacheCopies, UnitCopies
from legato.engine.policy import SchedulingPolicy
from legato.request import Request, RequestStatus


@dataclass(frozen=True)
class StepLimits:
    """What bounds every step.

    Attributes:
        max_batch_tokens: query tokens in one forward pass.
        max_requests_per_batch: requests that run at once, and rows of logits in one forward pass.
        safety_margin: share of the cache below which no new prompt is started, in [0, 1].
        max_tokens_with_drafts: of a pass that guesses, and rows of logits it may have in any case; 0: none guesses.
    """

    max_batch_tokens: int
    max_requests_per_batch: int
    safety_margin: float
    max_tokens_with_drafts: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """`num_tokens` tokens of a request, from `request.num_computed_tokens` on; their blocks are allocated.

    After them come `drafts`, tokens that are only guessed: they count once the pass has drawn the same ones.
    """

    request: Request
    num_tokens: int
    drafts: Sequence[int] = ()


@dataclass(slots=True)
class StepPlan:
    """What the scheduler decided.

    Attributes:
        chunks: what runs.
        stalled: running requests left out for want of blocks.
        restores: copies from the host to be made before the forward pass, for requests that were offloaded.
        num_tokens: tokens in `chunks`, drafts included.
        num_rows: rows of logits they leave.
        num_cached_tokens: prompt tokens of requests that start now which need not be computed.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    stalled: list[Request] = field(default_factory=list)
    restores: list[UnitCopies] = field(default_factory=list)
    num_tokens: int = 0
    num_rows: int = 0
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
        # By priority, then arrival; those that ran before in front.
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}  # by admission, oldest first
        self._policy = policy
        self._blocks = blocks
        self._hasher = hasher
        self._awaited: dict[str, bytes] = {}  # waiting requests whose next page another one is about to compute

    def add(self, request: Request) -> None:
        """Let it wait behind all that are as urgent."""
        last = next(reversed(self.waiting.values()), request)
        self.waiting[request.request_id] = request
        if last.priority > request.priority:
            for later in [one for one in self.waiting.values() if one.priority > request.priority]:
                self.waiting.move_to_end(later.request_id)

    def fork(self, request: Request, child: Request) -> CacheCopies | None:
        """Let a further sample of a prompt run, from the tokens that have been computed of it.

        Returns:
            What must be copied before the next forward pass; None: there was no room, and it starts over.
        """
        copies = self._blocks.fork(request.request_id, child.request_id, request.num_computed_tokens)
        child.prefix_root, child.page_hashes = request.prefix_root, request.page_hashes.copy()
        if copies is None:
            self._put_first(child)
            return None
        child.num_computed_tokens = child.max_computed_tokens = request.num_computed_tokens
        child.num_cached_tokens = request.num_computed_tokens
        child.first_scheduled_time = request.first_scheduled_time
        self.running[child.request_id] = child
        return copies

    def disown(self, request: Request) -> None:
        """A request ends early: what hangs on it goes on without it, and what it hangs on forgets it."""
        if request.children:
            first, *others = request.children
            first.children, request.children = others, []
            self.add(first)
        if request.request_id not in self.running and request.request_id not in self.waiting:
            for parent in (*self.running.values(), *self.waiting.values()):
                if request in parent.children:
                    parent.children.remove(request)

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
        if not plan.stalled:
            self._add_drafts(plan)  # last: what is guessed takes nobody's place
        return plan

    def make_room(self, plan: StepPlan, preempted: Preempted) -> None:
        """Take the fewest stalled requests out of the cache with which the other stalled ones can go on.

        Only stalled ones, so never one that `plan` runs; the least urgent first, of those the newest; never the last
        running one.
        """
        left_out = set(plan.stalled)
        stalled = sorted((r for r in self.running.values() if r in left_out), key=_priority)
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
        self._put_first(request)

    def _put_first(self, request: Request) -> None:
        """Let it wait before all that are as urgent."""
        first = next(iter(self.waiting.values()), request)
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        if first.priority < request.priority:
            for earlier in reversed([one for one in self.waiting.values() if one.priority < request.priority]):
                self.waiting.move_to_end(earlier.request_id, last=False)

    def _can_all_go_on(self, stalled: list[Request]) -> bool:
        lacking = [self._blocks.lacking(r.request_id, r.num_computed_tokens + 1) for r in stalled]
        return self._blocks.fits([sum(column) for column in zip(*lacking, strict=True)])

    # Running requests

    def _schedule_running(self, plan: StepPlan) -> None:
        budget = self.limits.max_batch_tokens
        for request in sorted(self._policy.order(self.running.values()), key=_priority):
            if plan.num_tokens >= budget:
                break
            num_tokens = min(len(request.tokens) - request.num_computed_tokens, budget - plan.num_tokens)
            num_tokens = self._within_rows(plan, request, num_tokens)
            if not num_tokens:
                continue
            num_tokens = self._blocks.grow(request.request_id, request.num_computed_tokens, num_tokens)
            if num_tokens:
                self._add_chunk(plan, request, num_tokens)
            else:
                plan.stalled.append(request)

    def _add_drafts(self, plan: StepPlan) -> None:
        if self._blocks.free_share < self.limits.safety_margin:
            return
        for index, chunk in enumerate(plan.chunks):
            request, start = chunk.request, chunk.request.num_computed_tokens
            if request.drafter is None or request.children or not request.samples(start + 1):
                continue
            # The last new token is never computed.
            drafts = request.drafter.propose(request.tokens, min(self._room(plan), request.num_tokens_left - 1))
            if drafts:
                drafts = drafts[: self._blocks.grow(request.request_id, start, 1 + len(drafts)) - 1]
                plan.chunks[index] = replace(chunk, drafts=drafts)
                plan.num_tokens += len(drafts)
                plan.num_rows += len(drafts)

    def _room(self, plan: StepPlan) -> int:
        """Tokens that may still be guessed in this step, each with its row of logits."""
        limits = self.limits
        most_tokens = min(limits.max_tokens_with_drafts, limits.max_batch_tokens)
        most_rows = max(limits.max_tokens_with_drafts, limits.max_requests_per_batch)
        return min(most_tokens - plan.num_tokens, most_rows - plan.num_rows)

    def _add_chunk(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        plan.chunks.append(ScheduledChunk(request, num_tokens))
        plan.num_tokens += num_tokens
        plan.num_rows += _num_rows(request, num_tokens)
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
            if self._is_full(plan, request):
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

    def _is_full(self, plan: StepPlan, request: Request) -> bool:
        limits, family = self.limits, 1 + len(request.children)
        if plan.num_tokens >= limits.max_batch_tokens or plan.num_rows + family > limits.max_requests_per_batch:
            return True
        if sum(1 + len(one.children) for one in self.running.values()) + family > limits.max_requests_per_batch:
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
        wanted = request.page_hashes if request.score_from is None else self._pages_to_find(request)
        cached = self._blocks.find_prefix(wanted)
        if cached < len(wanted) and self._blocks.is_promised(wanted[cached]):
            self._awaited[request.request_id] = wanted[cached]
            return True
        return False

    def _admit(self, request: Request, plan: StepPlan) -> int | None:
        """Give a waiting request its blocks. Returns how many tokens it runs in this step; None: there is no room."""
        if self._blocks.is_offloaded(request.request_id):
            return self._admit_offloaded(request, plan)
        return self._admit_new(request, plan)

    def _pages_to_find(self, request: Request) -> list[bytes]:
        """Always computed are the last token, and those before what is scored: their logits are what it is all for."""
        known = len(request.tokens)
        is_scored = request.next_scored < len(request.prompt_ids)
        return request.page_hashes[
            : (min(known, request.next_scored if is_scored else known) - 1) // self._blocks.page_size
        ]

    def _within_rows(self, plan: StepPlan, request: Request, num_tokens: int) -> int:
        """As many of the request's next tokens as leave no more rows of logits than a pass has, perhaps none."""
        room = self.limits.max_requests_per_batch - plan.num_rows
        while num_tokens and (excess := _num_rows(request, num_tokens) - room) > 0:
            # One token less leaves out one row, or, of the last one, those of all samples.
            num_tokens -= 1 if request.samples(request.num_computed_tokens + num_tokens) else min(excess, num_tokens)
        return num_tokens

    def _admit_new(self, request: Request, plan: StepPlan) -> int | None:
        blocks, known = self._blocks, len(request.tokens)
        found = blocks.find_prefix(self._pages_to_find(request))
        room = self.limits.max_batch_tokens - plan.num_tokens
        for cached_pages, first in self._attempts(found, room):
            cached = cached_pages * blocks.page_size
            if blocks.admit(request.request_id, known, min(known, cached + first), request.page_hashes, cached_pages):
                break
        else:
            return None
        request.status = RequestStatus.PREFILLING
        request.num_computed_tokens = cached
        num_tokens = self._within_rows(plan, request, min(known - cached, room))
        num_tokens = blocks.grow(request.request_id, cached, num_tokens)
        if request.first_scheduled_time < 0:
            request.num_cached_tokens = cached
            plan.num_cached_tokens += cached
        return num_tokens

    def _admit_offloaded(self, request: Request, plan: StepPlan) -> int | None:
        blocks, known, computed = self._blocks, len(request.tokens), request.num_computed_tokens
        num_tokens = min(known - computed, self.limits.max_batch_tokens - plan.num_tokens)
        num_tokens = self._within_rows(plan, request, num_tokens)
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


def _num_rows(request: Request, num_tokens: int) -> int:
    """Rows of logits that a pass over the request's next tokens leaves."""
    start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
    return request.num_scored(start, end) + (1 + len(request.children) if request.samples(end) else 0)


def _priority(request: Request) -> int:
    return request.priority
