"""Text that commands print for people: aligned columns, sizes with units."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def aligned(rows: Sequence[Sequence[object]], indent: str = "  ") -> list[str]:
    """Lines with every column as wide as its widest cell; the last column is not padded. None is an empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    columns = max((len(row) for row in cells), default=0)
    widths = [max((len(row[at]) for row in cells if at < len(row) - 1), default=0) for at in range(columns)]
    return [indent + "  ".join(f"{cell:<{widths[at]}}" for at, cell in enumerate(row)).rstrip() for row in cells]


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1: `1.5 GiB`."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.3g} {_UNITS[unit]}" if count < 999.5 else f"{count:.0f} {_UNITS[unit]}"
