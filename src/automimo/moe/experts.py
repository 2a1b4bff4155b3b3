"""The experts of a layer as two stacked matrices.

T tokens, K experts per token, N rows in expert order, D hidden width, I expert width, E experts.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from automimo.errors import ConfigError
from automimo.fp32 import compute_dtype, without_autocast
from automimo.moe.config import EXPERT_BACKENDS, MoEConfig
from automimo.moe.dispatcher import Dispatcher, LocalDispatcher


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
    `torch`, always the loop. `dispatcher` brings the tokens here and back; under expert parallelism it is replaced, and
    the two parameters are then DTensors of which this rank has E / ranks experts.
    """

    dispatcher: Dispatcher

    def __init__(self, config: MoEConfig, backend: str = "torch_mm") -> None:
        super().__init__()
        if backend not in EXPERT_BACKENDS:
            raise ConfigError(f"experts backend is {backend!r}; the choices are {', '.join(EXPERT_BACKENDS)}")
        self.backend = backend
        self.dispatcher = LocalDispatcher(config.n_routed_experts)
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
        dtype = compute_dtype(x_TD)
        with without_autocast(x_TD.device):
            gate_up, down = (_local(stack).to(dtype) for stack in (self.gate_and_up_projs, self.down_projs))
            mlp = partial(expert_mlp, gate_up_EDI=gate_up, down_EID=down, backend=self.backend)
            return self.dispatcher(x_TD.to(dtype), weights_TK, indices_TK, mlp).to(x_TD.dtype)


def _local(stack: Tensor) -> Tensor:
    """The experts of this rank, for the matmul: its gradient is that of the DTensor's local part."""
    return stack.to_local() if isinstance(stack, DTensor) else stack
