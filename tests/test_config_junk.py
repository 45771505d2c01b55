"""Random junk in a job file gives a config or a ConfigError, nothing else."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydist.config import JobConfig, load_config, parse_config, to_plain, to_yaml
from raydist.errors import ConfigError
from tests.config_jobs import data_of, parse, write

WORDS = [
    *data_of(),
    *JobConfig.model_fields,
    "target",
    "args",
    "path",
    "lr",
    "steps",
    "auto",
    "ddp",
    "eval_loss",
    "0",
    "metric",
    "window",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(WORDS)
    | st.just(2**70)
    | st.just(-1)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | SCALARS, inner, max_size=4),
    max_leaves=8,
)


def key_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [path, *(deep for key, item in items for deep in key_paths(item, (*path, key)))] if path or items else [path]


FULL = to_plain(
    parse(
        "train.early_stop={}",
        "checkpoint.best={}",
        "train.ema={}",
        "data.train.transforms=[{target: m:f}]",
        "scaling.workers=[1, 2]",
    )
)
PATHS = [path for path in key_paths(FULL) if path]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES), max_size=4), st.dictionaries(SCALARS, VALUES, max_size=1))
def test_junk_in_any_key_gives_a_config_or_a_config_error(
    changes: list[tuple[tuple[Any, ...], Any]], extra: dict[Any, Any]
) -> None:
    data = copy.deepcopy(FULL)
    for path, value in changes:
        here: Any = data
        for part in path[:-1]:
            here = (
                here[part]
                if isinstance(here, list) and part in range(len(here))
                else here.get(part)
                if isinstance(here, dict)
                else None
            )
        if isinstance(here, dict) or (isinstance(here, list) and path[-1] in range(len(here))):
            here[path[-1]] = value
    data.update(extra)
    try:
        config = parse_config(data, "/base")
    except ConfigError as error:
        assert str(error).isprintable() or all(line.isprintable() for line in str(error).split("\n"))
        assert "Input should be" not in str(error) and "function-" not in str(error)
    else:
        text = to_yaml(config)
        assert to_yaml(parse_config(yaml.safe_load(text), "/base")) == text


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([".".join(map(str, path)) for path in PATHS]) | st.text(max_size=10), min_size=1, max_size=3),
    st.data(),
)
def test_junk_overrides_give_a_config_or_a_config_error(keys: list[str], draw: st.DataObject) -> None:
    values = (
        st.text(max_size=10)
        | VALUES.map(str)
        | st.sampled_from(["null", "[1, 2]", "{a: 1}", "1e-3", "&a [*a]", "!!x 1", "- a"])
    )
    with_values = [f"{key}={draw.draw(values)}" for key in keys]
    with contextlib.suppress(ConfigError):
        parse_config(FULL, "/base", with_values)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text(alphabet="ab01:-[]{}&*!,'\"\n #?|>%@.e_x", max_size=40).map(str.encode))
def test_junk_files_give_a_config_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, content))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(max_size=6), VALUES.filter(lambda value: "nan" not in repr(value)), max_size=4))
def test_any_args_read_back_as_they_were(tmp_path: Path, args: dict[str, Any]) -> None:
    data = data_of()
    data["task"]["model"]["args"] = args
    config = parse_config(data, "/base")
    again = load_config(write(tmp_path, to_yaml(config)))
    assert repr(again.task.model) == repr(config.task.model)
