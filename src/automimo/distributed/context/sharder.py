"""ContextParallelSharder: a batch -> this rank's share of it, and token tensors to and from shares.

*Stream* and *share* are the words of `layout.py`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from automimo.distributed.context.layout import ShardLayout, identity_indices, merged_rows, to_stream, trimmed
from automimo.distributed.context.te_batch import make_cp_batch_for_te, place_in
from automimo.distributed.rows import permute_rows
from automimo.errors import ConfigError

ContextFactory = Callable[[], AbstractContextManager[Any]]
Sharded = tuple[ContextFactory, dict[str, Any], ShardLayout | None]
# (cp_mesh, tp_mesh, batch, *, loss_mask, padding_token_id) -> Sharded
ShardBatch = Callable[..., Sharded]
# (places of the stream, ranks, rank) -> the places of the rank's share in its own order
TokenIndices = Callable[[int, int, int], Tensor]


class ContextParallelSharder:
    """Cuts batches and token tensors for the ranks of the `cp` dimension of `device_mesh`.

    *Strategy mode*, with `shard_batch`: that callable cuts batches, as (cp_mesh, tp_mesh, batch, *, loss_mask,
    padding_token_id) -> (context factory, batch, ShardLayout or None). `local_token_global_indices` is for strategies
    whose cut follows from the length alone (`zigzag_indices`, ...); the others report a layout with every batch, or
    have a fixed `layout`. Without a `device_mesh` it serves one rank until a resolve mode hands it a mesh.

    *Resolve mode*, with `batch` and usually `model`: the strategy is chosen. The model's own
    `prepare_model_inputs_for_cp(batch, num_chunks)` is asked first and may answer {"cp_sharder": a sharder in strategy
    mode} (not asked with `invoke_pre_embed=False`); otherwise packed (thd) batches are cut by `make_cp_batch_for_te`.
    An unpacked batch on a single rank needs no cut, and the model is not asked.

    `loss_mask` and `padding_token_id` are handed to the strategy. `device_mesh` has a dimension named ``cp`` (and
    perhaps ``tp``); None or a mesh without ``cp`` is one rank.

    A model of ours takes what `shard` returns as keywords, with its labels as `targets`: ``model(**batch,
    targets=batch["labels"])``; the loss is then the sum over this rank's tokens.

    Raises TypeError when the two modes are mixed or `batch` is missing, ConfigError when several ranks would have to
    share an unpacked batch.
    """

    shard_batch: ShardBatch
    local_token_global_indices: TokenIndices | None
    layout: ShardLayout | None

    def __init__(
        self,
        model: nn.Module | None = None,
        device_mesh: DeviceMesh | None = None,
        batch: Mapping[str, Any] | None = None,
        padding_token_id: int = 0,
        num_chunks: int = 1,
        loss_mask: Tensor | None = None,
        invoke_pre_embed: bool = True,
        *,
        shard_batch: ShardBatch | None = None,
        local_token_global_indices: TokenIndices | None = None,
        layout: ShardLayout | None = None,
    ) -> None:
        self.cp_mesh, self.tp_mesh = _dimension(device_mesh, "cp"), _dimension(device_mesh, "tp")
        self.padding_token_id, self.loss_mask = padding_token_id, loss_mask
        if shard_batch is None:
            if local_token_global_indices is not None or layout is not None:
                raise TypeError("local_token_global_indices and layout belong to a strategy: pass shard_batch as well")
            if batch is None:
                raise TypeError("pass a strategy (shard_batch), or a batch to choose one for")
            strategy = _resolve(model if invoke_pre_embed else None, self.cp_mesh, batch, num_chunks)
            shard_batch, layout = strategy.shard_batch, strategy.layout
            local_token_global_indices = strategy.local_token_global_indices
        elif model is not None or batch is not None or num_chunks != 1:
            raise TypeError("model, batch and num_chunks choose a strategy; with shard_batch there is one already")
        self.shard_batch = shard_batch
        self.local_token_global_indices = local_token_global_indices
        self.layout = layout
        self._fixed_layout = layout
        self._sharded = False
        self._orders: tuple[Tensor, Tensor] | None = None

    def shard(self, batch: Mapping[str, Any]) -> tuple[ContextFactory, dict[str, Any]]:
        """This rank's share of a batch and what makes the context to run the model in: `with context(): ...`.

        `layout` is then that of this batch. Raises what the strategy raises.
        """
        context, shared, layout = self.shard_batch(
            self.cp_mesh, self.tp_mesh, batch, loss_mask=self.loss_mask, padding_token_id=self.padding_token_id
        )
        self.layout = self._fixed_layout if layout is None else layout
        self._sharded, self._orders = True, None
        return context, shared

    def shard_token_tensor(self, t: Tensor, seq_dim: int = 1, fill: float | None = None) -> Tensor:
        """This rank's share of a tensor with one entry per token along `seq_dim`, the same on all ranks.

        t has the input's rows (B at `seq_dim` - 1, S at `seq_dim`; they become one dimension), the input's length, or
        that of the stream. Places of the stream that no token of the input is in get `fill`. Differentiable: gradients
        are those of this rank's share alone.

        Raises ConfigError when the length fits none of them or `fill` is needed, NotImplementedError when the layout
        follows from the data and no batch was sharded yet.
        """
        dim = _checked_dim(t, seq_dim)
        layout = self._layout_for("shard_token_tensor")
        if layout is None:
            assert self.local_token_global_indices is not None  # or there would have been an error
            indices = self.local_token_global_indices(t.shape[dim], *place_in(self.cp_mesh))
            return t.index_select(dim, indices.to(t.device))
        t, dim = merged_rows(t, dim, layout)
        stream = to_stream(t, dim, fill, layout, self._stream_length(layout))
        return stream.index_select(dim, _indices(layout).to(t.device))

    def gather_token_tensor(self, t: Tensor, seq_dim: int = 1, trim: bool = False, fill: float | None = None) -> Tensor:
        """The whole stream along `seq_dim` on every rank, from each rank's share of it; a collective of all ranks.

        With `trim` in the form of the input: without the places that were added, in the input's order (tokens that were
        not in the stream get `fill`), and as rows [..., B, S, ...] where the input had rows.

        Differentiable, as everything here under the rule that the loss is the *sum over ranks* of what each computes:
        the gradient of a share is the sum of the gradients that all ranks have for it. Each rank may therefore have
        terms of its own; a loss that all ranks compute alike from the gathered tensor counts once per rank and has to
        be divided by their number (or kept on one rank, times 0 on the others). The backward pass is a collective too,
        so every rank has to reach it.

        Raises ConfigError when the length is not that of a share, when `fill` is needed or the shares of all ranks are
        not exactly the stream, NotImplementedError for a layout that is not known (see `shard_token_tensor`) or does
        not tell how to trim.
        """
        dim = _checked_dim(t, seq_dim)
        layout = self._layout_for("gather_token_tensor")
        if trim and layout is None:
            raise NotImplementedError("trim needs a layout that says what the input was; this strategy reports none")
        share = t.shape[dim] if layout is None else _indices(layout).numel()
        if t.shape[dim] != share:
            raise ConfigError(
                f"the tensor has {t.shape[dim]} tokens along dimension {dim}, but this rank has {share} of the batch"
            )
        size, _ = place_in(self.cp_mesh)
        whole = t.movedim(dim, 0)
        if size > 1:
            assert self.cp_mesh is not None  # it has several ranks
            whole = _Gather.apply(whole, self.cp_mesh.get_group())
        order, places = self._stream_orders(share, layout)
        stream = permute_rows(whole, order.to(t.device), places.to(t.device)).movedim(0, dim)
        return stream if layout is None or not trim else trimmed(stream, dim, fill, layout)

    def _layout_for(self, verb: str) -> ShardLayout | None:
        """None: `local_token_global_indices` tells."""
        if self.layout is not None and self.layout.local_token_global_indices is not None:
            return self.layout
        if self.local_token_global_indices is not None:
            return None
        if self._sharded:
            raise NotImplementedError(f"{verb}: this strategy reports no layout for a batch of several chunks")
        raise NotImplementedError(f"{verb}: the layout follows from the batch; call shard(batch) first")

    def _stream_length(self, layout: ShardLayout) -> int:
        size, _ = place_in(self.cp_mesh)
        shared = _indices(layout).numel() * size
        if layout.padded_seq_len is not None and layout.padded_seq_len != shared:
            raise ConfigError(
                f"the layout has {shared // size} tokens on each of {size} ranks, but a stream of "
                f"{layout.padded_seq_len} (padded_seq_len)"
            )
        return shared

    def _stream_orders(self, share: int, layout: ShardLayout | None) -> tuple[Tensor, Tensor]:
        """For each place of the stream where it is among all shares one after the other, and the inverse."""
        if self._orders is not None and self._orders[0].numel() == share * place_in(self.cp_mesh)[0]:
            return self._orders
        size, _ = place_in(self.cp_mesh)
        if layout is None:
            assert self.local_token_global_indices is not None
            places = torch.cat([self.local_token_global_indices(share * size, size, rank) for rank in range(size)])
        else:
            self._stream_length(layout)
            places = _indices(layout)
            if size > 1:
                assert self.cp_mesh is not None
                places = _all_gather(places.to(self.cp_mesh.device_type), self.cp_mesh.get_group())
        places = places.cpu()
        if not torch.equal(places.sort().values, torch.arange(places.numel())):
            raise ConfigError(f"the shares of {size} ranks are not exactly the {places.numel()} places of the stream")
        self._orders = torch.empty_like(places).scatter_(0, places, torch.arange(places.numel())), places
        return self._orders


def _resolve(
    model: nn.Module | None, cp_mesh: DeviceMesh | None, batch: Mapping[str, Any], num_chunks: int
) -> ContextParallelSharder:
    """The strategy for a batch."""
    size, _ = place_in(cp_mesh)
    packed = batch.get("qkv_format") == "thd"
    if size == 1 and not packed:
        return ContextParallelSharder(shard_batch=_leave_whole, local_token_global_indices=identity_indices)
    prepare = getattr(model, "prepare_model_inputs_for_cp", None)  # a model need not have one
    if prepare is not None:
        answer = prepare(batch, num_chunks)
        unknown = sorted(set(answer) - {"cp_sharder"})
        if unknown:
            raise ConfigError(f"prepare_model_inputs_for_cp returned {unknown}; only 'cp_sharder' is understood")
        if "cp_sharder" in answer:
            return answer["cp_sharder"]
    if packed:
        return ContextParallelSharder(shard_batch=partial(_shard_packed, num_chunks=num_chunks))
    raise ConfigError(
        f"{size} context-parallel ranks cannot share a batch with qkv_format {batch.get('qkv_format')!r}: pack the "
        "documents (packing_strategy thd; data.packing in a recipe), or set parallel.context to 1. There is no ring "
        "attention for padded batches"
    )


def _leave_whole(
    cp_mesh: DeviceMesh | None,  # noqa: ARG001 - the protocol of strategies
    tp_mesh: DeviceMesh | None,  # noqa: ARG001
    batch: Mapping[str, Any],
    *,
    loss_mask: Tensor | None,  # noqa: ARG001 - nothing is cut, so it fits as it is
    padding_token_id: int,  # noqa: ARG001
) -> Sharded:
    return nullcontext, dict(batch), None


def _shard_packed(
    cp_mesh: DeviceMesh | None,
    tp_mesh: DeviceMesh | None,  # noqa: ARG001
    batch: Mapping[str, Any],
    *,
    loss_mask: Tensor | None,
    padding_token_id: int,
    num_chunks: int,
) -> Sharded:
    """Packed batches of a model without a strategy of its own."""
    if loss_mask is not None:
        raise ConfigError("a packed batch has its loss mask in the labels (-100 = no loss): pass loss_mask=None")
    shared, indices = make_cp_batch_for_te(
        cp_mesh, batch, padding_token_id=padding_token_id, num_chunks=num_chunks, return_local_indices=True
    )
    return nullcontext, shared, packed_layout(batch, indices, place_in(cp_mesh)[0])


def packed_layout(batch: Mapping[str, Any], indices: Tensor | None, size: int) -> ShardLayout | None:
    """The layout of a packed batch (as it was before) of which this rank has `indices`; None for several chunks."""
    if indices is None:
        return None
    lengths = batch.get("seq_lens")
    rows = None if lengths is None else lengths.shape[0]
    places = indices.numel() * size
    return ShardLayout(
        local_token_global_indices=indices,
        padded_seq_len=places,
        input_row_shape=None if rows is None else (rows, places // rows),
    )


def _dimension(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """One dimension of a mesh; None where it has none of that name."""
    if mesh is None:
        return None
    if mesh.mesh_dim_names is None:
        raise ConfigError("device_mesh has no names; name its dimension of context parallelism 'cp'")
    if name not in mesh.mesh_dim_names:
        return None
    return mesh if mesh.ndim == 1 else mesh[name]


def _indices(layout: ShardLayout) -> Tensor:
    assert layout.local_token_global_indices is not None  # `_layout_for` gives no other
    return layout.local_token_global_indices


def _checked_dim(t: Tensor, seq_dim: int) -> int:
    if not -t.dim() <= seq_dim < t.dim():
        raise ConfigError(f"a tensor of shape {list(t.shape)} has no dimension {seq_dim} (seq_dim)")
    return seq_dim % t.dim()


class _Gather(torch.autograd.Function):
    """[L, ...] of each rank -> [R * L, ...], the shares one after the other."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(share, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank sends each other one its part and adds up what it gets in the order of ranks: the same bits in
        # every run, and in bf16 one rounding instead of one per rank.
        grad = grad.contiguous()
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad, group=ctx.group)
        return received.unflatten(0, (ctx.group.size(), -1)).sum(0), None


def _all_gather(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    share = share.contiguous()
    whole = share.new_empty(group.size(), *share.shape)
    dist.all_gather(list(whole.unbind()), share, group=group)
    return whole.flatten(0, 1)
