"""Ray Train's `TorchTrainer` without the processes that a run of raydist does not use."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchTrainer

_UNUSED = ("PlacementGroupCleanerCallback", "DatasetsCallback")


class LeanTrainer(TorchTrainer):
    """A `TorchTrainer` that starts no cleaner of placement groups and no manager of datasets.

    Each would be a process that imports Ray Train, Ray Data and pandas, about three seconds of a CPU at every start and restart
    (Ray 2.60). What a killed controller leaves, `leftovers` takes away; raydist's workers open their data themselves.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [callback for callback in callbacks if type(callback).__name__ not in _UNUSED]
