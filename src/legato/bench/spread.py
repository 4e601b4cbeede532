"""Several measurements of one thing, in three numbers."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of measurements, the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def rounded(self, digits: int) -> dict[str, float]:
        """{"median", "low", "high"}, for JSON."""
        return {name: round(value, digits) for name, value in asdict(self).items()}

    def text(self, digits: int) -> str:
        """Like "2.16 (2.04–2.39)"."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"
