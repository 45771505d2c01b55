"""The process between a rank's actor and its script: it starts the script, and nothing of the script outlives it.

Run as a program (`python -I -S guard.py CONTROL STATUS OUT ERR`, four file descriptors) that needs the standard library alone
and starts in some 20 ms. From CONTROL it reads one JSON line (`argv`, `env`, `cwd`), then numbers of signals to pass on, one a
line. The end of CONTROL means that the actor is gone, however it ended: everything is killed. STATUS gets one JSON line: the
exit code (128 + n after signal n) and the time.

Three holds, since each alone can fail: the guard leaves the actor's family, so that what ends the actor leaves it time to clean
up; the script dies with the guard (PR_SET_PDEATHSIG); what it leaves behind becomes the guard's (PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVERS_S = 1.0
"""Seconds between SIGTERM and SIGKILL for processes that a script which has ended leaves behind."""
_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)
"""What the guard or its Python ignores; a program that is started would inherit that."""
_NOT_STARTED = {FileNotFoundError: 127, PermissionError: 126}
"""As a shell's exit codes."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def start(spec: dict, out: int, err: int) -> int:  # type: ignore[type-arg]
    """Start the script in a session of its own; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(spec["cwd"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        os.write(2, f"{spec['argv'][0]} cannot be started in {spec['cwd']}: {error}\n".encode(errors="replace"))
        os._exit(_NOT_STARTED.get(type(error), 126))
    finally:
        os._exit(126)


def family(root: int) -> list[int]:
    """All processes below `root`, by /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found, look = [], [root]
    while look:
        below = children.get(look.pop(), [])
        found += below
        look += below
    return found


def reap() -> dict[int, int]:
    """Exit codes of the children that have ended, by process id."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if not pid:
            return codes
        code = os.waitstatus_to_exitcode(status)
        codes[pid] = 128 - code if code < 0 else code


def clear(grace: float) -> None:
    """End all that is left: SIGTERM, and SIGKILL after `grace` seconds. Returns when nothing is."""
    deadline = time.monotonic() + grace
    number = signal.SIGTERM if grace else signal.SIGKILL
    sent: set[tuple[int, int]] = set()
    while True:
        reap()
        left = family(os.getpid())
        if not left:
            return
        if time.monotonic() >= deadline:
            number = signal.SIGKILL
        for pid in left:
            if (pid, number) not in sent:
                sent.add((pid, number))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(0.01)


def watch(pid: int, control: int) -> int | None:
    """Pass signals on until the script `pid` ends; its exit code, or None when the actor is gone."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    code = reap().get(pid)  # what ended before the handler was there
    asked = b""
    while code is None:
        ready = select.select([control, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            code = reap().get(pid)
        if control in ready:
            text = os.read(control, 4096)
            if not text:
                return code
            *numbers, asked = (asked + text).split(b"\n")
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, int(number))
    return code


def _line(fd: int) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(fd, 65536)
        if not part:
            os._exit(1)
        text += part
    return text


def main(control: int, status: int, out: int, err: int) -> None:
    """See the module."""
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for fd in (control, status, out, err):
        os.set_inheritable(fd, False)
    spec = json.loads(_line(control))
    pid = start(spec, out, err)
    for fd in (0, 1, 2, out, err):
        os.close(fd)
    code = watch(pid, control)
    ended = time.time()
    clear(0.0 if code is None else _LEFTOVERS_S)
    if code is not None:
        os.write(status, json.dumps({"code": code, "time": ended}).encode() + b"\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
