"""`raydist run`: a script that expects torchrun's environment, on Ray. All workers start, and start again, together."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from raydist.errors import ConfigError, ScriptFailed, Stopped
from raydist.runners.cluster import joined, quiet
from raydist.runners.gang import Gang, Seat, check_fits, rank_variables
from raydist.runners.output import Output
from raydist.runners.rank import ERR, End, Order

_SETTLE_S = 0.5
"""Seconds after the first failure in which an earlier one may still come to light."""
_LAST_WORDS_S = 10.0
"""Seconds for killed ranks to be gone before they are killed again."""
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH", "OMP_", "MKL_", "PYTHON", "CUDA_LAUNCH", "ACCELERATE_", "HF_")
"""Beginnings of the names of variables that go from this environment to the workers of another cluster."""


@dataclass(frozen=True)
class Script:
    """What to run: `arguments` follow the interpreter (`["train.py", "--lr", "1"]`, `["-m", "package.module"]`)."""

    arguments: Sequence[str]
    workers: int = 1
    address: str | None = None
    cpus: float = 1.0
    gpus: int | None = None
    """Per worker; None: one where the cluster has GPUs."""
    max_restarts: int = 0
    tee: str = "0"
    log_dir: Path = Path("runs")
    grace: float = 30.0
    env: Mapping[str, str] = field(default_factory=dict)
    verbose: bool = False


def run_script(script: Script) -> None:
    """Run it to its end. ScriptFailed has the first failing rank's exit code, Stopped 128 + the signal that stopped it.

    ConfigError when the script is not there or the cluster cannot hold the workers.
    """
    check_script(script.arguments)
    shown = shown_ranks(script.tee, script.workers)
    environment = dict(os.environ)
    quiet(script.verbose)
    local = {"num_cpus": max(1, int(-(-script.workers * script.cpus // 1)))}
    # Ray's start sets handlers of its own, so ours come after it
    with joined(script.address, local, script.verbose) as cluster, Signals() as signals:
        import ray

        gpus = script.gpus if script.gpus is not None else int(ray.cluster_resources().get("GPU", 0.0) > 0)
        need = {"CPU": script.cpus, "GPU": float(gpus)}
        check_fits(script.workers, need)
        stem = "module" if script.arguments[0] == "-m" else Path(script.arguments[0]).stem
        run_id = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        output = Output(script.log_dir / run_id, script.workers, shown)
        try:
            _Run(script, need, environment, cluster.owned, run_id, output, signals).attempts()
        finally:
            output.end()


def check_script(arguments: Sequence[str]) -> None:
    """ConfigError when the file is not there; a module is looked up where it runs."""
    path = Path(arguments[0])
    if arguments[0] != "-m" and not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"{path} {what} (in {Path.cwd()}): name a Python file, or -m and a module; raydist's options stand before it"
        )


def shown_ranks(tee: str, workers: int) -> set[int]:
    """`all`, `none` or ranks such as `0,2`. ConfigError for others."""
    if tee in ("all", "none"):
        return set(range(workers)) if tee == "all" else set()
    try:
        ranks = {int(part) for part in tee.split(",")}
    except ValueError:
        ranks = {-1}
    if not ranks <= set(range(workers)):
        raise ConfigError(f"--tee {tee}: give all, none, or ranks from 0 to {workers - 1}, such as --tee 0")
    return ranks


class Signals:
    """Within it, SIGINT and SIGTERM are noted instead of obeyed; a second one means: at once."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __enter__(self) -> Signals:
        self._before: dict[int, Any] = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        except ValueError:  # not in the main thread: they are another's affair
            pass
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.seen.append(number)

    def __bool__(self) -> bool:
        return bool(self.seen)


def environment_of(
    seat: Seat, workers: int, master: tuple[str, int], attempt: int, max_restarts: int, run_id: str
) -> dict[str, str]:
    """torchrun's variables (torch 2.13, elastic/agent/server/local_elastic_agent.py); the store is rank 0's own."""
    return {
        **rank_variables(seat, workers, master),
        "GROUP_RANK": str(seat.group),
        "ROLE_RANK": str(seat.rank),
        "ROLE_NAME": "default",
        "GROUP_WORLD_SIZE": str(seat.groups),
        "ROLE_WORLD_SIZE": str(workers),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }


