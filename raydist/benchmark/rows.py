"""One line of the benchmark table: what each contender measured in each round, and the figure that is judged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from raydist.errors import RaydistError

OURS = "raydist"
Kind = Literal["ratio", "speed-up", "value"]


@dataclass(frozen=True)
class Bar:
    """What a benchmark must reach (`bar`) and wants to (`aim`), against which contender.

    `ratio` is ours ÷ theirs and `speed-up` is theirs ÷ ours, each the median over the rounds; the two runs of one round met the
    same state of the machine. `value` is the median of our own figure, in the row's unit.
    """

    kind: Kind
    bar: float
    aim: float
    against: str | None = None
    ours: str = OURS

    def met(self, figure: float) -> bool:
        """Whether a figure reaches the bar."""
        return figure >= self.bar if self.kind == "speed-up" else figure <= self.bar

    def words(self, limit: float) -> str:
        """A limit as the table shows it: `≤ 1.02 × torchrun`."""
        if self.kind == "value":
            return f"≤ {limit:g}"
        return f"{'≥' if self.kind == 'speed-up' else '≤'} {limit:g} ×"


@dataclass(frozen=True)
class Row:
    """What was measured: contender -> its figure in each round, in `unit`. `note` is what a reader should know with it."""

    bench: str
    case: str
    unit: str
    values: dict[str, list[float]]
    note: str = ""
    judged: bool = True
    """False for a line that only shows how a figure comes about."""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`benchmark/case`, as the baseline names it."""
        return f"{self.bench}/{self.case}" if self.case else self.bench

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def row_from(plain: Mapping[str, Any]) -> Row:
    """A row as a script wrote it. Raises RaydistError when it is none."""
    try:
        row = Row(**plain)
        values = {str(name): [float(value) for value in values] for name, values in row.values.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise RaydistError(f"this is no row of a benchmark ({error}): {plain!r}") from error
    if not values or not all(values.values()):
        raise RaydistError(f"a row of a benchmark needs at least one figure of each contender: {plain!r}")
    return Row(**{**row.plain(), "values": values})


def each_round(row: Row, bar: Bar) -> list[float]:
    """The judged figure of each round. Raises RaydistError when a contender that is judged is missing."""
    ours = _of(row, bar.ours)
    if bar.kind == "value":
        return ours
    theirs = _of(row, bar.against or "")
    if len(ours) != len(theirs):
        raise RaydistError(f"{row.name}: {bar.ours} ran {len(ours)} rounds and {bar.against} {len(theirs)}")
    pairs = zip(ours, theirs, strict=True)
    return [other / mine if bar.kind == "speed-up" else mine / other for mine, other in pairs]


def figure(row: Row, bar: Bar) -> float:
    """The judged figure: the median over the rounds."""
    return statistics.median(each_round(row, bar))


def spread(values: Sequence[float]) -> float:
    """Half the distance between the smallest and the largest, in parts of the median; 0 for one value."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / abs(middle) if middle else math.inf


def _of(row: Row, contender: str) -> list[float]:
    if contender not in row.values:
        raise RaydistError(f"{row.name}: no figure of {contender!r}; there are {', '.join(row.values)}")
    return row.values[contender]
