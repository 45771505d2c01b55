"""Import paths and the words for wrong ones; column tasks; custom tasks and their weights; batches as trees."""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raydist.config import TaskConfig
from raydist.errors import ConfigError, DataError, TrainError
from raydist.task import ColumnTask, Task, build, build_task, checked_loss, resolve, slice_rows, to_device
from tests.support import Lin, lin_job, run_ranks, train_here

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A job's folder; what was imported from it is forgotten again."""
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# -- import paths -----------------------------------------------------------------------------------------------------


def test_an_import_path_names_a_module_member_with_colon_or_dot() -> None:
    assert resolve("torch.nn.functional:mse_loss", "k") is functional.mse_loss
    assert resolve("torch.nn.functional.mse_loss", "k") is functional.mse_loss
    assert resolve("torch.nn:Module.train", "k") is nn.Module.train
    assert resolve("tests.support:Lin", "k") is Lin


def test_a_file_is_imported_once_and_finds_its_neighbours(folder: Path) -> None:
    (folder / "neighbour_of_mine.py").write_text("VALUE = 7\n")
    (folder / "mine.py").write_text("from neighbour_of_mine import VALUE\nclass Net:\n    value = VALUE\n")
    target = f"{folder}/mine.py:Net"
    found = resolve(target, "task.model")
    assert found.value == 7
    assert resolve(target, "task.model") is found
    (folder / "other").mkdir()
    (folder / "other" / "mine.py").write_text("class Net:\n    value = 8\n")
    assert resolve(f"{folder}/other/mine.py:Net", "task.model").value == 8  # the same name in another folder


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("cross_entropy", "task.loss: 'cross_entropy' is no import path; write pkg.module:Name or ./file.py:Name"),
        ("torch.nn:", "is no import path"),
        ("no_such_pkg.mod:f", "no module 'no_such_pkg' for 'no_such_pkg.mod:f'; is it installed, or meant as ./file.py:Name?"),
        ("torch.no_such_module:f", "no module 'torch.no_such_module'"),
        ("torch.nn.functional:cros_entropy", "torch.nn.functional has no 'cros_entropy'; did you mean 'cross_entropy'?"),
        ("torch.nn.functional:zzz", r"torch.nn.functional has no 'zzz'$"),
        ("torch.nn:Module.trian", "torch.nn has no 'Module.trian'; did you mean 'train'?"),
    ],
)
def test_a_wrong_import_path_is_named_with_what_is_near(target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(target, "task.loss")


def test_a_file_that_is_not_there_or_does_not_import_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"task: no file .*absent\.py; a relative path starts at the job file's folder"):
        resolve(f"{folder}/absent.py:Net", "task")
    (folder / "broken.py").write_text("value = 1 / 0\n")
    for _ in range(2):  # a file that failed is not taken for imported
        with pytest.raises(ConfigError, match=r"importing .*broken\.py failed: ZeroDivisionError: division by zero"):
            resolve(f"{folder}/broken.py:Net", "task")
    (folder / "wrong.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"importing .*wrong\.py failed: SyntaxError"):
        resolve(f"{folder}/wrong.py:f", "task")
    (folder / "needs.py").write_text("import not_installed_here\n")
    with pytest.raises(
        ConfigError, match=r"importing .*needs\.py failed: ModuleNotFoundError: No module named 'not_installed_here'"
    ):
        resolve(f"{folder}/needs.py:f", "task")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ConfigError, match="task: importing 'broken' failed: ZeroDivisionError"):
        resolve("broken:Net", "task")
    with pytest.raises(ConfigError, match="task: importing 'needs' failed: No module named 'not_installed_here'"):
        resolve("needs:Net", "task")


