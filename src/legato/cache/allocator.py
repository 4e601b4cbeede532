"""One attention type's blocks: cut from the pool's chunks, shared by reference count, found again by content."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from legato.cache.pool import ChunkPool

PADDING_BLOCK = 0  # lies in the chunk for padding reads, whatever the attention type


@dataclass(slots=True)
class BlockTable:
    """Where one request's K and V of one attention type lie.

    Attributes:
        blocks: block of each page of positions; those before `first_live` are released: `PADDING_BLOCK`.
        first_live: index of the first block the request still owns.
    """

    blocks: list[int] = field(default_factory=list)
    first_live: int = 0

    @property
    def num_live(self) -> int:
        return len(self.blocks) - self.first_live


class BlockAllocator:
    """Blocks of one attention type, full or sliding.

    Sliding blocks are not overwritten in a ring: a block whose every position left the window is released, so that
    block tables look the same for both types.

    A block is owned by as many requests as list it; owned by none, it is free: it may be taken, or found by its hash
    and owned again with its content. A chunk is this allocator's for as long as one of its blocks is owned.

    Args:
        pool: where chunks come from, shared with the other types.
        page_size: tokens a block holds.
        blocks_per_chunk: blocks that one chunk is cut into.
        window: positions a query sees, its own included; None for full attention.
    """

    def __init__(self, pool: ChunkPool, page_size: int, blocks_per_chunk: int, window: int | None) -> None:
        self.page_size = page_size
        self.blocks_per_chunk = blocks_per_chunk
        self.window = window
        self._pool = pool
        self._ref_counts = [0] * (pool.num_chunks * blocks_per_chunk)
        self._owned_in_chunk: dict[int, int] = {}  # owned blocks in each chunk of ours
        # Free blocks in chunks of ours, blank and with content; the latter oldest first.
        self._blank: dict[int, None] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    # Questions

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content, owned or not."""
        return len(self._hash_of)

    def num_owners(self, block: int) -> int:
        """Requests that own the block."""
        return self._ref_counts[block]

    def find(self, block_hash: bytes) -> int | None:
        """The block with that content."""
        return self._block_of.get(block_hash)

    def first_visible_page(self, num_computed_tokens: int) -> int:
        """The first page that a query at position `num_computed_tokens`, or after it, can see."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // self.page_size

    def blocks_lacking(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks to add before positions up to `num_tokens` have a place."""
        return max(0, -(-num_tokens // self.page_size) - len(table.blocks))

    def chunks_lacking(self, num_blocks: int) -> int:
        """Chunks to take from the pool before `num_blocks` blocks are free here."""
        return max(0, -(-(num_blocks - len(self._blank) - len(self._cached)) // self.blocks_per_chunk))

    def most_chunks_alone(self, num_tokens: int) -> int:
        """Chunks that are enough for a request of `num_tokens` processed token by token in an empty cache."""
        pages = -(-num_tokens // self.page_size)
        if self.window is None:
            return -(-pages // self.blocks_per_chunk)
        # Released blocks leave gaps, so in the worst case each live block keeps a chunk of its own.
        return min(pages, -(-(self.window - 1) // self.page_size) + 1)

    # Ownership

    def take(self, num_blocks: int, spare_chunks: int) -> list[int]:
        """Own `num_blocks` blank blocks. The caller has checked that `chunks_lacking` chunks are free.

        Content in chunks of ours is lost only if neither they nor the chunks that we may take have a blank block.

        Args:
            spare_chunks: blank chunks that may be taken beyond `chunks_lacking`.
        """
        max_chunks = self.chunks_lacking(num_blocks) + spare_chunks
        taken = []
        for _ in range(num_blocks):
            if self._blank:
                block, _ = self._blank.popitem()
            elif self._cached and not (max_chunks and self._pool.num_blank):
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                self._pool.num_evicted += 1
            else:
                max_chunks -= 1
                block = self._take_chunk()
            self._owned_in_chunk[block // self.blocks_per_chunk] += 1
            self._ref_counts[block] = 1
            taken.append(block)
        return taken

    def acquire(self, blocks: Iterable[int]) -> None:
        """Own blocks that hold content, besides those who own them already."""
        for block in blocks:
            self._ref_counts[block] += 1
            if self._ref_counts[block] > 1:
                continue
            chunk = block // self.blocks_per_chunk
            if chunk in self._owned_in_chunk:
                self._owned_in_chunk[chunk] += 1
                del self._cached[block]
            else:
                self._reclaim_chunk(chunk, block)

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each block, last first, so that a prefix outlives what follows it."""
        ref_counts, owned_in_chunk, per_chunk = self._ref_counts, self._owned_in_chunk, self.blocks_per_chunk
        for block in reversed(blocks):
            ref_counts[block] -= 1
            if ref_counts[block]:
                continue
            chunk = block // per_chunk
            if owned_in_chunk[chunk] == 1:
                self._give_back_chunk(chunk, block)
            else:
                owned_in_chunk[chunk] -= 1
                (self._cached if block in self._hash_of else self._blank)[block] = None

    def release_out_of_window(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Release the blocks that no query from position `num_computed_tokens` on can see."""
        end = min(self.first_visible_page(num_computed_tokens), len(table.blocks))
        if end > table.first_live:
            self.release(table.blocks[table.first_live : end])
            table.blocks[table.first_live : end] = [PADDING_BLOCK] * (end - table.first_live)
            table.first_live = end

    # Content

    def fill(self, block: int, block_hash: bytes) -> None:
        """The owned block holds that content from now on, and is found by it unless another one with owners is."""
        known = self._block_of.get(block_hash)
        if known is not None:
            if known == block or self._ref_counts[known]:
                return
            self._make_blank(known)  # it may be evicted before this one is released
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._pool.filled(block // self.blocks_per_chunk)

    def forget_chunk(self, chunk: int) -> None:
        """The pool gave the chunk away."""
        for block in self._blocks_in(chunk):
            if block in self._hash_of:
                self._forget(block)
                self._pool.num_evicted += 1

    def forget_content(self) -> None:
        """Nothing is to be found any more; owners keep what they own."""
        self._block_of.clear()
        self._hash_of.clear()
        self._blank.update(self._cached)
        self._cached.clear()

    def _make_blank(self, block: int) -> None:
        """A free block's content is to be found elsewhere."""
        self._forget(block)
        chunk = block // self.blocks_per_chunk
        if chunk in self._owned_in_chunk:
            del self._cached[block]
            self._blank[block] = None
        elif not any(other in self._hash_of for other in self._blocks_in(chunk)):
            self._pool.reclaim(chunk)
            self._pool.give_back(chunk, None)

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def _blocks_in(self, chunk: int) -> range:
        return range(chunk * self.blocks_per_chunk, (chunk + 1) * self.blocks_per_chunk)

    def _take_chunk(self) -> int:
        """A chunk's first block; the others are blank."""
        chunk = self._pool.take()
        self._owned_in_chunk[chunk] = 0
        first = chunk * self.blocks_per_chunk
        for block in range(first + self.blocks_per_chunk - 1, first, -1):
            self._blank[block] = None
        return first

    def _reclaim_chunk(self, chunk: int, first_owned: int) -> None:
        """An idle chunk is ours again, for the sake of `first_owned`."""
        self._pool.reclaim(chunk)
        self._owned_in_chunk[chunk] = 1
        if self.blocks_per_chunk > 1:
            for block in self._blocks_in(chunk):
                if block != first_owned:
                    (self._cached if block in self._hash_of else self._blank)[block] = None

    def _give_back_chunk(self, chunk: int, last_owned: int) -> None:
        """`last_owned` is the block that nobody owns any more either."""
        del self._owned_in_chunk[chunk]
        has_content = last_owned in self._hash_of
        if self.blocks_per_chunk > 1:
            for block in self._blocks_in(chunk):
                has_content |= block in self._hash_of
                self._blank.pop(block, None)
                self._cached.pop(block, None)
        self._pool.give_back(chunk, self if has_content else None)
