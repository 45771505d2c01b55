"""The page: all that a run tells is in it as text, nothing in it is fetched, and nothing that a run says becomes markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from raydist.cli import main
from raydist.report.build import collect, foreign, report
from raydist.report.words import duration, number
from tests.report.runs import NASTY, write


class Parsed(HTMLParser):
    """Elements, their attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self._inside = "", [""], ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


def test_a_runs_page_holds_its_curves_events_and_numbers(tmp_path: Path) -> None:
    root = write(tmp_path)
    where = report([str(root)])
    assert where == str(root / "report.html")
    page = Parsed(Path(where).read_text())
    for words in ("loss", "learning rate", "gradient norm", "throughput", "what happened when", "peak memory", "accuracy"):
        assert words in page.text
    assert "train: 10 at step 1, 1.25 at step 8, lowest 1.25, highest 10" in page.text
    assert "rank 0 compute 300, data wait 0, sync wait 200; rank 1 compute 300, data wait 100, sync wait 100" in page.text
    assert "Rank 1 is slow: data." in page.text  # 100 of 500 ms more than the other
    assert "rank 1 died" in page.text and "the gradient is nan" in page.text and "from step 4" in page.text
    figures = json.loads(page.scripts[1])
    loss = figures[0]
    assert loss["data"][0]["x"] == list(range(1, 9)) and loss["data"][0]["y"] == [10.0 / step for step in range(1, 9)]
    assert [shape["x0"] for shape in loss["layout"]["shapes"]] == [4, 7]  # the restart and the skipped step
    charts = [attributes for tag, attributes in page.tags if attributes.get("class") == "chart"]
    assert len(charts) == len(figures) >= 9
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in charts)


def test_nothing_is_fetched_and_nothing_that_a_run_says_becomes_markup(tmp_path: Path) -> None:
    page = Parsed(Path(report([str(write(tmp_path, nasty=True))], tmp_path / "out.html")).read_text())
    loaded = [attributes for _, attributes in page.tags if {"src", "href", "srcset", "data", "action"} & set(attributes)]
    assert loaded == []
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none';")
    assert NASTY in page.text  # as text
    assert [tag for tag, _ in page.tags].count("script") == 3 and "img" not in [tag for tag, _ in page.tags]
    assert NASTY in json.dumps(json.loads(page.scripts[1])).replace('\\"', '"')


def test_several_runs_are_compared_with_the_settings_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "one", 0.1)
    write(tmp_path, "two", 0.2, over=False)
    assert report(["one", "two"]) == "report.html"
    page = Parsed((tmp_path / "report.html").read_text())
    assert "Settings that differ" in page.text and "optimizer.lr0.10.2" in page.text.replace("\n", "")
    assert "running or killed" in page.text
    names = [trace["name"] for trace in json.loads(page.scripts[1])[0]["data"]]
    assert names == ["one train", "two train", "one eval", "two eval"]


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    root = write(tmp_path, over=False)
    (root / "metrics.jsonl").unlink()
    text = Path(report([str(root)])).read_text()
    assert "running or killed" in text and "restart" in text


def test_figures_of_other_rooms_come_with_their_titles() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    figure = go.Figure(go.Bar(x=[1, 2], y=[3, 4], name="bubble"), layout={"title": {"text": "stages"}})
    one = foreign("pipeline", figure)
    assert [(chart.title, chart.words) for chart in one] == [("stages", "stages: a chart of bubble.")]
    assert "title" not in one[0].layout and one[0].data[0]["type"] == "bar"
    assert [chart.title for chart in foreign("sweep", {"a": go.Figure(), "b": [go.Figure(), go.Figure()]})] == ["a", "b", "b"]
    assert foreign("sweep", None) == []


def test_the_command_writes_the_page_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path)
    assert main(["report", str(root), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no run there" in capsys.readouterr().err


def test_a_sweep_of_many_runs_says_how_many_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.report.build.MOST_RUNS", 2)
    for name in ("a", "b", "c"):
        write(tmp_path, name)
    runs, labels, _, notes = collect([str(tmp_path)])
    assert labels == ["a", "b"] and len(runs) == 2 and notes == ["The first 2 of 3 runs are drawn."]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1234567, "0.12346"),
        (123456.7, "123457"),
        (1e-7, "1e-07"),
        (3, "3"),
        (None, ""),
        (float("inf"), "inf"),
        (5e12, "5e+12"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(12.34, "12.3 s"), (200, "3 min 20 s"), (3720, "1 h 02 min")])
def test_durations_are_in_the_units_people_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text
