"""The job file: `JobConfig`, how it is loaded, and how it is written.

Sections are frozen pydantic models with strict types (`config_data`, `config_parts`). YAML and overrides are read in
`config_file`, errors get their words in `config_errors`, sections are checked together in `config_checks`.
Neither torch nor Ray is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, ValidationError, create_model, model_validator

from raydist.config_checks import check_sections
from raydist.config_data import DataConfig, DatasetConfig, FitConfig, Images, Loader, Shuffle, TaskConfig
from raydist.config_errors import Problem, at, dotted, explain
from raydist.config_file import Places, apply_overrides, dump_yaml, plain, read_job_file
from raydist.config_help import help_of
from raydist.config_logging import LoggerSetting, ProfileConfig
from raydist.config_parts import (
    BatchConfig,
    Best,
    CheckpointConfig,
    Compile,
    DdpStrategy,
    DpStrategy,
    EarlyStop,
    Ema,
    FailureConfig,
    Interval,
    ModelParallelStrategy,
    OptimizerConfig,
    Precision,
    PrecisionSetting,
    ScalingConfig,
    ScheduleConfig,
    Strategy,
    TrainConfig,
)
from raydist.config_pipeline import PipelineStrategy
from raydist.config_sweep import SweepConfig
from raydist.config_types import EnvValue, Part, PathText, Positive, Target, Whole, refuse
from raydist.environment import masked
from raydist.errors import ConfigError

__all__ = [
    "BatchConfig",
    "Best",
    "CheckpointConfig",
    "Compile",
    "DataConfig",
    "DatasetConfig",
    "DdpStrategy",
    "DpStrategy",
    "EarlyStop",
    "Ema",
    "FailureConfig",
    "FitConfig",
    "Images",
    "Interval",
    "JobConfig",
    "Loader",
    "ModelParallelStrategy",
    "OptimizerConfig",
    "PipelineStrategy",
    "Precision",
    "ProfileConfig",
    "ScalingConfig",
    "ScheduleConfig",
    "Shuffle",
    "Strategy",
    "SweepConfig",
    "Target",
    "TaskConfig",
    "TrainConfig",
    "diff_settings",
    "json_schema",
    "load_config",
    "parse_config",
    "to_plain",
    "to_yaml",
]


_NAME = re.compile(r"^(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")


def _run_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "it names the run's folder: letters, digits, '.', '_', '-' (at most 100; no '..', not '.' or '-' first)"
        )
    return name


class JobConfig(Part):
    """A whole job. Build it with `load_config` (a file) or `parse_config` (a dict)."""

    name: Annotated[str, AfterValidator(_run_name), Field(json_schema_extra={"pattern": _NAME.pattern})]
    seed: Whole = 0
    task: TaskConfig
    data: DataConfig
    batch: BatchConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    precision: PrecisionSetting = Field(default_factory=Precision)
    clip_grad_norm: Positive | None = None
    strategy: Strategy = Field(default_factory=DdpStrategy)
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    failure: FailureConfig = Field(default_factory=FailureConfig)
    loggers: list[LoggerSetting] = Field(default_factory=list)
    profile: ProfileConfig | None = None
    env: dict[str, EnvValue] = Field(default_factory=dict, repr=False)
    storage: PathText = Field(default="./runs", validate_default=True)
    sweep: SweepConfig | None = None

    _base_dir: str = PrivateAttr("")

    @property
    def base_dir(self) -> str:
        """The job file's folder, absolute; no part of the settings: it is neither written nor compared."""
        return self._base_dir

    @property
    def workers(self) -> tuple[int, int]:
        """The fewest and the most workers of the job; a pipeline has stages x replicas."""
        if isinstance(self.strategy, PipelineStrategy):
            return self.strategy.workers, self.strategy.workers
        asked = self.scaling.workers
        return (asked, asked) if isinstance(asked, int) else (asked[0], asked[1])

    def model_post_init(self, context: Any) -> None:
        self._base_dir = str((context or {}).get("base_dir", ""))

    @model_validator(mode="after")
    def _together(self) -> Any:
        refuse(check_sections({name: getattr(self, name) for name in type(self).model_fields}))
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobConfig) and self.__dict__ == other.__dict__


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The job in the YAML file at `path`, with `key.path=value` overrides; relative paths are from the file's folder.

    Raises ConfigError that lists all problems, each with its key path, line, value and what is allowed.
    """
    path = os.path.expanduser(path)
    data, places = read_job_file(Path(path))
    return _build(data, os.path.dirname(os.path.abspath(path)), overrides, path, places)


def parse_config(data: Mapping[str, Any], base_dir: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Like `load_config` for a dict as a job file would hold it; relative paths are from `base_dir`."""
    return _build(dict(data), os.path.abspath(os.path.expanduser(base_dir)), overrides, "job", {})


