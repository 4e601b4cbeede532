"""Rotary tables, taken from the model's own rotary module: whatever its scaling, they are what the model uses."""

from collections.abc import Sequence
from typing import Any

import torch

from legato.decoder.spec import NotFusable
from legato.kernels.interface import Rotary

_POSITIONS_PER_CALL = 8192  # bounds what the module computes beside the tables


def rotary_tables(model: Any, names: Sequence[str], num_positions: int) -> dict[str, Rotary]:
    """Tables for positions below `num_positions`.

    Args:
        model: a causal language model of transformers with one rotary module.
        names: layer types, each with a rotation of its own; or "all".
        num_positions: none of which may change the module's frequencies.

    Raises:
        NotFusable: it rotates other pairs than those half a rotated width apart.
    """
    return {name: _table(model.model.rotary_emb, name, num_positions) for name in names}


def _table(module: Any, name: str, num_positions: int) -> Rotary:
    extra = {} if name == "all" else {"layer_type": name}
    like = torch.zeros(1, dtype=torch.float32)
    halves: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for start in range(0, num_positions, _POSITIONS_PER_CALL):
        positions = torch.arange(start, min(start + _POSITIONS_PER_CALL, num_positions))[None]
        for parts, table in zip(halves, module(like, positions, **extra), strict=True):
            first, second = table[0].chunk(2, dim=-1)
            if first.shape != second.shape or not torch.equal(first, second):
                raise NotFusable("its rotary module's cosines and sines are not two equal halves")
            parts.append(first.clone())
    return Rotary(torch.cat(halves[0]), torch.cat(halves[1]))
