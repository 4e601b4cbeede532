"""Matrices in the layout that `native/linear.c` reads: panels of 32 output columns, each one run of memory."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Quantization = Literal["int8"]

PANEL = 32
FLOAT32, BFLOAT16, INT8 = 0, 1, 2  # as in native/legato.h
KINDS = ("float32", "bfloat16", "int8")  # their names
_DEPTH_STEP = {FLOAT32: 1, BFLOAT16: 32, INT8: 64}
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


def pack(weight: Tensor, bias: Tensor | None, gated: bool = False) -> PackedMatrix:
    """Pack `weight` [out, in] without loss: as bfloat16 if that holds every value of it, else as float32.

    Args:
        gated: the upper half of the rows is a gate for the lower.
    """
    half = weight.to(torch.bfloat16)
    exact = weight.dtype == torch.bfloat16 or bool((half.to(weight.dtype) == weight).all())
    if exact:
        return _packed(BFLOAT16, half, None, bias, gated)
    return _packed(FLOAT32, weight.float(), None, bias, gated)


def pack_int8(weight: Tensor, bias: Tensor | None, gated: bool = False) -> PackedMatrix:
    """Pack `weight` [out, in] as whole numbers, so scaled that the largest of each column, [in], becomes 127."""
    whole, scales = whole_numbers(weight.float())
    return _packed(INT8, whole.to(torch.int8), scales, bias, gated)


def whole_numbers(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values` [rows, n] as whole numbers, still in float32, so scaled that the largest of each row becomes 127.

    Returns:
        Those, and what 1 stands for, [rows].
    """
    scales = values.abs().amax(dim=1) / 127
    return (values / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_(), scales


def _packed(kind: int, values: Tensor, scales: Tensor | None, bias: Tensor | None, gated: bool) -> PackedMatrix:
    columns, depth = values.shape
    together = _INTERLEAVED[kind]
    bias = None if bias is None else bias.float().clone()
    if gated:
        columns //= 2
        values = _in_turn(values)
        scales, bias = (None if each is None else _in_turn(each) for each in (scales, bias))
    padded = pad(values, (0, -depth % _DEPTH_STEP[kind], 0, -len(values) % PANEL))
    panels = padded.unflatten(1, (-1, together)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return PackedMatrix(kind, panels, scales, bias, columns, depth, gated)


def _in_turn(rows: Tensor) -> Tensor:
    """The upper half of [rows, ...] and the lower, `PANEL` rows of each in turn, with zeros to fill the last ones."""
    halves = rows.unflatten(0, (2, -1))
    padding = rows.new_zeros(2, -halves.shape[1] % PANEL, *rows.shape[1:])
    return torch.cat([halves, padding], 1).unflatten(1, (-1, PANEL)).transpose(0, 1).flatten(0, 2)
