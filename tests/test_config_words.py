"""What a job file may not say, and the exact words that refuse it."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.config import Interval, parse_config
from raydist.errors import ConfigError
from tests.config_jobs import NO_EVAL, TORCH_DATA, data_of, parse, refused

# -- values that are refused ---------------------------------------------------------------------------------------

STRATEGIES = "allowed: ddp, fsdp, dp, model_parallel, pipeline, or a map with name and its options"
INT = "allowed: an integer >= 1"
POSITIVE = "allowed: a finite number > 0"
NOT_NEGATIVE = "allowed: a finite number >= 0"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("batch.global_size=8.5", f"batch.global_size = 8.5: {INT}"),
        ("batch.global_size=64.0", f"batch.global_size = 64.0: {INT}; write 64"),
        ("train.max_steps=1e3", f"train.max_steps = 1000.0: {INT} or null; write 1000"),
        ("batch.global_size=true", f"batch.global_size = true: {INT}"),
        ('batch.global_size="64"', f'batch.global_size = "64": {INT}; it is quoted, so it is text: remove the quotes'),
        ("batch.global_size=many", f'batch.global_size = "many": {INT}'),
        ("batch.global_size=0", f"batch.global_size = 0: {INT}"),
        ("batch.global_size=-4", f"batch.global_size = -4: {INT}"),
        ("batch.global_size=null", f"batch.global_size = null: {INT}"),
        ("batch.global_size=[64]", f"batch.global_size = [64]: {INT}"),
        ("batch.global_size=0xFFFFFFFFFFFFFFFFF", f"batch.global_size = 295147905179352825855: {INT} and below 2**63"),
        ("batch.micro_size=8.5", f"batch.micro_size = 8.5: {INT} or auto"),
        ("batch.micro_size=atuo", f'batch.micro_size = "atuo": did you mean auto? {INT} or auto'),
        ("batch.micro_size=65", "batch.micro_size = 65: at most batch.global_size (64) is allowed"),
        ("batch.eval_size=0", f"batch.eval_size = 0: {INT} or null"),
        ("seed=-1", "seed = -1: allowed: an integer >= 0"),
        ("seed=1:30", 'seed = "1:30": allowed: an integer >= 0'),
        ("train.epochs=0", f"train.epochs = 0: {INT} or null"),
        ("train.epochs=null", "train: epochs or max_steps is needed (with both, the first reached ends the run)"),
        ("optimizer.lr=0", f"optimizer.lr = 0: {POSITIVE}"),
        ("optimizer.lr=-1e-3", f"optimizer.lr = -0.001: {POSITIVE}"),
        ("optimizer.lr=1e400", f"optimizer.lr = .inf: {POSITIVE}"),
        ('optimizer.lr="1e-3"', f'optimizer.lr = "1e-3": {POSITIVE}; it is quoted, so it is text: remove the quotes'),
        ("optimizer.lr=true", f"optimizer.lr = true: {POSITIVE}"),
        ("optimizer.weight_decay=-1", f"optimizer.weight_decay = -1: {NOT_NEGATIVE} or null"),
        (
            "optimizer.betas=[0.9]",
            "optimizer.betas = [0.9]: allowed: a 2-entry list, each a finite number >= 0 and < 1 or null",
        ),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1 = 1: allowed: a finite number >= 0 and < 1"),
        ("optimizer.fused=maybe", 'optimizer.fused = "maybe": allowed: true or false or auto'),
        ("clip_grad_norm=0", f"clip_grad_norm = 0: {POSITIVE} or null"),
        ("clip_grad_norm=.nan", f"clip_grad_norm = .nan: {POSITIVE} or null"),
        ("clip_grad_norm=-.inf", f"clip_grad_norm = -.inf: {POSITIVE} or null"),
        ("train.ema={decay: 1}", "train.ema.decay = 1: allowed: a finite number > 0 and < 1"),
        ("train.early_stop={min_delta: -1}", f"train.early_stop.min_delta = -1: {NOT_NEGATIVE}"),
        ("train.early_stop={patience: 0}", f"train.early_stop.patience = 0: {INT}"),
        ("train.compile=3", "train.compile = 3: allowed: true or false or a map with mode, fullgraph, dynamic"),
        (
            "train.compile={mode: defualt}",
            'train.compile.mode = "defualt": did you mean default? allowed: default, reduce-overhead, '
            "max-autotune, max-autotune-no-cudagraphs or null",
        ),
        ("train.eval_every=10", "train.eval_every = 10: allowed: a map with steps, epochs, minutes or null"),
        ("train.eval_every={steps: 0}", f"train.eval_every.steps = 0: {INT} or null"),
        ("train.eval_every={minutes: 0}", f"train.eval_every.minutes = 0: {POSITIVE} or null"),
        ("train.eval_every={}", "train.eval_every: exactly one of steps, epochs, minutes is needed, such as {epochs: 1}"),
        (
            "train.log_every={steps: 1, epochs: 1}",
            "train.log_every: exactly one of steps, epochs, minutes is needed, such as {epochs: 1}",
        ),
        ("train.log_every=null", "train.log_every = null: allowed: a map with steps, epochs, minutes"),
        ("checkpoint.async=maybe", 'checkpoint.async = "maybe": allowed: true or false'),
        ("checkpoint.async=0", "checkpoint.async = 0: allowed: true or false"),
        ("checkpoint.keep=0", f"checkpoint.keep = 0: {INT}"),
        ("failure.hang_timeout=0", f"failure.hang_timeout = 0: {POSITIVE} or null"),
        ("failure.grace=-1", f"failure.grace = -1: {POSITIVE}"),
        ("failure.max_restarts=-1", "failure.max_restarts = -1: allowed: an integer >= 0"),
        ("failure.bad_step=rase", 'failure.bad_step = "rase": did you mean raise? allowed: raise, skip, rollback'),
        ("data.changed=refus", 'data.changed = "refus": did you mean refuse? allowed: refuse, accept'),
        ("data.train.path=[]", "data.train.path = []: allowed: a path or a non-empty list, each a path, or null"),
        ('data.train.path=""', 'data.train.path = "": allowed: a path or a non-empty list, each a path, or null'),
        ("data.train.path=[a, 3]", "data.train.path.1 = 3: allowed: a path"),
        ('storage="a\\0b"', 'storage = "a\\x00b": a path cannot hold a NUL character'),
        ("data.train.shuffle=1", "data.train.shuffle = 1: allowed: true or false or a map with window"),
        ("data.train.shuffle={window: 0}", f"data.train.shuffle.window = 0: {INT} or auto"),
        (
            "data.train.images={size: [3]}",
            "data.train.images.size = [3]: allowed: a 2-entry list, each an integer >= 1 or null",
        ),
        (
            "data.train.columns=[a, a, pixels, label]",
            'data.train.columns = ["a", "a", "pixels", "label"]: a column is named twice',
        ),
        (
            "data.train=null",
            "data.train = null: allowed: a map with path, format, target, args, shuffle, drop_last, columns, transforms, "
            "rows, nulls, fill_value, images, loader, sampler, collate, engine",
        ),
        (
            "task.inputs=[]",
            "task.inputs = []: allowed: a non-empty list, each non-empty text or a non-empty list, each non-empty text or null",
        ),
        (
            "task.inputs=pixels",
            'task.inputs = "pixels": allowed: '
            "a non-empty list, each non-empty text or a non-empty list, each non-empty text or null",
        ),
        (
            "task.targets=no",
            "task.targets = false: allowed: non-empty text or a non-empty list, each non-empty text, or null; "
            'YAML reads yes/no/on/off as true/false: quote it, such as "no"',
        ),
        ("task.targets=[a, 1]", 'task.targets.1 = 1: allowed: non-empty text; quote it: "1"'),
        (
            "strategy={name: model_parallel, device_map: {}}",
            "strategy.device_map = {}: allowed: auto or a non-empty map of names to non-empty text",
        ),
        (
            "task.inputs=[1]",
            'task.inputs.0 = 1: allowed: non-empty text or a non-empty list, each non-empty text; quote it: "1"',
        ),
        ("task.model=Linear", 'task.model = "Linear": allowed: a map with target, args or null'),
        ("task.model.args=3", "task.model.args = 3: allowed: a map of names to values"),
        ("task.model.args={1: 2}", "task.model.args: the key 1 is not text; quote it"),
        ("task.metrics={no: {target: m:f}}", "task.metrics: the key false is not text; quote it"),
        ('task.metrics={"": {target: m:f}}', "task.metrics: a key is empty"),
        (
            "task.model.target=Linear",
            'task.model.target = "Linear": not an import path; '
            "allowed: an import path such as torch.nn:Linear or ./file.py:Name",
        ),
        (
            "task.model.target=a/b:C",
            'task.model.target = "a/b:C": not an import path; '
            "allowed: an import path such as torch.nn:Linear or ./file.py:Name",
        ),
        ("scaling.workers=0", f"scaling.workers = 0: {INT} or a 2-entry list, each an integer >= 1"),
        ("scaling.workers=[1]", f"scaling.workers = [1]: {INT} or a 2-entry list, each an integer >= 1"),
        ("scaling.workers=[0, 2]", f"scaling.workers.0 = 0: {INT}"),
        ("scaling.workers=[4, 1]", "scaling.workers = [4, 1]: [min, max] with min <= max is allowed"),
        ("scaling.gpus_per_worker=-1", f"scaling.gpus_per_worker = -1: {NOT_NEGATIVE} or auto"),
        ("scaling.gpus_per_worker=1.5", "scaling.gpus_per_worker = 1.5: a fraction is allowed up to 1, above it whole numbers"),
        ("scaling.cpus_per_worker=0", f"scaling.cpus_per_worker = 0: {POSITIVE}"),
        ("scaling.cpus_per_worker=2.5", "scaling.cpus_per_worker = 2.5: a fraction is allowed up to 1, above it whole numbers"),
        ("scaling.resources={GPU: 1}", "scaling.resources.GPU = 1: has a key of its own: scaling.gpus_per_worker"),
        ("scaling.resources={tpu: -1}", f"scaling.resources.tpu = -1: {NOT_NEGATIVE}"),
        (
            "scaling={backend: nccl, gpus_per_worker: 0}",
            'scaling.backend = "nccl": nccl needs a GPU for each worker, and gpus_per_worker is 0',
        ),
        ("strategy={name: pipeline, stages: 0}", f"strategy.stages = 0: {INT}"),
        (
            "strategy={name: pipeline, stages: 4, micro_batches: 3}",
            "strategy.micro_batches = 3: 1f1b needs at least as many as stages (4); gpipe does not",
        ),
        (
            "strategy={name: pipeline, stages: 2, cut: [3]}",
            "strategy.cut = [3]: needs 2 numbers of layers, one for each run (stages x chunks)",
        ),
        (
            "strategy=dpp",
            f'strategy = "dpp": did you mean dp? {STRATEGIES}',
        ),
        (
            "strategy={name: dpp}",
            f'strategy = {{name: "dpp"}}: did you mean dp? {STRATEGIES}',
        ),
        (
            "strategy={name: 3}",
            f"strategy = {{name: 3}}: {STRATEGIES}",
        ),
        (
            "strategy=[ddp]",
            f'strategy = ["ddp"]: {STRATEGIES}',
        ),
        ("strategy=null", f"strategy = null: {STRATEGIES}"),
        ("strategy.bucket_cap_mb=0", f"strategy.bucket_cap_mb = 0: {POSITIVE}"),
        ("strategy={name: dp, static_graph: true}", "strategy.static_graph = true: unknown key; allowed: name"),
        ("strategy.comm_hook=fp16", 'strategy.comm_hook = "fp16": allowed: fp16_compress, bf16_compress or null'),
        (
            "strategy={name: model_parallel, device_map: {a: 1}}",
            'strategy.device_map.a = 1: allowed: non-empty text; quote it: "1"',
        ),
        (
            "strategy={name: model_parallel, device_map: 3}",
            'strategy.device_map = 3: allowed: auto or a non-empty map of names to non-empty text; quote it: "3"',
        ),
        ("precision=fp17", 'precision = "fp17": did you mean fp16? allowed: fp32, bf16, fp16'),
        ("precision=16", "precision = 16: allowed: fp32, bf16, fp16, or a map with name and its options"),
        ("precision={name: fp16, growth_factor: 1}", "precision.growth_factor = 1: allowed: a finite number > 1"),
        ("precision={name: fp16, init_scale: 0}", f"precision.init_scale = 0: {POSITIVE}"),
        ("precision={name: bf16, init_scale: 2}", "precision.init_scale = 2: only fp16 scales gradients; bf16 has no such key"),
        (
            "schedule.name=cosin",
            'schedule.name = "cosin": did you mean cosine? allowed: constant, linear, cosine, step, plateau or null',
        ),
    ],
)
def test_words_for_refused_values(override: str, line: str) -> None:
    assert refused(override) == [line]


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden", "a..b", "-x", "a b", "a\\b", "é", "x" * 101, "a\n"])
def test_names_that_make_no_folder(name: str) -> None:
    (line,) = refused(data={**data_of(), "name": name})
    assert line.endswith(
        "it names the run's folder: letters, digits, '.', '_', '-' (at most 100; no '..', not '.' or '-' first)"
    )


def test_names_that_yaml_reads_as_something_else_are_to_be_quoted() -> None:
    assert refused("name=no") == ['name = false: allowed: text; YAML reads yes/no/on/off as true/false: quote it, such as "no"']
    assert refused("name=123") == ['name = 123: allowed: text; quote it: "123"']
    assert [parse(f"name={text}").name for text in ('"no"', '"123"', "run-1_a.b", "1:30x".replace(":", "_"))]


# -- keys that do not go together ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["task={}"], ["task: either model and loss, or target (a custom task) is needed"]),
        (["task.loss=null"], ["task.loss = null: missing; model and loss come together"]),
        (["task.args={a: 1}"], ["task.args: only for a custom task (task.target); a model's own go to task.model.args"]),
        ([TORCH_DATA, "task.inputs=null"], ['task.targets = "label": needs task.inputs too']),
        (
            ["task.inputs=null", "task.targets=null"],
            [
                "task.inputs = null: missing; data.train is read from files: name the columns that the model takes, "
                "such as [pixels]",
                "task.targets = null: missing; data.train is read from files: name the column that the loss takes, "
                "such as label",
            ],
        ),
        (
            ["task.target=m:T"],
            [
                f"task.{key}{value}: a custom task (task.target) brings its own; remove one of the two"
                for key, value in [
                    ("model", ""),
                    ("loss", ""),
                    ("metrics", ""),
                    ("inputs", ' = ["pixels"]'),
                    ("targets", ' = "label"'),
                ]
            ],
        ),
        (["data.train={}"], ["data.train: exactly one of path (files) and target (a torch Dataset) is needed"]),
        (["data.train.target=m:D"], ["data.train: exactly one of path (files) and target (a torch Dataset) is needed"]),
        (
            ["data.train={path: a, args: {k: 1}, loader: {num_workers: 1}, sampler: {target: m:S}, collate: m.c}"],
            [
                f"data.train.{key}{value}: only for a torch Dataset (target), not for files (path)"
                for key, value in [("args", ""), ("loader", ""), ("sampler", ""), ("collate", ' = "m.c"')]
            ],
        ),
        (
            [
                "data.train={target: m:D, format: csv, columns: [a], transforms: [{target: m:f}], rows: changes, nulls: drop, "
                "images: {mode: L}, engine: ray}"
            ],
            [
                f"data.train.{key}{value}: only for files (path); a torch Dataset (target) brings its own"
                for key, value in [
                    ("format", ' = "csv"'),
                    ("columns", ' = ["a"]'),
                    ("transforms", ' = [{target: "m:f"}]'),
                    ("rows", ' = "changes"'),
                    ("nulls", ' = "drop"'),
                    ("images", ""),
                    ("engine", ' = "ray"'),
                ]
            ],
        ),
        (
            ["data.train={target: m:D, shuffle: true, sampler: {target: m:S}}"],
            ["data.train.shuffle = true: a sampler decides the order already; remove one of the two"],
        ),
        (["data.train.nulls=fill"], ["data.train.fill_value: goes with nulls: fill, and only with it"]),
        (["data.train.fill_value=0"], ["data.train.fill_value = 0: goes with nulls: fill, and only with it"]),
        (["data.train.format=csv", "data.train.images={mode: L}"], ["data.train.images: csv files hold no images"]),
        (
            ["data.train={target: m:D, loader: {persistent_workers: true, prefetch_factor: 2}}"],
            [
                "data.train.loader.persistent_workers = true: needs loader processes: set num_workers >= 1",
                "data.train.loader.prefetch_factor = 2: needs loader processes: set num_workers >= 1",
            ],
        ),
        (
            ["data.train.columns=[label]"],
            ["data.train.columns = [\"label\"]: lacks 'pixels', which task.inputs or task.targets names"],
        ),
        (
            ["data.eval.shuffle=true", "data.eval.drop_last=true"],
            [
                "data.eval.shuffle = true: only for data.train; an evaluation scores each row once, in order",
                "data.eval.drop_last = true: only for data.train; an evaluation scores each row once, in order",
            ],
        ),
        (
            [TORCH_DATA, "data.fit={index: [a]}"],
            ["data.fit: only when data.train is read from files (path); a torch Dataset (target) prepares its own rows"],
        ),
        (
            ["data.fit={index: [a, a], normalize: [b, b]}"],
            [
                'data.fit.index = ["a", "a"]: a column is named twice',
                'data.fit.normalize = ["b", "b"]: a column is named twice',
            ],
        ),
        (
            ["data.fit={index: [a, b], normalize: [b, c]}"],
            ['data.fit.normalize = ["b", "c"]: b: a column is indexed or normalized, not both'],
        ),
        (
            [NO_EVAL, "train.eval_every={steps: 5}"],
            ["train.eval_every: there is nothing to evaluate: add data.eval, or remove this key"],
        ),
        (["optimizer.name=null"], ["optimizer: exactly one of name (sgd, adam, adamw) and target (an import path) is needed"]),
        (["optimizer.target=m:O"], ["optimizer: exactly one of name (sgd, adam, adamw) and target (an import path) is needed"]),
        (
            ["optimizer.momentum=0.9", "optimizer.nesterov=true"],
            [
                "optimizer.momentum = 0.9: not an option here: adamw has betas, eps, weight_decay",
                "optimizer.nesterov = true: not an option here: adamw has betas, eps, weight_decay",
            ],
        ),
        (
            ["optimizer={name: sgd, lr: 1, eps: 1e-8}"],
            ["optimizer.eps = 1e-08: not an option here: sgd has momentum, nesterov, weight_decay"],
        ),
        (["optimizer={name: sgd, lr: 1, nesterov: true}"], ["optimizer.nesterov = true: needs momentum > 0"]),
        (
            ["optimizer={target: m:O, lr: 1, eps: 1, fused: true}"],
            [
                "optimizer.eps = 1: not an option here: with target it goes to optimizer.args",
                "optimizer.fused = true: with target it goes to optimizer.args",
            ],
        ),
        (
            ["optimizer.args={amsgrad: true}"],
            ["optimizer.args: only with target; the options of adamw are keys of optimizer: betas, eps, weight_decay"],
        ),
        (["schedule={name: cosine, target: m:S}"], ["schedule: exactly one of name and target (an import path) is needed"]),
        (["schedule={name: null}"], ["schedule: exactly one of name and target (an import path) is needed"]),
        (
            ["schedule={min_lr: 1e-4, gamma: 0.5}"],
            [
                "schedule.min_lr = 0.0001: not an option of constant, which has warmup_steps",
                "schedule.gamma = 0.5: not an option of constant, which has warmup_steps",
            ],
        ),
        (
            ["schedule={target: m:S, factor: 0.5}"],
            ["schedule.factor = 0.5: not an option of a target, which has warmup_steps, args"],
        ),
        (
            ["schedule={name: cosine, args: {a: 1}}"],
            ["schedule.args: not an option of cosine, which has warmup_steps, total_steps, min_lr"],
        ),
        (["schedule={name: step}"], ["schedule.step_size: missing; schedule step needs an integer >= 1"]),
        (
            ["schedule={name: cosine, total_steps: 5, warmup_steps: 6}"],
            ["schedule.warmup_steps = 6: at most schedule.total_steps (5) is allowed"],
        ),
        (
            ["train.max_steps=5", "schedule={warmup_steps: 6}"],
            ["schedule.warmup_steps = 6: at most train.max_steps (5) is allowed"],
        ),
        (["schedule={name: cosine, min_lr: 0.1}"], ["schedule.min_lr = 0.1: at most optimizer.lr (0.003) is allowed"]),
        (
            ["strategy=dp", "scaling.workers=2"],
            ["scaling.workers = 2: strategy dp runs in one worker: only 1 is allowed; ddp uses several"],
        ),
        (
            ["strategy=model_parallel", "scaling.workers=[1, 2]"],
            ["scaling.workers = [1, 2]: strategy model_parallel runs in one worker: only 1 is allowed; ddp uses several"],
        ),
        (
            ["failure.max_bad_steps=5"],
            ["failure.max_bad_steps = 5: only with bad_step: skip or rollback; raise stops at the first"],
        ),
        (
            ["failure.bad_step=rollback", "checkpoint.every=null"],
            ['failure.bad_step = "rollback": rollback goes back to a checkpoint, and checkpoint.every is null'],
        ),
        (
            ["checkpoint.best={metric: eval_acuracy}"],
            [
                'checkpoint.best.metric = "eval_acuracy": no such metric; did you mean eval_accuracy? '
                "allowed: eval_loss, train_loss, eval_accuracy (eval_<name in task.metrics>)"
            ],
        ),
        (
            ["train.early_stop={metric: accuracy}"],
            [
                'train.early_stop.metric = "accuracy": no such metric; did you mean eval_accuracy? '
                "allowed: eval_loss, train_loss, eval_accuracy (eval_<name in task.metrics>)"
            ],
        ),
        (
            ["schedule={name: plateau, metric: zzz}"],
            [
                'schedule.metric = "zzz": no such metric; allowed: eval_loss, train_loss, eval_accuracy '
                "(eval_<name in task.metrics>)"
            ],
        ),
        (
            [NO_EVAL, "train.early_stop={}", "checkpoint.best={}", "schedule.name=plateau"],
            [
                f"{key}: eval_loss needs an evaluation: add data.eval, or use train_loss"
                for key in ("train.early_stop.metric", "checkpoint.best.metric", "schedule.metric")
            ],
        ),
        (
            ["train.eval_every=null", "checkpoint.best={}"],
            ["checkpoint.best.metric: eval_loss needs an evaluation, and train.eval_every is null"],
        ),
    ],
)
def test_words_for_keys_that_do_not_go_together(overrides: list[str], lines: list[str]) -> None:
    assert refused(*overrides) == lines


def test_a_search_of_the_wrong_type_is_told_the_names() -> None:
    assert refused("sweep={space: {seed: {grid: [1]}}, search: 5}") == [
        "sweep.search = 5: allowed: random, grid, optuna, or a map with name and its options"
    ]


def test_what_goes_together_is_taken() -> None:
    custom = "task={target: m:T, args: {a: 1}}"
    assert parse(custom, "checkpoint.best={metric: eval_anything}", "train.early_stop={metric: my_metric}")
    assert parse(NO_EVAL, "train.early_stop={metric: train_loss}", "schedule={name: plateau, metric: train_loss, min_lr: 1e-4}")
    assert parse(TORCH_DATA, "task.inputs=null", "task.targets=null", "data.train.loader={num_workers: 2, prefetch_factor: 2}")
    assert parse("data.train.columns=[x]", "data.train.transforms=[{target: m:f}]"), "a transform may make the columns"
    assert parse("optimizer={name: sgd, lr: 1, momentum: 0.9, nesterov: yes, weight_decay: 0}")
    assert parse("precision={name: fp16, init_scale: 256}", "failure={bad_step: rollback, max_bad_steps: 2}")
    assert parse("scaling={workers: [1, 4], gpus_per_worker: 0.5, cpus_per_worker: 2, resources: {tpu: 0.5}}")
    assert parse("data.train.nulls=fill", "data.train.fill_value=0.0", "data.fit={index: [a], normalize: [b]}")
    assert parse("strategy={name: model_parallel, device_map: {body: cpu, head: cpu}, devices: [cpu]}")


# -- all at once ---------------------------------------------------------------------------------------------------


def test_all_problems_are_listed_at_once_also_across_sections() -> None:
    lines = refused(
        "nonsense",
        "optimizer.lr=0",
        "seeed=1",
        "batch.micro_size=100",
        "strategy=dp",
        "scaling.workers=2",
        "checkpoint.best={metric: eval_loss}",
        "train.eval_every=null",
        "train.ema={decay: 2}",
        "failure={bad_step: rollback}",
        "checkpoint.every=null",
    )
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == [
        'override "nonsense"',
        "batch.micro_size",
        "train.ema.decay",
        "optimizer.lr",
        "seeed",
        "scaling.workers",
        "failure.bad_step",
    ]


def test_keys_that_are_no_text_are_refused() -> None:
    assert refused(data={**data_of(), True: 2}) == [
        "the job: the key true is not text; allowed: name, seed, task, data, batch, train, optimizer, schedule, precision, "
        "clip_grad_norm, strategy, scaling, checkpoint, failure, loggers, profile, env, storage, sweep"
    ]
    assert refused("batch={1: 2, global_size: 3}") == [
        "batch: the key 1 is not text; allowed: global_size, micro_size, eval_size"
    ]


def test_an_empty_job_lists_every_missing_section() -> None:
    lines = refused(data={})
    assert [line.split(":")[0] for line in lines] == ["name", "task", "data", "batch", "train", "optimizer"]
    assert lines[0] == "name: missing; allowed: text"
    assert lines[3] == "batch: missing; allowed: a map with global_size, micro_size, eval_size"


def test_python_objects_that_no_job_file_can_hold_are_refused() -> None:
    data = data_of()
    data["task"]["model"]["args"] = {"shape": (1, 2)}
    assert parse_config(data, "/base").task.model.args == {"shape": [1, 2]}  # type: ignore[union-attr]
    data["task"]["model"]["args"] = {"k": {1, 2}}
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "/base")
    assert str(caught.value) == (
        "job: task.model.args.k: a set cannot stand in a job file; allowed: text, numbers, true/false, null, lists, maps"
    )
    data["task"]["model"]["args"] = {"k": 2**5000}
    with pytest.raises(ConfigError, match=r"^job: task\.model\.args\.k: an integer of 5001 bits is too large$"):
        parse_config(data, "/base")
    loop: list[Any] = []
    loop.append(loop)
    data["task"]["model"]["args"] = {"k": loop}
    with pytest.raises(
        ConfigError, match=r"^job: task\.model\.args\.k\.0: nested too deeply, or a value that contains itself$"
    ):
        parse_config(data, "/base")


def test_python_users_get_the_same_checks_from_the_classes() -> None:
    with pytest.raises(ValueError, match="exactly one of steps, epochs, minutes"):
        Interval(steps=1, epochs=1)


def test_long_and_unprintable_values_are_shown_short_and_escaped() -> None:
    (line,) = refused(data={**data_of(), "seed": "x\x1b[31m" + "y" * 500})
    assert line == 'seed = "x\\x1b[31m' + "y" * 47 + "...: allowed: an integer >= 0"
    assert refused(data={**data_of(), "seed": 2**300}) == [
        "seed = an integer of 301 bits: allowed: an integer >= 0 and below 2**63"
    ]
    assert refused(data={**data_of(), "a\nb": 1})[0].startswith("a\\nb = 1: unknown key")
