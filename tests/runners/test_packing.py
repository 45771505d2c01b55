"""What a package holds: git's view, what the job names, and what is said of it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

import raydist
from raydist.errors import ConfigError
from raydist.runners import packing
from raydist.runners.packing import LIMIT_BYTES, Need, describe, git_view, largest, own_files, pack, write_zip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository: a.py tracked, b.py new, runs/ and data/ ignored but for data/keep.csv, gone.py deleted."""
    root = tmp_path / "project"
    (root / "data/train").mkdir(parents=True)
    (root / "runs").mkdir()
    (root / ".gitignore").write_text("runs/\ndata/*\n!data/keep.csv\n")
    for name in ("a.py", "gone.py", "data/keep.csv"):
        (root / name).write_text(name)
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    (root / "gone.py").unlink()
    (root / "b.py").write_text("b")
    (root / "runs/old.txt").write_text("old")
    (root / "data/train/1.csv").write_text("1" * 3000)
    (root / "data/train/2.csv").write_text("2" * 2000)
    return root


SHOWN = [".gitignore", "a.py", "b.py", "data/keep.csv"]


def test_the_package_is_what_git_shows(project: Path) -> None:
    package = pack(project)
    assert sorted(package.files) == SHOWN
    assert package.added == {} and package.notes == []
    assert package.size == sum((project / name).stat().st_size for name in SHOWN)


def test_a_folder_of_a_repository_is_packed_by_itself(project: Path) -> None:
    assert sorted(pack(project / "data").files) == ["keep.csv"]


def test_ignore_files_count_without_a_repository_too(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("x.py", "x.log", "sub/y.py", "sub/z.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "sub/.gitignore").write_text("*.bin\n")
    assert git_view(tmp_path) == [".gitignore", "sub/.gitignore", "sub/y.py", "x.py"]


def test_without_git_all_is_packed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert sorted(pack(project).files) == sorted([*SHOWN, "data/train/1.csv", "data/train/2.csv", "runs/old.txt"])


def test_repositories_inside_and_virtual_environments(project: Path) -> None:
    inner = project / "inner"
    inner.mkdir()
    subprocess.run(["git", "-C", str(inner), "init", "-q"], check=True)
    (inner / "m.py").write_text("m")
    (project / "venv/lib").mkdir(parents=True)
    (project / "venv/pyvenv.cfg").touch()
    (project / "venv/lib/big.so").touch()
    package = pack(project)
    assert sorted(package.files) == sorted([*SHOWN, "inner/m.py"])
    assert package.notes == ["venv/ is a virtual environment and left out"]


def test_links_to_files_are_packed_as_files_and_others_are_named(project: Path) -> None:
    (project / "file").symlink_to("a.py")
    (project / "folder").symlink_to("data")
    (project / "broken").symlink_to("nowhere")
    package = pack(project)
    assert sorted(package.files) == sorted([*SHOWN, "file"])
    assert package.notes == [
        "broken is a link to nothing and left out",
        "folder is a link to a folder and left out",
    ]


def test_what_the_job_names_is_added_and_told_where_git_ignores_it(project: Path) -> None:
    package = pack(project, [Need("data.train.path", ("data/train",)), Need("task.target", ("a.py",))])
    assert sorted(package.files) == sorted([*SHOWN, "data/train/1.csv", "data/train/2.csv"])
    assert package.added == {"data.train.path": ["data/train/1.csv", "data/train/2.csv"]}
    lines = describe(package)
    assert lines[0].startswith("package: 6 files, ")
    assert "data.train.path needs 2 files (4.88 KiB) that git ignores; added: data/train/1.csv, data/train/2.csv" in lines


def test_what_the_job_names_must_be_there(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval\.path: .*/project/data/eval does not exist, and the job names it"):
        pack(project, [Need("data.eval.path", ("data/eval",))])


@pytest.mark.parametrize("pattern", ["*", ".*\n*", "/*", "**"])
def test_an_exclude_that_empties_the_package_is_refused(project: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="nothing is left of the 4 files"):
        pack(project, excludes=pattern.split("\n"))


def test_excludes_are_as_in_a_gitignore(project: Path) -> None:
    assert sorted(pack(project, excludes=["*.py", "!b.py", "/.*"]).files) == ["b.py", "data/keep.csv"]
    assert sorted(pack(project, excludes=["data/"]).files) == [".gitignore", "a.py", "b.py"]


def test_an_exclude_that_drops_what_the_job_needs_is_refused_or_told(project: Path) -> None:
    need = Need("data.train.path", ("data/train",))
    with pytest.raises(
        ConfigError, match=r"--exclude data/ drops all that data\.train\.path names \(data/train/1\.csv, data/train/2\.csv\)"
    ):
        pack(project, [need], ["data/"])
    notes = pack(project, [need], ["2.csv"]).notes
    assert notes == ["--exclude drops 1 file of 2 that data.train.path names (data/train/2.csv)"]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to pack"):
        pack(tmp_path)


def test_a_file_name_that_is_no_text_is_refused_by_name(project: Path) -> None:
    Path(os.fsdecode(os.fsencode(project) + b"/bad\xff.txt")).touch()
    with pytest.raises(ConfigError, match=r"b'bad\\xff\.txt' is not UTF-8"):
        pack(project)


def test_raydist_itself_goes_along_unless_it_is_there(project: Path) -> None:
    own = Path(raydist.__file__).parent
    package = pack(project, own=own)
    assert {"raydist/__init__.py", "raydist/runners/packing.py", "raydist/report/page.css"} <= package.files.keys()
    assert not [name for name in package.files if "__pycache__" in name]
    assert package.files.keys() - set(SHOWN) == own_files(own).keys()
    (project / "raydist").mkdir()
    (project / "raydist/__init__.py").write_text("mine")
    assert sorted(pack(project, own=own).files) == sorted([*SHOWN, "raydist/__init__.py"])


def test_the_archive_holds_the_files_and_is_the_same_each_time(project: Path, tmp_path: Path) -> None:
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    package = pack(project)
    sums = []
    for number in range(2):
        out = tmp_path / f"{number}.zip"
        assert write_zip(package, out) == out.stat().st_size
        sums.append(hashlib.sha256(out.read_bytes()).hexdigest())
        (project / "a.py").touch()
    assert sums[0] == sums[1]
    with zipfile.ZipFile(tmp_path / "0.zip") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            name: path.read_bytes() for name, path in package.files.items()
        }
        assert archive.getinfo("run.sh").external_attr >> 16 == 0o755


def test_a_package_above_rays_limit_is_refused_with_its_biggest_files(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LIMIT_BYTES == 512 * 1024 * 1024
    (project / "weights.bin").write_bytes(os.urandom(4096))
    monkeypatch.setattr(packing, "LIMIT_BYTES", 4096)
    with pytest.raises(ConfigError, match=r"Ray takes less than 4 KiB\. The biggest: weights\.bin 4 KiB; "):
        write_zip(pack(project), tmp_path / "x.zip")


def test_the_biggest_entries_fold_deep_folders(project: Path) -> None:
    package = pack(project, [Need("data", ("data/train",))])
    assert largest(package, 2) == [("data/train/", 5000), (".gitignore", len("runs/\ndata/*\n!data/keep.csv\n"))]
