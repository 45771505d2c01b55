"""Several hosts: the doctor finds what is wrong with them, and training outlives a cut cable."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.rundir import RunDir
from raydist.runners.local import train_local
from tests.hosts import Host, Hosts, why_not
from tests.runs import config_of, lines

REASON = why_not()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

RAY = str(Path(sys.executable).with_name("ray"))
ADDRESS = "10.77.0.1:6379"
AHEAD_S = 30
SLOT = '--resources={"slot": 1}'
"""One worker's, on the two hosts that are well."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    **{
        f"RAY_health_check_{name}": value
        for name, value in (("period_ms", "500"), ("timeout_ms", "1000"), ("failure_threshold", "3"))
    },
    "GLOO_SOCKET_IFNAME": "eth0",  # host names resolve to nothing here
    "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A head and two workers. `c` has an old raydist, a wrong clock and interface, and closes high ports to `b`."""
    old = tmp_path_factory.mktemp("old")
    (old / "raydist").mkdir()
    (old / "raydist" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    with Hosts(["a", "b", "c"], tmp_path_factory.mktemp("hosts")) as made:
        head = start(made["a"], 1, "--head", "--port=6379", "--include-dashboard=false", SLOT)
        assert head.wait(90) == 0, head.communicate()[0]
        sick = {"PYTHONPATH": str(old), "GLOO_SOCKET_IFNAME": "eth1", "RAYDIST_FAKE_CLOCK_OFFSET_S": str(AHEAD_S)}
        workers = [
            start(made["b"], 2, f"--address={ADDRESS}", SLOT),
            start(made["c"], 3, f"--address={ADDRESS}", **sick),
        ]
        for worker in workers:
            assert worker.wait(90) == 0, worker.communicate()[0]
        for process in (head, *workers):
            process.communicate()
        made["c"].block("10.77.0.2", "50000-60999")
        yield made


def start(host: Host, number: int, *arguments: str, **environment: str) -> Any:
    """`ray start` with ports below those that the firewall blocks."""
    ports = ("--node-manager-port=6380", "--object-manager-port=6381", "--min-worker-port=11000", "--max-worker-port=11999")
    own = (f"--node-ip-address={Hosts.ip(number)}", "--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats")
    return host.popen(RAY, "start", *own, *ports, *arguments, **{**ENVIRONMENT, **environment})


def doctor(host: Host, *arguments: str) -> tuple[int, list[dict[str, str]], float]:
    """Exit code, findings and seconds of `raydist doctor --json`."""
    began = time.monotonic()
    command = (sys.executable, "-m", "raydist", "doctor", "--address", ADDRESS, "--json", *arguments)
    done = host.run(*command, timeout=120, check=False, **ENVIRONMENT)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["findings"], time.monotonic() - began


def test_the_doctor_finds_what_is_wrong_with_a_host(hosts: Hosts, tmp_path: Path) -> None:
    code, findings, seconds = doctor(hosts["a"], "--storage", str(tmp_path / "runs"), "--nodes", "3")
    assert code == 1 and seconds < 60
    bad = {(f["check"], f["where"]): f for f in findings if f["status"] != "ok" and f["status"] != "skip"}
    places = [("versions", ""), ("interface", "c"), ("ports", "b → c"), ("clock", "c"), ("all-reduce gloo", "all")]
    assert list(bad) == places
    assert all(finding["status"] == "fail" for finding in bad.values())
    assert bad["versions", ""]["found"] == f"raydist: {raydist.__version__} (here, a, b); 0.0.1 (c)"
    wrong = bad["interface", "c"]
    assert wrong["found"] == "gloo takes eth1 (GLOO_SOCKET_IFNAME=eth1), and the other nodes are reached by eth0"
    assert wrong["todo"].startswith("set GLOO_SOCKET_IFNAME=eth0 ")
    blocked = re.search(
        r"process group: (\d) of 6 ports cannot be reached \(([\d, ]+): timed out\)", bad["ports", "b → c"]["found"]
    )
    assert blocked is not None and all(50000 <= int(port) <= 60999 for port in blocked[2].split(", "))
    assert int(blocked[1]) == len(blocked[2].split(", ")) < 6
    ahead = re.match(r"([\d.]+) s ahead", bad["clock", "c"]["found"])
    assert ahead is not None and abs(float(ahead[1]) - AHEAD_S) < 2
    good = {f["check"]: f["found"] for f in findings if f["status"] == "ok"}
    assert good["nodes"].startswith("3 answer: 6 CPUs") and "shared by all nodes" in good["storage"]


def test_the_doctor_is_content_with_the_others(hosts: Hosts) -> None:
    code, findings, seconds = doctor(hosts["a"], "--nodes", "a,10.77.0.2")
    assert (code, {f["status"] for f in findings}) == (0, {"ok", "skip"}) and seconds < 60
    found = {f["check"]: f["found"] for f in findings}
    assert found["interface"].startswith("eth0 on 2 nodes (to pin it: GLOO_SOCKET_IFNAME=eth0")
    assert found["all-reduce gloo"].startswith("right on 2 ranks")
    # six ports of the process group and two of Ray on each, and the head's own
    assert found["ports"] == "17 ports reached, 2 ways between 2 nodes"


def test_an_address_behind_a_firewall_times_out(hosts: Hosts) -> None:
    hosts["a"].block("10.77.0.3", "6379")
    try:
        code, findings, seconds = doctor(hosts["c"])
    finally:
        hosts["a"].unblock()
    assert code == 1 and seconds < 30
    assert [(f["check"], f["found"]) for f in findings] == [("address", f"{ADDRESS} timed out: no answer in 5 s")]


@pytest.mark.nightly
def test_training_across_hosts_outlives_a_cut_cable(hosts: Hosts, tmp_path: Path) -> None:
    """One worker on a, one on b; the cable of b is pulled in mid-training, and the run ends on a with the same losses."""
    xs = [float(x) for x in range(1, 41)]
    slow = {"target": "tests.runs:Slow", "args": {"xs": xs}}
    settings: dict[str, Any] = {
        "xs": xs,
        "optimizer__lr": 1e-4,
        "global_size": 4,
        "train__epochs": 3,
        "checkpoint": {"every": {"steps": 2}, "keep": 3},
        "scaling": {"workers": [1, 2], "resources": {"slot": 1}},
        "failure": {"hang_timeout": 20.0},
    }
    assert train_local(config_of(tmp_path, name="alone", **settings))["status"] == "finished"
    config = config_of(tmp_path, name="across", data__train=slow, **settings)
    job = tmp_path / "job.yaml"
    command = (sys.executable, "-m", "raydist", "train", str(job), "--address", ADDRESS)
    training = hosts["a"].popen(*command, **ENVIRONMENT)
    run = RunDir(f"{config.storage}/across")
    try:
        wait_for(lambda: steps(run) >= 6, training)
        hosts.cut("b")
        code = training.wait(120)
    finally:
        training.kill()
        output = training.communicate()[0]
        hosts.mend("b")
    assert code == 0, output
    summary = run.read_summary()
    assert summary is not None and (summary["status"], summary["restarts"], summary["steps"]) == ("finished", 1, 30), output
    events = run.read_events()
    assert [event["reason"] for event in events if event["kind"] == "resize"] == ["2 → 1 workers"]
    there, here = lines(Path(config.storage) / "across"), lines(Path(config.storage) / "alone")
    assert [line["step"] for line in there] == [line["step"] for line in here]
    assert [line["train_loss"] for line in there] == pytest.approx([line["train_loss"] for line in here], rel=1e-5)


def steps(run: RunDir) -> int:
    return max((int(line["step"]) for line in run.read_metrics()), default=0)


def wait_for(true: Any, process: Any, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None and time.monotonic() < deadline, "training did not get there"
        time.sleep(0.1)
