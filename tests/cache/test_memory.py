"""The whole memory system against a twin that knows what lies where, token by token."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from legato.cache.allocator import PADDING_BLOCK
from legato.cache.block_manager import BlockManager
from legato.cache.eviction import EVICTION_POLICIES
from legato.cache.pool import AttentionGroup, ChunkLayout
from legato.cache.prefix import PageHasher
from legato.cache.swap import UnitCopies
from legato.engine.batch import BatchBuilder
from legato.engine.engine import Engine
from legato.engine.policy import SCHEDULING_POLICIES
from legato.engine.scheduler import Scheduler, StepLimits
from legato.request import Request
from tests.cache.accounts import LAYOUTS, NUM_RESERVED, Accounts, Layout
from tests.engine.toy import ToyMover, ToyRunner, make_request, toy_prompt

LONGEST = 64  # tokens of any request
BASES = ("abbababaabbbabaabababba" * 3, "abbababaabb" + "ccdcdcc" * 8, "b" * LONGEST)  # the first two begin alike


class State(Enum):
    WAITING = 0
    RUNNING = 1
    OFFLOADED = 2


@dataclass(eq=False)
class Job:
    """A request, as far as the cache is concerned.

    Attributes:
        text: all tokens that it can come to know.
        num_known: of those, its prompt and what it has generated.
        weights: how often the weights had changed when it started: whose pages it may see.
        num_scheduled: tokens that the pass under way computes.
        num_shared: leading pages that were shared.
        num_seen: `num_computed` when the manager last heard of it.
        places: for each group, tokens that have been granted a place.
        is_new: it was admitted or restored in the pass under way.
    """

    name: str
    text: list[int]
    num_known: int
    salt: str | None
    weights: int
    state: State = State.WAITING
    num_computed: int = 0
    num_scheduled: int = 0
    num_shared: int = 0
    num_seen: int = 0
    places: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    is_new: bool = False


class Texts:
    """A number for each text with its salt and weights: equal just where all of it is."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._numbers: dict[tuple[int, object], int] = {}
        self._before: list[int] = []
        self._pages: dict[int, tuple[int, ...]] = {}
        self._prefixes: dict[tuple[str, int], list[int]] = {}

    def prefixes(self, job: Job) -> list[int]:
        """The number of each prefix of the job's text, the shortest first: what a position's K and V depend on."""
        key = (job.name, job.weights)
        if key not in self._prefixes:
            numbers = [self._add(-1, (job.salt, job.weights))]
            for token in job.text:
                numbers.append(self._add(numbers[-1], token))
            self._prefixes[key] = numbers[1:]
        return self._prefixes[key]

    def page(self, number: int) -> tuple[int, ...]:
        """What lies in a complete page that ends with the text of that number."""
        if number not in self._pages:
            entries = [number]
            while len(entries) < self._page_size:
                entries.append(self._before[entries[-1]])
            self._pages[number] = tuple(reversed(entries))
        return self._pages[number]

    def _add(self, before: int, token: object) -> int:
        number = self._numbers.setdefault((before, token), len(self._before))
        if number == len(self._before):
            self._before.append(before)
        return number


Piece = tuple[
    int, int, tuple[int | None, ...]
]  # of a block: its group, which piece of it, and what each position holds


class Memory:
    """What lies in each unit of the cache and of the host."""

    def __init__(self, groups: Sequence[AttentionGroup], page_size: int) -> None:
        self.host: dict[int, Piece] = {}
        self._cache: dict[int, Piece] = {}
        self._units_per_block = ChunkLayout.of(groups, page_size).units_per_block
        self._blank = (None,) * page_size

    def pieces(self, group: int, block: int) -> list[Piece | None]:
        count = self._units_per_block[group]
        return [self._cache.get(block * count + i) for i in range(count)]

    def write(self, group: int, block: int, offset: int, texts: Sequence[int]) -> None:
        count = self._units_per_block[group]
        for i, piece in enumerate(self.pieces(group, block)):
            old = piece[2] if piece is not None and piece[:2] == (group, i) else self._blank
            new = (*old[:offset], *texts, *old[offset + len(texts) :])
            self._cache[block * count + i] = (group, i, new)

    def check(self, group: int, block: int, begin: int, texts: Sequence[int]) -> None:
        """Every piece of the block holds `texts` from position `begin` of the page on."""
        for i, piece in enumerate(self.pieces(group, block)):
            check_piece(piece, group, i, begin, texts)

    def store(self, copies: UnitCopies) -> None:
        for cache_unit, host_unit in zip(copies.cache_units, copies.host_units, strict=True):
            self.host[host_unit] = self._cache[cache_unit]

    def load(self, copies: UnitCopies) -> None:
        """What was copied back is lost, so that nothing can be copied back twice."""
        for cache_unit, host_unit in zip(copies.cache_units, copies.host_units, strict=True):
            self._cache[cache_unit] = self.host.pop(host_unit)


def check_piece(piece: Piece | None, group: int, index: int, begin: int, texts: Sequence[int]) -> None:
    assert piece is not None, "a page was never written"
    assert piece[:2] == (group, index), "a piece of another block"
    assert piece[2][begin : begin + len(texts)] == tuple(texts), "wrong content"


def blocks_of(chunks: Iterable[int], per_chunk: int) -> list[int]:
    return [block for chunk in chunks for block in range(chunk * per_chunk, (chunk + 1) * per_chunk)]


