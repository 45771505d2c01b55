"""The job file: what is read, what is refused and in which words, and that what is written reads back."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raydist.config import (
    Compile,
    DdpStrategy,
    Interval,
    ModelParallelStrategy,
    Precision,
    ScheduleConfig,
    Shuffle,
    diff_settings,
    json_schema,
    load_config,
    parse_config,
    to_plain,
    to_yaml,
)
from raydist.errors import ConfigError
from tests.config_jobs import JOB, TORCH_DATA, data_of, file_error, parse, refused, write


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


# -- what is read --------------------------------------------------------------------------------------------------


def test_a_job_file_gives_typed_frozen_sections_with_defaults(job: Path) -> None:
    config = load_config(job)
    assert (config.name, config.seed, config.batch.global_size, config.batch.micro_size) == ("digits", 0, 64, "auto")
    assert config.optimizer.lr == 0.003
    assert config.task.model is not None and config.task.model.args == {"hidden": [128, 64]}
    assert config.train.eval_every == Interval(epochs=1) and config.train.log_every == Interval(steps=10)
    assert config.checkpoint.every == Interval(epochs=1) and config.checkpoint.asynchronous is True
    assert config.strategy == DdpStrategy() and config.precision == Precision() and config.schedule == ScheduleConfig()
    assert (config.failure.hang_timeout, config.failure.grace, config.failure.max_restarts) == (60.0, 30.0, 3)
    with pytest.raises(Exception, match="frozen"):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(Exception, match="frozen"):
        config.batch.global_size = 1  # type: ignore[misc]


def test_the_job_file_of_the_design_page_loads(tmp_path: Path) -> None:
    text = """\
name: digits
seed: 0
task:
  model: {target: raydist.models:MLP, args: {in_features: 64, hidden: [128, 64], out_features: 10}}
  loss: {target: torch.nn.functional:cross_entropy}
  metrics: {accuracy: {target: torchmetrics.classification:MulticlassAccuracy, args: {num_classes: 10}}}
  inputs: [pixels]          # columns, in order
  targets: label
data:
  train: {path: jobs/data/digits/train, format: parquet, shuffle: true}
  eval:  {path: jobs/data/digits/eval,  format: parquet}
batch: {global_size: 64, micro_size: auto}
train: {epochs: 10, eval_every: {epochs: 1}, early_stop: null}
optimizer: {name: adamw, lr: 3.0e-3}
schedule: {name: cosine, warmup_steps: 20}
precision: fp32             # fp16 (GradScaler) · bf16
clip_grad_norm: 1.0
strategy: {name: ddp, bucket_cap_mb: 25, gradient_as_bucket_view: true, broadcast_buffers: true,
           find_unused_parameters: false, static_graph: false, sync_batchnorm: false}
