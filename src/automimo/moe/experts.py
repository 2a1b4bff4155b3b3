"""The experts of a layer as two stacked matrices, and the steps that bring tokens to them and back.

T tokens, K experts per token, N = T * K rows in expert order, D hidden width, I expert width, E experts.

dispatch -> expert_mlp -> combine are plain functions: expert parallelism puts an exchange of rows around `expert_mlp`
and leaves all three as they are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from automimo.errors import ConfigError
from automimo.fp32 import compute_dtype, without_autocast
from automimo.moe.config import EXPERT_BACKENDS, MoEConfig
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


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [N, 2 I] rows, keeping nothing but its input.

    The plain form keeps silu(gate) too, and in bf16 the whole layer takes 1.1x to 1.2x as long with it.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate_NI, up_NI = gate_up.chunk(2, dim=-1)
        return F.silu(gate_NI).mul_(up_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NI: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate_NI, up_NI = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(F.silu(gate_NI), grad_NI, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_NI * up_NI, gate_NI, grad_input=grad_gate)
        return grad


def expert_mlp(x_ND: Tensor, counts_E: Tensor, gate_up_EDI: Tensor, down_EID: Tensor, backend: str) -> Tensor:
    """down(silu(gate x) * up x) of each row with the weights of its expert.

    x_ND [N, D], rows in expert order, `counts_E` int64 of them per expert (they must add up to N);
    gate_up [E, D, 2 I] (gate first, then up), down [E, I, D]; returns [N, D]. The grouped matmul wants a contiguous
    gradient for it, which `combine` gives and a bare `.sum()` does not.
    """
    matmul = _grouped if backend == "torch_mm" and _fits_grouped(x_ND, gate_up_EDI, down_EID) else _looped
    gate_up = matmul(x_ND, counts_E, gate_up_EDI)
    return matmul(_SwiGLU.apply(gate_up), counts_E, down_EID)


def _fits_grouped(x_ND: Tensor, *weights: Tensor) -> bool:
    """Whether grouped_mm takes these: its dtypes, rows of a multiple of 16 bytes, and at least one of them."""
    dtypes = {torch.bfloat16}
    if x_ND.device.type == "cpu":  # elsewhere it promises no more than bf16
        dtypes |= {torch.float32, torch.float16}
    if x_ND.dtype not in dtypes or x_ND.shape[0] == 0:
        return False
    return all(width * w.element_size() % 16 == 0 for w in weights for width in w.shape[1:])


def _grouped(x_NA: Tensor, counts_E: Tensor, weight_EAB: Tensor) -> Tensor:
    # Rows past the last offset would come back as garbage: the last offset is N by construction of the counts.
    return F.grouped_mm(x_NA, weight_EAB, offs=counts_E.cumsum(0).to(torch.int32))


def _looped(x_NA: Tensor, counts_E: Tensor, weight_EAB: Tensor) -> Tensor:
    # unbind, never weight[e]: the backward of each slice would write a gradient of the whole stack (22 s against 0.24 s
    # at 256 experts). Experts without rows take part, so that every weight gets a gradient, if only zero.
    pieces = zip(x_NA.split(counts_E.tolist()), weight_EAB.unbind(0), strict=True)
    return torch.cat([x @ weight for x, weight in pieces])


class GroupedExperts(nn.Module):
    """All experts of a layer: `gate_and_up_projs` [E, D, 2 I] (gate first, then up) and `down_projs` [E, I, D].

    `backend`: `torch_mm`, one grouped matmul per projection (a loop where dtype or row width do not allow it), or
    `torch`, always the loop.
    """

    def __init__(self, config: MoEConfig, backend: str = "torch_mm") -> None:
        super().__init__()
        if backend not in EXPERT_BACKENDS:
            raise ConfigError(f"experts backend is {backend!r}; the choices are {', '.join(EXPERT_BACKENDS)}")
        self.backend = backend
        experts, dim, inter = config.n_routed_experts, config.dim, config.moe_inter_dim
        dtype = getattr(torch, config.dtype)
        self.gate_and_up_projs = nn.Parameter(torch.empty(experts, dim, 2 * inter, dtype=dtype))
        self.down_projs = nn.Parameter(torch.empty(experts, inter, dim, dtype=dtype))
        self.reset_parameters(0.02)

    @torch.no_grad()
    def reset_parameters(self, std: float, generator: torch.Generator | None = None) -> None:
        """Normal weights of standard deviation `std`."""
        self.gate_and_up_projs.normal_(0.0, std, generator=generator)
        self.down_projs.normal_(0.0, std, generator=generator)

    def forward(self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
        """Send every row of `x_TD` to its experts and add up what comes back: [T, D] in the dtype of `x_TD`.

        weights_TK fp32, indices_TK int64. Runs in the dtype of `x_TD`, or of autocast where that is on.
        """
        order = sort_by_expert(indices_TK, self.gate_and_up_projs.shape[0])
        dtype = compute_dtype(x_TD)
        with without_autocast(x_TD.device):
            rows_ND = dispatch(x_TD.to(dtype), order)
            gate_up, down = self.gate_and_up_projs.to(dtype), self.down_projs.to(dtype)
            y_ND = expert_mlp(rows_ND, order.counts_E, gate_up, down, self.backend)
            return combine(y_ND, weights_TK, order).to(x_TD.dtype)
