"""Rows of a stream in another order, forwards and backwards by a gather."""

from collections.abc import Sequence
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


def split_permuted(x_MW: Tensor, widths: Sequence[int], place_M: Tensor, back_M: Tensor) -> tuple[Tensor, ...]:
    """Columns of `permute_rows` in parts of these widths, each of them contiguous: what slices of the permuted rows are
    not, so that whoever needs them contiguous would copy everything once more."""
    parts: tuple[Tensor, ...] = _SplitPermuted.apply(x_MW, tuple(widths), place_M, back_M)
    return parts


class _SplitPermuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MW: Tensor, widths: tuple[int, ...], place_M: Tensor, back_M: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(back_M)
        ctx.widths = widths
        return tuple(part.index_select(0, place_M) for part in x_MW.split(widths, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (back_M,) = ctx.saved_tensors
        grad_MW = grads[0].new_empty(back_M.numel(), sum(ctx.widths))
        for part, grad in zip(grad_MW.split(ctx.widths, 1), grads, strict=True):
            torch.index_select(grad, 0, back_M, out=part)
        return grad_MW, None, None, None
