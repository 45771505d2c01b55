"""What is done to a run from outside while it waits at its gate: to its cluster, its controller, its driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from raydist.config import parse_config
from raydist.errors import RaydistError
from raydist.runners.ray_train import train_ray
from tests.chaos.cases import Case
from tests.chaos.cluster import AGENTS, Nodes, kill_controller, titles
from tests.chaos.runs import unseen

REPOSITORY = Path(__file__).parents[2]


def beside(case: Case, run: Path, content: dict[str, Any], cluster: Nodes, acted: list[float]) -> None:
    """The job in a thread, and in this one what `case.act` does once the run waits at its gate; its time goes to `acted`."""
    raised: list[BaseException] = []

    def train() -> None:
        try:
            train_ray(parse_config(content, run.parent), screen=unseen())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=train, name="chaos-train", daemon=True)
    thread.start()
    while thread.is_alive() and not (run / ".faults" / "0-0").exists():
        time.sleep(0.02)
    if thread.is_alive():
        time.sleep(0.3)  # by now every rank waits: for the gate or in the collective behind it
        acted.append(time.time())
        acts = {"raylet": cluster.kill_second, "preempt": cluster.preempt_second, "grow": cluster.add_second}
        acts.get(str(case.act), lambda: kill_controller(cluster.session))()
    thread.join()
    if case.act in ("raylet", "preempt"):
        cluster.want(1)
    if raised:
        raise raised[0]


def drive(case: Case, run: Path, content: dict[str, Any], cluster: Nodes, acted: list[float]) -> None:
    """The job by `raydist train` in a process of its own, on a Ray of its own unless it is killed; then the command again."""
    file = run.parent / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "raydist", "train", str(file), "--address", "local"]
    first = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not (run / ".faults" / "0-0").exists():
            if time.monotonic() > deadline or first.poll() is not None:
                raise RaydistError(f"the driver did not reach its gate: {first.communicate()[1]}")
            time.sleep(0.02)
        time.sleep(0.3)
        session = session_of(first.pid)
        acted.append(time.time())
        if case.act == "driver":
            first.kill()
        else:
            number = signal.SIGTERM if case.act == "sigterm" else signal.SIGINT
            for _ in range(2 if case.act == "ctrl_c_twice" else 1):
                # Ctrl-C goes to the whole group, as a terminal sends it
                os.kill(first.pid, number) if case.act == "sigterm" else os.killpg(first.pid, number)
                time.sleep(0.5)
        text = first.communicate(timeout=60)[1]
    finally:
        first.kill()
        first.wait()
    took = time.time() - acted[0]
    code = {"driver": -9, "ctrl_c_twice": 130}.get(str(case.act), 3)
    if first.returncode != code:
        raise RaydistError(f"the driver's exit code is {first.returncode}, not {code}: {text}")
    if case.act in ("sigterm", "ctrl_c") and not re.search(case.says, text):
        raise RaydistError(f"the driver did not say {case.says!r}: {text}")
    if case.act == "ctrl_c_twice" and took > 15:
        raise RaydistError(f"a second Ctrl-C took {took:.0f} s")
    _wait_for_the_end(session)
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=180)
    if again.returncode:
        raise RaydistError(f"the same command again ends with exit code {again.returncode}: {again.stderr}")


def _wait_for_the_end(session: str) -> None:
    """Return when nothing of a driver's Ray runs any more; RaydistError when it takes too long.

    Ray's agents of a killed driver look for its GCS before they end: 60.5 s (Ray 2.60), with or without raydist.
    """
    began = time.monotonic()
    while left := titles(session):
        late = [title for title in left.values() if time.monotonic() - began > (120 if title.startswith(AGENTS) else 60)]
        if late:
            raise RaydistError(f"still running after the driver's end: {late}")
        time.sleep(0.2)


def session_of(driver: int) -> str:
    """The folder of the Ray session that a driver started, from its children's command lines."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                text = (entry / "cmdline").read_text()
            except OSError:
                continue
            found = re.search(r"--session-dir=([^\0]+)", text)
            if parent == driver and found:
                return found[1]
    raise AssertionError(f"process {driver} has started no Ray")
