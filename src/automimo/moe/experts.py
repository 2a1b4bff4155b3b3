"""The experts of a layer as two stacked matrices, and the steps that bring tokens to them and back.

T tokens, K experts per token, N = T * K rows in expert order, D hidden width, I expert width, E experts.

dispatch -> expert_mlp -> combine are plain functions: expert parallelism puts an exchange of rows around `expert_mlp`
and leaves all three as they are.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from automimo.errors import ConfigError
from automimo.fp32 import compute_dtype, without_autocast
from automimo.moe.config import EXPERT_BACKENDS, MoEConfig
from automimo.moe.gate import count


class ExpertOrder(NamedTuple):
    """The N = T * K (token, choice) pairs sorted by expert; pairs of one expert keep their order.

    `token_N`: which token a row comes from; `pair_N`: which pair t * K + k; `row_TK`: where a pair went (the inverse);
    `counts_E`: rows per expert. All int64.
    """

    token_N: Tensor
    pair_N: Tensor
    row_TK: Tensor
    counts_E: Tensor


def sort_by_expert(indices_TK: Tensor, n_experts: int) -> ExpertOrder:
    """Order the pairs of `indices_TK` (int64) by expert."""
    flat = indices_TK.flatten()
    pair_N = flat.argsort(stable=True)
    row_N = torch.empty_like(pair_N).scatter_(0, pair_N, torch.arange(flat.numel(), device=flat.device))
    token_N = pair_N.div(indices_TK.shape[1], rounding_mode="floor")
    return ExpertOrder(token_N, pair_N, row_N.view_as(indices_TK), count(flat, n_experts))


def dispatch(x_TD: Tensor, order: ExpertOrder) -> Tensor:
    """Copy each token to the rows of its K experts: [N, D]."""
    return _Dispatch.apply(x_TD, order.token_N, order.row_TK)


def combine(y_ND: Tensor, weights_TK: Tensor, order: ExpertOrder) -> Tensor:
    """Sum of each token's K expert outputs times its router weights, added up in fp32, in the dtype of `y_ND`: [T, D]."""
    return _Combine.apply(y_ND, weights_TK, order.token_N, order.pair_N, order.row_TK)


def _sum_rows(y_ND: Tensor, row_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """sum_k w[t, k] * y[row[t, k]] in at least fp32.

    K gathers in a fixed order instead of one index_add: the same bits on every run, on CPU and GPU, and no N x D
    intermediate.
    """
    dtype = torch.promote_types(y_ND.dtype, torch.float32)
    out_TD = y_ND.new_zeros((row_TK.shape[0], y_ND.shape[1]), dtype=dtype)
    for k in range(row_TK.shape[1]):
        rows_TD = y_ND.index_select(0, row_TK[:, k])
        if weights_TK is None:
            out_TD += rows_TD
        else:
            out_TD.addcmul_(rows_TD.to(dtype), weights_TK[:, k : k + 1].to(dtype))
    return out_TD


class _Dispatch(torch.autograd.Function):
    """index_select whose backward gathers as well; PyTorch's own adds rows up atomically on a GPU, and in bf16."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, token_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return x_TD.index_select(0, token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _sum_rows(grad_ND, row_TK, None).to(grad_ND.dtype), None, None


class _Combine(torch.autograd.Function):
    """The weighted sum, without keeping the weighted rows."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, y_ND: Tensor, weights_TK: Tensor, token_N: Tensor, pair_N: Tensor, row_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_ND, weights_TK, token_N, pair_N, row_TK)
        return _sum_rows(y_ND, row_TK, weights_TK).to(y_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_ND, weights_TK, token_N, pair_N, row_TK = ctx.saved_tensors
        grad_ND = grad_TD.index_select(0, token_N)
        grad_weights = grad_y = None
        if ctx.needs_input_grad[1]:
            grad_N = torch.linalg.vecdot(grad_ND.to(weights_TK.dtype), y_ND.to(weights_TK.dtype))
            grad_weights = grad_N.index_select(0, row_TK.flatten()).view_as(row_TK)
        if ctx.needs_input_grad[0]:
            weights_N = weights_TK.flatten().index_select(0, pair_N)
            grad_y = (grad_ND * weights_N.unsqueeze(1)).to(y_ND.dtype)
        return grad_y, grad_weights, None, None, None


def expert_mlp(x_ND: Tensor, counts_E: Tensor, gate_up_EDI: Tensor, down_EID: Tensor, backend: str) -> Tensor:
    """down(silu(gate x) * up x) of each row with the weights of its expert.

    x_ND [N, D], rows in expert order, `counts_E` int64 of them per expert (they must add up to N);
    gate_up [E, D, 2 I] (gate first, then up), down [E, I, D]; returns [N, D].
    """
    matmul = _grouped if backend == "torch_mm" and _fits_grouped(x_ND, gate_up_EDI, down_EID) else _looped
    gate_up = matmul(x_ND, counts_E, gate_up_EDI)
    gate_NI, up_NI = gate_up.chunk(2, dim=-1)
    return matmul(F.silu(gate_NI) * up_NI, counts_E, down_EID)


def _fits_grouped(x_ND: Tensor, *weights: Tensor) -> bool:
    """grouped_mm takes these dtypes only, and rows of a multiple of 16 bytes. Zero rows go round it: nothing to group."""
    if x_ND.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x_ND.shape[0] == 0:
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

    `backend`: `torch_mm`, one grouped matmul per projection (a loop where the dtype or the row width does not allow it),
    or `torch`, always the loop.
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
