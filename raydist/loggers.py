"""Where else the numbers of a run go (`loggers:` of the job file): TensorBoard, MLflow, Weights & Biases, Prometheus.

Rank 0 hands each line of metrics to one thread, which writes: training never waits for a server. A logger that fails is told
once and left out; the run goes on. After a restart no step is written twice.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from raydist import storage
from raydist.config import diff_settings, to_plain
from raydist.config_logging import AnyLogger, MlflowLogger, TensorBoardLogger, WandbLogger
from raydist.errors import ConfigError

if TYPE_CHECKING:
    from raydist.config import JobConfig

_PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
_MOST_RANKS = 64
"""Beyond these, ranks are not sent one by one: servers bill and choke by the number of series."""
_PATIENCE_S = 60.0
"""How long the end of a run waits for the thread to write what is left."""


class Logger(Protocol):
    """One place where numbers go. Called from one thread only."""

    def line(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""

    def close(self, status: str) -> None:
        """The run has ended as `status` says."""


def check_loggers(config: JobConfig) -> None:
    """Raise ConfigError for a logger whose package is not installed, or that cannot write where it is to."""
    for at, logger in enumerate(config.loggers):
        package = _PACKAGES.get(logger.name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"loggers.{at}: {logger.name} is not installed: pip install 'raydist[loggers]'")
        if isinstance(logger, TensorBoardLogger) and logger.dir is None and not storage.is_local(config.storage):
            raise ConfigError(
                f"loggers.{at}.dir: missing; tensorboard writes to a local folder, and storage is {config.storage}: name one"
            )


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """A line's numbers under flat names: `train_loss`, and per rank `compute_s/rank3`."""
    found = {key: float(value) for key, value in line.items() if isinstance(value, int | float) and key != "step"}
    for key, values in (line.get("ranks") or {}).items():
        if 1 < len(values) <= _MOST_RANKS:
            found |= {f"{key}/rank{rank}": float(value) for rank, value in enumerate(values)}
    return found


class Loggers:
    """All loggers of a run, behind one thread. `tell(reason)` hears of one that fails; it is called from that thread."""

    def __init__(self, make: Sequence[tuple[str, Callable[[], Logger]]], tell: Callable[[str], None]) -> None:
        self._make, self._tell = list(make), tell
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._make:
            self._thread = threading.Thread(target=self._run, name="raydist-loggers", daemon=True)
            self._thread.start()

    def line(self, record: Mapping[str, Any]) -> None:
        """Hand on a line of metrics."""
        if self._thread is not None:
            self._queue.put((record["step"], numbers_of(record)))

    def close(self, status: str) -> None:
        """Write what is left and end. Waits at most a minute."""
        if self._thread is None:
            return
        self._queue.put(status)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            self._tell(f"loggers: not all was written within {_PATIENCE_S:g} s")
        self._thread = None

    def _run(self) -> None:
        live: dict[str, Logger] = {}
        for name, make in self._make:
            self._guarded(live, name, partial(self._open, live, name, make))
        while True:
            item = self._queue.get()
            for name, logger in list(live.items()):
                self._guarded(live, name, _what_to_do(logger, item))
            if isinstance(item, str):
                return

    @staticmethod
    def _open(live: dict[str, Logger], name: str, make: Callable[[], Logger]) -> None:
        live[name] = make()

    def _guarded(self, live: dict[str, Logger], name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a server that is away must not end a training run
            live.pop(name, None)
            self._tell(f"loggers: {name} failed and is left out from here on: {type(error).__name__}: {error}")


def _what_to_do(logger: Logger, item: tuple[int, dict[str, float]] | str) -> Callable[[], None]:
    """An item of the queue is a line, or the status that ends the run."""
    return partial(logger.close, item) if isinstance(item, str) else partial(logger.line, *item)


def open_loggers(config: JobConfig, root: str, step: int, tell: Callable[[str], None]) -> Loggers:
    """The job's loggers for a run at `root` that goes on after `step`. Opened in their thread; rank 0 only."""
    return Loggers([(logger.name, _maker(logger, config, root, step)) for logger in config.loggers], tell)


def _maker(logger: AnyLogger, config: JobConfig, root: str, step: int) -> Callable[[], Logger]:
    if isinstance(logger, TensorBoardLogger):
        return lambda: _TensorBoard(logger.dir or str(storage.local_path(storage.join(root, "tensorboard"))), step)
    if isinstance(logger, MlflowLogger):
        return lambda: _Mlflow(logger, config, root)
    if isinstance(logger, WandbLogger):
        return lambda: _Wandb(logger, config, root, step)

    def prometheus() -> Logger:
        from raydist.runners.prometheus import Gauges

        return Gauges(config.name)

    return prometheus


def _flat(config: JobConfig) -> dict[str, Any]:
    return {key: value for key, _, value in diff_settings({}, to_plain(config))}


def _id_of(root: str) -> str:
    """A run's own id, the same after a restart."""
    return hashlib.sha256(root.encode()).hexdigest()[:16]


class _TensorBoard:
    def __init__(self, folder: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def line(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self, status: str) -> None:
        self._writer.close()


class _Mlflow:
    def __init__(self, logger: MlflowLogger, config: JobConfig, root: str) -> None:
        from mlflow import MlflowClient

        if logger.tracking_uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
            uri = storage.local_path(storage.join(config.storage, "mlruns")).absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        else:
            uri = logger.tracking_uri or os.environ["MLFLOW_TRACKING_URI"]
        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(logger.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(logger.experiment)
        key = _id_of(root)
        found = self._client.search_runs([number], f"tags.`raydist.run` = '{key}'", max_results=1)
        self._reached = -1
        if found:
            self._run = found[0].info.run_id
            self._reached = max((m.step for m in self._client.get_metric_history(self._run, "lr")), default=-1)
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {"raydist.run": key, "raydist.root": root, "mlflow.runName": config.name}
            self._run = self._client.create_run(number, tags=tags).info.run_id
            self._params(_flat(config))

    def _params(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key.replace("[", ".").replace("]", ""), str(value)[:500]) for key, value in settings.items()]
        for start in range(0, len(params), 100):  # what a server takes at once
            self._client.log_batch(self._run, params=params[start : start + 100])

    def line(self, step: int, values: Mapping[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        if step <= self._reached:
            return
        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[start : start + 1000])

    def close(self, status: str) -> None:
        ends = {"finished": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._run, status=ends.get(status, "FAILED"))


class _Wandb:
    def __init__(self, logger: WandbLogger, config: JobConfig, root: str, step: int) -> None:
        import wandb

        folder = str(storage.local_path(root)) if storage.is_local(root) else None
        self._wandb = wandb
        self._reached = step
        self._run: Any = wandb.init(
            project=logger.project,
            entity=logger.entity,
            group=logger.group,
            tags=logger.tags or None,
            mode=logger.mode,
            name=config.name,
            id=_id_of(root),
            resume="allow",
            dir=folder,
            config=_flat(config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True),
        )

    def line(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._reached:
            self._run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ("finished", "interrupted") else 1)
        self._wandb.teardown()
