"""Mixed precision as one object: autocast for the forward, a GradScaler for fp16, one clip per optimizer step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from raydist.config import Precision as PrecisionConfig


class Precision:
    """`fp32` does nothing, `bf16` autocasts, `fp16` autocasts and scales the loss.

    The order inside a step is the one the AMP recipe gives: scale the loss, backward, unscale, measure and clip the global
    norm once, step, update the scale.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.name = config.name
        self.device = device
        self.scaler: torch.amp.GradScaler | None = None
        if config.name == "fp16":
            self.scaler = torch.amp.GradScaler(
                device.type,
                init_scale=config.init_scale,
                growth_factor=config.growth_factor,
                backoff_factor=config.backoff_factor,
                growth_interval=config.growth_interval,
            )

    def forward(self) -> AbstractContextManager[Any]:
        """The context in which forward and loss are computed."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.name == "bf16" else torch.float16)

    def backward(self, loss: torch.Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def gradient_norm(
        self,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        norm_of: Callable[[list[torch.nn.Parameter]], float] | None = None,
    ) -> float:
        """Unscale, measure the global L2 norm of all gradients, and scale them down to `clip` when they are above it.

        Returns the norm before clipping; inf or nan when a gradient is not finite, and then nothing was clipped. The
        gradients are the all-reduced ones, so every rank gets the same number. `norm_of` measures where a rank holds only
        a part of the model.
        """
        if self.scaler:
            self.scaler.unscale_(optimizer)
        held: list[torch.nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in held if p.grad is not None]
        norm = total_norm(grads, self.device) if norm_of is None else norm_of(held)
        if clip is not None and clip < norm < float("inf") and grads:
            torch._foreach_mul_(grads, clip / norm)
        return norm

    def step(self, optimizer: torch.optim.Optimizer, apply: bool) -> None:
        """Step the optimizer if `apply`, and let the scaler learn from what `gradient_norm` saw."""
        if self.scaler is None:
            if apply:
                optimizer.step()
            return
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:  # a rank of a pipeline without a gradient of its own: it follows the others
            found[self.device] = torch.zeros((), device=self.device)
        if not apply:  # wherever in the model the overflow was
            for flag in found.values():
                flag.fill_(1.0)
        else:
            self.scaler.step(optimizer)
        self.scaler.update()

    @property
    def scale(self) -> float | None:
        return None if self.scaler is None else float(self.scaler.get_scale())

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def total_norm(grads: Iterable[torch.Tensor], device: torch.device) -> float:
    """Global L2 norm over tensors that may lie on several devices: the norm of the norms."""
    norms = torch._foreach_norm(list(grads)) if (grads := list(grads)) else ()
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([n.to(device, torch.float64) for n in norms])))
