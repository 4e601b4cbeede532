"""Who owns which blocks: all attention types' allocators over one pool, asked all or nothing."""

from collections.abc import Sequence

from legato.cache.allocator import BlockAllocator, BlockTable
from legato.cache.pool import AttentionGroup, ChunkLayout, ChunkPool

BlockTables = tuple[BlockTable, ...]  # one for each attention group


class BlockManager:
    """The cache's accounts: integers only, no tensors.

    Args:
        groups: the model's attention groups.
        page_size: tokens a page holds.
        num_chunks: chunks of the pool, the reserved ones included.
    """

    def __init__(self, groups: Sequence[AttentionGroup], page_size: int, num_chunks: int) -> None:
        layout = ChunkLayout.of(groups, page_size)
        self.pool = ChunkPool(num_chunks)
        self.page_size = page_size
        self.allocators = tuple(
            BlockAllocator(self.pool, page_size, per_chunk, group.window)
            for group, per_chunk in zip(groups, layout.blocks_per_chunk, strict=True)
        )
        self._pages_per_block = tuple(len(group.layers) for group in groups)
        self.tables: dict[str, BlockTables] = {}

    @property
    def free_share(self) -> float:
        """Share of the usable chunks that nobody owns, from 0 to 1."""
        return self.pool.num_free / self.pool.num_usable

    @property
    def num_pages(self) -> int:
        """Pages in the usable chunks: the most one forward pass may read."""
        per_chunk = (a.blocks_per_chunk * n for a, n in zip(self.allocators, self._pages_per_block, strict=True))
        return self.pool.num_usable * max(per_chunk)

    def pages_held(self, request_id: str) -> int:
        """Pages that a forward pass reads for this request."""
        tables = self.tables[request_id]
        return sum(t.num_live * pages for t, pages in zip(tables, self._pages_per_block, strict=True))

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

    def admit(self, request_id: str, num_tokens: int, first_chunk: int) -> bool:
        """Give a new request its blocks, or nothing at all.

        Full-attention layers get room for all `num_tokens` known tokens at once, so that two long prompts cannot
        each take half of the cache and wait for the other; sliding ones for the first `first_chunk`, since they
        give blocks back as they go on.

        Returns:
            Whether the request was admitted.
        """
        tables = tuple(BlockTable() for _ in self.allocators)
        wanted = [
            allocator.blocks_lacking(table, num_tokens if allocator.window is None else first_chunk)
            for allocator, table in zip(self.allocators, tables, strict=True)
        ]
        if not self.fits(wanted):
            return False
        self._extend(tables, wanted)
        self.tables[request_id] = tables
        return True

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

    def lacking(self, request_id: str, num_tokens: int) -> list[int]:
        """Blocks of each group that the request must get before it holds `num_tokens` tokens."""
        return self._blocks_lacking(self.tables[request_id], num_tokens)

    def fits(self, wanted: Sequence[int]) -> bool:
        """Whether `wanted[i]` blocks of group i, all together, are free."""
        chunks = sum(a.chunks_lacking(n) for a, n in zip(self.allocators, wanted, strict=True) if n)
        return chunks <= self.pool.num_free

    def free(self, request_id: str) -> None:
        """Take all blocks of the request back. Does nothing for a request that holds none."""
        for allocator, table in zip(self.allocators, self.tables.pop(request_id, ()), strict=False):
            allocator.free(table)

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
        for allocator, table, num_blocks in zip(self.allocators, tables, wanted, strict=True):
            allocator.extend(table, num_blocks)
