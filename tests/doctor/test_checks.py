"""Each check on an invented cluster where one thing is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from raydist.config import parse_config
from raydist.doctor import checks, checks_job, checks_net
from raydist.doctor.report import Finding, Reduced, Survey, failed, plain, text
from raydist.doctor.run import judge
from tests.doctor.surveys import GOOD_RANK, link, one, well
from tests.support import lin_job


@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_is_wrong_with_a_good_cluster(count: int) -> None:
    found = judge(well(count), parse_config(lin_job([1.0], 1, scaling={"workers": count}), "/base"))
    assert {finding.status for finding in found} == {"ok"}
    assert not failed(found)


def test_what_needs_a_job_is_skipped_without_one() -> None:
    survey = well()
    survey.storage, survey.data = None, []
    skipped = {finding.check for finding in judge(survey, None) if finding.status == "skip"}
    assert skipped == {"storage", "data", "job"}


# -- nodes and their likeness ------------------------------------------------------------------------------------


def test_a_node_that_does_not_answer() -> None:
    survey = well()
    survey.nodes[1].facts, survey.nodes[1].problem = None, "no process started there within 25 s"
    bad = one(checks.check_nodes(survey), "fail")
    assert (bad.where, bad.found) == ("b", "no process started there within 25 s")


def test_what_nobody_answers_is_not_called_good() -> None:
    survey = well()
    survey.nodes[1].facts = None
    found = {finding.check: finding.status for finding in judge(survey, None)}
    assert (found["nodes"], found["interface"], found["ports"]) == ("fail", "skip", "skip")
    survey.nodes[0].facts = None
    assert {finding.status for finding in judge(survey, None)} == {"fail", "skip"}


def test_fewer_nodes_than_asked_for_and_lost_ones() -> None:
    survey = well()
    survey.wanted = 3
    assert one(checks.check_nodes(survey), "fail").found == "2 nodes, and --nodes asks for 3"
    survey.wanted, survey.lost = 2, ["c"]
    assert one(checks.check_nodes(survey), "warn").where == "c"
    survey.lost, survey.missing = [], ["10.0.0.9"]
    assert one(checks.check_nodes(survey), "fail").where == "10.0.0.9"


@pytest.mark.parametrize(
    ("what", "version", "status"),
    [
        ("torch", "2.12.0", "fail"),
        ("ray", "2.59.0", "fail"),
        ("raydist", None, "fail"),
        ("nccl", "2.27.3", "fail"),
        ("cuda", "12.8", "fail"),
        ("driver", "570.1", "warn"),
        ("python", "3.11.9", "warn"),
        ("python", "3.12.1", "fail"),
    ],
)
def test_versions_differ(what: str, version: str | None, status: str) -> None:
    survey = well(3)
    assert survey.nodes[1].facts is not None
    survey.nodes[1].facts["versions"][what] = version
    bad = one(checks.check_versions(survey), status)
    assert bad.found.startswith(f"{what}: ") and f"{version or 'none'} (b)" in bad.found


def test_a_driver_without_gpus_is_no_difference() -> None:
    survey = well()
    for node in survey.nodes:
        assert node.facts is not None
        node.facts["versions"].update(cuda="12.8", nccl="2.27.3", driver="570.1")
    assert [finding.status for finding in checks.check_versions(survey)] == ["ok"]


GPU = {"name": "A100", "memory.total": "40960", "memory.used": "0", "temperature.gpu": "40"}
ECC = "ecc.errors.uncorrected.volatile.total"


@pytest.mark.parametrize(
    ("offered", "seen", "broken", "status", "words"),
    [
        (2, [GPU], [], "fail", "Ray offers 2 and the driver sees 1"),
        (1, [GPU, GPU], [], "warn", "Ray offers 1 and the driver sees 2"),
        (1, [GPU], ["gpu 0 computes wrongly"], "fail", "gpu 0 computes wrongly"),
        (1, [{**GPU, ECC: "3"}], [], "fail", "GPU 0: 3 uncorrected memory errors"),
        (1, [{**GPU, "temperature.gpu": "91"}], [], "warn", "GPU 0: 91 °C"),
        (1, [{**GPU, "memory.used": "39000", ECC: "[N/A]"}], [], "warn", "GPU 0: 39000 of 40960 MiB are taken"),
    ],
)
def test_gpus(offered: int, seen: list[Any], broken: list[str], status: str, words: str) -> None:
    survey = well(1, GPU=offered)
    assert survey.nodes[0].facts is not None
    survey.nodes[0].facts["gpus"] = {"seen": seen, "broken": broken}
    assert one(checks.check_gpus(survey), status).found == words


@pytest.mark.parametrize(
    ("offset", "error", "status"),
    [(0.9, 0.0, "ok"), (3.0, 2.5, "ok"), (-1.5, 0.1, "warn"), (30.0, 0.1, "fail"), (-3600.0, 1.0, "fail")],
)
def test_clocks(offset: float, error: float, status: str) -> None:
    survey = well()
    survey.nodes[1].offset = (offset, error)
    found = checks.check_clock(survey)
    assert [finding.status for finding in found] == [status]
    if status != "ok":
        side = "ahead of" if offset > 0 else "behind"
        assert (found[0].where, found[0].found) == ("b", f"{abs(offset):.1f} s {side} this machine's")


def changed(key: str, value: Any) -> Survey:
    survey = well()
    assert survey.nodes[1].facts is not None
    survey.nodes[1].facts[key] = value
    return survey


@pytest.mark.parametrize(
    ("check", "key", "value", "status"),
    [
        (checks.check_shm, "shm", None, "fail"),
        (checks.check_shm, "shm", {"total": 64 * 2**20, "free": 64 * 2**20}, "fail"),
        (checks.check_shm, "shm", {"total": 8 * 2**30, "free": 2**20}, "warn"),
        (checks.check_files, "files", 4096, "warn"),
        (checks.check_files, "files", 256, "fail"),
    ],
)
def test_room_for_memory_and_files(check: Callable[[Survey], list[Finding]], key: str, value: Any, status: str) -> None:
    assert one(check(changed(key, value)), status).where == "b"


def test_no_limit_of_files_is_good() -> None:
    assert checks.check_files(changed("files", -1))[0].status == "ok"


# -- the ways between nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("addresses", [["127.0.1.1"], ["127.0.0.1", "::1"], []])
def test_a_host_name_that_leads_home(addresses: list[str]) -> None:
    survey = changed("resolves_to", addresses)
    bad = one(checks_net.check_host_name(survey), "fail")
    assert bad.where == "b" and "`10.0.0.2 b`" in bad.todo
    # gloo would listen on loopback, and says so in the row of interfaces
    assert one(checks_net.check_interface(survey), "fail").found.startswith("gloo takes lo (")


def test_on_one_machine_or_with_the_interface_set_the_name_does_not_matter() -> None:
    survey = changed("resolves_to", ["127.0.1.1"])
    survey.nodes = survey.nodes[1:]
    assert [f.status for f in checks_net.check_host_name(survey)] == ["ok"]
    survey = changed("resolves_to", [])
    assert survey.nodes[1].facts is not None
    survey.nodes[1].facts["environment"]["GLOO_SOCKET_IFNAME"] = "eth0"
    assert {f.status for f in [*checks_net.check_host_name(survey), *checks_net.check_interface(survey)]} == {"ok"}


def test_a_node_that_ray_knows_by_loopback() -> None:
    survey = well()
    survey.nodes[0].ip = "127.0.0.1"
    assert "--node-ip-address" in one(checks_net.check_host_name(survey), "fail").todo


def test_the_wrong_interface() -> None:
    bad = one(checks_net.check_interface(changed("environment", {"GLOO_SOCKET_IFNAME": "docker0"})), "fail")
    assert bad.found == "gloo takes docker0 (GLOO_SOCKET_IFNAME=docker0), and the other nodes are reached by eth0"
    assert bad.todo.startswith("set GLOO_SOCKET_IFNAME=eth0 ")


@pytest.mark.parametrize(
    ("pinned", "takes"),
    [
        (None, ["eth0", "ib0"]),
        ("eth", ["eth0"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("^docker,ib", ["eth0"]),
        ("docker,ib", ["ib0", "docker0"]),
    ],
)
def test_nccl_s_rule_for_interfaces(pinned: str | None, takes: list[str]) -> None:
    survey = changed("interfaces", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "ib0": ["10.1.0.2"], "docker0": ["172.17.0.1"]})
    assert survey.nodes[1].facts is not None
    survey.nodes[1].facts["environment"] = {} if pinned is None else {"NCCL_SOCKET_IFNAME": pinned}
    assert sorted(checks_net.nccl_takes(survey.nodes[1])[0]) == sorted(takes)
    for node in survey.nodes:
        node.resources["GPU"] = 1.0
    wrong = [finding.found for finding in checks_net.check_interface(survey) if finding.status == "fail"]
    assert [words.startswith("NCCL takes ") for words in wrong] == ([] if "eth0" in takes else [True])


def test_no_route() -> None:
    survey = well(3)
    survey.nodes[0].sources["10.0.0.3"] = None
    bad = one(checks_net.check_interface(survey), "fail")
    assert (bad.where, bad.found) == ("a", "no route to 10.0.0.3")


def test_a_blocked_port_is_told_with_its_direction() -> None:
    survey = well()
    a, b = survey.nodes
    survey.links = [link(a, b, 40000), link(b, a, 40000), link(b, a, 50000, "timed out"), link(b, a, 60000, "timed out")]
    survey.links.append(link(a, b, 6379, "Connection refused", "Ray head (GCS)"))
    found = checks_net.check_ports(survey)
    assert [(f.status, f.where) for f in found] == [("fail", "b → a"), ("fail", "a → b")]
    assert found[0].found == "process group: 2 of 3 ports cannot be reached (50000, 60000: timed out)"
    assert found[1].found == "Ray head (GCS): 1 of 1 ports cannot be reached (6379: Connection refused)"
    assert "TCP 6379 from a to b" in found[1].todo


def test_an_all_reduce_that_fails_is_wrong_or_slow() -> None:
    survey = well()
    ranks = survey.reduced[0].ranks
    ranks[1] = {"right": False, "bytes_per_s": 0.0, "error": "Connection reset by peer"}
    bad = one(checks_net.check_all_reduce(survey), "fail")
    assert (bad.where, bad.found) == ("b", "1 of 2 ranks failed: Connection reset by peer")
    ranks[0] = ranks[1]
    assert one(checks_net.check_all_reduce(survey), "fail").where == "all"
    ranks[0], ranks[1] = dict(GOOD_RANK), {**GOOD_RANK, "right": False}
    assert one(checks_net.check_all_reduce(survey), "fail").found == "1 of 2 ranks failed: a wrong sum"
    ranks[1] = {**GOOD_RANK, "bytes_per_s": 1e6}
    assert one(checks_net.check_all_reduce(survey), "warn").found == "right on 2 ranks, 0.001 GB/s"
    survey.reduced = [Reduced("nccl", [], skipped="not tried: GPUs are in use")]
    assert checks_net.check_all_reduce(survey)[0].status == "skip"


# -- what a job needs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (None, "no answer in time"),
        ({"reads": False, "writes": False, "free": None, "error": "PermissionError: denied"}, "PermissionError: denied"),
        ({"reads": False, "writes": True, "free": 2**40, "error": None}, "is not the driver's folder"),
    ],
)
def test_storage_of_one_node(seen: Any, words: str) -> None:
    survey = well()
    survey.nodes[1].storage = seen
    bad = one(checks_job.check_storage(survey), "fail")
    assert bad.where == "b" and words in bad.found


def test_what_a_node_writes_must_be_seen_by_the_driver() -> None:
    survey = well()
    survey.shared_found = ["token.txt", "id-a"]
    assert one(checks_job.check_storage(survey), "fail").where == "b"


def test_storage_with_too_little_room() -> None:
    survey = well()
    survey.needed_bytes = 11 * 2**30
    assert one(checks_job.check_storage(survey), "fail").found == "10 GiB free, and the job's checkpoints take about 11 GiB"
    survey.needed_bytes = 9 * 2**30
    assert checks_job.check_storage(survey)[0].status == "ok"


def test_data_that_one_node_lacks() -> None:
    survey = well()
    survey.nodes[1].unreadable = {"/data/train": "not there"}
    bad = one(checks_job.check_data(survey), "fail")
    assert (bad.where, bad.found) == ("b", "/data/train: not there")
    survey.nodes[1].unreadable = None
    assert one(checks_job.check_data(survey), "fail").found == "the data: no answer in time"


def test_a_job_s_demands() -> None:
    config = parse_config(lin_job([1.0], 1, scaling={"workers": 9}), "/base")
    assert "at least 9 workers are asked for and 8 fit" in one(checks_job.check_demands(well(), config), "fail").found
    config = parse_config(lin_job([1.0], 1, scaling={"workers": [1, 2], "resources": {"slot": 1}}), "/base")
    assert checks_job.check_demands(well(slot=1.0), config)[0].found == "1 to 2 workers asked for, 2 fit, 2 would start"


def test_ray_s_resources_as_the_planner_knows_them() -> None:
    amounts = {"CPU": 8.0, "GPU": 4.0, "memory": 1e10, "object_store_memory": 1e9, "accelerator_type:T4": 1.0, "slot": 2.0}
    node = checks_job.as_node("n", amounts)
    assert (node.cpus, node.gpus, node.gpu_type, node.gpu_bytes) == (8, 4, "T4", 16 * 10**9)
    assert node.resources == {"slot": 2.0, "accelerator_type:T4": 1.0}
    assert checks_job.as_node("n", {"CPU": 1.0, "GPU": 1.0, "accelerator_type:NEW": 1.0}).gpu_bytes is None


def test_the_files_of_a_job() -> None:
    job = lin_job([1.0], 1, data={"train": {"path": ["a.csv", "s3://b/c"], "transforms": [{"target": "./t.py:f"}]}})
    job["task"].update(inputs=[["x"]], targets="y")
    assert checks_job.paths_of(parse_config(job, "/base")) == ["/base/a.csv", "s3://b/c", "/base/t.py"]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_and_its_json() -> None:
    findings = [
        Finding("nodes", "ok", "2 answer"),
        Finding("ports", "fail", "6379", "a → b", "open it"),
        Finding("job", "skip", "no job"),
    ]
    assert text(findings).splitlines() == [
        "      check  where  found",
        "ok    nodes         2 answer",
        "fail  ports  a → b  6379",
        "skip  job           no job",
        "",
        "what to do",
        "  ports (a → b): open it",
        "",
        "1 ok, 0 warn, 1 fail",
    ]
    told = json.loads(json.dumps(plain(findings)))
    assert told["good"] is False
    assert told["findings"][1] == {"check": "ports", "status": "fail", "found": "6379", "where": "a → b", "todo": "open it"}
    assert plain(findings[:1])["good"] is True
