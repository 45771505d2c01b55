"""What job.yaml trains: a small convolutional net on images. It is yours: change it as you like."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy


class VisionTask:
    """Images uint8 (rows, channels, height, width), 0..255, and class numbers (rows,)."""

    def __init__(self, classes: int, channels: int = 3, width: int = 32) -> None:
        self.classes, self.channels, self.width = classes, channels, width

    def build_model(self) -> nn.Module:
        widths = [self.channels, self.width, 2 * self.width, 4 * self.width]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2, ceil_mode=True)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * self.width, self.classes))

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (rows, classes) and class numbers (rows,)."""
        return model(batch["image"].float() / 127.5 - 1), batch["label"]  # pixels to [-1, 1]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy in nats."""
        return functional.cross_entropy(*self.predict(model, batch))

    def metrics(self) -> dict[str, Metric]:
        return {"accuracy": MulticlassAccuracy(self.classes, average="micro")}
