"""Attention through `torch.nn.functional.scaled_dot_product_attention`."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from legato.attention.eager import attend_eager


def attend_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `TileAttention`. What torch's function does not know (soft-caps, sinks) is computed by definition."""
    if softcap is not None or sinks is not None:
        return attend_eager(query, key, value, mask, scaling, softcap, sinks)
    size, heads, num_queries, head_dim = query.shape
    kv_heads = key.shape[1]
    if num_queries > 1:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2)
    # One query a sequence: the heads that share a K/V head become the queries of one head, which reads K and V once.
    folded = query.reshape(size, kv_heads, heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(size, 1, heads, head_dim)
