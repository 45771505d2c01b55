"""The job file's `env` in Ray Train's workers, before torch and NCCL look at it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

from raydist.environment import keep_secret, resolve, secrets_of


@dataclass(frozen=True)
class Variables:
    """What is no secret is there when a worker's process starts, through Ray's runtime environment, which Ray logs and shows.

    Secrets go from process to process, and are set before the process group starts.
    """

    shown: dict[str, str]
    secrets: dict[str, str] = field(repr=False)

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Variables:
        """Those of a job, with references to this process's environment."""
        values = resolve(env, os.environ)
        secrets = secrets_of(env, values)
        return cls({name: value for name, value in values.items() if name not in secrets}, secrets)

    @property
    def run_options(self) -> dict[str, Any]:
        """For `RunConfig(**...)`; none lets workers start from processes that Ray has ready."""
        return {"worker_runtime_env": {"env_vars": self.shown}} if self.shown else {}

    def torch_config(self, backend: str | None) -> TorchConfig:
        """For `TorchTrainer(torch_config=...)`."""
        return SecretTorchConfig(backend=backend, secrets=self.secrets) if self.secrets else TorchConfig(backend=backend)


@dataclass
class SecretTorchConfig(TorchConfig):
    """A `TorchConfig` whose workers take `secrets` into their environment first."""

    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def backend_cls(self) -> Any:
        """As Ray Train asks for it."""
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_take, backend_config.secrets)
        super().on_start(worker_group, backend_config)


def _take(secrets: dict[str, str]) -> None:
    os.environ.update(secrets)
    keep_secret(secrets.values())
