"""What a task is given in place of the model: at the first stage to see its inputs, at the last to give it the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raydist.errors import TrainError


class Inputs(Exception):
    """A model was called: `args` are its inputs."""


class StandIn(nn.Module):
    """Looks like `model` to a task; the call itself is `answer(args)`."""

    def __init__(self, model: nn.Module, answer: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_answer", answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Inputs as the task passes them: positional tensors."""
        if kwargs or not args or not all(isinstance(a, torch.Tensor) for a in args):
            raise TrainError(
                "strategy pipeline: the task must call the model with positional tensors only; what else it needs belongs "
                "into the model"
            )
        return object.__getattribute__(self, "_answer")(args)


def seeing(model: nn.Module) -> StandIn:
    """A model that raises `Inputs` with what it is called with."""

    def answer(args: tuple[torch.Tensor, ...]) -> Any:
        raise Inputs(*args)

    return StandIn(model, answer)


def giving(model: nn.Module, output: Any) -> StandIn:
    """A model that gives `output`, whatever it is called with."""
    return StandIn(model, lambda args: output)
