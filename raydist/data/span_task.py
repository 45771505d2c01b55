"""What a task of the Ray Data stream does. Imports neither ray nor torch, so that a task's process starts quickly."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from raydist.data.columns import Columns, to_arrow
from raydist.data.plan import Span
from raydist.data.reading import SpanReader, rank_major
from raydist.errors import RaydistError

ERROR = "raydist error"
"""Column that carries the words of an error instead of data."""


class SpanTask:
    """Called with the number of a span: reads it, shuffles, transforms, and lays it out rank by rank."""

    def __init__(self, reader: SpanReader, spans: list[Span], world_size: int, steps: int) -> None:
        self.reader, self.spans, self.world_size, self.steps = reader, spans, world_size, steps

    def __call__(self, items: Columns) -> pa.Table:
        span = self.spans[int(items["span"][0])]
        sizes = self.reader.sizes(span)
        order = rank_major(sizes, self.reader.plan.global_size, self.world_size, self.steps)
        try:
            return to_arrow(self.reader.rows(span, order.reshape(-1)))
        except RaydistError as error:
            # Ray Data keeps only the text of an exception: this way every rank meets it, as itself, at the same step
            words = np.full(order.shape, "", dtype=object)
            words[:, 0] = str(error)
            return to_arrow({ERROR: words.reshape(-1)})
