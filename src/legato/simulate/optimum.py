"""The best that any eviction policy could do on a sequence of requests, knowing what is to come."""

import heapq
from collections.abc import Sequence

_NEVER = 1 << 62


def optimal_hits(requests: Sequence[Sequence[int]], num_blocks: int | None) -> int:
    """Blocks found in the cache when requests run one after another under Belady's policy.

    A request finds the longest run of its leading blocks that are cached, and all its blocks are in the cache while it
    runs. What goes is the block whose next use is farthest away, of those the deepest: any use of a block is a use of
    all before it, so leaves go before their ancestors. (L. A. Belady, "A study of replacement algorithms for a
    virtual-storage computer", 1966.)

    Args:
        requests: each one's blocks by content, from the start.
        num_blocks: capacity; None: no limit.
    """
    next_uses = _next_uses(requests)
    cached: dict[int, int] = {}  # block -> next use
    heap: list[tuple[int, int, int]] = []  # (minus next use, minus depth, block); stale entries stay until popped
    hits = 0
    for now, blocks in enumerate(requests):
        found = 0
        while found < len(blocks) and blocks[found] in cached:
            found += 1
        hits += found
        for block in blocks:
            cached.pop(block, None)  # owned while the request runs
        while num_blocks is not None and cached and len(cached) + len(blocks) > num_blocks:
            next_use, _, block = heapq.heappop(heap)
            if cached.get(block) == -next_use:
                del cached[block]
        for depth, block in enumerate(blocks):
            cached[block] = next_uses[now][depth]
            heapq.heappush(heap, (-cached[block], -depth, block))
    return hits


def _next_uses(requests: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each block of each request, the index of the next request that has it."""
    coming: dict[int, int] = {}
    result = []
    for now in range(len(requests) - 1, -1, -1):
        result.append([coming.get(block, _NEVER) for block in requests[now]])
        coming.update(zip(requests[now], [now] * len(requests[now]), strict=True))
    return result[::-1]
