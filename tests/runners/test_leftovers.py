"""What a local cluster's end leaves: nothing."""

from __future__ import annotations

import subprocess
import sys

import psutil

from raydist.runners.leftovers import end

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def test_a_process_that_stays_is_killed_and_one_that_ended_is_no_error() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as stays,
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as ends,
    ):
        assert stays.stdout is not None
        assert ends.stdin is not None
        stays.stdout.readline()
        both = [psutil.Process(stays.pid), psutil.Process(ends.pid)]
        ends.stdin.close()
        ends.wait()
        end(both, grace=0.2)
        assert (stays.wait(), ends.returncode) == (-9, 0)
