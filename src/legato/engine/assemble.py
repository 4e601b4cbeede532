"""Puts an engine together for a model: the one place that knows every part."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from legato.attention.interface import BACKENDS
from legato.attention.probe import find_attention_groups
from legato.cache.block_manager import BlockManager
from legato.cache.eviction import EVICTION_POLICIES
from legato.cache.kv import HostCache, KVCache
from legato.cache.pool import AttentionGroup, ChunkLayout
from legato.cache.prefix import PageHasher
from legato.config import MAX_TOKENS_WITH_DRAFTS, ContinuousBatchingConfig, WorkloadHints
from legato.decoder.fusing import FusedModel, fuse
from legato.decoder.spec import NotFusable
from legato.engine.batch import BatchBuilder
from legato.engine.engine import BatchRunner, Engine
from legato.engine.fused_runner import FusedRunner
from legato.engine.policy import SCHEDULING_POLICIES
from legato.engine.runner import ReferenceRunner, attention_configs
from legato.engine.scheduler import Scheduler, StepLimits
from legato.engine.sizing import (
    CacheSize,
    ModelShape,
    available_host_bytes,
    model_shape,
    resolve_size,
    swap_bytes,
    usable_bytes,
)
from legato.errors import UnsupportedModelError
from legato.kernels import load_kernels
from legato.kernels.interface import Kernels
from legato.live_model import FORWARD_LOCK

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineFacts:
    """What an engine was built with.

    Attributes:
        shape: of the model.
        size: every figure resolved.
        max_request_tokens: tokens, prompt and answer together, that the cache can hold for one request.
        dtype, device: of the model's weights then.
        cache_dtype: of K and V in the cache.
        description: all of that in a line.
    """

    shape: ModelShape
    size: CacheSize
    max_request_tokens: int
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype
    description: str


@dataclass(frozen=True)
class Wrappers:
    """What whoever measures puts around parts as they are made; nothing, unless told.

    Attributes:
        kernels: of the fused decoder.
        runner: of either path.
    """

    kernels: Callable[[Kernels], Kernels] = lambda kernels: kernels
    runner: Callable[[BatchRunner], BatchRunner] = lambda runner: runner


def assemble(
    model: Any,
    config: ContinuousBatchingConfig,
    hints: WorkloadHints,
    samples: bool,
    wrappers: Wrappers = Wrappers(),
) -> tuple[Engine, EngineFacts]:
    """Build cache, scheduler and runner for `model`.

    Args:
        samples: whether requests will mostly be sampled, which takes memory.
        wrappers: around kernels and runner.

    Raises:
        UnsupportedModelError: the model cannot be served.
        NotImplementedError: its attention implementation has no paged twin yet.
        OutOfCacheMemoryError: the figures asked for do not fit.
    """
    inner = unwrap(model)
    devices = {parameter.device for parameter in inner.parameters()}
    if len(devices) != 1:
        raise UnsupportedModelError(f"the model's weights lie on {len(devices)} devices; Legato needs them on one")
    configs = attention_configs(inner)
    with FORWARD_LOCK:  # another engine may have switched this config in the middle of a step
        backend = inner.config.get_text_config()._attn_implementation or "eager"
        if backend not in BACKENDS:
            raise NotImplementedError(
                f"attn_implementation={backend!r} is not implemented yet; load the model with {' or '.join(BACKENDS)}"
            )
        groups = find_attention_groups(inner, configs)
    path = _choose_path(inner, groups, config, wrappers.kernels)
    dtype = inner.dtype if path.fused is None else torch.float32
    cache_dtype = _cache_dtype(config, path, inner.dtype)
    shape = model_shape(inner, groups, longest_sequence(inner), dtype, cache_dtype, backend)
    size = resolve_size(config, shape, hints, usable_bytes(config, inner.device, samples))
    cache = KVCache(groups, size.page_size, size.num_chunks, cache_dtype, inner.device)
    unit_bytes = ChunkLayout.of(groups, size.page_size).unit_size * cache_dtype.itemsize
    host = HostCache(cache, swap_bytes(config, _free_host_bytes(inner.device, size)) // unit_bytes)
    policy = EVICTION_POLICIES[config.eviction_policy]()
    blocks = BlockManager(groups, size.page_size, size.num_chunks, policy, host.num_units)
    with_drafts = 0 if config.speculative is None else MAX_TOKENS_WITH_DRAFTS
    limits = StepLimits(size.max_batch_tokens, size.max_requests_per_batch, size.safety_margin, with_drafts)
    hasher = PageHasher(size.page_size) if config.allow_block_sharing else None
    scheduler = Scheduler(SCHEDULING_POLICIES[config.scheduler_type], limits, blocks, hasher)
    runner: BatchRunner
    if path.fused is None:
        runner = ReferenceRunner(inner, configs, cache, BACKENDS[backend])
    else:
        num_positions = min(shape.max_length, blocks.max_tokens_alone())
        runner = FusedRunner(path.fused, cache, num_positions)
    builder = BatchBuilder(size.page_size, len(groups))
    engine = Engine(scheduler, blocks, builder, wrappers.runner(runner), host)
    description = _describe(
        inner, f"{path.description}, paged|{backend}" if path.fused is None else path.description, config, shape, size,
        host.num_units * unit_bytes,
    )  # fmt: skip
    logger.info("%s", description)
    max_tokens = blocks.max_tokens_alone()
    return engine, EngineFacts(shape, size, max_tokens, inner.dtype, inner.device, cache_dtype, description)


@dataclass(frozen=True)
class _Path:
    """How the model is computed: by the fused decoder, or, without one, through its own modelling code."""

    fused: FusedModel | None
    description: str


def _choose_path(
    model: Any,
    groups: Sequence[AttentionGroup],
    config: ContinuousBatchingConfig,
    wrapped: Callable[[Kernels], Kernels],
) -> _Path:
    """The fused decoder where it is wanted and can stand in for the model.

    Raises:
        UnsupportedModelError: it is required, by name or for quantization, and cannot.
    """
    required = config.fused_decoder or config.quantization is not None
    if config.fused_decoder is False:
        if required:
            raise UnsupportedModelError(f"quantization={config.quantization!r} needs the fused decoder, not False")
        return _Path(None, "reference path (fused_decoder=False)")
    try:
        if model.device.type != "cpu":
            raise NotFusable(f"it runs on CPU only, and the model is on {model.device}")
        fused = fuse(model, groups, wrapped(load_kernels()), config.quantization)
    except NotFusable as error:
        if required:
            wanted = "fused_decoder=True" if config.fused_decoder else f"quantization={config.quantization!r}"
            raise UnsupportedModelError(
                f"{wanted} is not possible with {type(model).__name__}: {error}; "
                "None uses the model's own code where the fused decoder cannot stand in for it"
            ) from error
        return _Path(None, f"reference path ({error})")
    arithmetic = config.quantization or "float32"
    return _Path(fused, f"fused decoder in {arithmetic} (kernels: {fused.kernels.name})")


def _cache_dtype(config: ContinuousBatchingConfig, path: _Path, model_dtype: torch.dtype) -> torch.dtype:
    """Type of K and V: the modelling code hands over, and takes back, its own only."""
    wanted = None if config.kv_cache_dtype is None else getattr(torch, config.kv_cache_dtype)
    if path.fused is not None:
        return wanted or torch.float32
    if wanted not in (None, model_dtype):
        raise UnsupportedModelError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} is not possible here: this model, in "
            f"{str(model_dtype).removeprefix('torch.')}, runs on the {path.description}, which keeps K and V as the "
            "model has them; leave it at None"
        )
    return model_dtype


def _free_host_bytes(device: torch.device, size: CacheSize) -> int:
    """Host memory that is left beside the cache and a step's own, where they lie there too."""
    available = available_host_bytes()
    if device.type == "cuda":
        return available
    return max(0, available - size.pool_bytes - size.step_bytes)