def _build(data: dict[str, Any], base_dir: str, overrides: Sequence[str], source: str, places: Places) -> JobConfig:
    data = plain(data, source)
    wrong = apply_overrides(data, overrides, places)
    context = {"base_dir": base_dir}
    try:
        config = JobConfig.model_validate(data, context=context)
    except ValidationError as error:
        problems = list(explain(error, JobConfig, data))
        if not _whole_was_checked(error):
            problems += _found_together(data, problems, context)
        wrong += [problem.words(places) for problem in problems]
    else:
        if not wrong:
            return config
    count = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
    raise ConfigError(f"{source}: {count}\n" + "\n".join(f"  {line}" for line in wrong))


def _whole_was_checked(error: ValidationError) -> bool:
    """Whether every section was valid by itself, so that the checks across sections have run."""
    return any(item["loc"] == () for item in error.errors(include_url=False))


def _found_together(data: dict[str, Any], problems: list[Problem], context: dict[str, Any]) -> list[Problem]:
    """What the checks across sections find in those sections that are valid by themselves."""
    bad = {problem.path[0] for problem in problems if problem.path}
    fields = {
        name: (field.annotation, field)
        for name, field in JobConfig.model_fields.items()
        if name not in bad and (name in data or not field.is_required())
    }
    valid = create_model("Sections", __base__=Part, **cast(Any, fields))
    sections = vars(valid.model_validate({name: data[name] for name in fields if name in data}, context=context))
    found = [(tuple(key.split(".")), message) for key, message in check_sections(sections)]
    return [Problem(path, message, at(data, path)) for path, message in found]


def json_schema() -> dict[str, Any]:
    """JSON Schema of a job file, for editors."""
    schema = JobConfig.model_json_schema(by_alias=True)
    for section in (schema, *schema["$defs"].values()):
        for key, value in section.get("properties", {}).items():
            if text := help_of(section["title"], key):
                value["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def to_plain(config: BaseModel) -> dict[str, Any]:
    """The settings as a job file holds them, defaults included; a key whose value and default are null is left out.

    Secrets in `env` are masked (`environment.masked`).
    """
    settings = {
        field.alias or name: _plain_value(getattr(config, name))
        for name, field in type(config).model_fields.items()
        if getattr(config, name) is not None or field.get_default(call_default_factory=True) is not None or field.is_required()
    }
    return {**settings, "env": masked(config.env)} if isinstance(config, JobConfig) else settings


def _plain_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return to_plain(value)
    if isinstance(value, dict):
        return {key: _plain_value(item) for key, item in value.items()}
    return [_plain_value(item) for item in value] if isinstance(value, list) else value


def to_yaml(config: JobConfig) -> str:
    """The resolved settings as YAML: paths absolute, secrets masked; but for those, `load_config` reads an equal JobConfig."""
    return dump_yaml(to_plain(config))


def diff_settings(old: JobConfig | Mapping[str, Any], new: JobConfig | Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """`(key path, old value, new value)` of each setting that differs; None where one of the two has no such key."""
    before, after = (_leaves(to_plain(job) if isinstance(job, JobConfig) else job, ()) for job in (old, new))
    keys = [*after, *(key for key in before if key not in after)]
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def _leaves(value: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
    """Key path -> value; a list of plain values is one value."""
    if isinstance(value, Mapping) and (value or not path):
        inside: Any = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        inside = enumerate(value)
    else:
        return {dotted(path): value}
    return {key: leaf for part, item in inside for key, leaf in _leaves(item, (*path, part)).items()}
