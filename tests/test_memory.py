"""Memory in large pages: what a tensor may count on, on systems that have them and on those that have not."""

import mmap

import pytest
import torch

from legato.memory import LargePageArena, zeros_in_large_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_it_is_zero_and_can_be_written(dtype: torch.dtype) -> None:
    tensor = zeros_in_large_pages(1000, dtype)
    assert tensor.shape == (1000,) and tensor.dtype == dtype and not tensor.any()
    tensor[5] = 3
    assert tensor[5] == 3 and zeros_in_large_pages(0, dtype).numel() == 0


def test_a_system_without_large_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1, raising=False)  # EINVAL, as from a kernel built without
    assert not zeros_in_large_pages(10, torch.float32).any()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert not zeros_in_large_pages(10, torch.float32).any()


def test_an_arena_copies_side_by_side_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.memory._SLAB_BYTES", 4096)
    arena = LargePageArena()
    originals = [torch.arange(n, dtype=torch.float32).view(-1, 5).t() for n in (5, 35, 700, 5000, 10, 900)]
    stored = [arena.empty(tuple(one.shape), one.dtype).copy_(one) for one in originals]
    for original, copy in zip(originals, stored, strict=True):
        assert torch.equal(copy, original) and copy.is_contiguous() and copy.data_ptr() % 64 == 0
    assert stored[1].data_ptr() - stored[0].data_ptr() == 64
