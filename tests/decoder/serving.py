"""Runs prompts through a fused decoder chunk by chunk, and gives back the logits of every token."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from legato.attention.probe import find_attention_groups
from legato.cache.block_manager import BlockManager
from legato.cache.kv import KVCache
from legato.decoder.fusing import FusedModel
from legato.engine.batch import BatchBuilder
from legato.engine.runner import attention_configs
from legato.engine.scheduler import ScheduledChunk
from legato.kernels import load_kernels
from legato.request import Request
from legato.sampling_params import SamplingParams

PAGE = 4
NUM_CHUNKS = 200


def read(model: Any) -> FusedModel:
    """The model's spec and packed weights."""
    return FusedModel.read(model, find_attention_groups(model, attention_configs(model)), load_kernels())


def own_logits(model: Any, prompt: list[int]) -> Tensor:
    """What the model's own forward pass gives, [tokens, vocabulary]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()


def fused_logits(
    fused: FusedModel,
    prompts: list[list[int]],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    only_sampled: bool = False,
    num_chunks: int = NUM_CHUNKS,
    in_step: bool = False,
) -> list[Tensor]:
    """For each prompt the logits of its tokens; with `only_sampled` those of its last token.

    Every pass takes a random chunk of each of some requests, or, `in_step`, one token of every one.
    """
    rng = random.Random(seed)
    cache = KVCache(fused.groups, PAGE, num_chunks, dtype, torch.device("cpu"))
    cache.units[2:].fill_(torch.nan)
    decoder = fused.decoder(cache, max(map(len, prompts)))
    blocks, builder = BlockManager(fused.groups, PAGE, num_chunks), BatchBuilder(PAGE, len(fused.groups))
    requests = [
        Request(str(i), ids, SamplingParams(), 1, frozenset(), 0, False, 0.0, list(ids))
        for i, ids in enumerate(prompts)
    ]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while left := [r for r in requests if r.num_computed_tokens < len(r.tokens)]:
        chunks = []
        for request in left if in_step else rng.sample(left, rng.randint(1, len(left))):
            count = 1 if in_step else min(rng.choice([1, 2, 7, 30]), len(request.tokens) - request.num_computed_tokens)
            if request.request_id not in blocks.tables:
                assert blocks.admit(request.request_id, len(request.tokens), count)
            else:
                assert blocks.grow(request.request_id, request.num_computed_tokens, count) == count
            chunks.append(ScheduledChunk(request, count))
        batch = builder.build(chunks, blocks.tables)
        if not only_sampled:
            batch = replace(batch, logits_indices=np.arange(len(batch.input_ids)))
        with torch.no_grad():
            rows = decoder.forward(batch).clone()
        taken = 0
        for chunk in chunks:
            request = chunk.request
            request.num_computed_tokens += chunk.num_tokens
            last = request.num_computed_tokens == len(request.tokens)
            count = int(last) if only_sampled else chunk.num_tokens
            logits[int(request.request_id)].append(rows[taken : taken + count])
            taken += count
        assert taken == len(rows)
    return [torch.cat(parts) for parts in logits]
