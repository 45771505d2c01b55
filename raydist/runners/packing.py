"""What goes to the cluster with a job: the working directory as git sees it, and what the job names. No ray."""

from __future__ import annotations

import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from raydist.errors import ConfigError
from raydist.plain_table import size as readable

LIMIT_BYTES = 512 * 2**20
"""The largest package that Ray's head node keeps (GCS_STORAGE_MAX_SIZE of Ray 2.60)."""

_OWN = "raydist"
_SHOWN = 5
_EPOCH = (1980, 1, 1, 0, 0, 0)
_REPOSITORY = (".git", ".hg", ".svn", "__pycache__")


@dataclass(frozen=True)
class Need:
    """Files or folders of the working directory that the job names under `key`."""

    key: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """Name in the package -> file here; `added`: needed files that git does not show, by the key that names them."""

    root: Path
    files: dict[str, Path]
    added: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes, before they are compressed."""
        return sum(path.stat().st_size for path in self.files.values())


def pack(root: Path, needs: Sequence[Need] = (), excludes: Sequence[str] = (), own: Path | None = None) -> Package:
    """The package of `root`: what git shows there (tracked, or neither tracked nor ignored) and `needs`, without `excludes`.

    `excludes` are patterns as in a .gitignore. `own` is a package to add as `raydist/` when `root` has none. ConfigError when
    nothing is left, when a need is not there, or when `excludes` drop all of a need.
    """
    notes: list[str] = []
    shown = dict(_existing(root, git_view(root), notes))
    wanted = {need.key: dict(_files_of(root, need)) for need in needs}
    there = shown | {name: path for files in wanted.values() for name, path in files.items()}
    unwanted = set(_matching(excludes, there))
    files = {name: path for name, path in sorted(there.items()) if name not in unwanted}
    given = ", ".join(excludes)
    if not there:
        raise ConfigError(
            f"{root}: nothing to pack: git shows no file there, and the job names none; run it in the project's folder"
        )
    if not files:
        raise ConfigError(f"--exclude {given}: nothing is left of the {_count(there)} of {root}; write a narrower pattern")
    for key, names in wanted.items():
        lost = [name for name in names if name in unwanted]
        if lost and len(lost) == len(names):
            raise ConfigError(f"--exclude {given} drops all that {key} names ({_some(lost)}), and the job needs it there")
        if lost:
            notes.append(f"--exclude drops {_count(lost)} of {len(names)} that {key} names ({_some(lost)})")
    added = {key: sorted(set(names) & files.keys() - shown.keys()) for key, names in wanted.items()}
    if own is not None and f"{_OWN}/__init__.py" not in files:
        files |= own_files(own)
    return Package(root, files, {key: names for key, names in added.items() if names}, notes)


def git_view(root: Path) -> list[str]:
    """Names of the files that git shows under `root`: tracked, or untracked and not ignored; also where no repository is."""
    listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = _git(root, listing)
        if found.returncode:  # no repository: the rules of .gitignore files count all the same
            with tempfile.TemporaryDirectory() as empty:
                _git(root, ["init", "-q", "--bare", empty])
                found = _git(root, ["--git-dir", empty, "--work-tree", str(root), *listing])
    except FileNotFoundError:
        return [name for name, _ in _below(root, "")]  # no git
    if found.returncode:
        raise ConfigError(f"{root}: git cannot list its files: {os.fsdecode(found.stderr).strip()}")
    names = {os.fsdecode(name) for name in found.stdout.split(b"\0") if name}
    nested = {name for name in names if (root / name).is_dir() and not (root / name).is_symlink()}
    inside = {
        f"{name.rstrip('/')}/{below}" for name in nested if (root / name / ".git").exists() for below in git_view(root / name)
    }
    return sorted(names - nested | inside)


def _git(root: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, stdin=subprocess.DEVNULL)


def _existing(root: Path, names: Iterable[str], notes: list[str]) -> Iterator[tuple[str, Path]]:
    """Those that are files now. A link to a folder, which git shows as a file, is left out with a note."""
    names = list(names)
    for environment in {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == "pyvenv.cfg"} - {""}:
        notes.append(f"{environment}/ is a virtual environment and left out")
        names = [name for name in names if not name.startswith(f"{environment}/")]
    for name in names:
        path = root / name
        if path.is_file():
            yield _sayable(name), path
        elif path.is_symlink():
            notes.append(f"{name} is a link to {'a folder' if path.is_dir() else 'nothing'} and left out")


def _files_of(root: Path, need: Need) -> Iterator[tuple[str, Path]]:
    for name in need.names:
        path = root / name
        if path.is_dir():
            yield from _below(root, name)
        elif path.is_file():
            yield _sayable(name), path
        else:
            raise ConfigError(
                f"{need.key}: {path} does not exist, and the job names it; an absolute path is looked up on the cluster"
            )


def _below(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """All files below a folder, without caches and repositories' own."""
    for folder, folders, files in os.walk(root / name, followlinks=True):
        folders[:] = sorted(inner for inner in folders if inner not in _REPOSITORY)
        for file in sorted(files):
            path = Path(folder) / file
            if path.is_file():
                yield _sayable(path.relative_to(root).as_posix()), path


