"""What the cache's accounts cost a block, in a pool of a million."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from legato.cache.block_manager import BlockManager
from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup

PAGES_PER_REQUEST = 100
PAGE_SIZE = 16
GROUPS = (AttentionGroup((0,), None, 1, 1),)


def measure_pool(num_blocks: int) -> dict[str, Any]:
    """Fill the pool with shared pages of many requests, find them again, then let new ones evict them all.

    Returns:
        {"blocks", and microseconds a block: "allocate" (blank), "share" (make findable), "free" (with content), "find",
        "acquire" (a hit), "evict_and_allocate"}.
    """
    blocks = BlockManager(GROUPS, PAGE_SIZE, RESERVED_CHUNKS + num_blocks)
    num_requests = num_blocks // PAGES_PER_REQUEST
    hashes = [[f"{i}.{page}".encode() for page in range(PAGES_PER_REQUEST)] for i in range(num_requests)]
    timer = _Timer(num_requests * PAGES_PER_REQUEST)
    ids, tokens = [str(i) for i in range(num_requests)], PAGES_PER_REQUEST * PAGE_SIZE
    with timer.of("allocate"):
        for request_id in ids:
            blocks.admit(request_id, tokens, tokens)
    with timer.of("share"):
        for request_id, page_hashes in zip(ids, hashes, strict=True):
            blocks.share(request_id, page_hashes)
    with timer.of("free"):
        for request_id in ids:
            blocks.free(request_id)
    with timer.of("find"):
        for page_hashes in hashes:
            blocks.find_prefix(page_hashes)
    with timer.of("acquire"):
        for request_id, page_hashes in zip(ids, hashes, strict=True):
            blocks.admit(request_id, tokens, tokens, page_hashes, PAGES_PER_REQUEST)
    for request_id in ids:
        blocks.free(request_id)
    with timer.of("evict_and_allocate"):
        for request_id in ids:
            blocks.admit(request_id, tokens, tokens)
    return {"blocks": num_blocks, **timer.microseconds}


class _Timer:
    def __init__(self, num_blocks: int) -> None:
        self.microseconds: dict[str, float] = {}
        self._num_blocks = num_blocks

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.microseconds[name] = round((time.perf_counter() - start) / self._num_blocks * 1e6, 3)
