"""Scripts are found, asked and read; what goes wrong with one is told and does not stop the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raydist.benchmark import registry
from raydist.benchmark.existing import READERS
from raydist.benchmark.registry import find, find_folder
from raydist.benchmark.run import own_arguments, read_rows, run_all
from raydist.cli import main
from raydist.errors import ConfigError, RaydistError

ROOT = Path(__file__).parents[2]
WRITES = """
import json, sys
names = sys.argv[sys.argv.index("--only") + 1:sys.argv.index("--json")]
row = {"bench": "step", "case": "tiny", "unit": "ms", "values": {"raydist": [1.0, 1.2], "torchrun": [1.0, 1.0]}}
json.dump({"rows": [row], "asked": names}, open(sys.argv[-1], "w"))
"""


def scripts(tmp_path: Path, **texts: str) -> Path:
    folder = tmp_path / "jobs" / "bench"
    (folder / "contenders").mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_every_benchmark_of_the_issue_has_a_name_and_a_bar() -> None:
    wanted = "step start cluster_start finish data ckpt resume sweep pipeline bubble scale memory"
    assert list(registry.NAMES) == wanted.split()
    assert [benchmark.name for benchmark in find(["memory", "step"])] == ["step", "memory"]
    assert len(find([])) == len(registry.NAMES)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no benchmark 'stp'; there are step, start, .*memory"):
        find(["stp", "step"])


def test_the_scripts_are_found_in_a_checkout_and_below_it(tmp_path: Path) -> None:
    assert find_folder(ROOT) == ROOT / "jobs" / "bench" == find_folder(ROOT / "jobs") == find_folder(ROOT / "jobs" / "bench")
    with pytest.raises(ConfigError, match=r"no benchmarks in .*in the repository \(jobs/bench\).*--folder"):
        find_folder(tmp_path)


def test_a_script_is_asked_for_its_names_and_a_missing_one_is_named(tmp_path: Path) -> None:
    folder = scripts(tmp_path, runs=WRITES)
    found = run_all(find(["step", "start", "sweep"]), folder, None, True, lambda _: None)
    assert [(row.name, row.values["raydist"]) for row in found.rows] == [("step/tiny", [1.0, 1.2])]
    assert found.problems == {"start": "runs.py wrote no row of it", "sweep": "its script bench/sweep.py is missing"}
    assert list(found.seconds) == ["runs.py"]


def test_a_script_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    folder = scripts(tmp_path, runs=WRITES, scale="raise SystemExit(3)")
    found = run_all(find(["step", "scale"]), folder, 2, False, lambda _: None)
    assert found.problems == {"scale": "scale.py ended with 3; what it said is above"}
    assert [row.bench for row in found.rows] == ["step"]


def test_json_that_holds_no_rows_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"speed": 1}')
    with pytest.raises(RaydistError, match=r'mine\.py wrote JSON without "rows": speed'):
        read_rows("mine.py", path)
    with pytest.raises(RaydistError, match=r"data\.py wrote JSON without 'contenders'"):
        read_rows("data.py", path)
    path.write_text("no")
    with pytest.raises(RaydistError, match=r"mine\.py wrote no JSON"):
        read_rows("mine.py", path)


def test_arguments() -> None:
    assert own_arguments(["a", "b"], None, False) == ["--only", "a", "b"]
    assert own_arguments(["a"], 3, True) == ["--only", "a", "--rounds", "3", "--quick"]
    assert READERS["checkpoint.py"].arguments(3, False)[:2] == ["--turns", "3"]


def test_rows_of_the_scripts_that_stood_alone() -> None:
    (row,) = READERS["checkpoint.py"].rows({"seconds": {"no saving": [0.1], "in the background": [0.2]}, "ratios": {}})
    assert row.values == {"no saving": [100.0], "in the background": [200.0]}
    epoch, first = READERS["data.py"].rows(
        {"contenders": {"raydist": {"epoch_s": 2.0, "first_s": 1.0}, "ray": {"epoch_s": 4.0, "first_s": 3.0}}}
    )
    assert epoch.values == {"raydist": [2.0], "ray": [4.0]} and first.values == {"raydist": [1.0], "ray": [3.0]}


def test_the_command_prints_a_table_and_writes_json_and_a_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydist.report.pictures.write_pictures", no_browser)
    folder = scripts(tmp_path, runs=WRITES)
    out = tmp_path / "found.json"
    assert main(["bench", "step", "--folder", str(tmp_path), "--json", str(out), "--save-baseline"]) == 0
    said = capsys.readouterr()
    assert "step       tiny  1.1   torchrun 1  1.10 ×  9 %  ≤ 1.02 ×  missed" in said.out and "0 of 1 bars met" in said.out
    assert "no picture of the chart: no browser" in said.err
    found = json.loads(out.read_text())
    assert found["rows"][0]["figure"] == pytest.approx(1.1) and found["machine"]["cpus"] and found["problems"] == {}
    assert "bar \\u2264 1.02" in out.with_suffix(".html").read_text()
    assert json.loads((folder / "baseline.json").read_text())["figures"] == {"step/tiny": 1.1}
    # the same again is no worse than the baseline; a better baseline makes it worse
    assert main(["bench", "step", "--folder", str(tmp_path), "--check"]) == 0
    (folder / "baseline.json").write_text('{"figures": {"step/tiny": 0.5}}')
    capsys.readouterr()
    assert main(["bench", "step", "--folder", str(tmp_path), "--check"]) == 1
    assert "worse than the baseline:\nstep/tiny: 1.1, and the baseline has 0.5" in capsys.readouterr().out


def no_browser(*_: object) -> None:
    raise ConfigError("no browser")


def test_a_benchmark_that_could_not_be_measured_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripts(tmp_path, runs=WRITES)
    assert main(["bench", "step", "bubble", "--folder", str(tmp_path)]) == 1
    assert "bubble: not measured: its script bench/pipeline.py is missing" in capsys.readouterr().out


def test_wrong_commands_end_with_2_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = scripts(tmp_path, runs="raise SystemExit('ran')")
    where = ["--folder", str(tmp_path)]
    assert main(["bench", "nothing", *where]) == 2
    assert main(["bench", "step", *where, "--check"]) == 2
    assert main(["bench", "step", *where, "--json", str(tmp_path / "no" / "x.json")]) == 2
    (folder / "baseline.json").write_text("[]")
    assert main(["bench", "step", *where]) == 2
    told = capsys.readouterr().err
    for words in ("no benchmark 'nothing'", "make it with --save-baseline", "--json: no folder", "no baseline of benchmarks"):
        assert words in told
    assert "ran" not in told.split()


def test_the_list_needs_no_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--list"]) == 0
    assert "finish         ≤ 0.7 ×   ray train" in capsys.readouterr().out
