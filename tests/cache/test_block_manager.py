"""The cache's accounts, against accounts counted by brute force from the block tables."""

from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from legato.cache.allocator import PADDING_BLOCK
from legato.cache.block_manager import BlockManager
from legato.cache.eviction import LeastRecentlyUsed
from legato.cache.pool import ChunkLayout, ChunkPool, chunks_for_blocks
from tests.cache.accounts import LAYOUTS, NUM_RESERVED, Accounts, Layout

layout_names = st.sampled_from(sorted(LAYOUTS))
page_sizes = st.sampled_from((4, 4, 5, 7, 16))
windows = st.integers(1, 40)
pool_sizes = st.integers(NUM_RESERVED + 1, 20)


@dataclass
class Holder:
    """What the machine knows of a request.

    Attributes:
        num_computed: tokens in the cache.
        num_seen: `num_computed` when the manager last heard of it.
        places: for each group, tokens that have been granted a place.
    """

    num_computed: int
    num_seen: int
    places: list[int]


class BlockManagerMachine(RuleBasedStateMachine):
    """Admits, grows and frees requests as a scheduler does."""

    @initialize(name=layout_names, page_size=page_sizes, window=windows, num_chunks=pool_sizes)
    def make(self, name: str, page_size: int, window: int, num_chunks: int) -> None:
        layout = LAYOUTS[name]
        self.groups = layout.groups(window)
        self.page_size = page_size
        self.manager = BlockManager(self.groups, page_size, num_chunks)
        self.accounts = Accounts(self.manager, layout, num_chunks)
        self.holders: dict[str, Holder] = {}
        self.num_requests = 0

    def pages(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.page_size))

    def pick(self, index: int) -> str:
        return list(self.holders)[index % len(self.holders)]

    def snapshot(self) -> object:
        tables = {
            request_id: [(table.blocks.copy(), table.first_live) for table in tables]
            for request_id, tables in self.manager.tables.items()
        }
        return tables, self.manager.pool.num_free

    @rule(num_tokens=st.integers(1, 40), num_first_tokens=st.integers(0, 40))
    def admit(self, num_tokens: int, num_first_tokens: int) -> None:
        num_first_tokens = min(num_tokens, num_first_tokens)
        places = [num_tokens if group.window is None else num_first_tokens for group in self.groups]
        fits = self.accounts.fits([self.pages(n) for n in places])
        before = self.snapshot()
        request_id = f"request {self.num_requests}"
        self.num_requests += 1
        assert self.manager.admit(request_id, num_tokens, num_first_tokens) == fits
        if fits:
            self.holders[request_id] = Holder(num_first_tokens, 0, places)
        else:
            assert self.snapshot() == before

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 99), steps=st.lists(st.integers(1, 20), min_size=1, max_size=8), computes=st.booleans())
    def grow(self, index: int, steps: list[int], computes: bool) -> None:
        """As a few steps do; without `computes` the last had no use for its places after all."""
        request_id = self.pick(index)
        holder = self.holders[request_id]
        for num_tokens in steps:
            granted = self.manager.grow(request_id, holder.num_computed, num_tokens)
            assert 0 <= granted <= num_tokens
            end = holder.num_computed + granted
            if granted < num_tokens:
                assert not self.accounts.fits(self.accounts.lacking(request_id, end + 1))
            holder.places = [max(place, end) for place in holder.places]
            holder.num_seen = holder.num_computed
            holder.num_computed = end
            self.tables_hold_every_place_that_a_query_may_see_and_no_other()
        if not computes:
            holder.num_computed = holder.num_seen

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 99))
    def free(self, index: int) -> None:
        request_id = self.pick(index)
        self.manager.free(request_id)
        del self.holders[request_id]

    @rule(index=st.integers(0, 99), num_tokens=st.integers(0, 90), more=st.integers(0, 9))
    def ask(self, index: int, num_tokens: int, more: int) -> None:
        """Questions, and the return of blocks by a request that has none, change nothing."""
        before = self.snapshot()
        self.manager.free("stranger")
        wanted = [(num_tokens + more * group) // self.page_size for group in range(len(self.groups))]
        assert self.manager.fits(wanted) == self.accounts.fits(wanted)
        if self.holders:
            request_id = self.pick(index)
            assert self.manager.lacking(request_id, num_tokens) == self.accounts.lacking(request_id, num_tokens)
        assert self.snapshot() == before

    @invariant()
    def accounts_agree(self) -> None:
        self.accounts.check()
        assert list(self.manager.tables) == list(self.holders)

    @invariant()
    def tables_hold_every_place_that_a_query_may_see_and_no_other(self) -> None:
        for request_id, holder in self.holders.items():
            for group, table, places in zip(self.groups, self.manager.tables[request_id], holder.places, strict=True):
                assert len(table.blocks) == self.pages(places)
                first_seen = 0 if group.window is None else holder.num_seen - group.window + 1
                for page, block in enumerate(table.blocks):
                    visible = any(p >= first_seen for p in range(page * self.page_size, (page + 1) * self.page_size))
                    assert (block != PADDING_BLOCK) == visible
                released = [block == PADDING_BLOCK for block in table.blocks]
                assert table.first_live == sum(released)
                assert table.num_live == len(released) - sum(released)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for request_id in self.holders:
                self.manager.free(request_id)
            self.accounts.check_all_free()


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [4, 7, 16])
def test_blocks_of_every_group_tile_the_chunk(name: str, page_size: int) -> None:
    groups = LAYOUTS[name].groups(8)
    layout = ChunkLayout.of(groups, page_size)
    assert layout.blocks_per_chunk == LAYOUTS[name].blocks_per_chunk
    assert {
        count * len(group.layers) * 2 * page_size * group.num_kv_heads * group.head_dim
        for count, group in zip(layout.blocks_per_chunk, groups, strict=True)
    } == {layout.chunk_size}


