"""Which cached content goes first when blank chunks have run out."""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Keeps the chunks that nobody owns but that still hold content, and says which to take next.

    A request's chunks are added last page first, so a policy that keeps the order of `add` evicts a prefix after
    what follows it. Every operation must be O(1) or O(log n).
    """

    def filled(self, chunk: int) -> None:
        """The chunk was given content. It is owned."""

    def add(self, chunk: int) -> None:
        """Nobody owns the chunk any more."""

    def remove(self, chunk: int) -> None:
        """A hit: the chunk is owned again. It was added before."""

    def pop(self) -> int:
        """Take out the chunk whose content is to go. The caller has checked that there is one."""

    def __len__(self) -> int:
        """Chunks added, neither removed nor popped."""


class LeastRecentlyUsed:
    """Evicts what was released longest ago: leaves before their ancestors, since requests release in that order."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def filled(self, chunk: int) -> None:
        pass

    def add(self, chunk: int) -> None:
        self._chunks[chunk] = None

    def remove(self, chunk: int) -> None:
        del self._chunks[chunk]

    def pop(self) -> int:
        return self._chunks.popitem(last=False)[0]


class NewestFilled:
    """Evicts what was filled last. Keeps the oldest prefixes whatever comes: right when all prompts share them."""

    def __init__(self) -> None:
        self._num_filled = 0
        self._filled_at: dict[int, int] = {}
        self._members: set[int] = set()
        self._heap: list[tuple[int, int]] = []  # (minus filled at, chunk); entries of removed chunks stay for a while

    def __len__(self) -> int:
        return len(self._members)

    def filled(self, chunk: int) -> None:
        self._num_filled += 1
        self._filled_at[chunk] = self._num_filled

    def add(self, chunk: int) -> None:
        self._members.add(chunk)
        heapq.heappush(self._heap, (-self._filled_at[chunk], chunk))

    def remove(self, chunk: int) -> None:
        self._members.remove(chunk)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(-self._filled_at[c], c) for c in self._members]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        while True:
            _, chunk = heapq.heappop(self._heap)
            if chunk in self._members:
                self._members.remove(chunk)
                return chunk


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "newest_filled": NewestFilled,
}
