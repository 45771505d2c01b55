"""What `raydist tune` found, as a table, as CSV and as a page with a chart; the line for the job file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raydist import storage
from raydist.plain_table import aligned
from raydist.report.charts import COLORS, Chart
from raydist.report.words import number
from raydist.tuning.lr_range import RangeTest
from raydist.tuning.micro_batch import Sizes
from raydist.tuning.trial import as_yaml, csv_text, section_line

if TYPE_CHECKING:
    from raydist.config import JobConfig

_TABLE_ROWS = 24


def folder_of(config: JobConfig) -> str:
    """Where the results go: beside the run's folder, which stays as it is."""
    return f"{config.storage.rstrip('/')}/{config.name}.tune"


# -- the learning rate -------------------------------------------------------------------------------------------------


def lr_text(config: JobConfig, test: RangeTest) -> str:
    """The curve in a few rows, and what follows from it."""
    stride = -(-len(test.lrs) // _TABLE_ROWS)
    shown = sorted({*range(0, len(test.lrs), stride), len(test.lrs) - 1})
    rows = [["step", "lr", "loss", "smoothed"]]
    rows += [[str(at + 1), f"{test.lrs[at]:.2e}", number(test.losses[at]), number(test.smoothed[at])] for at in shown]
    rate = config.optimizer.name or config.optimizer.target
    words = [f"learning-rate range test of {rate}, global batches of {config.batch.global_size} rows", *aligned(rows)]
    words.append(f"ended: {test.ended}")
    if test.steepest is None or test.tenth is None:
        return "\n".join([*words, _NO_FALL])
    if not test.diverged:
        words.append("the loss never diverged: a higher --high may show a higher rate")
    words.append(f"steepest descent: {as_yaml(test.steepest)}; a tenth of the rate with the lowest loss: {as_yaml(test.tenth)}")
    return "\n".join([*words, *_to_write(config, "optimizer", "lr", test.steepest)])


_NO_FALL = "the loss did not fall beyond its noise: no suggestion. Give another --low and --high, or more --steps"


def _to_write(config: JobConfig, section: str, key: str, value: Any) -> list[str]:
    return [
        "in the job file:",
        f"  {section_line(config, section, **{key: value})}",
        "or on the command line:",
        f"  {section}.{key}={as_yaml(value)}",
    ]


def lr_chart(test: RangeTest) -> Chart:
    """Loss over rate, with the two rates marked."""
    marks = [("steepest descent", test.steepest, COLORS[2]), ("lowest loss ÷ 10", test.tenth, COLORS[3])]
    found = [(name, rate, color) for name, rate, color in marks if rate is not None]
    lines = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": rate, "x1": rate, "y0": 0, "y1": 1, "line": {"color": color}}
        for _, rate, color in found
    ]
    points: dict[str, Any] = {"type": "scatter", "x": test.lrs}
    low, high = min(test.smoothed), max(test.smoothed)
    data: list[dict[str, Any]] = [
        {**points, "name": "loss", "mode": "markers", "y": test.losses, "marker": {"color": COLORS[0], "opacity": 0.4}},
        {**points, "name": "smoothed", "mode": "lines", "y": test.smoothed, "line": {"color": COLORS[0], "width": 2}},
        *(
            {"type": "scatter", "name": f"{name}: {as_yaml(rate)}", "mode": "lines", "x": [rate, rate], "y": [low, high]}
            | {"line": {"color": color}}
            for name, rate, color in found
        ),
    ]
    layout = {
        "xaxis": {"type": "log", "title": {"text": "learning rate"}},
        "yaxis": {"title": {"text": "loss"}, "range": [low - 0.1 * (high - low), high + 0.1 * (high - low)]},
        "shapes": lines,
    }
    said = "; ".join(f"{name} {as_yaml(rate)}" for name, rate, _ in found) or "the loss did not fall"
    words = f"Loss over learning rate: smoothed {number(test.smoothed[0])} at {test.lrs[0]:.2g}, lowest {number(low)}. {said}."
    return Chart("learning-rate range test", words, data, layout, *_lr_table(test))


def _lr_table(test: RangeTest) -> tuple[list[str], list[list[str]]]:
    rows = zip(test.lrs, test.losses, test.smoothed, strict=True)
    return ["lr", "loss", "smoothed"], [[f"{lr:.3g}", number(loss), number(smoothed)] for lr, loss, smoothed in rows]


