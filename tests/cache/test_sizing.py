"""From memory to figures: within the budget, as asked, or refused with what would fit."""

import re

import pytest
import torch

from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup, ChunkLayout
from legato.cache.sizing import ModelShape, resolve_size, usable_bytes
from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.errors import OutOfCacheMemoryError

FULL = ModelShape((AttentionGroup(tuple(range(30)), None, 3, 64),), 49152, 576, 1536, 9, 8192, 4)
HYBRID = ModelShape(
    (AttentionGroup((5, 11, 17), None, 1, 256), AttentionGroup(tuple(range(15)), 512, 1, 256)),
    262144, 640, 2048, 4, 32768, 4,
)  # fmt: skip
NO_HINTS = WorkloadHints()
GIB = 1 << 30


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("page_size", [4, 16, 256])
@pytest.mark.parametrize("free", [GIB, 3 * GIB, 20 * GIB])
def test_pool_and_step_stay_within_the_budget(shape: ModelShape, page_size: int, free: int) -> None:
    size = resolve_size(ContinuousBatchingConfig(page_size=page_size), shape, NO_HINTS, free)
    chunk_bytes = ChunkLayout.of(shape.groups, page_size).chunk_size * shape.element_size
    step = shape.step_bytes(size.max_batch_tokens, size.max_requests_per_batch)
    assert size.num_chunks * chunk_bytes + step <= free
    assert 256 <= size.max_batch_tokens <= 8192
    assert 1 <= size.max_requests_per_batch <= min(1024, size.max_batch_tokens)
    assert size.num_chunks > RESERVED_CHUNKS


def test_little_memory_lowers_the_step_before_the_cache_starves() -> None:
    roomy = resolve_size(ContinuousBatchingConfig(), FULL, NO_HINTS, 60 * GIB)
    tight = resolve_size(ContinuousBatchingConfig(), FULL, NO_HINTS, GIB)
    assert roomy.max_batch_tokens == 8192
    assert tight.max_batch_tokens < 8192
    assert tight.num_blocks >= 10


def test_explicit_figures_are_honoured() -> None:
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=100, max_batch_tokens=300, max_requests_per_batch=7, safety_margin=0.5
    )
    size = resolve_size(config, FULL, NO_HINTS, 4 * GIB)
    assert (size.num_blocks, size.max_batch_tokens, size.max_requests_per_batch) == (100, 300, 7)
    assert (size.safety_margin, size.num_chunks) == (0.5, 102)


def test_what_cannot_fit_is_refused_with_the_figure_that_would() -> None:
    with pytest.raises(OutOfCacheMemoryError, match=r"num_blocks=100000 .* would fit") as caught:
        resolve_size(ContinuousBatchingConfig(num_blocks=100000), FULL, NO_HINTS, 8 * GIB)
    fitting = int(re.search(r"num_blocks=(\d+) would fit", str(caught.value))[1])
    assert resolve_size(ContinuousBatchingConfig(num_blocks=fitting), FULL, NO_HINTS, 8 * GIB).num_blocks == fitting
    with pytest.raises(OutOfCacheMemoryError):
        resolve_size(ContinuousBatchingConfig(num_blocks=fitting + 1), FULL, NO_HINTS, 8 * GIB)
    with pytest.raises(OutOfCacheMemoryError):
        resolve_size(ContinuousBatchingConfig(), FULL, NO_HINTS, 10 << 20)


def test_the_default_margin_is_the_schedulers() -> None:
    for scheduler, margin in (("fifo", 0.15), ("prefill_first", 0.0)):
        config = ContinuousBatchingConfig(scheduler_type=scheduler)
        assert resolve_size(config, FULL, NO_HINTS, 4 * GIB).safety_margin == margin


def test_known_workloads_take_no_more_cache_than_they_can_use() -> None:
    hints = WorkloadHints(max_prompt_length=100, max_generated_length=28, num_requests=10)
    size = resolve_size(ContinuousBatchingConfig(page_size=16), FULL, hints, 8 * GIB)
    assert 80 <= size.num_blocks <= 100
    assert size.max_requests_per_batch == 10


def test_the_share_of_memory_depends_on_device_and_sampling() -> None:
    cpu = torch.device("cpu")
    greedy = usable_bytes(ContinuousBatchingConfig(), cpu, samples=False)
    assert usable_bytes(ContinuousBatchingConfig(), cpu, samples=True) < greedy
    assert usable_bytes(ContinuousBatchingConfig(max_memory_percent=0.1), cpu, samples=False) < greedy / 3
