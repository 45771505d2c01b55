"""How numbers and durations are written in a report."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any) -> str:
    """At most five digits, no exponent where a person would write none."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1e5 and abs(value) < 1e9 else f"{value:.5g}"


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s`, `12.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
