"""What a step costs besides the model: schedule, allocate, build and commit, with a runner that computes nothing."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from legato.bench.requests import greedy_request
from legato.cache.block_manager import BlockManager
from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup
from legato.cache.prefix import PageHasher
from legato.cache.swap import CacheCopies, UnitCopies
from legato.engine.batch import Batch, BatchBuilder, StepResult
from legato.engine.engine import Engine
from legato.engine.policy import SCHEDULING_POLICIES
from legato.engine.scheduler import Scheduler, StepLimits

GROUPS = {
    "full": (AttentionGroup(tuple(range(30)), None, 3, 64),),
    "hybrid": (
        AttentionGroup((5, 11, 17), None, 1, 256),
        AttentionGroup(tuple(i for i in range(18) if i % 6 != 5), 512, 1, 256),
    ),
}
MAX_PROMPT = 600
WARM_UP_STEPS = 3


class _NoModel:
    """Gives every sampled row the same token at once, and moves nothing."""

    def weights_version(self) -> int:
        return 0

    weights_sample = weights_version

    def reread_weights(self) -> None:
        pass

    def copy(self, copies: Sequence[CacheCopies]) -> None:
        pass

    def offload(self, copies: Sequence[UnitCopies]) -> None:
        pass

    def restore(self, copies: Sequence[UnitCopies]) -> None:
        pass

    def run(self, batch: Batch) -> StepResult:
        return StepResult([5] * len(batch.logits_indices), [None] * len(batch.logits_indices))


def measure_overhead(num_requests: int, model: str, page_size: int, num_steps: int = 50) -> dict[str, Any]:
    """Time decode steps of `num_requests` running requests of up to 600 prompt tokens.

    Args:
        model: "full" (SmolLM2's layers) or "hybrid" (Gemma-3's).

    Returns:
        {"model", "page_size", "requests", "median_ms", "worst_ms"} a step.
    """
    engine = _engine(num_requests, model, page_size, num_steps)
    while engine.stats.num_waiting or (engine.has_work and engine.stats.num_batch_tokens != num_requests):
        engine.step()
    times = []
    for _ in range(WARM_UP_STEPS + num_steps):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e3)
    times = times[WARM_UP_STEPS:]
    return {
        "model": model,
        "page_size": page_size,
        "requests": num_requests,
        "median_ms": round(statistics.median(times), 3),
        "worst_ms": round(max(times), 3),
    }


def _engine(num_requests: int, model: str, page_size: int, num_steps: int) -> Engine:
    groups = GROUPS[model]
    chunks = RESERVED_CHUNKS + num_requests * (2 + (MAX_PROMPT + 2 * num_steps + 1024) // page_size * len(groups))
    blocks = BlockManager(groups, page_size, chunks)
    limits = StepLimits(max_batch_tokens=8192, max_requests_per_batch=num_requests, safety_margin=0.0)
    scheduler = Scheduler(SCHEDULING_POLICIES["fifo"], limits, blocks, PageHasher(page_size))
    no_model = _NoModel()
    engine = Engine(scheduler, blocks, BatchBuilder(page_size, len(groups)), no_model, no_model)
    rng = random.Random(0)
    for i in range(num_requests):
        prompt = [i] * rng.randrange(1, MAX_PROMPT)
        engine.submit(greedy_request(str(i), prompt, 1 << 20))
    return engine