def _sayable(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the name of the file {os.fsencode(name)!r} is not UTF-8 and cannot be packed; rename it") from None
    return name


def _matching(patterns: Sequence[str], names: Iterable[str]) -> Iterable[str]:
    try:
        return GitIgnoreSpec.from_lines(patterns).match_files(names) if patterns else ()
    except ValueError as error:
        raise ConfigError(f"--exclude {', '.join(patterns)}: no pattern as in a .gitignore: {error}") from error


def own_files(package: Path) -> dict[str, Path]:
    """The files of the package raydist, as they lie in a package: the cluster then runs this version of it."""
    return {
        f"{_OWN}/{name}": path
        for name, path in ((path.relative_to(package).as_posix(), path) for _, path in _below(package, ""))
    }


def write_zip(package: Package, out: Path) -> int:
    """Write the package; the same files give the same bytes. Returns their number. ConfigError above `LIMIT_BYTES`."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(package.files.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                while chunk := source.read(2**20):
                    target.write(chunk)
    size = out.stat().st_size
    if size >= LIMIT_BYTES:
        biggest = "; ".join(f"{name} {readable(amount)}" for name, amount in largest(package))
        raise ConfigError(
            f"the package has {readable(size)} and Ray takes less than {readable(LIMIT_BYTES)}. The biggest: {biggest}. Leave "
            "files out by --exclude or .gitignore, and put data on shared storage (an absolute path or a URI in the job file)"
        )
    return size


def describe(package: Package) -> list[str]:
    """Lines for the user: how much, the biggest entries, what was added although git ignores it."""
    lines = [f"package: {_count(package.files)}, {readable(package.size)}, of {package.root}"]
    lines += [f"  {readable(amount):>9}  {name}" for name, amount in largest(package)]
    for key, names in package.added.items():
        size = sum(package.files[name].stat().st_size for name in names)
        lines.append(f"{key} needs {_count(names)} ({readable(size)}) that git ignores; added: {_some(names)}")
    return lines + package.notes


def largest(package: Package, count: int = _SHOWN) -> list[tuple[str, int]]:
    """The biggest entries, as (name, bytes): files, or folders of the second level with all that is below."""
    sizes: dict[str, int] = {}
    for name, path in package.files.items():
        parts = PurePosixPath(name).parts
        entry = name if len(parts) <= 2 else f"{parts[0]}/{parts[1]}/"
        sizes[entry] = sizes.get(entry, 0) + path.stat().st_size
    return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:count]


def _count(names: Iterable[str]) -> str:
    number = len(list(names))
    return "1 file" if number == 1 else f"{number} files"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")
