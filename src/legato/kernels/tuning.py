"""The fastest way to multiply by a matrix of given shape, for each number of rows: measured once, then remembered."""

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # a way that is best for the last of them is taken for all beyond
_REPEATS = 5
_SECONDS = 0.01  # for each number of rows: longer than another process holds a processor at a time


@dataclass
class MeasuredWays:
    """The best way for each shape and number of rows, in a file.

    Args:
        path: a JSON object, {shape: [way for each of `ROW_COUNTS`]}; need not be there, nor be writable.
    """

    path: Path
    table: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "MeasuredWays":
        """What the file holds; nothing, if it does not hold such a table."""
        try:
            table = json.loads(path.read_text())
        except (OSError, ValueError):
            return cls(path)
        return cls(path, table if _is_table(table) else {})

    def ways(self, shape: str, candidates: Sequence[int], run: Callable[[int, int], None]) -> list[int]:
        """The best of `candidates` for each of `ROW_COUNTS`, measured unless it is known.

        Args:
            run: multiplies once, given a way and a number of rows.
        """
        known = self.table.get(shape)
        if known is None or not set(known) <= set(candidates):
            known = self.table[shape] = [_fastest(rows, candidates, run) for rows in ROW_COUNTS]
            self._save()
        return known

    def _save(self) -> None:
        """At once or not at all: several processes may do so."""
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.table, indent=1))
            os.replace(part, self.path)
        except OSError as error:
            logger.debug("the measured kernel table is not kept: %s", error)


def _is_table(table: object) -> bool:
    return isinstance(table, dict) and all(
        isinstance(ways, list) and len(ways) == len(ROW_COUNTS) and all(isinstance(way, int) for way in ways)
        for ways in table.values()
    )


def _fastest(rows: int, candidates: Sequence[int], run: Callable[[int, int], None]) -> int:
    """In turn, so that whatever else the machine does meets all of them."""
    if len(candidates) == 1:
        return candidates[0]
    best = dict.fromkeys(candidates, float("inf"))
    for way in candidates:
        run(way, rows)
    rounds, end = 0, time.perf_counter() + _SECONDS
    while rounds < _REPEATS or time.perf_counter() < end:
        rounds += 1
        for way in candidates:
            start = time.perf_counter()
            run(way, rows)
            best[way] = min(best[way], time.perf_counter() - start)
    return min(candidates, key=best.__getitem__)


def processor_name() -> str:
    """As the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
