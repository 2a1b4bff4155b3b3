"""The `sdpa` backend: exact attention over the tiles of a layout, in plain torch, with recompute in backward.

Every query row meets all its keys within one tile, so a tile's softmax is complete and nothing is merged afterwards.
Only q, k, v and, for the sink, one number per row survive the forward pass; backward computes the probabilities again.
Measured on one AVX-512 core, ns per visible pair forward + backward, widths 192/128, one document of 4k tokens: 31 in
fp32 and 18 in bf16, against 42 and 30 with torch's fused CPU kernel (which also needs v padded to the width of q).

The sink never enters a tile as a column. With lse the log-sum-exp of a row's scores and s the sink, the softmax with
the extra column is the softmax without it times keep = exp(lse) / (exp(lse) + exp(s)) = sigmoid(lse - s); the column
takes 1 - keep.

T tokens, H query heads, K key/value heads, G = H / K, D width of q and k, V width of v. X = T * G: the query rows of
one key/value head, heads of a group next to each other, so that each tile is one contiguous matrix. C tiles of a
chunk, R = query rows of a tile times G, L keys of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automimo.attention.layout import MAX_ROWS, LongDocument, TileRun, Tiles

# Scores of small tiles computed at once: 2 MiB in fp32. Larger chunks fall out of the caches, smaller ones drown in
# calls.
CHUNK_SCORES = 1 << 19


def tiled_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, sink_H: Tensor | None, *, tiles: Tiles, scale: float
) -> Tensor:
    """Attention of a packed stream over `tiles` -> [T, H, V]; differentiable once in q, k, v and the sink."""
    if q_THD.dtype == torch.float16 and q_THD.device.type == "cpu":
        # CPU matrix products in fp16 run at a sixth of the speed of fp32.
        wide = tiled_attention(q_THD.float(), k_TKD.float(), v_TKV.float(), sink_H, tiles=tiles, scale=scale)
        return wide.half()
    out: Tensor = _TiledAttention.apply(q_THD, k_TKD, v_TKV, sink_H, tiles, scale)
    return out


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, sink_H: Tensor | None, tiles: Tiles, scale: float
    ) -> Tensor:
        group = q_THD.shape[1] // k_TKD.shape[1]
        q_KXD, k_KTD, v_KTV = _by_kv_head(q_THD, group), _by_kv_head(k_TKD, 1), _by_kv_head(v_TKV, 1)
        out_KXV = q_KXD.new_empty(*q_KXD.shape[:2], v_KTV.shape[2])
        chunks = list(_chunks(tiles, group, q_THD.dtype))
        work = _Workspace(chunks, q_KXD)
        sink_KX = None if sink_H is None else _per_row(sink_H, group, work.wide, q_THD.shape[0])
        lse_KX = None if sink_KX is None else torch.empty_like(sink_KX)
        for head in range(k_KTD.shape[0]):
            for chunk in chunks:
                q_CRD, k_CLD = chunk.of_queries(q_KXD[head]), chunk.of_keys(k_KTD[head])
                scores_CRL, p_CRL = work.softmax(chunk, q_CRD, k_CLD, scale)
                if sink_KX is not None and lse_KX is not None:
                    # The largest probability is exp(top score - lse), at least 1 / L: its logarithm is exact enough.
                    lse_CR1 = scores_CRL.amax(-1, keepdim=True).sub_(p_CRL.amax(-1, keepdim=True).log_())
                    chunk.of_queries(lse_KX[head]).copy_(lse_CR1)
                    p_CRL.mul_(lse_CR1.sub_(chunk.of_queries(sink_KX[head])).sigmoid_())
                torch.bmm(work.narrow(p_CRL), chunk.of_keys(v_KTV[head]), out=chunk.of_queries(out_KXV[head]))
        ctx.save_for_backward(q_KXD, k_KTD, v_KTV, sink_KX, lse_KX)
        ctx.chunks, ctx.scale, ctx.group = chunks, scale, group
        ctx.sink_dtype = None if sink_H is None else sink_H.dtype
        return _by_token(out_KXV, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_THV: Tensor) -> tuple[Tensor | None, ...]:
        q_KXD, k_KTD, v_KTV, sink_KX, lse_KX = ctx.saved_tensors
        scale, group = ctx.scale, ctx.group
        work = _Workspace(ctx.chunks, q_KXD)
        dout_KXV = _by_kv_head(dout_THV, group)
        dq_KXD = torch.empty_like(q_KXD)
        dk_KTD = torch.zeros(k_KTD.shape, dtype=work.wide, device=k_KTD.device)
        dv_KTV = torch.zeros(v_KTV.shape, dtype=work.wide, device=v_KTV.device)
        keep_KX = None if sink_KX is None else torch.sigmoid(lse_KX - sink_KX)
        average_KX = torch.empty_like(sink_KX) if ctx.needs_input_grad[3] else None
        for head in range(k_KTD.shape[0]):
            for chunk in ctx.chunks:
                q_CRD, k_CLD = chunk.of_queries(q_KXD[head]), chunk.of_keys(k_KTD[head])
                free_CRL, p_CRL = work.softmax(chunk, q_CRD, k_CLD, scale)
                if keep_KX is not None:
                    p_CRL.mul_(chunk.of_queries(keep_KX[head]))
                dout_CRV = chunk.of_queries(dout_KXV[head])
                chunk.add_to_keys(dv_KTV[head], work.narrow(p_CRL), dout_CRV, 1.0)
                dp_CRL = work.product(dout_CRV, chunk.of_keys(v_KTV[head]), 1.0, free_CRL)
                # p * (dp - sum(p * dp)): the sum taken here, not from out, so that a row with one key gets exactly 0.
                average_CR1 = torch.linalg.vecdot(p_CRL, dp_CRL).unsqueeze(-1)
                if average_KX is not None:
                    chunk.of_queries(average_KX[head]).copy_(average_CR1)
                ds_CRL = work.narrow(dp_CRL.sub_(average_CR1).mul_(p_CRL))
                dq_CRD = chunk.of_queries(dq_KXD[head])
                torch.baddbmm(dq_CRD, ds_CRL, k_CLD, beta=0, alpha=scale, out=dq_CRD)
                chunk.add_to_keys(dk_KTD[head], ds_CRL, q_CRD, scale)
        dsink_H = None
        if sink_KX is not None and average_KX is not None:
            column_KX = torch.sigmoid(sink_KX - lse_KX)
            dsink_H = -(column_KX * average_KX).unflatten(1, (-1, group)).sum(1).flatten().to(ctx.sink_dtype)
        dk_TKD, dv_TKV = _by_token(dk_KTD.to(k_KTD.dtype), 1), _by_token(dv_KTV.to(v_KTV.dtype), 1)
        return _by_token(dq_KXD, group), dk_TKD, dv_TKV, dsink_H, None, None


@dataclass(frozen=True)
class _Chunk:
    """`count` tiles that are computed at once, and the views of stream tensors that belong to them.

    `biases`: (first column, fp32 [count or 1, rows, width]), added to the scores.
    """

    first_row: int
    rows: int
    reach: int
    count: int
    group: int
    biases: tuple[tuple[int, Tensor], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, R, L) of the scores."""
        return self.count, self.rows * self.group, self.reach + self.rows

    def of_queries(self, x: Tensor) -> Tensor:
        """[X, N] or [X] -> view [C, R, N] (N = 1)."""
        rows = x[self.first_row * self.group : (self.first_row + self.count * self.rows) * self.group]
        return rows.view(self.count, self.rows * self.group, -1)

    def of_keys(self, x_TN: Tensor) -> Tensor:
        """Contiguous [T, N] -> [C, L, N]; neighbouring tiles overlap by `reach` rows.

        A view in fp32. Half precision products would copy an overlapping view each time, at a tenth of the total time.
        """
        width, start = x_TN.shape[1], self.first_row - self.reach
        if self.count == 1:
            return x_TN[start : self.first_row + self.rows].unsqueeze(0)
        shape, strides = (self.count, self.reach + self.rows, width), (self.rows * width, width, 1)
        tiles_CLN = x_TN.as_strided(shape, strides, x_TN.storage_offset() + start * width)
        return tiles_CLN.contiguous() if x_TN.dtype in (torch.bfloat16, torch.float16) else tiles_CLN

    def add_bias(self, scores_CRL: Tensor) -> None:
        tiles = scores_CRL.view(self.count, self.rows, self.group, -1)
        for column, bias in self.biases:
            tiles[..., column : column + bias.shape[2]].add_(bias.unsqueeze(2))

    def add_to_keys(self, total_TN: Tensor, left_CRL: Tensor, right_CRN: Tensor, alpha: float) -> None:
        """total += alpha * left^T right, each tile at its own keys; neighbours that overlap add up block by block."""
        start, length = self.first_row - self.reach, self.reach + self.rows
        if self.count == 1 and total_TN.dtype == left_CRL.dtype:
            total_TN[start : start + length].addmm_(left_CRL[0].t(), right_CRN[0], alpha=alpha)
            return
        new_CLN = torch.bmm(left_CRL.transpose(1, 2), right_CRN)
        step = self.rows if self.count > 1 else length
        for first in range(0, length, step):
            rows = total_TN[start + first : start + first + self.count * step].view(self.count, step, -1)
            rows.add_(new_CLN[:, first : first + step], alpha=alpha)


