"""The page in a real headless Chromium: charts are drawn, nothing is fetched, axe finds nothing, phone and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.report.build import collect, report
from raydist.report.pictures import HEIGHT, WIDTH, write_pictures
from tests.report.browser import chromium, look, missing
from tests.report.runs import write

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # installing Chromium alone may take a minute


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_the_page_is_drawn_readable_and_accessible(tmp_path: Path, width: int, dark: bool) -> None:
    paths = [str(write(tmp_path, "one", nasty=True)), str(write(tmp_path, "two", 0.2))]
    found = look(Path(report(paths, tmp_path / "report.html")), tmp_path, width, dark)
    assert found["told"] == []  # errors and warnings of the console, of scripts, and what the policy blocked
    assert found["requests"] == []
    assert found["broken"] == [] and found["checked"] > 20
    assert len(found["charts"]) == len(collect(paths)[2])
    assert all(chart["marks"] > 0 and chart["words"] > 3 and chart["height"] > 200 for chart in found["charts"])
    assert found["window"] == width and found["wide"] <= width  # nothing sticks out: only tables scroll, in their own boxes
    assert all(chart["width"] <= width for chart in found["charts"])
    paper, ink = (sum(int(part) for part in found[key][4:-1].split(",")) / 3 for key in ("paper", "ink"))
    assert (paper < 64 and ink > 192) if dark else (paper > 192 and ink < 64)
    assert found["chartInk"] == found["ink"]


@pytest.mark.skipif(chromium() is None, reason="no Chromium here (make browser installs it where apt-get may)")
def test_pictures_are_written_one_a_chart(tmp_path: Path) -> None:
    charts = collect([str(write(tmp_path))])[2][:2]
    paths = write_pictures(charts, tmp_path / "png")
    assert [path.name for path in paths] == ["01-loss.png", "02-accuracy-evaluation.png"]
    for path in paths:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        assert size == (2 * WIDTH, 2 * HEIGHT)
