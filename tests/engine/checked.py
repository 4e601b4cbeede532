"""An engine on a toy model, put together from parts that check each decision against the specification."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from legato.cache.block_manager import BlockManager
from legato.cache.eviction import EVICTION_POLICIES
from legato.cache.pool import AttentionGroup
from legato.cache.prefix import PageHasher
from legato.cache.swap import UnitCopies
from legato.engine.batch import BatchBuilder
from legato.engine.engine import BatchRunner, Engine
from legato.engine.policy import SCHEDULING_POLICIES
from legato.engine.scheduler import Preempted, Scheduler, StepLimits, StepPlan
from legato.request import GenerationOutput, Request, RequestStatus
from tests.cache.accounts import NUM_RESERVED, Accounts, Layout
from tests.engine.toy import ToyMover, ToyRunner, seen_before

PLENTY = 4000  # host units that no test can fill


class CheckedBlocks(BlockManager):
    """A block manager that checks what the scheduler asks of it, and notes it."""

    def __init__(
        self,
        layout: Layout,
        window: int,
        page_size: int,
        num_chunks: int,
        safety_margin: float,
        eviction: str = "lru",
        num_swap_units: int = 0,
    ) -> None:
        self.groups = layout.groups(window)
        super().__init__(self.groups, page_size, num_chunks, EVICTION_POLICIES[eviction](), num_swap_units)
        self.accounts = Accounts(self, layout, num_chunks)
        self.per_chunk = layout.blocks_per_chunk
        self.safety_margin = safety_margin
        self.num_swap_units = num_swap_units
        self.asked: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.swapped: dict[str, int] = {}  # host units of each offloaded request
        self.known_at_start: dict[str, int] = {}  # tokens that a request had when it was admitted; offloading ends it
        self.num_found: dict[Request, int] = {}  # tokens that a request found in the cache before it ever ran
        # What each hash stands for: how often the weights had changed, the salt, and all tokens up to the page's end.
        self.num_weight_changes = 0
        self.born: dict[Request, int] = {}
        self.content_of: dict[bytes, object] = {}
        self.hash_of: dict[object, bytes] = {}

    # What a request needs, worked out position by position

    def pages(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.page_size))

    def pages_seen(self, group: AttentionGroup, position: int) -> list[int]:
        """Pages of the earlier positions that a query sees."""
        return sorted({int(seen) // self.page_size for seen in seen_before(group, position)})

    def pages_kept(self, group: AttentionGroup, num_computed: int) -> list[int]:
        """Pages that hold computed tokens, and a position that a later query sees or that is still to be written."""
        kept = {*self.pages_seen(group, num_computed), num_computed // self.page_size}
        return sorted(page for page in kept if page * self.page_size < num_computed)

    def units(self, request: Request) -> int:
        """Host units that a request's content takes."""
        sizes = [group.block_size(self.page_size) for group in self.groups]
        counts = [len(self.pages_kept(group, request.num_computed_tokens)) for group in self.groups]
        return sum(count * size // gcd(*sizes) for count, size in zip(counts, sizes, strict=True))

    def has_swap_room(self, request: Request) -> bool:
        return self.units(request) <= self.num_swap_units - sum(self.swapped.values())

    def is_cached(self, page_hashes: Sequence[bytes], num_pages: int) -> bool:
        """Whether the cache holds all that a query right after `num_pages` pages sees."""
        return all(
            allocator.find(page_hashes[page]) is not None
            for group, allocator in zip(self.groups, self.allocators, strict=True)
            for page in self.pages_seen(group, num_pages * self.page_size)
        )

    def longest_prefix(self, page_hashes: Sequence[bytes], most: int) -> int:
        return max(n for n in range(min(most, len(page_hashes)) + 1) if n == 0 or self.is_cached(page_hashes, n))

    def can_start(self, request: Request, num_tokens: int, num_cached: int) -> bool:
        """Whether there is room for a new request with `num_tokens` beyond its `num_cached` pages."""
        found, blank = [], []
        for group, allocator in zip(self.groups, self.allocators, strict=True):
            pages = self.pages_seen(group, num_cached * self.page_size)
            found.append({allocator.find(request.page_hashes[page]) for page in pages})
            end = len(request.tokens) if group.window is None else num_cached * self.page_size + num_tokens
            blank.append(max(self.pages(end) - num_cached, 0))
        return self._fits(found, blank)

    def can_return(self, request: Request, num_tokens: int, shares: bool = True) -> bool:
        """Whether there is room for an offloaded request with `num_tokens` beyond what it has computed."""
        computed, found, blank = request.num_computed_tokens, [], []
        for i, group in enumerate(self.groups):
            found.append(self.found_on_return(request, i) if shares else set())
            end = len(request.tokens) if group.window is None else computed + num_tokens
            kept = self.pages_kept(group, computed)
            blank.append(len(kept) + max(self.pages(end) - self.pages(computed), 0) - len(found[-1]))
        return self._fits(found, blank)

    def found_on_return(self, request: Request, group: int) -> set[int]:
        """Blocks in which the cache still holds what an offloaded request has on the host."""
        complete = request.num_computed_tokens // self.page_size
        pages = self.pages_kept(self.groups[group], request.num_computed_tokens)
        hashes = [request.page_hashes[page] for page in pages if page < complete and request.page_hashes]
        return {self.allocators[group].find(page_hash) for page_hash in hashes} - {None}

    def _fits(self, found: Sequence[set[int]], blank: Sequence[int]) -> bool:
        """Whether, with the blocks `found` owned too, `blank[i]` more of group i find a place."""
        num_chunks = 0
        for group, per_chunk in enumerate(self.per_chunk):
            owned = found[group] | set(self.accounts.owned(group))
            chunks = {block // per_chunk for block in owned}
            num_chunks += len(chunks - self.accounts.chunks(group))
            lacking = blank[group] - (len(chunks) * per_chunk - len(owned))
            num_chunks += len(range(0, lacking, per_chunk))
        return num_chunks <= self.accounts.num_free_chunks

    # What the scheduler asks

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        num_first_tokens: int,
        page_hashes: Sequence[bytes] = (),
        num_cached_pages: int = 0,
    ) -> bool:
        request = self.requests[request_id]
        self._check_margin()
        assert num_tokens == len(request.tokens)
        assert page_hashes == request.page_hashes
        self.born.setdefault(request, self.num_weight_changes)
        self._check_hashes(request, page_hashes)
        beyond = num_first_tokens - num_cached_pages * self.page_size
        self.asked[request_id] = max(beyond, self.asked.get(request_id, 0))
        longest = self.longest_prefix(page_hashes, (num_tokens - 1) // self.page_size)
        # Alone, a request may do without pages that lie where they take more chunks than there are.
        assert num_cached_pages == longest or not (self.tables or self.can_start(request, 1, longest))
        fits = self.can_start(request, beyond, num_cached_pages)
        assert super().admit(request_id, num_tokens, num_first_tokens, page_hashes, num_cached_pages) == fits
        if fits:
            self.known_at_start[request_id] = num_tokens
            if not request.max_computed_tokens:
                self.num_found[request] = num_cached_pages * self.page_size
        return fits

    def restore(
        self, request_id: str, num_tokens: int, num_first_tokens: int, page_hashes: Sequence[bytes] = ()
    ) -> UnitCopies | None:
        request = self.requests[request_id]
        self._check_margin()
        assert num_tokens == len(request.tokens)
        beyond = num_first_tokens - request.num_computed_tokens
        self.asked[request_id] = max(beyond, self.asked.get(request_id, 0))
        shares = bool(page_hashes) or not request.page_hashes
        assert shares or not (self.tables or self.can_return(request, 1)), "pages that are in the cache are copied"
        fits = self.can_return(request, beyond, shares)
        num_found = [len(self.found_on_return(request, group)) if shares else 0 for group in range(len(self.groups))]
        copies = super().restore(request_id, num_tokens, num_first_tokens, page_hashes)
        assert (copies is not None) == fits
        if copies is not None:
            sizes = [group.block_size(self.page_size) for group in self.groups]
            found = sum(count * size // gcd(*sizes) for count, size in zip(num_found, sizes, strict=True))
            assert len(copies.cache_units) == len(copies.host_units) == self.swapped.pop(request_id) - found
        return copies

    def offload(self, request_id: str, num_computed_tokens: int) -> UnitCopies | None:
        request = self.requests[request_id]
        assert num_computed_tokens == request.num_computed_tokens
        fits, num_units = self.has_swap_room(request), self.units(request)
        copies = super().offload(request_id, num_computed_tokens)
        assert (copies is not None) == fits
        if copies is not None:
            self.swapped[request_id] = num_units
            assert len(copies.cache_units) == len(copies.host_units) == num_units
        return copies

    def free(self, request_id: str) -> None:
        self.swapped.pop(request_id, None)
        self.known_at_start.pop(request_id, None)
        super().free(request_id)

    def grow(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> int:
        self.asked[request_id] = num_tokens
        granted = super().grow(request_id, num_computed_tokens, num_tokens)
        lacking = self.accounts.lacking(request_id, num_computed_tokens + granted + 1)
        assert granted == num_tokens or not self.accounts.fits(lacking), "fewer tokens than there is room for"
        return granted

    def share(self, request_id: str, page_hashes: Sequence[bytes]) -> None:
        self._check_hashes(self.requests[request_id], page_hashes)
        super().share(request_id, page_hashes)

    def forget_content(self) -> None:
        super().forget_content()
        assert not any(allocator.num_cached_blocks for allocator in self.allocators)

    def _check_margin(self) -> None:
        assert not self.tables or self.accounts.free_share >= self.safety_margin, "started under the safety margin"

    def _check_hashes(self, request: Request, page_hashes: Sequence[bytes]) -> None:
        """A hash stands for one content and a content has one hash."""
        for page, page_hash in enumerate(page_hashes):
            tokens = tuple(request.tokens[: (page + 1) * self.page_size])
            assert len(tokens) == (page + 1) * self.page_size, "an incomplete page"
            content = (self.born[request], request.cache_salt, tokens)
            assert self.content_of.setdefault(page_hash, content) == content
            assert self.hash_of.setdefault(content, page_hash) == page_hash

    def check(self) -> None:
        self.accounts.check()
        assert self.num_offloaded == len(self.swapped)
        assert self.swap.num_free == self.num_swap_units - sum(self.swapped.values())


class CheckedScheduler(Scheduler):
    """A scheduler that checks each of its decisions against the specification.

    Attributes:
        plan: the latest one.
        prefilled: requests of that plan that were reading their prompt.
    """

    def __init__(self, policy_name: str, limits: StepLimits, blocks: CheckedBlocks, sharing: bool) -> None:
        hasher = PageHasher(blocks.page_size) if sharing else None
        super().__init__(SCHEDULING_POLICIES[policy_name], limits, blocks, hasher)
        self.decodes_first = policy_name == "fifo"
        self.sharing = sharing
        self.blocks = blocks
        self.plan = StepPlan()
        self.prefilled: set[Request] = set()
        self.num_resets = 0
        self.num_offloads = 0

    def add(self, request: Request) -> None:
        super().add(request)
        self.blocks.requests[request.request_id] = request

    def forget_prefixes(self) -> None:
        """Whoever has begun is alone from now on with what it computes; whoever has not begins anew."""
        self.blocks.num_weight_changes += 1
        for request in (*self.running.values(), *self.waiting.values()):
            self.blocks.born.pop(request, None)
            if request.num_computed_tokens:
                self.blocks.born[request] = -1 - len(self.blocks.content_of) - id(request)
        super().forget_prefixes()

    # A step

    def schedule(self, admit: bool = True) -> StepPlan:
        running, waiting = list(self.running.values()), list(self.waiting.values())
        decoding = [r for r in running if r.status is RequestStatus.DECODING]
        prefilling = [r for r in running if r.status is RequestStatus.PREFILLING]
        assert len(decoding) + len(prefilling) == len(running)
        assert waiting == sorted(waiting, key=lambda request: request.priority)
        for request in waiting:
            is_new = request.status is RequestStatus.PENDING and request.num_computed_tokens == 0
            assert is_new != self.blocks.is_offloaded(request.request_id)
        self.blocks.asked.clear()
        plan = self.plan = super().schedule(admit)
        self.prefilled = {c.request for c in plan.chunks if c.request.status is RequestStatus.PREFILLING}
        started = [r for r in waiting if r.request_id in self.running]
        assert admit or not started
        assert list(self.running.values()) == running + started
        assert list(self.waiting.values()) == [r for r in waiting if r not in started]
        self._check_overtaking(waiting, started)
        order = decoding + prefilling if self.decodes_first else prefilling + decoding
        order = sorted(order, key=lambda request: request.priority) + started
        is_full = self._check_turns(plan, order, started)
        self._check_limits(plan)
        if admit and not plan.stalled and not is_full:
            self._check_nobody_waits_without_need(plan)
        return plan

    def _check_overtaking(self, waiting: list[Request], started: list[Request]) -> None:
        """Whoever started later than one that still waits did so because that one waits for a page."""
        last = max((waiting.index(request) for request in started), default=0)
        for request in waiting[:last]:
            assert request in started or self._may_wait_for_a_page(request), "a waiting request overtook another"

    def _may_wait_for_a_page(self, request: Request) -> bool:
        """Whether a running request is about to compute, after this step, a page that this one needs too."""
        if not self.sharing or request.status is not RequestStatus.PENDING:
            return False
        return any(self._pages_computed_by(r) < self._pages_alike(request, r) for r in self.running.values())

    def _pages_computed_by(self, request: Request) -> int:
        in_step = sum(chunk.num_tokens for chunk in self.plan.chunks if chunk.request is request)
        return (request.num_computed_tokens + in_step) // self.blocks.page_size

    def _pages_alike(self, request: Request, other: Request) -> int:
        """Complete pages that a request has in common with what another that runs had when it started."""
        blocks, size = self.blocks, self.blocks.page_size
        if request.cache_salt != other.cache_salt:
            return 0
        if blocks.born.get(request, blocks.num_weight_changes) != blocks.born[other]:
            return 0
        known = other.tokens[: blocks.known_at_start.get(other.request_id, 0)]
        most = min(len(known), len(request.tokens)) // size
        return next((n for n in range(most, 0, -1) if known[: n * size] == request.tokens[: n * size]), 0)

    def _check_turns(self, plan: StepPlan, order: list[Request], started: list[Request]) -> bool:
        """In order, each request got what was left of the budget, or as much of it as there was room for.

        Returns:
            Whether the token budget ended the step.
        """
        num_tokens = self.limits.max_batch_tokens
        chunks, stalled = list(plan.chunks), list(plan.stalled)
        for request in order:
            if num_tokens == 0:
                break
            wanted = min(len(request.tokens) - request.num_computed_tokens, num_tokens)
            assert self.blocks.asked[request.request_id] == wanted
            if stalled and stalled[0] is request:
                del stalled[0]
                assert not started
                continue
            chunk = chunks.pop(0)
            assert chunk.request is request
            assert 0 < chunk.num_tokens <= wanted
            num_tokens -= chunk.num_tokens
        assert not chunks
        assert not stalled
        assert plan.num_tokens == self.limits.max_batch_tokens - num_tokens
        return num_tokens == 0

    def _check_limits(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.limits.max_batch_tokens
        assert len(self.running) <= self.limits.max_requests_per_batch

    def _check_nobody_waits_without_need(self, plan: StepPlan) -> None:
        """The first that could start finds no room."""
        blocks, left = self.blocks, self.limits.max_batch_tokens - plan.num_tokens
        head = next((r for r in self.waiting.values() if not self._may_wait_for_a_page(r)), None)
        if head is None or len(self.running) == self.limits.max_requests_per_batch:
            return
        if self.running and blocks.accounts.free_share < self.limits.safety_margin:
            return
        if blocks.is_offloaded(head.request_id):
            num_tokens = min(len(head.tokens) - head.num_computed_tokens, left)
            assert not blocks.can_return(head, num_tokens)
        else:
            most = (len(head.tokens) - 1) // blocks.page_size
            num_cached = blocks.longest_prefix(head.page_hashes, most)
            num_tokens = min(len(head.tokens) - num_cached * blocks.page_size, left)
            assert not blocks.can_start(head, num_tokens, num_cached)

    # Room for it

    def make_room(self, plan: StepPlan, preempted: Preempted) -> None:
        assert plan is self.plan
        super().make_room(plan, preempted)
        stalled = self._stalled()
        assert not stalled or len(self.running) == 1 or self._can_go_on(stalled)

    def preempt(self, request: Request, preempted: Preempted) -> None:
        stalled = self._stalled()
        least_urgent = max(one.priority for one in stalled)
        newest = next(one for one in reversed(stalled) if one.priority == least_urgent)
        assert request is newest, "not the newest of the least urgent stalled requests"
        assert all(chunk.request is not request for chunk in self.plan.chunks)
        assert len(self.running) > 1 or self._lies_scattered(request), "the last running request"
        assert not self._can_go_on(stalled), "without need"
        before = (request.num_computed_tokens, request.status, request.tokens.copy())
        goes_to_host = self.blocks.has_swap_room(request)
        super().preempt(request, preempted)
        if goes_to_host:
            self.num_offloads += 1
            assert preempted.offloaded[-1] is request
            assert len(preempted.copies) == len(preempted.offloaded)
            assert (request.num_computed_tokens, request.status, request.tokens) == before
        else:
            self.num_resets += 1
            self.blocks.born.pop(request, None)
            assert preempted.reset[-1] is request
            assert (request.num_computed_tokens, request.status, request.tokens) == (
                0, RequestStatus.PENDING, before[2],
            )  # fmt: skip
        first = next(one for one in self.waiting.values() if one.priority >= request.priority)
        assert first is request, "it does not wait in front of those that are no more urgent"
        assert request.request_id not in self.running
        assert request.request_id not in self.blocks.tables

    def _lies_scattered(self, request: Request) -> bool:
        """Whether it takes more chunks than it would if it were admitted anew."""
        blocks = self.blocks
        return any(
            len(blocks.accounts.chunks(group)) > -(-blocks.pages(len(request.tokens)) // per_chunk)
            for group, per_chunk in enumerate(blocks.per_chunk)
            if blocks.groups[group].window is None
        )

    def _stalled(self) -> list[Request]:
        """Oldest first."""
        return [r for r in self.running.values() if r in self.plan.stalled]

    def _can_go_on(self, stalled: list[Request]) -> bool:
        lacking = [self.blocks.accounts.lacking(r.request_id, r.num_computed_tokens + 1) for r in stalled]
        return self.blocks.accounts.fits([sum(column) for column in zip(*lacking, strict=True)])


@dataclass
class Setup:
    """An engine with all its parts."""

    blocks: CheckedBlocks
    scheduler: CheckedScheduler
    builder: BatchBuilder
    runner: ToyRunner
    mover: ToyMover
    engine: Engine

    @classmethod
    def of(
        cls,
        layout: Layout,
        num_usable: int,
        *,
        window: int = 8,
        page_size: int = 4,
        policy: str = "fifo",
        max_batch_tokens: int = 64,
        max_requests_per_batch: int = 16,
        safety_margin: float = 0.0,
        sharing: bool = True,
        eviction: str = "lru",
        num_swap_units: int = 0,
        runner: BatchRunner | None = None,
    ) -> "Setup":
        num_chunks = NUM_RESERVED + num_usable
        blocks = CheckedBlocks(layout, window, page_size, num_chunks, safety_margin, eviction, num_swap_units)
        limits = StepLimits(max_batch_tokens, max_requests_per_batch, safety_margin)
        scheduler = CheckedScheduler(policy, limits, blocks, sharing)
        builder = BatchBuilder(page_size, len(blocks.groups))
        toy = ToyRunner(blocks.groups, page_size, num_chunks)
        mover = ToyMover(toy, num_swap_units)
        return cls(blocks, scheduler, builder, toy, mover, Engine(scheduler, blocks, builder, runner or toy, mover))

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)

    def step(self) -> dict[str, int]:
        """Tokens of each request in one step, in order."""
        self.engine.step()
        return self.planned()

    def planned(self) -> dict[str, int]:
        """Tokens of each request in the latest step, in order."""
        return {chunk.request.request_id: chunk.num_tokens for chunk in self.scheduler.plan.chunks}

    def run(self, max_steps: int = 2000) -> list[GenerationOutput]:
        """Step until there is nothing to do."""
        outputs: list[GenerationOutput] = []
        for _ in range(max_steps):
            if not self.engine.has_work:
                return outputs
            outputs += self.engine.step()
        raise AssertionError(f"requests hang: {[*self.scheduler.running, *self.scheduler.waiting]}")

    def check_nothing_leaks(self) -> None:
        """Every block is free or cached, every owner gone, the host memory free."""
        scheduler, blocks = self.scheduler, self.blocks
        assert not scheduler.running
        assert not scheduler.waiting
        blocks.accounts.check_all_free()
        assert blocks.swap.num_free == blocks.num_swap_units
        assert blocks.num_offloaded == 0
        for allocator, per_chunk in zip(blocks.allocators, blocks.per_chunk, strict=True):
            assert not any(map(allocator.num_owners, range(blocks.pool.num_chunks * per_chunk)))
        for left in (blocks._promised, blocks._promises, blocks._num_shared_pages, scheduler._awaited):
            assert not left
        assert not self.builder._rows
        assert sorted(self.builder._free_rows) == list(range(len(self.builder._num_logprobs)))
