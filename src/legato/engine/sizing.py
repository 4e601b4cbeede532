"""How much fits: from free memory to the chunks of the pool and the tokens of a step."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from legato.attention.tiles import KEYS_PER_CALL, QUERY_TILE
from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup, ChunkLayout, chunks_for_blocks
from legato.config import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_REQUESTS_PER_BATCH,
    MAX_TOKENS_WITH_DRAFTS,
    MIN_BATCH_TOKENS,
    ContinuousBatchingConfig,
    WorkloadHints,
)
from legato.engine.policy import SCHEDULING_POLICIES
from legato.engine.runner import takes_logits_to_keep
from legato.errors import OutOfCacheMemoryError

logger = logging.getLogger(__name__)

_SHARED_MEMORY_FACTOR = 0.5  # of the share, where the processor lives off the same memory

# Measured with torch 2.13 and glibc 2.36; tests/engine/test_memory_budget.py holds them to it.
_SAMPLING_BYTES = 40  # of a logit, where top-p peaks: float32 before and after sorting, int64 order, 3 in float64
_SCORE_BYTES = 10  # of a score: as computed, and two of softmax's in float32
# Tiles differ in size, each a little from the one before, so that a freed one is rarely used again: glibc's malloc has
# up to 4 in vain for each in use, of those whose tensors are under 32 MiB; larger ones go back to the system.
_TILES_KEPT = 4
_FRAGMENTED_BYTES = 192 << 20


@dataclass(frozen=True)
class ModelShape:
    """What the size of a step depends on.

    Attributes:
        groups: the attention groups.
        vocab_size, hidden_size, num_heads: of the model.
        intermediate_size: of all MLPs that one token goes through in a layer: several with a mixture of experts.
        max_length: tokens a sequence may have, prompt and answer together.
        element_size: bytes of an activation.
        cache_element_size: bytes of an element of K or V in the cache.
        holds_scores: whether attention writes its scores to memory, and K and V once for each query head.
        all_logits: whether the model computes logits for every token, not only for those that are sampled.
        library_bytes: what libraries take once, however small the step.
    """

    groups: tuple[AttentionGroup, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    max_length: int
    element_size: int
    cache_element_size: int
    holds_scores: bool = False
    all_logits: bool = False
    library_bytes: int = 42 << 20

    def step_bytes(self, batch_tokens: int, requests: int, cached_tokens: int | None = None) -> int:
        """Memory of one forward pass at its peak.

        The parts add up, although they do not all live at once: an allocator keeps what one part has freed, and it
        rarely is of the size that the next one asks for.

        Args:
            batch_tokens: query tokens.
            requests: rows that are sampled.
            cached_tokens: tokens the cache holds, all for one request if need be; None: all that requests may have.
        """
        cached = requests * self.max_length if cached_tokens is None else cached_tokens
        return sum(self.step_parts(batch_tokens, requests, cached).values())

    def step_parts(self, batch_tokens: int, requests: int, cached_tokens: int) -> dict[str, int]:
        """The parts of `step_bytes`, by name."""
        keys = min(self.max_length, cached_tokens)
        seen = [keys if group.window is None else min(keys, group.window + QUERY_TILE) for group in self.groups]
        return {
            "libraries": self.library_bytes,
            "plan": sum(self._plan_bytes(batch_tokens, min(cached_tokens, requests * n), n) for n in seen),
            "layer": self._layer_bytes(batch_tokens),
            "tile": max(self._tile_bytes(batch_tokens, min(cached_tokens, requests * n), n) for n in seen),
            "logits": self._logits_bytes(batch_tokens, requests),
        }

    def _plan_bytes(self, batch_tokens: int, all_keys: int, keys: int) -> int:
        """Masks, an element for each query and key; where K and V lie, 16 bytes for each tile and key."""
        places = all_keys * 5 // 4 + batch_tokens // QUERY_TILE * keys  # decode tiles round up by a quarter
        return batch_tokens * keys * self.element_size + places * 2 * 8

    def _layer_bytes(self, batch_tokens: int) -> int:
        """What a token takes in the widest place of a layer, the MLP's product or the rotation of Q."""
        heads, kv_heads = self._attention_widths()
        mlp = 4 * self.hidden_size + 3 * self.intermediate_size  # embedding, layer's input, residual, normed; MLP
        attention = 3 * self.hidden_size + 4 * heads + 2 * kv_heads  # Q, its products with cosine and sine; K, V
        rotation = 2 * len(self.groups) * max(group.head_dim for group in self.groups)
        return batch_tokens * self.element_size * (max(mlp, attention) + rotation)

    def _tile_bytes(self, batch_tokens: int, all_keys: int, keys: int) -> int:
        """One call of the attention backend: K and V gathered, scores where they are held; and what tiles waste."""
        heads, kv_heads = self._attention_widths()
        width = 2 * self.element_size * (kv_heads + (heads if self.holds_scores else 0))
        scores = self.num_heads * _SCORE_BYTES if self.holds_scores else 0
        decode = min(max(KEYS_PER_CALL, keys), all_keys * 5 // 4) * (width + scores)
        prefill = keys * (width + min(batch_tokens, QUERY_TILE) * scores)
        tile = max(decode, prefill)
        return tile + _TILES_KEPT * min(tile, _FRAGMENTED_BYTES)

    def _logits_bytes(self, batch_tokens: int, requests: int) -> int:
        """Logits in the model's type and in float32, and what sampling by top-p makes of them: any request may ask."""
        copies = self.element_size + (4 if self.element_size < 4 else 0) + _SAMPLING_BYTES
        all_rows = batch_tokens * self.vocab_size * self.element_size if self.all_logits else 0
        return requests * self.vocab_size * copies + all_rows

    def _attention_widths(self) -> tuple[int, int]:
        """Elements of a token's Q, and of its K."""
        head_dim = max(group.head_dim for group in self.groups)
        return self.num_heads * head_dim, max(group.num_kv_heads for group in self.groups) * head_dim


@dataclass(frozen=True)
class CacheSize:
    """The figures an engine is built with; see `ContinuousBatchingConfig` for what they mean.

    Attributes:
        page_size, num_blocks, max_batch_tokens, max_requests_per_batch, safety_margin: every None resolved.
        num_chunks: of the pool, the reserved ones included.
        pool_bytes, step_bytes: what the pool and the largest step take.
    """

    page_size: int
    num_blocks: int
    num_chunks: int
    max_batch_tokens: int
    max_requests_per_batch: int
    safety_margin: float
    pool_bytes: int
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.step_bytes


def resolve_size(
    config: ContinuousBatchingConfig, shape: ModelShape, hints: WorkloadHints, free_bytes: int
) -> CacheSize:
    """Settle every figure that the user left open, within `free_bytes`.

    Raises:
        OutOfCacheMemoryError: explicit figures do not fit, or nothing does. Names the figures that would.
    """
    size = _size(config, shape, hints, free_bytes)
    if size.total_bytes > free_bytes:
        raise OutOfCacheMemoryError(
            f"num_blocks={size.num_blocks} of page_size={size.page_size} with max_batch_tokens={size.max_batch_tokens} "
            f"and max_requests_per_batch={size.max_requests_per_batch} needs "
            f"{size.total_bytes >> 20} MiB, but only {free_bytes >> 20} MiB may be used: "
            f"{_advice(config, shape, hints, free_bytes)}"
        )
    return size


def _size(config: ContinuousBatchingConfig, shape: ModelShape, hints: WorkloadHints, free_bytes: int) -> CacheSize:
    """The best figures there are; they need not fit."""
    room = _Room(shape, config.page_size, free_bytes, 1 if config.speculative is None else MAX_TOKENS_WITH_DRAFTS)
    margin = config.safety_margin
    if margin is None:
        margin = SCHEDULING_POLICIES[config.scheduler_type].safety_margin
    most_requests = config.max_requests_per_batch or hints.num_requests or DEFAULT_REQUESTS_PER_BATCH
    # At most half for the cache, at least a quarter for more tokens and requests than the fewest, while that is open.
    planned = config.num_blocks
    if planned is None:
        most = replace(room, free_bytes=free_bytes * 3 // 4)
        useful = _useful_blocks(shape, hints, most_requests, config.page_size, margin)
        planned = _most(lambda n: room.pool_bytes(n) <= free_bytes // 2 and most.holds(MIN_BATCH_TOKENS, 1, n), useful)
    most_tokens = hints.max_batch_tokens or DEFAULT_BATCH_TOKENS
    batch_tokens = config.max_batch_tokens or _batch_tokens(room, most_tokens, config.max_requests_per_batch, planned)
    requests = min(most_requests, batch_tokens)
    if config.max_requests_per_batch is None:
        while requests > 1 and not room.holds(batch_tokens, requests, planned):
            requests //= 2
    num_blocks = config.num_blocks
    if num_blocks is None:
        useful = _useful_blocks(shape, hints, requests, config.page_size, margin)
        num_blocks = _most(lambda n: room.holds(batch_tokens, requests, n), useful)
    return room.size(batch_tokens, requests, num_blocks, margin)


def _batch_tokens(room: "_Room", most: int, requests: int | None, num_blocks: int) -> int:
    """Tokens of a step, up to `most`, that leave the logits of `requests` their memory; if that is open, half of it."""
    if requests is None:
        left = room.free_bytes - room.needed(MIN_BATCH_TOKENS, 1, num_blocks)
        room = replace(room, free_bytes=room.free_bytes - max(0, left) // 2)
    fewest = max(MIN_BATCH_TOKENS, requests or 1)  # a token for each request at least
    batch_tokens = max(most, fewest)
    while batch_tokens > fewest and not room.holds(batch_tokens, requests or 1, num_blocks):
        batch_tokens = max(batch_tokens // 2, fewest)
    return batch_tokens


def _advice(config: ContinuousBatchingConfig, shape: ModelShape, hints: WorkloadHints, free_bytes: int) -> str:
    """Which figures would fit: one of those asked for made smaller, or else all of them."""

    def sized(**figures: Any) -> CacheSize:
        return _size(replace(config, **figures), shape, hints, free_bytes)

    def fits(name: str, value: int) -> bool:
        return sized(**{name: value}).total_bytes <= free_bytes

    names = ("num_blocks", "max_batch_tokens", "max_requests_per_batch")
    asked = {name: value for name in names if (value := getattr(config, name)) is not None}
    smaller = {name: _most(partial(fits, name), value) for name, value in asked.items()}
    single = [f"{name}={value}" for name, value in smaller.items() if fits(name, value)]
    if single:
        return f"{' or '.join(single)} would fit"
    size = sized(**dict.fromkeys(names))
    if asked and size.total_bytes <= free_bytes:
        return f"{', '.join(f'{name}={min(getattr(size, name), asked[name])}' for name in asked)} would fit"
    return "a smaller page_size, or a larger max_memory_percent, may fit"


@dataclass(frozen=True)
class _Room:
    """What fits into `free_bytes`; a pass has at least `min_rows` rows of logits, however few requests run."""

    shape: ModelShape
    page_size: int
    free_bytes: int
    min_rows: int = 1

    def holds(self, batch_tokens: int, requests: int, num_blocks: int) -> bool:
        return self.needed(batch_tokens, requests, num_blocks) <= self.free_bytes

    def needed(self, batch_tokens: int, requests: int, num_blocks: int) -> int:
        return self.step_bytes(batch_tokens, requests, num_blocks) + self.pool_bytes(num_blocks)

    def num_chunks(self, num_blocks: int) -> int:
        return RESERVED_CHUNKS + chunks_for_blocks(num_blocks, self.shape.groups, self.page_size)

    def pool_bytes(self, num_blocks: int) -> int:
        chunk_size = ChunkLayout.of(self.shape.groups, self.page_size).chunk_size
        return self.num_chunks(num_blocks) * chunk_size * self.shape.cache_element_size

    def step_bytes(self, batch_tokens: int, requests: int, num_blocks: int) -> int:
        pages = self._pages(num_blocks)
        columns = min(pages, -(-self.shape.max_length // self.page_size))
        tables = 3 * requests * columns * 8 * len(self.shape.groups)  # up to twice what is used, and a copy
        return tables + self.shape.step_bytes(batch_tokens, max(requests, self.min_rows), pages * self.page_size)

    def _pages(self, num_blocks: int) -> int:
        """Pages of tokens in the layers that see all: one long request leaves the others no more than its windows."""
        groups = self.shape.groups
        full = [group for group in groups if group.window is None] or groups
        windows = sum(g.block_size(self.page_size) * (g.window // self.page_size) for g in groups if g.window)
        elements = self.num_chunks(num_blocks) * ChunkLayout.of(groups, self.page_size).chunk_size - windows
        return max(num_blocks, elements // min(group.block_size(self.page_size) for group in full))

    def size(self, batch_tokens: int, requests: int, num_blocks: int, safety_margin: float) -> CacheSize:
        return CacheSize(
            self.page_size, num_blocks, self.num_chunks(num_blocks), batch_tokens, requests, safety_margin,
            self.pool_bytes(num_blocks), self.step_bytes(batch_tokens, requests, num_blocks),
        )  # fmt: skip


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, where all smaller ones do too; 1 if none does."""
    low, high = 1, max(1, limit)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _useful_blocks(shape: ModelShape, hints: WorkloadHints, requests: int, page_size: int, safety_margin: float) -> int:
    """Blocks beyond which the workload, or the longest sequences the model allows, could not use any."""
    longest = shape.max_length
    if hints.max_prompt_length is not None and hints.max_generated_length is not None:
        longest = min(longest, hints.max_prompt_length + hints.max_generated_length)
    at_once = min(requests, hints.num_requests or requests)
    blocks = at_once * -(-longest // page_size)
    return int(blocks / max(1 - safety_margin, 0.05)) + 1


def usable_bytes(config: ContinuousBatchingConfig, device: torch.device, samples: bool) -> int:
    """Bytes of the device's free memory that cache and step may take, by `max_memory_percent`."""
    if device.type == "cuda":
        free, shared = torch.cuda.mem_get_info(device)[0], False
    else:
        free, shared = available_host_bytes(), True
    share = config.max_memory_percent
    if share is None:
        share = (0.8 if samples else 0.9) * (_SHARED_MEMORY_FACTOR if shared else 1)
    return int(free * share)


def swap_bytes(config: ContinuousBatchingConfig, available_bytes: int) -> int:
    """Host memory for offloaded requests: what was asked for, at most the threshold's share of what is available."""
    most = int(available_bytes * config.cpu_offload_space_safety_threshold)
    if config.cpu_offload_space is None:
        return most
    wanted = config.cpu_offload_space * (1 << 30)
    if wanted > most:
        logger.warning(
            "cpu_offload_space=%s GiB is lowered to %.2f: "
            "cpu_offload_space_safety_threshold=%s of the memory available",
            config.cpu_offload_space, most / (1 << 30), config.cpu_offload_space_safety_threshold,
        )  # fmt: skip
    return int(min(wanted, most))


def available_host_bytes() -> int:
    """Free host memory, no more than the control group (a container, say) leaves."""
    available = int(psutil.virtual_memory().available)
    limit, used, stat = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.exists() and stat.exists() and (text := limit.read_text().strip()).isdigit():
        counters = dict(line.split() for line in stat.read_text().splitlines())
        reclaimable = int(counters.get("inactive_file", 0))
        available = min(available, max(0, int(text) - int(used.read_text()) + reclaimable))
    return available


def model_shape(
    model: Any,
    groups: Sequence[AttentionGroup],
    max_length: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    backend: str = "eager",
) -> ModelShape:
    """Read a model's shape off its config and weights.

    Args:
        model: a causal language model of transformers.
        groups: its attention groups.
        max_length: tokens a sequence may have.
        dtype: of its activations.
        cache_dtype: of K and V in the cache.
        backend: its attention implementation; the one that takes the most memory unless told.
    """
    config = model.config.get_text_config()
    hidden_size = int(config.hidden_size)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    return ModelShape(
        groups=tuple(groups),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config) or 4 * hidden_size,
        num_heads=int(config.num_attention_heads),
        max_length=max_length,
        element_size=dtype.itemsize,
        cache_element_size=cache_dtype.itemsize,
        holds_scores=backend == "eager" or _computes_scores(model, config, groups),
        all_logits=not takes_logits_to_keep(model),
        library_bytes=_library_bytes(model.device, dtype),
    )


def _intermediate_size(config: Any) -> int:
    """Width of a layer's MLP; of a mixture of experts, of all those that see a token."""
    dense = getattr(config, "intermediate_size", None) or 0
    dense = max(dense) if isinstance(dense, list | tuple) else int(dense)
    experts = int(getattr(config, "num_experts_per_tok", None) or 0)
    return max(dense, experts * int(getattr(config, "moe_intermediate_size", None) or dense))


def _computes_scores(model: Any, config: Any, groups: Sequence[AttentionGroup]) -> bool:
    """Whether even torch's attention function writes scores to memory, or is not used at all."""
    if getattr(config, "attn_logit_softcapping", None) or any(n.endswith("sinks") for n, _ in model.named_parameters()):
        return True
    # On CUDA no fused kernel takes both a mask and fewer K/V heads than heads.
    fewer_heads = any(group.num_kv_heads != config.num_attention_heads for group in groups)
    return model.device.type == "cuda" and fewer_heads


def _library_bytes(device: torch.device, dtype: torch.dtype) -> int:
    """What libraries allocate in the first steps and keep. Measured on CPU only."""
    if device.type == "cuda":
        return 256 << 20  # kernels loaded on first use, cuBLAS' workspace
    # Code first touched, Python's objects; MKL's buffers for each thread.
    needed = (32 << 20) + torch.get_num_threads() * (10 << 20)
    # oneDNN keeps kernels for each number of tokens it has met: 3 MiB each, this is for the first hundred.
    return needed + (0 if dtype == torch.float32 else 300 << 20)
