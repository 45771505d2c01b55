"""`raydist doctor`: connect within a bound, look, and judge."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raydist.doctor import checks, checks_job, checks_net
from raydist.doctor.address import AddressError, check_answers, check_is_ray, parse_address
from raydist.doctor.look import look, resources_by_name
from raydist.doctor.report import Finding, Survey
from raydist.errors import ConfigError, RaydistError
from raydist.planning.nodes import Node

if TYPE_CHECKING:
    from raydist.config import JobConfig

CONNECT_S = 15.0


def examine(
    address: str | None, config: JobConfig | None = None, storage: str | None = None, nodes: list[str] | None = None
) -> list[Finding]:
    """All findings on the cluster at `address`, or on a local one that is started for it and ended.

    ConfigError for a malformed address; one that does not answer is a finding.
    """
    only, wanted = _chosen(nodes or [])
    try:
        with _connected(address):
            survey = look(
                config,
                config.storage if config is not None else storage,
                checks_job.paths_of(config) if config is not None else [],
                only,
                wanted,
            )
    except AddressError as error:
        return [Finding("address", "fail", error.found, todo=error.todo)]
    survey.needed_bytes = _needed_bytes(config)
    return judge(survey, config)


def cluster_nodes(address: str) -> list[Node]:
    """The nodes of the cluster at `address`, as the planner knows them. AddressError or ConfigError when there is none."""
    with _connected(address):
        return [checks_job.as_node(name, resources) for name, resources in resources_by_name().items()]


def judge(survey: Survey, config: JobConfig | None) -> list[Finding]:
    """Every check's findings, in the order in which they are worth reading."""
    found = checks.check_nodes(survey)
    if not survey.told:
        return [*found, Finding("the rest", "skip", "no node answers")]
    for check in (
        checks.check_versions,
        checks.check_gpus,
        checks_net.check_host_name,
        checks_net.check_interface,
        checks_net.check_ports,
        checks.check_clock,
        checks.check_shm,
        checks.check_files,
        checks_net.check_all_reduce,
        checks_job.check_storage,
        checks_job.check_data,
    ):
        found += check(survey)
    return [*found, *checks_job.check_demands(survey, config)]


def _chosen(nodes: list[str]) -> tuple[list[str], int | None]:
    """`--nodes`: a number asks for that many, anything else names some."""
    names = [name.strip() for part in nodes for name in part.split(",") if name.strip()]
    numbers = [int(name) for name in names if name.isdigit()]
    if numbers and (len(names) > 1 or numbers[0] < 1):
        raise ConfigError(f"--nodes {','.join(names)}: give one number of nodes, or IPs, host names or node ids")
    return ([], numbers[0]) if numbers else (names, None)


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    import logging

    from raydist.runners.cluster import quiet

    quiet(False)
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if ray.is_initialized():
        yield
        return
    if address in (None, "local"):
        ray.init(address="local", include_dashboard=False, num_cpus=os.cpu_count(), **options)
    else:
        assert address is not None
        _reach(address)
        _within(CONNECT_S, address, lambda: ray.init(address=address, **options))
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Find out quickly whether Ray can be there. `auto` and Ray Client addresses are Ray's own affair."""
    if address == "auto":
        return
    where = parse_address(address)
    if where.scheme in ("http", "https"):
        raise ConfigError(
            f"address {address!r} is the dashboard's; the doctor needs the head node's own, such as {where.host}:6379"
        )
    check_answers(where)
    if where.scheme is None and os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
        check_is_ray(where)


def _within(seconds: float, address: str, connect: Any) -> None:
    """`connect()`, in a thread that is left behind when it takes too long."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            connect()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="raydist-doctor-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise AddressError(
            f"{address} timed out: it accepts connections and Ray got no further in {seconds:g} s",
            "see whether Ray is healthy there (`ray status`), and whether that is its head node's port",
        )
    if failure:
        words = " ".join(str(failure[0]).split())[:500]
        todo = "install the versions of the cluster here, or copy its token (`~/.ray/auth_token`); the words above are Ray's"
        raise AddressError(f"{address} refused: {words}", todo) from failure[0]


def _needed_bytes(config: JobConfig | None) -> int | None:
    """What the job's checkpoints take: the kept ones, and one that is being written."""
    if config is None:
        return None
    from raydist.planning.memory import measure
    from raydist.task import build_task

    try:
        memory = measure(config, build_task(config.task), None, None, 1)
    except RaydistError:
        return None  # the job's own check says it better, where it runs
    one = memory.weights + memory.buffers + memory.ema + (memory.optimizer or 0)
    return one * (config.checkpoint.keep + 1 + (config.checkpoint.best is not None))