class _Workspace:
    """Score-sized buffers, allocated once per pass: fresh ones per chunk would cost a page fault per 4 KiB."""

    def __init__(self, chunks: list[_Chunk], like: Tensor) -> None:
        self.wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        size = max((count * rows * keys for count, rows, keys in (chunk.shape for chunk in chunks)), default=0)
        self.scores = torch.empty(size, dtype=self.wide, device=like.device)
        self.probabilities = torch.empty(size, dtype=self.wide, device=like.device)
        self.half = torch.empty(size, dtype=like.dtype, device=like.device) if like.dtype != self.wide else None

    def product(self, left_CRN: Tensor, right_CLN: Tensor, alpha: float, out_CRL: Tensor) -> Tensor:
        """out = alpha * left right^T, in fp32 (fp64) also for half inputs."""
        out = out_CRL if self.half is None else self.half[: out_CRL.numel()].view(out_CRL.shape)
        torch.baddbmm(out, left_CRN, right_CLN.transpose(1, 2), beta=0, alpha=alpha, out=out)
        return out_CRL if self.half is None else out_CRL.copy_(out)

    def narrow(self, x_CRL: Tensor) -> Tensor:
        """x in the dtype of q: itself, or a copy in a buffer that the next `product` or `narrow` overwrites."""
        return x_CRL if self.half is None else self.half[: x_CRL.numel()].view(x_CRL.shape).copy_(x_CRL)

    def softmax(self, chunk: _Chunk, q_CRD: Tensor, k_CLD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(scores, probabilities) [C, R, L] of a chunk over its keys, without a sink."""
        size = chunk.count * chunk.shape[1] * chunk.shape[2]
        scores_CRL, p_CRL = self.scores[:size].view(chunk.shape), self.probabilities[:size].view(chunk.shape)
        self.product(q_CRD, k_CLD, scale, scores_CRL)
        chunk.add_bias(scores_CRL)
        torch.softmax(scores_CRL, -1, out=p_CRL)
        return scores_CRL, p_CRL


def _chunks(tiles: Tiles, group: int, dtype: torch.dtype) -> Iterator[_Chunk]:
    for piece in tiles:
        yield from _strips(piece, group, dtype) if isinstance(piece, LongDocument) else _batches(piece, group)


def _batches(run: TileRun, group: int) -> Iterator[_Chunk]:
    size = max(1, CHUNK_SCORES // (run.rows * group * (run.reach + run.rows)))
    for first in range(0, run.count, size):
        bias = run.bias[first : first + size]
        yield _Chunk(run.first_row + first * run.rows, run.rows, run.reach, bias.shape[0], group, ((0, bias),))


def _strips(document: LongDocument, group: int, dtype: torch.dtype) -> Iterator[_Chunk]:
    """One tile at a time: a few rows against all the keys they see.

    More rows make better matrix products, but also more pairs above the diagonal. R = 512 is the best in half precision
    (7 % before 256) and against many keys, 256 in fp32 up to 2k keys. From 32k keys on (32 MiB of fp32 scores at 256
    rows) memory matters more.
    """
    start, stop, window, triangle = document.start, document.stop, document.window, document.triangle
    first = start
    while first < stop:
        seen = min(window, first - start)
        many = 2048 <= seen < 32768
        wanted = 512 if many or (dtype.itemsize == 2 and seen < 32768) else 256
        most = MAX_ROWS if many else MAX_ROWS // 2
        rows = min(stop - first, most, max(16, wanted // group))
        first_key = max(start, first - window + 1)
        # Row r may see keys up to its own, and from first - window + 1 + r on.
        biases = [(first - first_key, triangle[None, :rows, :rows])]
        skipped = first_key - (first - window + 1)
        if skipped < rows - 1:
            biases.append((0, triangle.t()[None, :rows, skipped : rows - 1]))
        yield _Chunk(first, rows, first - first_key, 1, group, tuple(biases))
        first += rows


def _by_kv_head(x_THN: Tensor, group: int) -> Tensor:
    """[T, K * G, N] -> contiguous [K, T * G, N]."""
    return x_THN.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2).contiguous()


def _by_token(x_KXN: Tensor, group: int) -> Tensor:
    """[K, T * G, N] -> contiguous [T, K * G, N]."""
    return x_KXN.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2).contiguous()


def _per_row(sink_H: Tensor, group: int, dtype: torch.dtype, tokens: int) -> Tensor:
    """[H] -> [K, X]: each query row's own sink."""
    return sink_H.detach().to(dtype).view(-1, 1, group).expand(-1, tokens, -1).flatten(1)
