"""The leak checks of conftest.py find what they are there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

LEAKS = """
import os, subprocess, sys, threading, multiprocessing
import torch.distributed as dist

stop = threading.Event()

def test_nothing():
    thread = threading.Thread(target=lambda: None)
    thread.start()

def test_environment():
    os.environ["LEFT_BY_A_TEST"] = "1"

def test_environment_is_put_back():
    assert "LEFT_BY_A_TEST" not in os.environ

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_thread():
    threading.Thread(target=stop.wait, name="left").start()

def test_process():
    multiprocessing.get_context("fork").Process(target=stop.wait, name="child").start()

def test_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_process_group_is_gone():
    stop.set()
    assert not dist.is_initialized()
"""
FOUND = {
    "test_environment": "environment variable LEFT_BY_A_TEST",
    "test_folder": "the working folder is now",
    "test_thread": "thread 'left' still runs",
    "test_process": "process 'child'",
    "test_process_group": "a default process group",
}


def test_leaks_are_found_named_and_put_right(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert len(errors) == len(FOUND), done.stdout
    for line, (test, words) in zip(errors, FOUND.items(), strict=True):
        assert line.split(" - ")[0].endswith(f"::{test}")
        assert words in done.stdout
    assert "8 passed" in done.stdout
