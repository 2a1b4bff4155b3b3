"""Sliding-window attention of a context-parallel rank that keeps all heads of its own tokens ("halo").

A query of a sliding layer sees at most `window` keys, so a chunk of a document needs beside its own keys and values
only those of the window - 1 tokens before it (its *halo*, which ends at the start of the document). They come from the
ranks that own them. Own rows and halo together are the *extended stream* of the rank: in the order of the packed
stream, in *pieces* without a gap. A piece that `attend` treats as a document gives the own rows exactly what the whole
stream gives them: all their visible keys are in it, and places within a piece differ as those in the document do. Two
chunks of one document whose keys meet or overlap share a piece and no row is there twice; a gap makes two pieces, so no
query looks across it.

T tokens in all, R ranks, S = T / R own rows, M halo rows of this rank, E = S + M rows of its extended stream, N rows
sent. H query heads, K key/value heads, D width of q and k, V width of v.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd

from automimo.attention.dispatch import attend, check_backend, check_shapes
from automimo.attention.layout import DocumentLayout, build_layout
from automimo.distributed.context.partition import chunks_of, stream_order, thd_partition
from automimo.errors import ConfigError

# Most halo rows per own row with which `halo_pays`; why a quarter, there.
HALO_LIMIT = 0.25


@dataclass(frozen=True)
class HaloPlan:
    """What follows from the document boundaries for the sliding layers of one rank. Made by `plan_halo`.

    `send_index` int64 [N]: own rows in the order of the ranks they go to; `sent` and `got` rows to and from each rank.
    `own` int64 [S] and `halo` int64 [M]: the places of the own rows, and of those that arrive, in the extended stream.
    `layout`: the extended stream, one document per piece. Tensors are on the device of the stream.
    """

    size: int
    rank: int
    window: int
    rows: int
    sent: tuple[int, ...]
    got: tuple[int, ...]
    send_index: Tensor
    own: Tensor
    halo: Tensor
    layout: DocumentLayout

    @property
    def halo_rows(self) -> int:
        """M, the rows that arrive."""
        return sum(self.got)


def plan_halo(
    boundaries: Sequence[int], window: int, size: int, rank: int, device: torch.device | str = "cpu"
) -> HaloPlan:
    """The plan of `rank` among `size` for documents that end at the cumulative padded lengths `boundaries`.

    `window` is the number of keys a query sees, itself included. Nothing is communicated: every rank computes from the
    boundaries what each of the others needs of it. Once per batch, on the host.

    Raises:
        ConfigError: a rank that does not exist, a document whose length is not a multiple of 2 * size, a window below
            1.
    """
    own_S = thd_partition(boundaries, size, rank)
    rows = own_S.numel()
    place_T = stream_order(boundaries, size)  # in the shares of all ranks, one after the other
    halos = [_halo_rows(boundaries, window, size, other) for other in range(size)]
    wanted = [place_T[halo_M] - rank * rows for halo_M in halos]
    send = [places_M[(places_M >= 0) & (places_M < rows)] for places_M in wanted]
    # Rows arrive by owner and, of one owner, in the order of the stream.
    owner_M = place_T[halos[rank]].div(max(rows, 1), rounding_mode="floor")
    arrived_M = halos[rank][owner_M.argsort(stable=True)]
    stream_E, place_E = torch.cat([own_S, arrived_M]).sort()
    extended_E = torch.empty_like(place_E).scatter_(0, place_E, torch.arange(place_E.numel()))
    return HaloPlan(
        size=size,
        rank=rank,
        window=window,
        rows=rows,
        sent=tuple(places.numel() for places in send),
        got=tuple(owner_M.bincount(minlength=size).tolist()),
        send_index=torch.cat(send).to(device),
        own=extended_E[:rows].to(device),
        halo=extended_E[rows:].to(device),
        layout=build_layout(_pieces(stream_E, boundaries), window=window, device=device),
    )


def halo_pays(boundaries: Sequence[int], window: int, size: int) -> bool:
    """Whether sliding layers should exchange halos rather than heads. The same on all ranks: only the boundaries count.

    They should if no rank has more halo rows than a quarter of its own rows. Halo rows cost attention, as their queries
    take part in the tiles; exchanging heads costs (R - 1) / R * (H * D + K * D + K * V + H * V) numbers sent per own
    row, a halo K * (D + V) per halo row. With 64/8 heads of 192/128, that is 2560 against 11520 to 20160 numbers, so
    bytes alone would allow 4.5 to 7.9 halo rows per own row. Measured on a CPU, fp32, 1024 own rows, window 128:
    processor seconds per rank of exchange and attention, forward + backward, halo (heads):

        halo rows / own rows    0.12          0.25          0.50          0.99
        2 ranks                 0.73 (0.98)   0.84 (0.96)   1.03 (0.99)
        4 ranks                               0.88 (1.04)   1.08 (1.06)   1.35 (1.08)

    Attention alone takes 1.1, 1.2, 1.5 to 1.6 and 2.0 times as long as on a share of the heads. So a half is where
    computing and copying on one core break even; a slower link moves that up.

    Raises:
        ConfigError: as `plan_halo`.
    """
    most = HALO_LIMIT * boundaries[-1] / size
    return all(_halo_rows(boundaries, window, size, rank).numel() <= most for rank in range(size))


def _halo_rows(boundaries: Sequence[int], window: int, size: int, rank: int) -> Tensor:
    """Places in the stream of the rows whose keys `rank` needs and does not own: int64 [M], ascending."""
    if window < 1:
        raise ConfigError(f"window is {window}; a query sees at least itself, so it must be 1 or more")
    document, first, stop = chunks_of(boundaries, size, rank).unbind(1)
    first_key = torch.maximum(torch.tensor(boundaries)[document], first - (window - 1))
    total = boundaries[-1]
    return (_covered(first_key, stop, total) & ~_covered(first, stop, total)).nonzero().squeeze(1)


def _covered(first: Tensor, stop: Tensor, total: int) -> Tensor:
    """bool [total]: the numbers that lie in any of the ranges [first, stop)."""
    ones = torch.ones(first.numel(), dtype=torch.int32)
    steps = torch.zeros(total + 1, dtype=torch.int32).index_add_(0, first, ones).index_add_(0, stop, -ones)
    return steps[:total].cumsum(0, dtype=torch.int32) > 0


def _pieces(stream_E: Tensor, boundaries: Sequence[int]) -> list[int]:
    """Where the extended stream, given the places of its rows in the stream, has a gap or another document begins: the
    cumulative lengths of its pieces."""
    document_E = torch.bucketize(stream_E, torch.tensor(boundaries), right=True)
    parted = (stream_E.diff() != 1) | (document_E.diff() != 0)
    inner = (parted.nonzero().squeeze(1) + 1).tolist()
    return [0, *inner, stream_E.numel()] if stream_E.numel() else [0]


def halo_attention(
    q_SHD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    sink_H: Tensor | None,
    plan: HaloPlan,
    group: dist.ProcessGroup,
    *,
    scale: float,
    window: int,
    backend: str,
) -> Tensor:
    """Sliding attention of this rank's own tokens, all heads -> [S, H, V] in the dtype of q; a collective of `group`.

    Arguments as those of `attend`, for the own rows in the order of `thd_partition`. Differentiable in q, k, v and the
    sink; the gradient of the sink is that of the own rows, so the ranks' gradients add up. k and v rows travel in one
    uneven all-to-all, as do their gradients on the way back, which are added in the order of the ranks.

    Raises:
        ConfigError: tensors that do not fit the plan or each other, a plan for another window, rank or group size, an
            unknown backend.
    """
    check_backend(backend)
    check_shapes(q_SHD, k_SKD, v_SKV, sink_H, plan.rows)
    if window != plan.window:
        raise ConfigError(f"window {window} was asked of a halo that was planned for window {plan.window}")
    if (group.rank(), group.size()) != (plan.rank, plan.size):
        raise ConfigError(
            f"the halo was planned for rank {plan.rank} of {plan.size} and used by rank {group.rank()} of "
            f"{group.size()}"
        )
    sent_NC = torch.cat([_leaving(k_SKD, plan), _leaving(v_SKV, plan)], 1)
    got_MC = all_to_all_single_autograd(sent_NC, list(plan.got), list(plan.sent), group)
    # Halo rows ask nothing: their queries are 0 and their outputs are dropped. Placed while the rows travel.
    q_EHD = _extended(q_SHD, None, plan)
    got_k, got_v = got_MC.split([k_SKD.shape[1:].numel(), v_SKV.shape[1:].numel()], 1)
    k_EKD = _extended(k_SKD, got_k.unflatten(1, k_SKD.shape[1:]), plan)
    v_EKV = _extended(v_SKV, got_v.unflatten(1, v_SKV.shape[1:]), plan)
    out_EHV = attend(q_EHD, k_EKD, v_EKV, layout=plan.layout, window=window, sink=sink_H, scale=scale, backend=backend)
    return out_EHV.index_select(0, plan.own)


def _extended(x_SKN: Tensor, halo_MKN: Tensor | None, plan: HaloPlan) -> Tensor:
    """Own rows and halo (None: zeros) at their places in the extended stream: [E, K, N]."""
    rows_EKN: Tensor = _Extended.apply(x_SKN, halo_MKN, plan.own, plan.halo)
    return rows_EKN


class _Extended(torch.autograd.Function):
    """One copy of every row on the way there and back."""

    @staticmethod
    def forward(ctx: Any, x_SKN: Tensor, halo_MKN: Tensor | None, own_S: Tensor, halo_M: Tensor) -> Tensor:
        ctx.save_for_backward(own_S, halo_M)
        ctx.has_halo = halo_MKN is not None
        rows_EKN = x_SKN.new_empty(own_S.numel() + halo_M.numel(), *x_SKN.shape[1:])
        rows_EKN.index_copy_(0, own_S, x_SKN)
        if halo_MKN is None:
            return rows_EKN.index_fill_(0, halo_M, 0)
        return rows_EKN.index_copy_(0, halo_M, halo_MKN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_EKN: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        own_S, halo_M = ctx.saved_tensors
        halo = grad_EKN.index_select(0, halo_M) if ctx.has_halo else None
        return grad_EKN.index_select(0, own_S), halo, None, None


def _leaving(x_SKN: Tensor, plan: HaloPlan) -> Tensor:
    """The rows for the other ranks: [N, K * width]."""
    rows_NC: Tensor = _Leaving.apply(x_SKN.flatten(1), plan.send_index, plan.sent)
    return rows_NC


class _Leaving(torch.autograd.Function):
    """A row may leave for several ranks. Their gradients are added rank by rank, in fp32 at least; to one rank no row
    goes twice, so the sums do not depend on the order in which a device adds."""

    @staticmethod
    def forward(ctx: Any, x_SC: Tensor, send_index: Tensor, sent: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(send_index)
        ctx.sent, ctx.rows = sent, x_SC.shape[0]
        return x_SC.index_select(0, send_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor, None, None]:
        (send_index,) = ctx.saved_tensors
        wide = torch.promote_types(grad_NC.dtype, torch.float32)
        total_SC = torch.zeros(ctx.rows, grad_NC.shape[1], dtype=wide, device=grad_NC.device)
        for index, grad in zip(send_index.split(ctx.sent), grad_NC.split(ctx.sent), strict=True):
            total_SC.index_add_(0, index, grad.to(wide))
        return total_SC.to(grad_NC.dtype), None, None
