"""The dispatcher over DeepEP's GPU kernels (package `deep_ep`), as thin as it can be. Not yet run on a GPU.

DeepEP sends each token once to every rank that has one of its experts, instead of once per expert, and adds up what
comes back. The choice of experts and the weights travel with the tokens.

T tokens, K experts per token, M tokens that arrive, N (token, expert) pairs of ours among them, D hidden width.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automimo.errors import ConfigError
from automimo.moe.dispatcher import ExpertMLP


class DeepEPDispatcher:
    """See `dispatcher.Dispatcher`. One instance serves all layers of a model: its buffer is large.

    hidden_size and the compute dtype give the size of a row. Raises ConfigError when the package is missing.
    """

    def __init__(self, n_experts: int, group: dist.ProcessGroup, hidden_size: int, dtype: torch.dtype) -> None:
        package = deep_ep()
        self.n_experts = n_experts
        ranks = group.size()
        row = hidden_size * torch.empty((), dtype=dtype).element_size()
        configs = package.Buffer.get_dispatch_config(ranks), package.Buffer.get_combine_config(ranks)
        nvlink = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs)
        self.buffer = package.Buffer(group, nvlink, rdma)

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, mlp: ExpertMLP) -> Tensor:
        """See `Dispatcher`."""
        exchange = _Exchange(self.buffer, self.n_experts)
        x_MD, weights_MK, local_MK = _Dispatch.apply(x_TD, weights_TK, indices_TK, exchange)
        counts = exchange.rows_per_expert
        # Choices of other ranks are -1; they sort behind ours.
        pairs = local_MK.flatten().to(torch.int64)
        last = len(counts)
        order_N = torch.where(pairs < 0, last, pairs).argsort(stable=True)[: sum(counts)]
        token_N = order_N.div(local_MK.shape[1], rounding_mode="floor")
        rows_ND = mlp(x_MD.index_select(0, token_N), torch.tensor(counts, dtype=torch.int64, device=x_TD.device))
        weights_N1 = weights_MK.flatten().index_select(0, order_N).unsqueeze(1)
        sums_MD = weights_MK.new_zeros(x_MD.shape).index_add(0, token_N, rows_ND.float() * weights_N1)
        out: Tensor = _Combine.apply(sums_MD.to(x_TD.dtype), exchange)
        return out


class _Exchange:
    """What one round trip has to remember: DeepEP's handle, and how many rows each expert of this rank gets."""

    def __init__(self, buffer: Any, n_experts: int) -> None:
        self.buffer = buffer
        self.n_experts = n_experts
        self.handle: Any = None
        self.rows_per_expert: list[int] = []


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, exchange: _Exchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        buffer = exchange.buffer
        per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(indices_TK, exchange.n_experts)
        x_MD, local_MK, weights_MK, exchange.rows_per_expert, exchange.handle, _ = buffer.dispatch(
            x_TD,
            topk_idx=indices_TK,
            topk_weights=weights_TK.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.exchange = exchange
        ctx.mark_non_differentiable(local_MK)
        return x_MD, weights_MK, local_MK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_MD, grad_weights_MK = grads[0], grads[1]
        exchange = ctx.exchange
        grad_x, grad_weights, _ = exchange.buffer.combine(
            grad_x_MD.contiguous(), exchange.handle, topk_weights=grad_weights_MK.float()
        )
        return grad_x, grad_weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums_MD: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        out: Tensor = exchange.buffer.combine(sums_MD, exchange.handle)[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        return exchange.buffer.dispatch(grads[0].contiguous(), handle=exchange.handle)[0], None


def deep_ep() -> ModuleType:
    """The package. Raises ConfigError that says how to do without."""
    try:
        return import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(
            "parallel.dispatcher: deepep needs the package deep_ep, which cannot be imported "
            f"({error}); install it (NVIDIA GPUs only), or use parallel.dispatcher=torch"
        ) from error
