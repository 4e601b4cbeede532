"""The tensors of the paged cache: one flat allocation, seen through a view for each layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup, ChunkLayout
from legato.cache.swap import CacheCopies, UnitCopies
from legato.memory import zeros_in_large_pages

MAX_TRANSFER_BYTES = 64 << 20  # gathered beside the cache: no more than a step takes anyway


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K and V: `storage` is [rows, kv_heads × head_dim]; `KVCache.rows` tells which row is what."""

    storage: Tensor
    num_kv_heads: int
    head_dim: int

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value`, [1, kv_heads, tokens, head_dim], in `rows`, int64 [2 × tokens]."""
        self.storage.index_copy_(0, rows, torch.cat([key[0], value[0]], dim=1).transpose(0, 1).flatten(1))

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V in `rows`, int64 [2, batch, length], each as [batch, kv_heads, length, head_dim]."""
        read = self.storage.index_select(0, rows.view(-1)).view(*rows.shape, self.num_kv_heads, self.head_dim)
        key, value = read.transpose(2, 3).unbind(0)
        return key, value


class KVCache:
    """Storage for `num_chunks` chunks; `units` is all of it, [units, unit_size].

    A block lays its group's layers one after the other, and each layer its page of K before its page of V:
    [layers, 2, page_size, kv_heads, head_dim]. Chunks hold whole blocks of every group, so a group sees the pool as one
    run of blocks, and a layer as rows that start at its own offset and go on from block to block.

    Args:
        groups: the model's attention groups.
        page_size: tokens a page holds.
        num_chunks: chunks, the reserved ones included.
        dtype: of K and V.
        device: where they lie.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        page_size: int,
        num_chunks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layout = ChunkLayout.of(groups, page_size)
        chunk_size = layout.chunk_size
        with torch.inference_mode(False):  # the engine's thread could not write into an inference tensor
            # Padding reads must find numbers, so the first chunks must not be as malloc left them.
            if device.type == "cpu":
                storage = zeros_in_large_pages(num_chunks * chunk_size, dtype)
            else:
                storage = torch.empty(num_chunks * chunk_size, dtype=dtype, device=device)
                storage[: RESERVED_CHUNKS * chunk_size].zero_()
        self.dtype, self.device = dtype, device
        self.units = storage.view(-1, layout.unit_size)
        self.page_size = page_size
        self.groups = tuple(groups)
        self.layers: dict[int, LayerCache] = {}
        self.group_of_layer: dict[int, int] = {}
        for index, group in enumerate(groups):
            width = group.num_kv_heads * group.head_dim
            rows = storage[: storage.numel() // width * width].view(-1, width)
            for position, layer in enumerate(group.layers):
                own = rows[2 * position * page_size :]
                self.layers[layer] = LayerCache(own, group.num_kv_heads, group.head_dim)
                self.group_of_layer[layer] = index

    def rows(self, group: int, slots: Tensor) -> Tensor:
        """Rows of a group's `LayerCache`s that hold K, and those that hold V: int64 [...] to int64 [2, ...]."""
        block_rows = len(self.groups[group].layers) * 2 * self.page_size
        # slot = block × page_size + offset, row = block × block_rows + offset; V's page follows K's
        keys = slots + torch.div(slots, self.page_size, rounding_mode="floor") * (block_rows - self.page_size)
        return torch.stack([keys, keys + self.page_size])


class HostCache:
    """Host memory for the blocks of offloaded requests, pinned where the cache is on a device of its own.

    Args:
        cache: whose blocks come here and go back.
        num_units: units of `cache.units` there is room for.
    """

    def __init__(self, cache: KVCache, num_units: int) -> None:
        self.num_units = num_units
        self._cache = cache.units
        self._pinned = cache.device.type == "cuda"
        with torch.inference_mode(False):
            self._host = self._empty(num_units)

    def copy(self, copies: Sequence[CacheCopies]) -> None:
        """Copy units within the cache."""
        sources = torch.tensor([unit for one in copies for unit in one.source_units], device=self._cache.device)
        targets = torch.tensor([unit for one in copies for unit in one.target_units], device=self._cache.device)
        self._cache.index_copy_(0, targets, self._cache.index_select(0, sources))

    def offload(self, copies: Sequence[UnitCopies]) -> None:
        """Copy units to the host: gathered, one transfer for all, or one for each `MAX_TRANSFER_BYTES`."""
        for cache_units, host_units in self._slices(copies):
            gathered = self._cache.index_select(0, cache_units.to(self._cache.device))
            if self._pinned:
                gathered = self._empty(len(host_units)).copy_(gathered)
            self._host.index_copy_(0, host_units, gathered)

    def restore(self, copies: Sequence[UnitCopies]) -> None:
        """Copy units back to the cache as `offload` does, then scatter them."""
        for cache_units, host_units in self._slices(copies):
            gathered = torch.index_select(self._host, 0, host_units, out=self._empty(len(host_units)))
            gathered = gathered.to(self._cache.device, non_blocking=True)
            self._cache.index_copy_(0, cache_units.to(self._cache.device), gathered)

    def _slices(self, copies: Sequence[UnitCopies]) -> Iterator[tuple[Tensor, Tensor]]:
        cache_units = torch.tensor([unit for copy in copies for unit in copy.cache_units], dtype=torch.int64)
        host_units = torch.tensor([unit for copy in copies for unit in copy.host_units], dtype=torch.int64)
        size = max(1, MAX_TRANSFER_BYTES // (self._cache.shape[1] * self._cache.element_size()))
        return zip(cache_units.split(size), host_units.split(size), strict=True)

    def _empty(self, num_units: int) -> Tensor:
        size = (num_units, self._cache.shape[1])
        return torch.empty(size, dtype=self._cache.dtype, pin_memory=self._pinned)
