"""Attention by its definition: the yardstick, and the way for soft-caps and sinks."""

import torch
from torch import Tensor


def attend_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `TileAttention`. Softmax is in float32, products in the query's dtype, as in transformers."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    probabilities = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(probabilities[..., : key.shape[2]], value).transpose(1, 2)