class Twin:
    """What can be found where, and who is about to compute what, told by what the manager was asked and answered.

    It knows what was lost by looking at the tables: a block that was taken as a blank one holds nothing of what it
    held, nor does anything else in a chunk that nobody owned before.

    Attributes:
        seen_to_happen: how often what, so that nobody relies on a test in which nothing happens.
        found_at: for each group, the block that holds a complete page, by the number of the page's text.
        held: the same the other way round.
        promised: which job computes a page, by the number of the page's text.
        swapped: host units of each offloaded job.
    """

    seen_to_happen: ClassVar[Counter[str]] = Counter()

    def __init__(self, manager: BlockManager, layout: Layout, window: int, num_chunks: int, policy: str) -> None:
        self.accounts = Accounts(manager, layout, num_chunks)
        self.groups = layout.groups(window)
        self.found_at: list[dict[int, int]] = [{} for _ in self.groups]
        self.held: list[dict[int, int]] = [{} for _ in self.groups]
        self.promised: dict[int, str] = {}
        self.swapped: dict[str, list[int]] = {}
        self._manager = manager
        self._policy = policy
        self._page_size = manager.page_size
        self._per_chunk = layout.blocks_per_chunk
        self._chunks = range(NUM_RESERVED, num_chunks)
        self._seen: dict[tuple[int, int], list[int]] = {}
        self._now = 0
        # When a chunk that nobody owns, or a block that nobody owns in a chunk of ours, was last let go:
        # not before the one, not after the other.
        self._idle: dict[tuple[int | None, int], tuple[int, int]] = {}
        self._filled: dict[int, int] = {}  # when each chunk was given content last
        self._parents: dict[int, int] = {}  # see `check_leaves_go_first`

    # Questions

    def seen(self, group: int, position: int) -> list[int]:
        """Pages with a position before `position` that a query there sees."""
        if (group, position) not in self._seen:
            window = self.groups[group].window
            first = 0 if window is None else max(0, position - window + 1)
            self._seen[group, position] = sorted({p // self._page_size for p in range(first, position)})
        return self._seen[group, position]

    def longest_prefix(self, pages: Sequence[int]) -> int:
        """The most pages of a text after which a query finds all that it sees."""
        return max(n for n in range(len(pages) + 1) if self._has_all(pages, n))

    def _has_all(self, pages: Sequence[int], num_pages: int) -> bool:
        return all(
            pages[page] in found_at
            for group, found_at in enumerate(self.found_at)
            for page in self.seen(group, num_pages * self._page_size)
        )

    def owned(self, without: str = "") -> list[set[int]]:
        """Blocks of each group that anybody owns."""
        owned: list[set[int]] = [set() for _ in self.groups]
        for name, tables in self._manager.tables.items():
            for group, table in enumerate(tables if name != without else ()):
                owned[group].update(block for block in table.blocks if block != PADDING_BLOCK)
        return owned

    def listed(self, name: str) -> list[dict[int, int]]:
        """For each group, a job's pages and their blocks."""
        tables = self._manager.tables[name]
        return [{page: b for page, b in enumerate(table.blocks) if b != PADDING_BLOCK} for table in tables]

    def snapshot(self) -> object:
        """All that a refusal must leave as it was."""
        manager = self._manager
        tables = {name: [(t.blocks.copy(), t.first_live) for t in tables] for name, tables in manager.tables.items()}
        cached = [allocator.num_cached_blocks for allocator in manager.allocators]
        return tables, cached, manager.pool.num_free, manager.pool.num_blank, manager.swap.num_free

    # What happens

    def tick(self) -> None:
        """Look at who has let go of what since the last call."""
        self._now += 1
        idle = set(self._idle_now(self.owned()))
        self._idle = {key: self._idle.get(key, (self._now, self._now)) for key in idle}

    def refused(self, found: Sequence[dict[int, int]]) -> None:
        """What a refused job had found may count as used just now."""
        for group, blocks in enumerate(found):
            for block in blocks.values():
                for key in ((None, block // self._per_chunk[group]), (group, block)):
                    if key in self._idle:
                        self._idle[key] = (self._idle[key][0], self._now)

    def took(self, owned: Sequence[set[int]], taken: Sequence[set[int]]) -> None:
        """Blank blocks were taken while `owned` were owned. No content is lost but for want of blank room."""
        in_use = self._in_use(owned)
        needed, least, fresh = 0, 0, set()
        lost = [(group, block) for group, blocks in enumerate(taken) for block in blocks if block in self.held[group]]
        for group, (blocks, per_chunk) in enumerate(zip(taken, self._per_chunk, strict=True)):
            assert not blocks & owned[group], "a block was taken from its owner"
            blank = set(blocks_of(in_use[group], per_chunk)) - owned[group] - self.held[group].keys()
            needed += -(-max(0, len(blocks) - len(blank)) // per_chunk)
            free = len(in_use[group]) * per_chunk - len(owned[group])
            least += -(-max(0, len(blocks) - free) // per_chunk)
            fresh |= {block // per_chunk for block in blocks} - in_use[group]
        lost += [key for key in self._held_in(fresh) if key not in lost]
        blank_chunks = set(self._chunks).difference(*in_use) - self._with_content()
        self._check_losses(owned, fresh, lost)
        self.seen_to_happen["a chunk is evicted"] += bool(fresh - blank_chunks)
        self.seen_to_happen["a block is evicted in a chunk of its group"] += any(
            block // self._per_chunk[group] not in fresh for group, block in lost
        )
        assert not lost or needed > len(blank_chunks), "content was lost though there was blank room"
        assert not fresh - blank_chunks or blank_chunks <= fresh, "a chunk was evicted though there was a blank one"
        assert not fresh - blank_chunks or len(fresh) == least, "a chunk was evicted where a block would do"
        for group, block in lost:
            text = self.held[group].pop(block)
            del self.found_at[group][text]
            self._parents.pop(text, None)

    def shared(self, name: str, pages: Sequence[int], first: int) -> None:
        """The job's pages from `first` on can be found, unless others that have owners already are in their place."""
        owned = self.owned()
        for group, blocks in enumerate(self.listed(name)):
            for page in range(first, len(pages)):
                known = self.found_at[group].get(pages[page])
                if page not in blocks or (known is not None and known in owned[group]):
                    self.seen_to_happen["a page is computed twice"] += blocks.get(page) not in self.held[group]
                    continue
                block = blocks[page]
                if known is not None:
                    del self.held[group][known]
                    self._parents.pop(pages[page], None)
                    self.seen_to_happen["a page is found in another place"] += 1
                assert block not in self.held[group], "a block was filled twice"
                self.found_at[group][pages[page]] = block
                self.held[group][block] = pages[page]
                self._filled[block // self._per_chunk[group]] = self._now
                if page and self.found_at[group].get(pages[page - 1]) == blocks.get(page - 1, PADDING_BLOCK):
                    self._parents[pages[page]] = pages[page - 1]
        for page in pages:
            if self.promised.get(page) == name:
                del self.promised[page]

    def left(self, name: str) -> None:
        """The job is not in the cache any more, nor on the host."""
        self.swapped.pop(name, None)
        self.promised = {page: promiser for page, promiser in self.promised.items() if promiser != name}

    def forgot(self) -> None:
        """The weights have changed."""
        for texts in (*self.found_at, *self.held, self.promised, self._parents):
            texts.clear()

    # Checks

    def check(self, hash_of: dict[int, bytes]) -> None:
        self.accounts.check()
        manager = self._manager
        in_use = set().union(*self._in_use(self.owned()))
        assert manager.pool.num_blank == len(set(self._chunks) - in_use - self._with_content())
        for allocator, found_at in zip(manager.allocators, self.found_at, strict=True):
            assert allocator.num_cached_blocks == len(found_at)
            for page, page_hash in hash_of.items():
                assert allocator.find(page_hash) == found_at.get(page), "found what is not there, or the reverse"
        for page, page_hash in hash_of.items():
            assert manager.is_promised(page_hash) == (page in self.promised)
        assert set(self.promised.values()) <= manager.tables.keys(), "promised by a job that does not run"
        self._check_swap_space()
        if len(self.groups) == 1 and self.groups[0].window is None and self._policy == "lru":
            self.check_leaves_go_first()

    def check_leaves_go_first(self) -> None:
        """A page that can be found was not outlived by one that its owner computed after it.

        Not so where the owner's own page is not the one that is found, since two jobs computed it at once: then the
        other job lets go of it when it likes.
        """
        for page in self.found_at[0]:
            assert page not in self._parents or self._parents[page] in self.found_at[0]

    def _check_swap_space(self) -> None:
        swap = self._manager.swap
        used = [unit for units in self.swapped.values() for unit in units]
        assert len(used) == len(set(used)), "a host unit is used twice"
        assert set(used) <= set(range(swap.num_units))
        assert swap.num_free == swap.num_units - len(used)
        assert self._manager.num_offloaded == len(self.swapped)
        assert all(self._manager.is_offloaded(name) for name in self.swapped)

    def _check_losses(self, owned: Sequence[set[int]], fresh: set[int], lost: list[tuple[int, int]]) -> None:
        """What was lost was first in the policy's order, or in its chunk's group's."""
        idle = set(self._idle_now(owned))
        evicted = {(None, chunk) for chunk in fresh} & idle
        rest = {key for key in idle - evicted if key[0] is None}
        if self._policy == "lru":
            self._check_oldest_went_first(evicted, rest)
        elif evicted and rest:
            filled = min(self._filled[chunk] for _, chunk in evicted)
            assert filled >= max(self._filled[chunk] for _, chunk in rest), "not what was filled last"
        for group in range(len(self.groups)):
            loose = {key for key in idle if key[0] == group}
            self._check_oldest_went_first(loose.intersection(lost), loose.difference(lost))

    def _check_oldest_went_first(self, gone: Iterable[tuple[int | None, int]], rest: set) -> None:
        now = (self._now + 1, self._now + 1)
        earliest = min((self._idle.get(key, now)[1] for key in rest), default=self._now + 1)
        assert all(self._idle.get(key, now)[0] <= earliest for key in gone), "not what was let go first"

    # Helpers

    def _in_use(self, owned: Sequence[set[int]]) -> list[set[int]]:
        """Chunks of each group in which a block is owned."""
        return [{block // per for block in blocks} for blocks, per in zip(owned, self._per_chunk, strict=True)]

    def _with_content(self) -> set[int]:
        return {block // per for held, per in zip(self.held, self._per_chunk, strict=True) for block in held}

    def _held_in(self, chunks: set[int]) -> list[tuple[int, int]]:
        """Blocks in those chunks that hold something, with their groups."""
        pairs = enumerate(zip(self.held, self._per_chunk, strict=True))
        return [(group, block) for group, (held, per) in pairs for block in blocks_of(chunks, per) if block in held]

    def _idle_now(self, owned: Sequence[set[int]]) -> Iterable[tuple[int | None, int]]:
        """Content that nobody owns: whole chunks, and single blocks in chunks where others are owned."""
        in_use = self._in_use(owned)
        all_in_use = set().union(*in_use)
        for group, (held, per_chunk) in enumerate(zip(self.held, self._per_chunk, strict=True)):
            for block in held.keys() - owned[group]:
                chunk = block // per_chunk
                assert chunk in in_use[group] or chunk not in all_in_use, "content in a chunk of another group"
                yield (group, block) if chunk in in_use[group] else (None, chunk)


class MemoryMachine(RuleBasedStateMachine):
    """Does all that an engine does to the cache, and in which order an engine never would.

    A pass is put together by several rules, as a step is: what is offloaded is copied first, then what is restored,
    then the pass writes. Whatever is checked of contents is checked when it has run.
    """

    num_steps = 0

    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)),
        page_size=st.sampled_from((2, 3, 4, 5)),
        window=st.integers(1, 20),
        num_usable=st.integers(1, 23),
        policy=st.sampled_from(sorted(EVICTION_POLICIES)),
        num_swap_units=st.sampled_from((1000, 30, 8, 0)),
    )
    def make(self, name: str, page_size: int, window: int, num_usable: int, policy: str, num_swap_units: int) -> None:
        layout, num_chunks = LAYOUTS[name], NUM_RESERVED + num_usable
        self.groups, self.page_size, self.num_swap_units = layout.groups(window), page_size, num_swap_units
        self.manager = BlockManager(self.groups, page_size, num_chunks, EVICTION_POLICIES[policy](), num_swap_units)
        self.twin = Twin(self.manager, layout, window, num_chunks, policy)
        self.units_per_block = ChunkLayout.of(self.groups, page_size).units_per_block
        self.texts, self.memory = Texts(page_size), Memory(self.groups, page_size)
        self.hashers = [PageHasher(page_size)]
        self.hash_of: dict[int, bytes] = {}  # of every page that was ever hashed
        self.jobs: list[Job] = []
        self.num_jobs = 0
        self.stores: list[UnitCopies] = []
        self.loads: list[UnitCopies] = []
        self.failed = False

    # What the machine knows

    def pages(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.page_size))

    def page_texts(self, job: Job, num_pages: int) -> list[int]:
        prefixes = self.texts.prefixes(job)
        return [prefixes[(page + 1) * self.page_size - 1] for page in range(num_pages)]

    def those(self, state: State) -> list[Job]:
        return [job for job in self.jobs if job.state is state]

    @property
    def evictable(self) -> list[Job]:
        """Those that the pass under way leaves alone."""
        return [job for job in self.those(State.RUNNING) if not (job.num_scheduled or job.is_new)]

    # Rules

    @rule(
        base=st.sampled_from((0, 0, 0, 1, 2)),
        fork=st.none() | st.none() | st.integers(0, 40),
        variant=st.integers(0, 2),
        length=st.integers(1, 40),
        salt=st.sampled_from((None, None, None, "x", "y")),
        budget=st.integers(1, 8) | st.integers(1, 40),
        uses_cache=st.sampled_from((True, True, False)),
    )
    def submit(
        self, base: int, fork: int | None, variant: int, length: int, salt: str | None, budget: int, uses_cache: bool
    ) -> None:
        """A new job, started if it may: a text of its own after the first `fork` tokens of a common one."""
        if len(self.jobs) > 8:
            return
        self.begin()
        text = [ord(letter) for letter in BASES[base][:LONGEST]]
        if fork is not None:
            text[fork:] = [(position * 7 + variant * 13) % 5 for position in range(fork, LONGEST)]
        job = Job(f"job {self.num_jobs}", text, length, salt, len(self.hashers) - 1)
        self.num_jobs += 1
        self.jobs.append(job)
        self.start(job, budget, uses_cache)

    @rule(index=st.integers(0, 99), budget=st.integers(1, 40), uses_cache=st.sampled_from((True, True, False)))
    def go_on(self, index: int, budget: int, uses_cache: bool) -> None:
        """Start one that waits, or restore one."""
        jobs = self.those(State.WAITING) + self.those(State.OFFLOADED)
        if jobs:
            self.begin()
            self.start(jobs[index % len(jobs)], budget, uses_cache)

    @rule(index=st.integers(0, 99), budget=st.integers(1, 40), uses_cache=st.sampled_from((True, True, False)))
    def restore_one(self, index: int, budget: int, uses_cache: bool) -> None:
        if jobs := self.those(State.OFFLOADED):
            self.begin()
            self.restore(jobs[index % len(jobs)], budget, uses_cache)

    @rule(index=st.integers(0, 99), num_tokens=st.integers(1, 20))
    def run_one(self, index: int, num_tokens: int) -> None:
        """Another chunk or token in the pass under way."""
        jobs = [job for job in self.those(State.RUNNING) if not job.num_scheduled]
        if jobs:
            self.begin()
            self.schedule(jobs[index % len(jobs)], num_tokens)

    @rule(budget=st.integers(1, 4) | st.integers(1, 30), times=st.integers(1, 5), starts=st.booleans())
    def step(self, budget: int, times: int, starts: bool) -> None:
        """Whole steps, with as much as an engine does in each."""
        if not self.jobs:
            return
        self.begin()
        for _ in range(times):
            self.engine_step(budget, starts)

    @rule()
    def run(self) -> None:
        """The pass under way."""
        self.begin()
        self.run_pass()

    @rule(index=st.integers(0, 99), resets=st.sampled_from((False, False, False, True)))
    def evict(self, index: int, resets: bool) -> None:
        """Offload a running job if the host has room, or reset it."""
        self.begin()
        if self.loads:
            self.run_pass()  # engines never offload after they have restored
        if not self.evictable:
            self.run_pass()
        if jobs := self.evictable:
            self.make_room(jobs[index % len(jobs)], resets)

    @rule(index=st.integers(0, 99))
    def end(self, index: int) -> None:
        """Finished, or cancelled wherever it is."""
        self.begin()
        self.run_pass()
        if self.jobs:
            self.remove(self.jobs[index % len(self.jobs)])

    @rule(sure=st.sampled_from((False, False, True)))
    def change_weights(self, sure: bool) -> None:
        if not sure or len(self.hashers) > 3:
            return
        self.begin()
        self.run_pass()
        self.note("weights change under a job", any(job.num_computed for job in self.jobs))
        self.manager.forget_content()
        self.twin.forgot()
        hasher = PageHasher(self.page_size)
        for _ in self.hashers:
            hasher.weights_changed()
        self.hashers.append(hasher)
        for job in self.jobs:
            if job.state is not State.RUNNING and not job.num_computed:
                job.hashes.clear()
                job.weights = len(self.hashers) - 1
        self.twin.tick()

    @rule(wanted=st.lists(st.integers(0, 30), min_size=3, max_size=3))
    def ask(self, wanted: list[int]) -> None:
        """Questions, and the return of blocks by a job that has none, change nothing."""
        self.begin()
        before = self.twin.snapshot()
        self.manager.free("stranger")
        wanted = wanted[: len(self.groups)]
        assert self.manager.fits(wanted) == self.twin.accounts.fits(wanted)
        assert self.twin.snapshot() == before

    # The parts of a pass

    def begin(self) -> None:
        MemoryMachine.num_steps += 1
        self.failed = True

    def note(self, what: str, happens: object = True) -> None:
        self.twin.seen_to_happen[what] += bool(happens)

    def engine_step(self, budget: int, starts: bool) -> None:
        """Running jobs; if any is stalled, room for it; else those that wait, as far as they fit."""
        stalled = []
        for job in self.those(State.RUNNING):
            if not job.num_scheduled and not self.schedule(job, budget):
                stalled.append(job)
        while len(stalled) > 1 and not self.loads:
            job = stalled.pop()
            if not job.is_new:
                self.make_room(job, resets=False)
        if starts and not stalled:
            for job in self.those(State.OFFLOADED) + self.those(State.WAITING):
                self.start(job, budget, uses_cache=True)
        self.run_pass()

    def start(self, job: Job, budget: int, uses_cache: bool) -> None:
        if job.state is State.OFFLOADED:
            self.restore(job, budget, uses_cache)
        elif not (uses_cache and self.awaits_prefix(job)):
            self.admit(job, budget, uses_cache)

    def hash_pages(self, job: Job) -> None:
        """Under the weights it started with."""
        hasher = self.hashers[job.weights]
        hasher.extend(job.hashes, hasher.root(job.salt), job.text[: job.num_known])
        self.hash_of.update(zip(self.page_texts(job, len(job.hashes)), job.hashes, strict=True))

    def find_prefix(self, job: Job, num_pages: int) -> int:
        found = self.manager.find_prefix(job.hashes[:num_pages])
        assert found == self.twin.longest_prefix(self.page_texts(job, min(num_pages, len(job.hashes))))
        return found

    def awaits_prefix(self, job: Job) -> bool:
        self.hash_pages(job)
        found = self.find_prefix(job, len(job.hashes))
        awaits = found < len(job.hashes) and self.manager.is_promised(job.hashes[found])
        self.note("a promised page is awaited", awaits)
        return awaits

    def admit(self, job: Job, budget: int, uses_cache: bool) -> None:
        self.hash_pages(job)
        cached = self.find_prefix(job, (job.num_known - 1) // self.page_size) if uses_cache else 0
        num_tokens = min(job.num_known - cached * self.page_size, budget)
        if self.claim_new(job, cached, cached * self.page_size + num_tokens):
            self.plan(job, num_tokens)
        elif not self.manager.tables and self.claim_new(job, cached, 0):
            self.schedule(job, num_tokens)

    def claim_new(self, job: Job, cached: int, num_first_tokens: int) -> bool:
        """Admitted, or refused for want of room and nothing has changed."""
        computed = cached * self.page_size
        places = [job.num_known if group.window is None else num_first_tokens for group in self.groups]
        pages = self.page_texts(job, len(job.hashes))
        found = [{p: at[pages[p]] for p in self.twin.seen(i, computed)} for i, at in enumerate(self.twin.found_at)]
        wanted = [max(0, self.pages(place) - cached) for place in places]
        owned, before = self.twin.owned(), self.twin.snapshot()
        admitted = self.manager.admit(job.name, job.num_known, num_first_tokens, job.hashes, cached)
        if not self.has_claimed(job, admitted, wanted, found, owned, before):
            return False
        job.num_computed = job.num_seen = computed
        job.num_shared = cached
        job.places = [max(place, computed) for place in places]
        for page, page_hash in zip(pages[cached:], job.hashes[cached:], strict=True):
            assert self.manager.is_promised(page_hash)
            self.note("a page is promised by two", page in self.twin.promised)
            self.twin.promised.setdefault(page, job.name)
        return True

    def has_claimed(
        self,
        job: Job,
        admitted: bool,
        wanted: list[int],
        found: list[dict[int, int]],
        owned: list[set[int]],
        before: object,
    ) -> bool:
        """Checks an answer about `wanted` blank blocks besides those `found`, given what was owned before."""
        self.note("a job is refused that could share", not admitted and any(found))
        if not admitted:
            assert not self.twin.accounts.fits(wanted, [blocks.values() for blocks in found]), "refused without need"
            assert self.twin.snapshot() == before
            self.twin.refused(found)
            return False
        taken = []
        for blocks, there, others in zip(self.twin.listed(job.name), found, owned, strict=True):
            assert there.items() <= blocks.items(), "what was found is not shared"
            self.note("a block that another job owns is shared", others & set(there.values()))
            self.note("a block that nobody owns is shared", set(there.values()) - others)
            taken.append({block for page, block in blocks.items() if page not in there})
            others.update(there.values())
        assert [len(blocks) for blocks in taken] == wanted
        self.twin.took(owned, taken)
        job.state, job.is_new = State.RUNNING, True
        self.twin.tick()
        return True

    def schedule(self, job: Job, num_tokens: int) -> bool:
        """Grow a running job and run it, unless it is stalled."""
        num_tokens = min(job.num_known - job.num_computed, num_tokens)
        owned, listed = self.twin.owned(without=job.name), self.twin.listed(job.name)
        granted = self.manager.grow(job.name, job.num_computed, num_tokens)
        self.check_grant(job, granted, num_tokens)
        taken = []
        for group, (old, new) in enumerate(zip(listed, self.twin.listed(job.name), strict=True)):
            taken.append({block for page, block in new.items() if page not in old})
            seen = self.first_seen_page(group, job.num_computed)
            owned[group].update(block for page, block in old.items() if page >= seen)
        self.twin.took(owned, taken)
        job.num_seen = job.num_computed
        job.places = [max(place, job.num_computed + granted) for place in job.places]
        self.twin.tick()
        self.plan(job, granted)
        return granted > 0

    def first_seen_page(self, group: int, position: int) -> int:
        """By the query at `position`, which sees itself."""
        return min({p // self.page_size for p in range(position + 1) if self.sees(group, position, p)})

    def sees(self, group: int, position: int, other: int) -> bool:
        window = self.groups[group].window
        return window is None or position - other < window

    def check_grant(self, job: Job, granted: int, num_tokens: int) -> None:
        assert 0 <= granted <= num_tokens
        if granted < num_tokens:
            lacking = self.twin.accounts.lacking(job.name, job.num_computed + granted + 1)
            assert not self.twin.accounts.fits(lacking), "stalled without need"

    def plan(self, job: Job, num_tokens: int) -> None:
        """These tokens run in the pass under way; the pages they complete are shared at once."""
        job.num_scheduled = num_tokens
        num_pages = (job.num_computed + num_tokens) // self.page_size
        if num_pages > job.num_shared:
            self.hash_pages(job)
            self.manager.share(job.name, job.hashes[:num_pages])
            self.twin.shared(job.name, self.page_texts(job, num_pages), job.num_shared)
            job.num_shared = num_pages

    def make_room(self, job: Job, resets: bool) -> None:
        if not resets:
            self.offload(job)
        self.note("a job is reset", job.state is State.RUNNING)
        if job.state is State.RUNNING:
            self.manager.free(job.name)
            self.twin.left(job.name)
            job.state, job.num_computed = State.WAITING, 0
        self.twin.tick()

    def live(self, job: Job) -> list[range]:
        """Pages of each group with something in them that the next query sees, or that it adds to."""
        computed = job.num_computed
        return [range(self.first_seen_page(group, computed), self.pages(computed)) for group in range(len(self.groups))]

    def offload(self, job: Job) -> None:
        """Offloaded with just what its next query sees; or refused, and nothing but the window has moved."""
        live = [len(pages) for pages in self.live(job)]
        num_units = sum(count * units for count, units in zip(live, self.units_per_block, strict=True))
        num_used = sum(map(len, self.twin.swapped.values()))
        moves = job.num_seen < job.num_computed
        before = self.twin.snapshot()
        copies = self.manager.offload(job.name, job.num_computed)
        assert (copies is None) == (num_used + num_units > self.num_swap_units)
        job.num_seen = job.num_computed
        self.note("a job is offloaded" if copies else "a job is refused by the host")
        if copies is None:
            assert moves or self.twin.snapshot() == before
            return
        assert len(copies.cache_units) == len(set(copies.cache_units)) == len(copies.host_units) == num_units
        self.twin.left(job.name)
        self.twin.swapped[job.name] = copies.host_units.copy()
        self.stores.append(copies)
        job.state = State.OFFLOADED

    def restore(self, job: Job, budget: int, uses_cache: bool) -> None:
        num_tokens = min(job.num_known - job.num_computed, budget)
        if self.claim_again(job, num_tokens, uses_cache):
            self.plan(job, num_tokens)
        elif not self.manager.tables and self.claim_again(job, 0, uses_cache):
            self.schedule(job, num_tokens)

    def claim_again(self, job: Job, num_tokens: int, uses_cache: bool) -> bool:
        """Restored, or refused for want of room and nothing has changed."""
        computed = job.num_computed
        hashes = job.hashes[: computed // self.page_size] if uses_cache else []
        texts = self.page_texts(job, len(hashes))
        places = [job.num_known if group.window is None else computed + num_tokens for group in self.groups]
        found = [
            {p: at[texts[p]] for p in pages if p < len(texts) and texts[p] in at}
            for pages, at in zip(self.live(job), self.twin.found_at, strict=True)
        ]
        wanted = []
        for pages, there, place in zip(self.live(job), found, places, strict=True):
            wanted.append(len(pages) - len(there) + max(0, self.pages(place) - self.pages(computed)))
        owned, before = self.twin.owned(), self.twin.snapshot()
        copies = self.manager.restore(job.name, job.num_known, computed + num_tokens, hashes)
        if not self.has_claimed(job, copies is not None, wanted, found, owned, before):
            return False
        kept = zip(self.live(job), found, self.units_per_block, strict=True)
        num_units = sum((len(pages) - len(there)) * units for pages, there, units in kept)
        assert len(copies.cache_units) == len(set(copies.cache_units)) == len(copies.host_units) == num_units
        assert set(copies.host_units) <= set(self.twin.swapped[job.name])
        self.twin.left(job.name)
        self.twin.shared(job.name, texts, 0)
        self.note("a page is restored from the cache", any(found))
        self.note("a page is restored from the host", num_units)
        self.loads.append(copies)
        job.num_shared, job.num_seen = len(hashes), computed
        job.places = [max(place, computed) for place in places]
        return True

    def remove(self, job: Job) -> None:
        self.note(f"a job ends, {job.state.name.lower()}")
        self.manager.free(job.name)
        self.twin.left(job.name)
        self.jobs.remove(job)
        self.twin.tick()

    def run_pass(self) -> None:
        """Copy and write, and see that all is where it should be."""
        for copies in self.stores:
            self.memory.store(copies)
        for copies in self.loads:
            self.memory.load(copies)
        written: set[tuple[int, int, int]] = set()
        for job in self.jobs:
            self.write(job, written)
        self.stores, self.loads = [], []
        for job in self.jobs.copy():
            job.num_computed += job.num_scheduled
            job.num_scheduled, job.is_new = 0, False
            if job.state is State.RUNNING and job.num_computed == job.num_known:
                job.num_known += 1
                if job.num_known > LONGEST:
                    self.remove(job)
        self.check_contents()

    def write(self, job: Job, written: set[tuple[int, int, int]]) -> None:
        begin, end, size = job.num_computed, job.num_computed + job.num_scheduled, self.page_size
        prefixes = self.texts.prefixes(job)
        for group, blocks in enumerate(self.twin.listed(job.name) if begin < end else ()):
            for page in range(begin // size, self.pages(end)):
                first, last = max(begin, page * size), min(end, (page + 1) * size)
                assert not written & {(group, blocks[page], p) for p in range(first, last)}, "two write in one place"
                written |= {(group, blocks[page], p) for p in range(first, last)}
                self.memory.write(group, blocks[page], first % size, prefixes[first:last])

    # Checks

    def check_contents(self) -> None:
        for job in self.jobs:
            if job.state is State.RUNNING:
                self.check_what_is_seen(job)
            elif job.state is State.OFFLOADED:
                self.check_what_is_on_the_host(job)
        for group, held in enumerate(self.twin.held):
            for block, text in held.items():
                self.memory.check(group, block, 0, self.texts.page(text))

    def check_what_is_seen(self, job: Job) -> None:
        prefixes = self.texts.prefixes(job)
        for group, table in enumerate(self.manager.tables[job.name]):
            for page in self.twin.seen(group, job.num_computed):
                first, end = page * self.page_size, min((page + 1) * self.page_size, job.num_computed)
                while not self.sees(group, job.num_computed, first):
                    first += 1
                self.memory.check(group, table.blocks[page], first % self.page_size, prefixes[first:end])

    def check_what_is_on_the_host(self, job: Job) -> None:
        prefixes = self.texts.prefixes(job)
        pieces = []
        for group, (pages, count) in enumerate(zip(self.live(job), self.units_per_block, strict=True)):
            pieces += [(group, page, index) for page in pages for index in range(count)]
        for unit, (group, page, index) in zip(self.twin.swapped[job.name], pieces, strict=True):
            first, end = page * self.page_size, min((page + 1) * self.page_size, job.num_computed)
            while not self.sees(group, job.num_computed, first):
                first += 1
            check_piece(self.memory.host[unit], group, index, first % self.page_size, prefixes[first:end])

    @invariant()
    def accounts_agree(self) -> None:
        self.twin.check(self.hash_of)
        assert self.manager.tables.keys() == {job.name for job in self.those(State.RUNNING)}
        assert self.twin.swapped.keys() == {job.name for job in self.those(State.OFFLOADED)}

    @invariant()
    def tables_hold_every_place_that_a_query_may_see_and_no_other(self) -> None:
        for job in self.those(State.RUNNING):
            assert self.manager.num_shared_pages(job.name) == job.num_shared
            for group, (table, places) in enumerate(zip(self.manager.tables[job.name], job.places, strict=True)):
                assert len(table.blocks) == self.pages(places)
                first = min(self.first_seen_page(group, job.num_seen), len(table.blocks))
                assert [block != PADDING_BLOCK for block in table.blocks] == [
                    page >= first for page in range(len(table.blocks))
                ]
                assert table.first_live == first
        self.failed = False

    def teardown(self) -> None:
        """When all have ended, everything is free, and each can have it all for itself."""
        if not hasattr(self, "manager") or self.failed:
            return
        self.run_pass()
        jobs = self.jobs.copy()
        for job in jobs:
            self.remove(job)
        self.accounts_agree()
        assert not self.twin.promised
        self.twin.accounts.check_all_free()
        for job in jobs:
            self.come_again(job)
        for job in jobs:
            admitted = self.manager.admit(job.name, job.num_known, 1)
            assert admitted or not self.manager.holds_alone(job.num_known)
            self.manager.free(job.name)

    def come_again(self, job: Job) -> None:
        """With what is left of it in the cache."""
        self.jobs.append(job)
        job.state, job.num_computed = State.WAITING, 0
        self.admit(job, LONGEST, uses_cache=True)
        self.run_pass()
        self.accounts_agree()
        if job in self.jobs:
            self.remove(job)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=1000, stateful_step_count=55, deadline=None, report_multiple_bugs=False)


def test_the_machine_has_gone_far_and_met_with_everything() -> None:
    if not MemoryMachine.num_steps:
        pytest.skip("the machine has not run")
    assert MemoryMachine.num_steps >= 20_000
    rare = {what: count for what, count in Twin.seen_to_happen.items() if count < 20}
    assert not rare
    assert len(Twin.seen_to_happen) == 18


def make_engine(layout: Layout, num_usable: int, num_swap_units: int = 0) -> tuple[Engine, BlockManager]:
    """One with prefix caching, pages of 4 and a window of 8."""
    groups, num_chunks = layout.groups(8), NUM_RESERVED + num_usable
    blocks = BlockManager(groups, 4, num_chunks, num_swap_units=num_swap_units)
    scheduler = Scheduler(SCHEDULING_POLICIES["fifo"], StepLimits(64, 16, 0.0), blocks, PageHasher(4))
    runner = ToyRunner(groups, 4, num_chunks)
    return Engine(scheduler, blocks, BatchBuilder(4, len(groups)), runner, ToyMover(runner, num_swap_units)), blocks


def run_to_its_end(engine: Engine, request: Request) -> None:
    engine.submit(request)
    for _ in range(100):
        if engine.has_work:
            engine.step()
            assert engine.stats.num_batch_tokens, "a step in which nothing is computed"
    assert not engine.has_work


@pytest.mark.parametrize("num_swap_units", [0, 1000])
def test_a_request_alone_in_the_cache_gets_to_its_end_whatever_lies_cached(num_swap_units: int) -> None:
    """A chunk holds 5 full blocks or 1 sliding one. 5 pages with a window of 8 take 1 chunk and 3: all there are.
    They do not fit if full blocks keep clear of what is cached in the first one's chunk, and lie in 2."""
    engine, blocks = make_engine(LAYOUTS["3 full, 15 sliding"], 4, num_swap_units)
    assert blocks.holds_alone(20)
    text = toy_prompt("text", 18)
    run_to_its_end(engine, make_request("first", text[:7], 2))
    run_to_its_end(engine, make_request("second", text, 2))
    assert engine.stats.num_cached_tokens == 4


def test_a_page_begun_before_the_weights_changed_is_not_shared_after() -> None:
    """The first page is complete, and hashed, only when two of its tokens have been computed with the old weights."""
    engine, _ = make_engine(LAYOUTS["full"], 20)
    old = make_request("old", 2, 20)
    engine.submit(old)
    engine.step()
    engine.forget_prefixes()
    while len(old.tokens) < 8:
        engine.step()
    new = make_request("new", old.tokens[:6], 2)
    engine.submit(new)
    engine.step()
    assert new.num_cached_tokens == 0


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_the_policy_asked_for_is_the_one_used(name: str) -> None:
    policy = EVICTION_POLICIES[name]()
    assert BlockManager(LAYOUTS["full"].groups(8), 4, 9, policy).pool._policy is policy


def test_no_content_is_lost_in_a_chunk_as_long_as_blank_ones_are_enough() -> None:
    """A chunk holds 3 full blocks: of the one in use 2 keep pages of a job that has left, and one is blank."""
    manager = BlockManager(LAYOUTS["2 full, 3 sliding"].groups(8), 4, NUM_RESERVED + 4)
    hashes = [bytes([page]) for page in range(3)]
    assert manager.admit("left", 12, 12, hashes)
    manager.share("left", hashes)
    assert manager.admit("stays", 4, 0, hashes[:1], 1)
    manager.free("left")
    assert manager.pool.num_blank == 1
    assert manager.admit("other", 12, 0)
    assert [manager.allocators[0].find(page_hash) is not None for page_hash in hashes] == [True] * 3