scaling: {workers: 2, gpus_per_worker: auto, cpus_per_worker: 1}   # workers: [1, 4] is elastic
checkpoint: {every: {epochs: 1}, keep: 2, best: {metric: eval_loss, mode: min}}
failure: {max_restarts: 3, bad_step: raise}                        # raise · skip · rollback
storage: ./runs
"""
    config = load_config(write(tmp_path, text))
    assert config.schedule.name == "cosine" and config.scaling.workers == 2 and config.clip_grad_norm == 1.0
    jsonschema.validate(yaml.safe_load(text), json_schema())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1e3", 1e3),
        ("1E5", 1e5),
        ("-2e+2", -200.0),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000.5", 1000.5),
        ("12", 12),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("-0", 0),
        ("0x1F", 31),
        ("0b11", 3),
        ("1_000", 1000),
        ("0.010", 0.01),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("0o17", "0o17"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        (".", "."),
        ('"1e-3"', "1e-3"),
        ('"010"', "010"),
        ("'no'", "no"),
        ("no", False),
        ("On", True),
        ("~", None),
        ("null", None),
        ("n", "n"),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("1e400", math.inf),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("!!int '5'", 5),
    ],
)
def test_scalars_in_the_file_and_in_overrides(tmp_path: Path, text: str, value: Any) -> None:
    path = write(tmp_path, JOB.replace("hidden: [128, 64]", f"k: {text}"))
    for config in (load_config(path), parse(f"task.model.args.k={text}")):
        found = config.task.model.args["k"]  # type: ignore[union-attr]
        assert (type(found), found) == (type(value), value)


def test_nan_is_a_number_in_free_args_only() -> None:
    assert math.isnan(parse("task.model.args.k=.nan").task.model.args["k"])  # type: ignore[union-attr]
    assert refused("optimizer.lr=.nan") == ["optimizer.lr = .nan: allowed: a finite number > 0"]


@pytest.mark.parametrize("word", ["no", "off", "false", "False", '"no"', '"off"', '"False"', '"OFF"'])
def test_words_for_false_where_a_bool_is_meant(word: str) -> None:
    config = parse(f"checkpoint.async={word}", f"train.compile={word}", f"optimizer.fused={word}", f"data.train.shuffle={word}")
    assert config.checkpoint.asynchronous is False and config.train.compile is False
    assert config.optimizer.fused is False and config.data.train.shuffle is False


@pytest.mark.parametrize("word", ["yes", "on", "true", '"yes"', '"on"', '"True"'])
def test_words_for_true_where_a_bool_is_meant(word: str) -> None:
    assert parse(f"train.deterministic={word}").train.deterministic is True


def test_short_forms_become_objects() -> None:
    config = parse("strategy=ddp", "precision=bf16", "data.train.shuffle={window: 100}", "train.compile={mode: default}")
    assert config.strategy == DdpStrategy() and config.precision == Precision(name="bf16")
    assert config.data.train.shuffle == Shuffle(window=100) and config.train.compile == Compile(mode="default")
    assert parse("strategy={bucket_cap_mb: 5}").strategy == DdpStrategy(bucket_cap_mb=5)
    assert parse("strategy=model_parallel").strategy == ModelParallelStrategy()
    assert parse("strategy={name: ddp, static_graph: true, find_unused_parameters: true}").strategy.name == "ddp"


def test_a_schedule_target_takes_the_place_of_the_default_name() -> None:
    schedule = parse("schedule={target: my.mod:Schedule, args: {k: 1}, warmup_steps: 3}").schedule
    assert (schedule.name, schedule.target, schedule.args) == (None, "my.mod:Schedule", {"k": 1})


def test_importing_and_loading_load_neither_torch_nor_ray(job: Path) -> None:
    code = (
        "import sys; from raydist.config import load_config, json_schema, to_yaml; "
        f"to_yaml(load_config({str(job)!r})); json_schema(); assert not {{'torch', 'ray', 'numpy'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# -- paths ---------------------------------------------------------------------------------------------------------


def test_relative_paths_are_from_the_job_files_folder(job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config("../job.yaml", ["task={target: ./my_task.py:My.Task}"])
    assert config.base_dir == str(tmp_path)
    assert config.storage == str(tmp_path / "runs")
    assert config.data.train.path == str(tmp_path / "data/train")
    assert config.data.eval is not None and config.data.eval.path == str(tmp_path / "data/eval/*.parquet")
    assert config.task.target == f"{tmp_path}/my_task.py:My.Task"


def test_absolute_paths_uris_home_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = parse("data.train.path=[s3://bucket/a, /abs/b, ~/c, ../d]", "storage=s3://bucket/runs")
    assert config.data.train.path == ["s3://bucket/a", "/abs/b", "/home/me/c", "/d"]
    assert config.storage == "s3://bucket/runs"


def test_all_kinds_of_file_targets_become_absolute() -> None:
    config = parse(
        "data.train={target: ./d.py:Set, sampler: {target: ../s.py:Sampler}, collate: c.py:collate}",
        "data.eval={target: /abs/d.py:Set}",
        "task.model.target=./m.py:Model",
        "optimizer={target: ./o.py:Opt, lr: 1}",
        "schedule={target: ./l.py:Sched}",
    )
    train = config.data.train
    assert (train.target, train.collate) == ("/base/d.py:Set", "/base/c.py:collate")
    assert train.sampler is not None and train.sampler.target == "/s.py:Sampler"
    assert config.data.eval is not None and config.data.eval.target == "/abs/d.py:Set"
    assert config.task.model is not None and config.task.model.target == "/base/m.py:Model"
    assert (config.optimizer.target, config.schedule.target) == ("/base/o.py:Opt", "/base/l.py:Sched")
    files = parse("data.train.transforms=[{target: ./t.py:f}, {target: pkg.mod.g}]").data.train
    assert [each.target for each in files.transforms] == ["/base/t.py:f", "pkg.mod.g"]


def test_pattern_characters_of_the_folder_itself_are_no_pattern() -> None:
    config = parse_config(data_of(), "/a[1]/b")
    assert config.data.train.path == "/a[1]/b/data/train"
    assert config.data.eval is not None and config.data.eval.path == "/a[[]1]/b/data/eval/*.parquet"


# -- overrides -----------------------------------------------------------------------------------------------------


def test_overrides_set_nested_keys_lists_and_null() -> None:
    config = parse(
        "optimizer.lr=1e-2",
        "scaling.workers=[1,4]",
        "train.early_stop=null",
        "task.inputs=[a,b]",
        "data.train.transforms=[{target: m:f, args: {}}]",
        "data.train.transforms.0.args.k=1",
        "train.compile.mode=default",
        "data.train.shuffle.window=7",
        "checkpoint.best.metric=eval_accuracy",
        "batch.global_size=8",
        "batch.global_size=16",
        "task.model.args.text=a=b",
    )
    assert config.optimizer.lr == 0.01 and config.scaling.workers == [1, 4] and config.train.early_stop is None
    assert config.task.inputs == ["a", "b"] and config.data.train.transforms[0].args == {"k": 1}
    assert config.train.compile == Compile(mode="default") and config.data.train.shuffle == Shuffle(window=7)
    assert config.checkpoint.best is not None and config.checkpoint.best.metric == "eval_accuracy"
    assert config.batch.global_size == 16, "the last of two wins"
    assert config.task.model is not None and config.task.model.args["text"] == "a=b"


def test_an_override_opens_a_short_form() -> None:
    data = {**data_of(), "strategy": "ddp", "precision": "fp16"}
    config = parse_config(data, "/base", ["strategy.bucket_cap_mb=50", "precision.init_scale=256"])
    assert config.strategy == DdpStrategy(bucket_cap_mb=50) and config.precision == Precision(name="fp16", init_scale=256)
    assert data["strategy"] == "ddp", "the caller's dict is left alone"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.lr", 'override "optimizer.lr": no = in it; an override is key.path=value, such as optimizer.lr=1e-2'),
        ("=3", 'override "=3": no key before =; such as optimizer.lr=1e-2'),
        ("a..b=3", 'override "a..b=3": an empty key in the path; such as optimizer.lr=1e-2'),
        ("name=", 'override "name=": no value after =; write null for none, "" for empty text'),
        ("seed.x=3", 'override "seed.x=3": seed is 5, not a map, so seed.x cannot be set'),
        ("task.inputs.4=a", 'override "task.inputs.4=a": task.inputs is a list of 1; allowed: an index from 0 to 0'),
        ("task.inputs.-1=a", 'override "task.inputs.-1=a": task.inputs is a list of 1; allowed: an index from 0 to 0'),
        (
            "task.inputs.0.b=a",
            'override "task.inputs.0.b=a": task.inputs.0 is "pixels", not a map, so task.inputs.0.b cannot be set',
        ),
        ("task.targets.0=a", 'override "task.targets.0=a": task.targets is a list of 0; allowed: task.targets=[...] sets it'),
        ("seed=[1", "override \"seed=[1\", line 1, column 3: expected ',' or ']', but got '<stream end>'"),
        ("seed=010", 'override "seed=010", line 1, column 1: 010 is ambiguous (octal?): write 10, or "010" for text'),
    ],
)
def test_words_for_bad_overrides(override: str, line: str) -> None:
    data = data_of()
    data["seed"] = 5
    if "targets" in override:
        data["task"]["targets"] = []
        assert refused(override, data=data)[0] == line
    else:
        assert refused(override, data=data) == [line]


def test_an_unknown_key_of_an_override_gets_the_nearest_key_and_says_where_it_is_from(job: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(job, ["optimizer.l_r=1", "trian.epochs=3"])
    assert str(caught.value).split("\n") == [
        f"{job}: 2 problems",
        "  optimizer.l_r (command line) = 1: unknown key; did you mean lr? allowed: name, target, lr, momentum, nesterov, "
        "weight_decay, betas, eps, args, fused",
        "  trian (command line) = {epochs: 3}: unknown key; did you mean train? allowed: name, seed, task, data, batch, train, "
        "optimizer, schedule, precision, clip_grad_norm, strategy, scaling, checkpoint, failure, loggers, profile, env, "
        "storage, sweep",
    ]


# -- the file as text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": the file is empty; a job file is a YAML mapping with task, data, batch, train, optimizer"),
        ("# only words\n", ": the file is empty; a job file is a YAML mapping with task, data, batch, train, optimizer"),
        ("- a\n- b\n", ": holds a list; a job file is a YAML mapping (key: value lines)"),
        ("hello", ': holds a single value ("hello"); a job file is a YAML mapping (key: value lines)'),
        ("a: 1\nb: [1,\n", ", line 3, column 1: expected the node content, but found '<stream end>'"),
        ("a: 1\n\tb: 2\n", ", line 2, column 1: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", ", line 2, column 1: but found another document"),
        ("a: 1\nb: 2\nc: 3\na: 4\n", ", line 4, column 1: the key a is repeated (lines 1 and 4)"),
        ("x:\n  lr: 1\n  lr: 1\n", ", line 3, column 3: the key lr is repeated (lines 2 and 3)"),
        ("x: {a: 1, 'a': 2}\n", ", line 1, column 11: the key a is repeated (lines 1 and 1)"),
        ("x: [{a: 1}, {b: 1, b: 2}]\n", ", line 1, column 20: the key b is repeated (lines 1 and 1)"),
        ("seed: 010\n", ', line 1, column 7: 010 is ambiguous (octal?): write 10, or "010" for text'),
        ("seed: -0_08\n", ', line 1, column 7: -0_08 is ambiguous (octal?): write -8, or "-0_08" for text'),
        ("seed: 00\n", ', line 1, column 7: 00 is ambiguous (octal?): write 0, or "00" for text'),
        ("seed: !!int x\n", ', line 1, column 7: "x" is no int'),
        ("seed: !!float x\n", ', line 1, column 7: "x" is no float'),
        ("seed: !!bool x\n", ', line 1, column 7: "x" is no bool'),
        ("seed: 0x_\n", ', line 1, column 7: "0x_" is no int'),
        (f"seed: {'1' * 5000}\n", ", line 1, column 7: a number of 5000 digits is too long"),
        (
            "a: !!python/object:os.system x\n",
            ", line 1, column 4: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'",
        ),
        (
            "a: !!timestamp x\n",
            ", line 1, column 4: could not determine a constructor for the tag 'tag:yaml.org,2002:timestamp'",
        ),
        ("a: *b\n", ", line 1, column 4: found undefined alias 'b'"),
        ("{[a]: 1}\n", ", line 1, column 2: found unhashable key"),
        ("a: &x [*x]\n", ": nested too deeply, or an alias (*name) inside its own anchor (&name)"),
        ("a: " + "[" * 3000, ": nested too deeply, or an alias (*name) inside its own anchor (&name)"),
        ("a: 1\nb: \x07\n", ", line 2, column 4: the character U+0007 is not allowed in YAML"),
        (b"a: 1\nb: caf\xe9\n", ", line 2, column 7: not UTF-8 (byte 0xe9); save the file as UTF-8"),
        ("a: 1\n".encode("utf-16"), ", line 1, column 1: not UTF-8 (byte 0xff); save the file as UTF-8"),
    ],
)
def test_words_for_broken_files(tmp_path: Path, content: str | bytes, message: str) -> None:
    assert file_error(tmp_path, content) == message


def test_words_for_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such job file$"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"is a folder; give the job file in it$"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be read: Not a directory$"):
        load_config(write(tmp_path, "a: 1") / "x")
    with pytest.raises(ConfigError, match=r"cannot be read: embedded null byte$"):
        load_config("a\0b")


def test_anchors_merges_and_a_byte_order_mark_work(tmp_path: Path) -> None:
    text = JOB.replace("{path: data/train, shuffle: true}", "&set {path: data/train, nulls: drop}")
    config = load_config(
        write(tmp_path, b"\xef\xbb\xbf" + text.replace('{path: "data/eval/*.parquet"}', "{<<: *set, path: e}").encode())
    )
    assert config.data.eval is not None and (config.data.eval.nulls, config.data.eval.path) == ("drop", str(tmp_path / "e"))


def test_problems_name_their_lines(tmp_path: Path) -> None:
    text = JOB.replace("global_size: 64", "global_size: 8.5").replace(
        "train: {epochs: 10}", "train:\n  epochs: 0\n  ema:\n    dekay: 1"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text.replace("lr: 3.0e-3", "")))
    assert str(caught.value).split("\n")[1:] == [
        "  batch.global_size (line 11) = 8.5: allowed: an integer >= 1",
        "  train.epochs (line 13) = 0: allowed: an integer >= 1 or null",
        "  train.ema.dekay (line 15) = 1: unknown key; did you mean decay? allowed: decay",
        "  optimizer.lr (line 16): missing; allowed: a finite number > 0",
    ]


# -- written and compared ------------------------------------------------------------------------------------------

EXAMPLES = [
    [],
    ["strategy=dp", "precision={name: fp16, init_scale: 1}", "train.early_stop={}", "train.ema={}"],
    ["train.eval_every=null", "checkpoint.every=null", "train.log_every={minutes: 0.5}", "failure.hang_timeout=null"],
    ["schedule={target: ./m.py:S}", "optimizer={target: m:O, lr: 1e-5, args: {k: [1, {a: null}]}}", "train.compile=true"],
    ["scaling.workers=[1, 4]", "checkpoint.async=no", "data.train.shuffle={window: 5}", "train.compile={}"],
    ["task={target: ./t.py:T}", TORCH_DATA],
    ["strategy={name: model_parallel, device_map: {a: cpu}}", "checkpoint.best={metric: eval_accuracy, mode: max}"],
    [
        "task.model.args={a: '010', b: '1e5', c: 'no', d: '1:30', e: '2024-01-01', f: '', "
        "g: 1e300, h: -.inf, i: 'é\\n', j: ' x ', k: '~'}"
    ],
]


@pytest.mark.parametrize("overrides", EXAMPLES)
def test_what_is_written_reads_back_from_anywhere(tmp_path: Path, overrides: list[str]) -> None:
    config = parse(*overrides)
    again = load_config(write(tmp_path, to_yaml(config)))
    assert again == config and again.base_dir == str(tmp_path)
    assert to_yaml(again) == to_yaml(config)
    assert diff_settings(config, again) == []
    jsonschema.validate(to_plain(config), json_schema())


def test_a_config_survives_pickling_with_its_folder() -> None:
    config = parse("strategy.bucket_cap_mb=3")
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.base_dir == "/base"
    assert again != parse() and again != 3


def test_settings_that_differ_are_listed_with_key_paths() -> None:
    old = parse("data.train.transforms=[{target: m:f, args: {k: 1}}]", "train.early_stop={}")
    new = parse(
        "data.train.transforms=[{target: m:f, args: {k: 2}}]", "optimizer.lr=1", "scaling.workers=[1, 4]", "checkpoint.async=no"
    )
    expected = [
        ("data.train.transforms.0.args.k", 1, 2),
        ("optimizer.lr", 0.003, 1),
        ("scaling.workers", 1, [1, 4]),
        ("checkpoint.async", True, False),
        ("train.early_stop.metric", "eval_loss", None),
        ("train.early_stop.mode", "min", None),
        ("train.early_stop.patience", 3, None),
        ("train.early_stop.min_delta", 0.0, None),
    ]
    assert diff_settings(old, new) == expected
    assert diff_settings(to_plain(old), yaml.safe_load(to_yaml(new))) == expected
    assert diff_settings({}, {"a": {}, "b": [], "c": None}) == [("a", None, {}), ("b", None, [])]


def test_the_schema_knows_keys_short_forms_and_limits() -> None:
    schema = json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    json.dumps(schema)
    good = data_of()
    good.update(strategy="ddp", precision="bf16", scaling={"workers": [1, 4]}, checkpoint={"async": False})
    assert list(validator.iter_errors(good)) == []
    for change in (
        {"seeed": 1},
        {"seed": -1},
        {"strategy": {"name": "dp", "x": 1}},
        {"precision": "fp17"},
        {"batch": {"global_size": 0}},
        {"checkpoint": {"asynchronous": True}},
        {"scaling": {"workers": [1, 2, 3]}},
    ):
        assert list(validator.iter_errors({**good, **change})), change