def unwrap(model: Any) -> Any:
    """The transformers model (or PEFT's around it) inside torch.compile's and data-parallel wrappers."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def longest_sequence(model: Any) -> int:
    """Tokens a sequence may have before the model's positions run out, or mean something else."""
    config = model.config.get_text_config()
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    for rope in _rope_parameters(config):
        # These change the rotation of all positions once any sequence in the batch grows past the original length.
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]


def _describe(
    model: Any, path: str, config: ContinuousBatchingConfig, shape: ModelShape, size: CacheSize, swap_space: int
) -> str:
    kinds = ", ".join(
        f"{len(g.layers)} {'full' if g.window is None else f'sliding ({g.window})'}" for g in shape.groups
    )
    return (
        f"{type(model).__name__} in {str(model.dtype).removeprefix('torch.')} on {model.device}: {path}, "
        f"{kinds} attention layers; scheduler {config.scheduler_type}, page_size={size.page_size}, "
        f"num_blocks={size.num_blocks}, max_batch_tokens={size.max_batch_tokens}, "
        f"max_requests_per_batch={size.max_requests_per_batch}, safety_margin={size.safety_margin}, "
        f"prefix caching {f'on ({config.eviction_policy})' if config.allow_block_sharing else 'off'}, "
        f"host swap space {swap_space >> 20} MiB"
    )
