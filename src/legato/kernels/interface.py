"""What the fused decoder computes with. `NativeKernels` is the fast way, `TorchKernels` says what is meant.

Activations are float32 on the CPU, a row a token, each row contiguous; weights come packed by `pack`. Where an argument
is written to, its name says `out`, or the docstring does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from legato.cache.kv import LayerCache
from legato.kernels.packing import Quantization

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """What lies in a row of the fused product: Q of all heads, K of all K/V heads, V of all K/V heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of Q and K before they are rotated.

    Attributes:
        query_weight: float32 [head_dim], or [num_heads × head_dim] where the norm is over all heads at once.
        key_weight: the same for K.
        eps: under the root.
    """

    query_weight: Tensor
    key_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding, of pairs of elements half a rotated width apart (Su et al., "RoFormer", 2021).

    Attributes:
        cos, sin: float32 [positions, rotated width / 2]; elements of a head past the rotated width stay as they are.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class PassTables:
    """Where the tokens of a forward pass are, for the layers of one attention group.

    Attributes:
        position_ids: int64 [tokens].
        cu_seqlens_q: int64 [requests + 1].
        seqused_k: int64 [requests].
        block_table: int64 [requests, pages], row-contiguous.
        write_rows: int64 [2, tokens]; rows of the group's `LayerCache`s that take the tokens' K, and their V.
        page_size: tokens a page holds.
        block_rows: rows of a `LayerCache` from one block to the next; a block's page of V follows its page of K.
    """

    position_ids: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    block_table: Tensor
    write_rows: Tensor
    page_size: int
    block_rows: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends.

    Attributes:
        scaling: factor on the scores.
        window: positions a query sees, its own included; None: all.
        softcap: scores become softcap × tanh(scores / softcap), unless None.
        sinks: float32 [num_heads], a score without a value in each head's softmax, or None.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Kernels(Protocol):
    """One implementation of all of it."""

    name: str
    """For people: "amx", "avx512", "avx2", "portable" or "torch"."""

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None,
        quantization: Quantization | None = None,
        gated: bool = False,
        into: Any = None,
    ) -> Any:
        """A matrix [out, in] of any floating-point type, and a bias [out], in the form `linear` takes.

        If `gated`, in the form `gated_linear` takes: the upper half of its rows is the gate for the lower half. `into`
        is the result for another weight of that shape, whose memory is used again: it must not be used any more.

        With "int8" the weights are whole numbers from -127 to 127, scaled column by column of the product; x may be
        rounded too, to no fewer than 16 bits a number, scaled row by row. Without, nothing is lost.
        """

    def linear(self, x: Tensor, packed: Any, out: Tensor) -> None:
        """out [rows, out] = x [rows, in] × weightᵀ + bias."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out = x / sqrt(mean(x²) + eps) × weight, row by row; x and out [rows, width], weight float32 [width]."""

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
        """residual += scale × x, or × norm(x) if there is a `post_weight`; then out = norm(residual).

        Args:
            residual: [rows, width], written to.
            x: [rows, width].
            weight: float32 [width]; None: `out` stays as it is.
        """

    def rotate_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        tables: PassTables,
        cache: LayerCache,
    ) -> None:
        """Norm and rotate Q, in its place in `qkv` [tokens, layout.width], and K, which goes to the cache as V does."""

    def attention(
        self, qkv: Tensor, layout: HeadLayout, spec: AttentionSpec, tables: PassTables, cache: LayerCache, out: Tensor
    ) -> None:
        """Causal attention of each request's tokens to its first `seqused_k` tokens in the cache.

        Reads Q from `qkv` [tokens, layout.width]; K and V, those of this pass included, from the cache; blocks that a
        request does not own any more are not read.

        Args:
            out: [tokens, num_heads × head_dim].
        """

    def gated_linear(self, x: Tensor, packed: Any, activation: Activation, out: Tensor) -> None:
        """out [rows, out / 2] = activation(gate) × up, where [gate, up] = x [rows, in] × weightᵀ + bias."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run`, and return what does again what it did with these kernels: on the same memory, in less time.

        The memory may hold other numbers by then; whoever calls sees to it that it is there.
        """


def new_rows(rows: int, width: int) -> Tensor:
    """An uninitialised activation, [rows, width]; whatever type and device torch's defaults are just now."""
    return torch.empty((rows, width), dtype=torch.float32, device="cpu")
