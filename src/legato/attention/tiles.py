"""Cutting a batch's attention into dense tiles, each no larger than what its queries may see.

A decode query sees its own context; a chunk of a prompt is cut into tiles of up to `QUERY_TILE` queries, each with
the keys from the first that its first query sees to its last query's own. Decode queries are grouped by context
length, rounded up by at most a quarter, so that a batch of hundreds takes a few calls and wastes little.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from legato.cache.allocator import PADDING_BLOCK
from legato.cache.kv import KVCache
from legato.engine.batch import Batch, IntArray

QUERY_TILE = 128
KEYS_PER_CALL = 16384  # bounds what a call gathers; a decode tile longer than that goes alone
_SMALLEST_KEY_STEP = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Attention of `size` × `num_queries` queries to `num_keys` keys each.

    Attributes:
        size, num_queries: the tile's queries are the next size × num_queries of the plan's `query_order`.
        rows: int64 [2, size, num_keys]; where K and where V lie, in rows of the group's `LayerCache`s.
        mask: [size, 1, num_queries, num_keys] in the model's dtype; added to the scores: 0 where a query sees a key,
            else -inf.
    """

    size: int
    num_queries: int
    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """All that the layers of one attention group need in a forward pass.

    Attributes:
        write_rows: int64 [2 × tokens]; where each token's K goes, then where each one's V goes.
        query_order: int64 [tokens]; the batch's tokens in the order in which the tiles take them.
        token_order: int64 [tokens]; the inverse.
        tiles: together they take every token once.
    """

    write_rows: Tensor
    query_order: Tensor
    token_order: Tensor
    tiles: list[Tile]


def plan_attention(batch: Batch, cache: KVCache) -> list[GroupPlan]:
    """A plan for each attention group of the cache, on the cache's device."""
    return [_plan_group(batch, cache, group) for group in range(len(cache.groups))]


def _plan_group(batch: Batch, cache: KVCache, group: int) -> GroupPlan:
    window, device = cache.groups[group].window, cache.device
    shapes = list(_shapes(batch, window))
    query_order = np.concatenate([_query_rows(first, count).reshape(-1) for _, first, count, _ in shapes])
    token_order = np.empty_like(query_order)
    token_order[query_order] = np.arange(len(query_order))
    slots = torch.from_numpy(batch.slot_mappings[group]).to(device)
    return GroupPlan(
        write_rows=cache.rows(group, slots).flatten(),
        query_order=torch.from_numpy(query_order).to(device),
        token_order=torch.from_numpy(token_order).to(device),
        tiles=[_make_tile(batch, cache, group, *shape) for shape in shapes],
    )


def _shapes(batch: Batch, window: int | None) -> Iterator[tuple[IntArray, IntArray, int, int]]:
    """(requests [size], first query rows [size], queries, keys) of every tile."""
    counts = np.diff(batch.cu_seqlens_q)
    (decodes,) = np.nonzero(counts == 1)
    if len(decodes):
        visible = batch.seqused_k[decodes] if window is None else np.minimum(batch.seqused_k[decodes], window)
        rounded = _round_up(visible)
        order = np.argsort(rounded, kind="stable")
        lengths, starts = np.unique(rounded[order], return_index=True)
        for length, requests in zip(lengths.tolist(), np.split(decodes[order], starts[1:]), strict=True):
            step = max(1, KEYS_PER_CALL // length)
            for i in range(0, len(requests), step):
                part = requests[i : i + step]
                yield part, batch.cu_seqlens_q[part], 1, length
    for request in np.nonzero(counts > 1)[0].tolist():
        end_row = int(batch.cu_seqlens_q[request + 1])
        to_position = int(batch.seqused_k[request]) - end_row
        for row in range(int(batch.cu_seqlens_q[request]), end_row, QUERY_TILE):
            num_queries = min(QUERY_TILE, end_row - row)
            last = row + num_queries - 1 + to_position
            first_key = 0 if window is None else max(0, row + to_position - window + 1)
            yield np.array([request]), np.array([row]), num_queries, last + 1 - first_key


def _query_rows(first_rows: IntArray, num_queries: int) -> IntArray:
    return first_rows[:, None] + np.arange(num_queries)


def _round_up(lengths: IntArray) -> IntArray:
    """Up to a multiple of a quarter of the power of two below, or of 64 if that is more."""
    step = np.maximum(_SMALLEST_KEY_STEP, 1 << np.maximum(np.log2(lengths).astype(np.int64) - 2, 0))
    return -(-lengths // step) * step


def _make_tile(
    batch: Batch,
    cache: KVCache,
    group: int,
    requests: IntArray,
    first_rows: IntArray,
    num_queries: int,
    num_keys: int,
) -> Tile:
    window, page_size = cache.groups[group].window, cache.page_size
    query_positions = batch.position_ids[_query_rows(first_rows, num_queries)]
    # Keys count from the first one that the first query sees; rounded-up tiles run past the last query's own.
    first_key = np.zeros_like(first_rows) if window is None else np.maximum(query_positions[:, 0] - window + 1, 0)
    key_positions = first_key[:, None] + np.arange(num_keys)
    seen = key_positions <= query_positions[:, -1:]
    pages, offsets = np.divmod(np.where(seen, key_positions, 0), page_size)
    slots = batch.block_tables[group][requests[:, None], pages] * page_size + offsets
    slots[~seen] = PADDING_BLOCK * page_size
    visible = key_positions[:, None, :] <= query_positions[:, :, None]
    if window is not None:
        visible &= key_positions[:, None, :] > query_positions[:, :, None] - window
    mask = torch.zeros((len(requests), 1, num_queries, num_keys), dtype=cache.dtype, device=cache.device)
    mask.masked_fill_(torch.from_numpy(~visible[:, None]).to(cache.device), -torch.inf)
    rows = cache.rows(group, torch.from_numpy(slots).to(cache.device))
    return Tile(len(requests), num_queries, rows, mask)
