"""Gradients of parameters that are sharded in different ways: their sum over ranks, their norm, clipping."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from automimo.distributed.local import local_tensor
from automimo.distributed.world import is_distributed, sum_numbers, world_size


def copies(tensor: Tensor, ranks: int) -> int:
    """How many of `ranks` ranks hold the same local part: a plain tensor is on all, a DTensor on those along its
    replicated dimensions (its mesh is taken to span all `ranks`)."""
    if not isinstance(tensor, DTensor):
        return ranks
    mesh = tensor.device_mesh
    return math.prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate())


@torch.no_grad()
def sum_replicated_gradients(parameters: Iterable[Tensor]) -> None:
    """Add up the gradients of the plain `parameters` over all ranks, in one all-reduce in fp32.

    FSDP does this for the parameters it has; the few small ones that are kept whole on every rank come here. One that
    no rank has used keeps no gradient; one that only some have used counts as 0 on the others.
    """
    plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    if not plain or not is_distributed():
        return
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain]
    used = torch.tensor([float(p.grad is not None) for p in plain], device=plain[0].device)
    flat = torch.cat([used, *(part.flatten().float() for part in parts)])
    dist.all_reduce(flat)
    used, *sums = flat.split([len(plain), *(p.numel() for p in plain)])
    for parameter, total, times in zip(plain, sums, used.tolist(), strict=True):
        if times:
            parameter.grad = total.view_as(parameter).to(parameter.dtype)


# torch's norm on a CPU adds up in fp32 in one go: relative errors of 9e-5 for 4 M values and 5e-3 for 64 M, so that a
# norm would depend on how tensors are cut. The norms of pieces of this many values are added up in fp64.
PIECE = 1 << 16


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Global L2 norm of the gradients over all ranks, the same number on each; parameters without one count as 0.

    Every rank adds up the squares of its own parts, divided by the number of ranks that hold the same ones, and one
    all-reduce in float64 adds up the ranks: however a parameter is sharded, each of its values counts once.
    """
    ranks = world_size()
    gradients: dict[tuple[int, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            part = local_tensor(parameter.grad)
            gradients.setdefault((copies(parameter, ranks), part.device), []).append(part)
    squares = 0.0
    for (number, device), parts in gradients.items():
        size = PIECE if device.type == "cpu" else None
        pieces = [piece for part in parts for piece in part.flatten().split(size or max(part.numel(), 1))]
        norms = torch._foreach_norm([piece for piece in pieces if piece.numel()])
        if norms:
            squares += float(torch.stack([norm.double() for norm in norms]).square().sum()) / number
    return math.sqrt(sum_numbers([squares])[0])


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], clip_norm: float, norm: float) -> None:
    """Scale the gradients by clip_norm / (norm + 1e-6) where the global `norm` exceeds `clip_norm`.

    The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
    """
    factor = clip_norm / (norm + 1e-6)
    if factor >= 1:
        return
    parts = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_([part for part in parts if part.numel()], factor)
