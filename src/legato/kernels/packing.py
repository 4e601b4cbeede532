"""Matrices in the layout that `native/linear.c` reads: panels of 32 output columns, each one run of memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

Quantization = Literal["int8"]

PANEL = 32
FLOAT32, BFLOAT16, INT8 = 0, 1, 2  # as in native/legato.h
KINDS = ("float32", "bfloat16", "int8")  # their names
_DEPTH_STEP = {FLOAT32: 1, BFLOAT16: 32, INT8: 64}
_ROWS_AT_ONCE = 512  # a multiple of PANEL
_TYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, INT8: torch.int8}
_INTERLEAVED = {FLOAT32: 1, BFLOAT16: 2, INT8: 4}  # consecutive inputs of a column that lie side by side


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [columns, depth] and a bias, as the native product takes them.

    Attributes:
        kind: `FLOAT32`, `BFLOAT16` or `INT8`.
        panels: of that type, [columns / 32, depth / n, 32, n] where n is 1, 2 or 4, zeros past the edges.
        column_scales: float32, one for each column of the panels; what a whole number of an `INT8` column stands for.
            None for the others.
        bias: float32 like `column_scales`, or None.
        columns, depth: outputs and inputs.
        gated: whether panels of a gate and of what is gated take turns; `columns` then is what is left of both.
        ways: how to multiply for each of `tuning.ROW_COUNTS`: 0 by vectors, 1 by tiles.
        addresses: of panels, column_scales and bias; asking torch for them takes longer than a small product.
    """

    kind: int
    panels: Tensor
    column_scales: Tensor | None
    bias: Tensor | None
    columns: int
    depth: int
    gated: bool = False
    ways: tuple[int, ...] = (0,)
    addresses: tuple[int | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors = (self.panels, self.column_scales, self.bias)
        addresses = tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
        object.__setattr__(self, "addresses", addresses)  # frozen, but for its birth

    def way(self, rows: int) -> int:
        """The best of `ways` for so many rows."""
        return self.ways[min((rows - 1).bit_length(), len(self.ways) - 1)]

    @property
    def num_bytes(self) -> int:
        return self.panels.numel() * self.panels.element_size()


Place = Callable[[tuple[int, ...], torch.dtype], Tensor]


def new_place(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for panels, wherever torch finds it."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def pack(weight: Tensor, bias: Tensor | None, gated: bool = False, place: Place = new_place) -> PackedMatrix:
    """Pack `weight` [out, in] without loss: as bfloat16 if that holds every value of it, else as float32.

    Args:
        gated: the upper half of the rows is a gate for the lower.
        place: where the panels go.
    """
    if weight.dtype == torch.bfloat16 or is_exact_in_bfloat16(weight):
        return _packed(BFLOAT16, weight, bias, gated, place)
    return _packed(FLOAT32, weight, bias, gated, place)


def pack_int8(weight: Tensor, bias: Tensor | None, gated: bool = False, place: Place = new_place) -> PackedMatrix:
    """Pack `weight` [out, in] as whole numbers, so scaled that the largest of each column, [in], becomes 127."""
    return _packed(INT8, weight, bias, gated, place)


def is_exact_in_bfloat16(weight: Tensor) -> bool:
    """Whether bfloat16 holds every value of `weight` [out, in]."""
    return all(map(_are_exact_in_bfloat16, weight.detach().split(_ROWS_AT_ONCE)))


def _are_exact_in_bfloat16(weight: Tensor) -> bool:
    if weight.dtype == torch.float32 and weight.device.type == "cpu":
        bits = weight.numpy().view(np.uint32)  # one pass over them, where torch takes four
        return not int(np.bitwise_or.reduce(bits, axis=None)) & 0xFFFF
    return bool((weight.to(torch.bfloat16).to(weight.dtype) == weight).all())


def whole_numbers(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values` [rows, n] as whole numbers, still in float32, so scaled that the largest of each row becomes 127.

    Returns:
        Those, and what 1 stands for, [rows].
    """
    scales = values.abs().amax(dim=1) / 127
    return (values / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_(), scales


def _packed(kind: int, weight: Tensor, bias: Tensor | None, gated: bool, place: Place) -> PackedMatrix:
    """Straight from the weight into its place: copies on the way would for a moment take its size several times."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    parts = 2 if gated else 1
    columns, depth, together = len(weight) // parts, weight.shape[1], _INTERLEAVED[kind]
    padded = -(-depth // _DEPTH_STEP[kind]) * _DEPTH_STEP[kind]
    panels = place((-(-columns // PANEL) * parts, padded // together, PANEL, together), _TYPES[kind])
    if columns % PANEL or padded != depth:
        panels.zero_()
    scales = torch.empty((parts, columns)) if kind == INT8 else None
    for part, half in enumerate(weight.unflatten(0, (parts, columns))):
        for first in range(0, columns, _ROWS_AT_ONCE):
            values = half[first : first + _ROWS_AT_ONCE]
            if scales is not None:
                values, scales[part, first : first + len(values)] = whole_numbers(values.float())
            _fill(panels[first // PANEL * parts + part :: parts], values)
    return PackedMatrix(
        kind, panels, None if scales is None else _in_turn(scales),
        None if bias is None else _in_turn(bias.float().unflatten(0, (parts, columns))), columns, depth, gated,
    )  # fmt: skip


def _fill(panels: Tensor, values: Tensor) -> None:
    """Put [rows, depth] into the first of some panels, [panels, depth' / n, PANEL, n]; n values are four bytes."""
    places = panels.view(torch.int32)[..., 0].transpose(1, 2)
    groups = pad(values.to(panels.dtype), (0, -values.shape[1] % panels.shape[3])).contiguous().view(torch.int32)
    rows, depth = len(groups) // PANEL, groups.shape[1]  # whole panels
    places[:rows, :, :depth].copy_(groups[: rows * PANEL].unflatten(0, (rows, PANEL)))
    rest = groups[rows * PANEL :]
    if len(rest):
        places[rows, : len(rest), :depth].copy_(rest)


def _in_turn(parts: Tensor) -> Tensor:
    """[parts, columns] as one row: `PANEL` of each part in turn, with zeros to fill the last ones; a copy."""
    return pad(parts, (0, -parts.shape[1] % PANEL)).unflatten(1, (-1, PANEL)).transpose(0, 1).reshape(-1).clone()
