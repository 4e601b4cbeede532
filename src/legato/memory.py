"""Host memory in large pages, where the system has them to give: what a step reads through is looked up less often.

With pages of 4 KiB a pass over weights or cache spends a third of its time on finding where the next page lies.
"""

import contextlib
import mmap
from math import prod

import torch
from torch import Tensor

_SLAB_BYTES = 64 << 20
_ALIGNMENT = 64  # bytes; a line of every cache


def zeros_in_large_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros on the CPU. Memory is taken as it is touched, two MiB at a time where that is possible."""
    if num_elements == 0:
        return torch.empty(0, dtype=dtype)
    num_bytes = num_elements * dtype.itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets none
    with contextlib.suppress(OSError):  # a system built without
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


class LargePageArena:
    """Puts tensors side by side in slabs of large pages, 64 MiB each; a slab lives while one of its tensors does."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, aligned to 64 bytes; what is in it is not said."""
        size = prod(shape) * dtype.itemsize
        if self._used + size > self._slab.numel():
            self._slab = zeros_in_large_pages(max(size, _SLAB_BYTES), torch.uint8)
            self._used = 0
        place = self._slab[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place.view(dtype).view(shape)
