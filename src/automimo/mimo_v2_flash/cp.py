"""Packed batches of a MiMo model under context parallelism: what media need to know before the tokens are cut.

The cut itself is `distributed.context.make_cp_batch_for_te`. Here the attention is set up for the ranks, and the batch
gets along the places of its image and video placeholders in the whole stream and which places this rank has. With these
a rank finds the rows of the media features, which every rank computes in full, for the placeholders of its share.

Legend: B rows, S places of a row, N pipeline chunks, T = B * S / N places of a chunk's stream, R ranks.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from automimo.distributed.context import ContextParallelSharder, ShardLayout, make_cp_batch_for_te, thd_partition
from automimo.distributed.context.packed_input import cumulative, row_lengths
from automimo.distributed.context.sharder import packed_layout
from automimo.distributed.context.te_batch import place_in
from automimo.errors import ConfigError
from automimo.mimo_v2_flash.parallelization import ensure_mimo_te_context_parallel

_MIMO_GLOBAL_IMAGE_MASK = "_mimo_global_image_mask"
_MIMO_GLOBAL_VIDEO_MASK = "_mimo_global_video_mask"
_MIMO_THD_LOCAL_INDICES = "_mimo_thd_local_indices"
_SEQ_LENS_PADDING_VALUE = -1000
_VLM_PP_MEDIA_KEY = "_vlm_pp_media_chunks"

__all__ = [
    "_MIMO_GLOBAL_IMAGE_MASK",
    "_MIMO_GLOBAL_VIDEO_MASK",
    "_MIMO_THD_LOCAL_INDICES",
    "_SEQ_LENS_PADDING_VALUE",
    "_VLM_PP_MEDIA_KEY",
    "make_mimo_te_cp_sharder",
    "shard_batch_for_mimo_te",
]


def _flatten_chunks(tensor: Tensor, num_chunks: int) -> Tensor:
    """[B, S] -> [B * S] for one chunk, [N, B * S / N] for several.

    Raises ConfigError unless `tensor` has two dimensions and `num_chunks` divides B.
    """
    if tensor.dim() != 2:
        raise ConfigError(f"a token tensor must be [batch, sequence], got shape {list(tensor.shape)}")
    if num_chunks < 1 or tensor.shape[0] % num_chunks:
        raise ConfigError(f"{tensor.shape[0]} rows cannot be divided among num_chunks {num_chunks}")
    return tensor.reshape(-1) if num_chunks == 1 else tensor.reshape(num_chunks, -1)


def _media_mask(input_ids: Tensor, token_id: int | None, num_chunks: int) -> Tensor | None:
    """Where `token_id` is in the whole stream: bool [T] or [N, T]; None without such a token.

    input_ids [B, S]. Raises as `_flatten_chunks`.
    """
    return None if token_id is None else _flatten_chunks(input_ids == token_id, num_chunks)


def _chunk_partition_indices(
    batch: Mapping[str, Any], cp_mesh: DeviceMesh | None, num_chunks: int, seq_lens_padding_value: int
) -> Tensor:
    """The places in its stream of every token of this rank: int64 [T / R], or [N, T / R] for several chunks.

    `batch` has input_ids [B, S] and seq_lens_padded [B, documents], filled up with `seq_lens_padding_value`.
    Raises ConfigError (a ValueError) for other shapes and, with several ranks, for documents that are empty, do not
    make up the chunk, or are not divisible by 2 * R.
    """
    input_ids, lengths = batch["input_ids"], batch["seq_lens_padded"]
    streams = _flatten_chunks(input_ids, num_chunks).view(num_chunks, -1)
    rows = row_lengths(lengths, "seq_lens_padded", seq_lens_padding_value)
    size, rank = place_in(cp_mesh)
    places = streams.shape[1]
    if size == 1:
        indices = torch.arange(places).expand(num_chunks, -1)
    else:
        if len(rows) != input_ids.shape[0]:
            raise ConfigError(f"seq_lens_padded has {len(rows)} rows, but input_ids {input_ids.shape[0]}")
        per = len(rows) // num_chunks
        chunks = [[n for row in rows[i : i + per] for n in row] for i in range(0, len(rows), per)]
        indices = torch.stack([_share(n, chunk, places, size, rank) for n, chunk in enumerate(chunks)])
    indices = indices.contiguous().to(input_ids.device)
    return indices[0] if num_chunks == 1 else indices


def _share(chunk: int, lengths: list[int], places: int, size: int, rank: int) -> Tensor:
    if min(lengths, default=0) <= 0:
        raise ConfigError(f"chunk {chunk}: the lengths of documents (seq_lens_padded) must be positive, got {lengths}")
    if sum(lengths) != places:
        raise ConfigError(
            f"chunk {chunk}: seq_lens_padded {lengths} sum to {sum(lengths)}, but the chunk has {places} tokens"
        )
    return thd_partition(cumulative(lengths), size, rank)


def shard_batch_for_mimo_te(
    cp_mesh: DeviceMesh | None,
    tp_mesh: DeviceMesh | None,  # noqa: ARG001 - the protocol of strategies
    batch: Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    image_token_id: int | None = None,
    video_token_id: int | None = None,
) -> tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any], ShardLayout | None]:
    """This rank's share of a packed batch of rows, as `make_cp_batch_for_te` describes both.

    The attention of `model` (a whole one or a pipeline stage) is first set up for the ranks of `cp_mesh`. To the batch
    come `_mimo_thd_local_indices` int64 [T / R] (or [N, T / R]) and, for each media token id that is given, a mask
    bool [T] (or [N, T]) of its places in the whole stream. The media of pipeline chunks (`_vlm_pp_media_chunks`) are no
    token tensors and pass as the object they are. `padding_token_id` fills padding; padding is found by the lengths.

    Returns a factory of contexts that do nothing, the new batch, and its layout (None for several chunks).

    Raises ConfigError (a ValueError) for an external `loss_mask`, a batch that is not packed (thd), several chunks with
    mRoPE positions, and as `make_cp_batch_for_te` and `setup_mimo_te_context_parallel`; KeyError for missing lengths.
    """
    if loss_mask is not None:
        raise ConfigError(
            f"a packed batch has its loss mask in the labels (-100 = no loss), so a loss_mask of its own (shape "
            f"{list(loss_mask.shape)}) is not supported: pass None"
        )
    _require_packed(batch)
    positions = batch.get("position_ids")
    if num_chunks > 1 and positions is not None and positions.dim() != 2:
        raise ConfigError(
            f"num_chunks {num_chunks} needs position_ids [batch, sequence], got shape {list(positions.shape)}"
        )
    if batch.get("seq_lens_padded") is None:
        raise KeyError("seq_lens_padded is missing: a packed batch lists the lengths of the documents of every row")
    if model is not None:
        ensure_mimo_te_context_parallel(model, cp_mesh)
    extras = {
        _MIMO_GLOBAL_IMAGE_MASK: _media_mask(batch["input_ids"], image_token_id, num_chunks),
        _MIMO_GLOBAL_VIDEO_MASK: _media_mask(batch["input_ids"], video_token_id, num_chunks),
        _MIMO_THD_LOCAL_INDICES: _chunk_partition_indices(batch, cp_mesh, num_chunks, _SEQ_LENS_PADDING_VALUE),
        _VLM_PP_MEDIA_KEY: batch.get(_VLM_PP_MEDIA_KEY),
    }
    tokens = {key: value for key, value in batch.items() if key not in extras}
    shared, indices = make_cp_batch_for_te(
        cp_mesh,
        tokens,
        padding_token_id=padding_token_id,
        num_chunks=num_chunks,
        seq_lens_padding_value=_SEQ_LENS_PADDING_VALUE,
        return_local_indices=True,
    )
    shared.update({key: value for key, value in extras.items() if value is not None})
    return nullcontext, shared, packed_layout(batch, indices, place_in(cp_mesh)[0])


def make_mimo_te_cp_sharder(
    *, model: nn.Module, num_chunks: int, image_token_id: int | None, video_token_id: int | None
) -> ContextParallelSharder:
    """A sharder in strategy mode around `shard_batch_for_mimo_te`. It has no mesh: a sharder in resolve mode takes its
    strategy and brings the mesh."""
    strategy = partial(
        shard_batch_for_mimo_te,
        model=model,
        num_chunks=num_chunks,
        image_token_id=image_token_id,
        video_token_id=video_token_id,
    )
    return ContextParallelSharder(shard_batch=strategy)


def prepare_inputs(model: nn.Module, config: Any, batch: Mapping[str, Any], num_chunks: int) -> dict[str, Any]:
    """{"cp_sharder": ...} for a packed batch; weights and layers are not touched before it cuts a batch.

    The ids of placeholders are those of the model's config, where it has them. Raises ConfigError for other batches.
    """
    _require_packed(batch)
    sharder = make_mimo_te_cp_sharder(
        model=model,
        num_chunks=num_chunks,
        image_token_id=getattr(config, "image_token_id", None),  # keys that only configs with media have
        video_token_id=getattr(config, "video_token_id", None),
    )
    return {"cp_sharder": sharder}


def without_media_places(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass without what `shard_batch_for_mimo_te` adds for media: the decoder has no use
    for it."""
    places = (_MIMO_GLOBAL_IMAGE_MASK, _MIMO_GLOBAL_VIDEO_MASK, _MIMO_THD_LOCAL_INDICES)
    return {key: value for key, value in arguments.items() if key not in places}


