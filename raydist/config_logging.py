"""The sections of a job file that say where else numbers go, and which steps are profiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from raydist.config_types import Bool, Count, Part, PathText, Text, from_name


class TensorBoardLogger(Part):
    """Event files for TensorBoard. `dir` None: `tensorboard` in the run's folder."""

    name: Literal["tensorboard"] = "tensorboard"
    dir: PathText | None = None


class MlflowLogger(Part):
    """An MLflow run. `tracking_uri` None: MLFLOW_TRACKING_URI, else `mlruns` beside the run's folder."""

    name: Literal["mlflow"] = "mlflow"
    tracking_uri: Text | None = None
    experiment: Text = "raydist"


class WandbLogger(Part):
    """A Weights & Biases run. `mode` None: WANDB_MODE, else online, which needs WANDB_API_KEY or a login."""

    name: Literal["wandb"] = "wandb"
    project: Text = "raydist"
    entity: Text | None = None
    group: Text | None = None
    tags: list[Text] = Field(default_factory=list)
    mode: Literal["online", "offline", "disabled"] | None = None


class PrometheusLogger(Part):
    """Gauges through `ray.util.metrics`, which Ray's nodes export to Prometheus. On Ray only."""

    name: Literal["prometheus"] = "prometheus"


AnyLogger = TensorBoardLogger | MlflowLogger | WandbLogger | PrometheusLogger


LoggerSetting = Annotated[
    AnyLogger,
    Field(discriminator="name"),
    BeforeValidator(from_name, json_schema_input_type=Literal["tensorboard", "mlflow", "wandb", "prometheus"] | AnyLogger),
]


class ProfileConfig(Part):
    """Record steps `[first, last]` with torch's profiler: one Chrome trace a rank. They run slower, the others do not."""

    steps: Annotated[list[Count], Field(min_length=2, max_length=2)]
    memory: Bool = False
    shapes: Bool = False
    stacks: Bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.steps[0] > self.steps[1]:
            yield "steps", "[first, last] with first <= last is allowed"
