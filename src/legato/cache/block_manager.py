"""Who owns which blocks: all attention types' allocators over one pool, asked all or nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from legato.cache.allocator import PADDING_BLOCK, BlockAllocator, BlockTable
from legato.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from legato.cache.pool import AttentionGroup, ChunkLayout, ChunkPool
from legato.cache.swap import CacheCopies, SwappedGroup, SwapSpace, UnitCopies

BlockTables = tuple[BlockTable, ...]  # one for each attention group


@dataclass(slots=True)
class _Wanted:
    """A block table to be made.

    Attributes:
        first_live: pages before it are not wanted.
        blocks: for each page from there on the block that holds its content already, or None: a blank one.
    """

    first_live: int
    blocks: list[int | None]


class BlockManager:
    """The cache's accounts: integers only, no tensors.

    Pages are known by hashes of what they hold (`PageHasher`). A page whose hash was given to `share` is found by
    `find_prefix` from then on, even before its K and V are computed: whoever shares it runs in the same forward pass
    or a later one, and a pass writes K and V before it reads any.

    Args:
        groups: the model's attention groups.
        page_size: tokens a page holds.
        num_chunks: chunks of the pool, the reserved ones included.
        policy: which content is evicted first; None: the least recently used.
        num_swap_units: host memory for offloaded requests, in units of `ChunkLayout.unit_size` elements.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        page_size: int,
        num_chunks: int,
        policy: EvictionPolicy | None = None,
        num_swap_units: int = 0,
    ) -> None:
        layout = ChunkLayout.of(groups, page_size)
        self.pool = ChunkPool(num_chunks, LeastRecentlyUsed() if policy is None else policy)
        self.swap = SwapSpace(num_swap_units)
        self.page_size = page_size
        self.allocators = tuple(
            BlockAllocator(self.pool, page_size, per_chunk, group.window)
            for group, per_chunk in zip(groups, layout.blocks_per_chunk, strict=True)
        )
        self.tables: dict[str, BlockTables] = {}
        self._units_per_block = layout.units_per_block
        self._swapped: dict[str, tuple[SwappedGroup, ...]] = {}
        self._num_shared_pages: dict[str, int] = {}
        self._promised: dict[bytes, str] = {}  # pages that a running request is about to compute, and which request
        self._promises: dict[str, list[bytes]] = {}

    # Questions

    @property
    def free_share(self) -> float:
        """Share of the usable chunks that nobody owns, from 0 to 1."""
        return self.pool.num_free / self.pool.num_usable

    @property
    def blank_share(self) -> float:
        """Share of the usable chunks that nobody owns and that hold nothing, from 0 to 1."""
        return self.pool.num_blank / self.pool.num_usable

    def holds_alone(self, num_tokens: int) -> bool:
        """Whether an otherwise empty cache can see a request of `num_tokens` through to its end."""
        return sum(a.most_chunks_alone(num_tokens) for a in self.allocators) <= self.pool.num_usable

    def max_tokens_alone(self) -> int:
        """The longest request, prompt and answer together, that `holds_alone`; 0 when not even one token fits."""
        low, high = 0, 1 << 62
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.holds_alone(middle) else (low, middle - 1)
        return low

    def lacking(self, request_id: str, num_tokens: int) -> list[int]:
        """Blocks of each group that the request must get before it holds `num_tokens` tokens."""
        return self._blocks_lacking(self.tables[request_id], num_tokens)

    def fits(self, wanted: Sequence[int]) -> bool:
        """Whether `wanted[i]` blocks of group i, all together, are free."""
        chunks = sum(a.chunks_lacking(n) for a, n in zip(self.allocators, wanted, strict=True) if n)
        return chunks <= self.pool.num_free

    @property
    def num_offloaded(self) -> int:
        """Requests whose content lies on the host."""
        return len(self._swapped)

    def is_offloaded(self, request_id: str) -> bool:
        """Whether the request's content lies on the host."""
        return request_id in self._swapped

    def num_shared_pages(self, request_id: str) -> int:
        """Leading pages of the request whose hashes are known here."""
        return self._num_shared_pages[request_id]

    def is_promised(self, page_hash: bytes) -> bool:
        """Whether a running request is about to compute a page with that content."""
        return page_hash in self._promised

    def find_prefix(self, page_hashes: Sequence[bytes]) -> int:
        """Leading pages that need not be computed: as many as leave the next query all that it sees.

        Full-attention layers need every page; sliding ones only those that reach into the window of the next position.
        """
        runs = [0] * len(self.allocators)  # consecutive pages found, up to the one looked at
        longest = 0
        for page, page_hash in enumerate(page_hashes):
            end = page + 1
            usable = True
            for group, allocator in enumerate(self.allocators):
                runs[group] = 0 if allocator.find(page_hash) is None else runs[group] + 1
                if allocator.window is None and not runs[group]:
                    return longest
                usable &= runs[group] >= end - allocator.first_visible_page(end * self.page_size)
            if usable:
                longest = end
        return longest

    # Ownership

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        num_first_tokens: int,
        page_hashes: Sequence[bytes] = (),
        num_cached_pages: int = 0,
    ) -> bool:
        """Give a new request its blocks, or nothing at all.

        Full-attention layers get room for all `num_tokens` known tokens at once, so that two long prompts cannot
        each take half of the cache and wait for the other; sliding ones for the first `num_first_tokens`, since they
        give blocks back as they go on.

        Args:
            num_first_tokens: tokens, the cached ones included, that the first step covers.
            page_hashes: of the complete pages of the known tokens.
            num_cached_pages: how many of them `find_prefix` has just found.

        Returns:
            Whether the request was admitted.
        """
        wanted = []
        for allocator in self.allocators:
            first_live = min(allocator.first_visible_page(num_cached_pages * self.page_size), num_cached_pages)
            end = self._num_pages(num_tokens if allocator.window is None else num_first_tokens)
            found = [allocator.find(page_hash) for page_hash in page_hashes[first_live:num_cached_pages]]
            wanted.append(_Wanted(first_live, found + [None] * (end - num_cached_pages)))
        if not self._claim(request_id, wanted):
            return False
        self._num_shared_pages[request_id] = num_cached_pages
        self._promise(request_id, page_hashes[num_cached_pages:])
        return True

    def fork(self, request_id: str, child_id: str, num_computed_tokens: int) -> CacheCopies | None:
        """Let another request go on from a request's computed tokens: it shares the complete pages of them.

        Returns:
            What must be copied before the next forward pass, the page that is not complete; None, and nothing is done,
            when there is no room for it.
        """
        complete, end = num_computed_tokens // self.page_size, self._num_pages(num_computed_tokens)
        tables = self.tables[request_id]
        wanted = []
        for table in tables:
            shared: list[int | None] = [*table.blocks[table.first_live : complete]]
            wanted.append(_Wanted(table.first_live, shared + [None] * (end - max(complete, table.first_live))))
        if not self._claim(child_id, wanted):
            return None
        self._num_shared_pages[child_id] = min(self._num_shared_pages[request_id], complete)
        source_units: list[int] = []
        target_units: list[int] = []
        for table, own, per_block in zip(tables, self.tables[child_id], self._units_per_block, strict=True):
            for page in range(max(complete, table.first_live), end):
                source_units.extend(_units(table.blocks[page], per_block))
                target_units.extend(_units(own.blocks[page], per_block))
        return CacheCopies(source_units, target_units)

    def share(self, request_id: str, page_hashes: Sequence[bytes]) -> None:
        """Let others find the request's leading pages: the next forward pass leaves them complete.

        Args:
            page_hashes: of its leading pages, at least as many as were shared before.
        """
        tables = self.tables[request_id]
        for page in range(self._num_shared_pages[request_id], len(page_hashes)):
            for allocator, table in zip(self.allocators, tables, strict=True):
                if page >= table.first_live:
                    allocator.fill(table.blocks[page], page_hashes[page])
            if self._promised.get(page_hashes[page]) == request_id:
                del self._promised[page_hashes[page]]
        self._num_shared_pages[request_id] = len(page_hashes)

    def grow(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> int:
        """Make room for up to `num_tokens` tokens after the computed ones, and drop what left the window.

        Returns:
            Tokens there is room for now: `num_tokens`, or as many of them as the free blocks allow, perhaps 0.
        """
        tables = self.tables[request_id]
        for allocator, table in zip(self.allocators, tables, strict=True):
            if allocator.window is not None:
                allocator.release_out_of_window(table, num_computed_tokens)
        wanted = self._blocks_lacking(tables, num_computed_tokens + num_tokens)
        if not any(wanted):
            return num_tokens
        if not self.fits(wanted):
            num_tokens = self._most_that_fit(tables, num_computed_tokens, num_tokens)
            wanted = self._blocks_lacking(tables, num_computed_tokens + num_tokens)
        if num_tokens:
            self._extend(tables, wanted)
        return num_tokens

    def free(self, request_id: str) -> None:
        """Take all that the request has, in the cache and on the host. Does nothing for one that has nothing."""
        for group in self._swapped.pop(request_id, ()):
            self.swap.give_back(group.units)
        if request_id not in self.tables:
            return
        for allocator, table in zip(self.allocators, self.tables.pop(request_id), strict=True):
            allocator.release(table.blocks[table.first_live :])
        del self._num_shared_pages[request_id]
        for page_hash in self._promises.pop(request_id, ()):
            if self._promised.get(page_hash) == request_id:
                del self._promised[page_hash]

    def offload(self, request_id: str, num_computed_tokens: int) -> UnitCopies | None:
        """Free a request's blocks and keep a place on the host for what is in them.

        Args:
            num_computed_tokens: tokens whose K and V are in the cache.

        Returns:
            What must be copied to the host before anything else is written to the cache; None when the host has no
            room: then only blocks that left the window are freed.
        """
        end = self._num_pages(num_computed_tokens)
        tables = self.tables[request_id]
        for allocator, table in zip(self.allocators, tables, strict=True):
            allocator.release_out_of_window(table, num_computed_tokens)
        kept = [table.blocks[table.first_live : end] for table in tables]
        num_units = sum(len(blocks) * units for blocks, units in zip(kept, self._units_per_block, strict=True))
        if num_units > self.swap.num_free:
            return None
        groups: list[SwappedGroup] = []
        cache_units: list[int] = []
        for table, blocks, per_block in zip(tables, kept, self._units_per_block, strict=True):
            units = self.swap.take(len(blocks) * per_block)
            groups.append(SwappedGroup(table.first_live, len(blocks), units))
            cache_units.extend(unit for block in blocks for unit in _units(block, per_block))
        self.free(request_id)
        self._swapped[request_id] = tuple(groups)
        return UnitCopies(cache_units, [unit for group in groups for unit in group.units])

    def restore(
        self, request_id: str, num_tokens: int, num_first_tokens: int, page_hashes: Sequence[bytes] = ()
    ) -> UnitCopies | None:
        """Give an offloaded request blocks again, as `admit` does, and its place on the host back.

        Pages that can still be found in the cache are shared, not copied.

        Args:
            page_hashes: of the leading pages that hold its computed tokens.

        Returns:
            What must be copied to the cache before the next forward pass; None, and nothing is done, when there is no
            room.
        """
        swapped = self._swapped[request_id]
        wanted = []
        for allocator, group in zip(self.allocators, swapped, strict=True):
            end = group.first_page + group.num_pages
            found = [allocator.find(page_hash) for page_hash in page_hashes[group.first_page : end]]
            pages = max(end, self._num_pages(num_tokens if allocator.window is None else num_first_tokens))
            blank = pages - group.first_page - len(found)
            wanted.append(_Wanted(group.first_page, found + [None] * blank))
        if not self._claim(request_id, wanted):
            return None
        cache_units: list[int] = []
        host_units: list[int] = []
        for want, table, group, per_block in zip(
            wanted, self.tables[request_id], swapped, self._units_per_block, strict=True
        ):
            for i in range(group.num_pages):
                if want.blocks[i] is None:
                    cache_units.extend(_units(table.blocks[group.first_page + i], per_block))
                    host_units.extend(group.units[i * per_block : (i + 1) * per_block])
            self.swap.give_back(group.units)
        del self._swapped[request_id]
        self._num_shared_pages[request_id] = 0
        self.share(request_id, page_hashes)
        return UnitCopies(cache_units, host_units)

    def forget_content(self) -> None:
        """The weights have changed: no page computed so far may be shared with a request to come."""
        for allocator in self.allocators:
            allocator.forget_content()
        self.pool.forget_content()
        self._promised.clear()
        self._promises.clear()

    # Helpers

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _promise(self, request_id: str, page_hashes: Sequence[bytes]) -> None:
        if page_hashes:
            self._promises[request_id] = list(page_hashes)
            for page_hash in page_hashes:
                self._promised.setdefault(page_hash, request_id)

    def _claim(self, request_id: str, wanted: Sequence[_Wanted]) -> bool:
        """Make the wanted tables, or nothing at all."""
        num_blank = [want.blocks.count(None) for want in wanted]
        if not self.fits(num_blank):
            return False
        for allocator, want in zip(self.allocators, wanted, strict=True):
            allocator.acquire(block for block in want.blocks if block is not None)
        if not self.fits(num_blank):  # now that what was found is no longer free
            for allocator, want in zip(self.allocators, wanted, strict=True):
                allocator.release([block for block in want.blocks if block is not None])
            return False
        tables = []
        for want, taken in zip(wanted, self._take(num_blank), strict=True):
            blank = iter(taken)
            blocks = [next(blank) if block is None else block for block in want.blocks]
            tables.append(BlockTable([PADDING_BLOCK] * want.first_live + blocks, want.first_live))
        self.tables[request_id] = tuple(tables)
        return True

    def _take(self, wanted: Sequence[int]) -> list[list[int]]:
        """`wanted[i]` blocks of each group i, for which there is room."""
        taken = []
        needed = [a.chunks_lacking(n) for a, n in zip(self.allocators, wanted, strict=True)]
        for group, (allocator, num_blocks) in enumerate(zip(self.allocators, wanted, strict=True)):
            spare_chunks = max(0, self.pool.num_blank - sum(needed[group:]))
            taken.append(allocator.take(num_blocks, spare_chunks))
        return taken

    def _blocks_lacking(self, tables: BlockTables, num_tokens: int) -> list[int]:
        return [a.blocks_lacking(t, num_tokens) for a, t in zip(self.allocators, tables, strict=True)]

    def _most_that_fit(self, tables: BlockTables, num_computed_tokens: int, num_tokens: int) -> int:
        low, high = 0, num_tokens - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.fits(self._blocks_lacking(tables, num_computed_tokens + middle))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _extend(self, tables: BlockTables, wanted: Sequence[int]) -> None:
        for table, blocks in zip(tables, self._take(wanted), strict=True):
            table.blocks += blocks


def _units(block: int, units_per_block: int) -> range:
    return range(block * units_per_block, (block + 1) * units_per_block)
