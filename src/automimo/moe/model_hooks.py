"""What a trainer does to all mixture-of-experts layers of a model at once, and how it looks at their balance.

L layers, E experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automimo.distributed.world import is_distributed
from automimo.moe.layer import MoE


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The mixture-of-experts layers of `model` by module name, in the order in which it holds them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def set_aux_loss_scale(model: nn.Module, scale: float) -> None:
    """Set what each layer's balance loss is multiplied by: 1 / (tokens of the optimizer step), for a mean over them."""
    for layer in moe_layers(model).values():
        layer.aux_loss_scale = scale


def attach_aux_loss(hidden: Tensor, aux_loss: Tensor | None, scale: float) -> Tensor:
    """Return `hidden` unchanged, such that its backward also sends the gradient `scale` into `aux_loss`.

    The balance loss is then trained without being part of the loss that is reported, and whatever the loss on top is
    divided by does not touch it.
    """
    if aux_loss is None:
        return hidden
    out: Tensor = _AttachAuxLoss.apply(hidden, aux_loss, scale)
    return out


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, aux_loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.like = torch.empty_like(aux_loss, device="meta")  # shape and dtype only
        ctx.device = aux_loss.device
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.like, ctx.scale, device=ctx.device), None


def update_router_biases(model: nn.Module) -> None:
    """`Gate.update_bias` on every layer whose config asks for it; call it once after each optimizer step."""
    for layer in moe_layers(model).values():
        if layer.config.gate_bias_update_factor > 0:
            layer.gate.update_bias()


def expert_load(model: nn.Module) -> Tensor:
    """Tokens per layer and expert recorded since the last reset: int64 [L, E] (a copy); [0, 0] without such layers."""
    loads = [layer.gate.expert_load for layer in moe_layers(model).values()]
    return torch.stack(loads) if loads else torch.zeros(0, 0, dtype=torch.int64)


def sum_expert_load(model: nn.Module) -> None:
    """Add up the recorded load over all ranks, in one all-reduce; without a process group it is complete already."""
    gates = [layer.gate for layer in moe_layers(model).values()]
    if not gates or not is_distributed():
        return
    total_LE = torch.stack([gate.expert_load for gate in gates])
    dist.all_reduce(total_LE)
    for gate, load_E in zip(gates, total_LE, strict=True):
        gate.expert_load.copy_(load_E)


def reset_expert_load(model: nn.Module) -> None:
    """Forget the recorded load of all layers; call it at the start of each optimizer step."""
    for layer in moe_layers(model).values():
        layer.gate.reset_load()
