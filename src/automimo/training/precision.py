"""Master weights: what the optimizer updates is always fp32, whatever the model computes in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MasterWeights:
    """The fp32 weights of a model, by parameter name, with fp32 gradients that survive accumulation.

    In fp32 the masters are the model's own parameters and nothing is copied. In bf16 the model holds rounded copies and
    computes with them (its router, correction bias and sinks refuse the cast and stay fp32); as soon as a micro-batch
    has made the gradient of a parameter, it is added to the master's fp32 gradient and freed, so sums over
    micro-batches are as exact as in fp32 and no second set of gradients is held. `publish` rounds the masters into the
    model after a step.

    Not autocast: that would round the weights again in every forward and keep the residual stream in fp32, unlike
    FSDP2's mixed precision, which a run on several GPUs uses.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Take over the fp32 parameters of `model`, whose `requires_grad` is set, and cast the model to `dtype`."""
        fp32 = {name: parameter.data for name, parameter in model.named_parameters()}
        model.to(dtype)
        self.by_name: dict[str, Tensor] = {}
        self._rounded: list[tuple[nn.Parameter, Tensor]] = []
        for name, parameter in model.named_parameters():
            if parameter.dtype == fp32[name].dtype:
                self.by_name[name] = parameter
                continue
            master = nn.Parameter(fp32[name], requires_grad=parameter.requires_grad)
            self.by_name[name] = master
            self._rounded.append((parameter, master))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_hand_over(master))

    @property
    def trainable(self) -> dict[str, Tensor]:
        return {name: master for name, master in self.by_name.items() if master.requires_grad}

    def zero_grad(self) -> None:
        """Free all gradients. A parameter that a step never uses then has none and is left alone by the optimizer."""
        for master in self.by_name.values():
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the parameters that the model computes with."""
        for parameter, master in self._rounded:
            parameter.copy_(master)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """While this is open the model itself holds the fp32 masters, for an export without rounding."""
        held = [parameter.data for parameter, _ in self._rounded]
        for parameter, master in self._rounded:
            parameter.data = master.data
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._rounded, held, strict=True):
                parameter.data = data


def _hand_over(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return hook
