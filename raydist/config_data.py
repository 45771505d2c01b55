"""The sections of a job file that say what is trained, on which data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from raydist.config_types import Bool, Count, ImportPath, Part, PathText, Target, Text, Whole, kind_of

OneOrMore = Annotated[
    Annotated[Text, Tag("value")] | Annotated[list[Text], Field(min_length=1), Tag("list")], Discriminator(kind_of)
]
Paths = Annotated[
    Annotated[PathText, Tag("value")] | Annotated[list[PathText], Field(min_length=1), Tag("list")], Discriminator(kind_of)
]


class TaskConfig(Part):
    """What is trained: `model` and `loss` (and metrics), or a custom task object `target`."""

    model: Target | None = None
    loss: Target | None = None
    metrics: dict[Text, Target] = Field(default_factory=dict)
    inputs: Annotated[list[OneOrMore], Field(min_length=1)] | None = None
    targets: OneOrMore | None = None
    target: ImportPath | None = None
    args: dict[str, Any] = Field(default_factory=dict)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.target is not None:
            for key in ("model", "loss", "metrics", "inputs", "targets"):
                if self.is_set(key):
                    yield key, "a custom task (task.target) brings its own; remove one of the two"
            return
        if self.model is None and self.loss is None:
            yield "", "either model and loss, or target (a custom task) is needed"
        elif self.model is None or self.loss is None:
            yield "model" if self.model is None else "loss", "missing; model and loss come together"
        if self.args:
            yield "args", "only for a custom task (task.target); a model's own go to task.model.args"
        if self.targets is not None and self.inputs is None:
            yield "targets", "needs task.inputs too"


class Shuffle(Part):
    """Shuffle within a window of rows; `auto` chooses it."""

    window: Count | Literal["auto"] = "auto"


ShuffleSetting = Annotated[Annotated[Bool, Tag("value")] | Annotated[Shuffle, Tag("map")], Discriminator(kind_of)]


class Images(Part):
    """How image files are decoded: `size` is [height, width]; None keeps each file's own."""

    size: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    mode: Literal["RGB", "L", "RGBA"] = "RGB"


class Loader(Part):
    """torch DataLoader settings of a map-style Dataset."""

    num_workers: Whole = 0
    pin_memory: Bool | Literal["auto"] = "auto"
    persistent_workers: Bool = False
    prefetch_factor: Count | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        for key in ("persistent_workers", "prefetch_factor"):
            if self.num_workers == 0 and self.is_set(key):
                yield key, "needs loader processes: set num_workers >= 1"


class DatasetConfig(Part):
    """One data set: files at `path`, or a torch Dataset to import (`target`)."""

    path: Paths | None = None
    format: Literal["parquet", "csv", "json", "images"] | None = None
    target: ImportPath | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    shuffle: ShuffleSetting = False
    drop_last: Bool = False
    columns: Annotated[list[Text], Field(min_length=1)] | None = None
    transforms: list[Target] = Field(default_factory=list)
    rows: Literal["same", "changes"] = "same"
    nulls: Literal["raise", "drop", "fill"] = "raise"
    fill_value: float | str | None = None
    images: Images = Field(default_factory=Images)
    loader: Loader = Field(default_factory=Loader)
    sampler: Target | None = None
    collate: ImportPath | None = None
    engine: Literal["auto", "direct", "ray"] = "auto"

    def problems(self) -> Iterator[tuple[str, str]]:
        if (self.path is None) == (self.target is None):
            yield "", "exactly one of path (files) and target (a torch Dataset) is needed"
            return
        if self.path is None:
            for key in ("format", "columns", "transforms", "rows", "nulls", "fill_value", "images", "engine"):
                if self.is_set(key):
                    yield key, "only for files (path); a torch Dataset (target) brings its own"
        else:
            for key in ("args", "loader", "sampler", "collate"):
                if self.is_set(key):
                    yield key, "only for a torch Dataset (target), not for files (path)"
        if self.sampler is not None and self.shuffle is not False:
            yield "shuffle", "a sampler decides the order already; remove one of the two"
        if self.path is not None and (self.nulls == "fill") != (self.fill_value is not None):
            yield "fill_value", "goes with nulls: fill, and only with it"
        if self.path is not None and self.is_set("images") and self.format in ("csv", "json"):
            yield "images", f"{self.format} files hold no images"
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            yield "columns", "a column is named twice"


class FitConfig(Part):
    """What is learned from the training set before training starts."""

    index: list[Text] = Field(default_factory=list)
    normalize: list[Text] = Field(default_factory=list)

    def problems(self) -> Iterator[tuple[str, str]]:
        for key, names in (("index", self.index), ("normalize", self.normalize)):
            if len(set(names)) < len(names):
                yield key, "a column is named twice"
        if both := sorted(set(self.index) & set(self.normalize)):
            yield "normalize", f"{', '.join(both)}: a column is indexed or normalized, not both"


class DataConfig(Part):
    """The data sets; `changed`: what resuming does when the data is not what the checkpoint saw."""

    train: DatasetConfig
    eval: DatasetConfig | None = None
    fit: FitConfig | None = None
    changed: Literal["refuse", "accept"] = "refuse"
