"""The kernels in plain torch: what the native ones are tested against, and what runs where there are none."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from legato.cache.kv import LayerCache
from legato.kernels.interface import Activation, AttentionSpec, HeadLayout, HeadNorm, PassTables, Rotary, new_rows
from legato.kernels.packing import Quantization, whole_numbers

SCORES_PER_CALL = 1 << 22  # bounds the memory of one product of queries and keys


@dataclass(frozen=True, slots=True)
class TorchMatrix:
    """A matrix as torch multiplies with it.

    Attributes:
        transposed: float32 [in, out].
        bias: float32 [out], or None.
        column_scales: float32 [out], what 1 stands for in each column of an int8 matrix; None for others.
    """

    transposed: Tensor
    bias: Tensor | None
    column_scales: Tensor | None = None


class TorchKernels:
    """See `Kernels`. A float32 weight is not copied: its packed form is a view of it."""

    name = "torch"

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None,
        quantization: Quantization | None = None,
        gated: bool = False,
        into: TorchMatrix | None = None,
    ) -> TorchMatrix:
        values, bias = weight.detach().float(), None if bias is None else bias.detach().float()
        if quantization is None:
            return TorchMatrix(values.t(), bias)
        whole, scales = whole_numbers(values)
        return TorchMatrix(whole.t(), bias, scales)

    def linear(self, x: Tensor, packed: TorchMatrix, out: Tensor) -> None:
        if packed.column_scales is not None:
            torch.mm(x, packed.transposed, out=out)
            out.mul_(packed.column_scales)
            if packed.bias is not None:
                out.add_(packed.bias)
        elif packed.bias is None:
            torch.mm(x, packed.transposed, out=out)
        else:
            torch.addmm(packed.bias, x, packed.transposed, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        out.copy_(_norm(x, weight, eps))

    def add_norm(
        self,
        residual: Tensor,
        x: Tensor,
        scale: float,
        post_weight: Tensor | None,
        weight: Tensor | None,
        eps: float,
        out: Tensor,
    ) -> None:
        residual.add_(x if post_weight is None else _norm(x, post_weight, eps), alpha=scale)
        if weight is not None:
            out.copy_(_norm(residual, weight, eps))

    def rotate_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        tables: PassTables,
        cache: LayerCache,
    ) -> None:
        query, key, value = _heads(qkv, layout)
        if norm is not None:
            query.copy_(_norm_heads(query, norm.query_weight, norm.eps))
            key = _norm_heads(key, norm.key_weight, norm.eps)
        if rotary is not None:
            cos, sin = rotary.cos[tables.position_ids, None], rotary.sin[tables.position_ids, None]
            query.copy_(_rotate(query, cos, sin))
            key = _rotate(key, cos, sin)
        for rows, new in zip(tables.write_rows, (key, value), strict=True):
            cache.storage.index_copy_(0, rows, new.flatten(1).to(cache.storage.dtype))

    def attention(
        self, qkv: Tensor, layout: HeadLayout, spec: AttentionSpec, tables: PassTables, cache: LayerCache, out: Tensor
    ) -> None:
        queries = _heads(qkv, layout)[0]
        outs = out.view(-1, layout.num_heads, layout.head_dim)
        ends, lengths = tables.cu_seqlens_q.tolist(), tables.seqused_k.tolist()
        for request, length in enumerate(lengths):
            first_row, end_row = ends[request], ends[request + 1]
            step = max(1, SCORES_PER_CALL // (length * layout.num_heads))
            for row in range(first_row, end_row, step):
                last_row = min(row + step, end_row)
                # Positions of this chunk's queries: from start to end - 1.
                start, end = length - (end_row - row), length - (end_row - last_row)
                first_key = 0 if spec.window is None else max(0, start - spec.window + 1)
                keys, values = _gather(tables, request, first_key, end, cache)
                hidden = _hidden(start, end, first_key, spec.window)
                outs[row:last_row] = _attend(queries[row:last_row], keys, values, hidden, spec)

    def gated_linear(self, x: Tensor, packed: TorchMatrix, activation: Activation, out: Tensor) -> None:
        gate_up = new_rows(len(x), packed.transposed.shape[1])
        self.linear(x, packed, gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        torch.mul(_activate(gate, activation), up, out=out)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of [tokens, heads, head_dim], over each head or, as the weight's length says, over all at once."""
    if weight.numel() == x.shape[2]:
        return _norm(x, weight, eps)
    return _norm(x.flatten(1), weight, eps).view_as(x)


def _heads(qkv: Tensor, layout: HeadLayout) -> tuple[Tensor, ...]:
    """Views of Q, K and V, each [tokens, heads, head_dim]."""
    counts = (layout.num_heads, layout.num_kv_heads, layout.num_kv_heads)
    return qkv.view(len(qkv), sum(counts), layout.head_dim).split(counts, dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of [tokens, heads, head_dim], with cos and sin [tokens, 1, rotated width / 2]."""
    half = cos.shape[2]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=2)


def _gather(tables: PassTables, request: int, first: int, end: int, cache: LayerCache) -> tuple[Tensor, Tensor]:
    """K and V of positions first to end - 1, float32 [kv_heads, keys, head_dim]."""
    positions = torch.arange(first, end)
    pages = positions // tables.page_size
    rows = tables.block_table[request, pages] * tables.block_rows + positions - pages * tables.page_size
    both = cache.storage[torch.stack([rows, rows + tables.page_size])].float()
    keys, values = both.view(2, end - first, cache.num_kv_heads, cache.head_dim).transpose(1, 2)
    return keys, values


def _hidden(start: int, end: int, first_key: int, window: int | None) -> Tensor:
    """Which keys, from `first_key` on, the queries at positions start to end - 1 do not see; [queries, keys]."""
    queries, keys = torch.arange(start, end)[:, None], torch.arange(first_key, end)
    hidden = keys > queries
    return hidden if window is None else hidden | (keys <= queries - window)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, spec: AttentionSpec) -> Tensor:
    """[queries, heads, head_dim]; heads that share K and V follow each other."""
    num_queries, num_heads, head_dim = queries.shape
    grouped = queries.transpose(0, 1).reshape(len(keys), -1, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(num_heads, num_queries, -1).mul_(spec.scaling)
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores.masked_fill_(hidden, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.view(-1, 1, 1).expand(-1, num_queries, 1)
        weights = torch.cat([scores, sinks], dim=2).softmax(dim=2)[..., :-1]
    else:
        weights = scores.softmax(dim=2)
    out = torch.bmm(weights.reshape(len(keys), -1, weights.shape[2]), values)
    return out.view(num_heads, num_queries, head_dim).transpose(0, 1)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
