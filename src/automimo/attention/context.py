"""Attention of a stream whose tokens several ranks share: all-to-all over heads around any backend.

Every rank has L = T / R tokens of the stream and all H heads. One exchange gives it all T tokens of H / R heads, it
attends as a process that is alone would, and a second exchange gives it back its tokens with all heads. That is exact
for any mask, window and sink, because heads are independent of each other. Layers with a window keep their heads and
fetch the keys before their tokens instead (`halo`) where that is cheaper.

T tokens of the stream, L of this rank, R ranks, H query heads, K key-value heads, D query/key width, V value width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from automimo.attention.dispatch import attend
from automimo.attention.halo import HaloPlan, halo_attention, halo_pays, plan_halo
from automimo.attention.layout import DocumentLayout, build_layout
from automimo.distributed.context.partition import stream_order
from automimo.distributed.rows import permute_rows, split_permuted
from automimo.errors import ConfigError


@dataclass(frozen=True)
class SharedLayout:
    """A packed stream of which this rank has a share.

    whole: the layout of the stream. places: int64 [L], where in the stream this rank's tokens are, in its order.
    order: int64 [T], for every token of the stream its place among the shares of all ranks put one after the other;
    back: its inverse. halo: how layers with a window get the keys before their tokens; None where they exchange heads.
    """

    whole: DocumentLayout
    size: int
    places: Tensor
    order: Tensor
    back: Tensor
    halo: HaloPlan | None


def share_layout(
    boundaries: Sequence[int], *, window: int | None, size: int, rank: int, device: torch.device | str
) -> SharedLayout:
    """The layout of documents that end at the cumulative lengths `boundaries`, as `rank` of `size` has it.

    Raises ConfigError for a document whose length is not a multiple of 2 * size, and as `build_layout`.
    """
    order = stream_order(boundaries, size)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    halo = None if window is None else choose_halo(boundaries, window, size, rank, device)
    return SharedLayout(
        # With halos nobody asks for the window's tiles, which take 640 bytes per token of the whole stream.
        whole=build_layout(boundaries, window=window if halo is None else None, device=device),
        size=size,
        places=back.view(size, -1)[rank].to(device),
        order=order.to(device),
        back=back.to(device),
        halo=halo,
    )


def choose_halo(
    boundaries: Sequence[int], window: int, size: int, rank: int, device: torch.device | str
) -> HaloPlan | None:
    """The plan by which layers with this window exchange halos, or None where they do better to exchange heads; all
    ranks decide the same."""
    if not halo_pays(boundaries, window, size):
        return None
    return plan_halo(boundaries, window, size, rank, device)


class ContextAttention:
    """The exchanges of a layer with these numbers of heads among the ranks of `group`.

    Key-value heads that are fewer than the ranks are sent to several of them, R / K each.
    Raises ConfigError for heads that the ranks cannot share equally.
    """

    def __init__(self, group: dist.ProcessGroup, n_heads: int, n_kv_heads: int) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        check_heads(n_heads, n_kv_heads, self.size)
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads

    def attend(
        self,
        q_LHD: Tensor,
        k_LKD: Tensor,
        v_LKV: Tensor,
        *,
        layout: SharedLayout,
        window: int | None,
        sink: Tensor | None,
        scale: float,
        backend: str,
    ) -> Tensor:
        """As `attention.attend` for this rank's tokens -> [L, H, V]; all ranks of the group call it."""
        if layout.halo is not None and window == layout.halo.window:
            return halo_attention(
                q_LHD, k_LKD, v_LKV, sink, layout.halo, self.group, scale=scale, window=window, backend=backend
            )
        heads = self.n_heads // self.size
        q_ThD, k_TkD, v_TkV = self._to_heads(q_LHD, k_LKD, v_LKV, layout)
        own = None if sink is None else sink[self.rank * heads : (self.rank + 1) * heads]
        out_ThV = attend(
            q_ThD, k_TkD, v_TkV, layout=layout.whole, window=window, sink=own, scale=scale, backend=backend
        )
        del q_ThD, k_TkD, v_TkV
        return self._to_tokens(out_ThV, layout)

    def _to_heads(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKV: Tensor, layout: SharedLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[L, all heads] -> [T, the heads of this rank], the three in one exchange."""
        copies = self.size // self.n_kv_heads if self.n_kv_heads < self.size else 1
        if copies > 1:
            k_LKD, v_LKV = k_LKD.repeat_interleave(copies, 1), v_LKV.repeat_interleave(copies, 1)
        parts = [x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in (q_LHD, k_LKD, v_LKV)]  # [R, L, h, n]
        shapes = [part.shape[2:] for part in parts]
        # Nested, so that no more than two copies exist at a time.
        q, k, v = split_permuted(
            all_to_all_single_autograd(
                torch.cat([part.flatten(2) for part in parts], -1), None, None, self.group
            ).flatten(0, 1),
            [shape.numel() for shape in shapes],
            layout.order,
            layout.back,
        )
        return q.unflatten(-1, shapes[0]), k.unflatten(-1, shapes[1]), v.unflatten(-1, shapes[2])

    def _to_tokens(self, out_ThV: Tensor, layout: SharedLayout) -> Tensor:
        """[T, the heads of this rank] -> [L, all heads]."""
        received_RLW = all_to_all_single_autograd(
            permute_rows(out_ThV.flatten(1), layout.back, layout.order), None, None, self.group
        ).unflatten(0, (self.size, -1))
        return received_RLW.transpose(0, 1).unflatten(-1, out_ThV.shape[1:]).flatten(1, 2)


def check_heads(n_heads: int, n_kv_heads: int, size: int) -> None:
    """Raises ConfigError unless `size` ranks can share the heads of a layer."""
    if n_heads % size == 0 and (n_kv_heads % size == 0 or size % n_kv_heads == 0):
        return
    common = [d for d in range(1, n_heads + 1) if n_heads % d == 0 and (n_kv_heads % d == 0 or d % n_kv_heads == 0)]
    raise ConfigError(
        f"context parallelism over {size} ranks requires both query and key/value head counts to be divisible by it "
        f"(or the ranks by the key/value heads); the layer has {n_heads} and {n_kv_heads}: parallel.context may be "
        f"one of {common}"
    )
