"""The Ray cluster a job runs on: a local one sized to the job, or one that is there already."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raydist.doctor.address import check_answers, check_is_ray, parse_address
from raydist.errors import ConfigError
from raydist.runners import leftovers
from raydist.watchdog import flight_recorder

if TYPE_CHECKING:
    from raydist.config import JobConfig

_DATA_CPUS = 2
"""CPUs of a local cluster beyond the workers': Ray Data's tasks need some."""


@dataclass(frozen=True)
class Cluster:
    """What the cluster has, in Ray's words ("CPU", "GPU", …)."""

    total: dict[str, float]
    owned: bool

    def fit_workers(self, config: JobConfig) -> int:
        """How many workers to start: what was asked, or for `[min, max]` what fits now. ConfigError when too few fit."""
        low, high = _asked(config)
        fits = self.fits(config)
        if fits < low:
            need, total = needs(config), self._there()
            wanted = ", ".join(f"{_plain(amount * low)} {name}" for name, amount in need.items() if amount)
            there = ", ".join(f"{_plain(total.get(name, 0.0))} {name}" for name in need)
            raise ConfigError(
                f"scaling.workers: {low} workers need {wanted}, and the cluster has {there}. Lower scaling.workers, "
                "scaling.cpus_per_worker or scaling.gpus_per_worker, or add nodes"
            )
        return min(high, fits)

    def fits(self, config: JobConfig) -> int:
        """How many workers the nodes that stay can hold, node by node."""
        need = {name: amount for name, amount in needs(config).items() if amount}
        nodes = [self.total] if self.owned else _nodes(excluding=self.draining())
        return sum(
            min((int(node.get(name, 0.0) / amount + 1e-9) for name, amount in need.items()), default=0) for node in nodes
        )

    def draining(self) -> set[str]:
        """Nodes whose end has been announced (a preemption notice). A local cluster has none."""
        if self.owned:
            return set()
        from ray._private.state import state  # what Ray Train's own preemption watcher asks (Ray 2.60)

        return set(state.get_draining_nodes() or {})

    def _there(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for node in [self.total] if self.owned else _nodes(excluding=self.draining()):
            for name, amount in node.items():
                total[name] = total.get(name, 0.0) + amount
        return total


def _asked(config: JobConfig) -> tuple[int, int]:
    return config.workers


def _nodes(excluding: set[str]) -> list[dict[str, float]]:
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"] and node["NodeID"] not in excluding]


def needs(config: JobConfig) -> dict[str, float]:
    """Resources of one worker."""
    return {"CPU": config.scaling.cpus_per_worker, "GPU": gpus_per_worker(config), **config.scaling.resources}


def gpus_per_worker(config: JobConfig) -> float:
    """`auto` is one GPU a worker where the cluster has GPUs, and none where it has not."""
    asked = config.scaling.gpus_per_worker
    if asked != "auto":
        return float(asked)
    return 1.0 if config.scaling.backend != "gloo" and _resources().get("GPU", 0.0) else 0.0


def _resources() -> dict[str, float]:
    import ray

    return dict(ray.cluster_resources()) if ray.is_initialized() else {}


def _plain(amount: float) -> str:
    return f"{amount:g}"


def quiet(verbose: bool) -> None:
    """Set Ray's switches before it is imported. The user's own settings win."""
    defaults = {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # `Cluster.draining` asks the same of Ray, without an actor for it
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # 15 by default: workers would lose to everything else, unlike under torchrun
    }
    if not verbose:
        for name in ("ray", "ray.train", "ray.data"):
            logging.getLogger(name).setLevel(logging.ERROR)
    flight_recorder()
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def connect(config: JobConfig, address: str | None, verbose: bool, dashboard: str | None = None) -> Iterator[Cluster]:
    """The cluster at `address` (left as it was), the one this process has, or a local one that ends with the job.

    `dashboard`: the host at which a local one shows Ray's dashboard (see `check_dashboard`); None for no dashboard.
    """
    with joined(address, _size(config), verbose, dashboard) as cluster:
        yield cluster


@contextmanager
def joined(address: str | None, size: dict[str, Any], verbose: bool = False, dashboard: str | None = None) -> Iterator[Cluster]:
    """As `connect`; `size` are what `ray.init` takes for a local one (`num_cpus`, `num_gpus`, `resources`)."""
    import ray

    level = logging.INFO if verbose else logging.ERROR
    if ray.is_initialized():
        yield Cluster(_resources(), owned=False)
        return
    options: dict[str, Any] = {"log_to_driver": verbose, "logging_level": level}
    try:
        if address is None or address == "local":
            shown: dict[str, Any] = {} if dashboard is None else {"dashboard_host": dashboard}
            ray.init(address="local", include_dashboard=dashboard is not None, **shown, **size, **options)
            if not verbose and dashboard is None:
                _trim()
        else:
            _check(address)
            ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "a local Ray cluster did not start" if address in (None, "local") else f"no Ray cluster at {address!r}"
        raise ConfigError(f"{where}: {error}") from error
    owned = address in (None, "local")
    try:
        yield Cluster(_resources(), owned=owned)
    finally:
        ours = leftovers.of_local_cluster() if owned else []
        ray.shutdown()
        leftovers.end(ours)


def _check(address: str) -> None:
    """AddressError or ConfigError at once for an address that Ray would try for most of a minute."""
    if address == "auto":
        return
    where = parse_address(address)
    check_answers(where)
    if where.scheme is None:
        check_is_ray(where)


def check_dashboard(host: str, address: str | None) -> list[str]:
    """Whether a local cluster's dashboard may listen at `host`; what to say of it. ConfigError when it may not.

    The dashboard starts programs for whoever may use it, so beyond this machine only those with the token may.
    """
    if address not in (None, "local"):
        raise ConfigError(f"--dashboard is for the local cluster, and {address!r} is another one with a dashboard of its own")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(f"--dashboard {host}: give an IP address of this machine, such as 127.0.0.1") from error
    if loopback:
        return []
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":  # on by default in a local cluster (Ray 2.60)
        raise ConfigError(
            f"--dashboard {host} is refused: others could run programs here, since Ray's token authentication is off. Unset "
            "RAY_AUTH_MODE=disabled, or use --dashboard 127.0.0.1 and an SSH tunnel"
        )
    return [
        f"warning: the dashboard at {host} can be reached from other machines; who has the token (~/.ray/auth_token) can run "
        "programs here, and it travels unencrypted. Safer: --dashboard 127.0.0.1 and an SSH tunnel"
    ]


def _trim() -> None:
    """End what a local cluster starts beside its raylet and no job here asks.

    That is the monitor of logs that nobody prints, the autoscaler's monitor and the dashboard's server, which runs even without
    a dashboard (Ray 2.60). On a small machine they take the workers' time: a few per cent of a core, and imports at the start.
    """
    from ray._private import worker

    node: Any = worker._global_node
    for end in (node.kill_log_monitor, node.kill_monitor, node.kill_dashboard):
        end(check_alive=False)


def _size(config: JobConfig) -> dict[str, Any]:
    """CPUs for the workers and some for Ray Data; GPUs as the machine has them."""
    workers = config.workers[1]
    size: dict[str, Any] = {"num_cpus": math.ceil(workers * config.scaling.cpus_per_worker) + _DATA_CPUS}
    if config.scaling.resources:
        size["resources"] = {name: amount * workers for name, amount in config.scaling.resources.items()}
    if config.scaling.backend == "gloo" and config.scaling.gpus_per_worker == "auto":
        size["num_gpus"] = 0
    return size
