"""Tables for people."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the header first, in aligned columns: the first one to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(line(row, widths) for row in rows)


def line(row: Sequence[str], widths: Sequence[int]) -> str:
    """One row of `table`, where the widths are known beforehand."""
    first, *others = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "  ".join(cells).rstrip()