def test_args_that_do_not_fit_are_shown_with_the_signature() -> None:
    assert build("torch.nn:Linear", {"in_features": 2, "out_features": 1}, "m").in_features == 2
    with pytest.raises(
        ConfigError, match=r"task.model: torch.nn:Linear does not take these args: .*'outputs'.* It takes \(in_feat"
    ):
        build("torch.nn:Linear", {"in_features": 2, "out_features": 1, "outputs": 1}, "task.model")
    with pytest.raises(ConfigError, match="missing a required argument: 'out_features'"):
        build("torch.nn:Linear", {"in_features": 2}, "task.model")
    with pytest.raises(ConfigError, match=r"task.model: torch:pi is a float, not something to call with args"):
        build("torch:pi", {}, "task.model")
    with pytest.raises(ConfigError, match=r"task.model: torch.nn:Dropout refused its args: ValueError: dropout probability"):
        build("torch.nn:Dropout", {"p": 1.5}, "task.model")


# -- a task from parts ---------------------------------------------------------------------------------------------------


def column_task(**changes: Any) -> ColumnTask:
    parts = {
        "model": {"target": "torch.nn:Linear", "args": {"in_features": 2, "out_features": 1}},
        "loss": {"target": "torch.nn.functional:mse_loss"},
        "inputs": ["x"],
        "targets": "y",
    }
    task = build_task(TaskConfig.model_validate({**parts, **changes}))
    assert isinstance(task, ColumnTask) and isinstance(task, Task)
    return task


