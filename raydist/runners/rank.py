"""The actor that holds one rank of `raydist run`: its place, its GPUs, and the guard with the script. Never imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydist.runners import guard

OUT, ERR = 1, 2
_HELD_BYTES = 2**22
"""Output that waits for the driver; a script that prints faster than it is fetched waits, as with any pipe."""
_TAKE_BYTES = 2**16
_GATHER_S = 0.05
"""How long a piece of output waits for more, so that a script that prints much costs few messages."""
_OF_RAY = ("RAY_", "RAYLET_")
_SET_BY_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SPT_NOENV")
"""The actor's CPUs, its own GPUs, and how it was named."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    node: str
    host: str
    ip: str
    gpus: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Order:
    """What to start. `inherit`: start from the node's environment, less what is Ray's. `python`: None is the node's own."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    folder: str
    inherit: bool
    python: str | None = None


@dataclass(frozen=True)
class End:
    """How a rank ended: exit code, time (s since 1970, the node's clock), and the error file that torch's `@record` wrote."""

    code: int
    time: float
    error_file: str | None = None
    words: str | None = None


@dataclass(frozen=True)
class News:
    """Output since the last poll, in order, and the end, after the last of the output."""

    output: list[tuple[int, bytes]]
    end: End | None


class Rank:
    """See the module. `poll` waits in a thread of its own, so that the actor hears the rest meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reset()
        self._port: socket.socket | None = None

    def _reset(self) -> None:
        self._output: list[tuple[int, bytearray]] = []
        self._held = 0
        self._end: End | None = None
        self._control: int | None = None
        self._scratch: Any = None

    def place(self) -> Place:
        """Where this rank is."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        node_ip = ray.util.get_node_ip_address()
        return Place(context.get_node_id(), socket.gethostname(), node_ip, tuple(map(str, gpus)), os.getcwd())

    def free_port(self) -> int:
        """A TCP port for rank 0's store. It stays bound, so that nobody else is given it before the store is there."""
        if self._port is not None:
            self._port.close()
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # with it on both sides, two may bind and one listen
        self._port.bind(("", 0))
        return int(self._port.getsockname()[1])

    def start(self, order: Order) -> None:
        """Start the script; what it prints and how it ends is told by `poll`."""
        self._reset()
        self._scratch = tempfile.TemporaryDirectory(prefix="raydist-run-", ignore_cleanup_errors=True)
        error_file = Path(self._scratch.name) / "error.json"
        env = {**(_inherited() if order.inherit else {}), **order.env, "TORCHELASTIC_ERROR_FILE": str(error_file)}
        python = order.python or env.get("PYTHON_EXEC") or sys.executable
        spec = {"argv": [python, "-u", *order.arguments], "env": env, "cwd": order.folder}
        control_read, self._control = os.pipe()
        pipes = [os.pipe() for _ in range(3)]
        inner = (control_read, *(write for _, write in pipes))
        program = [sys.executable, "-I", "-S", guard.__file__, *map(str, inner)]
        subprocess.run(program, pass_fds=inner, stdin=subprocess.DEVNULL, check=True)
        for fd in inner:
            os.close(fd)
        reader = threading.Thread(target=self._read, args=([read for read, _ in pipes], error_file), daemon=True)
        reader.start()
        _write(self._control, json.dumps(spec).encode() + b"\n")

    def _read(self, pipes: list[int], error_file: Path) -> None:
        """Collect output and the guard's word until all three pipes have ended."""
        said = b""
        with selectors.DefaultSelector() as ready:
            for number, fd in enumerate(pipes):
                ready.register(fd, selectors.EVENT_READ, number)
            while ready.get_map():
                for key, _ in ready.select():
                    data = os.read(key.fd, _TAKE_BYTES)
                    if not data:
                        ready.unregister(key.fd)
                        os.close(key.fd)
                    elif key.data == 0:
                        said += data
                    else:
                        self._hold(key.data, data)
        killed = {"code": 137, "time": time.time()}  # no word: the guard was killed, and the script with it
        end: dict[str, Any] = json.loads(said) if said else killed
        recorded = error_file.read_text(errors="replace") if error_file.exists() else None
        self._scratch.cleanup()
        with self._changed:
            self._end = End(end["code"], end["time"], recorded)
            if self._control is not None:
                os.close(self._control)
                self._control = None
            self._changed.notify_all()

    def _hold(self, stream: int, data: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._held < _HELD_BYTES)
            if not self._output or self._output[-1][0] != stream:
                self._output.append((stream, bytearray()))
            self._output[-1][1].extend(data)
            self._held += len(data)
            self._changed.notify_all()

    def poll(self, seconds: float) -> News:
        """What is new, as soon as there is something, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._end, seconds)
            self._changed.wait_for(lambda: self._end or self._held >= _HELD_BYTES, _GATHER_S)
            output, self._output, self._held = self._output, [], 0
            self._changed.notify_all()
            return News([(stream, bytes(data)) for stream, data in output], self._end)

    def signal(self, number: int) -> None:
        """Send a signal to the script and its process group."""
        with self._changed:
            if self._control is not None:
                _write(self._control, f"{number}\n".encode())

    def kill(self) -> None:
        """Kill the script and all that it started."""
        with self._changed:
            if self._control is not None:
                os.close(self._control)  # the guard takes that for the actor's end
                self._control = None


def _write(fd: int, data: bytes) -> None:
    """To a guard, which may have ended; `poll` tells."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


def _inherited() -> dict[str, str]:
    """This node's environment without what Ray put into it for its own worker."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
    for name in _SET_BY_RAY:
        own.pop(name, None)
    return own
