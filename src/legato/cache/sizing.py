"""How much fits: from free memory to the chunks of the pool and the tokens of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup, ChunkLayout, chunks_for_blocks
from legato.config import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_REQUESTS_PER_BATCH,
    MIN_BATCH_TOKENS,
    ContinuousBatchingConfig,
    WorkloadHints,
)
from legato.engine.policy import SCHEDULING_POLICIES
from legato.errors import OutOfCacheMemoryError

_SHARED_MEMORY_FACTOR = 0.5  # of the share, where the processor lives off the same memory


@dataclass(frozen=True)
class ModelShape:
    """What the size of a step depends on.

    Attributes:
        groups: the attention groups.
        vocab_size, hidden_size, intermediate_size, num_heads: of the model.
        max_length: tokens a sequence may have, prompt and answer together.
        element_size: bytes of an activation and of an element of K or V.
    """

    groups: tuple[AttentionGroup, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    max_length: int
    element_size: int

    def step_bytes(self, batch_tokens: int, requests: int) -> int:
        """Memory of one forward pass at its peak: hidden states, MLP, Q/K/V, attention masks, logits and sampling."""
        head_dim = max(group.head_dim for group in self.groups)
        hidden = batch_tokens * self.element_size * (6 * self.hidden_size + 3 * self.intermediate_size)
        attention = batch_tokens * self.element_size * 6 * self.num_heads * head_dim
        # A token's mask has an element for each key it may see. Prompts are as long as the batch, or longer and alone.
        longest = min(self.max_length, max(batch_tokens, MIN_BATCH_TOKENS))
        masks = batch_tokens * longest * len(self.groups) * (self.element_size + 1)
        logits = requests * self.vocab_size * (self.element_size + 3 * 4)
        return hidden + attention + masks + logits


@dataclass(frozen=True)
class CacheSize:
    """The figures an engine is built with; see `ContinuousBatchingConfig` for what they mean.

    Attributes:
        page_size, num_blocks, max_batch_tokens, max_requests_per_batch, safety_margin: every None resolved.
        num_chunks: of the pool, the reserved ones included.
    """

    page_size: int
    num_blocks: int
    num_chunks: int
    max_batch_tokens: int
    max_requests_per_batch: int
    safety_margin: float


def resolve_size(
    config: ContinuousBatchingConfig, shape: ModelShape, hints: WorkloadHints, free_bytes: int
) -> CacheSize:
    """Settle every figure that the user left open, within `free_bytes`.

    Raises:
        OutOfCacheMemoryError: explicit figures do not fit, or nothing does. Names the figures that would.
    """
    page_size = config.page_size
    block_bytes = sum(group.block_size(page_size) for group in shape.groups) * shape.element_size
    chunk_bytes = ChunkLayout.of(shape.groups, page_size).chunk_size * shape.element_size
    budget = free_bytes - (RESERVED_CHUNKS + len(shape.groups)) * chunk_bytes  # each group rounds up to whole chunks
    requests = config.max_requests_per_batch or hints.num_requests or DEFAULT_REQUESTS_PER_BATCH
    batch_tokens = config.max_batch_tokens or _fitting_batch_tokens(shape, requests, budget // 2)
    requests = min(requests, batch_tokens)
    if config.max_requests_per_batch is None:
        while requests > 1 and shape.step_bytes(batch_tokens, requests) > budget // 2:
            requests //= 2
    step_bytes = shape.step_bytes(batch_tokens, requests)
    fitting = max(budget - step_bytes, 0) // block_bytes
    safety_margin = config.safety_margin
    if safety_margin is None:
        safety_margin = SCHEDULING_POLICIES[config.scheduler_type].safety_margin
    useful = _useful_blocks(shape, hints, requests, page_size, safety_margin)
    num_blocks = config.num_blocks or max(1, min(fitting, useful))
    if num_blocks > fitting:
        needed = step_bytes + num_blocks * block_bytes
        advice = f"num_blocks={fitting} would fit" if fitting else "a smaller max_batch_tokens or page_size may fit"
        raise OutOfCacheMemoryError(
            f"num_blocks={num_blocks} of page_size={page_size} with max_batch_tokens={batch_tokens} and "
            f"max_requests_per_batch={requests} needs {needed >> 20} MiB, but only {max(budget, 0) >> 20} MiB may be "
            f"used: {advice}"
        )
    num_chunks = RESERVED_CHUNKS + chunks_for_blocks(num_blocks, shape.groups, page_size)
    return CacheSize(page_size, num_blocks, num_chunks, batch_tokens, requests, safety_margin)


def _fitting_batch_tokens(shape: ModelShape, requests: int, budget: int) -> int:
    batch_tokens = DEFAULT_BATCH_TOKENS
    while batch_tokens > MIN_BATCH_TOKENS and shape.step_bytes(batch_tokens, min(requests, batch_tokens)) > budget:
        batch_tokens //= 2
    return batch_tokens


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
        free, shared = _available_host_bytes(), True
    share = config.max_memory_percent
    if share is None:
        share = (0.8 if samples else 0.9) * (_SHARED_MEMORY_FACTOR if shared else 1)
    return int(free * share)


def _available_host_bytes() -> int:
    """Free host memory, no more than the control group (a container, say) leaves."""
    available = int(psutil.virtual_memory().available)
    limit, used, stat = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.exists() and stat.exists() and (text := limit.read_text().strip()).isdigit():
        counters = dict(line.split() for line in stat.read_text().splitlines())
        reclaimable = int(counters.get("inactive_file", 0))
        available = min(available, max(0, int(text) - int(used.read_text()) + reclaimable))
    return available


def model_shape(model: Any, groups: Sequence[AttentionGroup], max_length: int) -> ModelShape:
    """Read a model's shape off its config and weights."""
    config = model.config.get_text_config()
    hidden_size = int(config.hidden_size)
    return ModelShape(
        groups=tuple(groups),
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),
        hidden_size=hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
        num_heads=int(config.num_attention_heads),
        max_length=max_length,
        element_size=model.dtype.itemsize,
    )
