"""The sections of a job file that say how it is trained and where; what is trained on what is in `config_data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from raydist.config_pipeline import PipelineStrategy
from raydist.config_types import Bool, Count, ImportPath, NotNegative, Part, Positive, Text, Whole, from_name, kind_of

Mode = Literal["min", "max"]


class Interval(Part):
    """How often: exactly one of `steps`, `epochs` or `minutes`."""

    steps: Count | None = None
    epochs: Count | None = None
    minutes: Positive | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        if sum(value is not None for value in (self.steps, self.epochs, self.minutes)) != 1:
            yield "", "exactly one of steps, epochs, minutes is needed, such as {epochs: 1}"


class BatchConfig(Part):
    """Rows of a global batch, of a micro-batch (one forward/backward on one worker), of an evaluation batch."""

    global_size: Count
    micro_size: Count | Literal["auto"] = "auto"
    eval_size: Count | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        if isinstance(self.micro_size, int) and self.micro_size > self.global_size:
            yield "micro_size", f"at most batch.global_size ({self.global_size}) is allowed"


class EarlyStop(Part):
    """End the run when `metric` has not improved by `min_delta` in `patience` evaluations."""

    metric: Text = "eval_loss"
    mode: Mode = "min"
    patience: Count = 3
    min_delta: NotNegative = 0.0


class Ema(Part):
    """Keep an exponential moving average of the weights, for evaluation and export."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999


class Compile(Part):
    """torch.compile settings."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    fullgraph: Bool = False
    dynamic: Bool | None = None


CompileSetting = Annotated[Annotated[Bool, Tag("value")] | Annotated[Compile, Tag("map")], Discriminator(kind_of)]


class TrainConfig(Part):
    """How long, how often, and what else happens while training."""

    epochs: Count | None = None
    max_steps: Count | None = None
    eval_every: Interval | None = Field(default_factory=lambda: Interval(epochs=1))
    log_every: Interval = Field(default_factory=lambda: Interval(steps=10))
    early_stop: EarlyStop | None = None
    ema: Ema | None = None
    compile: CompileSetting = False
    deterministic: Bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.epochs is None and self.max_steps is None:
            yield "", "epochs or max_steps is needed (with both, the first reached ends the run)"


class OptimizerConfig(Part):
    """A named optimizer, or an import path `target` with `args`. None is torch's own default."""

    name: Literal["sgd", "adam", "adamw"] | None = None
    target: ImportPath | None = None
    lr: Positive
    momentum: NotNegative | None = None
    nesterov: Bool | None = None
    weight_decay: NotNegative | None = None
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] | None = None
    eps: NotNegative | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    fused: Bool | Literal["auto"] = "auto"

    def problems(self) -> Iterator[tuple[str, str]]:
        if (self.name is None) == (self.target is None):
            yield "", "exactly one of name (sgd, adam, adamw) and target (an import path) is needed"
            return
        own = {"sgd": ("momentum", "nesterov", "weight_decay"), None: ()}.get(self.name, ("betas", "eps", "weight_decay"))
        for key in ("momentum", "nesterov", "weight_decay", "betas", "eps"):
            if getattr(self, key) is not None and key not in own:
                where = "with target it goes to optimizer.args" if self.name is None else f"{self.name} has {', '.join(own)}"
                yield key, f"not an option here: {where}"
        if self.name is None and self.fused is True:
            yield "fused", "with target it goes to optimizer.args"
        if self.name is not None and self.args:
            yield "args", f"only with target; the options of {self.name} are keys of optimizer: {', '.join(own)}"
        if self.nesterov and not self.momentum and self.name == "sgd":
            yield "nesterov", "needs momentum > 0"


class ScheduleConfig(Part):
    """Learning rate over the steps. `total_steps` None: the whole run."""

    name: Literal["constant", "linear", "cosine", "step", "plateau"] | None = "constant"
    target: ImportPath | None = None
    warmup_steps: Whole = 0
    total_steps: Count | None = None
    min_lr: NotNegative = 0.0
    step_size: Count | None = None
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    metric: Text = "eval_loss"
    mode: Mode = "min"
    patience: Whole = 10
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _target_takes_the_place_of_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("target") is not None and "name" not in data:
            return {**data, "name": None}
        return data

    def problems(self) -> Iterator[tuple[str, str]]:
        if (self.name is None) == (self.target is None):
            yield "", "exactly one of name and target (an import path) is needed"
            return
        own = {
            "linear": ("total_steps", "min_lr"),
            "cosine": ("total_steps", "min_lr"),
            "step": ("step_size", "gamma"),
            "plateau": ("metric", "mode", "patience", "factor", "min_lr"),
            None: ("args",),
        }.get(self.name, ())
        for key in ("total_steps", "min_lr", "step_size", "gamma", "metric", "mode", "patience", "factor", "args"):
            if key not in own and self.is_set(key):
                yield key, f"not an option of {self.name or 'a target'}, which has {', '.join(('warmup_steps', *own))}"
        if self.name == "step" and self.step_size is None:
            yield "step_size", "missing; schedule step needs an integer >= 1"
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            yield "warmup_steps", f"at most schedule.total_steps ({self.total_steps}) is allowed"