def test_columns_become_model_arguments_and_a_target() -> None:
    batch = {
        "a": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "b": torch.tensor([3, 4]),
        "image": torch.zeros(2, 3, 3, dtype=torch.float64),
        "label": torch.tensor([0, 1], dtype=torch.int32),
        "price": torch.tensor([0.5, 1.5], dtype=torch.float64),
    }
    inputs, target = column_task(inputs=["a", "b", "image", ["a", "b"]], targets="label").split(batch)
    assert [tuple(x.shape) for x in inputs] == [(2, 1), (2,), (2, 3, 3), (2, 2)]
    assert [x.dtype for x in inputs] == [torch.float32, torch.int64, torch.float32, torch.float32]
    assert inputs[3].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert target.dtype == torch.int64
    _, several = column_task(targets=["a", "price"], inputs=["b"]).split(batch)
    assert several.dtype == torch.float32 and several.tolist() == [[1.0, 0.5], [2.0, 1.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int8])
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_target_of_single_numbers_meets_predictions_of_one_column(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # (4, 1) against (4,) would broadcast to (4, 4) and train on noise
    task = column_task(inputs=[["a", "b"]])
    model = task.build_model()
    a, b, y = torch.randn(4), torch.randn(4), torch.tensor([1, 0, 1, 3])
    expected = functional.mse_loss(model(torch.stack([a, b], 1)).squeeze(1), y.float())
    loss = task.loss(model, {"a": a, "b": b, "y": y.to(dtype).reshape(shape)})
    torch.testing.assert_close(loss, expected)
    loss.backward()


def test_integer_labels_serve_a_binary_loss_and_its_metric() -> None:
    from torchmetrics.classification import BinaryAccuracy

    task = column_task(
        loss={"target": "torch.nn:BCEWithLogitsLoss"},
        metrics={"accuracy": {"target": "torchmetrics.classification:BinaryAccuracy"}},
        inputs=[["a"]],
        model={"target": "torch.nn:Linear", "args": {"in_features": 1, "out_features": 1}},
    )
    model = task.build_model()
    batch = {"a": torch.tensor([1.0, -1.0, 2.0]), "y": torch.tensor([1, 0, 0])}
    predictions, targets = task.predict(model, batch)
    expected = functional.binary_cross_entropy_with_logits(predictions[:, 0], torch.tensor([1.0, 0.0, 0.0]))
    torch.testing.assert_close(task.loss(model, batch), expected)
    metric = task.metrics()["accuracy"]
    assert isinstance(metric, BinaryAccuracy)
    metric.update(predictions, targets)  # refuses float targets
    assert float(metric.compute()) == pytest.approx(float(((predictions[:, 0] > 0) == batch["y"].bool()).float().mean()))


def test_class_indices_stay_integers() -> None:
    model = {"target": "torch.nn:Linear", "args": {"in_features": 2, "out_features": 3}}
    task = column_task(model=model, loss={"target": "torch.nn.functional:cross_entropy", "args": {"label_smoothing": 0.1}})
    net, x, y = task.build_model(), torch.randn(1, 2), torch.tensor([2], dtype=torch.uint8)
    expected = functional.cross_entropy(net(x), torch.tensor([2]), label_smoothing=0.1)
    torch.testing.assert_close(task.loss(net, {"x": x, "y": y}), expected)
    # a loss class is built once with its args
    task = column_task(model=model, loss={"target": "torch.nn:CrossEntropyLoss", "args": {"label_smoothing": 0.1}})
    torch.testing.assert_close(task.loss(net, {"x": x, "y": y}), expected)


def test_a_tuple_needs_no_names() -> None:
    task = column_task(inputs=None, targets=None, model={"target": "torch.nn:Bilinear", "args": _bilinear()})
    inputs, target = task.split((torch.ones(3, 2, dtype=torch.float64), torch.ones(3, 2), torch.ones(3, dtype=torch.int16)))
    assert [x.dtype for x in inputs] == [torch.float32, torch.float32] and target.dtype == torch.int64
    assert task.predict(task.build_model(), [torch.ones(3, 2), torch.ones(3, 2), torch.ones(3)])[1].shape == (3, 1)


def _bilinear() -> dict[str, int]:
    return {"in1_features": 2, "in2_features": 2, "out_features": 1}


ONE, TWO = torch.ones(1), torch.ones(2)
MISFITS = {
    "missing input": ({"inputs": ["pixel"]}, {"pixels": ONE, "y": ONE}),
    "missing target": ({"targets": "lable"}, {"x": ONE, "label": ONE}),
    "text": ({}, {"x": ["a", "b"], "y": TWO}),
    "not single numbers": ({"inputs": [["x", "z"]]}, {"x": TWO, "z": torch.ones(2, 5), "y": TWO}),
    "target not single": ({"targets": ["y", "z"]}, {"x": TWO, "z": torch.ones(2, 5), "y": TWO}),
    "stacked text": ({"inputs": [["x", "z"]]}, {"x": TWO, "z": ["a", "b"], "y": TWO}),
    "no names": ({"inputs": None, "targets": None}, {"x": ONE, "y": ONE}),
    "a tensor": ({}, torch.ones(3, 2)),
    "one item": ({}, (torch.ones(3, 2),)),
}
MISFIT_WORDS = {
    "missing input": "task.inputs: no column 'pixel'; did you mean 'pixels'?; the data has pixels, y",
    "missing target": "task.targets: no column 'lable'; did you mean 'label'?",
    "text": "task.inputs: column 'x' is text or mixed (list), not numbers; index it with data.fit.index, or turn it into",
    "not single numbers": "column 'z' has shape [2, 5]; only columns of single numbers can be stacked",
    "target not single": "task.targets: column 'z' has shape [2, 5]; only columns of single numbers can be stacked",
    "stacked text": "task.inputs: column 'z' is text or mixed",
    "no names": "task: the data has columns x, y; say which are task.inputs and task.targets",
    "a tensor": "task: a batch is a Tensor; the data must give a dict of columns or a tuple",
    "one item": "task: a batch is a tuple; the data must give a dict of columns or a tuple",
}


@pytest.mark.parametrize("case", MISFITS)
def test_data_that_does_not_fit_the_task_is_named(case: str) -> None:
    changes, batch = MISFITS[case]
    with pytest.raises(DataError, match=re.escape(MISFIT_WORDS[case])):
        column_task(**changes).split(batch)


class NotAMetric:
    pass


def metric(target: str, **args: Any) -> dict[str, Any]:
    return {"metrics": {"m": {"target": target, "args": args}}}


WRONG_PARTS = {
    "task.model: tests.support:free_port made a int, not a torch.nn.Module": {"model": {"target": "tests.support:free_port"}},
    "task.model: torch.nn:Linear does not take these args": {"model": {"target": "torch.nn:Linear"}},
    "task.loss: torch:pi is not callable": {"loss": {"target": "torch:pi"}},
    "task.loss: torch.nn:MSELoss does not take": {"loss": {"target": "torch.nn:MSELoss", "args": {"x": 1}}},
    "task.metrics.m: torchmetrics has no 'No'": metric("torchmetrics:No"),
    "missing a required argument: 'num_classes'": metric("torchmetrics.classification:MulticlassConfusionMatrix"),
    "refused its args: ValueError: Unexpected keyword": metric("torchmetrics:MeanSquaredError", sqared=1),
    "NotAMetric made a NotAMetric, not a torchmetrics.Metric": metric("tests.test_task:NotAMetric"),
}


@pytest.mark.parametrize("words", WRONG_PARTS)
def test_wrong_parts_are_found_before_training(words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        column_task(**WRONG_PARTS[words]).build_model()


def test_a_task_needs_model_and_loss() -> None:
    with pytest.raises(ConfigError, match="task: needs model and loss, or target for a custom task"):
        ColumnTask(TaskConfig.model_construct(model=None, loss=None))


# -- custom tasks ---------------------------------------------------------------------------------------------------------


class Tokens:
    """Rows of 1 to 4 tokens; the loss is a mean over tokens, so the weight of a batch is its tokens."""

    def build_model(self) -> nn.Module:
        return Lin()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, mask = batch
        wrong = (model(x.unsqueeze(-1)).squeeze(-1) - 3 * x) ** 2
        return (wrong * mask).sum() / mask.sum()

    def weight(self, batch: Any) -> float:
        return float(batch[1].sum())


def padded(lengths: list[int], xs: list[float]) -> TensorDataset:
    """Row i: `lengths[i]` tokens of the value `xs[i]`, padded to 4."""
    mask = torch.tensor([[1.0] * n + [0.0] * (4 - n) for n in lengths])
    return TensorDataset(torch.tensor(xs).unsqueeze(1) * mask, mask)


def token_job(**changes: Any) -> dict[str, Any]:
    job = lin_job([], 5, **changes)
    job["task"] = {"target": "tests.test_task:Tokens"}
    lengths, xs = [1, 4, 2, 1, 3], [2.0, 1.0, 1.0, 3.0, 1.0]
    job["data"] = {"train": {"target": "tests.test_task:padded", "args": {"lengths": lengths, "xs": xs}}}
    return job


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tokens_weigh_equally_whatever_the_shares(world_size: int) -> None:
    # 11 tokens, sum of x^2 = 1*4 + 4 + 2 + 9 + 3 = 22: w = 0.1 * 2 * 3 * 22 / 11 = 1.2; weighting rows gives another number
    results = [train_here(token_job())] if world_size == 1 else run_ranks(world_size, train_here, token_job())
    for result in results:
        assert float(result["model"]["weight"]) == pytest.approx(1.2, abs=1e-6)
        assert result["lines"][0]["train_loss"] == pytest.approx(9 * 22 / 11, rel=1e-6)
    if world_size == 1:
        for micro in (1, 2, 3):
            assert float(train_here(token_job(batch__micro_size=micro))["model"]["weight"]) == pytest.approx(1.2, abs=1e-6)


def test_an_evaluation_weighs_tokens_too() -> None:
    job = token_job(batch__eval_size=2)
    job["data"]["eval"] = job["data"]["train"]
    assert train_here(job)["lines"][-1]["eval_loss"] == pytest.approx(1.8**2 * 22 / 11, rel=1e-5)


class Weightless(Tokens):
    def weight(self, batch: Any) -> float:
        return 0.0


class Negative(Tokens):
    def weight(self, batch: Any) -> float:
        return -1.0


def test_weights_that_cannot_be_are_refused() -> None:
    job = token_job()
    job["task"]["target"] = "tests.test_task:Weightless"
    with pytest.raises(TrainError, match=r"step 1: task.weight gave 0 for the whole global batch; it must be positive in sum"):
        train_here(job)
    job["task"]["target"] = "tests.test_task:Negative"
    with pytest.raises(TrainError, match=r"task.weight gave -1.0 on rank 0"):
        train_here(job)


class NoLoss:
    def build_model(self) -> nn.Module:
        return Lin()


class Unfed(Tokens):
    def metrics(self) -> dict[str, Any]:
        return {}


class NoModel(Tokens):
    def build_model(self) -> Any:
        return 3


def test_a_custom_task_that_lacks_something_is_told_what(folder: Path) -> None:
    def made(target: str) -> Any:
        return build_task(TaskConfig.model_validate({"target": target}))

    with pytest.raises(ConfigError, match=r"task: tests.test_task:NoLoss has no method loss\(\); a task needs build_model"):
        made("tests.test_task:NoLoss")
    with pytest.raises(ConfigError, match=r"Unfed has metrics\(\) but no predict\(model, batch\)"):
        made("tests.test_task:Unfed")
    job = token_job()
    job["task"]["target"] = "tests.test_task:NoModel"
    with pytest.raises(ConfigError, match=r"task: build_model\(\) gave a int, not a torch.nn.Module"):
        train_here(job)
    (folder / "own.py").write_text(
        "class Mine:\n    def __init__(self, k=1):\n        self.k = k\n"
        "    def build_model(self): ...\n    def loss(self, m, b): ...\n"
    )
    task = build_task(TaskConfig.model_validate({"target": f"{folder}/own.py:Mine", "args": {"k": 5}}))
    assert task.k == 5  # type: ignore[attr-defined]


# -- batches ---------------------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["x", "names"])


class Own:
    """A user's batch type that can be cut and moved."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.moved = x, False

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> Own:
        return Own(self.x[rows])

    def to(self, device: torch.device) -> Own:
        other = Own(self.x.to(device))
        other.moved = True
        return other


def test_rows_are_cut_from_every_part_of_a_batch() -> None:
    x = torch.arange(8).reshape(4, 2)
    batch = {"pair": Pair(x, ["a", "b", "c", "d"]), "list": [x, x + 1], "own": Own(x), "array": x.numpy()}
    cut = slice_rows(batch, 1, 3)
    assert isinstance(cut["pair"], Pair) and cut["pair"].names == ["b", "c"]
    assert torch.equal(cut["pair"].x, x[1:3]) and torch.equal(cut["list"][1], x[1:3] + 1)
    assert torch.equal(cut["own"].x, x[1:3]) and cut["array"].tolist() == [[2, 3], [4, 5]]
    assert isinstance(slice_rows((x, x), 0, 1), tuple) and slice_rows([], 0, 1) == []


def test_a_batch_that_cannot_be_cut_is_told_how_to_be() -> None:
    with pytest.raises(
        DataError, match="a batch holds a object, which cannot be cut into rows; give it __len__ and __getitem__"
    ):
        slice_rows({"x": object()}, 0, 1)


def test_every_tensor_goes_to_the_device_and_the_rest_stays() -> None:
    x = torch.ones(2)
    moved = to_device({"a": [x, "text"], "b": Pair(x, 3), "own": Own(x)}, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1] == "text" and moved["b"].x.is_meta and moved["b"].names == 3
    assert isinstance(moved["b"], Pair) and isinstance(moved, Mapping) and moved["own"].moved
    assert isinstance(to_device((x,), CPU), tuple)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (3.0, "step 7: the loss is a float; it must be a scalar tensor"),
        (torch.ones(3), r"step 7: the loss has shape \[3\], not one number; take its mean"),
        (torch.tensor(1), "step 7: the loss is torch.int64; it must be a floating-point number"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(TrainError, match=words):
        checked_loss(loss, 7)


def test_a_loss_of_one_element_is_a_scalar() -> None:
    assert checked_loss(torch.ones(1, 1), 1).shape == ()
