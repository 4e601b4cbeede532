"""Attention of the torch kernels against attention written out per query, with traps where nothing may be read."""

import random

import pytest
import torch
from torch import Tensor

from legato.cache.kv import KVCache
from legato.cache.pool import AttentionGroup
from legato.kernels import reference
from legato.kernels.interface import AttentionSpec, HeadLayout, PassTables
from legato.kernels.reference import TorchKernels

LAYOUT = HeadLayout(num_heads=6, num_kv_heads=2, head_dim=8)
NUM_BLOCKS = 60


def attend_by_definition(query: Tensor, keys: Tensor, values: Tensor, position: int, spec: AttentionSpec) -> Tensor:
    """One query [heads, head_dim] against [positions, kv_heads, head_dim]; [heads × head_dim]."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    outs = []
    for head in range(LAYOUT.num_heads):
        kv_head = head * LAYOUT.num_kv_heads // LAYOUT.num_heads
        scores = keys[first : position + 1, kv_head] @ query[head] * spec.scaling
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if spec.sinks is None else spec.sinks[head].exp())
        outs.append((weights / total) @ values[first : position + 1, kv_head])
    return torch.cat(outs)


SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=6),
    "window of one": AttentionSpec(0.3, window=1),
    "softcap": AttentionSpec(0.5, softcap=1.5),
    "sinks": AttentionSpec(0.5, sinks=torch.linspace(-1, 2, LAYOUT.num_heads)),
    "all": AttentionSpec(0.5, window=20, softcap=1.5, sinks=torch.linspace(-1, 2, LAYOUT.num_heads)),
}


@pytest.mark.parametrize("scores_per_call", [1 << 22, 1000], ids=["whole", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("name", SPECS)
def test_every_query_sees_exactly_its_keys(
    name: str, page_size: int, dtype: torch.dtype, scores_per_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "SCORES_PER_CALL", scores_per_call)
    spec, rng = SPECS[name], random.Random(page_size)
    torch.manual_seed(page_size)
    group = AttentionGroup((0, 1, 2), spec.window, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    cache = KVCache([group], page_size, 2 + NUM_BLOCKS, dtype, torch.device("cpu"))
    cache.units.fill_(torch.nan)  # what is read and should not be is seen in the result
    # Chunks of queries, single ones among them, that end where their request's tokens do.
    requests = [(1, 1), (1, 50), (7, 7), (40, 50), (1, 4), (5, 33)]
    blocks = rng.sample(range(2, 2 + NUM_BLOCKS), NUM_BLOCKS)
    block_table = torch.full((len(requests), 50 // page_size + 5), 10**9)
    kept = []
    for i, (count, length) in enumerate(requests):
        first = 0 if spec.window is None else max(0, length - count - spec.window + 1)
        for page in range(first // page_size, -(-length // page_size)):
            block_table[i, page] = blocks.pop()
        both = torch.randn(2, length, LAYOUT.num_kv_heads, LAYOUT.head_dim).to(dtype)
        positions = torch.arange(first, length)
        slots = block_table[i, positions // page_size] * page_size + positions % page_size
        for rows, new in zip(cache.rows(0, slots), both, strict=True):
            cache.layers[1].storage.index_copy_(0, rows, new[first:].flatten(1))
        kept.append(both.float())
    counts = torch.tensor([count for count, _ in requests])
    cu_seqlens_q = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tables = PassTables(
        position_ids=torch.cat([torch.arange(length - count, length) for count, length in requests]),
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=torch.tensor([length for _, length in requests]),
        block_table=block_table,
        write_rows=torch.empty((2, 0), dtype=torch.int64),
        page_size=page_size,
        block_rows=2 * 3 * page_size,
    )
    qkv = torch.randn(int(counts.sum()), LAYOUT.width)
    out = torch.empty(len(qkv), LAYOUT.num_heads * LAYOUT.head_dim)
    TorchKernels().attention(qkv, LAYOUT, spec, tables, cache.layers[1], out)
    for i, (count, length) in enumerate(requests):
        for offset in range(count):
            row = int(cu_seqlens_q[i]) + offset
            query = qkv[row, : LAYOUT.num_heads * LAYOUT.head_dim].view(LAYOUT.num_heads, LAYOUT.head_dim)
            expected = attend_by_definition(query, *kept[i], length - count + offset, spec)
            torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)
