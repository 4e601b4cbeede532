"""The native kernels: finds the best library that the package was built with and the processor runs, and calls it."""

import ctypes
import logging
import os
from collections.abc import Callable
from ctypes import Structure, c_void_p
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.cache.kv import LayerCache
from legato.kernels.calls import AddNorm, Attention, Call, Linear, Norm, Rotation, declare
from legato.kernels.interface import Activation, AttentionSpec, HeadLayout, HeadNorm, PassTables, Rotary, new_rows
from legato.kernels.packing import KINDS, PackedMatrix, Quantization, pack, pack_int8
from legato.kernels.sources import sources_digest
from legato.kernels.tuning import MeasuredWays
from legato.memory import LargePageArena

logger = logging.getLogger(__name__)

LEVELS = ("amx", "avx512", "avx2", "portable")  # from the best down
_FOLDER = Path(__file__).parent / "lib"
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}  # as in native/legato.h

_FAR_BYTES, _MOST_COPIES = 16 << 20, 32
_NO_MEMORY = "a kernel found no memory for its scratch"


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
    declare(library)
    return library


@lru_cache
def thread_pool(library: ctypes.CDLL, num_threads: int) -> int:
    """The pool of so many threads that all of the process shares, for a library's functions to work with.

    Raises:
        MemoryError: there is none for it.
    """
    pool: int | None = library.legato_pool_new(num_threads)
    if not pool:
        raise MemoryError("no memory for the kernels' threads")
    return pool


os.register_at_fork(after_in_child=thread_pool.cache_clear)  # a forked process has none of its threads


