"""From a loaded model to a decoder that computes the same, made sure of before anything is served with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from legato.cache.block_manager import BlockManager
from legato.cache.kv import KVCache
from legato.cache.pool import RESERVED_CHUNKS, AttentionGroup, chunks_for_blocks
from legato.decoder.decoder import Decoder
from legato.decoder.reader import read_spec
from legato.decoder.rotary import rotary_tables
from legato.decoder.spec import DecoderSpec, NotFusable
from legato.decoder.weights import Weights
from legato.engine.batch import NOTHING_SCORED, Batch, IntArray, plain_sampling
from legato.kernels.interface import Kernels
from legato.kernels.packing import Quantization
from legato.live_model import FORWARD_LOCK, evaluation_mode

_CHECKED = (17, 1)  # tokens, in two passes: a prompt of more than a tile, and a token by itself
_CHECK_PAGE_SIZE = 4
# Mean difference of logits, in standard deviations of the model's own. Rounding stays well below: with SmolLM2 it is
# 1e-6 in float32, and 0.08 in bfloat16, where it is the model's own.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.25}
_QUANTIZED_TOLERANCE = 0.5  # finds what is wrong altogether; what int8 costs is measured elsewhere


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A model's spec and its packed weights; `decoder` adds a cache.

    Attributes:
        model: the model they are of.
        groups: its attention groups.
        kernels: what its decoders compute with.
        spec: what it is made of.
        weights: packed for `kernels`.
        quantization: of the weights, or None.
    """

    model: Any
    groups: tuple[AttentionGroup, ...]
    kernels: Kernels
    spec: DecoderSpec
    weights: Weights
    quantization: Quantization | None

    @classmethod
    def read(
        cls, model: Any, groups: Sequence[AttentionGroup], kernels: Kernels, quantization: Quantization | None = None
    ) -> "FusedModel":
        """Read the spec and pack the weights.

        Raises:
            NotFusable: the model is not one that the fused decoder stands in for.
        """
        spec = read_spec(model, groups)
        weights = Weights(spec, kernels, quantization)
        return cls(model, tuple(groups), kernels, spec, weights, quantization)

    def decoder(self, cache: KVCache, num_positions: int) -> Decoder:
        """A decoder for tokens at positions below `num_positions`."""
        names = sorted({layer.rotary for layer in self.spec.layers if layer.rotary is not None})
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first allows gradients
            rotaries = rotary_tables(self.model, names, num_positions)
        return Decoder(self.spec, self.weights, rotaries, self.kernels, cache)


def fuse(
    model: Any, groups: Sequence[AttentionGroup], kernels: Kernels, quantization: Quantization | None = None
) -> FusedModel:
    """`FusedModel.read`, and a comparison of its logits with the model's own on a few random tokens.

    Raises:
        NotFusable: the model is not one that the fused decoder stands in for, or they differ.
    """
    fused = FusedModel.read(model, groups, kernels, quantization)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(fused.spec.vocab_size, (sum(_CHECKED),), generator=generator)
    device = torch.device(model.device).type
    # The caller's autocast is its own: the engine's thread has none.
    with torch.no_grad(), torch.autocast(device, enabled=False), FORWARD_LOCK, evaluation_mode(model):
        expected = model(input_ids=input_ids[None], use_cache=False).logits[0].float()
    logits = _check_logits(fused, input_ids.tolist())
    difference = float((logits - expected).abs().mean() / expected.std())
    tolerance = _TOLERANCE[model.dtype] if quantization is None else _QUANTIZED_TOLERANCE
    if math.isnan(difference):
        raise NotFusable("its logits are not numbers: are there any in its weights that are not?")
    if difference > tolerance:
        raise NotFusable(f"its logits differ from the model's own by {difference:.2g} standard deviations")
    return fused


def _check_logits(fused: FusedModel, input_ids: list[int]) -> Tensor:
    """Logits of every token, float32 [tokens, vocabulary], through a small cache."""
    num_chunks = RESERVED_CHUNKS + chunks_for_blocks(2 * len(input_ids), fused.groups, _CHECK_PAGE_SIZE)
    cache = KVCache(fused.groups, _CHECK_PAGE_SIZE, num_chunks, torch.float32, torch.device("cpu"))
    decoder = fused.decoder(cache, len(input_ids))
    blocks = BlockManager(fused.groups, _CHECK_PAGE_SIZE, num_chunks)
    blocks.admit("check", len(input_ids), len(input_ids))
    block_tables = [np.array(table.blocks) for table in blocks.tables["check"]]
    logits, start = [], 0
    for count in _CHECKED:
        batch = _batch(np.array(input_ids), start, count, block_tables)
        with torch.no_grad():
            logits.append(decoder.forward(batch).clone())
        start += count
    return torch.cat(logits)


def _batch(input_ids: IntArray, start: int, count: int, block_tables: Sequence[IntArray]) -> Batch:
    """Tokens from `start` on of one sequence, whose blocks are there; all of them sampled."""
    position_ids = np.arange(start, start + count)
    pages, offsets = np.divmod(position_ids, _CHECK_PAGE_SIZE)
    return Batch(
        input_ids=input_ids[position_ids],
        position_ids=position_ids,
        cu_seqlens_q=np.array([0, count]),
        seqused_k=np.array([start + count]),
        block_tables=tuple(table[None] for table in block_tables),
        slot_mappings=tuple(table[pages] * _CHECK_PAGE_SIZE + offsets for table in block_tables),
        logits_indices=np.arange(count),
        sampling=plain_sampling(count),
        scored=NOTHING_SCORED,
    )