@dataclass
class _Run:
    script: Script
    need: dict[str, float]
    environment: dict[str, str]
    owned: bool
    run_id: str
    output: Output
    signals: Signals

    def attempts(self) -> None:
        """Run the gang until it succeeds, is stopped, or has failed once more than allowed."""
        gang: Gang | None = None
        began = time.monotonic()
        try:
            for attempt in range(self.script.max_restarts + 1):
                try:
                    gang = gang or self._gang()
                    if attempt == 0:
                        self._announce(gang)
                    ends = self._attempt(gang, attempt)
                except KeyboardInterrupt:
                    raise self._stopped() from None
                if self.signals:
                    raise self._stopped()
                failed = {rank: end for rank, end in ends.items() if end.code}
                if not failed:
                    say(f"{self._workers()} finished in {time.monotonic() - began:.1f} s")
                    return
                rank, end = min(failed.items(), key=lambda item: item[1].time)
                words = self._words(gang.seats[rank], end)
                if attempt == self.script.max_restarts:
                    raise ScriptFailed(words, end.code)
                say(f"{words}\nraydist: restart {attempt + 1} of {self.script.max_restarts}")
                if any(end.words for end in failed.values()):  # an actor is gone
                    gang.close()
                    gang = None
        finally:
            if gang is not None:
                gang.close()

    def _gang(self) -> Gang:
        return Gang(self.script.workers, self.need, say, lambda: bool(self.signals))

    def _announce(self, gang: Gang) -> None:
        hosts = list(dict.fromkeys(seat.place.host for seat in gang.seats))
        where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} nodes ({', '.join(hosts)})"
        gpus = f", {self.need['GPU']:g} GPU each" if self.need["GPU"] else ""
        say(f"{self._workers()} {where}{gpus}; logs: {self.output.folder}/attempt_0/RANK/")

    def _workers(self) -> str:
        return f"{self.script.workers} worker{'s' * (self.script.workers != 1)}"

    def _attempt(self, gang: Gang, attempt: int) -> dict[int, End]:
        """One attempt: how each rank ended."""
        self.output.begin(attempt)
        lone = gang.seats[0].groups == 1
        master = ("127.0.0.1" if lone else gang.seats[0].place.ip, gang.free_port())
        gang.start([self._order(seat, master, attempt) for seat in gang.seats])
        ends: dict[int, End] = {}
        ending = _Ending(gang, self.signals, self.script.grace)
        while gang.running():
            for rank, news in gang.news().items():
                for stream, data in news.output:
                    self.output.write(rank, stream, data)
                if news.end is not None:
                    ends[rank] = news.end
                    if news.end.error_file is not None:
                        self.output.record(rank, news.end.error_file)
            ending.look(any(end.code for end in ends.values()))
        return ends

    def _order(self, seat: Seat, master: tuple[str, int], attempt: int) -> Order:
        here = self.environment
        env = dict(here) if self.owned else {name: value for name, value in here.items() if name.startswith(_PASSED_ON)}
        env |= environment_of(seat, self.script.workers, master, attempt, self.script.max_restarts, self.run_id)
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = here.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if "OMP_NUM_THREADS" not in here and seat.local_size > 1:
            env["OMP_NUM_THREADS"] = str(max(1, int(self.script.cpus)))
        if self.need["GPU"] or self.script.gpus == 0:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(seat.devices)
        env |= self.script.env
        folder = seat.place.folder if _packaged() else os.getcwd()
        python = (here.get("PYTHON_EXEC") or sys.executable) if self.owned else None
        return Order(self.script.arguments, env, folder, inherit=not self.owned, python=python)

    def _words(self, seat: Seat, end: End) -> str:
        """What the failing rank left: how it ended, and its last lines where they were not on the screen."""
        how = end.words or f"exit code {end.code}"
        if end.words is None and end.code > 128:
            with suppress(ValueError):
                how = f"killed by {signal.Signals(end.code - 128).name} (exit code {end.code})"
        words = f"rank {seat.rank} on {seat.place.host}: {how}; its logs: {self.output.path(seat.rank, ERR).parent}/"
        tail = self.output.tail(seat.rank)
        if tail and seat.rank not in self.output.shown:
            words += f"\nthe end of its stderr:\n{tail}"
        return words

    def _stopped(self) -> Stopped:
        number = self.signals.seen[0] if self.signals else signal.SIGINT
        return Stopped(f"stopped by {signal.Signals(number).name}; no worker runs any more", 128 + number)


class _Ending:
    """Stops a gang when a rank has failed or a signal came: the signal (SIGTERM), and SIGKILL after `grace` seconds."""

    def __init__(self, gang: Gang, signals: Signals, grace: float) -> None:
        self.gang, self.signals, self.grace = gang, signals, grace
        self._told = 0
        self._failed: float | None = None
        self._deadline: float | None = None

    def look(self, failed: bool) -> None:
        """Do what is due now. `failed`: whether a rank has failed."""
        now = time.monotonic()
        if failed and self._failed is None:
            self._failed = now
        if len(self.signals.seen) > self._told:
            number, self._told = self.signals.seen[self._told], self._told + 1
            if self._told == 1:
                say(f"{signal.Signals(number).name} goes to all workers; {self.grace:g} s are left (once more: none)")
                self._send(number, now)
            else:
                self._deadline = now
        if self._failed is not None and self._deadline is None and now >= self._failed + _SETTLE_S:
            self._send(signal.SIGTERM, now)
        if self._deadline is not None and now >= self._deadline:
            self.gang.kill()
            self._deadline = now + _LAST_WORDS_S

    def _send(self, number: int, now: float) -> None:
        self.gang.signal(number)
        self._deadline = now + self.grace


def _packaged() -> bool:
    """Whether this process runs in a package that Ray unpacks on every node (`raydist submit run …`)."""
    import ray

    return bool(ray.get_runtime_context().runtime_env.get("working_dir"))


def say(text: str) -> None:
    """A line for the user, on stderr."""
    print(f"raydist: {text}", file=sys.stderr, flush=True)
