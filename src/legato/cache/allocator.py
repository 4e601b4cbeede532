"""One attention type's blocks: cut from the pool's chunks, listed per request in a block table."""

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
        self._free_in_chunk: dict[int, list[int]] = {}  # only chunks that have both free and owned blocks
        self._num_free_in_chunks = 0

    def blocks_lacking(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks to add before positions up to `num_tokens` have a place."""
        return max(0, -(-num_tokens // self.page_size) - len(table.blocks))

    def chunks_lacking(self, num_blocks: int) -> int:
        """Chunks to take from the pool before `num_blocks` blocks are free here."""
        return max(0, -(-(num_blocks - self._num_free_in_chunks) // self.blocks_per_chunk))

    def most_chunks_alone(self, num_tokens: int) -> int:
        """Chunks that are enough for a request of `num_tokens` processed token by token in an empty cache."""
        pages = -(-num_tokens // self.page_size)
        if self.window is None:
            return -(-pages // self.blocks_per_chunk)
        # Released blocks leave gaps, so in the worst case each live block keeps a chunk of its own.
        return min(pages, -(-(self.window - 1) // self.page_size) + 1)

    def extend(self, table: BlockTable, num_blocks: int) -> None:
        """Append `num_blocks` blocks. The caller has checked that `chunks_lacking` of them are free."""
        for _ in range(num_blocks):
            table.blocks.append(self._take())

    def release_out_of_window(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Free the blocks that no query from position `num_computed_tokens` on can see."""
        if self.window is None:
            return
        end = min((num_computed_tokens - self.window + 1) // self.page_size, len(table.blocks))
        while table.first_live < end:
            self._give_back(table.blocks[table.first_live])
            table.blocks[table.first_live] = PADDING_BLOCK
            table.first_live += 1

    def free(self, table: BlockTable) -> None:
        """Take every block of the table back."""
        for block in reversed(table.blocks[table.first_live :]):
            self._give_back(block)
        table.blocks.clear()
        table.first_live = 0

    def _take(self) -> int:
        if not self._free_in_chunk:
            chunk = self._pool.take()
            first = chunk * self.blocks_per_chunk
            if self.blocks_per_chunk == 1:
                return first
            self._free_in_chunk[chunk] = list(range(first + self.blocks_per_chunk - 1, first - 1, -1))
            self._num_free_in_chunks += self.blocks_per_chunk
        chunk, free = next(iter(self._free_in_chunk.items()))
        block = free.pop()
        self._num_free_in_chunks -= 1
        if not free:
            del self._free_in_chunk[chunk]
        return block

    def _give_back(self, block: int) -> None:
        chunk = block // self.blocks_per_chunk
        free = self._free_in_chunk.setdefault(chunk, [])
        free.append(block)
        self._num_free_in_chunks += 1
        if len(free) == self.blocks_per_chunk:
            del self._free_in_chunk[chunk]
            self._num_free_in_chunks -= self.blocks_per_chunk
            self._pool.give_back(chunk)
