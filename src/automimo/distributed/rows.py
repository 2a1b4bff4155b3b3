"""Rows of a stream in another order, forwards and backwards by a gather."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def permute_rows(x_MD: Tensor, place_M: Tensor, back_M: Tensor) -> Tensor:
    """Row i of the result is row place_M[i] of x; `back_M` is the inverse permutation. Both int64."""
    out: Tensor = _Permute.apply(x_MD, place_M, back_M)
    return out


class _Permute(torch.autograd.Function):
    """The backward is a gather as well, not the scatter that indexing would make of it."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, place_M: Tensor, back_M: Tensor) -> Tensor:
        ctx.save_for_backward(back_M)
        return x_MD.index_select(0, place_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        (back_M,) = ctx.saved_tensors
        return grad_MD.index_select(0, back_M), None, None
