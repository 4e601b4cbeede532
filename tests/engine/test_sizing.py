"""From memory to figures: within the budget, as asked, or refused with what would fit."""

import re
from dataclasses import replace

import pytest
import torch

from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup, ChunkLayout
from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.engine.sizing import CacheSize, ModelShape, resolve_size, usable_bytes
from legato.errors import OutOfCacheMemoryError

FULL = ModelShape((AttentionGroup(tuple(range(30)), None, 3, 64),), 49152, 576, 1536, 9, 8192, 4, 4)
HYBRID = ModelShape(
    (AttentionGroup((5, 11, 17), None, 1, 256), AttentionGroup(tuple(range(15)), 512, 1, 256)),
    262144, 640, 2048, 4, 32768, 4, 4,
)  # fmt: skip
NO_HINTS = WorkloadHints()
GIB = 1 << 30


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("page_size", [4, 16, 256])
@pytest.mark.parametrize("free", [GIB, 3 * GIB, 20 * GIB])
def test_pool_and_step_stay_within_the_budget(shape: ModelShape, page_size: int, free: int) -> None:
    size = resolve_size(ContinuousBatchingConfig(page_size=page_size), shape, NO_HINTS, free)
    chunk_bytes = ChunkLayout.of(shape.groups, page_size).chunk_size * shape.cache_element_size
    assert size.pool_bytes == size.num_chunks * chunk_bytes
    assert size.step_bytes > shape.step_bytes(size.max_batch_tokens, size.max_requests_per_batch, page_size)
    assert size.pool_bytes + size.step_bytes <= free
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


ASKED_TOO_MUCH = [
    {"num_blocks": 100000},
    {"max_batch_tokens": 1 << 20},
    {"max_requests_per_batch": 4000, "max_batch_tokens": 4000},
    {"num_blocks": 1000, "max_requests_per_batch": 3000},
    {"num_blocks": 1000, "max_batch_tokens": 200000},
    {"num_blocks": 100000, "max_batch_tokens": 200000, "max_requests_per_batch": 5000},
]


@pytest.mark.parametrize("shape", [FULL, HYBRID, replace(FULL, holds_scores=True)], ids=["full", "hybrid", "eager"])
@pytest.mark.parametrize("asked", ASKED_TOO_MUCH, ids=lambda asked: "-".join(asked))
def test_what_cannot_fit_is_refused_with_figures_that_do(shape: ModelShape, asked: dict[str, int]) -> None:
    config = ContinuousBatchingConfig(page_size=16, **asked)
    with pytest.raises(OutOfCacheMemoryError, match="would fit") as caught:
        resolve_size(config, shape, NO_HINTS, 4 * GIB)
    advice = str(caught.value).split(": ")[-1].removesuffix(" would fit")
    for alternative in advice.split(" or "):
        figures = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", alternative)}
        assert figures.keys() <= asked.keys() and all(figures[name] < asked[name] for name in figures)
        size = resolve_size(replace(config, **figures), shape, NO_HINTS, 4 * GIB)
        assert size.pool_bytes + size.step_bytes <= 4 * GIB
        for name, value in {**asked, **figures}.items():
            assert getattr(size, name) == min(value, size.max_batch_tokens if "requests" in name else value)


def test_the_figure_named_is_the_largest_that_fits() -> None:
    for name, others in (("num_blocks", {}), ("max_batch_tokens", {"num_blocks": 100}),
                         ("max_requests_per_batch", {"num_blocks": 100, "max_batch_tokens": 8192})):  # fmt: skip
        with pytest.raises(OutOfCacheMemoryError) as caught:
            resolve_size(ContinuousBatchingConfig(**others, **{name: 1 << 24}), FULL, NO_HINTS, 8 * GIB)
        largest = int(re.search(rf"{name}=(\d+)( or .*)? would fit", str(caught.value))[1])
        size = resolve_size(ContinuousBatchingConfig(**others, **{name: largest}), FULL, NO_HINTS, 8 * GIB)
        assert getattr(size, name) == largest
        with pytest.raises(OutOfCacheMemoryError):
            resolve_size(ContinuousBatchingConfig(**others, **{name: largest + 1}), FULL, NO_HINTS, 8 * GIB)


def test_where_nothing_fits_the_refusal_names_no_figures() -> None:
    with pytest.raises(OutOfCacheMemoryError, match="10 MiB may be used: a smaller page_size"):
        resolve_size(ContinuousBatchingConfig(), FULL, NO_HINTS, 10 << 20)


def test_a_step_takes_more_for_more_of_anything() -> None:
    step = FULL.step_bytes(1024, 64, 4000)
    assert FULL.step_bytes(2048, 64, 4000) > step
    assert FULL.step_bytes(1024, 128, 4000) > step
    assert FULL.step_bytes(1024, 64, 5000) > step
    assert FULL.step_bytes(1024, 64) >= FULL.step_bytes(1024, 64, 8192)
    assert replace(FULL, holds_scores=True).step_bytes(1024, 64, 4000) > step
    assert replace(FULL, all_logits=True).step_bytes(1024, 64, 4000) >= step + 1024 * 49152 * 4
    assert replace(FULL, element_size=2).step_bytes(1024, 64, 4000) < step


def test_a_cache_of_smaller_elements_holds_more() -> None:
    config = ContinuousBatchingConfig(page_size=16, max_batch_tokens=256)
    whole = resolve_size(config, FULL, NO_HINTS, GIB)
    half = resolve_size(config, replace(FULL, cache_element_size=2), NO_HINTS, GIB)
    assert half.num_blocks > 1.3 * whole.num_blocks


def test_explicit_blocks_leave_the_rest_to_the_step() -> None:
    few = resolve_size(ContinuousBatchingConfig(page_size=16, num_blocks=100), FULL, NO_HINTS, GIB)
    many = resolve_size(ContinuousBatchingConfig(page_size=16, num_blocks=1000), FULL, NO_HINTS, GIB)
    assert few.num_blocks == 100 and many.num_blocks == 1000
    assert few.max_batch_tokens > many.max_batch_tokens


def test_the_default_margin_is_the_schedulers() -> None:
    for scheduler, margin in (("fifo", 0.15), ("prefill_first", 0.0)):
        config = ContinuousBatchingConfig(scheduler_type=scheduler)
        assert resolve_size(config, FULL, NO_HINTS, 4 * GIB).safety_margin == margin


def test_a_hint_of_short_passes_is_a_default_and_no_demand() -> None:
    """Else as if it had been left open: raised for requests, lowered for memory, overruled."""
    hints = WorkloadHints(max_batch_tokens=512)
    assert resolve_size(ContinuousBatchingConfig(), FULL, hints, 60 * GIB).max_batch_tokens == 512
    many = resolve_size(ContinuousBatchingConfig(max_requests_per_batch=1000), FULL, hints, 60 * GIB)
    assert (many.max_batch_tokens, many.max_requests_per_batch) == (1000, 1000)
    tight = next(
        size
        for mib in range(64, 4096, 16)
        if (size := _fitting(ContinuousBatchingConfig(num_blocks=4), FULL, hints, mib << 20)) is not None
    )
    assert tight.max_batch_tokens < 512
    assert resolve_size(ContinuousBatchingConfig(max_batch_tokens=2048), FULL, hints, 60 * GIB).max_batch_tokens == 2048


def _fitting(
    config: ContinuousBatchingConfig, shape: ModelShape, hints: WorkloadHints, free_bytes: int
) -> CacheSize | None:
    try:
        return resolve_size(config, shape, hints, free_bytes)
    except OutOfCacheMemoryError:
        return None


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
