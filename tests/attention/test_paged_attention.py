"""Paged attention against attention written out per query, over random batches, windows and layouts."""

import random
from typing import Any

import pytest
import torch

from legato.attention.interface import BACKENDS, AttentionCall, PagedAttention
from legato.attention.tiles import plan_attention
from legato.cache.block_manager import BlockManager
from legato.cache.kv import KVCache
from legato.cache.pool import AttentionGroup
from legato.engine.batch import BatchBuilder
from legato.engine.scheduler import ScheduledChunk
from legato.request import Request
from legato.sampling_params import SamplingParams

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


def make_request(name: str, length: int) -> Request:
    ids = [1] * length
    return Request(name, ids, SamplingParams(), 1, frozenset(), 0, False, 0.0, list(ids))


def attend_by_definition(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, call: AttentionCall
) -> torch.Tensor:
    """One query [heads, head_dim] against [positions, kv_heads, head_dim]; [heads, head_dim]."""
    first = 0 if call.window is None else max(0, position - call.window + 1)
    out = torch.empty_like(query)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = keys[first : position + 1, kv_head] @ query[head] * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if call.sinks is None else call.sinks[head].exp())
        out[head] = (weights / total) @ values[first : position + 1, kv_head]
    return out


class Sequences:
    """Random sequences fed to the cache chunk by chunk, with all K and V kept in plain tensors beside it."""

    def __init__(self, window: int | None, page_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.window = window
        # The layers of interest (0 and 2) share the pool with a group of the other kind.
        groups = (
            AttentionGroup((1, 3, 4), None if window else 5, KV_HEADS, HEAD_DIM),
            AttentionGroup((0, 2), window, KV_HEADS, HEAD_DIM),
        )
        self.blocks = BlockManager(groups, page_size, 200)
        self.cache = KVCache(groups, page_size, 200, torch.float32, torch.device("cpu"))
        self.builder = BatchBuilder(page_size, len(groups))
        lengths = [self.rng.choice([1, 2, 7, 40, 150, 300]) for _ in range(9)]
        self.requests = [make_request(str(i), length) for i, length in enumerate(lengths)]
        self.known = {r.request_id: torch.randn(2, 2, len(r.tokens), KV_HEADS, HEAD_DIM) for r in self.requests}

    def step(self, backend: str, **arguments: Any) -> None:
        """Run a random chunk of each of some requests through both layers and check every query."""
        left = [r for r in self.requests if r.num_computed_tokens < len(r.tokens)]
        chosen = self.rng.sample(left, self.rng.randrange(1, len(left) + 1))
        chunks = [ScheduledChunk(r, n) for r in chosen if (n := self.grant(r))]
        batch = self.builder.build(chunks, self.blocks.tables)
        attention = PagedAttention(self.cache, plan_attention(batch, self.cache), BACKENDS[backend])
        for index, layer in enumerate((0, 2)):
            spans = [(c.request, c.request.num_computed_tokens, c.num_tokens) for c in chunks]
            key, value = (
                torch.cat([self.known[r.request_id][index, kind, start : start + n] for r, start, n in spans])
                for kind in (0, 1)
            )
            query = torch.randn(len(key), HEADS, HEAD_DIM)
            call = AttentionCall(
                layer, *(t.transpose(0, 1)[None] for t in (query, key, value)), window=self.window, unknown=(),
                **arguments,
            )  # fmt: skip
            out = attention(call)
            assert out.shape == (1, len(query), HEADS, HEAD_DIM)
            row = 0
            for request, start, count in spans:
                keys, values = self.known[request.request_id][index]
                for position in range(start, start + count):
                    expected = attend_by_definition(query[row], keys, values, position, call)
                    torch.testing.assert_close(out[0, row], expected, atol=1e-5, rtol=1e-4)
                    row += 1
        for chunk in chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens

    def grant(self, request: Request) -> int:
        left = len(request.tokens) - request.num_computed_tokens
        wanted = min(left, self.rng.choice([1, 1, 3, 64, 200]))
        if request.request_id not in self.blocks.tables:
            return wanted if self.blocks.admit(request.request_id, len(request.tokens), wanted) else 0
        return self.blocks.grow(request.request_id, request.num_computed_tokens, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [4, 16, 256])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_every_query_sees_exactly_its_keys(window: int | None, page_size: int, backend: str) -> None:
    sequences = Sequences(window, page_size, seed=page_size + (window or 0))
    for _ in range(8):
        if all(r.num_computed_tokens == len(r.tokens) for r in sequences.requests):
            break
        sequences.step(backend, scaling=0.3, softcap=None, sinks=None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 6])
def test_softcaps_and_sinks(window: int | None, backend: str) -> None:
    sequences = Sequences(window, 16, seed=1)
    for _ in range(4):
        sequences.step(backend, scaling=0.5, softcap=1.5, sinks=torch.randn(HEADS))


def test_decode_tiles_waste_little_and_are_few() -> None:
    """300 decodes of every length up to 4,000: padding stays within a quarter (or 63 keys), calls within dozens."""
    requests = [make_request(str(i), 13 * i + 2) for i in range(300)]
    groups = (AttentionGroup((0,), None, 1, 4),)
    blocks, cache = BlockManager(groups, 64, 15000), KVCache(groups, 64, 15000, torch.float32, torch.device("cpu"))
    chunks = []
    for request in requests:
        assert blocks.admit(request.request_id, len(request.tokens), 1)
        request.num_computed_tokens = len(request.tokens) - 1
        chunks.append(ScheduledChunk(request, 1))
    (plan,) = plan_attention(BatchBuilder(64, 1).build(chunks, blocks.tables), cache)
    gathered = sum(tile.rows[0].numel() for tile in plan.tiles)
    visible = sum(len(request.tokens) for request in requests)
    assert gathered <= visible * 1.25 + 63 * len(requests)
    assert len(plan.tiles) < 80
    assert all(tile.rows[0].numel() <= max(16384, tile.rows.shape[2]) for tile in plan.tiles)