@pytest.mark.parametrize("name", LAYOUTS)
def test_num_blocks_whole_model_blocks_fit_in_their_chunks(name: str) -> None:
    groups = LAYOUTS[name].groups(8)
    for num_blocks in range(1, 20):
        num_chunks = chunks_for_blocks(num_blocks, groups, 4)
        assert BlockManager(groups, 4, NUM_RESERVED + num_chunks).fits([num_blocks] * len(groups))


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if len(layout.layers) == 2])
def test_chunks_migrate_between_full_and_sliding(name: str) -> None:
    layout, page_size, num_chunks = LAYOUTS[name], 4, 9
    manager = BlockManager(layout.groups(100), page_size, num_chunks)
    accounts = Accounts(manager, layout, num_chunks)
    full, sliding = (per_chunk * accounts.num_usable * page_size for per_chunk in layout.blocks_per_chunk)
    for _ in range(2):
        assert manager.admit("sliding", 0, sliding)
        accounts.check()
        assert manager.free_share == 0
        assert not manager.admit("one more", 1, 0)
        manager.free("sliding")
        assert manager.admit("full", full, 0)
        accounts.check()
        assert manager.free_share == 0
        assert not manager.admit("one more", 0, 1)
        manager.free("full")
    accounts.check_all_free()


def test_a_partly_freed_chunk_stays_with_its_group_until_its_last_block_is_free() -> None:
    manager = BlockManager(LAYOUTS["5 full, 2 sliding"].groups(8), 4, NUM_RESERVED + 1)
    assert manager.admit("a", 4, 0)
    assert manager.admit("b", 4, 0)
    assert not manager.admit("sliding", 0, 4)
    manager.free("a")
    assert not manager.admit("sliding", 0, 4)
    manager.free("b")
    assert manager.admit("sliding", 0, 4)