class NativeKernels:
    """See `Kernels`. Not for several threads at once: what another calls meanwhile would be recorded too.

    Args:
        name: of the instruction set.
        library: from `load_library`.
        measured: the best way to multiply by shape.
    """

    def __init__(self, name: str, library: ctypes.CDLL, measured: MeasuredWays) -> None:
        self.name = name
        self._measured = measured
        self._arena = LargePageArena()
        self._library = library
        self._num_threads = torch.get_num_threads()
        self._pool = thread_pool(library, self._num_threads)
        self._recorded: list[tuple[Any, Structure]] | None = None

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None,
        quantization: Quantization | None = None,
        gated: bool = False,
        into: PackedMatrix | None = None,
    ) -> PackedMatrix:
        def place(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            fits = into is not None and into.panels.shape == shape and into.panels.dtype == dtype
            return into.panels if fits and into is not None else self._arena.empty(shape, dtype)

        packed = (pack if quantization is None else pack_int8)(weight, bias, gated, place)
        if into is not None and packed.panels is into.panels:
            return replace(packed, ways=into.ways)
        candidates = self.ways(packed.kind)
        if len(candidates) == 1:
            return packed
        form = f"{KINDS[packed.kind]}{', gated' if gated else ''}"
        shape = f"{form} {packed.depth}x{packed.columns}, {self._num_threads} threads"
        ways = self._measured.ways(shape, candidates, _Trial(self, packed).run)
        return replace(packed, ways=tuple(ways))

    def ways(self, kind: int) -> tuple[int, ...]:
        """The ways there are to multiply by a matrix of that kind: 0 by vectors, 1 by tiles."""
        return (0, 1) if self._library.legato_linear_has_tiles(kind) else (0,)

    def linear(self, x: Tensor, packed: PackedMatrix, out: Tensor) -> None:
        self.multiply(packed.way(x.shape[0]), x, packed, out)

    def gated_linear(self, x: Tensor, packed: PackedMatrix, activation: Activation, out: Tensor) -> None:
        self.multiply(packed.way(x.shape[0]), x, packed, out, activation)

    def multiply(self, way: int, x: Tensor, packed: PackedMatrix, out: Tensor, activation: Activation = "silu") -> None:
        """`linear` or `gated_linear`, as it is packed, in a way of the caller's choice."""
        panels, column_scales, bias = packed.addresses
        self._call(
            self._library.legato_linear,
            Linear(
                packed.kind, way, x.data_ptr(), x.stride(0), x.shape[0], packed.depth, panels, column_scales, bias,
                packed.columns, out.data_ptr(), out.stride(0), packed.gated, _ACTIVATIONS[activation],
            ),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rows, width = x.shape
        self._call(
            self._library.legato_rms_norm,
            Norm(x.data_ptr(), x.stride(0), weight.data_ptr(), rows, width, out.data_ptr(), out.stride(0), eps),
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
        self._call(
            self._library.legato_add_norm,
            AddNorm(
                residual.data_ptr(), residual.stride(0), x.data_ptr(), x.stride(0), _pointer(post_weight),
                _pointer(weight), rows, width, out.data_ptr(), out.stride(0), scale, eps,
            ),
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
        norm_width, eps, half = 0, 0.0, 0
        if norm is not None:
            query_weight, key_weight, eps = norm.query_weight.data_ptr(), norm.key_weight.data_ptr(), norm.eps
            norm_width = layout.head_dim if norm.query_weight.shape[0] == layout.head_dim else 0
        if rotary is not None:
            cosines, sines, half = rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.cos.shape[1]
        rows = tables.write_rows
        self._call(
            self._library.legato_rotate_and_store,
            Rotation(
                qkv.data_ptr(), qkv.stride(0), qkv.shape[0], layout.num_heads, layout.num_kv_heads, layout.head_dim,
                query_weight, key_weight, norm_width, tables.position_ids.data_ptr(), cosines, sines, half,
                rows.data_ptr(), rows.data_ptr() + 8 * rows.shape[1], cache.storage.data_ptr(),
                cache.storage.dtype == torch.bfloat16, eps,
            ),
        )  # fmt: skip

    def attention(
        self, qkv: Tensor, layout: HeadLayout, spec: AttentionSpec, tables: PassTables, cache: LayerCache, out: Tensor
    ) -> None:
        self._call(
            self._library.legato_attention,
            Attention(
                qkv.data_ptr(), qkv.stride(0), layout.num_heads, layout.num_kv_heads, layout.head_dim,
                cache.storage.data_ptr(), cache.storage.dtype == torch.bfloat16, tables.page_size, tables.block_rows,
                tables.block_table.data_ptr(), tables.block_table.stride(0), tables.cu_seqlens_q.data_ptr(),
                tables.seqused_k.data_ptr(), tables.seqused_k.shape[0], spec.window or 0, _pointer(spec.sinks),
                out.data_ptr(), out.stride(0), spec.scaling, spec.softcap or 0.0,
            ),
        )  # fmt: skip

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        recorded: list[tuple[Any, Structure]] = []
        self._recorded = recorded
        try:
            run()
        finally:
            self._recorded = None
        calls = (Call * len(recorded))(
            *(Call(ctypes.cast(kernel, c_void_p), ctypes.addressof(arguments)) for kernel, arguments in recorded)
        )

        def replay(_kept: object = recorded) -> None:
            if self._library.legato_replay(self._pool, calls, len(calls)):
                raise MemoryError(_NO_MEMORY)

        return replay

    def _call(self, kernel: Any, arguments: Structure) -> None:
        if kernel(self._pool, ctypes.byref(arguments)):
            raise MemoryError(_NO_MEMORY)
        if self._recorded is not None:
            self._recorded.append((kernel, arguments))


class _Trial:
    """Multiplies by copies of a matrix in turn, so many that each is met as in a forward pass: not in a near cache."""

    def __init__(self, kernels: NativeKernels, packed: PackedMatrix) -> None:
        self._kernels, self._packed = kernels, packed

    @cached_property
    def _copies(self) -> list[PackedMatrix]:
        count = min(_MOST_COPIES, -(-_FAR_BYTES // self._packed.num_bytes))
        arena = LargePageArena()
        panels = self._packed.panels
        return [
            replace(self._packed, panels=arena.empty(tuple(panels.shape), panels.dtype).copy_(panels))
            for _ in range(count)
        ]

    def run(self, way: int, rows: int) -> None:
        for packed in self._copies:
            x, out = new_rows(rows, packed.depth).fill_(1), new_rows(rows, packed.columns)
            self._kernels.multiply(way, x, packed, out)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
