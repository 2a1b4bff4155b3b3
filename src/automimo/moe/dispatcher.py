"""How tokens get to the experts and back: on one device, or over the ranks that share the experts of a layer.

T tokens, K experts per token, N = T * K rows in expert order, M rows that arrive at this rank, D hidden width, E
experts in all, R ranks with E / R experts each.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from automimo.distributed.rows import permute_rows
from automimo.errors import ConfigError
from automimo.moe.token_order import combine, dispatch, sort_by_expert

ExpertMLP = Callable[[Tensor, Tensor], Tensor]
"""(rows [M, D] in the order of the experts of this rank, int64 rows per expert) -> [M, D]."""


class Dispatcher(Protocol):
    """The seam between the router and the experts: whoever implements it owns the way there and back."""

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, mlp: ExpertMLP) -> Tensor:
        """Sum over the K chosen experts of weight * mlp(x), [T, D] in the dtype of x.

        weights_TK fp32, indices_TK int64 in 0 .. E - 1. `mlp` is called once, also where no row arrives, so that the
        weights of idle experts take part in the backward pass.
        """
        ...


class LocalDispatcher:
    """All experts are here."""

    def __init__(self, n_experts: int) -> None:
        self.n_experts = n_experts

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, mlp: ExpertMLP) -> Tensor:
        """See `Dispatcher`."""
        order = sort_by_expert(indices_TK, self.n_experts)
        return combine(mlp(dispatch(x_TD, order), order.counts_E), weights_TK, order)


class AllToAllDispatcher:
    """Rank r of `group` has experts r * E / R to (r + 1) * E / R; rows travel by an uneven all-to-all.

    The host waits for the device once, for the numbers of rows, which the all-to-all needs. They are exchanged while
    the rows are gathered, and the rows travel while their order on arrival is worked out. Ranks may bring different
    numbers of tokens, none included, and experts may get none.
    """

    def __init__(self, n_experts: int, group: dist.ProcessGroup) -> None:
        self.n_experts = n_experts
        self.group = group
        self.ranks = group.size()
        if n_experts % self.ranks:
            raise ConfigError(f"{n_experts} experts cannot be shared equally by {self.ranks} ranks")

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, mlp: ExpertMLP) -> Tensor:
        """See `Dispatcher`."""
        order = sort_by_expert(indices_TK, self.n_experts)
        sent_RE = order.counts_E.view(self.ranks, -1)
        got_RE = all_to_all_single(sent_RE, None, None, self.group)  # from each rank, rows per expert of ours
        rows_ND = dispatch(x_TD, order)
        sent, got = torch.stack([sent_RE.sum(1), got_RE.sum(1)]).tolist()
        arrived_MD = all_to_all_single_autograd(rows_ND, got, sent, self.group)
        place_M, back_M = _by_expert(got_RE, sum(got))
        y_MD = mlp(permute_rows(arrived_MD, place_M, back_M), got_RE.sum(0))
        y_ND = all_to_all_single_autograd(permute_rows(y_MD, back_M, place_M), sent, got, self.group)
        return combine(y_ND, weights_TK, order)


def _by_expert(got_RE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows arrive by rank and, of one rank, by expert: the permutation that puts them in expert order, and back.

    Rows of one expert keep the order of ranks and of tokens, which is their order in a single process.
    """
    experts = torch.arange(got_RE.shape[1], device=got_RE.device).repeat(got_RE.shape[0])
    expert_M = experts.repeat_interleave(got_RE.flatten(), output_size=rows)
    place_M = expert_M.argsort(stable=True)
    back_M = torch.empty_like(place_M).scatter_(0, place_M, torch.arange(rows, device=place_M.device))
    return place_M, back_M
