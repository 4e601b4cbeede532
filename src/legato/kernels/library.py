"""The native kernels: finds the best library that the package was built with and the processor runs, and calls it."""

import ctypes
import logging
import os
from ctypes import c_float, c_int64, c_void_p
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from legato.cache.kv import LayerCache
from legato.kernels.interface import Activation, AttentionSpec, HeadLayout, HeadNorm, PassTables, Rotary
from legato.kernels.packing import KINDS, PackedMatrix, Quantization, pack, pack_int8
from legato.kernels.sources import sources_digest
from legato.kernels.tuning import MeasuredWays
from legato.memory import LargePageArena

logger = logging.getLogger(__name__)

LEVELS = ("amx", "avx512", "avx2", "portable")  # from the best down
_FOLDER = Path(__file__).parent / "lib"
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}  # as in native/legato.h

_FAR_BYTES, _MOST_COPIES = 16 << 20, 32

_P, _I, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, list[type]] = {
    "legato_linear": [_P, _I, _I, _P, _I, _I, _I, _P, _P, _P, _I, _P, _I, _P],
    "legato_rms_norm": [_P, _P, _I, _P, _F, _I, _I, _P, _I],
    "legato_add_norm": [_P, _P, _I, _P, _I, _F, _P, _P, _F, _I, _I, _P, _I],
    "legato_rotate_and_store": [_P, _P, _I, _I, _I, _I, _I, _P, _P, _I, _F, _P, _P, _P, _I, _P, _P, _P, _I],
    "legato_attention": [_P, _P, _I, _I, _I, _I, _P, _I, _I, _I, _P, _I, _P, _P, _I, _F, _I, _F, _P, _P, _I],
    "legato_gated": [_P, _P, _I, _I, _I, _I, _P, _I],
}  # fmt: skip


def load_library(levels: tuple[str, ...] = LEVELS) -> tuple[str, ctypes.CDLL] | None:
    """The first of `levels` that is there and runs here, and its library; None if there is none."""
    for level in levels:
        path = _FOLDER / f"liblegato_{level}.so"
        if not path.exists():
            continue
        try:
            library = _open(path)
        except OSError as error:
            logger.warning("the CPU kernels in %s cannot be loaded: %s", path.name, error)
            continue
        if library.legato_sources() != sources_digest().encode():
            logger.warning(
                "%s was compiled from other sources than those that are there and is not used; "
                "install Legato again, or run `python hatch_build.py` in its repository", path.name
            )  # fmt: skip
            continue
        if library.legato_supported():
            return level, library
    return None


@lru_cache
def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.legato_sources.restype = ctypes.c_char_p
    return library


@lru_cache
def thread_pool(library: ctypes.CDLL, num_threads: int) -> int:
    """The pool of so many threads that all of the process shares, for a library's functions to work with.

    Raises:
        MemoryError: there is none for it.
    """
    library.legato_pool_new.argtypes, library.legato_pool_new.restype = [_I], _P
    pool: int | None = library.legato_pool_new(num_threads)
    if not pool:
        raise MemoryError("no memory for the kernels' threads")
    return pool


os.register_at_fork(after_in_child=thread_pool.cache_clear)  # a forked process has none of its threads


