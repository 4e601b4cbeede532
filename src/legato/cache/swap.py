"""Host memory for the blocks of offloaded requests: accounts only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitCopies:
    """A transfer between the cache and the host, in units: pieces of one size that every group's blocks are made of.

    Attributes:
        cache_units: where in the cache.
        host_units: where in host memory, one for each of `cache_units`.
    """

    cache_units: list[int]
    host_units: list[int]


@dataclass(frozen=True, slots=True)
class CacheCopies:
    """A transfer within the cache, in the same units.

    Attributes:
        source_units: where from.
        target_units: where to, one for each of `source_units`.
    """

    source_units: list[int]
    target_units: list[int]


@dataclass(frozen=True, slots=True)
class SwappedGroup:
    """What is kept of one attention group of an offloaded request.

    Attributes:
        first_page: the first page that is kept; those before it left the window.
        num_pages: how many are.
        units: host units, page by page.
    """

    first_page: int
    num_pages: int
    units: list[int]


class SwapSpace:
    """Host units that nobody uses.

    Args:
        num_units: units in all; 0: nothing can be offloaded.
    """

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self._free = list(range(num_units - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_units: int) -> list[int]:
        """`num_units` free units. The caller has checked `num_free`."""
        if not num_units:
            return []
        taken = self._free[-num_units:]
        del self._free[-num_units:]
        return taken

    def give_back(self, units: list[int]) -> None:
        self._free += units
