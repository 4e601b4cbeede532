"""How the rows of a step are drawn from, as arrays: what `SamplingParams` says of it for each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Filters:
    """How each row is drawn from; they follow one another in this order.

    Attributes:
        temperature: float32 [rows]; 0 takes the likeliest token and none of the others.
        top_k: int64 [rows]; 0 is all tokens.
        top_p: float32 [rows]; 1 is all tokens.
        min_p: float32 [rows]; 0 is all tokens.
        typical_p: float32 [rows]; 1 is all tokens.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    typical_p: NDArray[np.float32]

    @classmethod
    def none(cls, rows: int) -> "Filters":
        """Of rows that are drawn from all tokens, at temperature 1."""
        ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
        return cls(ones, np.zeros(rows, np.int64), ones, zeros, ones)

    def __getitem__(self, rows: NDArray) -> "Filters":
        """Those of some rows."""
        return Filters(*(getattr(self, name)[rows] for name in NAMES))


NAMES = tuple(Filters.__slots__)