def shared_by_two(layout: Layout, num_chunks: int) -> tuple[BlockManager, Accounts]:
    """Requests "a" and "b" of 3 pages of 4 each, which share the first 2."""
    manager = BlockManager(layout.groups(8), 4, num_chunks)
    hashes = [b"page 0", b"page 1"]
    assert manager.admit("a", 12, 12, hashes)
    manager.share("a", hashes)
    assert manager.find_prefix(hashes) == 2
    assert manager.admit("b", 12, 12, hashes, 2)
    return manager, Accounts(manager, layout, num_chunks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shared_block_is_read_by_each_owner_and_free_when_the_last_has_left(name: str) -> None:
    manager, accounts = shared_by_two(LAYOUTS[name], 20)
    accounts.check()
    for group, allocator in enumerate(manager.allocators):
        first, second, third = zip(*(tables[group].blocks for tables in manager.tables.values()), strict=True)
        assert [len(set(blocks)) for blocks in (first, second, third)] == [1, 1, 2]
        assert [allocator.num_owners(block) for block in (*first, *second, *third)] == [2, 2, 2, 2, 1, 1]
    manager.free("a")
    accounts.check()
    manager.free("b")
    accounts.check()
    accounts.check_all_free()
    assert manager.find_prefix([b"page 0", b"page 1"]) == 2


def test_a_chunk_is_free_for_others_when_no_block_in_it_is_owned_though_some_hold_content() -> None:
    """A chunk holds 5 full blocks or 1 sliding one: 2 shared blocks and 1 of each owner are 1 chunk and 4."""
    manager, accounts = shared_by_two(LAYOUTS["3 full, 15 sliding"], NUM_RESERVED + 5)
    assert accounts.num_free_chunks == 0
    manager.free("a")
    assert accounts.num_free_chunks == 1
    assert not manager.admit("full", 8 * 4, 0)
    assert manager.admit("full", 7 * 4, 0)
    manager.free("full")
    manager.free("b")
    assert manager.admit("full", 5 * 5 * 4, 0)
    assert manager.find_prefix([b"page 0", b"page 1"]) == 0


@given(
    name=layout_names,
    page_size=page_sizes,
    window=windows,
    num_chunks=pool_sizes,
    chunks=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    prompt_share=st.floats(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_the_longest_request_gets_to_its_end_alone_and_a_longer_one_is_refused(
    name: str, page_size: int, window: int, num_chunks: int, chunks: list[int], prompt_share: float
) -> None:
    manager = BlockManager(LAYOUTS[name].groups(window), page_size, num_chunks)
    longest = manager.max_tokens_alone()
    assert longest == 0 or manager.holds_alone(longest)
    if longest < 1000:
        assert not manager.holds_alone(longest + 1)
    assume(longest > 0)
    num_tokens = min(longest, 300)
    prompt_length = max(1, round(num_tokens * prompt_share))
    assert manager.admit("alone", prompt_length, 0)
    computed = step = 0
    while computed < num_tokens:
        # The prompt in chunks, then token by token; or all of it token by token.
        left = prompt_length - computed
        wanted = min(chunks[step % len(chunks)], left) if left > 0 else 1
        granted = manager.grow("alone", computed, wanted)
        assert 0 < granted <= wanted
        computed += granted
        step += 1
    manager.free("alone")
    assert manager.free_share == 1


def test_full_layers_alone_take_a_request_as_long_as_the_pool() -> None:
    assert BlockManager(LAYOUTS["full"].groups(8), 4, NUM_RESERVED + 12).max_tokens_alone() == 12 * 4


def test_sliding_layers_alone_take_requests_of_any_length() -> None:
    """Window 8 over pages of 4 needs 3 blocks at a time, for as long as the request may be."""
    manager = BlockManager(LAYOUTS["sliding"].groups(8), 4, NUM_RESERVED + 3)
    assert manager.holds_alone(1000)
    assert manager.max_tokens_alone() >= 1000
    assert not BlockManager(LAYOUTS["sliding"].groups(8), 4, NUM_RESERVED + 2).holds_alone(1000)


def test_a_pool_needs_a_chunk_to_give() -> None:
    with pytest.raises(ValueError, match=r"num_chunks=2 .*at least 3"):
        ChunkPool(NUM_RESERVED, LeastRecentlyUsed())
