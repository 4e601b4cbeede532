"""The pool of equal chunks that every attention type draws on."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

RESERVED_CHUNKS = 2  # chunk 0: padding reads (stays zero); chunk 1: padding writes. Never given to a request.


@dataclass(frozen=True)
class AttentionGroup:
    """All layers of one attention type that store K and V of one shape.

    Attributes:
        layers: indices of the model's layers, ascending.
        window: positions a query sees, its own included; None: all before it.
        num_kv_heads: heads of K and of V.
        head_dim: width of one head.
    """

    layers: tuple[int, ...]
    window: int | None
    num_kv_heads: int
    head_dim: int

    def block_size(self, page_size: int) -> int:
        """Elements of one block: a page of K and one of V for each layer."""
        return len(self.layers) * 2 * page_size * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class ChunkLayout:
    """How chunks divide into blocks, so that every group's blocks tile the same bytes.

    Attributes:
        chunk_size: elements of one chunk.
        blocks_per_chunk: for each group, how many of its blocks one chunk holds.
    """

    chunk_size: int
    blocks_per_chunk: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[AttentionGroup], page_size: int) -> "ChunkLayout":
        """The smallest chunk that every group's blocks divide."""
        sizes = [group.block_size(page_size) for group in groups]
        chunk_size = lcm(*sizes)
        return cls(chunk_size, tuple(chunk_size // size for size in sizes))


def chunks_for_blocks(num_blocks: int, groups: Sequence[AttentionGroup], page_size: int) -> int:
    """Chunks, the reserved ones not counted, that hold `num_blocks` whole-model blocks; at least one."""
    return sum(-(-num_blocks // per_chunk) for per_chunk in ChunkLayout.of(groups, page_size).blocks_per_chunk)


class ChunkPool:
    """Chunk ids that nobody owns.

    Args:
        num_chunks: chunks in all, the reserved ones included; at least 3.
    """

    def __init__(self, num_chunks: int) -> None:
        if num_chunks <= RESERVED_CHUNKS:
            raise ValueError(f"num_chunks={num_chunks} is not allowed: it must be at least {RESERVED_CHUNKS + 1}")
        self.num_chunks = num_chunks
        # Lowest ids first, and the most recently freed before them: memory that was touched is touched again.
        self._free = list(range(num_chunks - 1, RESERVED_CHUNKS - 1, -1))

    @property
    def num_usable(self) -> int:
        """Chunks that requests can own."""
        return self.num_chunks - RESERVED_CHUNKS

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free chunk. The caller has checked `num_free`."""
        return self._free.pop()

    def give_back(self, chunk: int) -> None:
        self._free.append(chunk)
