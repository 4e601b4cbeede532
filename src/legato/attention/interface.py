"""Where transformers' modelling code meets the paged cache.

transformers looks attention functions up by name and hands them whatever keyword arguments the model was called with.
Ours is registered under `IMPLEMENTATION`; a forward pass brings its `PagedAttention` along as the keyword `paged`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from legato.attention.eager import attend_eager
from legato.attention.sdpa import attend_sdpa
from legato.attention.tiles import GroupPlan
from legato.cache.kv import KVCache

IMPLEMENTATION = "legato_paged"


class TileAttention(Protocol):
    """Attention of one tile.

    Args:
        query: [tile, heads, queries, head_dim].
        key, value: [tile, kv_heads, keys, head_dim]; heads is a multiple of kv_heads.
        mask: [tile, 1, queries, keys], added to the scores: 0 or -inf.
        scaling: factor on the scores.
        softcap: scores become softcap × tanh(scores / softcap), unless None.
        sinks: [heads], a score without a value in each head's softmax, or None.

    Returns:
        [tile, queries, heads, head_dim].
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor: ...


BACKENDS: dict[str, TileAttention] = {"eager": attend_eager, "sdpa": attend_sdpa}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer of transformers' modelling code asks for.

    Attributes:
        layer: the layer's index.
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim]; heads is a multiple of kv_heads.
        scaling, softcap, sinks: see `TileAttention`.
        window: positions a query sees, its own included; None: all.
        unknown: names of whatever else the layer passed that is not None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    window: int | None
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of one forward pass.

    Attributes:
        cache: where K and V are written and read.
        plans: for each attention group, what its layers do.
        attend: the backend.
    """

    cache: KVCache
    plans: list[GroupPlan]
    attend: TileAttention

    def __call__(self, call: AttentionCall) -> Tensor:
        """Write the layer's new K and V, then attend. Returns [1, tokens, heads, head_dim]."""
        stored, plan = self.cache.layers[call.layer], self.plans[self.cache.group_of_layer[call.layer]]
        stored.write(plan.write_rows, call.key, call.value)
        queries = call.query[0].transpose(0, 1).index_select(0, plan.query_order)
        out, start = torch.empty_like(queries), 0
        for tile in plan.tiles:
            end = start + tile.size * tile.num_queries
            query = queries[start:end].unflatten(0, (tile.size, tile.num_queries)).transpose(1, 2)
            key, value = stored.read(tile.rows)
            attended = self.attend(query, key, value, tile.mask, call.scaling, call.softcap, call.sinks)
            out[start:end] = attended.flatten(0, 1)
            start = end
        return out.index_select(0, plan.token_order)[None]


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    *,
    paged: Callable[[AttentionCall], Tensor] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer; `paged` computes it, mostly a `PagedAttention`."""
    if paged is None:
        raise RuntimeError("the model was called while Legato runs a step on it: do that inside `manager.pause()`")
    if attention_mask is not None:
        others["attention_mask"] = attention_mask
    call = AttentionCall(
        layer=int(module.layer_idx),
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
        unknown=tuple(name for name, value in others.items() if value is not None and name not in _HARMLESS),
    )
    return paged(call), None


# Arguments that say nothing about which keys a query sees or how they are weighed.
_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits", "is_causal"}

AttentionInterface.register(IMPLEMENTATION, paged_attention)


@contextmanager
def attention_implementation(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Set the configs' attention implementation, and put back what each had."""
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
