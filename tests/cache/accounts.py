"""Attention layouts to test with, and the cache's accounts kept a second time: by counting the public tables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from legato.cache.allocator import PADDING_BLOCK
from legato.cache.block_manager import BlockManager
from legato.cache.pool import AttentionGroup

NUM_RESERVED = 2


@dataclass(frozen=True)
class Layers:
    """So many layers of one type; `width` is kv_heads × head_dim."""

    sliding: bool
    count: int
    width: int = 1


@dataclass(frozen=True)
class Layout:
    """A kind of model, and into how many blocks of each type its chunks divide, worked out by hand."""

    layers: tuple[Layers, ...]
    blocks_per_chunk: tuple[int, ...]

    def groups(self, window: int) -> tuple[AttentionGroup, ...]:
        """Its groups; the second sliding one, if any, has twice the window of the first."""
        groups, num_layers, windows = [], 0, iter((window, 2 * window))
        for kind in self.layers:
            indices = tuple(range(num_layers, num_layers + kind.count))
            groups.append(AttentionGroup(indices, next(windows) if kind.sliding else None, kind.width, 1))
            num_layers += kind.count
        return tuple(groups)


LAYOUTS = {
    "full": Layout((Layers(False, 2),), (1,)),
    "sliding": Layout((Layers(True, 3),), (1,)),
    "1 full, 1 sliding": Layout((Layers(False, 1), Layers(True, 1)), (1, 1)),
    "2 full, 3 sliding": Layout((Layers(False, 2), Layers(True, 3)), (3, 2)),
    "3 full, 15 sliding": Layout((Layers(False, 3), Layers(True, 15)), (5, 1)),
    "5 full, 2 sliding": Layout((Layers(False, 5), Layers(True, 2)), (2, 5)),
    "two windows": Layout((Layers(False, 1), Layers(True, 2), Layers(True, 3)), (6, 3, 2)),
    "wide full": Layout((Layers(False, 1, width=4), Layers(True, 3)), (3, 4)),
    "wide sliding": Layout((Layers(False, 3), Layers(True, 1, width=2)), (2, 3)),
}


class Accounts:
    """Who owns what, counted block by block from a manager's tables, with none of its own counters.

    Args:
        manager: whose `tables` are read, anew at every question.
        layout: what it was made for.
        num_chunks: chunks it was made with.
    """

    def __init__(self, manager: BlockManager, layout: Layout, num_chunks: int) -> None:
        self.num_usable = num_chunks - NUM_RESERVED
        self._manager = manager
        self._per_chunk = layout.blocks_per_chunk
        self._counts = [kind.count for kind in layout.layers]

    def owned(self, group: int) -> list[int]:
        """Every block that the tables of a group list; one that is shared comes once for each owner."""
        tables = [tables[group] for tables in self._manager.tables.values()]
        return [block for table in tables for block in table.blocks if block != PADDING_BLOCK]

    def chunks(self, group: int) -> set[int]:
        """Chunks that those blocks lie in."""
        return {block // self._per_chunk[group] for block in self.owned(group)}

    @property
    def num_free_chunks(self) -> int:
        """Chunks in which nobody owns a block, whatever they may still hold."""
        groups = range(len(self._per_chunk))
        return self.num_usable - len(set().union(*(self.chunks(group) for group in groups)))

    @property
    def free_share(self) -> float:
        return self.num_free_chunks / self.num_usable

    def fits(self, wanted: Sequence[int], besides: Sequence[Iterable[int]] | None = None) -> bool:
        """Whether `wanted[i]` more blocks of group i, all together, find a place.

        Args:
            besides: for each group, blocks that the asker is going to own as they are.
        """
        num_taken = chunks = 0
        for group, (count, per_chunk) in enumerate(zip(wanted, self._per_chunk, strict=True)):
            owned = {*self.owned(group), *(besides[group] if besides else ())}
            in_use = {block // per_chunk for block in owned}
            num_taken += len(in_use)
            spare = len(in_use) * per_chunk - len(owned)
            while spare < count:
                chunks += 1
                spare += per_chunk
        return num_taken + chunks <= self.num_usable

    def lacking(self, request_id: str, num_tokens: int) -> list[int]:
        """Blocks of each group that a request lacks for holding `num_tokens` tokens."""
        page_size = self._manager.page_size
        places = [len(table.blocks) * page_size for table in self._manager.tables[request_id]]
        return [len(range(place, num_tokens, page_size)) for place in places]

    def check(self) -> None:
        """Every block has the owners that list it, no chunk two groups; and the manager counts what is counted here."""
        manager = self._manager
        seen: set[int] = set()
        for group, allocator in enumerate(manager.allocators):
            owners, chunks = Counter(self.owned(group)), self.chunks(group)
            assert not chunks & seen, "a chunk serves two groups"
            assert chunks <= set(range(NUM_RESERVED, NUM_RESERVED + self.num_usable)), "a chunk is reserved"
            seen |= chunks
            for block in range((NUM_RESERVED + self.num_usable) * self._per_chunk[group]):
                assert allocator.num_owners(block) == owners[block], "an owner is not counted, or one too many"
        for tables in manager.tables.values():
            for table in tables:
                listed = [block for block in table.blocks if block != PADDING_BLOCK]
                assert len(listed) == len(set(listed)), "a block serves two pages of one request"
        assert manager.pool.num_usable == self.num_usable
        assert manager.pool.num_free == self.num_free_chunks
        assert manager.free_share == self.free_share

    def check_all_free(self) -> None:
        """Nobody owns anything, and each group can have the whole pool."""
        assert not self._manager.tables
        assert self._manager.pool.num_free == self.num_usable
        for group, per_chunk in enumerate(self._per_chunk):
            wanted = [0] * len(self._per_chunk)
            wanted[group] = per_chunk * self.num_usable
            assert self._manager.fits(wanted)
            wanted[group] += 1
            assert not self._manager.fits(wanted)
