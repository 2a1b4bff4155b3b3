"""Tokens in the order of their experts: how rows are sorted, gathered, and added up again.

T tokens, K experts per token, N = T * K rows in expert order, D hidden width, E experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automimo.moe.gate import count

# Tokens whose fp32 rows are in flight at a time when expert outputs are added up: 4 MB each at hidden width 256.
_BLOCK = 4096


class ExpertOrder(NamedTuple):
    """The N = T * K (token, choice) pairs sorted by expert; pairs of one expert keep their order.

    `token_N`: the token a row comes from; `row_TK`: the row of each pair, the inverse; `counts_E`: rows per expert. All
    int64.
    """

    token_N: Tensor
    row_TK: Tensor
    counts_E: Tensor


def sort_by_expert(indices_TK: Tensor, n_experts: int) -> ExpertOrder:
    """Order the pairs of `indices_TK` (int64) by expert."""
    flat = indices_TK.flatten()
    pair_N = flat.argsort(stable=True)
    row_N = torch.empty_like(pair_N).scatter_(0, pair_N, torch.arange(flat.numel(), device=flat.device))
    token_N = pair_N.div(indices_TK.shape[1], rounding_mode="floor")
    return ExpertOrder(token_N, row_N.view_as(indices_TK), count(flat, n_experts))


def dispatch(x_TD: Tensor, order: ExpertOrder) -> Tensor:
    """Copy each token to the rows of its K experts: [N, D]."""
    rows_ND: Tensor = _Dispatch.apply(x_TD, order.token_N, order.row_TK)
    return rows_ND


def combine(y_ND: Tensor, weights_TK: Tensor, order: ExpertOrder) -> Tensor:
    """Sum of each token's K rows of `y_ND` times its router weights: fp32 inside, dtype of `y_ND` outside, [T, D]."""
    y_TD: Tensor = _Combine.apply(y_ND, weights_TK, order.row_TK)
    return y_TD


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sum_rows(y_ND: Tensor, row_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """sum_k w[t, k] * y[row[t, k]], added up in at least fp32 and rounded once.

    K gathers in a fixed order instead of one index_add: the same bits on every run, on CPU and GPU, and no intermediate
    of N rows.
    """
    dtype = _accumulation_dtype(y_ND)
    out_TD = y_ND.new_empty((row_TK.shape[0], y_ND.shape[1]))
    for start in range(0, row_TK.shape[0], _BLOCK):
        block = slice(start, start + _BLOCK)
        sum_BD = y_ND.new_zeros((row_TK[block].shape[0], y_ND.shape[1]), dtype=dtype)
        for k in range(row_TK.shape[1]):
            rows_BD = y_ND.index_select(0, row_TK[block, k])
            if weights_TK is None:
                sum_BD += rows_BD
            else:
                sum_BD.addcmul_(rows_BD.to(dtype), weights_TK[block, k : k + 1].to(dtype))
        out_TD[block] = sum_BD
    return out_TD


class _Dispatch(torch.autograd.Function):
    """index_select whose backward gathers as well; on a GPU, PyTorch's own adds up in whatever order threads arrive."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return x_TD.index_select(0, token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _sum_rows(grad_ND, row_TK, None), None, None


class _Combine(torch.autograd.Function):
    """The weighted sum, without keeping the weighted rows and without their fp32 copies all at once."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(y_ND, weights_TK, row_TK)
        return _sum_rows(y_ND, row_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_ND, weights_TK, row_TK = ctx.saved_tensors
        dtype = _accumulation_dtype(y_ND)
        grad_y = torch.empty_like(y_ND) if ctx.needs_input_grad[0] else None
        grad_weights = torch.empty_like(weights_TK) if ctx.needs_input_grad[1] else None
        for start in range(0, row_TK.shape[0], _BLOCK):
            block = slice(start, start + _BLOCK)
            grad_BD = grad_TD[block].to(dtype)
            for k in range(row_TK.shape[1]):
                row_B = row_TK[block, k]
                if grad_weights is not None:
                    grad_weights[block, k] = (y_ND.index_select(0, row_B).to(dtype) * grad_BD).sum(1)
                if grad_y is not None:
                    # Every row belongs to one (token, choice) pair, so this fills each exactly once.
                    grad_y.index_copy_(0, row_B, (grad_BD * weights_TK[block, k : k + 1].to(dtype)).to(y_ND.dtype))
        return grad_y, grad_weights, None
