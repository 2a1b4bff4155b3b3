"""The `sdpa` backend: exact attention over the tiles of a layout, in plain torch, with recompute in backward.

Every query row meets all its keys within one tile, so a tile's softmax is complete and nothing is merged afterwards. Only
q, k, v, out and the log-sum-exp survive the forward pass; backward computes the probabilities again, tile by tile.

The sink never enters a tile as a column. With lse the log-sum-exp of a row's scores and s the sink, the probabilities next to
the extra column are exp(score - total), total = logaddexp(lse, s), and the column itself takes exp(s - total).

T tokens, H query heads, K key/value heads, G = H / K, D width of q and k, V width of v. X = T * G: the query rows of one
key/value head, heads of the group next to each other, so that each tile is one contiguous matrix. C tiles of a chunk,
R = query rows of a tile times G, L keys of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automimo.attention.layout import TileMask, TileRun

# Scores held at once. 2**19 fp32 scores are 2 MiB: larger chunks fall out of the cores' caches, smaller ones drown in calls.
CHUNK_SCORES = 1 << 19


def tiled_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, sink_H: Tensor | None, *, tiles: tuple[TileRun, ...], scale: float
) -> Tensor:
    """Attention of a packed stream over `tiles` -> [T, H, V]; differentiable once in q, k, v and the sink."""
    out: Tensor = _TiledAttention.apply(q_THD, k_TKD, v_TKV, sink_H, tiles, scale)
    return out


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        sink_H: Tensor | None,
        tiles: tuple[TileRun, ...],
        scale: float,
    ) -> Tensor:
        group = q_THD.shape[1] // k_TKD.shape[1]
        q_KXD, k_KTD, v_KTV = _by_kv_head(q_THD, group), _by_kv_head(k_TKD, 1), _by_kv_head(v_TKV, 1)
        out_KXV = q_KXD.new_empty(*q_KXD.shape[:2], v_KTV.shape[2])
        total_KX = torch.empty(q_KXD.shape[:2], dtype=_wide(q_KXD.dtype), device=q_KXD.device)
        sink_KG = None if sink_H is None else sink_H.detach().to(total_KX.dtype).view(-1, group)
        for head in range(k_KTD.shape[0]):
            for chunk in _chunks(tiles, group):
                p_CRL = chunk.scores(q_KXD[head], k_KTD[head], scale)
                top_CR1 = p_CRL.amax(-1, keepdim=True)
                total_CR1 = p_CRL.sub_(top_CR1).exp_().sum(-1, keepdim=True).log_().add_(top_CR1)
                if sink_KG is not None:
                    sink_R1 = sink_KG[head].repeat(chunk.rows).unsqueeze(-1)
                    total_CR1 = torch.logaddexp(total_CR1, sink_R1)
                p_CRL.mul_(top_CR1.sub_(total_CR1).exp_())
                chunk.of_queries(total_KX[head]).copy_(total_CR1)
                v_CLV = chunk.of_keys(v_KTV[head])
                torch.bmm(p_CRL.to(v_CLV.dtype), v_CLV, out=chunk.of_queries(out_KXV[head]))
        out_THV = _by_token(out_KXV, group)
        ctx.save_for_backward(q_KXD, k_KTD, v_KTV, sink_H, out_THV, total_KX)
        ctx.tiles, ctx.scale = tiles, scale
        return out_THV

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_THV: Tensor) -> tuple[Tensor | None, ...]:
        q_KXD, k_KTD, v_KTV, sink_H, out_THV, total_KX = ctx.saved_tensors
        tiles, scale = ctx.tiles, ctx.scale
        group, wide = dout_THV.shape[1] // k_KTD.shape[0], total_KX.dtype
        dout_KXV = _by_kv_head(dout_THV, group)
        dq_KXD = torch.empty_like(q_KXD)
        dk_KTD = torch.zeros(k_KTD.shape, dtype=wide, device=k_KTD.device)
        dv_KTV = torch.zeros(v_KTV.shape, dtype=wide, device=v_KTV.device)
        for head in range(k_KTD.shape[0]):
            q_XD, k_TD, v_TV, dout_XV = q_KXD[head], k_KTD[head], v_KTV[head], dout_KXV[head]
            for chunk in _chunks(tiles, group):
                p_CRL = chunk.scores(q_XD, k_TD, scale).sub_(chunk.of_queries(total_KX[head])).exp_()
                dout_CRV = chunk.of_queries(dout_XV)
                chunk.add_to_keys(dv_KTV[head], p_CRL.to(v_TV.dtype), dout_CRV, 1.0)
                dp_CRL = torch.bmm(dout_CRV, chunk.of_keys(v_TV).transpose(1, 2)).to(wide)
                # p * (dp - sum(p * dp)): the sum taken here, not from out, so that a row with a single key gets exactly 0.
                ds_CRL = torch._softmax_backward_data(dp_CRL, p_CRL, -1, wide).to(q_XD.dtype)
                dq_CRD = chunk.of_queries(dq_KXD[head])
                torch.baddbmm(dq_CRD, ds_CRL, chunk.of_keys(k_TD), beta=0, alpha=scale, out=dq_CRD)
                chunk.add_to_keys(dk_KTD[head], ds_CRL, chunk.of_queries(q_XD), scale)
        dsink_H = None
        if sink_H is not None:
            sink_K1G = sink_H.detach().to(wide).view(-1, 1, group)
            column_TH = _by_token(
                (sink_K1G - total_KX.unflatten(1, (-1, group))).exp_().flatten(1).unsqueeze(-1), group
            )
            average_TH1 = (dout_THV.to(wide) * out_THV.to(wide)).sum(-1, keepdim=True)
            dsink_H = -(column_TH * average_TH1).sum(0).squeeze(-1).to(sink_H.dtype)
        dk_TKD, dv_TKV = _by_token(dk_KTD.to(k_KTD.dtype), 1), _by_token(dv_KTV.to(v_KTV.dtype), 1)
        return _by_token(dq_KXD, group), dk_TKD, dv_TKV, dsink_H, None, None


@dataclass(frozen=True)
class _Chunk:
    """`count` tiles of a run that are computed at once, and the views of stream tensors that belong to them."""

    first_row: int
    rows: int
    reach: int
    count: int
    masks: tuple[TileMask, ...]
    group: int

    def of_queries(self, x: Tensor) -> Tensor:
        """[X, N] or [X] -> view [C, R, N] (N = 1)."""
        rows = x[self.first_row * self.group : (self.first_row + self.count * self.rows) * self.group]
        return rows.view(self.count, self.rows * self.group, -1)

    def of_keys(self, x_TN: Tensor) -> Tensor:
        """Contiguous [T, N] -> view [C, L, N]; neighbouring tiles overlap by `reach` rows."""
        width = x_TN.shape[1]
        shape, strides = (self.count, self.reach + self.rows, width), (self.rows * width, width, 1)
        return x_TN.as_strided(shape, strides, x_TN.storage_offset() + (self.first_row - self.reach) * width)

    def scores(self, q_XD: Tensor, k_TD: Tensor, scale: float) -> Tensor:
        """New [C, R, L] in fp32 (fp64): scaled scores, -inf where the key is not visible."""
        q_CRD, k_CDL = self.of_queries(q_XD), self.of_keys(k_TD).transpose(1, 2)
        scores_CRL = torch.baddbmm(q_XD.new_empty(()), q_CRD, k_CDL, beta=0, alpha=scale).to(_wide(q_XD.dtype))
        tiles = scores_CRL.view(self.count, self.rows, self.group, -1)
        for mask in self.masks:
            hidden = mask.hidden.unsqueeze(2)
            tiles[..., mask.column : mask.column + mask.hidden.shape[2]].masked_fill_(hidden, float("-inf"))
        return scores_CRL

    def add_to_keys(self, total_TN: Tensor, left_CRL: Tensor, right_CRN: Tensor, alpha: float) -> None:
        """total += alpha * left^T right, each tile at its own keys; neighbours that overlap add up block by block."""
        start = self.first_row - self.reach
        if self.count == 1 and total_TN.dtype == left_CRL.dtype:
            total_TN[start : start + left_CRL.shape[2]].addmm_(left_CRL[0].t(), right_CRN[0], alpha=alpha)
            return
        new_CLN = torch.bmm(left_CRL.transpose(1, 2), right_CRN)
        step = self.rows if self.count > 1 else self.reach + self.rows
        for first in range(0, self.reach + self.rows, step):
            rows = total_TN[start + first : start + first + self.count * step].view(self.count, step, -1)
            rows.add_(new_CLN[:, first : first + step], alpha=alpha)


def _chunks(tiles: tuple[TileRun, ...], group: int) -> Iterator[_Chunk]:
    for run in tiles:
        size = max(1, CHUNK_SCORES // (run.rows * group * (run.reach + run.rows)))
        for first in range(0, run.count, size):
            count = min(size, run.count - first)
            masks = run.masks
            if run.count > 1:
                masks = tuple(TileMask(mask.column, mask.hidden[first : first + count]) for mask in masks)
            yield _Chunk(run.first_row + first * run.rows, run.rows, run.reach, count, masks, group)


def _by_kv_head(x_THN: Tensor, group: int) -> Tensor:
    """[T, K * G, N] -> contiguous [K, T * G, N]."""
    return x_THN.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2).contiguous()


def _by_token(x_KXN: Tensor, group: int) -> Tensor:
    """[K, T * G, N] -> contiguous [T, K * G, N]."""
    return x_KXN.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2).contiguous()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and of sums over tiles."""
    return torch.float64 if dtype == torch.float64 else torch.float32