def lr_csv(test: RangeTest) -> str:
    """Columns step, lr, loss, smoothed."""
    rows = zip(range(1, len(test.lrs) + 1), test.lrs, test.losses, test.smoothed, strict=True)
    return csv_text(["step", "lr", "loss", "smoothed"], list(rows))


# -- the micro-batch ---------------------------------------------------------------------------------------------------

_HEADER = ["micro_size", "rows/s", "ms a step", "peak MiB", ""]


def batch_text(config: JobConfig, sizes: Sizes) -> str:
    """A row a size, and what follows from them."""
    words = ["micro-batch sizes on one worker: forward, backward, optimizer", *aligned([_HEADER, *_batch_rows(sizes)])]
    words.append(f"ended: {sizes.ended}")
    words.append(
        f"largest that fits: {sizes.largest}; fastest: {sizes.fastest}; "
        f"a worker gets at most {sizes.share} rows of a global batch"
    )
    if sizes.fastest > sizes.share:
        words.append(f"a larger batch.global_size or fewer workers would let {sizes.fastest} rows at a time come up")
    return "\n".join([*words, *_to_write(config, "batch", "micro_size", sizes.suggested)])


def _batch_rows(sizes: Sizes) -> list[list[str]]:
    notes = {sizes.largest: ["largest"]}
    notes.setdefault(sizes.fastest, []).append("fastest")
    if sizes.share != sizes.largest or len(notes[sizes.share]) < 2:
        notes.setdefault(sizes.share, []).append("a worker's share")
    rows = []
    for size in sizes.tried:
        if not size.fits:
            rows.append([str(size.rows), "", "", "", "out of memory"])
            continue
        numbers = [number(size.rows_per_s), number(1e3 * (size.step_s or 0.0)), number(round(size.memory_mb or 0.0))]
        rows.append([str(size.rows), *numbers, ", ".join(notes.get(size.rows, []))])
    return rows


def batch_chart(sizes: Sizes) -> Chart:
    """Throughput over size."""
    fits = [size for size in sizes.tried if size.fits]
    x, y = [size.rows for size in fits], [size.rows_per_s for size in fits]
    trace = {"type": "scatter", "mode": "lines+markers", "name": "rows a second", "x": x, "y": y, "line": {"color": COLORS[0]}}
    layout = {
        "xaxis": {"type": "log", "dtick": "D1", "title": {"text": "rows of a micro-batch"}},
        "yaxis": {"title": {"text": "rows a second"}, "rangemode": "tozero"},
        "showlegend": False,
    }
    found = f"largest that fits {sizes.largest}, fastest {sizes.fastest}"
    words = f"Rows a second over micro-batch size: {found}. Ended: {sizes.ended}."
    return Chart("throughput by micro-batch size", words, [trace], layout, _HEADER, _batch_rows(sizes))


def batch_csv(sizes: Sizes) -> str:
    """Columns micro_size, fits, rows_per_s, step_s, memory_mb."""
    header = ["micro_size", "fits", "rows_per_s", "step_s", "memory_mb"]
    return csv_text(header, [[s.rows, s.fits, s.rows_per_s, s.step_s, s.memory_mb] for s in sizes.tried])


# -- files -------------------------------------------------------------------------------------------------------------


def write(config: JobConfig, name: str, csv: str, chart: Chart, png: bool) -> Sequence[str]:
    """Write `name.csv`, `name.html` (where plotly is installed) and, when asked, a picture; lines that say so."""
    from raydist.errors import ConfigError
    from raydist.report.page import page

    folder = folder_of(config)
    table = storage.join(folder, f"{name}.csv")
    storage.write_bytes(table, csv.encode())
    said = [f"wrote {table}"]
    try:
        html = page(f"raydist tune {name}: {config.name}", [], [], [chart])
    except ConfigError:
        if png:
            raise
        return [*said, "no plot: plotly is not installed (pip install 'raydist[report]')"]
    where = storage.join(folder, f"{name}.html")
    storage.write_bytes(where, html.encode())
    said.append(f"wrote {where}")
    if png:
        from raydist.report.pictures import write_pictures

        if not storage.is_local(folder):
            raise ConfigError(f"--png writes to local folders only, and storage is {config.storage}")
        said += [f"wrote {path}" for path in write_pictures([chart], storage.local_path(folder))]
    return said
