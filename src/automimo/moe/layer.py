"""The mixture-of-experts layer: router and experts over the real tokens of a stream.

T rows of the stream, N of them real tokens, D hidden width, E experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automimo.moe.config import MoEConfig
from automimo.moe.experts import GroupedExperts
from automimo.moe.gate import Documents, Gate, RouterStats


class MoE(nn.Module):
    """Routed experts in place of a dense MLP. `gate` and `experts` hold everything there is to train or save.

    `aux_loss_scale` is what the model hands to `attach_aux_loss` with this layer's balance loss; `set_aux_loss_scale`
    sets it on all layers (1 / tokens of the optimizer step).
    """

    def __init__(self, config: MoEConfig, experts_backend: str = "torch_mm") -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config)
        self.experts = GroupedExperts(config, experts_backend)
        self.aux_loss_scale = 1.0

    def reset_parameters(self, std: float, generator: torch.Generator | None = None) -> None:
        """Normal weights of standard deviation `std`, zero correction bias, nothing counted."""
        self.gate.reset_parameters(std, generator)
        self.experts.reset_parameters(std, generator)

    def forward(
        self,
        x_TD: Tensor,
        *,
        token_indices: Tensor | None = None,
        documents: Documents | None = None,
        context: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, RouterStats]:
        """Apply the layer to a stream `x_TD` [T, D] (or [..., D], read as one stream) and say what the router did.

        token_indices [N] int64: the rows that are real tokens, each once (None: all). The others go to no expert, count
        nowhere and come back as 0. documents and context: for the balance loss, see `Gate.forward`.
        Nothing of the module changes; hand the stats to `gate.record`, once, outside checkpointed regions.
        """
        shape = x_TD.shape
        x_TD = x_TD.reshape(-1, shape[-1])
        x_ND = x_TD if token_indices is None else x_TD.index_select(0, token_indices)
        if documents is not None and token_indices is not None:
            documents = documents._replace(ids_T=documents.ids_T.index_select(0, token_indices))
        weights_NK, indices_NK, load_E, aux_loss = self.gate(x_ND, documents, context)
        y_TD = self.experts(x_ND, weights_NK, indices_NK)
        if token_indices is not None:
            y_TD = _Spread.apply(y_TD, token_indices, x_TD.shape[0])
        return y_TD.view(shape), RouterStats(load_E, aux_loss)


class _Spread(torch.autograd.Function):
    """Rows [N, D] to their places among T rows, zeros elsewhere.

    As `index_copy`, which however saves its index: under activation checkpointing its backward starts the second
    forward pass before FSDP has seen a gradient of the experts, so a rank with padding would gather router and experts
    in another order than ranks without, and their collectives would mix.
    """

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, place_N: Tensor, rows: int) -> Tensor:
        ctx.place_N = place_N
        return y_ND.new_zeros(rows, y_ND.shape[1]).index_copy_(0, place_N, y_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return grad_TD.index_select(0, ctx.place_N), None, None