class Precision(Part):
    """fp32, or autocast to bf16 or fp16; the other keys are fp16's gradient scaler."""

    name_alone = True
    name: Literal["fp32", "bf16", "fp16"] = "fp32"
    init_scale: Positive = 65536.0
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Count = 2000

    def problems(self) -> Iterator[tuple[str, str]]:
        for key in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
            if self.name != "fp16" and self.is_set(key):
                yield key, f"only fp16 scales gradients; {self.name} has no such key"


class DdpStrategy(Part):
    """torch DistributedDataParallel. `bucket_cap_mb` in MiB."""

    name_alone = True
    name: Literal["ddp"] = "ddp"
    bucket_cap_mb: Positive = 25.0
    gradient_as_bucket_view: Bool = True
    broadcast_buffers: Bool = True
    find_unused_parameters: Bool = False
    static_graph: Bool = False
    sync_batchnorm: Bool = False
    comm_hook: Literal["fp16_compress", "bf16_compress"] | None = None


class FsdpStrategy(Part):
    """torch's fully_shard: each worker keeps a shard of weights, gradients and optimizer state.

    `units`: names of the modules that are gathered one at a time; None takes the entries of the model's ModuleLists and
    Sequentials. `reduce_each_micro_batch` false keeps whole gradients over a step's micro-batches: less to send, more memory.
    """

    name_alone = True
    name: Literal["fsdp"] = "fsdp"
    units: Annotated[list[Text], Field(min_length=1)] | None = None
    reshard_after_forward: Bool = True
    reduce_each_micro_batch: Bool = True
    param_dtype: Literal["bf16", "fp16"] | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    cpu_offload: Bool = False
    broadcast_buffers: Bool = True
    find_unused_parameters: Bool = False


class DpStrategy(Part):
    """torch DataParallel: one worker, all its devices."""

    name_alone = True
    name: Literal["dp"] = "dp"


class ModelParallelStrategy(Part):
    """One worker, the model's parts on several devices."""

    name_alone = True
    name: Literal["model_parallel"] = "model_parallel"
    device_map: Annotated[
        Annotated[Literal["auto"], Tag("value")] | Annotated[dict[Text, Text], Field(min_length=1), Tag("map")],
        Discriminator(kind_of),
    ] = "auto"
    devices: Annotated[list[Text], Field(min_length=1)] | None = None


def _strategy(value: Any) -> Any:
    value = from_name(value)
    if isinstance(value, dict):
        value = {"name": "ddp", **value}
    return value


AnyStrategy = DdpStrategy | FsdpStrategy | DpStrategy | ModelParallelStrategy | PipelineStrategy
Strategy = Annotated[
    AnyStrategy,
    Field(discriminator="name"),
    BeforeValidator(_strategy, json_schema_input_type=Literal["ddp", "fsdp", "dp", "model_parallel"] | AnyStrategy),
]
PrecisionSetting = Annotated[
    Precision, BeforeValidator(from_name, json_schema_input_type=Literal["fp32", "bf16", "fp16"] | Precision)
]


class ScalingConfig(Part):
    """Workers (`[min, max]` is elastic) and what each takes of the cluster."""

    workers: Annotated[
        Annotated[Count, Tag("value")] | Annotated[list[Count], Field(min_length=2, max_length=2), Tag("list")],
        Discriminator(kind_of),
    ] = 1
    gpus_per_worker: NotNegative | Literal["auto"] = "auto"
    cpus_per_worker: Positive = 1.0
    resources: dict[Text, NotNegative] = Field(default_factory=dict)
    backend: Literal["auto", "nccl", "gloo"] = "auto"

    def problems(self) -> Iterator[tuple[str, str]]:
        if isinstance(self.workers, list) and self.workers[0] > self.workers[1]:
            yield "workers", "[min, max] with min <= max is allowed"
        for key, amount in (("gpus_per_worker", self.gpus_per_worker), ("cpus_per_worker", self.cpus_per_worker)):
            if not isinstance(amount, str) and amount > 1 and amount != int(amount):
                yield key, "a fraction is allowed up to 1, above it whole numbers"
        for key in sorted({"CPU", "GPU"} & set(self.resources)):
            yield f"resources.{key}", f"has a key of its own: scaling.{key.lower()}s_per_worker"
        if self.backend == "nccl" and self.gpus_per_worker == 0:
            yield "backend", "nccl needs a GPU for each worker, and gpus_per_worker is 0"


class Best(Part):
    """Also keep the checkpoint with the best `metric`."""

    metric: Text = "eval_loss"
    mode: Mode = "min"


class CheckpointConfig(Part):
    """`every` None: only at the end. In the job file `asynchronous` is written `async`.

    `memory`: on Ray, how often a copy of the state also goes to another node's memory, for restarts. None: never.
    """

    every: Interval | None = Field(default_factory=lambda: Interval(epochs=1))
    memory: Interval | None = None
    keep: Count = 2
    best: Best | None = None
    asynchronous: Bool = Field(default=True, alias="async")


class FailureConfig(Part):
    """What a crash, a non-finite step and a hang lead to. Times in seconds."""

    max_restarts: Whole = 3
    bad_step: Literal["raise", "skip", "rollback"] = "raise"
    max_bad_steps: Count = 10
    hang_timeout: Positive | None = 60.0
    grace: Positive = 30.0

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.bad_step == "raise" and self.is_set("max_bad_steps"):
            yield "max_bad_steps", "only with bad_step: skip or rollback; raise stops at the first"