class NativeKernels:
    """See `Kernels`. Not for several threads at once: products share a scratch buffer.

    Args:
        name: of the instruction set.
        library: from `load_library`.
        measured: the best way to multiply by shape.
    """

    def __init__(self, name: str, library: ctypes.CDLL, measured: MeasuredWays) -> None:
        self.name = name
        self._measured = measured
        self._arena = LargePageArena()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_at = 0
        for function, arguments in _SIGNATURES.items():
            getattr(library, function).argtypes = arguments
            getattr(library, function).restype = None
        library.legato_attention.restype = c_int64
        library.legato_linear_has_tiles.argtypes = [_I]
        library.legato_linear_has_tiles.restype = c_int64
        self._has_tiles = library.legato_linear_has_tiles
        self._num_threads = torch.get_num_threads()
        self._pool = thread_pool(library, self._num_threads)
        self._linear = library.legato_linear
        self._rms_norm = library.legato_rms_norm
        self._add_norm = library.legato_add_norm
        self._rotate_and_store = library.legato_rotate_and_store
        self._attention = library.legato_attention
        self._gated = library.legato_gated

    def pack(self, weight: Tensor, bias: Tensor | None, quantization: Quantization | None = None) -> PackedMatrix:
        packed = pack(weight, bias) if quantization is None else pack_int8(weight, bias)
        packed = replace(packed, panels=self._arena.store(packed.panels))
        candidates = self.ways(packed.kind)
        if len(candidates) == 1:
            return packed
        shape = f"{KINDS[packed.kind]} {packed.depth}x{packed.columns}, {self._num_threads} threads"
        ways = self._measured.ways(shape, candidates, _Trial(self, packed).run)
        return replace(packed, ways=tuple(ways))

    def ways(self, kind: int) -> tuple[int, ...]:
        """The ways there are to multiply by a matrix of that kind: 0 by vectors, 1 by tiles."""
        return (0, 1) if self._has_tiles(kind) else (0,)

    def linear(self, x: Tensor, packed: PackedMatrix, out: Tensor) -> None:
        rows = x.shape[0]
        ways = packed.ways
        self.multiply(ways[min((rows - 1).bit_length(), len(ways) - 1)], x, packed, out)

    def multiply(self, way: int, x: Tensor, packed: PackedMatrix, out: Tensor) -> None:
        """`linear` in a way of the caller's choice."""
        rows = x.shape[0]
        panels, column_scales, bias = packed.addresses
        self._linear(
            self._pool, packed.kind, way, x.data_ptr(), x.stride(0), rows, packed.depth, panels, column_scales, bias,
            packed.columns, out.data_ptr(), out.stride(0), self._scratch_for(packed.scratch_bytes(rows)),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rows, width = x.shape
        self._rms_norm(
            self._pool, x.data_ptr(), x.stride(0), weight.data_ptr(), eps, rows, width, out.data_ptr(), out.stride(0)
        )

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
        rows, width = x.shape
        self._add_norm(
            self._pool, residual.data_ptr(), residual.stride(0), x.data_ptr(), x.stride(0), scale,
            _pointer(post_weight), _pointer(weight), eps, rows, width, out.data_ptr(), out.stride(0),
        )  # fmt: skip

    def rotate_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        tables: PassTables,
        cache: LayerCache,
    ) -> None:
        query_weight = key_weight = cosines = sines = None
        over_all, eps, half = False, 0.0, 0
        if norm is not None:
            query_weight, key_weight, eps = norm.query_weight.data_ptr(), norm.key_weight.data_ptr(), norm.eps
            over_all = norm.query_weight.shape[0] != layout.head_dim
        if rotary is not None:
            cosines, sines, half = rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.cos.shape[1]
        rows = tables.write_rows
        self._rotate_and_store(
            self._pool, qkv.data_ptr(), qkv.stride(0), qkv.shape[0], layout.num_heads, layout.num_kv_heads,
            layout.head_dim, query_weight, key_weight, over_all, eps, tables.position_ids.data_ptr(), cosines,
            sines, half, rows.data_ptr(), rows.data_ptr() + 8 * rows.shape[1],
            cache.storage.data_ptr(), cache.storage.dtype == torch.bfloat16,
        )  # fmt: skip

    def attention(
        self, qkv: Tensor, layout: HeadLayout, spec: AttentionSpec, tables: PassTables, cache: LayerCache, out: Tensor
    ) -> None:
        failed = self._attention(
            self._pool, qkv.data_ptr(), qkv.stride(0), layout.num_heads, layout.num_kv_heads, layout.head_dim,
            cache.storage.data_ptr(), cache.storage.dtype == torch.bfloat16, tables.page_size, tables.block_rows,
            tables.block_table.data_ptr(), tables.block_table.stride(0), tables.cu_seqlens_q.data_ptr(),
            tables.seqused_k.data_ptr(), tables.seqused_k.shape[0], spec.scaling, spec.window or 0,
            spec.softcap or 0.0, _pointer(spec.sinks), out.data_ptr(), out.stride(0),
        )  # fmt: skip
        if failed:
            raise MemoryError("attention found no memory for its tiles")

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        rows, width = out.shape
        self._gated(
            self._pool,
            gate_up.data_ptr(),
            gate_up.stride(0),
            rows,
            width,
            _ACTIVATIONS[activation],
            out.data_ptr(),
            out.stride(0),
        )

    def _scratch_for(self, num_bytes: int) -> int:
        """Address of that many bytes, aligned to 64."""
        if num_bytes + 64 > self._scratch.numel():
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
            self._scratch_at = -(-self._scratch.data_ptr() // 64) * 64
        return self._scratch_at


class _Trial:
    """Multiplies by copies of a matrix in turn, so many that each is met as in a forward pass: not in a near cache."""

    def __init__(self, kernels: NativeKernels, packed: PackedMatrix) -> None:
        self._kernels, self._packed = kernels, packed

    @cached_property
    def _copies(self) -> list[PackedMatrix]:
        count = min(_MOST_COPIES, -(-_FAR_BYTES // self._packed.num_bytes))
        arena = LargePageArena()
        return [replace(self._packed, panels=arena.store(self._packed.panels)) for _ in range(count)]

    def run(self, way: int, rows: int) -> None:
        for packed in self._copies:
            x, out = torch.ones(rows, packed.depth), torch.empty(rows, packed.columns)
            self._kernels.multiply(way, x, packed, out)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
