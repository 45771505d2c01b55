"""A model as a list of layers, each of which takes what the one before gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from raydist.errors import ConfigError


@dataclass(frozen=True)
class Layer:
    """One step of a model's forward. `modules` hold every parameter and buffer that `run` uses.

    `run` takes the tensors that the layer before gave (one, or a tuple's entries) and gives a tensor or a tuple of tensors.
    """

    name: str
    run: Callable[..., Any]
    modules: list[nn.Module] = field(default_factory=list)


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of an `nn.Sequential`, or what the model's `pipeline_layers()` gives: modules or `Layer`s, in order.

    Raises ConfigError for any other model, and when layers leave out a parameter.
    """
    given = getattr(model, "pipeline_layers", None)
    if given is None and not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"strategy pipeline: cannot cut a {type(model).__name__}: make it an nn.Sequential, or give it a method "
            "pipeline_layers() that returns its layers in order (modules, or raydist.pipeline.Layer)"
        )
    names = {id(module): name for name, module in model.named_modules()}
    found = list(model.children()) if given is None else list(given())
    layers = []
    for number, item in enumerate(found):
        if isinstance(item, Layer):
            layers.append(item)
        elif isinstance(item, nn.Module):
            layers.append(Layer(names.get(id(item), str(number)), item, [item]))
        else:
            raise ConfigError(
                f"strategy pipeline: pipeline_layers() gave a {type(item).__name__} at {number}; modules and Layers are allowed"
            )
    held = {id(p) for layer in layers for module in layer.modules for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held:
            raise ConfigError(f"strategy pipeline: parameter {name!r} is in no layer; name its module in a Layer's modules")
    return layers
