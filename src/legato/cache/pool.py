"""The pool of equal chunks that every attention type draws on."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Protocol

from legato.cache.eviction import EvictionPolicy

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
        unit_size: elements of the largest piece that every group's blocks are made of.
        units_per_block: for each group, how many such units one of its blocks is.
    """

    chunk_size: int
    blocks_per_chunk: tuple[int, ...]
    unit_size: int
    units_per_block: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[AttentionGroup], page_size: int) -> "ChunkLayout":
        """The smallest chunk that every group's blocks divide, and the largest unit that divides them."""
        sizes = [group.block_size(page_size) for group in groups]
        chunk_size, unit_size = lcm(*sizes), gcd(*sizes)
        per_chunk, units = (chunk_size // size for size in sizes), (size // unit_size for size in sizes)
        return cls(chunk_size, tuple(per_chunk), unit_size, tuple(units))


def chunks_for_blocks(num_blocks: int, groups: Sequence[AttentionGroup], page_size: int) -> int:
    """Chunks, the reserved ones not counted, that hold `num_blocks` whole-model blocks; at least one."""
    return sum(-(-num_blocks // per_chunk) for per_chunk in ChunkLayout.of(groups, page_size).blocks_per_chunk)


class ContentHolder(Protocol):
    """Whose content lies in a chunk that nobody owns."""

    def forget_chunk(self, chunk: int) -> None:
        """The content is gone."""


class ChunkPool:
    """Chunks that nobody owns: blank ones, and idle ones that still hold content which a later request may use.

    Args:
        num_chunks: chunks in all, the reserved ones included; at least 3.
        policy: which idle chunk loses its content first. Eviction is lazy: blank ones are taken before.

    Attributes:
        num_evicted: blocks whose content had to go so far.
    """

    def __init__(self, num_chunks: int, policy: EvictionPolicy) -> None:
        if num_chunks <= RESERVED_CHUNKS:
            raise ValueError(f"num_chunks={num_chunks} is not allowed: it must be at least {RESERVED_CHUNKS + 1}")
        self.num_chunks = num_chunks
        self._policy = policy
        self.num_evicted = 0
        # Lowest ids first, and the most recently freed before them: memory that was touched is touched again.
        self._blank = list(range(num_chunks - 1, RESERVED_CHUNKS - 1, -1))
        self._holders: dict[int, ContentHolder] = {}  # of idle chunks

    @property
    def num_usable(self) -> int:
        """Chunks that requests can own."""
        return self.num_chunks - RESERVED_CHUNKS

    @property
    def num_free(self) -> int:
        """Chunks that nobody owns, with content or without."""
        return len(self._blank) + len(self._holders)

    @property
    def num_blank(self) -> int:
        """Chunks that nobody owns and that hold nothing."""
        return len(self._blank)

    def take(self) -> int:
        """A chunk that nobody owns, blank from now on. The caller has checked `num_free`."""
        if self._blank:
            return self._blank.pop()
        chunk = self._policy.pop()
        self._holders.pop(chunk).forget_chunk(chunk)
        return chunk

    def give_back(self, chunk: int, holder: ContentHolder | None) -> None:
        """Nobody owns the chunk any more; `holder` has content in it, None: it is blank."""
        if holder is None:
            self._blank.append(chunk)
        else:
            self._holders[chunk] = holder
            self._policy.add(chunk)

    def reclaim(self, chunk: int) -> None:
        """Take an idle chunk with its content: a hit."""
        self._policy.remove(chunk)
        del self._holders[chunk]

    def filled(self, chunk: int) -> None:
        """An owned chunk was given content."""
        self._policy.filled(chunk)

    def forget_content(self) -> None:
        """Make every idle chunk blank. Their holders have forgotten what was in them."""
        for chunk in self._holders:
            self._policy.remove(chunk)
        self._blank += self._holders
        self._holders.clear()