def local_modal_feature_indices(global_mask: Tensor | None, local_indices: Tensor | None) -> Tensor | None:
    """For each placeholder of this rank, in its order, the row of the features of all placeholders: int64.

    global_mask: bool [T] or [1, T], placeholders in the whole stream; None gives None. local_indices: int64 [T / R] or
    [1, T / R]. Raises ConfigError (a ValueError) without indices or for one outside of the mask.
    """
    if global_mask is None:
        return None
    if local_indices is None:
        raise ConfigError(
            "a mask of media placeholders requires TE local-token global indices: cut the batch with the model's "
            "context-parallel sharder"
        )
    mask, indices = global_mask.reshape(-1), local_indices.reshape(-1)
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < mask.numel():
        raise ConfigError(
            f"local indices reach from {int(indices.min())} to {int(indices.max())}, but the mask has {mask.numel()} "
            "places"
        )
    rows = mask.cumsum(0) - 1
    return rows[indices[mask[indices]]]


def _require_packed(batch: Mapping[str, Any]) -> None:
    given = batch.get("qkv_format")
    if given != "thd":
        raise ConfigError(
            f"context parallelism needs packed documents with qkv_format 'thd', the batch has {given!r}: set "
            "packing_strategy: thd (data.packing: true in a recipe)"
        )
